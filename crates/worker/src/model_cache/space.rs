//! Frees space in the model cache by removing the least recently used models that are not in use.

use std::fs::File;
use std::io;

use super::{CacheEntry, ModelCache};
use crate::size::format_size;

/// Reason why a model does not fit into the cache. [`CacheFull::advice`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CacheFull {
    /// The model alone is larger than the limit of the cache.
    #[error("the model's size is {}, but the worker's cache is limited to {}", format_size(*.size_bytes), format_size(*.limit_bytes))]
    OverLimit {
        /// Size of the model in bytes.
        size_bytes: u64,
        /// Limit of the cache in bytes.
        limit_bytes: u64,
    },
    /// The models in use leave too little space below the limit of the cache.
    #[error(
        "the model's size is {}, but the worker's cache is limited to {}, of which running jobs use {}",
        format_size(*.size_bytes), format_size(*.limit_bytes), format_size(*.used_bytes)
    )]
    InUse {
        /// Size of the model in bytes.
        size_bytes: u64,
        /// Limit of the cache in bytes.
        limit_bytes: u64,
        /// Total size in bytes of the models that are in use.
        used_bytes: u64,
    },
    /// The disk has too little space, even if all unused models are removed.
    #[error(
        "{} of the model must still be downloaded, but the disk of the worker's cache has only {} free",
        format_size(*.missing_bytes), format_size(*.free_bytes)
    )]
    Disk {
        /// Bytes of the model that must still be downloaded.
        missing_bytes: u64,
        /// Free bytes on the disk.
        free_bytes: u64,
    },
    /// The cache directory cannot be read or written.
    #[error("the worker's model cache cannot be used")]
    Io(#[from] io::Error),
}

impl CacheFull {
    /// Returns what the operator can do about the full cache.
    pub fn advice(&self) -> &'static str {
        match self {
            CacheFull::OverLimit { .. } => {
                "start the worker with a larger --cache-limit (RLOOD_WORKER_CACHE_LIMIT), then retry the job"
            }
            CacheFull::InUse { .. } => {
                "retry the job when other jobs have finished, or start the worker with a larger --cache-limit \
                 (RLOOD_WORKER_CACHE_LIMIT)"
            }
            CacheFull::Disk { .. } => {
                "free some space on the worker's machine, or start the worker with a --cache-dir (RLOOD_WORKER_CACHE_DIR) on \
                 another disk, then retry the job"
            }
            CacheFull::Io(_) => {
                "check the permissions and the disk of the worker's --cache-dir (RLOOD_WORKER_CACHE_DIR), then retry the job"
            }
        }
    }
}

impl ModelCache {
    /// Frees space for a model of which `missing_bytes` are still to be downloaded. The caller holds the lock of `key`.
    pub(super) fn free_space(&self, key: &str, missing_bytes: u64, size_bytes: u64) -> Result<(), CacheFull> {
        if let Some(limit_bytes) = self.limit_bytes
            && size_bytes > limit_bytes
        {
            return Err(CacheFull::OverLimit { size_bytes, limit_bytes });
        }
        // Only one process frees space at a time, so that two models do not claim the same space.
        let lock = self.root.join("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(lock)?;
        lock.lock()?;
        let mut others: Vec<CacheEntry> = self.entries()?.into_iter().filter(|entry| entry.key != key).collect();
        loop {
            let used_bytes: u64 = others.iter().map(|entry| entry.size_bytes).sum();
            // The free space on disk minus the bytes that other downloads in progress will still write.
            let promised: u64 = others.iter().map(|entry| entry.missing_bytes).sum();
            let free_bytes = free_bytes(&self.root)?.saturating_sub(promised);
            let is_over = self.limit_bytes.is_some_and(|limit| used_bytes.saturating_add(size_bytes) > limit);
            if !is_over && missing_bytes <= free_bytes {
                return Ok(());
            }
            // The loop removes the least recently used models first, which is the order of the entries.
            let Some(at) = others.iter().position(|entry| !entry.in_use) else {
                return Err(match self.limit_bytes {
                    Some(limit_bytes) if is_over => CacheFull::InUse { size_bytes, limit_bytes, used_bytes },
                    _ => CacheFull::Disk { missing_bytes, free_bytes },
                });
            };
            let entry = others.remove(at);
            if self.remove(&entry.key)? {
                tracing::info!(model = entry.name, bytes = entry.size_bytes, "removed from the cache to make room");
            } else {
                // A job has started to use this model since the entries were listed.
                others.push(CacheEntry { in_use: true, ..entry });
            }
        }
    }
}

/// Returns the free space in bytes of the file system that contains a path.
fn free_bytes(path: &std::path::Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
