//! Checkpoints: published rows over files that are complete. Bytes first, then the row.

use super::{Store, StoreError};
use crate::event::Metrics;
use crate::id::{CheckpointId, JobId};
use crate::protocol::FileEntry;

/// A published checkpoint; its files lie in `DataDir::checkpoint_dir(job, step, attempt)`.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointRow {
    /// Its id.
    pub id: CheckpointId,
    /// Whose.
    pub job: JobId,
    /// Optimizer steps done.
    pub step: u64,
    /// The attempt that wrote it.
    pub attempt: u64,
    /// All its files, `manifest.json` among them.
    pub files: Vec<FileEntry>,
    /// Of its step and of the last evaluation.
    pub metrics: Metrics,
    /// The best of the job.
    pub best: bool,
    /// Never rotated away.
    pub pinned: bool,
    /// Unix ms.
    pub created_at: i64,
}

/// A complete checkpoint on disk, to publish.
#[derive(Debug)]
pub struct PublishCheckpoint<'a> {
    /// Whose.
    pub job: JobId,
    /// The fence.
    pub attempt: u64,
    /// Optimizer steps done.
    pub step: u64,
    /// All its files.
    pub files: &'a [FileEntry],
    /// Of its step and of the last evaluation.
    pub metrics: &'a Metrics,
}

/// What publishing did.
#[derive(Debug, Clone, PartialEq)]
pub struct Publication {
    /// The new row's id (the old one's when the same attempt published it before).
    pub id: CheckpointId,
    /// Rows that rotation removed: their directories can go now.
    pub removed: Vec<CheckpointRow>,
}

impl Store {
    /// Publishes and rotates: the newest `keep_last` and the best `keep_best` of the job's plan and pinned ones stay.
    /// `LeaseLost` when the attempt does not own the job.
    pub async fn checkpoint_publish(
        &self,
        checkpoint: PublishCheckpoint<'_>,
        now: i64,
    ) -> Result<Publication, StoreError> {
        let _ = (checkpoint, now);
        todo!()
    }

    /// One checkpoint, or `NotFound`.
    pub async fn checkpoint_get(&self, id: CheckpointId) -> Result<CheckpointRow, StoreError> {
        let _ = id;
        todo!()
    }

    /// A job's checkpoints, newest first.
    pub async fn checkpoint_list(&self, job: JobId) -> Result<Vec<CheckpointRow>, StoreError> {
        let _ = job;
        todo!()
    }

    /// The newest.
    pub async fn checkpoint_latest(&self, job: JobId) -> Result<Option<CheckpointRow>, StoreError> {
        let _ = job;
        todo!()
    }

    /// The best by evaluation reward (by training reward without evaluation).
    pub async fn checkpoint_best(&self, job: JobId) -> Result<Option<CheckpointRow>, StoreError> {
        let _ = job;
        todo!()
    }

    /// `(job, step, attempt)` of every published checkpoint: what the sweep of the data directory must keep.
    pub async fn checkpoint_keys(&self) -> Result<Vec<(JobId, u64, u64)>, StoreError> {
        todo!()
    }
}
