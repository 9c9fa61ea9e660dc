//! Creates a job from one that has ended, with its plan and secrets: from the start, or resuming the old job's state.

use futures::future::BoxFuture;
use serde_json::json;
use sqlx::sqlite::SqliteConnection;

use super::events::event_insert;
use super::fork::checkpoint_adopt;
use super::jobs::{JobRow, job_row};
use super::journal::journal_copy;
use super::{CheckpointRow, Doing, Store, StoreError};
use crate::id::JobId;
use crate::job::Action;

/// The part of the old job's state with which a retry begins.
#[derive(Debug, Clone, Default)]
pub struct Continuation {
    /// The old job's checkpoints, newest first; their files are in the new job's directory as attempt 0. The new job starts from
    /// the first one, whose files were verified; without any it starts at step 0.
    pub checkpoints: Vec<CheckpointRow>,
    /// Newer checkpoints that cannot be used, because their files are damaged or unreadable.
    pub damaged: Vec<CheckpointRow>,
}

impl Store {
    /// Queues a new job with the same spec, plan and secrets, from the start. The old job must have ended.
    pub async fn job_retry(&self, id: JobId, new_id: JobId, now: i64) -> Result<JobRow, StoreError> {
        self.job_retry_with(id, new_id, None, now).await
    }

    /// Queues a new job that resumes with the old job's checkpoints and its journal, so that answered requests are not sent again.
    pub async fn job_retry_latest(
        &self,
        id: JobId,
        new_id: JobId,
        continuation: &Continuation,
        now: i64,
    ) -> Result<JobRow, StoreError> {
        self.job_retry_with(id, new_id, Some(continuation), now).await
    }

    fn job_retry_with<'a>(
        &'a self,
        id: JobId,
        new_id: JobId,
        continuation: Option<&'a Continuation>,
        now: i64,
    ) -> BoxFuture<'a, Result<JobRow, StoreError>> {
        Box::pin(async move {
            let doing = "retry a job";
            let mut tx = self.begin(doing).await?;
            let old = job_row(&mut tx, id).await?;
            if !old.state.is_terminal() {
                return Err(StoreError::IllegalMove { state: old.state, action: Action::Retry });
            }
            if waits_for_data(&mut tx, id).await? {
                return Err(StoreError::NoPlan { job: id });
            }
            sqlx::query(
            "INSERT INTO jobs (id, name, state, priority, queue_order, total_steps, model, spec, plan, secrets, metadata, \
             parent, owner, created_at) \
             SELECT ?, name, 'queued', priority, (SELECT MAX(queue_order) + 1 FROM jobs), total_steps, model, spec, plan, \
             secrets, metadata, id, owner, ? FROM jobs WHERE id = ?",
        )
        .bind(new_id.to_string())
        .bind(now)
        .bind(id.to_string())
        .execute(&mut *tx)
        .await
        .doing(doing)?;
            sqlx::query(
                "INSERT INTO job_datasets (job_id, dataset_id) SELECT ?, dataset_id FROM job_datasets WHERE job_id = ?",
            )
            .bind(new_id.to_string())
            .bind(id.to_string())
            .execute(&mut *tx)
            .await
            .doing(doing)?;
            let from_step =
                continuation.map(|continuation| continuation.checkpoints.first().map_or(0, |newest| newest.step));
            self.job_created(&mut tx, new_id, (Some(id), from_step), now).await?;
            if let Some(continuation) = continuation {
                continue_from(&mut tx, id, new_id, continuation, now).await?;
            }
            let row = job_row(&mut tx, new_id).await?;
            self.commit(tx, doing).await?;
            self.wake_job(row.id);
            self.wake_queue();
            Ok(row)
        })
    }
}

/// Whether the plan of a job is still provisional, because its datasets were not downloaded before it ended.
async fn waits_for_data(tx: &mut SqliteConnection, id: JobId) -> Result<bool, StoreError> {
    let waits: Option<bool> = sqlx::query_scalar("SELECT waits_for_data FROM jobs WHERE id = ?")
        .bind(id.to_string())
        .fetch_optional(tx)
        .await
        .doing("read a job")?;
    Ok(waits == Some(true))
}

async fn continue_from(
    tx: &mut SqliteConnection,
    parent: JobId,
    job: JobId,
    continuation: &Continuation,
    now: i64,
) -> Result<(), StoreError> {
    let Continuation { checkpoints, damaged } = continuation;
    for checkpoint in damaged {
        let step = checkpoint.step;
        let data = json!({
            "code": "checkpoint_damaged",
            "message": format!("the checkpoint of step {step} of the job {parent} is damaged: this job starts from an older one"),
            "data": { "checkpoint": checkpoint.id, "step": step },
        });
        event_insert(tx, job, "warning", now, data).await?;
    }
    for checkpoint in checkpoints {
        checkpoint_adopt(tx, job, checkpoint, checkpoint.best, now).await?;
    }
    // The journal continues from the newest checkpoint. From an older one, the steps in between are trained again, and later
    // completions are the same only if the rewards are.
    let follows = damaged.is_empty();
    journal_copy(tx, parent, job, follows, now).await
}
