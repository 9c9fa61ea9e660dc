//! `rlood profile`: list, use, remove.

use clap::{Args, Subcommand};
use serde_json::json;

use crate::error::CliError;
use crate::output::{Color, Out, Table, clean, note};
use crate::profiles::Profiles;

/// Flags of `rlood profile`.
#[derive(Debug, Clone, Args)]
pub struct Profile {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// The actions of `rlood profile`.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// List the profiles, without their keys.
    List {
        /// Print JSON to standard output.
        #[arg(long)]
        json: bool,
    },
    /// Make a profile the default one.
    Use {
        /// The profile's name.
        name: String,
    },
    /// Remove a profile and its key from this machine. The key stays valid: `rlood keys revoke` ends it.
    Remove {
        /// The profile's name.
        name: String,
    },
}

/// # Errors
/// When the file of profiles cannot be read or written, or has no such profile.
pub fn run(args: &Profile) -> Result<u8, CliError> {
    let mut profiles = Profiles::open()?;
    match &args.action {
        Action::List { json } => list(&profiles, &Out::new(*json, Color::Auto))?,
        Action::Use { name } => {
            let profile = profiles.get(name)?;
            profiles.set_default(name);
            profiles.save()?;
            note(format!("'{name}' is the default profile: {}", profile.server));
        }
        Action::Remove { name } => {
            let was_default = profiles.default_name() == Some(name);
            profiles.get(name)?;
            profiles.remove(name);
            profiles.save()?;
            let what =
                if was_default { "; no profile is the default now: `rlood profile use NAME` chooses one" } else { "" };
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
        out.note("there is no profile yet: `rlood login URL` makes one");
        return Ok(());
    }
    table.print(out)
}
