//! Settings of Python rewards: which files jobs may use, and which keys may use them.

use std::path::{Path, PathBuf};

use clap::Args;

use super::ConfigError;

/// Flags of Python rewards.
#[derive(Debug, Clone, Args)]
pub struct PythonRewardsArgs {
    /// Folders with Python files that jobs may use as rewards ({"type": "python"}), comma-separated. Workers run these files
    /// without a sandbox, as the user who runs the worker: anyone who can submit jobs and write to these folders can run arbitrary
    /// code. Default: none; such rewards are refused. RLOOD_PYTHON sets the Python interpreter; otherwise python3.
    #[arg(long, env = "RLOOD_PYTHON_REWARDS", value_delimiter = ',', value_name = "DIR,…")]
    pub python_rewards: Option<Vec<PathBuf>>,

    /// Names or ids of the keys whose jobs may use Python rewards, for a server with keys, comma-separated; operator stands
    /// for RLOOD_API_KEY and for jobs that were submitted before the first key existed. Default: no key. Without keys the
    /// flag has no effect.
    #[arg(long, env = "RLOOD_PYTHON_REWARDS_KEYS", value_delimiter = ',', value_name = "NAME,…")]
    pub python_rewards_keys: Option<Vec<String>>,
}

/// Validated settings of Python rewards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PythonRewards {
    /// Canonical paths of the folders; empty = Python rewards are refused.
    pub folders: Vec<PathBuf>,
    /// Names and ids of the permitted keys.
    pub keys: Vec<String>,
}

impl PythonRewardsArgs {
    /// Checks that the folders of `--python-rewards` exist, and returns the validated settings.
    ///
    /// # Errors
    /// Fails when a path is not a directory, or `--python-rewards-keys` is set without a folder.
    pub fn resolve(&self) -> Result<PythonRewards, ConfigError> {
        let given = self.python_rewards.iter().flatten().filter(|folder| !folder.as_os_str().is_empty());
        let canonical = given.map(|folder| {
            let wrong = |why: &dyn std::fmt::Display| {
                ConfigError::new(format!("--python-rewards {}: {why}; name an existing directory", folder.display()))
            };
            let found = folder.canonicalize().map_err(|error| wrong(&error))?;
            if found.is_dir() { Ok(found) } else { Err(wrong(&"not a directory")) }
        });
        let folders = canonical.collect::<Result<Vec<_>, _>>()?;
        let names = self.python_rewards_keys.iter().flatten().map(|name| name.trim().to_owned());
        let keys: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        if folders.is_empty() && !keys.is_empty() {
            let detail = "--python-rewards-keys is set without a folder of reward functions: add --python-rewards DIR";
            return Err(ConfigError::new(detail));
        }
        Ok(PythonRewards { folders, keys })
    }
}

impl PythonRewards {
    /// Whether a canonical path is in one of the folders.
    pub fn holds(&self, path: &Path) -> bool {
        self.folders.iter().any(|folder| path.starts_with(folder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(folders: &[&Path], keys: &[&str]) -> Result<PythonRewards, String> {
        let args = PythonRewardsArgs {
            python_rewards: Some(folders.iter().map(|folder| folder.to_path_buf()).collect()),
            python_rewards_keys: Some(keys.iter().map(|&key| key.to_owned()).collect()),
        };
        args.resolve().map_err(|error| error.to_string())
    }

    #[test]
    fn folders_exist_and_keys_need_one() {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, file) = (scratch.path().join("a"), scratch.path().join("f.py"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&file, "").unwrap();
        let python = resolve(&[&folder], &[" alice ", ""]).unwrap();
        assert_eq!(python.keys, ["alice"]);
        assert!(python.holds(&folder.canonicalize().unwrap().join("x.py")));
        assert!(!python.holds(&scratch.path().canonicalize().unwrap().join("ab/x.py")));
        assert!(resolve(&[&file], &[]).unwrap_err().contains("not a directory"));
        assert!(resolve(&[&folder.join("no")], &[]).unwrap_err().contains("--python-rewards"));
        assert!(resolve(&[], &["alice"]).unwrap_err().contains("add --python-rewards DIR"));
        assert_eq!(resolve(&[], &[]).unwrap(), PythonRewards::default());
    }
}
