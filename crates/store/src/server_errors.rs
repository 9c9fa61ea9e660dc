//! Server errors while a job is handed out: the claim is released, the error is counted separately from the job's own failures, and
//! the job waits in the queue for a pause that doubles.

use serde_json::json;

use super::claims::{Charge, job_release, owned_row};
use super::events::event_insert;
use super::{Doing, Store, StoreError, int};
use crate::id::JobId;

/// `status_reason` of a queued job that the server could not hand out, and the reason in its event `job.requeued`.
pub const SERVER_ERROR: &str = "server_error";
/// First pause before the job is offered again, in milliseconds; it doubles with each further error in a row.
pub const FIRST_PAUSE_MS: i64 = 1_000;
/// Longest pause before the job is offered again, in milliseconds.
pub const LONGEST_PAUSE_MS: i64 = 60_000;
/// Number of consecutive errors after which a `warning` event informs the job's owner.
pub const WARN_AFTER: u32 = 5;

/// Selects the earliest time at which a job that waits after a server error is offered again.
pub const NEXT_DUE: &str = "SELECT MIN(claim_not_before) FROM jobs INDEXED BY jobs_claim_later \
     WHERE state = 'queued' AND claim_not_before > 0 AND claim_not_before > ?";

impl Store {
    /// Releases a claim that the server could not complete because of an internal error. The attempt does not count as failed, and
    /// the job waits in its old place in the queue for at least [`FIRST_PAUSE_MS`]. A pending request of the user takes effect.
    /// `LeaseLost` if the attempt does not own the job.
    pub async fn claim_release(&self, job: JobId, attempt: u64, now: i64) -> Result<(), StoreError> {
        let doing = "release a claim";
        let mut tx = self.begin(doing).await?;
        let row = owned_row(&mut tx, job, attempt).await?;
        let errors = row.server_errors.saturating_add(1);
        job_release(&mut tx, &row, Charge::Free(SERVER_ERROR), now).await?;
        let queued = sqlx::query(
            "UPDATE jobs SET server_errors = ?, claim_not_before = ?, status_reason = ? WHERE id = ? AND state = 'queued'",
        )
        .bind(errors)
        .bind(now.saturating_add(pause_ms(errors)))
        .bind(SERVER_ERROR)
        .bind(job.to_string())
        .execute(&mut *tx)
        .await
        .doing(doing)?;
        if errors == WARN_AFTER && queued.rows_affected() > 0 {
            let data = json!({
                "code": SERVER_ERROR,
                "message": format!(
                    "the server could not hand this job to a worker {errors} times in a row because of an error of its \
                     own; it tries again at least once a minute, and the job loses nothing: see the server's log"
                ),
                "data": { "server_errors": errors },
            });
            event_insert(&mut tx, job, "warning", now, data).await?;
        }
        self.commit(tx, doing).await?;
        self.wake_job(job);
        self.wake_queue();
        Ok(())
    }

    /// Resets a job's count of consecutive server errors, after the job was handed out without one.
    pub async fn claim_completed(&self, job: JobId, attempt: u64) -> Result<(), StoreError> {
        sqlx::query("UPDATE jobs SET server_errors = 0 WHERE id = ? AND attempt = ? AND server_errors > 0")
            .bind(job.to_string())
            .bind(int(attempt))
            .execute(&self.writer)
            .await
            .doing("reset a job's count of server errors")?;
        Ok(())
    }

    /// Returns when the next job that waits after a server error is due, Unix time in milliseconds; `None` = no job waits.
    pub async fn claim_due(&self, now: i64) -> Result<Option<i64>, StoreError> {
        sqlx::query_scalar(NEXT_DUE).bind(now).fetch_one(&self.readers).await.doing("find jobs that wait")
    }
}

/// Returns the pause of a job after this number of consecutive server errors, in milliseconds.
fn pause_ms(errors: u32) -> i64 {
    let doublings = errors.saturating_sub(1).min(16);
    (FIRST_PAUSE_MS << doublings).min(LONGEST_PAUSE_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_from_a_second_to_a_minute() {
        let pauses: Vec<i64> = [1, 2, 3, 6, 7, 8, u32::MAX].into_iter().map(pause_ms).collect();
        assert_eq!(pauses, [1_000, 2_000, 4_000, 32_000, 60_000, 60_000, 60_000]);
    }
}
