//! Hard links that pin files while they are copied, even if the server removes them in the meantime.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{DataDir, create_private_dir, entries, remove_tree};

/// Prefix of the directories of links in `staging/`. Links of a killed backup are removed within minutes if a server runs,
/// otherwise at its next start or by the next backup.
const PREFIX: &str = "backup-";
/// Minimum age of a directory that is removed, because a younger one may not be locked yet.
const MIN_STALE_AGE: Duration = Duration::from_secs(60);

/// Files of a data directory that are pinned for the lifetime of this value. Pinning is best effort: a data directory may be
/// mounted read-only, and some file systems do not support links.
#[derive(Debug)]
pub struct PinnedFiles {
    /// The directory of the links, locked.
    links_in: Option<(PathBuf, File)>,
    /// Paths of the links, by the files' own paths.
    links: HashMap<PathBuf, PathBuf>,
}

impl DataDir {
    /// Creates a set of pinned files, which is empty at first. Blocking.
    pub fn pin_files(&self) -> PinnedFiles {
        self.remove_stale_links();
        PinnedFiles { links_in: links_in(&self.staging()), links: HashMap::new() }
    }

    /// Removes the links of backups that were killed. Blocking.
    pub fn remove_stale_links(&self) {
        for path in entries(&self.staging()).unwrap_or_default() {
            let is_ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
            let Ok(found) = fs::symlink_metadata(&path) else { continue };
            let age = found.modified().ok().and_then(|made| made.elapsed().ok());
            if !is_ours || !found.is_dir() || age.is_none_or(|age| age < MIN_STALE_AGE) {
                continue;
            }
            // The process that held the lock has ended.
            if File::open(&path).is_ok_and(|dir| dir.try_lock().is_ok()) {
                let _ = remove_tree(&path);
            }
        }
    }
}

impl PinnedFiles {
    /// Pins an existing file. Blocking.
    pub fn pin(&mut self, path: &Path) {
        let Some((dir, _)) = &self.links_in else { return };
        if self.links.contains_key(path) {
            return;
        }
        let link = dir.join(self.links.len().to_string());
        if fs::hard_link(path, &link).is_ok() {
            self.links.insert(path.to_owned(), link);
        }
    }

    /// Returns the link to a file, if the file is pinned.
    pub fn link(&self, path: &Path) -> Option<&Path> {
        self.links.get(path).map(PathBuf::as_path)
    }
}

impl Drop for PinnedFiles {
    fn drop(&mut self) {
        if let Some((dir, _)) = &self.links_in {
            // Links that cannot be removed now are removed by the next backup.
            let _ = remove_tree(dir);
        }
    }
}

/// Gives what root creates in another user's directory to that user. Links are not followed, because another user may have placed
/// them to gain access.
pub(super) fn give_to_owner_of(root: &Path, path: &Path) {
    let (Ok(owner), Ok(found)) = (fs::metadata(root), fs::symlink_metadata(path)) else { return };
    if owner.uid() != found.uid() {
        let _ = std::os::unix::fs::lchown(path, Some(owner.uid()), Some(owner.gid()));
    }
}

fn links_in(staging: &Path) -> Option<(PathBuf, File)> {
    let dir = staging.join(format!("{PREFIX}{}", ulid::Ulid::generate().to_string().to_lowercase()));
    create_private_dir(&dir).ok()?;
    // The server can then remove the directory, whichever user makes the backup.
    give_to_owner_of(staging, &dir);
    let lock = File::open(&dir).ok()?;
    lock.try_lock().ok()?;
    Some((dir, lock))
}
