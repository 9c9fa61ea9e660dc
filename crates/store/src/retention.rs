//! What finished jobs leave behind, removed after a while where the operator says so.

use super::artifacts::CheckpointRow;
use super::{Doing, Store, StoreError};

/// Rows that one transaction removes: the writer must not be held for long.
const AT_ONCE: i64 = 5_000;

/// What of a finished job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// Its history.
    Events,
    /// Its completions.
    Samples,
    /// Its metrics by step.
    Metrics,
    /// Its workers' words.
    Logs,
    /// The completions and reward answers since its last checkpoint, for a retry.
    Journal,
}

impl Leftover {
    /// A job that has some, then some of it; both end with a limit.
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
    /// Removes some of what jobs that finished before this time (Unix ms) left; returns how many rows. 0 = nothing is left.
    pub async fn leftovers_remove(&self, what: Leftover, finished_before: i64) -> Result<u64, StoreError> {
        let doing = "remove what finished jobs left";
        let (find, remove) = what.statements();
        let job: Option<String> =
            sqlx::query_scalar(find).bind(finished_before).fetch_optional(&self.readers).await.doing(doing)?;
        let Some(job) = job else { return Ok(0) };
        let removed = sqlx::query(remove).bind(job).bind(AT_ONCE).execute(&self.writer).await.doing(doing)?;
        Ok(removed.rows_affected())
    }

    /// Forgets the checkpoints, but for pinned ones, of a job that finished before this time; the caller then removes their
    /// directories. Empty = there is no such job any more.
    pub async fn leftover_checkpoints_remove(&self, finished_before: i64) -> Result<Vec<CheckpointRow>, StoreError> {
        let doing = "remove checkpoints of finished jobs";
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

    /// Removes some of the record of changes from before this time; returns how many rows.
    pub async fn audit_remove(&self, before: i64) -> Result<u64, StoreError> {
        let removed = sqlx::query("DELETE FROM audit WHERE id IN (SELECT id FROM audit WHERE time < ? LIMIT ?)")
            .bind(before)
            .bind(AT_ONCE)
            .execute(&self.writer)
            .await
            .doing("remove old entries of the record of changes")?;
        Ok(removed.rows_affected())
    }

    /// Removes some messages that were delivered or given up before this time, with their log; returns how many.
    pub async fn deliveries_remove(&self, before: i64) -> Result<u64, StoreError> {
        let removed = sqlx::query(
            "DELETE FROM deliveries WHERE id IN \
             (SELECT id FROM deliveries WHERE state <> 'pending' AND finished_at < ? LIMIT ?)",
        )
        .bind(before)
        .bind(AT_ONCE)
        .execute(&self.writer)
        .await
        .doing("remove old messages")?;
        Ok(removed.rows_affected())
    }
}
