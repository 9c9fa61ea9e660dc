//! Numbers for the server's metrics. Each is an index lookup, or a query of a small table.

use sqlx::Row;

use super::{Doing, Store, StoreError, count_column};

/// The database's part of the server's metrics.
#[derive(Debug, Clone, Default)]
pub struct Measures {
    /// Time of creation of the oldest queued job, Unix time in milliseconds.
    pub oldest_queued_at: Option<i64>,
    /// Number of running jobs whose reward does not answer.
    pub waiting: u64,
    /// Number of paused jobs by reason.
    pub paused: Vec<(Option<String>, u64)>,
    /// Number of active alerts of jobs that have not ended.
    pub alerts: u64,
    /// Number of published checkpoints.
    pub checkpoints: u64,
    /// Number of datasets in the database.
    pub datasets: u64,
    /// Number of browser sessions.
    pub sessions: u64,
    /// Number of entries that the audit log ever had, including removed ones.
    pub changes: u64,
}

impl Store {
    /// Reads all numbers of the database for the server's metrics.
    pub async fn measures(&self) -> Result<Measures, StoreError> {
        let doing = "take measurements";
        let row = sqlx::query(
            "SELECT (SELECT MIN(created_at) FROM jobs WHERE state = 'queued') AS oldest, \
             (SELECT COUNT(*) FROM jobs WHERE state = 'running' AND status_reason = 'waiting_for_reward') AS waiting, \
             (SELECT COUNT(*) FROM alerts JOIN jobs ON jobs.id = alerts.job_id WHERE alerts.cleared_step IS NULL \
              AND jobs.finished_at IS NULL) AS alerts, \
             (SELECT COUNT(*) FROM checkpoints) AS checkpoints, (SELECT COUNT(*) FROM datasets) AS datasets, \
             (SELECT COUNT(*) FROM sessions) AS sessions, (SELECT COALESCE(MAX(id), 0) FROM audit) AS changes",
        )
        .fetch_one(&self.readers)
        .await
        .doing(doing)?;
        let paused = sqlx::query(
            "SELECT status_reason, COUNT(*) AS jobs FROM jobs WHERE state = 'paused' GROUP BY status_reason",
        )
        .fetch_all(&self.readers)
        .await
        .doing(doing)?;
        let paused = paused
            .iter()
            .map(|row| Ok((row.try_get("status_reason").ok().flatten(), count_column(row, "jobs")?)))
            .collect::<Result<_, StoreError>>()?;
        Ok(Measures {
            oldest_queued_at: row.try_get("oldest").ok().flatten(),
            waiting: count_column(&row, "waiting")?,
            paused,
            alerts: count_column(&row, "alerts")?,
            checkpoints: count_column(&row, "checkpoints")?,
            datasets: count_column(&row, "datasets")?,
            sessions: count_column(&row, "sessions")?,
            changes: count_column(&row, "changes")?,
        })
    }
}
