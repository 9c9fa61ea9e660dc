//! The file of profiles, `$XDG_CONFIG_HOME/rlood/config.toml`, and which job each profile submitted last.
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

/// Where a server is and how to be allowed in.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// The server's address.
    pub server: String,
    /// The key.
    pub key: Option<String>,
    /// A command of the shell whose first line of output is the key.
    pub key_command: Option<String>,
    /// Certificates (PEM) of an authority to trust beside the system's.
    pub ca_file: Option<PathBuf>,
}

/// The file of profiles, with what else stands in it.
#[derive(Debug)]
pub struct Profiles {
    path: PathBuf,
    table: Table,
}

impl Profiles {
    /// Reads the file; it may be missing.
    ///
    /// # Errors
    /// When it cannot be read or is not TOML.
    pub fn open() -> Result<Self, CliError> {
        Self::read(&folder("XDG_CONFIG_HOME", ".config")?.join("config.toml"))
    }

    #[cfg(test)]
    pub(crate) fn empty() -> Self {
        Self { path: PathBuf::new(), table: Table::new() }
    }

    fn read(path: &Path) -> Result<Self, CliError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(CliError::Usage(format!("cannot read {}: {error}", path.display()))),
        };
        // The text may hold keys: what is said of it quotes none of it.
        let table = text.parse::<Table>().map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            CliError::Usage(format!("{} is not valid TOML (line {line}): {}", path.display(), error.message()))
        })?;
        Ok(Self { path: path.to_owned(), table })
    }

    /// The names of all profiles.
    pub fn names(&self) -> Vec<&str> {
        self.table
            .get(PROFILES)
            .and_then(Value::as_table)
            .map_or_else(Vec::new, |all| all.keys().map(String::as_str).collect())
    }

    /// The name of the profile that is used when none is named.
    pub fn default_name(&self) -> Option<&str> {
        self.table.get(DEFAULT).and_then(Value::as_str)
    }

    /// A profile by its name.
    ///
    /// # Errors
    /// When there is none, or it has no server.
    pub fn get(&self, name: &str) -> Result<Profile, CliError> {
        let Some(profile) = self.table.get(PROFILES).and_then(|all| all.get(name)) else {
            let names = self.names().join(", ");
            let known = if names.is_empty() {
                "there is none yet: `rlood login URL` makes one".to_owned()
            } else {
                format!("there are: {names}")
            };
            return Err(CliError::Usage(format!("there is no profile '{name}' in {}; {known}", self.path.display())));
        };
        let text = |key: &str| match profile.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.wrong(name, &format!("{key} must be a string"))),
        };
        let server = text("server")?.ok_or_else(|| self.wrong(name, "server is missing"))?;
        let (key, key_command) = (text("key")?, text("key_command")?);
        if key.is_some() && key_command.is_some() {
            return Err(self.wrong(name, "give key or key_command, not both"));
        }
        Ok(Profile { server, key, key_command, ca_file: text("ca_file")?.map(PathBuf::from) })
    }

    fn wrong(&self, name: &str, what: &str) -> CliError {
        CliError::Usage(format!("{}: profile '{name}': {what}", self.path.display()))
    }

    /// The first profile of this server.
    pub fn of_server(&self, server: &str) -> Option<(String, Profile)> {
        let is_it = |profile: &Profile| profile.server.trim_end_matches('/') == server.trim_end_matches('/');
        self.names().into_iter().find_map(|name| Some((name.to_owned(), self.get(name).ok().filter(is_it)?)))
    }

    /// Adds or replaces a profile. The first one is the default.
    pub fn put(&mut self, name: &str, profile: &Profile) {
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

    /// Makes a profile the default.
    pub fn set_default(&mut self, name: &str) {
        self.table.insert(DEFAULT.to_owned(), name.into());
    }

    /// Removes a profile; one that was the default leaves none.
    pub fn remove(&mut self, name: &str) {
        if let Some(all) = self.table.get_mut(PROFILES).and_then(Value::as_table_mut) {
            all.remove(name);
        }
        if self.default_name() == Some(name) {
            self.table.remove(DEFAULT);
        }
    }

    /// Writes the file, which only its owner may read.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self) -> Result<&Path, CliError> {
        write_private(&self.path, self.table.to_string().as_bytes())?;
        Ok(&self.path)
    }
}

/// The job that was submitted last from here to a server with a profile.
///
/// # Errors
/// When there is none.
pub fn last_job(target: &str) -> Result<String, CliError> {
    let none = || CliError::NotFound(format!("@last: no job was submitted from here to {target} yet"));
    let text =
        std::fs::read_to_string(folder("XDG_STATE_HOME", ".local/state")?.join("last.toml")).map_err(|_| none())?;
    let table = text.parse::<Table>().map_err(|_| none())?;
    table.get(target).and_then(Value::as_str).map(str::to_owned).ok_or_else(none)
}

/// Keeps the job that was submitted last.
///
/// # Errors
/// When it cannot be written.
pub fn keep_last_job(target: &str, job: &str) -> Result<(), CliError> {
    keep("last.toml", target, job)
}

/// Reads a value of a table among the state of this user.
pub fn kept(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(folder("XDG_STATE_HOME", ".local/state").ok()?.join(file)).ok()?;
    text.parse::<Table>().ok()?.get(name)?.as_str().map(str::to_owned)
}

/// Keeps a value in a table among the state of this user.
///
/// # Errors
/// When it cannot be written.
pub fn keep(file: &str, name: &str, value: &str) -> Result<(), CliError> {
    let path = folder("XDG_STATE_HOME", ".local/state")?.join(file);
    // A table that is damaged holds nothing that is needed.
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let mut table = text.parse::<Table>().unwrap_or_default();
    table.insert(name.to_owned(), value.into());
    write_private(&path, table.to_string().as_bytes())
}

/// `rlood` in the folder of a variable of the XDG directories, or in this one below the user's home.
fn folder(variable: &str, below_home: &str) -> Result<PathBuf, CliError> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(below_home)));
    let missing = || CliError::Usage(format!("neither {variable} nor HOME names a folder: set one of them"));
    Ok(base.ok_or_else(missing)?.join("rlood"))
}

/// Replaces a file whole; it and the folder that is made for it are for their owner alone.
fn write_private(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let failed = || CliError::local(format!("write {}", path.display()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed())?;
    // A link, as dotfiles often are, stays one.
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
    fn profiles_are_kept_for_their_owner_alone_and_the_first_is_the_default() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rlood/config.toml");
        let mut profiles = Profiles::read(&path).unwrap();
        profiles.put("a", &profile("http://a:8080"));
        profiles.put("b", &profile("http://b:8080/"));
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
        assert!(missing.contains("no profile 'a'") && missing.contains("there are: b"), "{missing}");
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
        for (name, expected) in [("a", "server must be a string"), ("b", "not both")] {
            let error = profiles.get(name).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
