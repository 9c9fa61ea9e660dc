//! State changes: a user's actions on a job (cancel, pause, resume), and the single SQL statement that moves a job out of a state.

use futures::future::BoxFuture;
use rlood_types::webhooks::message::{CancelledDetail, PausedDetail, QueuedDetail};
use serde::Serialize;
use serde_json::json;
use sqlx::sqlite::SqliteConnection;

use super::attempts::progress;
use super::events::{event_append, event_insert};
use super::jobs::job_row;
use super::journal::journal_close;
use super::{Doing, JobRow, Store, StoreError, int, to_json};
use crate::id::JobId;
use crate::job::{Action, Failure, Requested, State};

impl Store {
    /// Cancels a job: immediately if queued or paused, by a request to its worker if running. Repeating the call has no effect.
    pub async fn job_cancel(&self, id: JobId, now: i64) -> Result<JobRow, StoreError> {
        self.job_act(id, Action::Cancel, now).await
    }

    /// Pauses a job: immediately if queued, by a request to its worker if running. Repeating the call has no effect. A job that
    /// paused because of a reward outage stays paused from then on.
    pub async fn job_pause(&self, id: JobId, now: i64) -> Result<JobRow, StoreError> {
        self.job_act(id, Action::Pause, now).await
    }

    /// Queues a paused job again in its old place; withdraws a pause request that the worker has not carried out yet.
    pub async fn job_resume(&self, id: JobId, now: i64) -> Result<JobRow, StoreError> {
        self.job_act(id, Action::Resume, now).await
    }

    fn job_act(&self, id: JobId, action: Action, now: i64) -> BoxFuture<'_, Result<JobRow, StoreError>> {
        Box::pin(async move {
            let doing = "change the state of a job";
            let mut tx = self.begin(doing).await?;
            let row = job_row(&mut tx, id).await?;
            match (action, row.state, row.requested) {
                // The server resumes a job that paused automatically. After this request the pause is the user's, so only the user ends
                // it.
                (Action::Pause, State::Paused, _) if row.status_reason.is_some() => {
                    sqlx::query("UPDATE jobs SET status_reason = NULL WHERE id = ?")
                        .bind(id.to_string())
                        .execute(&mut *tx)
                        .await
                        .doing(doing)?;
                    event_insert(&mut tx, id, "job.paused", now, PausedDetail { reason: None }).await?;
                }
                (Action::Pause, State::Running, Some(Requested::Pause)) if row.requested_reason.is_some() => {
                    job_mark(&mut tx, id, Some("pause"), "job.pause_requested", now).await?;
                }
                // Nothing to do: the job is already in the requested state, or the request is pending.
                (Action::Cancel, State::Cancelled, _)
                | (Action::Cancel, State::Running, Some(Requested::Cancel))
                | (Action::Pause, State::Paused, _)
                | (Action::Pause, State::Running, Some(Requested::Pause)) => return Ok(row),
                (Action::Cancel, State::Queued | State::Paused, _) => {
                    job_transition(
                        &mut tx,
                        &row,
                        Transition::to(State::Cancelled),
                        "job.cancelled",
                        CancelledDetail {},
                        now,
                    )
                    .await?;
                }
                (Action::Cancel, State::Running, _) => {
                    job_mark(&mut tx, id, Some("cancel"), "job.cancel_requested", now).await?;
                }
                (Action::Pause, State::Queued, _) => {
                    let data = PausedDetail { reason: None };
                    job_transition(&mut tx, &row, Transition::to(State::Paused), "job.paused", data, now).await?;
                }
                (Action::Pause, State::Running, None) => {
                    job_mark(&mut tx, id, Some("pause"), "job.pause_requested", now).await?;
                }
                (Action::Resume, State::Paused, _) => {
                    job_transition(
                        &mut tx,
                        &row,
                        Transition::to(State::Queued),
                        "job.resumed",
                        QueuedDetail::default(),
                        now,
                    )
                    .await?;
                }
                (Action::Resume, State::Running, Some(Requested::Pause)) => {
                    job_mark(&mut tx, id, None, "job.resumed", now).await?;
                }
                (Action::Cancel, State::Succeeded | State::Failed, _)
                | (Action::Pause, State::Running, Some(Requested::Cancel))
                | (Action::Pause, State::Succeeded | State::Failed | State::Cancelled, _)
                | (Action::Resume, State::Queued | State::Succeeded | State::Failed | State::Cancelled, _)
                | (Action::Resume, State::Running, None | Some(Requested::Cancel))
                | (Action::Retry | Action::Delete, _, _) => {
                    return Err(StoreError::IllegalMove { state: row.state, action });
                }
            }
            let row = job_row(&mut tx, id).await?;
            self.commit(tx, doing).await?;
            self.wake_job(id);
            if row.state == State::Queued {
                self.wake_queue();
            }
            Ok(row)
        })
    }
}

/// The new state of a job and its fields. The fields that belong to a claim are always cleared.
pub(super) struct Transition {
    pub to: State,
    pub status_reason: Option<String>,
    pub failure: Option<Failure>,
    pub failed_attempts: Option<u32>,
}

impl Transition {
    pub fn to(to: State) -> Transition {
        Transition { to, status_reason: None, failure: None, failed_attempts: None }
    }
}

/// Moves a job out of the state and attempt of `row` to any state except `running` (which a claim sets), and records the event.
pub(super) async fn job_transition(
    tx: &mut SqliteConnection,
    row: &JobRow,
    transition: Transition,
    event: &'static str,
    data: impl Serialize + Send,
    now: i64,
) -> Result<(), StoreError> {
    job_move(tx, row, transition, event, to_json("event", &data)?, now).await
}

fn job_move<'a>(
    tx: &'a mut SqliteConnection,
    row: &'a JobRow,
    transition: Transition,
    event: &'static str,
    data: String,
    now: i64,
) -> BoxFuture<'a, Result<(), StoreError>> {
    Box::pin(async move {
        let Transition { to, status_reason, failure, failed_attempts } = transition;
        // The progress of the attempt that ends here stays in the job's row.
        let (reached, failed_attempts) = if row.state == State::Running {
            let (progressed, reached) = progress(tx, row).await?;
            (Some(to_json("reached", &reached)?), failed_attempts.or(progressed.then_some(0)))
        } else {
            (None, failed_attempts)
        };
        let moved = sqlx::query(
        "UPDATE jobs SET state = ?, status_reason = ?, failure = ?, failed_attempts = COALESCE(?, failed_attempts), \
         reached = COALESCE(?, reached), finished_at = ?, requested = NULL, requested_reason = NULL, worker = NULL, lease_until = NULL, phase = NULL, eta_s = NULL, last_batch = NULL, \
         claim_not_before = 0 \
         WHERE id = ? AND state = ? AND attempt = ? RETURNING id",
    )
    .bind(to.as_str())
    .bind(status_reason)
    .bind(failure.map(|failure| to_json("failure", &failure)).transpose()?)
    .bind(failed_attempts)
    .bind(reached)
    .bind(to.is_terminal().then_some(now))
    .bind(row.id.to_string())
    .bind(row.state.as_str())
    .bind(int(row.attempt))
    .fetch_optional(&mut *tx)
    .await
    .doing("change the state of a job")?;
        if moved.is_none() {
            return Err(StoreError::LeaseLost);
        }
        journal_close(tx, row.id, to).await?;
        event_append(tx, row.id, event, now, data).await?;
        Ok(())
    })
}

async fn job_mark(
    tx: &mut SqliteConnection,
    id: JobId,
    mark: Option<&'static str>,
    event: &'static str,
    now: i64,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE jobs SET requested = ?, requested_reason = NULL WHERE id = ? AND state = 'running'")
        .bind(mark)
        .bind(id.to_string())
        .execute(&mut *tx)
        .await
        .doing("request a job's cancel or pause")?;
    event_insert(tx, id, event, now, json!({})).await?;
    Ok(())
}
