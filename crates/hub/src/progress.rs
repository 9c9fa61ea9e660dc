//! How far a download is.

use std::sync::atomic::{AtomicU64, Ordering};

/// Progress of a download, shared with the code that displays it.
#[derive(Debug, Default)]
pub struct Progress {
    done_bytes: AtomicU64,
}

impl Progress {
    /// Returns the number of bytes downloaded so far, including partial files. The number decreases when the download of a
    /// file must start again.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Resets the number of downloaded bytes before a retry, which counts the bytes on disk again.
    pub fn reset(&self) {
        self.done_bytes.store(0, Ordering::Relaxed);
    }

    pub(crate) fn moved(&self, from: u64, to: u64) {
        // `to - from` may be negative and then wraps around; the wrapping sum is still correct in any order of updates.
        self.done_bytes.fetch_add(to.wrapping_sub(from), Ordering::Relaxed);
    }
}
