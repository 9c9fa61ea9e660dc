//! Links that keep files while they are copied, whatever the server removes meanwhile.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{DataDir, create_private_dir, entries, remove_tree};

/// What the directories of links are called in `staging/`: what a killed backup leaves goes within minutes where a server runs,
/// else with its next start or the next backup.
const PREFIX: &str = "backup-";
/// One that is younger may not be locked yet.
const LOCKED_WITHIN: Duration = Duration::from_secs(60);

/// Files of a data directory that stay as long as this is held. As far as that is possible: a data directory may be mounted
/// read only, and some file systems know no links.
#[derive(Debug)]
pub struct Held {
    /// The directory, locked.
    links_in: Option<(PathBuf, File)>,
    /// By the files' own paths.
    links: HashMap<PathBuf, PathBuf>,
}

impl DataDir {
    /// Nothing is held yet. Blocking.
    pub fn hold(&self) -> Held {
        self.drop_dead_links();
        Held { links_in: links_in(&self.staging()), links: HashMap::new() }
    }

    /// Removes the links of backups that were killed. Blocking.
    pub fn drop_dead_links(&self) {
        for path in entries(&self.staging()).unwrap_or_default() {
            let is_ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
            let Ok(found) = fs::symlink_metadata(&path) else { continue };
            let age = found.modified().ok().and_then(|made| made.elapsed().ok());
            if !is_ours || !found.is_dir() || age.is_none_or(|age| age < LOCKED_WITHIN) {
                continue;
            }
            // Nobody holds it any more.
            if File::open(&path).is_ok_and(|dir| dir.try_lock().is_ok()) {
                let _ = remove_tree(&path);
            }
        }
    }
}

impl Held {
    /// Keeps a file that is there. Blocking.
    pub fn keep(&mut self, path: &Path) {
        let Some((dir, _)) = &self.links_in else { return };
        if self.links.contains_key(path) {
            return;
        }
        let link = dir.join(self.links.len().to_string());
        if fs::hard_link(path, &link).is_ok() {
            self.links.insert(path.to_owned(), link);
        }
    }

    /// Where the bytes of a file are, if they are kept.
    pub fn link(&self, path: &Path) -> Option<&Path> {
        self.links.get(path).map(PathBuf::as_path)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some((dir, _)) = &self.links_in {
            // What cannot be removed now is removed by the next one.
            let _ = remove_tree(dir);
        }
    }
}

/// What root makes in somebody else's directory is theirs. Links are not followed: they may be somebody's who wants more.
pub(super) fn give_to_owner_of(root: &Path, path: &Path) {
    let (Ok(owner), Ok(found)) = (fs::metadata(root), fs::symlink_metadata(path)) else { return };
    if owner.uid() != found.uid() {
        let _ = std::os::unix::fs::lchown(path, Some(owner.uid()), Some(owner.gid()));
    }
}

fn links_in(staging: &Path) -> Option<(PathBuf, File)> {
    let dir = staging.join(format!("{PREFIX}{}", ulid::Ulid::generate().to_string().to_lowercase()));
    create_private_dir(&dir).ok()?;
    // The server can remove it, whoever makes the backup.
    give_to_owner_of(staging, &dir);
    let lock = File::open(&dir).ok()?;
    lock.try_lock().ok()?;
    Some((dir, lock))
}
