//! Whether jobs may name Python functions of this machine as rewards, which ones, and whose jobs.

use std::path::{Path, PathBuf};

use clap::Args;

use super::ConfigError;

/// Flags of rewards that are Python functions.
#[derive(Debug, Clone, Args)]
pub struct PythonRewardsArgs {
    /// Folders of Python files that jobs may name as rewards ({"type": "python"}), comma-separated. Workers run these files as the
    /// user who runs the worker, without a sandbox: whoever may submit jobs and write into these folders may run anything. Default:
    /// none, and such rewards are refused. RLOOD_PYTHON names the Python; python3 otherwise.
    #[arg(long, env = "RLOOD_PYTHON_REWARDS", value_delimiter = ',', value_name = "DIR,…")]
    pub python_rewards: Option<Vec<PathBuf>>,

    /// With keys: the names or ids of the keys whose jobs may have such rewards, comma-separated; the word operator stands for
    /// RLOOD_API_KEY. Default: no key. Without keys it says nothing.
    #[arg(long, env = "RLOOD_PYTHON_REWARDS_KEYS", value_delimiter = ',', value_name = "NAME,…")]
    pub python_rewards_keys: Option<Vec<String>>,
}

/// Which Python functions may be rewards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PythonRewards {
    /// Canonical; empty = none may.
    pub folders: Vec<PathBuf>,
    /// Names and ids of keys.
    pub keys: Vec<String>,
}

impl PythonRewardsArgs {
    /// Checks the folders.
    ///
    /// # Errors
    /// When one is not a directory, or keys are named and no folder is.
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
            let detail = "--python-rewards-keys says whose jobs may have Python rewards, and no folder has them: add --python-rewards DIR";
            return Err(ConfigError::new(detail));
        }
        Ok(PythonRewards { folders, keys })
    }
}

impl PythonRewards {
    /// Whether a canonical path lies in one of the folders.
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
