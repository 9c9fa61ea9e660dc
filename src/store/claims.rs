//! Claims: who may run a job and write about it. Every write of a worker is fenced by the attempt its claim carries.

use std::collections::BTreeMap;

use super::{CheckpointRow, Store, StoreError};
use crate::event::Phase;
use crate::id::{CheckpointId, JobId, WorkerId};
use crate::job::Requested;
use crate::protocol::Outcome;
use crate::spec::{Plan, RewardSecrets};

/// A claim, fresh from the queue.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// The job.
    pub job: JobId,
    /// The fence.
    pub attempt: u64,
    /// What to do.
    pub plan: Plan,
    /// By reward name.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// Newest published checkpoint.
    pub resume: Option<CheckpointRow>,
}

/// A heartbeat's news.
#[derive(Debug, Clone)]
pub struct Beat {
    /// Where the loop is.
    pub phase: Phase,
    /// Why it waits, if it does.
    pub status_reason: Option<String>,
    /// Optimizer steps done.
    pub step: u64,
    /// Seconds to go, if known.
    pub eta_s: Option<f64>,
}

impl Store {
    /// The next job of the queue (highest priority, then first come), now owned by this worker; `None` when it is empty.
    /// Rows a former attempt wrote after the newest checkpoint go, told by an event `rewind`. A worker runs one job at a
    /// time: one it held before goes back to the queue.
    pub async fn job_claim(&self, worker: WorkerId, now: i64, lease_ms: i64) -> Result<Option<Claimed>, StoreError> {
        let _ = (worker, now, lease_ms);
        todo!()
    }

    /// The checkpoint a claim was to go on from is damaged: removes its row, rewinds further, and returns the next older one.
    pub async fn claim_discard_checkpoint(
        &self,
        job: JobId,
        attempt: u64,
        checkpoint: CheckpointId,
        now: i64,
    ) -> Result<Option<CheckpointRow>, StoreError> {
        let _ = (job, attempt, checkpoint, now);
        todo!()
    }

    /// Extends the lease and returns what the user asks for. `LeaseLost` when the attempt does not own the job.
    pub async fn job_heartbeat(
        &self,
        job: JobId,
        attempt: u64,
        beat: Beat,
        now: i64,
        lease_ms: i64,
    ) -> Result<Option<Requested>, StoreError> {
        let _ = (job, attempt, beat, now, lease_ms);
        todo!()
    }

    /// `Ok` while the attempt owns the job, else `LeaseLost`.
    pub async fn claim_check(&self, job: JobId, attempt: u64) -> Result<(), StoreError> {
        let _ = (job, attempt);
        todo!()
    }

    /// Ends an attempt. A wish that arrived meanwhile is honoured: an interrupted job with a mark becomes cancelled or paused.
    pub async fn job_finish(&self, job: JobId, attempt: u64, outcome: Outcome, now: i64) -> Result<(), StoreError> {
        let _ = (job, attempt, outcome, now);
        todo!()
    }

    /// Takes every job whose lease has lapsed from its worker; returns them.
    pub async fn leases_reap(&self, now: i64) -> Result<Vec<JobId>, StoreError> {
        let _ = now;
        todo!()
    }

    /// At boot, before the first reap: every lease lasts at least `by_ms` from now, so that workers can come back.
    pub async fn leases_extend(&self, now: i64, by_ms: i64) -> Result<(), StoreError> {
        let _ = (now, by_ms);
        todo!()
    }
}
