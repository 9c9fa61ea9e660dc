//! Copies for backups: hashed on the way, durable.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{DataDir, FilesError, LOCK, cannot, create_private_dir, entries, sync_dir};
use crate::digest::Sha256Digest;
use crate::failpoint::fail_point;

impl DataDir {
    /// The directory of a server that is running, to be read only. Takes no lock and removes nothing.
    pub fn beside(root: &Path) -> Result<DataDir, FilesError> {
        let root = fs::canonicalize(root).map_err(cannot("find", root))?;
        let path = root.join(LOCK);
        let lock = File::open(&path).map_err(cannot("open the lock file", &path))?;
        Ok(DataDir { root: Arc::new(root), uploads: Arc::default(), lock: Arc::new(lock) })
    }

    /// Takes the lock of a directory that was opened with [`DataDir::beside`], so that no server starts on it; false = one runs.
    pub fn lock_out_servers(&self) -> bool {
        self.lock.try_lock().is_ok()
    }
}

/// Copies a file for this user only, making directories as needed; returns its size and SHA-256. An existing file is not
/// touched: that is an error. Blocking.
pub fn copy_hashed(from: &Path, to: &Path) -> Result<(u64, Sha256Digest), FilesError> {
    if let Some(parent) = to.parent() {
        create_private_dir(parent)?;
    }
    let mut source = File::open(from).map_err(cannot("open", from))?;
    let mut target =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(cannot("create", to))?;
    let (mut hasher, mut size_bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        let read = source.read(&mut buffer).map_err(cannot("read", from))?;
        let piece = buffer.get(..read).unwrap_or_default();
        if piece.is_empty() {
            break;
        }
        hasher.update(piece);
        target.write_all(piece).map_err(cannot("write to", to))?;
        size_bytes += read as u64;
    }
    fail_point!("files.copy_sync", &to.file_name().unwrap_or_default().to_string_lossy())
        .and_then(|()| target.sync_all())
        .map_err(cannot("sync", to))?;
    Ok((size_bytes, hasher.into()))
}

/// Makes every directory of a tree durable. Blocking.
pub fn sync_tree(root: &Path) -> Result<(), FilesError> {
    for path in entries(root)? {
        if path.is_dir() && !is_of_the_volume(&path) {
            sync_tree(&path)?;
        }
    }
    sync_dir(root)
}

/// Every file of a tree that is there. Blocking.
pub fn files_below(root: &Path) -> Result<Vec<PathBuf>, FilesError> {
    let mut found = Vec::new();
    if !root.is_dir() {
        return Ok(found);
    }
    for path in entries(root)? {
        if path.is_dir() {
            found.extend(files_below(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Whether there is nothing at a path, or a directory with nothing in it: a link to one, or a new volume too. Blocking.
pub fn is_vacant(path: &Path) -> Result<bool, FilesError> {
    match fs::metadata(path) {
        // A link to nowhere is something.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(fs::symlink_metadata(path).is_err()),
        Err(error) => Err(cannot("look at", path)(error)),
        Ok(found) => Ok(found.is_dir() && entries(path)?.iter().all(|path| is_of_the_volume(path) || is_lock(path))),
    }
}

/// What stands in the root of a new file system, and may be for root's eyes only.
fn is_of_the_volume(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "lost+found") && path.is_dir()
}

/// What a restore that was killed leaves; one that runs holds it.
fn is_lock(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == LOCK) && path.is_file()
}

/// Whether a server runs on a directory. Makes nothing there. Blocking.
pub fn is_served(root: &Path) -> bool {
    File::open(root.join(LOCK)).is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// A directory that is being filled: no server starts in it meanwhile.
#[derive(Debug)]
pub struct Reserved {
    _lock: File,
    /// The lock file, to be removed: nothing came of it.
    path: Option<PathBuf>,
}

impl Reserved {
    /// Locks a directory that has nothing in it. Blocking.
    pub fn reserve(root: &Path) -> Result<Reserved, FilesError> {
        Ok(Reserved { _lock: super::lock(root)?, path: Some(root.join(LOCK)) })
    }

    /// It is a data directory now.
    pub fn keep(mut self) {
        self.path = None;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// Moves all that is in one directory into another one of the same file system, `last` when the rest is there for good. When
/// that fails, what was moved is removed. Blocking.
pub fn move_into(from: &Path, to: &Path, last: &str) -> Result<(), FilesError> {
    let (end, mut paths): (Vec<_>, Vec<_>) = entries(from)?.into_iter().partition(|path| path.ends_with(last));
    paths.extend(end);
    let mut moved: Vec<PathBuf> = Vec::new();
    for path in paths {
        let target = to.join(path.file_name().unwrap_or_default());
        let synced = if path.ends_with(last) { sync_dir(to) } else { Ok(()) };
        if let Err(error) = synced.and_then(|()| fs::rename(&path, &target).map_err(cannot("move a file to", &target)))
        {
            // The error tells more than what stands in the way of tidying up.
            let _ = moved.iter().try_for_each(|path| remove_tree(path));
            return Err(error);
        }
        moved.push(target);
    }
    sync_dir(to)
}

/// Makes a directory for this user only. Blocking.
pub fn make_private_dir(path: &Path) -> Result<(), FilesError> {
    create_private_dir(path)
}

/// Removes a directory (or file) and all below it, if it is there. Blocking.
pub fn remove_tree(path: &Path) -> Result<(), FilesError> {
    super::remove_tree(path)
}
