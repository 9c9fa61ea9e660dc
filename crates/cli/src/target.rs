//! Selects the server that a command connects to, and the API key.
//!
//! The server comes from the first of these that is set: `--server`, `--profile`, `RLOOD_SERVER`, `RLOOD_PROFILE`, the default
//! profile, this machine. The API key comes from `--key`, the profile named by `--profile`, `RLOOD_KEY`, or the selected profile. A
//! profile's key is sent only to the profile's server.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::error::CliError;
use crate::profiles::{Profile, Profiles};

/// Default address of a server that `rlood serve` starts.
pub const LOCAL: &str = "http://127.0.0.1:8080";

/// Values of the flags that select the server and the API key.
#[derive(Default, Clone, Copy)]
pub struct Flags<'a> {
    /// Address given by `--server`.
    pub server: Option<&'a str>,
    /// API key given by `--key`.
    pub key: Option<&'a str>,
    /// Profile name given by `--profile`.
    pub profile: Option<&'a str>,
}

/// Values of the environment variables that select the server and the API key. An empty variable counts as not set.
#[derive(Default)]
pub struct Variables {
    /// Server address in `RLOOD_SERVER`.
    pub server: Option<String>,
    /// API key in `RLOOD_KEY`.
    pub key: Option<String>,
    /// Profile name in `RLOOD_PROFILE`.
    pub profile: Option<String>,
}

impl Variables {
    /// Reads these environment variables of this process.
    pub fn of_environment() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self { server: variable("RLOOD_SERVER"), key: variable("RLOOD_KEY"), profile: variable("RLOOD_PROFILE") }
    }
}

/// The server that a command connects to, with the API key to use for it.
pub struct Target {
    /// Address of the server.
    pub server: String,
    /// API key; `None` sends requests without a key.
    pub key: Option<String>,
    /// PEM file with certificates to trust in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// Name of the profile that the server or the key comes from.
    pub profile: Option<String>,
    /// Whether no flag, variable or profile names a server, so that [`LOCAL`] is used.
    pub is_assumed: bool,
}

impl Target {
    /// Selects the server and the API key by the rules in the module's description.
    ///
    /// # Errors
    /// Fails when a profile does not exist or its key command fails.
    pub fn decide(flags: Flags<'_>, variables: &Variables, profiles: &Profiles) -> Result<Self, CliError> {
        let Flags { server, key, profile } = flags;
        let named = |name: &str| Ok::<_, CliError>((name.to_owned(), profiles.get(name)?));
        let found = match (server, profile) {
            (None, Some(name)) => Some(named(name)?),
            // A profile for another server than --server is rejected, because its key would be sent to the wrong server.
            (Some(server), Some(name)) => {
                let (name, profile) = named(name)?;
                if profile.server.trim_end_matches('/') != server.trim_end_matches('/') {
                    let of = &profile.server;
                    return Err(CliError::Usage(format!(
                        "--profile {name} is for {of}, not for --server {server}: give one of the two"
                    )));
                }
                Some((name, profile))
            }
            (Some(server), None) => profiles.of_server(server),
            (None, None) => match (&variables.server, &variables.profile) {
                (Some(server), _) => profiles.of_server(server),
                (None, Some(name)) => Some(named(name)?),
                (None, None) => profiles.default_name().map(named).transpose()?,
            },
        };
        let explicit = server.map(str::to_owned).or_else(|| variables.server.clone().filter(|_| profile.is_none()));
        let is_assumed = explicit.is_none() && found.is_none();
        let (name, found) = found.map_or((None, Profile::default()), |(name, found)| (Some(name), found));
        let server = explicit.unwrap_or_else(|| if is_assumed { LOCAL.to_owned() } else { found.server.clone() });
        let of_variable = variables.key.clone().filter(|_| profile.is_none());
        let key = match key.map(str::to_owned).or(of_variable) {
            Some(key) => Some(key),
            None => key_of(&found)?,
        };
        Ok(Self { server, key, ca_file: found.ca_file, profile: name, is_assumed })
    }

    /// Creates the target (server and key) of a profile that is not saved yet.
    ///
    /// # Errors
    /// Fails when the profile's key command fails.
    pub fn of_profile(profile: &Profile) -> Result<Self, CliError> {
        let (server, ca_file) = (profile.server.clone(), profile.ca_file.clone());
        Ok(Self { server, key: key_of(profile)?, ca_file, profile: None, is_assumed: false })
    }

    /// Returns the name under which the state for this server and profile, such as the last submitted job, is
    /// stored on this machine.
    pub fn name(&self) -> String {
        match &self.profile {
            Some(profile) => format!("{profile} {}", self.server),
            None => self.server.clone(),
        }
    }
}

/// Returns the API key of a profile; runs its key command if it has one.
fn key_of(profile: &Profile) -> Result<Option<String>, CliError> {
    let Some(command) = &profile.key_command else { return Ok(profile.key.clone()) };
    let output = Command::new("sh").args(["-c", command]).stderr(Stdio::inherit()).stdin(Stdio::inherit()).output();
    let failed = |why: String| CliError::Usage(format!("the profile's key_command '{command}' cannot be used: {why}"));
    let output = output.map_err(|error| failed(format!("the command cannot be run: {error}")))?;
    if !output.status.success() {
        return Err(failed(format!("the command failed: {}", output.status)));
    }
    let text = String::from_utf8(output.stdout)
        .map_err(|_| failed("the command printed text that is not UTF-8".to_owned()))?;
    let key = text.lines().next().map(str::trim).filter(|key| !key.is_empty());
    key.map(|key| Some(key.to_owned()))
        .ok_or_else(|| failed("the command printed nothing; its first line must be the API key".to_owned()))
}

/// Returns whether a server's address is a loopback address, so that the server runs on this machine.
pub fn is_loopback(server: &str) -> bool {
    let rest = server.split_once("://").map_or(server, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or("");
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.split(':').next().unwrap_or(""),
    };
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profiles() -> Profiles {
        let mut profiles = Profiles::empty();
        for (name, key) in [("prod", "prod-key"), ("test", "test-key")] {
            let server = format!("http://{name}");
            profiles.insert(name, &Profile { server, key: Some(key.to_owned()), ..Profile::default() });
        }
        profiles
    }

    fn decide(flags: Flags<'_>, variables: [Option<&str>; 3], profiles: &Profiles) -> (String, Option<String>) {
        let [server, key, profile] = variables.map(|value| value.map(str::to_owned));
        let target = Target::decide(flags, &Variables { server, key, profile }, profiles).unwrap();
        (target.server, target.key)
    }

    #[test]
    fn flags_come_before_variables_and_variables_before_the_file() {
        let profiles = profiles();
        let flags = |server, key, profile| Flags { server, key, profile };
        let none = flags(None, None, None);
        for (given, variables, server, key) in [
            (none, [None; 3], "http://prod", Some("prod-key")),
            (none, [None, Some("k"), None], "http://prod", Some("k")),
            (none, [None, None, Some("test")], "http://test", Some("test-key")),
            (none, [Some("http://other"), None, Some("test")], "http://other", None),
            (none, [Some("http://test/"), None, None], "http://test/", Some("test-key")),
            (flags(None, None, Some("test")), [Some("http://other"), Some("k"), None], "http://test", Some("test-key")),
            (flags(Some("http://else"), None, None), [Some("http://prod"), Some("k"), None], "http://else", Some("k")),
            (flags(Some("http://else"), Some("mine"), None), [None, Some("k"), None], "http://else", Some("mine")),
            (flags(Some("http://else"), None, None), [None; 3], "http://else", None),
        ] {
            let expected = (server.to_owned(), key.map(str::to_owned));
            assert_eq!(decide(given, variables, &profiles), expected, "{variables:?}");
        }
        let nothing = Target::decide(none, &Variables::default(), &Profiles::empty()).unwrap();
        assert!(nothing.is_assumed && nothing.server == LOCAL && nothing.key.is_none());
        let both = flags(Some("http://else"), None, Some("test"));
        assert!(Target::decide(both, &Variables::default(), &profiles).is_err());
    }

    #[test]
    fn the_first_line_of_a_key_command_is_the_key() {
        let with = |command: &str| Profile { key_command: Some(command.to_owned()), ..Profile::default() };
        assert_eq!(key_of(&with("printf ' rld_x \\nmore\\n'")).unwrap().as_deref(), Some("rld_x"));
        for bad in ["exit 3", "true", "/no/such/program 2>/dev/null"] {
            assert!(key_of(&with(bad)).unwrap_err().to_string().contains(bad), "{bad}");
        }
    }

    #[test]
    fn a_loopback_address_is_recognized_by_its_host() {
        for server in ["http://localhost:1", "http://127.0.0.1", "http://[::1]:80/x", "https://127.1.2.3:4"] {
            assert!(is_loopback(server), "{server}");
        }
        for server in ["http://localhost.example.com", "http://10.0.0.1:8080", "http://[::2]"] {
            assert!(!is_loopback(server), "{server}");
        }
    }
}
