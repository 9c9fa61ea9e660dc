//! The output of a run: events (history, SSE feed and outbox in one), steps, samples and logs.

use futures::future::BoxFuture;
use rlood_types::webhooks::message::RewardDetail;
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::claims::owned_row;
use super::doctor::{alert_clear, alert_store, diverged_store, ending_store, phase_store};
use super::{
    Doing, Page, Store, StoreError, column, corrupt, count_column, cursor, cursor_key, int, json_column, page,
    parse_cursor, to_json, variant_column, variant_name,
};
use crate::event::{Event, Metrics, Phase, Sample, SamplePhase};
use crate::failpoint::{fail_point, without};
use crate::id::JobId;
use crate::job::{Ending, EndingCode};
use crate::protocol::EventBatch;

/// One event of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct EventRow {
    /// Sequence number: counts from 1 per job, without gaps.
    pub seq: i64,
    /// Type of the event: `job.created`, `step`, ….
    pub kind: String,
    /// Attempt that the event belongs to; 0 before the first claim.
    pub attempt: u64,
    /// Time of the event, Unix time in milliseconds.
    pub time: i64,
    /// Data of the event, depending on its type.
    pub data: Value,
}

/// Metrics of one step or one evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRow {
    /// Number of the optimizer step.
    pub step: u64,
    /// Whether the metrics belong to training or to evaluation.
    pub kind: SamplePhase,
    /// Time of the report, Unix time in milliseconds.
    pub time: i64,
    /// Metrics with TRL's names.
    pub metrics: Metrics,
}

/// One line that a worker logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRow {
    /// Number of the line, in ascending order.
    pub id: i64,
    /// Number of the attempt.
    pub attempt: u64,
    /// Time of the line, Unix time in milliseconds.
    pub time: i64,
    /// Text of the line.
    pub line: String,
}

/// Metrics that a `step` event includes to show progress without another request. The other metrics are in the step's row.
const HEADLINES: [&str; 10] = [
    "reward",
    "reward_std",
    "kl",
    "entropy",
    "loss",
    "grad_norm",
    "learning_rate",
    "completions/mean_length",
    "completions/clipped_ratio",
    "warm_up/loss",
];

/// Maximum length of a stored log line, in bytes.
const MAX_LOG_LINE: usize = 8192;

impl Store {
    /// Appends a worker's report in one transaction; `Ok(false)` if this batch was stored before. `LeaseLost` if the attempt does
    /// not own the job.
    pub async fn events_append(&self, job: JobId, batch: &EventBatch, now: i64) -> Result<bool, StoreError> {
        let doing = "append events";
        let EventBatch { attempt, batch, events, log } = batch;
        let mut tx = self.begin(doing).await?;
        let row = owned_row(&mut tx, job, *attempt).await?;
        let fresh = sqlx::query("UPDATE jobs SET last_batch = ?1 WHERE id = ?2 AND COALESCE(last_batch, -1) < ?1")
            .bind(int(*batch))
            .bind(job.to_string())
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        if fresh.rows_affected() == 0 {
            return Ok(false);
        }
        let mut phase = row.phase;
        for event in events {
            event_store(&mut tx, job, *attempt, event, &mut phase, now).await?;
        }
        for line in log {
            log_insert(&mut tx, job, *attempt, line, now).await?;
        }
        self.commit(tx, doing).await?;
        self.wake_job(job);
        Ok(true)
    }

    /// Returns events with `seq > after_seq`, in order.
    pub async fn event_page(&self, job: JobId, after_seq: i64, limit: u32) -> Result<Vec<EventRow>, StoreError> {
        sqlx::query(
            "SELECT seq, type, attempt, time, data FROM events WHERE job_id = ? AND seq > ? ORDER BY seq LIMIT ?",
        )
        .bind(job.to_string())
        .bind(after_seq)
        .bind(limit.clamp(1, 1000))
        .fetch_all(&self.readers)
        .await
        .doing("read the events of a job")?
        .iter()
        .map(EventRow::read)
        .collect()
    }

    /// Returns the latest `seq`; 0 if there is none.
    pub async fn event_latest_seq(&self, job: JobId) -> Result<i64, StoreError> {
        sqlx::query_scalar("SELECT COALESCE(MAX(seq), 0) FROM events WHERE job_id = ?")
            .bind(job.to_string())
            .fetch_one(&self.readers)
            .await
            .doing("read the latest event of a job")
    }

    /// Returns the steps from `min_step` to `max_step` (both inclusive), ordered by step, with training before evaluation;
    /// `kind` `None` = both.
    pub async fn step_page(
        &self,
        job: JobId,
        kind: Option<SamplePhase>,
        min_step: u64,
        max_step: u64,
    ) -> Result<Vec<StepRow>, StoreError> {
        sqlx::query(
            "SELECT step, kind, time, metrics FROM steps WHERE job_id = ?1 AND step BETWEEN ?2 AND ?3 \
             AND (?4 IS NULL OR kind = ?4) ORDER BY step, kind DESC",
        )
        .bind(job.to_string())
        .bind(int(min_step))
        .bind(int(max_step))
        .bind(kind.map(|kind| variant_name(&kind)).transpose()?)
        .fetch_all(&self.readers)
        .await
        .doing("read the training steps of a job")?
        .iter()
        .map(StepRow::read)
        .collect()
    }

    /// Returns a page of log lines, in order.
    pub async fn log_page(&self, job: JobId, after: Option<&str>, limit: u32) -> Result<Page<LogRow>, StoreError> {
        let after = match after {
            Some(after) => cursor_key::<i64>(&parse_cursor::<1>("logs", after)?[0])?,
            None => 0,
        };
        let limit = limit.clamp(1, 1000);
        let rows =
            sqlx::query("SELECT id, attempt, time, line FROM logs WHERE job_id = ? AND id > ? ORDER BY id LIMIT ?")
                .bind(job.to_string())
                .bind(after)
                .bind(i64::from(limit) + 1)
                .fetch_all(&self.readers)
                .await
                .doing("read the log of a job")?;
        let data = rows.iter().map(LogRow::read).collect::<Result<Vec<_>, _>>()?;
        Ok(page(data, limit, |row| cursor("logs", [&row.id.to_string()])))
    }
}

fn event_store<'a>(
    tx: &'a mut SqliteConnection,
    job: JobId,
    attempt: u64,
    event: &'a Event,
    phase: &'a mut Option<Phase>,
    now: i64,
) -> BoxFuture<'a, Result<(), StoreError>> {
    Box::pin(async move {
        match event {
            Event::Phase { phase: new, step } => {
                sqlx::query("UPDATE jobs SET phase = ?, step = MAX(step, ?) WHERE id = ?")
                    .bind(variant_name(new)?)
                    .bind(int(*step))
                    .bind(job.to_string())
                    .execute(&mut *tx)
                    .await
                    .doing("store the training phase of a job")?;
                if phase.map(history_group) != Some(history_group(*new)) {
                    event_insert(tx, job, "phase", now, json!({ "phase": new, "step": step })).await?;
                }
                *phase = Some(*new);
            }
            Event::Step { step, kind, metrics } => {
                sqlx::query(
                "INSERT INTO steps (job_id, step, kind, attempt, time, metrics, reward) VALUES (?, ?, ?, ?, ?, ?, ?) \
                 ON CONFLICT (job_id, step, kind) DO UPDATE SET attempt = excluded.attempt, time = excluded.time, \
                 metrics = excluded.metrics, reward = excluded.reward",
            )
            .bind(job.to_string())
            .bind(int(*step))
            .bind(variant_name(kind)?)
            .bind(int(attempt))
            .bind(now)
            .bind(to_json("metrics", metrics)?)
            .bind(metrics.get("reward").copied().flatten())
            .execute(&mut *tx)
            .await
            .doing("store a training step of a job")?;
                sqlx::query("UPDATE jobs SET step = MAX(step, ?) WHERE id = ?")
                    .bind(int(*step))
                    .bind(job.to_string())
                    .execute(&mut *tx)
                    .await
                    .doing("store a training step of a job")?;
                let headlines: Metrics =
                    metrics.iter().filter(is_headline).map(|(key, value)| (key.clone(), *value)).collect();
                event_insert(tx, job, "step", now, json!({ "step": step, "kind": kind, "metrics": headlines })).await?;
            }
            Event::Samples { samples } => samples_store(tx, job, attempt, samples).await?,
            Event::Warning { code, message, data } => {
                let data = json!({ "code": code, "message": message, "data": data });
                event_insert(tx, job, "warning", now, data).await?;
            }
            Event::Reward { reward, change, message, data } => {
                let data = RewardDetail { reward: reward.clone(), message: message.clone(), data: data.clone() };
                event_insert(tx, job, change.event(), now, data).await?;
            }
            Event::Alert { alert } => alert_store(tx, job, alert, now).await?,
            Event::AlertCleared { rule, raised_step, step } => {
                alert_clear(tx, job, *rule, *raised_step, *step, now).await?;
            }
            Event::TrainingPhase { change } => phase_store(tx, job, change, now).await?,
            Event::Diverged { first_step, step } => diverged_store(tx, job, *first_step, *step, now).await?,
            Event::EarlyStopping { step, metric, best, best_step, evaluations } => {
                let message = format!(
                    "ended after step {step}: {metric} has had no new best for {evaluations} evaluations{}",
                    best.zip(*best_step)
                        .map_or_else(String::new, |(best, at)| format!("; its best is {best:.4} at step {at}"))
                );
                let ending = Ending {
                    code: EndingCode::EarlyStopping,
                    message: message.clone(),
                    step: *step,
                    rule: None,
                    metric: Some(metric.clone()),
                    best: *best,
                    best_step: *best_step,
                    good_before_step: None,
                };
                ending_store(tx, job, &ending).await?;
                let data = json!({ "step": step, "metric": metric, "best": best, "best_step": best_step,
                "evaluations": evaluations, "message": message });
                event_insert(tx, job, "early_stopping", now, data).await?;
            }
        }
        Ok(())
    })
}

/// Returns the group of a phase in the history; a change within a group is no event. Rollout, reward and train alternate every
/// step, so their changes are only in the job's row.
fn history_group(phase: Phase) -> u8 {
    match phase {
        Phase::Loading => 0,
        Phase::Rollout | Phase::Reward | Phase::Train => 1,
        Phase::Eval => 2,
        Phase::Checkpoint => 3,
    }
}

fn is_headline((key, _): &(&String, &Option<f64>)) -> bool {
    HEADLINES.contains(&key.strip_prefix("eval_").unwrap_or(key))
}

async fn samples_store(
    tx: &mut SqliteConnection,
    job: JobId,
    attempt: u64,
    samples: &[Sample],
) -> Result<(), StoreError> {
    let doing = "store samples";
    let mut of: Option<(u64, SamplePhase)> = None;
    for sample in samples {
        let phase = variant_name(&sample.phase)?;
        if of != Some((sample.step, sample.phase)) {
            of = Some((sample.step, sample.phase));
            // An evaluation that a former attempt reported just before it ended is reported again by this one, and replaces the
            // stored one.
            sqlx::query("DELETE FROM samples WHERE job_id = ? AND phase = ? AND step = ? AND attempt < ?")
                .bind(job.to_string())
                .bind(&phase)
                .bind(int(sample.step))
                .bind(int(attempt))
                .execute(&mut *tx)
                .await
                .doing(doing)?;
        }
        sqlx::query("INSERT INTO samples (job_id, step, phase, attempt, reward, sample) VALUES (?, ?, ?, ?, ?, ?)")
            .bind(job.to_string())
            .bind(int(sample.step))
            .bind(phase)
            .bind(int(attempt))
            .bind(sample.reward)
            .bind(to_json("sample", sample)?)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
    }
    Ok(())
}

/// Appends an event to a job's history; returns its `seq`. Must be in the transaction of the change that it reports.
pub(super) async fn event_insert(
    tx: &mut SqliteConnection,
    job: JobId,
    kind: &str,
    now: i64,
    data: impl Serialize + Send,
) -> Result<i64, StoreError> {
    event_append(tx, job, kind, now, to_json("event", &data)?).await
}

/// Like [`event_insert`], with the data as JSON text.
pub(super) fn event_append<'a>(
    tx: &'a mut SqliteConnection,
    job: JobId,
    kind: &'a str,
    now: i64,
    data: String,
) -> BoxFuture<'a, Result<i64, StoreError>> {
    Box::pin(async move {
        let doing = "append an event";
        if without!(SameTransaction) {
            for apart in ["COMMIT", "BEGIN IMMEDIATE"] {
                sqlx::query(apart).execute(&mut *tx).await.doing(doing)?;
            }
        }
        fail_point!("store.event", kind).map_err(sqlx::Error::Io).doing(doing)?;
        let (seq, attempt): (i64, i64) =
            sqlx::query_as("UPDATE jobs SET next_seq = next_seq + 1 WHERE id = ? RETURNING next_seq - 1, attempt")
                .bind(job.to_string())
                .fetch_one(&mut *tx)
                .await
                .doing(doing)?;
        sqlx::query("INSERT INTO events (job_id, seq, type, attempt, time, data) VALUES (?, ?, ?, ?, ?, ?)")
            .bind(job.to_string())
            .bind(seq)
            .bind(kind)
            .bind(attempt)
            .bind(now)
            .bind(data)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        Ok(seq)
    })
}

pub(super) async fn log_insert(
    tx: &mut SqliteConnection,
    job: JobId,
    attempt: u64,
    line: &str,
    now: i64,
) -> Result<(), StoreError> {
    let kept = line.get(..line.floor_char_boundary(MAX_LOG_LINE)).unwrap_or(line);
    sqlx::query("INSERT INTO logs (job_id, attempt, time, line) VALUES (?, ?, ?, ?)")
        .bind(job.to_string())
        .bind(int(attempt))
        .bind(now)
        .bind(kept)
        .execute(tx)
        .await
        .doing("append a line to the log of a job")?;
    Ok(())
}

impl EventRow {
    fn read(row: &SqliteRow) -> Result<EventRow, StoreError> {
        Ok(EventRow {
            seq: column(row, "seq")?,
            kind: column(row, "type")?,
            attempt: count_column(row, "attempt")?,
            time: column(row, "time")?,
            data: json_column(row, "data")?,
        })
    }
}

impl StepRow {
    fn read(row: &SqliteRow) -> Result<StepRow, StoreError> {
        Ok(StepRow {
            step: count_column(row, "step")?,
            kind: variant_column(row, "kind")?.ok_or_else(|| corrupt("kind")("NULL"))?,
            time: column(row, "time")?,
            metrics: json_column(row, "metrics")?,
        })
    }
}

impl LogRow {
    fn read(row: &SqliteRow) -> Result<LogRow, StoreError> {
        Ok(LogRow {
            id: column(row, "id")?,
            attempt: count_column(row, "attempt")?,
            time: column(row, "time")?,
            line: column(row, "line")?,
        })
    }
}
