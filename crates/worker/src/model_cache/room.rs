//! Room for a model: those that were not used for longest go first, never one that is in use.

use std::fs::File;
use std::io;

use super::{CacheEntry, ModelCache};
use crate::size::format_size;

/// Why a model cannot be fetched into the cache; [`NoRoom::advice`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum NoRoom {
    /// It alone is larger than the limit.
    #[error("the model takes {}, and the worker's cache may take {}", format_size(*.size_bytes), format_size(*.limit_bytes))]
    OverLimit {
        /// The model's size.
        size_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// What is in use leaves too little of the limit.
    #[error(
        "the model takes {}, the worker's cache may take {}, and running jobs use {} of it",
        format_size(*.size_bytes), format_size(*.limit_bytes), format_size(*.used_bytes)
    )]
    InUse {
        /// The model's size.
        size_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// What cannot be removed now.
        used_bytes: u64,
    },
    /// The disk is too full, also without what is not in use.
    #[error(
        "{} of the model are still to be fetched, and the disk of the worker's cache has {} free",
        format_size(*.missing_bytes), format_size(*.free_bytes)
    )]
    Disk {
        /// Bytes that are not there yet.
        missing_bytes: u64,
        /// Bytes that can be written.
        free_bytes: u64,
    },
    /// The directory cannot be read or written.
    #[error("the worker's cache cannot be used")]
    Io(#[from] io::Error),
}

impl NoRoom {
    /// What to do.
    pub fn advice(&self) -> &'static str {
        match self {
            NoRoom::OverLimit { .. } => {
                "start the worker with a larger --cache-limit (RLOOD_WORKER_CACHE_LIMIT), then retry the job"
            }
            NoRoom::InUse { .. } => {
                "retry the job when the others are over, or start the worker with a larger --cache-limit \
                 (RLOOD_WORKER_CACHE_LIMIT)"
            }
            NoRoom::Disk { .. } => {
                "free some space on the worker's machine, or start the worker with a --cache-dir (RLOOD_WORKER_CACHE_DIR) on \
                 another disk, then retry the job"
            }
            NoRoom::Io(_) => {
                "check the permissions and the disk of the worker's --cache-dir (RLOOD_WORKER_CACHE_DIR), then retry the job"
            }
        }
    }
}

impl ModelCache {
    /// Makes room for a model of which `missing_bytes` are still to come. The caller holds the lock of `key`.
    pub(super) fn make_room(&self, key: &str, missing_bytes: u64, size_bytes: u64) -> Result<(), NoRoom> {
        if let Some(limit_bytes) = self.limit_bytes
            && size_bytes > limit_bytes
        {
            return Err(NoRoom::OverLimit { size_bytes, limit_bytes });
        }
        // One at a time, so that two models do not take the same room.
        let lock = self.root.join("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(lock)?;
        lock.lock()?;
        let mut others: Vec<CacheEntry> = self.entries()?.into_iter().filter(|entry| entry.key != key).collect();
        loop {
            let used_bytes: u64 = others.iter().map(|entry| entry.size_bytes).sum();
            // Others will still write what they have not fetched yet.
            let promised: u64 = others.iter().map(|entry| entry.missing_bytes).sum();
            let free_bytes = free_bytes(&self.root)?.saturating_sub(promised);
            let is_over = self.limit_bytes.is_some_and(|limit| used_bytes.saturating_add(size_bytes) > limit);
            if !is_over && missing_bytes <= free_bytes {
                return Ok(());
            }
            // They are in the order of their last use.
            let Some(at) = others.iter().position(|entry| !entry.in_use) else {
                return Err(match self.limit_bytes {
                    Some(limit_bytes) if is_over => NoRoom::InUse { size_bytes, limit_bytes, used_bytes },
                    _ => NoRoom::Disk { missing_bytes, free_bytes },
                });
            };
            let entry = others.remove(at);
            if self.remove(&entry.key)? {
                tracing::info!(model = entry.name, bytes = entry.size_bytes, "removed from the cache to make room");
            } else {
                // A job has begun to use it since.
                others.push(CacheEntry { in_use: true, ..entry });
            }
        }
    }
}

/// Bytes that can still be written to the file system of a path.
fn free_bytes(path: &std::path::Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
