//! Publishes adapters to rollout servers in a folder that worker and servers share.
//!
//! A directory is complete before it gets its name, and its name contains the hash of the weights: a name never stands for other
//! weights, on disk or in a server's cache. A directory is deleted only after every server has unloaded the adapter, because vLLM
//! reads it again when the adapter has left its cache, and dies if it is gone.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::digest::Sha256Digest;
use crate::id::JobId;

/// The files of a PEFT adapter.
pub(super) const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
/// Number of hexadecimal digits of the weights' SHA-256 in a name.
const HASH_DIGITS: usize = 12;

/// Returns the beginning of the names of a job's adapters.
pub(super) fn prefix(job: JobId) -> String {
    format!("rlood-{job}-")
}

/// Returns the name of an adapter: job, attempt, step, and the beginning of the SHA-256 of its weights.
pub(super) fn name(job: JobId, attempt: u64, step: u64, weights: &[u8]) -> String {
    let hash = Sha256Digest::of(weights).to_string();
    format!("{}a{attempt}-s{step}-{}", prefix(job), &hash[..HASH_DIGITS])
}

/// Copies an adapter into the shared folder under its name; returns its directory. A directory of that name is complete already.
///
/// # Errors
/// Fails if a file cannot be read or written.
pub(super) fn publish(folder: &Path, name: &str, adapter: &Path) -> io::Result<PathBuf> {
    let target = folder.join(name);
    if target.is_dir() {
        return Ok(target);
    }
    fs::create_dir_all(folder)?;
    // Dropped without its name, the temporary directory is removed again.
    let temporary = tempfile::Builder::new().prefix(".tmp-").tempdir_in(folder)?;
    for file in FILES {
        let path = temporary.path().join(file);
        fs::copy(adapter.join(file), &path)?;
        File::open(&path)?.sync_all()?;
    }
    set_readable(temporary.path())?;
    File::open(temporary.path())?.sync_all()?;
    match fs::rename(temporary.path(), &target) {
        Ok(()) => {
            let _renamed = temporary.keep();
            File::open(folder)?.sync_all()?;
            Ok(target)
        }
        // Another process of the same attempt cannot exist, so the directory is this one, renamed before an error.
        Err(_) if target.is_dir() => Ok(target),
        Err(error) => Err(error),
    }
}

/// Lets a server that runs as another user read the directory; temporary directories are private.
fn set_readable(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
}

/// Returns the directories of a job's earlier adapters in the shared folder.
pub(super) fn left_over(folder: &Path, job: JobId) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let is_ours = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&prefix(job)))
    };
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_ours).collect()
}

/// Deletes the directory of an adapter that no server has loaded.
pub(super) fn delete(dir: &Path) {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, path = %dir.display(), "cannot delete the directory of an adapter");
        }
        Ok(()) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(weights: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILES[0]), "{}").unwrap();
        fs::write(dir.path().join(FILES[1]), weights).unwrap();
        dir
    }

    #[test]
    fn a_name_stands_for_one_job_attempt_step_and_weights() {
        let (job, other) = (JobId::new(), JobId::new());
        let first = name(job, 1, 7, b"weights");
        assert!(first.starts_with(&format!("rlood-{job}-a1-s7-")), "{first}");
        for different in [
            name(other, 1, 7, b"weights"),
            name(job, 2, 7, b"weights"),
            name(job, 1, 8, b"weights"),
            name(job, 1, 7, b"others"),
        ] {
            assert_ne!(first, different);
        }
        assert_eq!(first, name(job, 1, 7, b"weights"));
    }

    #[test]
    fn a_directory_gets_its_name_when_it_is_complete_and_is_found_again() {
        let (folder, job) = (tempfile::tempdir().unwrap(), JobId::new());
        let shared = folder.path().join("adapters");
        let name = name(job, 1, 0, b"w");
        let dir = publish(&shared, &name, adapter("w").path()).unwrap();
        assert_eq!(fs::read_to_string(dir.join(FILES[1])).unwrap(), "w");
        assert_eq!(publish(&shared, &name, adapter("w").path()).unwrap(), dir, "published once");
        assert_eq!(left_over(&shared, job), std::slice::from_ref(&dir));
        assert!(left_over(&shared, JobId::new()).is_empty());
        // An adapter without its weights leaves nothing behind.
        let broken = tempfile::tempdir().unwrap();
        assert!(publish(&shared, "rlood-x", broken.path()).is_err());
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 1);
        delete(&dir);
        delete(&dir);
        assert!(left_over(&shared, job).is_empty());
    }
}
