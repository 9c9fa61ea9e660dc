//! How the rewards of jobs do, as their workers tell it; and jobs that wait for a reward service.

use sqlx::sqlite::SqliteRow;

use super::claims::owned_row;
use super::jobs::job_row;
use super::moves::{Leave, job_leave};
use super::{Doing, Store, StoreError, column, count_column, id_column, int, json_column, to_json};
use crate::id::JobId;
use crate::job::State;
use crate::lifecycle::message::QueuedDetail;
use crate::protocol::{RewardHealth, RewardReport, RewardReports};

/// Jobs that wait for a reward service.
pub const OUTAGE_JOBS: &str = "SELECT id, next_seq - 1 AS last_seq FROM jobs INDEXED BY jobs_outage \
     WHERE state = 'paused' AND status_reason = 'reward_outage' ORDER BY id";
/// Bytes of one reward's health; a larger one is kept without its messages.
const MAX_BYTES: usize = 256 * 1024;
/// Rewards of a job, the evaluation's own among them.
const MAX_REWARDS: usize = 64;

/// How one reward of one job does.
#[derive(Debug, Clone, PartialEq)]
pub struct RewardHealthRow {
    /// The job.
    pub job: JobId,
    /// The attempt that told last.
    pub attempt: u64,
    /// Unix ms.
    pub time: i64,
    /// The reward and its counts.
    pub report: RewardReport,
}

impl Store {
    /// Keeps what a worker tells, in place of what it told before. `LeaseLost` when the attempt does not own the job.
    pub async fn reward_reports_store(&self, job: JobId, reports: &RewardReports, now: i64) -> Result<(), StoreError> {
        let doing = "store how rewards do";
        let RewardReports { attempt, rewards } = reports;
        let mut tx = self.begin_soon(doing).await?;
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

    /// What is known of a job's rewards.
    pub async fn reward_health(&self, job: JobId) -> Result<Vec<RewardHealthRow>, StoreError> {
        sqlx::query("SELECT * FROM reward_health WHERE job_id = ? ORDER BY evaluation, name")
            .bind(job.to_string())
            .fetch_all(&self.readers)
            .await
            .doing("read how rewards do")?
            .iter()
            .map(RewardHealthRow::read)
            .collect()
    }

    /// The rewards that were told of last, at most so many, latest first; of an owner's jobs, or None = of all.
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
            .doing("read how rewards do")?
            .iter()
            .map(RewardHealthRow::read)
            .collect()
    }

    /// The jobs that are paused because a reward service is away, and the `seq` of the latest event of each.
    pub async fn jobs_in_outage(&self) -> Result<Vec<(JobId, i64)>, StoreError> {
        sqlx::query(OUTAGE_JOBS)
            .fetch_all(&self.readers)
            .await
            .doing("find jobs that wait for a reward service")?
            .iter()
            .map(|row| Ok((id_column(row, "id")?, column(row, "last_seq")?)))
            .collect()
    }

    /// Queues a job again whose reward service is back; `false` when it does not wait for that (any more): somebody resumed,
    /// paused or cancelled it meanwhile.
    pub async fn job_resume_after_outage(&self, id: JobId, now: i64) -> Result<bool, StoreError> {
        let doing = "resume a job after an outage";
        let mut tx = self.begin(doing).await?;
        let row = job_row(&mut tx, id).await?;
        if row.state != State::Paused || row.status_reason.as_deref() != Some("reward_outage") {
            return Ok(false);
        }
        let (by, reason) = (Some("server".to_owned()), Some("reward_outage".to_owned()));
        let data = QueuedDetail { by, reason, ..QueuedDetail::default() };
        job_leave(&mut tx, &row, Leave::to(State::Queued), "job.resumed", data, now).await?;
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
