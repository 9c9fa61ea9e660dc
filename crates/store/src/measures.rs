//! Numbers for the measurements: each is a look at an index or at a small table.

use sqlx::Row;

use super::{Doing, Store, StoreError, count_column};

/// What the database tells of the server's state.
#[derive(Debug, Clone, Default)]
pub struct Measures {
    /// When the first job of the queue was made, Unix ms.
    pub oldest_queued_at: Option<i64>,
    /// Running jobs whose reward does not answer.
    pub waiting: u64,
    /// Paused jobs by reason.
    pub paused: Vec<(Option<String>, u64)>,
    /// Alerts that are on, of jobs that are not over.
    pub alerts: u64,
    /// Published checkpoints.
    pub checkpoints: u64,
    /// Datasets.
    pub datasets: u64,
    /// Sessions.
    pub sessions: u64,
    /// Entries of the record of changes, removed ones too.
    pub changes: u64,
}

impl Store {
    /// All of them.
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
