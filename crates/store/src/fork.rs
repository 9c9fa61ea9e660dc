//! Creates a job from another job's checkpoint: row, first checkpoint and events in one transaction.

use futures::future::BoxFuture;
use serde_json::json;
use sqlx::sqlite::SqliteConnection;

use super::events::event_insert;
use super::jobs::{JobRow, NewJob, job_row};
use super::{CheckpointRow, Doing, Store, StoreError, int, to_json};
use crate::id::{CheckpointId, JobId};

/// The point at which a new job branches off.
#[derive(Debug, Clone, Copy)]
pub struct Fork<'a> {
    /// Checkpoint of the parent job.
    pub checkpoint: &'a CheckpointRow,
    /// Whether the new job continues from the checkpoint's full state (whose files are in the new job's directory, attempt 0)
    /// instead of starting from its weights only.
    pub continues: bool,
}

impl Store {
    /// Queues a job that branches off another one. `NotFound` (dataset) if one of its datasets no longer exists.
    pub fn job_fork<'a>(
        &'a self,
        new: NewJob<'a>,
        fork: Fork<'a>,
        now: i64,
    ) -> BoxFuture<'a, Result<JobRow, StoreError>> {
        Box::pin(async move {
            let doing = "fork a job";
            let Fork { checkpoint, continues } = fork;
            let (id, parent) = (new.id, new.parent);
            let mut tx = self.begin(doing).await?;
            self.job_insert(&mut tx, new, &[], now).await?;
            if continues {
                checkpoint_adopt(&mut tx, id, checkpoint, false, now).await?;
            }
            let data = json!({
                "parent": parent, "from_step": checkpoint.step, "checkpoint": checkpoint.id, "continues": continues,
            });
            event_insert(&mut tx, id, "job.forked", now, data).await?;
            let row = job_row(&mut tx, id).await?;
            self.commit(tx, doing).await?;
            self.wake_job(row.id);
            self.wake_queue();
            Ok(row)
        })
    }

    /// Returns the jobs with a warm start, whose starting files the cleanup at server start must keep.
    pub async fn warm_start_jobs(&self) -> Result<Vec<JobId>, StoreError> {
        sqlx::query("SELECT id FROM jobs WHERE json_extract(plan, '$.warm_start') IS NOT NULL")
            .fetch_all(&self.readers)
            .await
            .doing("list jobs with a warm start")?
            .iter()
            .map(|row| super::id_column(row, "id"))
            .collect()
    }
}

/// Publishes a checkpoint of another job as if attempt 0 of this new job had written it; the files are already in place.
pub(super) async fn checkpoint_adopt(
    tx: &mut SqliteConnection,
    job: JobId,
    checkpoint: &CheckpointRow,
    best: bool,
    now: i64,
) -> Result<(), StoreError> {
    let doing = "copy a checkpoint to another job";
    let CheckpointRow {
        step,
        files,
        metrics,
        job: parent,
        temporary,
        id: _,
        attempt: _,
        best: _,
        pinned: _,
        created_at: _,
    } = checkpoint;
    sqlx::query(
        "INSERT INTO checkpoints (id, job_id, step, attempt, files, metrics, best, temporary, created_at) VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?)",
    )
    .bind(CheckpointId::new().to_string())
    .bind(job.to_string())
    .bind(int(*step))
    .bind(to_json("files", files)?)
    .bind(to_json("metrics", metrics)?)
    .bind(best)
    .bind(temporary)
    .bind(now)
    .execute(&mut *tx)
    .await
    .doing(doing)?;
    // The version that wrote the checkpoint. If another version resumes it, the job's events report that.
    sqlx::query("UPDATE jobs SET step = MAX(step, ?), version = (SELECT version FROM jobs WHERE id = ?) WHERE id = ?")
        .bind(int(*step))
        .bind(parent.to_string())
        .bind(job.to_string())
        .execute(&mut *tx)
        .await
        .doing(doing)?;
    Ok(())
}
