//! Models that workers fetched from their server: one copy a machine, whoever fetched it.
//!
//! ```text
//! lock                  held while room is made
//! models/KEY/…          a whole model, every byte verified; KEY is its fingerprint
//! models/KEY.part/…     files of a model on the way; they are continued after a cut or a restart
//! models/KEY.json       its name and its size
//! models/KEY.lock       shared by those that use the model, exclusive to the one that fetches or removes it;
//!                       its time of modification is the last use
//! ```
//!
//! Locks end with the process that holds them. Everything here blocks for the disk, never for another process longer than a
//! removal takes: callers in async code use `spawn_blocking`.

mod room;

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

pub use room::NoRoom;

/// The directory of one machine. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ModelCache {
    root: PathBuf,
    limit_bytes: Option<u64>,
}

/// The right to use a model: it is not removed before this is dropped.
#[derive(Debug)]
pub struct Lease {
    dir: PathBuf,
    lock: File,
}

/// The right to fetch a model. What was fetched stays when this is dropped, and is continued by the next one.
#[derive(Debug)]
pub struct Fetching {
    cache: ModelCache,
    key: String,
    lock: File,
}

/// What the cache has of a model.
#[derive(Debug)]
pub enum Found {
    /// All of it.
    Ready(Lease),
    /// Nothing, or a part: fetch it.
    Missing(Fetching),
    /// Another process fetches or removes it now: ask again.
    Busy,
}

/// A model of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// Its fingerprint.
    pub key: String,
    /// Its name when it was fetched; empty = not known.
    pub name: String,
    /// What it takes, or will take once it is whole.
    pub size_bytes: u64,
    /// What is still to come of it, while a worker fetches it.
    pub missing_bytes: u64,
    /// All files are there.
    pub is_whole: bool,
    /// When it was used last.
    pub used_at: SystemTime,
    /// A worker uses or fetches it now.
    pub in_use: bool,
}

/// What is kept about a model beside its files.
#[derive(Debug, Default, Serialize, Deserialize)]
struct About {
    name: String,
    size_bytes: u64,
}

impl ModelCache {
    /// The cache of a directory, made if need be; at most `limit_bytes`, None = no limit.
    ///
    /// # Errors
    /// When the directory cannot be made, or is another user's, who could change a model after it was verified.
    pub fn open(root: &Path, limit_bytes: Option<u64>) -> io::Result<Self> {
        let models = root.join("models");
        DirBuilder::new().recursive(true).mode(0o700).create(&models)?;
        let (owner, user) = (fs::metadata(&models)?.uid(), rustix::process::geteuid().as_raw());
        if owner != user && owner != 0 {
            let what = format!("it belongs to the user {owner}, and this process runs as {user}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        Ok(Self { root: root.to_owned(), limit_bytes })
    }

    /// Looks for a model by its fingerprint; never waits.
    ///
    /// # Errors
    /// When the directory cannot be read or written.
    pub fn find(&self, key: &str) -> io::Result<Found> {
        let (lock, dir) = (self.open_lock(key)?, self.path(key));
        if dir.is_dir() {
            match lock.try_lock_shared() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(Found::Busy),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // It may have been removed before the lock was taken.
            if !dir.is_dir() {
                return Ok(Found::Busy);
            }
            lock.set_modified(SystemTime::now())?;
            return Ok(Found::Ready(Lease { dir, lock }));
        }
        match lock.try_lock() {
            Ok(()) if dir.is_dir() => Ok(Found::Busy),
            Ok(()) => Ok(Found::Missing(Fetching { cache: self.clone(), key: key.to_owned(), lock })),
            Err(TryLockError::WouldBlock) => Ok(Found::Busy),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Removes a model, and what was fetched of one, unless it is in use; whether it was removed.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self, key: &str) -> io::Result<bool> {
        let lock = self.open_lock(key)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        self.remove_files(key)?;
        Ok(true)
    }

    /// All models, the one that was used last at the end.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn entries(&self) -> io::Result<Vec<CacheEntry>> {
        let mut keys: Vec<String> = Vec::new();
        for entry in fs::read_dir(self.root.join("models"))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let key = name.strip_suffix(".part").unwrap_or(&name);
            if is_key(key) {
                keys.push(key.to_owned());
            }
        }
        keys.sort();
        keys.dedup();
        let mut entries = keys.into_iter().map(|key| self.entry(key)).collect::<io::Result<Vec<_>>>()?;
        entries.sort_by(|one, other| (one.used_at, &one.key).cmp(&(other.used_at, &other.key)));
        Ok(entries)
    }

    fn entry(&self, key: String) -> io::Result<CacheEntry> {
        let about = self.about(&key);
        let is_whole = self.path(&key).is_dir();
        let here = size_below(&self.path(&key))? + size_below(&self.part(&key))?;
        let lock = self.open_lock(&key)?;
        let in_use = match lock.try_lock() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(error),
        };
        // What is on its way will take all of its size; what was given up only what is there.
        let size_bytes = if in_use { here.max(about.size_bytes) } else { here };
        let missing_bytes = if is_whole { 0 } else { size_bytes - here };
        Ok(CacheEntry {
            name: about.name,
            size_bytes,
            missing_bytes,
            is_whole,
            used_at: lock.metadata()?.modified()?,
            in_use,
            key,
        })
    }

    fn about(&self, key: &str) -> About {
        let text = fs::read(self.beside(key, "json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// The caller holds the lock of the key.
    fn remove_files(&self, key: &str) -> io::Result<()> {
        let doomed = self.beside(key, "gone");
        remove_tree(&doomed)?;
        // At once: a half-removed model must not be taken for a whole one.
        match fs::rename(self.path(key), &doomed) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        remove_tree(&doomed)?;
        remove_tree(&self.part(key))?;
        match fs::remove_file(self.beside(key, "json")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn open_lock(&self, key: &str) -> io::Result<File> {
        if !is_key(key) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the fingerprint of a model has 64 hex digits"));
        }
        // Never removed: a process may hold a lock on a file that has no name any more.
        File::options().read(true).write(true).create(true).truncate(false).open(self.beside(key, "lock"))
    }

    fn path(&self, key: &str) -> PathBuf {
        self.root.join("models").join(key)
    }

    fn part(&self, key: &str) -> PathBuf {
        self.beside(key, "part")
    }

    fn beside(&self, key: &str, extension: &str) -> PathBuf {
        self.root.join("models").join(format!("{key}.{extension}"))
    }
}

impl Lease {
    /// The model's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Only the order of removal depends on it.
        let _ = self.lock.set_modified(SystemTime::now());
    }
}

impl Fetching {
    /// Makes room for a model of this name and size, and the directory for its files, which may hold some already.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn prepare(&self, name: &str, size_bytes: u64) -> Result<PathBuf, NoRoom> {
        let part = self.cache.part(&self.key);
        let about = About { name: name.to_owned(), size_bytes };
        let text = serde_json::to_vec(&about).map_err(io::Error::from)?;
        fs::write(self.cache.beside(&self.key, "json"), text)?;
        self.lock.set_modified(SystemTime::now())?;
        // Before the room is made, so that others that make room count it.
        DirBuilder::new().recursive(true).mode(0o700).create(&part)?;
        let missing_bytes = size_bytes.saturating_sub(size_below(&part)?);
        if let Err(no_room) = self.cache.make_room(&self.key, missing_bytes, size_bytes) {
            // Unless an earlier try has left something in it.
            let _ = fs::remove_dir(&part);
            return Err(no_room);
        }
        Ok(part)
    }

    /// All files are there and verified: the model is whole from now on. Removes what is not on the list.
    ///
    /// # Errors
    /// When the disk refuses; what was fetched stays.
    pub fn publish(self, names: &[&str]) -> io::Result<Found> {
        let (part, dir) = (self.cache.part(&self.key), self.cache.path(&self.key));
        for entry in fs::read_dir(&part)? {
            let path = entry?.path();
            if !names.iter().any(|name| path.file_name().is_some_and(|file| file == *name)) {
                remove_tree(&path)?;
            }
        }
        for name in names {
            File::open(part.join(name))?.sync_all()?;
        }
        File::open(&part)?.sync_all()?;
        fs::rename(&part, &dir)?;
        File::open(self.cache.root.join("models"))?.sync_all()?;
        let Fetching { cache, key, lock } = self;
        // A lock is not turned into a shared one in place; if another process removes the model between the two, it is
        // fetched again.
        drop(lock);
        cache.find(&key)
    }

    /// Drops what was fetched so far.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn discard(self) -> io::Result<()> {
        self.cache.remove_files(&self.key)
    }
}

fn is_key(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Bytes of the files of a directory; 0 when it is not there.
fn size_below(dir: &Path) -> io::Result<u64> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut size = 0;
    for entry in entries {
        match entry?.metadata() {
            Ok(metadata) => size += metadata.len(),
            // It was finished or removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(size)
}

/// Removes a file or a directory with all below it, if it is there.
fn remove_tree(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
