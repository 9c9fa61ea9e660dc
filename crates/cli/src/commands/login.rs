//! `rlood login`: checks a server's address and API key, and saves them as a profile.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::context::client_of;
use crate::error::CliError;
use crate::output::{Color, Out, clean};
use crate::profiles::{Profile, Profiles};
use crate::target::Target;

/// Flags of `rlood login`.
#[derive(Debug, Clone, Args)]
pub struct Login {
    /// Address of the server, for example https://rlood.example.com.
    #[arg(value_name = "URL")]
    pub url: String,

    /// Name of the profile. Default: the host name in the address.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// File that contains the API key; `-` reads standard input. Default: prompt for the key without echo, or read standard
    /// input when there is no terminal.
    #[arg(long, value_name = "FILE", conflicts_with = "key_command")]
    pub key_file: Option<PathBuf>,

    /// Command whose first line of output is the API key. The command runs each time a key is needed, so that
    /// no file contains the key.
    #[arg(long, value_name = "COMMAND")]
    pub key_command: Option<String>,

    /// PEM file with certificates to trust in addition to the system's, for example of a private certificate authority.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
}

/// # Errors
/// Fails when the server cannot be reached or rejects the key.
pub async fn run(args: &Login) -> Result<u8, CliError> {
    let Login { url, name, key_file, key_command, ca_file } = args;
    let out = Out::new(false, Color::Auto);
    let server = url.trim_end_matches('/').to_owned();
    let ca_file = ca_file.as_ref().map(std::path::absolute).transpose().map_err(CliError::local("read --ca-file"))?;
    let mut profile = Profile { server: server.clone(), key: None, key_command: key_command.clone(), ca_file };
    profile.key = match key_file {
        Some(path) => Some(read_key(path)?),
        None => None,
    };
    if profile.key.is_none() && profile.key_command.is_none() && needs_key(&profile).await? {
        profile.key = Some(if out.can_ask { ask_key()? } else { piped_key(&server)? });
    }
    let session = client_of(&Target::of_profile(&profile)?)?.raw_get(&["session"]).send().await?.value;
    let name = match name {
        Some(name) => name.clone(),
        None => host(&server).to_owned(),
    };
    let mut profiles = Profiles::open()?;
    if let Some(other) = profiles.get(&name).ok().filter(|other| other.server != server) {
        let other = other.server;
        return Err(CliError::Usage(format!(
            "the profile '{name}' already exists, for {other}: choose another --name, or remove it with `rlood profile remove {name}`"
        )));
    }
    profiles.insert(&name, &profile);
    profiles.set_default(&name);
    let path = profiles.save()?.display().to_string();
    let who = match (session["keys_required"].as_bool(), session["key_name"].as_str()) {
        (Some(false), _) => "without an API key (the server does not require one)".to_owned(),
        (_, Some(key)) => format!("with the key '{}'", clean(key)),
        (_, None) => "with the server operator's key".to_owned(),
    };
    let scopes: Vec<&str> =
        session["scopes"].as_array().into_iter().flatten().filter_map(|scope| scope.as_str()).collect();
    out.note(format!("signed in to {server} {who}; scopes: {}", scopes.join(", ")));
    out.note(format!("saved as the default profile '{name}' in {path}"));
    Ok(0)
}

fn ask_key() -> Result<String, CliError> {
    let mut terminal = console::Term::stderr();
    std::io::Write::write_all(&mut terminal, b"API key: ").map_err(CliError::local("ask for the server's API key"))?;
    trim_key(&terminal.read_secure_line().map_err(CliError::local("read the server's API key"))?)
}

/// Reads the API key from standard input, for scripts.
fn piped_key(server: &str) -> Result<String, CliError> {
    read_key(Path::new("-")).map_err(|_| {
        CliError::Usage(format!(
            "{server} requires an API key: pass it on standard input, or name a file with --key-file"
        ))
    })
}

/// Returns whether the server rejects requests without an API key.
async fn needs_key(profile: &Profile) -> Result<bool, CliError> {
    match client_of(&Target::of_profile(profile)?)?.raw_get(&["session"]).send().await {
        Ok(_) => Ok(false),
        Err(error) if error.status() == Some(401) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn read_key(path: &Path) -> Result<String, CliError> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).map(drop)
    } else {
        std::fs::read_to_string(path).map(|read| text = read)
    };
    read.map_err(|error| {
        CliError::Usage(format!("--key-file: cannot read the API key from {}: {error}", path.display()))
    })?;
    trim_key(text.lines().next().unwrap_or_default())
}

fn trim_key(key: &str) -> Result<String, CliError> {
    match key.trim() {
        "" => Err(CliError::Usage("the API key is empty".to_owned())),
        key => Ok(key.to_owned()),
    }
}

/// Returns the host name in a server's address, the default name of the profile.
fn host(server: &str) -> &str {
    let rest = server.split_once("://").map_or(server, |(_, rest)| rest);
    rest.split(['/', ':']).next().filter(|host| !host.is_empty()).unwrap_or("default")
}
