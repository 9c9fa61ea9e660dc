//! Automatic pauses of jobs when the disk is nearly full, and their end.

use futures::future::BoxFuture;
use rlood_types::webhooks::message::{PausedDetail, QueuedDetail};

use super::events::event_insert;
use super::jobs::job_row;
use super::moves::{Transition, job_transition};
use super::{Doing, JobRow, Store, StoreError, id_column};
use crate::id::JobId;
use crate::job::State;

/// `status_reason` of a job that is paused because the disk is nearly full.
pub const DISK_FULL: &str = "disk_full";
/// Maximum number of jobs that one call changes, because the writer connection must not be held for long.
const BATCH_SIZE: u32 = 500;

impl Store {
    /// Pauses queued jobs and requests a pause of running ones. Pending requests of users are not changed. Returns the changed
    /// jobs; the caller repeats the call until it returns none.
    pub fn jobs_pause_disk_full(&self, now: i64) -> BoxFuture<'_, Result<Vec<JobId>, StoreError>> {
        Box::pin(async move {
            let doing = "pause jobs for lack of disk space";
            let wanted =
                "SELECT * FROM jobs WHERE state = 'queued' OR (state = 'running' AND requested IS NULL) LIMIT ?";
            if sqlx::query(wanted).bind(1).fetch_optional(&self.readers).await.doing(doing)?.is_none() {
                return Ok(Vec::new());
            }
            let mut tx = self.begin(doing).await?;
            let rows = sqlx::query(wanted).bind(BATCH_SIZE).fetch_all(&mut *tx).await.doing(doing)?;
            let mut paused = Vec::with_capacity(rows.len());
            for row in &rows {
                let row = JobRow::read(row)?;
                let data = PausedDetail { reason: Some(DISK_FULL.to_owned()) };
                if row.state == State::Queued {
                    let transition =
                        Transition { status_reason: Some(DISK_FULL.to_owned()), ..Transition::to(State::Paused) };
                    job_transition(&mut tx, &row, transition, "job.paused", data, now).await?;
                } else {
                    sqlx::query("UPDATE jobs SET requested = 'pause', requested_reason = ? WHERE id = ?")
                        .bind(DISK_FULL)
                        .bind(row.id.to_string())
                        .execute(&mut *tx)
                        .await
                        .doing(doing)?;
                    event_insert(&mut tx, row.id, "job.pause_requested", now, data).await?;
                }
                paused.push(row.id);
            }
            tx.commit().await.doing(doing)?;
            paused.iter().for_each(|job| self.wake_job(*job));
            Ok(paused)
        })
    }

    /// Returns jobs that are paused because of insufficient disk space, whether the server or a worker detected it.
    pub async fn jobs_waiting_for_disk(&self) -> Result<Vec<JobId>, StoreError> {
        sqlx::query("SELECT id FROM jobs WHERE state = 'paused' AND status_reason = ? ORDER BY queue_order LIMIT ?")
            .bind(DISK_FULL)
            .bind(BATCH_SIZE)
            .fetch_all(&self.readers)
            .await
            .doing("look up jobs that wait for disk space")?
            .iter()
            .map(|row| id_column(row, "id"))
            .collect()
    }

    /// Queues a job that was paused for lack of disk space again, in its old place; false if it is no longer
    /// paused for this reason.
    pub fn job_resume_from_disk(&self, id: JobId, now: i64) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move {
            let doing = "resume a job that waited for disk space";
            let mut tx = self.begin(doing).await?;
            let row = match job_row(&mut tx, id).await {
                Ok(row) => row,
                Err(StoreError::NotFound { .. }) => return Ok(false),
                Err(error) => return Err(error),
            };
            if row.state != State::Paused || row.status_reason.as_deref() != Some(DISK_FULL) {
                return Ok(false);
            }
            let data = QueuedDetail { reason: Some(DISK_FULL.to_owned()), ..QueuedDetail::default() };
            job_transition(&mut tx, &row, Transition::to(State::Queued), "job.resumed", data, now).await?;
            tx.commit().await.doing(doing)?;
            self.wake_job(id);
            self.wake_queue();
            Ok(true)
        })
    }
}
