//! Retention: removes data of ended jobs after a configured time.

use super::artifacts::CheckpointRow;
use super::{Doing, Store, StoreError};

/// Maximum number of rows that one transaction removes, because the writer connection must not be held for long.
const BATCH_SIZE: i64 = 5_000;

/// Kind of data of an ended job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// Events, the job's history.
    Events,
    /// Completions with their rewards.
    Samples,
    /// Metrics of every optimizer step.
    Metrics,
    /// Log lines of the job's workers.
    Logs,
    /// Completions and reward answers since the last checkpoint, which a retry uses.
    Journal,
}

impl Leftover {
    /// Returns two statements: one selects a job that has such data, the other removes some of it; both end with a limit.
    fn statements(self) -> (&'static str, &'static str) {
        match self {
            Leftover::Events => (
                "SELECT id FROM jobs WHERE finished_at < ? AND EXISTS (SELECT 1 FROM events WHERE job_id = jobs.id) LIMIT 1",
                "DELETE FROM events WHERE job_id = ?1 AND seq IN (SELECT seq FROM events WHERE job_id = ?1 ORDER BY seq LIMIT ?2)",
            ),
            Leftover::Samples => (
                "SELECT id FROM jobs WHERE finished_at < ? AND EXISTS (SELECT 1 FROM samples WHERE job_id = jobs.id) LIMIT 1",
                "DELETE FROM samples WHERE id IN (SELECT id FROM samples WHERE job_id = ?1 LIMIT ?2)",
            ),
            Leftover::Metrics => (
                "SELECT id FROM jobs WHERE finished_at < ? AND EXISTS (SELECT 1 FROM steps WHERE job_id = jobs.id) LIMIT 1",
                "DELETE FROM steps WHERE job_id = ?1 AND (step, kind) IN (SELECT step, kind FROM steps WHERE job_id = ?1 LIMIT ?2)",
            ),
            Leftover::Logs => (
                "SELECT id FROM jobs WHERE finished_at < ? AND EXISTS (SELECT 1 FROM logs WHERE job_id = jobs.id) LIMIT 1",
                "DELETE FROM logs WHERE id IN (SELECT id FROM logs WHERE job_id = ?1 LIMIT ?2)",
            ),
            Leftover::Journal => (
                "SELECT id FROM jobs WHERE finished_at < ? AND EXISTS (SELECT 1 FROM journal WHERE job_id = jobs.id) LIMIT 1",
                "DELETE FROM journal WHERE id IN (SELECT id FROM journal WHERE job_id = ?1 LIMIT ?2)",
            ),
        }
    }
}

impl Store {
    /// Removes some data of jobs that ended before this time (Unix time in milliseconds); returns the number of
    /// rows. 0 = nothing is left.
    pub async fn leftovers_remove(&self, what: Leftover, finished_before: i64) -> Result<u64, StoreError> {
        let doing = "remove data of ended jobs";
        let (find, remove) = what.statements();
        let job: Option<String> =
            sqlx::query_scalar(find).bind(finished_before).fetch_optional(&self.readers).await.doing(doing)?;
        let Some(job) = job else { return Ok(0) };
        let removed = sqlx::query(remove).bind(job).bind(BATCH_SIZE).execute(&self.writer).await.doing(doing)?;
        Ok(removed.rows_affected())
    }

    /// Deletes the rows of the unpinned checkpoints of one job that ended before this time; the caller then removes their
    /// directories. Empty = there is no such job any more.
    pub async fn leftover_checkpoints_remove(&self, finished_before: i64) -> Result<Vec<CheckpointRow>, StoreError> {
        let doing = "remove checkpoints of ended jobs";
        let job: Option<String> = sqlx::query_scalar(
            "SELECT id FROM jobs WHERE finished_at < ? \
             AND EXISTS (SELECT 1 FROM checkpoints WHERE job_id = jobs.id AND pinned = 0) LIMIT 1",
        )
        .bind(finished_before)
        .fetch_optional(&self.readers)
        .await
        .doing(doing)?;
        let Some(job) = job else { return Ok(Vec::new()) };
        sqlx::query("DELETE FROM checkpoints WHERE job_id = ? AND pinned = 0 RETURNING *")
            .bind(job)
            .fetch_all(&self.writer)
            .await
            .doing(doing)?
            .iter()
            .map(CheckpointRow::read)
            .collect()
    }

    /// Removes some entries of the audit log from before this time; returns the number of rows.
    pub async fn audit_remove(&self, before: i64) -> Result<u64, StoreError> {
        let removed = sqlx::query("DELETE FROM audit WHERE id IN (SELECT id FROM audit WHERE time < ? LIMIT ?)")
            .bind(before)
            .bind(BATCH_SIZE)
            .execute(&self.writer)
            .await
            .doing("remove old entries of the audit log")?;
        Ok(removed.rows_affected())
    }

    /// Removes some messages that were delivered or abandoned before this time, with their log; returns how many.
    pub async fn deliveries_remove(&self, before: i64) -> Result<u64, StoreError> {
        let removed = sqlx::query(
            "DELETE FROM deliveries WHERE id IN \
             (SELECT id FROM deliveries WHERE state <> 'pending' AND finished_at < ? LIMIT ?)",
        )
        .bind(before)
        .bind(BATCH_SIZE)
        .execute(&self.writer)
        .await
        .doing("remove old webhook messages")?;
        Ok(removed.rows_affected())
    }
}
