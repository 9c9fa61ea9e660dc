//! Copies for backups: hashed on the way, durable.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{DataDir, FilesError, cannot, create_private_dir, entries, hex, sync_dir};

impl DataDir {
    /// The directory of a server that is running, to be read only. Takes no lock and removes nothing.
    pub fn beside(root: &Path) -> Result<DataDir, FilesError> {
        let root = fs::canonicalize(root).map_err(cannot("find", root))?;
        let path = root.join("rlood.lock");
        let lock = File::open(&path).map_err(cannot("open the lock file", &path))?;
        Ok(DataDir { root: Arc::new(root), _lock: Arc::new(lock) })
    }
}

/// Copies a file for this user only, making directories as needed; returns its size and SHA-256. An existing file is not
/// touched: that is an error. Blocking.
pub fn copy_hashed(from: &Path, to: &Path) -> Result<(u64, String), FilesError> {
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
    target.sync_all().map_err(cannot("sync", to))?;
    Ok((size_bytes, hex(&hasher.finalize())))
}

/// Makes every directory of a tree durable. Blocking.
pub fn sync_tree(root: &Path) -> Result<(), FilesError> {
    for path in entries(root)? {
        if path.is_dir() {
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

/// Whether there is nothing at a path, or a directory with nothing in it. Blocking.
pub fn is_vacant(path: &Path) -> Result<bool, FilesError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(cannot("look at", path)(error)),
        Ok(found) => Ok(found.is_dir() && entries(path)?.is_empty()),
    }
}

/// Makes a directory for this user only. Blocking.
pub fn make_private_dir(path: &Path) -> Result<(), FilesError> {
    create_private_dir(path)
}
