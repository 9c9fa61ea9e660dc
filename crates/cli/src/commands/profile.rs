//! `rlood profile`: lists profiles, sets the default profile, and removes profiles.

use clap::{Args, Subcommand};
use serde_json::json;

use crate::error::CliError;
use crate::output::{Color, Out, Table, clean, note};
use crate::profiles::Profiles;

/// Flags of `rlood profile`.
#[derive(Debug, Clone, Args)]
pub struct Profile {
    /// The action to run.
    #[command(subcommand)]
    pub action: Action,
}

/// The actions of `rlood profile`.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// List the profiles. Keys are not shown.
    List {
        /// Print JSON to standard output.
        #[arg(long)]
        json: bool,
    },
    /// Set the default profile.
    Use {
        /// Name of the profile.
        name: String,
    },
    /// Remove a profile and its key from this machine. The key stays valid until it is revoked with `rlood keys revoke`.
    Remove {
        /// Name of the profile.
        name: String,
    },
}

/// # Errors
/// Fails when the file of profiles cannot be read or written, or does not contain the profile.
pub fn run(args: &Profile) -> Result<u8, CliError> {
    let mut profiles = Profiles::open()?;
    match &args.action {
        Action::List { json } => list(&profiles, &Out::new(*json, Color::Auto))?,
        Action::Use { name } => {
            let profile = profiles.get(name)?;
            profiles.set_default(name);
            profiles.save()?;
            note(format!("'{name}' is now the default profile, for {}", profile.server));
        }
        Action::Remove { name } => {
            let was_default = profiles.default_name() == Some(name);
            profiles.get(name)?;
            profiles.remove(name);
            profiles.save()?;
            let what = if was_default {
                "; there is no default profile now, set one with `rlood profile use NAME`"
            } else {
                ""
            };
            note(format!("removed '{name}'{what}"));
        }
    }
    Ok(0)
}

fn list(profiles: &Profiles, out: &Out) -> Result<(), CliError> {
    let mut table = Table::new(&["", "name", "server", "key"]);
    let mut documents = Vec::new();
    for name in profiles.names() {
        let is_default = profiles.default_name() == Some(name);
        let profile = profiles.get(name)?;
        let key = match (&profile.key, &profile.key_command) {
            (Some(_), _) => "stored",
            (None, Some(_)) => "command",
            (None, None) => "none",
        };
        documents.push(json!({"name": name, "server": profile.server, "key": key, "default": is_default}));
        let mark = if is_default { "*" } else { "" };
        table.row([mark.to_owned(), clean(name), clean(&profile.server), key.to_owned()]);
    }
    if out.json {
        return out.json(&json!({"data": documents}).to_string());
    }
    if documents.is_empty() {
        out.note("there are no profiles yet; create one with `rlood login URL`");
        return Ok(());
    }
    table.print(out)
}
