//! Statistics of jobs' rewards as reported by their workers, and jobs that wait for a reward service or a rollout server.

use rlood_types::webhooks::message::QueuedDetail;
use sqlx::sqlite::SqliteRow;

use super::claims::owned_row;
use super::jobs::job_row;
use super::moves::{Transition, job_transition};
use super::{Doing, Store, StoreError, column, count_column, id_column, int, json_column, to_json};
use crate::id::JobId;
use crate::job::State;
use crate::protocol::{RewardHealth, RewardReport, RewardReports};

/// Selects jobs that wait for a reward service or for a rollout server.
pub const OUTAGE_JOBS: &str = "SELECT id, next_seq - 1 AS last_seq FROM jobs INDEXED BY jobs_outage \
     WHERE state = 'paused' AND status_reason IN ('reward_outage', 'rollout_outage', 'environment_outage') ORDER BY id";
/// The reasons of pauses that end when a service is back.
const OUTAGES: [&str; 3] = ["reward_outage", "rollout_outage", "environment_outage"];
/// Maximum size of one reward's statistics, in bytes; larger ones are stored without messages.
const MAX_BYTES: usize = 256 * 1024;
/// Maximum number of rewards of a job, including the evaluation's own.
const MAX_REWARDS: usize = 64;

/// Statistics of one reward of one job.
#[derive(Debug, Clone, PartialEq)]
pub struct RewardHealthRow {
    /// Id of the job.
    pub job: JobId,
    /// Number of the attempt that reported last.
    pub attempt: u64,
    /// Time of the report, Unix time in milliseconds.
    pub time: i64,
    /// Name and statistics of the reward.
    pub report: RewardReport,
}

impl Store {
    /// Stores a worker's report in place of the previous one. `LeaseLost` if the attempt does not own the job.
    pub async fn reward_reports_store(&self, job: JobId, reports: &RewardReports, now: i64) -> Result<(), StoreError> {
        let doing = "store how rewards do";
        let RewardReports { attempt, rewards } = reports;
        let mut tx = self.begin_relaxed(doing).await?;
        owned_row(&mut tx, job, *attempt).await?;
        for RewardReport { name, evaluation, health } in rewards.iter().take(MAX_REWARDS) {
            let mut text = to_json("health", health)?;
            if text.len() > MAX_BYTES {
                let bare = RewardHealth { failures: Vec::new(), slowest: None, ..health.clone() };
                text = to_json("health", &bare)?;
            }
            sqlx::query(
                "INSERT INTO reward_health (job_id, evaluation, name, attempt, time, health) VALUES (?, ?, ?, ?, ?, ?) \
                 ON CONFLICT (job_id, evaluation, name) DO UPDATE SET attempt = excluded.attempt, time = excluded.time, \
                 health = excluded.health",
            )
            .bind(job.to_string())
            .bind(evaluation)
            .bind(name)
            .bind(int(*attempt))
            .bind(now)
            .bind(text)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        }
        self.commit(tx, doing).await
    }

    /// Returns the statistics of a job's rewards.
    pub async fn reward_health(&self, job: JobId) -> Result<Vec<RewardHealthRow>, StoreError> {
        sqlx::query("SELECT * FROM reward_health WHERE job_id = ? ORDER BY evaluation, name")
            .bind(job.to_string())
            .fetch_all(&self.readers)
            .await
            .doing("read statistics of rewards")?
            .iter()
            .map(RewardHealthRow::read)
            .collect()
    }

    /// Returns the most recently reported rewards, latest first, at most `limit`; of an owner's jobs (`None` = all).
    pub async fn reward_health_latest(
        &self,
        owner: Option<&str>,
        limit: u32,
    ) -> Result<Vec<RewardHealthRow>, StoreError> {
        let query = match owner {
            None => sqlx::query("SELECT * FROM reward_health ORDER BY time DESC LIMIT ?"),
            Some(owner) => sqlx::query(
                "SELECT * FROM reward_health WHERE job_id IN (SELECT id FROM jobs WHERE owner = ?) \
                 ORDER BY time DESC LIMIT ?",
            )
            .bind(owner),
        };
        query
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .doing("read statistics of rewards")?
            .iter()
            .map(RewardHealthRow::read)
            .collect()
    }

    /// Returns the jobs that are paused because a reward service or all rollout servers are unavailable, each with the `seq` of its latest event.
    pub async fn jobs_in_outage(&self) -> Result<Vec<(JobId, i64)>, StoreError> {
        sqlx::query(OUTAGE_JOBS)
            .fetch_all(&self.readers)
            .await
            .doing("find jobs that wait for a service")?
            .iter()
            .map(|row| Ok((id_column(row, "id")?, column(row, "last_seq")?)))
            .collect()
    }

    /// Queues a job again whose reward service or rollout server is available again; `false` if it no longer waits for that, because a user resumed,
    /// paused or cancelled it.
    pub async fn job_resume_after_outage(&self, id: JobId, now: i64) -> Result<bool, StoreError> {
        let doing = "resume a job after an outage";
        let mut tx = self.begin(doing).await?;
        let row = job_row(&mut tx, id).await?;
        let reason = row.status_reason.clone().filter(|reason| OUTAGES.contains(&reason.as_str()));
        if row.state != State::Paused || reason.is_none() {
            return Ok(false);
        }
        let by = Some("server".to_owned());
        let data = QueuedDetail { by, reason, ..QueuedDetail::default() };
        job_transition(&mut tx, &row, Transition::to(State::Queued), "job.resumed", data, now).await?;
        self.commit(tx, doing).await?;
        self.wake_job(id);
        self.wake_queue();
        Ok(true)
    }
}

impl RewardHealthRow {
    fn read(row: &SqliteRow) -> Result<RewardHealthRow, StoreError> {
        Ok(RewardHealthRow {
            job: id_column(row, "job_id")?,
            attempt: count_column(row, "attempt")?,
            time: column(row, "time")?,
            report: RewardReport {
                name: column(row, "name")?,
                evaluation: column(row, "evaluation")?,
                health: json_column(row, "health")?,
            },
        })
    }
}
