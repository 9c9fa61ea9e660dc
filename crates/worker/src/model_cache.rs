//! Cache of models that workers downloaded from their server. The workers of a machine share one copy of each model.
//!
//! ```text
//! lock                  held while space is freed
//! models/KEY/…          a complete, verified model; KEY is its fingerprint
//! models/KEY.part/…     files of an incomplete download, which is resumed after an interruption
//! models/KEY.json       the model's name and size
//! models/KEY.lock       shared lock of the processes that use the model, exclusive lock of the one that downloads or
//!                       removes it; its modification time is the last use
//! ```
//!
//! Locks end with the process that holds them. The functions block on the disk, and on other processes for at most the time of
//! a removal; async code must call them in `spawn_blocking`.

mod space;

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

pub use space::CacheFull;

/// The cache directory of one machine. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ModelCache {
    root: PathBuf,
    limit_bytes: Option<u64>,
}

/// Marks a model of the cache as in use. The model is not removed before the lease is dropped.
#[derive(Debug)]
pub struct Lease {
    dir: PathBuf,
    lock: Lock,
}

/// The exclusive right to download a model into the cache. Partial downloads are kept on drop, and the next download resumes them.
#[derive(Debug)]
pub struct Fetching {
    cache: ModelCache,
    key: String,
    lock: Lock,
}

/// A lock file, which is unlocked on drop. Closing the file would not be enough: a process that another thread is starting
/// has a copy of it until it runs its program.
#[derive(Debug)]
struct Lock(File);

/// State of a model in the cache.
#[derive(Debug)]
pub enum Found {
    /// The model is in the cache, complete and verified.
    Ready(Lease),
    /// The model is missing or incomplete; the caller must download it.
    Missing(Fetching),
    /// Another process is downloading or removing the model; try again later.
    Busy,
}

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// Fingerprint of the model.
    pub key: String,
    /// Name under which the model was downloaded; empty if unknown.
    pub name: String,
    /// Size in bytes on disk; for a download in progress, the size when complete.
    pub size_bytes: u64,
    /// Bytes that a download in progress still has to fetch.
    pub missing_bytes: u64,
    /// Whether the model is complete.
    pub is_whole: bool,
    /// Time when a process last used the model.
    pub used_at: SystemTime,
    /// Whether a worker is using or downloading the model.
    pub in_use: bool,
}

/// Metadata that is stored beside a model's files.
#[derive(Debug, Default, Serialize, Deserialize)]
struct About {
    name: String,
    size_bytes: u64,
}

impl ModelCache {
    /// Opens the model cache in a directory, which is created if needed. `limit_bytes` is the maximum size; `None` means no limit.
    ///
    /// # Errors
    /// Fails when the directory cannot be created, or belongs to another user, who could change a model after its verification.
    pub fn open(root: &Path, limit_bytes: Option<u64>) -> io::Result<Self> {
        let models = root.join("models");
        DirBuilder::new().recursive(true).mode(0o700).create(&models)?;
        let (owner, user) = (fs::metadata(&models)?.uid(), rustix::process::geteuid().as_raw());
        if owner != user && owner != 0 {
            let what = format!("the directory belongs to user {owner}, but this process runs as user {user}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        Ok(Self { root: root.to_owned(), limit_bytes })
    }

    /// Looks up a model by its fingerprint, without waiting for other processes.
    ///
    /// # Errors
    /// Fails when the cache directory cannot be read or written.
    pub fn find(&self, key: &str) -> io::Result<Found> {
        let (lock, dir) = (self.open_lock(key)?, self.path(key));
        if dir.is_dir() {
            match lock.try_lock_shared() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(Found::Busy),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // Another process may have removed the model before this process took the lock.
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

    /// Removes a complete or partly downloaded model unless a process uses it. Returns whether the model was removed.
    ///
    /// # Errors
    /// Fails when the model's files cannot be removed.
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

    /// Returns all models in the cache, least recently used first.
    ///
    /// # Errors
    /// Fails when the cache directory cannot be read.
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
        // A download in progress counts with its full size, because it will need it; an abandoned download counts with
        // its size on disk.
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

    /// Removes the files of a model. The caller holds the model's lock.
    fn remove_files(&self, key: &str) -> io::Result<()> {
        let doomed = self.beside(key, "gone");
        remove_tree(&doomed)?;
        // The directory is renamed first, which is atomic: a partially removed model must not look like a complete one.
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

    fn open_lock(&self, key: &str) -> io::Result<Lock> {
        if !is_key(key) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the fingerprint of a model must have 64 hexadecimal digits",
            ));
        }
        // Lock files are never removed, because a process may hold a lock on a file that was unlinked.
        let path = self.beside(key, "lock");
        File::options().read(true).write(true).create(true).truncate(false).open(path).map(Lock)
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

impl Deref for Lock {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // After an error the lock ends when all copies of the file are closed.
        let _ = self.0.unlock();
    }
}

impl Lease {
    /// Returns the model's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // An error is ignored, because the time of the last use only affects the order in which models are removed.
        let _ = self.lock.set_modified(SystemTime::now());
    }
}

impl Fetching {
    /// Frees space in the cache for the model's size, and returns the directory for its files, which may contain files
    /// of an earlier download.
    ///
    /// # Errors
    /// Fails when not enough space can be freed.
    pub fn prepare(&self, name: &str, size_bytes: u64) -> Result<PathBuf, CacheFull> {
        let part = self.cache.part(&self.key);
        let about = About { name: name.to_owned(), size_bytes };
        let text = serde_json::to_vec(&about).map_err(io::Error::from)?;
        fs::write(self.cache.beside(&self.key, "json"), text)?;
        self.lock.set_modified(SystemTime::now())?;
        // The directory is created before space is freed, so that other processes count it.
        DirBuilder::new().recursive(true).mode(0o700).create(&part)?;
        let missing_bytes = size_bytes.saturating_sub(size_below(&part)?);
        if let Err(cache_full) = self.cache.free_space(&self.key, missing_bytes, size_bytes) {
            // `remove_dir` fails if the directory contains files of an earlier download, which are kept.
            let _ = fs::remove_dir(&part);
            return Err(cache_full);
        }
        Ok(part)
    }

    /// Marks the model as complete, after all files were verified. Files that are not in `names` are removed.
    ///
    /// # Errors
    /// Fails on disk errors; the downloaded files are kept.
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
        // The exclusive lock cannot be turned into a shared one atomically. If another process removes the model in between,
        // it is downloaded again.
        drop(lock);
        cache.find(&key)
    }

    /// Removes the downloaded files.
    ///
    /// # Errors
    /// Fails when the downloaded files cannot be removed.
    pub fn discard(self) -> io::Result<()> {
        self.cache.remove_files(&self.key)
    }
}

fn is_key(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the total size of the files in a directory in bytes; 0 if the directory does not exist.
fn size_below(dir: &Path) -> io::Result<u64> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut size = 0;
    for entry in entries {
        match entry?.metadata() {
            Ok(metadata) => size += metadata.len(),
            // Another process has renamed or removed the file since the directory was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(size)
}

/// Removes a file, or a directory with its content, if it exists.
fn remove_tree(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
