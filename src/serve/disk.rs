//! Watches free disk space. Below the reserve jobs pause and none is handed out. When enough space is free again, jobs that paused
//! for this reason resume automatically.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error_text::with_causes;
use crate::files::DataDir;
use crate::id::JobId;
use crate::store::{Store, StoreError};

/// Initial delay before a job that ran out of space again is resumed, in ms; it doubles each time.
const RESUME_DELAY_MS: i64 = 60_000;
/// Maximum delay before such a job is resumed, in ms.
const MAX_RESUME_DELAY_MS: i64 = 60 * 60_000;

/// Checks the disk once per second.
pub struct DiskWatch {
    reserve_bytes: u64,
    low: Arc<AtomicBool>,
    /// When and how often each paused job was resumed: a job that needs more space than is free must not restart every second.
    resumed: HashMap<JobId, (i64, u32)>,
}

impl DiskWatch {
    /// Creates a watch that keeps this many bytes free. With 0 it pauses no job, and only resumes jobs that paused because
    /// the disk was full.
    pub fn new(reserve_bytes: u64) -> Self {
        Self { reserve_bytes, low: Arc::default(), resumed: HashMap::new() }
    }

    /// Whether the disk was low at the latest check. No job is handed to a worker then.
    pub fn low(&self) -> Arc<AtomicBool> {
        self.low.clone()
    }

    /// Checks the disk, and pauses or resumes jobs.
    pub(super) async fn check(&mut self, store: &Store, files: &DataDir, now: i64) {
        let Ok(free) = files.free_bytes() else { return };
        if let Err(error) = self.apply(store, free, now).await {
            tracing::error!(
                error = with_causes(&error),
                "could not pause or resume jobs by the free disk space (--disk-reserve)"
            );
        }
    }

    /// Pauses or resumes jobs for a given number of free bytes.
    ///
    /// # Errors
    /// Fails when the database does not answer.
    pub async fn apply(&mut self, store: &Store, free: u64, now: i64) -> Result<(), StoreError> {
        let enough = self.reserve_bytes.saturating_add(self.reserve_bytes / 2);
        // Hysteresis: once free space was below the reserve, the disk counts as low until 1.5 times the reserve is free.
        // Otherwise jobs would pause and resume repeatedly.
        if free < self.reserve_bytes || (free < enough && self.low.load(Ordering::Relaxed)) {
            // The flag is set before jobs are paused, so that no queued job is handed to a worker in the meantime.
            if !self.low.swap(true, Ordering::Relaxed) {
                let reserve = self.reserve_bytes;
                tracing::warn!(free, reserve, "the server's disk is nearly full: jobs pause until space is free");
            }
            for job in store.jobs_pause_disk_full(now).await? {
                tracing::warn!(%job, "the job is paused: the server's disk is nearly full");
            }
            return Ok(());
        }
        if free < enough {
            return Ok(());
        }
        if self.low.swap(false, Ordering::Relaxed) {
            store.wake_queue();
        }
        let waiting = store.jobs_waiting_for_disk().await?;
        self.resumed.retain(|_, (at, _)| now - *at < 6 * MAX_RESUME_DELAY_MS);
        for job in waiting {
            let (at, times) = self.resumed.get(&job).copied().unwrap_or((i64::MIN, 0));
            let pause = RESUME_DELAY_MS.saturating_mul(1 << times.saturating_sub(1).min(10)).min(MAX_RESUME_DELAY_MS);
            if times > 0 && now.saturating_sub(at) < pause {
                continue;
            }
            if store.job_resume_from_disk(job, now).await? {
                self.resumed.insert(job, (now, times + 1));
                tracing::info!(%job, free, "the server's disk has free space again: the job resumes");
            }
        }
        Ok(())
    }
}
