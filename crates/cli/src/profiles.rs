//! The file with the profiles of `rlood login`, `$XDG_CONFIG_HOME/rlood/config.toml`, and the job that was submitted
//! last with each profile.
//!
//! ```toml
//! default = "prod"
//!
//! [profiles.prod]
//! server = "https://rlood.example.com"
//! key_command = "pass show rlood"   # or key = "rld_…"
//! ca_file = "/etc/ssl/company.pem"
//! ```

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::error::CliError;

const DEFAULT: &str = "default";
const PROFILES: &str = "profiles";

/// A profile: the address of a server, and the credentials for it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Address of the server.
    pub server: String,
    /// API key, if the profile stores it.
    pub key: Option<String>,
    /// Shell command whose first line of output is the API key.
    pub key_command: Option<String>,
    /// PEM file with certificates to trust in addition to the system's.
    pub ca_file: Option<PathBuf>,
}

/// The parsed file with the profiles. Fields that this program does not know are preserved.
#[derive(Debug)]
pub struct Profiles {
    /// Path of the file; `None` = the user has neither a configuration folder nor a home.
    path: Option<PathBuf>,
    table: Table,
}

impl Profiles {
    /// Reads the file with the profiles. A missing file, or a user without a home, counts as a file without profiles.
    ///
    /// # Errors
    /// Fails when the file with the profiles cannot be read or is not valid TOML.
    pub fn open() -> Result<Self, CliError> {
        match config_folder() {
            Ok(folder) => Self::read(&folder.join("config.toml")),
            Err(_) => Ok(Self::empty()),
        }
    }

    pub(crate) fn empty() -> Self {
        Self { path: None, table: Table::new() }
    }

    fn read(path: &Path) -> Result<Self, CliError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(CliError::Usage(format!("cannot read {}: {error}", path.display()))),
        };
        // The file may contain API keys, so the error message must not quote it.
        let table = text.parse::<Table>().map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            CliError::Usage(format!("{} is not valid TOML (line {line}): {}", path.display(), error.message()))
        })?;
        Ok(Self { path: Some(path.to_owned()), table })
    }

    /// Returns the names of all profiles.
    pub fn names(&self) -> Vec<&str> {
        self.table
            .get(PROFILES)
            .and_then(Value::as_table)
            .map_or_else(Vec::new, |all| all.keys().map(String::as_str).collect())
    }

    /// Returns the name of the default profile.
    pub fn default_name(&self) -> Option<&str> {
        self.table.get(DEFAULT).and_then(Value::as_str)
    }

    /// Returns a profile by its name.
    ///
    /// # Errors
    /// Fails when the profile does not exist or has no server.
    pub fn get(&self, name: &str) -> Result<Profile, CliError> {
        let Some(profile) = self.table.get(PROFILES).and_then(|all| all.get(name)) else {
            let names = self.names().join(", ");
            let known = if names.is_empty() {
                "there are no profiles yet, create one with `rlood login URL`".to_owned()
            } else {
                format!("known profiles: {names}")
            };
            let place = self.path.as_ref().map(|path| format!(" in {}", path.display())).unwrap_or_default();
            return Err(CliError::Usage(format!("profile '{name}' not found{place}; {known}")));
        };
        let text = |key: &str| match profile.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.invalid(name, &format!("{key} must be a string"))),
        };
        let server = text("server")?.ok_or_else(|| self.invalid(name, "server is required"))?;
        let (key, key_command) = (text("key")?, text("key_command")?);
        if key.is_some() && key_command.is_some() {
            return Err(self.invalid(name, "key and key_command cannot both be set"));
        }
        Ok(Profile { server, key, key_command, ca_file: text("ca_file")?.map(PathBuf::from) })
    }

    fn invalid(&self, name: &str, what: &str) -> CliError {
        let place = self.path.as_ref().map(|path| format!("{}: ", path.display())).unwrap_or_default();
        CliError::Usage(format!("{place}profile '{name}': {what}"))
    }

    /// Returns the first profile for a server's address.
    pub fn of_server(&self, server: &str) -> Option<(String, Profile)> {
        let is_of_server = |profile: &Profile| profile.server.trim_end_matches('/') == server.trim_end_matches('/');
        self.names().into_iter().find_map(|name| Some((name.to_owned(), self.get(name).ok().filter(is_of_server)?)))
    }

    /// Adds or replaces a profile. The first profile becomes the default.
    pub fn insert(&mut self, name: &str, profile: &Profile) {
        let Profile { server, key, key_command, ca_file } = profile;
        let mut table = Table::new();
        table.insert("server".to_owned(), server.clone().into());
        let ca_file = ca_file.as_ref().map(|path| path.to_string_lossy().into_owned());
        for (field, value) in [("key", key), ("key_command", key_command), ("ca_file", &ca_file)] {
            if let Some(value) = value {
                table.insert(field.to_owned(), value.clone().into());
            }
        }
        let all = self.table.entry(PROFILES).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(all) = all {
            all.insert(name.to_owned(), Value::Table(table));
        }
        if self.default_name().is_none() {
            self.set_default(name);
        }
    }

    /// Sets the default profile.
    pub fn set_default(&mut self, name: &str) {
        self.table.insert(DEFAULT.to_owned(), name.into());
    }

    /// Removes a profile. If it was the default profile, there is no default afterwards.
    pub fn remove(&mut self, name: &str) {
        if let Some(all) = self.table.get_mut(PROFILES).and_then(Value::as_table_mut) {
            all.remove(name);
        }
        if self.default_name() == Some(name) {
            self.table.remove(DEFAULT);
        }
    }

    /// Writes the file with the profiles, readable only by its owner, and returns its path.
    ///
    /// # Errors
    /// Fails when the user has no home, or the file with the profiles cannot be written.
    pub fn save(&self) -> Result<PathBuf, CliError> {
        let path = match &self.path {
            Some(path) => path.clone(),
            None => config_folder()?.join("config.toml"),
        };
        write_private(&path, self.table.to_string().as_bytes())?;
        Ok(path)
    }
}

/// Returns the job that was submitted last from this machine to a server.
///
/// # Errors
/// Returns `NotFound` when no job was submitted yet.
pub fn last_job(target: &str) -> Result<String, CliError> {
    let none = || CliError::NotFound(format!("@last: no job was submitted from this machine to {target} yet"));
    read_state("last.toml", target).ok_or_else(none)
}

/// Records a job as the one that was submitted last to a server.
///
/// # Errors
/// Fails when the file cannot be written.
pub fn save_last_job(target: &str, job: &str) -> Result<(), CliError> {
    write_state("last.toml", target, job)
}

/// Reads a value from a file in the user's state directory.
pub fn read_state(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(state_folder().ok()?.join(file)).ok()?;
    text.parse::<Table>().ok()?.get(name)?.as_str().map(str::to_owned)
}

/// Writes a value to a file in the user's state directory.
///
/// # Errors
/// Fails when the file cannot be written.
pub fn write_state(file: &str, name: &str, value: &str) -> Result<(), CliError> {
    let path = state_folder()?.join(file);
    // A damaged state file is replaced: its values can be found again.
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let mut table = text.parse::<Table>().unwrap_or_default();
    table.insert(name.to_owned(), value.into());
    write_private(&path, table.to_string().as_bytes())
}

fn config_folder() -> Result<PathBuf, CliError> {
    folder("XDG_CONFIG_HOME", ".config")
}

fn state_folder() -> Result<PathBuf, CliError> {
    folder("XDG_STATE_HOME", ".local/state")
}

/// Returns the folder `rlood` in an XDG directory (config or state), or in the directory's default location below the user's home.
fn folder(variable: &str, below_home: &str) -> Result<PathBuf, CliError> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(below_home)));
    let missing = || CliError::Usage(format!("{variable} or HOME must be set to an absolute path"));
    Ok(base.ok_or_else(missing)?.join("rlood"))
}

/// Replaces a file atomically. The file, and folders created for it, are accessible only by their owner.
fn write_private(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let failed = || CliError::local(format!("write {}", path.display()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed())?;
    // A symbolic link, as is common for dotfiles, is kept: its target is replaced.
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut file = tempfile::NamedTempFile::new_in(target.parent().unwrap_or(folder)).map_err(failed())?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o600)).map_err(failed())?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(failed())?;
    file.persist(&target).map_err(|error| failed()(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(server: &str) -> Profile {
        Profile { server: server.to_owned(), key: Some("rld_secret".to_owned()), ..Profile::default() }
    }

    #[test]
    fn profiles_are_private_to_their_owner_and_the_first_is_the_default() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rlood/config.toml");
        let mut profiles = Profiles::read(&path).unwrap();
        profiles.insert("a", &profile("http://a:8080"));
        profiles.insert("b", &profile("http://b:8080/"));
        profiles.save().unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let mut profiles = Profiles::read(&path).unwrap();
        assert_eq!((profiles.names(), profiles.default_name()), (vec!["a", "b"], Some("a")));
        assert_eq!(profiles.of_server("http://b:8080").unwrap().0, "b");
        profiles.remove("a");
        profiles.save().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let profiles = Profiles::read(&path).unwrap();
        assert_eq!((profiles.names(), profiles.default_name()), (vec!["b"], None));
        let missing = profiles.get("a").err().unwrap().to_string();
        assert!(missing.contains("profile 'a' not found") && missing.contains("known profiles: b"), "{missing}");
    }

    #[test]
    fn a_file_that_is_not_valid_is_described_without_its_keys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, "[profiles.a]\nkey = rld_secret\n").unwrap();
        let error = Profiles::read(&path).unwrap_err().to_string();
        assert!(error.contains("line 2") && !error.contains("rld_secret"), "{error}");
        std::fs::write(
            &path,
            "[profiles.a]\nserver = 7\n[profiles.b]\nserver = \"x\"\nkey = \"k\"\nkey_command = \"c\"\n",
        )
        .unwrap();
        let profiles = Profiles::read(&path).unwrap();
        for (name, expected) in [("a", "server must be a string"), ("b", "cannot both be set")] {
            let error = profiles.get(name).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
