//! The disk's watermark: below it jobs pause and none is handed out, well above it those that paused for want of space go on
//! by themselves.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::causes::with_causes;
use crate::files::DataDir;
use crate::id::JobId;
use crate::store::{Store, StoreError};

/// Between two tries of a job that ran out of space again, at first, ms; it doubles.
const AGAIN_MS: i64 = 60_000;
/// The longest of them, ms.
const AGAIN_MOST_MS: i64 = 60 * 60_000;

/// Looks at the disk once a second.
pub struct DiskWatch {
    reserve_bytes: u64,
    low: Arc<AtomicBool>,
    /// When a job went on, and how often: one that needs more than there is must not begin anew every second.
    resumed: HashMap<JobId, (i64, u32)>,
}

impl DiskWatch {
    /// Keeps so much free; 0 = only jobs that met a full disk are resumed.
    pub fn new(reserve_bytes: u64) -> Self {
        Self { reserve_bytes, low: Arc::default(), resumed: HashMap::new() }
    }

    /// Whether the disk is low, as of the latest look: no job is handed to a worker then.
    pub fn low(&self) -> Arc<AtomicBool> {
        self.low.clone()
    }

    /// Pauses or resumes what has to be.
    pub(super) async fn look(&mut self, store: &Store, files: &DataDir, now: i64) {
        let Ok(free) = files.free_bytes() else { return };
        if let Err(error) = self.act(store, free, now).await {
            tracing::error!(error = with_causes(&error), "the disk's watermark is not honoured");
        }
    }

    /// With so many bytes free.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn act(&mut self, store: &Store, free: u64, now: i64) -> Result<(), StoreError> {
        let enough = self.reserve_bytes.saturating_add(self.reserve_bytes / 2);
        // Once it is low it stays so until there is well enough, or jobs would go back and forth.
        if free < self.reserve_bytes || (free < enough && self.low.load(Ordering::Relaxed)) {
            // Before the pauses: what is queued meanwhile is not handed out.
            if !self.low.swap(true, Ordering::Relaxed) {
                let reserve = self.reserve_bytes;
                tracing::warn!(free, reserve, "the disk is nearly full: jobs pause until there is room");
            }
            for job in store.jobs_pause_disk_full(now).await? {
                tracing::warn!(%job, "paused: the disk is nearly full");
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
        self.resumed.retain(|_, (at, _)| now - *at < 6 * AGAIN_MOST_MS);
        for job in waiting {
            let (at, times) = self.resumed.get(&job).copied().unwrap_or((i64::MIN, 0));
            let pause = AGAIN_MS.saturating_mul(1 << times.saturating_sub(1).min(10)).min(AGAIN_MOST_MS);
            if times > 0 && now.saturating_sub(at) < pause {
                continue;
            }
            if store.job_resume_from_disk(job, now).await? {
                self.resumed.insert(job, (now, times + 1));
                tracing::info!(%job, free, "there is room again: the job goes on");
            }
        }
        Ok(())
    }
}
