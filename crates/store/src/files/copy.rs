//! Copies for backups: hashed while copying, and durable.

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
    /// Opens the directory of a running server for reading only. Takes no lock and removes nothing.
    pub fn beside(root: &Path) -> Result<DataDir, FilesError> {
        let root = fs::canonicalize(root).map_err(cannot("find", root))?;
        let path = root.join(LOCK);
        let lock = File::open(&path).map_err(cannot("open the data directory's lock file", &path))?;
        Ok(DataDir { root: Arc::new(root), uploads: Arc::default(), lock: Arc::new(lock) })
    }

    /// Locks a directory that was opened with [`DataDir::beside`], so that no server starts on it; false = a server is running.
    pub fn lock_out_servers(&self) -> bool {
        self.lock.try_lock().is_ok()
    }
}

/// Copies a file for this user only and creates directories as needed; returns its size and SHA-256. An existing target file is an
/// error and is not changed. Blocking.
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

/// Makes the files of a directory durable, and their names. Blocking.
pub fn sync_files(dir: &Path) -> Result<(), FilesError> {
    for path in entries(dir)? {
        File::open(&path).and_then(|file| file.sync_all()).map_err(cannot("sync", &path))?;
    }
    sync_dir(dir)
}

/// Returns every file of an existing tree. Blocking.
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

/// Whether a path does not exist, or is a directory without content; a link to an empty directory and the root of a new
/// volume count too. Blocking.
pub fn is_vacant(path: &Path) -> Result<bool, FilesError> {
    match fs::metadata(path) {
        // A link whose target is missing is no free path.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(fs::symlink_metadata(path).is_err()),
        Err(error) => Err(cannot("inspect", path)(error)),
        Ok(found) => Ok(found.is_dir() && entries(path)?.iter().all(|path| is_of_the_volume(path) || is_lock(path))),
    }
}

/// Whether the path is `lost+found`, which a new file system has in its root and only root may read.
fn is_of_the_volume(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "lost+found") && path.is_dir()
}

/// Whether the path is the lock file, which a killed restore leaves behind and a running one holds.
fn is_lock(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == LOCK) && path.is_file()
}

/// Whether a server runs on a directory. Creates nothing there. Blocking.
pub fn is_served(root: &Path) -> bool {
    File::open(root.join(LOCK)).is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// A directory that is being filled, in which no server can start.
#[derive(Debug)]
pub struct Reserved {
    _lock: File,
    /// Path of the lock file, which is removed if the restore fails.
    path: Option<PathBuf>,
}

impl Reserved {
    /// Locks an empty directory. Blocking.
    pub fn reserve(root: &Path) -> Result<Reserved, FilesError> {
        Ok(Reserved { _lock: super::lock(root)?, path: Some(root.join(LOCK)) })
    }

    /// Turns the directory into a data directory by keeping its lock file.
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

/// Moves the content of a directory into another one on the same file system; `last` is moved when the rest is durable. If a move
/// fails, everything moved is removed. Blocking.
pub fn move_into(from: &Path, to: &Path, last: &str) -> Result<(), FilesError> {
    let (end, mut paths): (Vec<_>, Vec<_>) = entries(from)?.into_iter().partition(|path| path.ends_with(last));
    paths.extend(end);
    let mut moved: Vec<PathBuf> = Vec::new();
    for path in paths {
        let target = to.join(path.file_name().unwrap_or_default());
        let synced = if path.ends_with(last) { sync_dir(to) } else { Ok(()) };
        if let Err(error) = synced.and_then(|()| fs::rename(&path, &target).map_err(cannot("move a file to", &target)))
        {
            // Errors of the cleanup are ignored, because the error of the failed move is more useful.
            let _ = moved.iter().try_for_each(|path| remove_tree(path));
            return Err(error);
        }
        moved.push(target);
    }
    sync_dir(to)
}

/// Creates a directory for this user only. Blocking.
pub fn make_private_dir(path: &Path) -> Result<(), FilesError> {
    create_private_dir(path)
}

/// Removes a directory (or file) and everything below it, if it exists. Blocking.
pub fn remove_tree(path: &Path) -> Result<(), FilesError> {
    super::remove_tree(path)
}
