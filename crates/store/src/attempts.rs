//! Progress of jobs and ends of their attempts, which decide whether an end counts as a strike (a failure without progress).
//!
//! An attempt's cursor is (optimizer steps, journal entries of the next step, rows and answers of the current evaluation), compared
//! in this order. A job stores the highest cursor that any attempt reached. An attempt that passes it made progress; one that only
//! repeats earlier work did not. A rollout in the journal counts as much as a reward answer, because later attempts reuse it.

use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::claims::MAX_FAILED_ATTEMPTS;
use super::doctor::alert_store;
use super::{
    Doing, JobRow, Store, StoreError, column, count_column, int, json_column, to_json, variant_column, variant_name,
};
use crate::event::SamplePhase;
use crate::failpoint::without;
use crate::id::JobId;
use crate::job::{Failure, FailureClass};
use crate::spec::Plan;
use rlood_types::doctor::AttemptEnd;
use rlood_types::doctor::restarts::{ENDS_AN_ALERT, many_restarts};

/// A point in a job's progress; later points are greater.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cursor(
    /// Number of completed optimizer steps.
    pub u64,
    /// Number of rollouts and reward answers of later steps in the journal.
    pub u64,
    /// Number of sampled rows and reward answers of the evaluation that follows the step.
    pub u64,
);

/// How an attempt ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct End<'a> {
    pub reason: &'static str,
    /// How the worker's process ended, if it is known.
    pub detail: Option<&'a str>,
    pub failed: bool,
    pub progressed: bool,
}

impl Store {
    /// Lists the latest ends of a job's attempts, newest first.
    pub async fn attempt_ends(&self, job: JobId, limit: u32) -> Result<Vec<AttemptEnd>, StoreError> {
        let mut reader = self.readers.acquire().await.doing("list how the attempts of a job ended")?;
        latest_ends(&mut reader, job, "1", limit).await
    }
}

/// Returns the job's current progress. The journal may contain a later step than the events that have arrived: a step's rollout is
/// recorded as soon as the step before it is done (with overlap, a block earlier).
pub(super) async fn cursor(tx: &mut SqliteConnection, row: &JobRow) -> Result<Cursor, StoreError> {
    let doing = "read a job's progress";
    let (train, eval) = (variant_name(&SamplePhase::Train)?, variant_name(&SamplePhase::Eval)?);
    let newest = sqlx::query(
        "SELECT COALESCE(MAX(CASE WHEN phase = ?2 THEN step END), 0) AS train, \
         COALESCE(MAX(CASE WHEN phase = ?3 THEN step END), 0) AS eval FROM journal WHERE job_id = ?1",
    )
    .bind(row.id.to_string())
    .bind(&train)
    .bind(&eval)
    .fetch_one(&mut *tx)
    .await
    .doing(doing)?;
    let ahead = row.plan().map_or(0, |plan| steps_ahead(&plan));
    let begun = count_column(&newest, "train")?.saturating_sub(1 + ahead);
    let step = row.step.max(begun).max(count_column(&newest, "eval")?);
    let counts = sqlx::query(
        "SELECT (SELECT COUNT(*) FROM journal WHERE job_id = ?1 AND phase = ?2 AND step > ?4 \
         AND (reward IS NULL OR answer IS NOT NULL)) AS answers, \
         (SELECT COALESCE(SUM(CASE WHEN reward IS NULL THEN json_array_length(body) ELSE answer IS NOT NULL END), 0) \
         FROM journal WHERE job_id = ?1 AND phase = ?3 AND step = ?4) AS rows",
    )
    .bind(row.id.to_string())
    .bind(&train)
    .bind(&eval)
    .bind(int(step))
    .fetch_one(&mut *tx)
    .await
    .doing(doing)?;
    Ok(Cursor(step, count_column(&counts, "answers")?, count_column(&counts, "rows")?))
}

/// Returns the number of optimizer steps by which the journal may be ahead of training.
fn steps_ahead(plan: &Plan) -> u64 {
    let uses = u64::from(plan.rloo.num_iterations) * u64::from(plan.rloo.steps_per_generation);
    if plan.rloo.overlap { uses } else { 0 }
}

/// Returns whether the attempt that holds this row has passed the job's previous progress, and the highest point now.
pub(super) async fn progress(tx: &mut SqliteConnection, row: &JobRow) -> Result<(bool, Cursor), StoreError> {
    let now = cursor(tx, row).await?;
    if without!(Reached) {
        return Ok((row.step > 0, now));
    }
    let reached = row.reached.unwrap_or_default();
    Ok((now > reached, now.max(reached)))
}

/// Records at the beginning of an attempt, after the rewind to its checkpoint, that earlier progress is not its own. `before` is
/// the row as it was in the queue.
pub(super) async fn baseline_store(
    tx: &mut SqliteConnection,
    before: &JobRow,
    resume_step: u64,
) -> Result<(), StoreError> {
    // Returns the job's current progress. The journal may contain a later step than the events that have arrived: a step's rollout
    // is recorded as soon as the step before it is done (with `rloo.overlap`, one generation block earlier).
    let now = cursor(tx, &JobRow { step: resume_step, ..before.clone() }).await?;
    let reached = before.reached.unwrap_or(Cursor(before.step, 0, 0)).max(now);
    sqlx::query("UPDATE jobs SET reached = ? WHERE id = ?")
        .bind(to_json("reached", &reached)?)
        .bind(before.id.to_string())
        .execute(tx)
        .await
        .doing("store a job's progress")?;
    Ok(())
}

/// Records the end of an attempt, and raises an alert at every tenth end of the job.
pub(super) async fn end_store(
    tx: &mut SqliteConnection,
    row: &JobRow,
    end: End<'_>,
    now: i64,
) -> Result<(), StoreError> {
    let doing = "record the end of an attempt";
    let End { reason, detail, failed, progressed } = end;
    sqlx::query(
        "INSERT OR REPLACE INTO attempt_ends \
         (job_id, attempt, time, reason, phase, step, memory_bytes, detail, failed, progressed) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(row.id.to_string())
    .bind(int(row.attempt))
    .bind(now)
    .bind(reason)
    .bind(row.phase.map(|phase| phase.as_str()))
    .bind(int(row.step))
    .bind(row.memory_bytes.map(int))
    .bind(detail)
    .bind(failed)
    .bind(progressed)
    .execute(&mut *tx)
    .await
    .doing(doing)?;
    let total = ends_count(tx, row.id, "1").await?;
    if total.is_multiple_of(ENDS_AN_ALERT) {
        let mut ends = latest_ends(tx, row.id, "1", ENDS_AN_ALERT as u32).await?;
        ends.reverse();
        if let Some(alert) = many_restarts(ends, total) {
            alert_store(tx, row.id, &alert, now).await?;
        }
    }
    Ok(())
}

/// Returns whether the attempt that runs this job has passed the highest progress of earlier attempts, and
/// the highest progress now.
pub(super) async fn was_interrupted(tx: &mut SqliteConnection, job: JobId) -> Result<bool, StoreError> {
    Ok(ends_count(tx, job, "1").await? > 0)
}

/// Stores a job's progress at the beginning of an attempt, after the rewind to its checkpoint, so that only progress beyond it
/// counts as the attempt's own. `before` is the job's row as it was in the queue.
pub(super) async fn failure_after(
    tx: &mut SqliteConnection,
    row: &JobRow,
    strikes: u32,
) -> Result<Option<Failure>, StoreError> {
    let limit = row.plan().ok().and_then(|plan| plan.training.max_attempts);
    let failed = ends_count(tx, row.id, "failed").await?;
    let (code, mut message, which, count, suggestion) = if strikes >= MAX_FAILED_ATTEMPTS {
        let reached = row.reached.unwrap_or_default().0.max(row.step);
        let count = strikes.max(MAX_FAILED_ATTEMPTS);
        let message = format!("{count} attempts in a row ended without progress past step {reached}");
        (
            "worker_lost",
            message,
            "failed AND NOT progressed",
            MAX_FAILED_ATTEMPTS,
            "check the end of the job's log; the usual cause is insufficient memory: lower \
             sampling.max_completion_length, rloo.num_generations or training.prompts_per_step, then retry",
        )
    } else if let Some(limit) = limit.filter(|limit| failed >= u64::from(*limit)) {
        let message = format!("{failed} attempts failed, and training.max_attempts is {limit}");
        (
            "max_attempts",
            message,
            "failed",
            limit.min(MAX_FAILED_ATTEMPTS),
            "check the job's log for why the attempts ended; retry the job, with a higher training.max_attempts if \
             its workers are taken away often",
        )
    } else {
        return Ok(None);
    };
    let mut ends = latest_ends(tx, row.id, which, count).await?;
    ends.reverse();
    if !ends.is_empty() {
        message.push_str(": ");
        message.push_str(&ends.iter().map(AttemptEnd::describe).collect::<Vec<_>>().join("; "));
    }
    if let Some(line) = last_log_line(tx, row).await? {
        message.push_str("; the log ends with: ");
        message.push_str(&line);
    }
    Ok(Some(Failure {
        class: FailureClass::Infra,
        code: code.to_owned(),
        message,
        phase: None,
        step: None,
        suggestion: Some(suggestion.to_owned()),
    }))
}

/// A job created by an older rlood has no recorded progress. A job that continues another job's checkpoint begins at that step.
async fn ends_count(tx: &mut SqliteConnection, job: JobId, which: &'static str) -> Result<u64, StoreError> {
    let query = sqlx::AssertSqlSafe(format!("SELECT COUNT(*) AS ends FROM attempt_ends WHERE job_id = ? AND {which}"));
    let row =
        sqlx::query(query).bind(job.to_string()).fetch_one(tx).await.doing("count how the attempts of a job ended")?;
    count_column(&row, "ends")
}

/// Returns the latest ends of the job's attempts that satisfy `which`, newest first.
async fn latest_ends(
    connection: &mut SqliteConnection,
    job: JobId,
    which: &'static str,
    limit: u32,
) -> Result<Vec<AttemptEnd>, StoreError> {
    let query = sqlx::AssertSqlSafe(format!(
        "SELECT * FROM attempt_ends WHERE job_id = ? AND {which} ORDER BY attempt DESC LIMIT ?"
    ));
    let rows = sqlx::query(query).bind(job.to_string()).bind(limit).fetch_all(connection).await;
    rows.doing("list how the attempts of a job ended")?.iter().map(read).collect()
}

fn read(row: &SqliteRow) -> Result<AttemptEnd, StoreError> {
    Ok(AttemptEnd {
        attempt: count_column(row, "attempt")?,
        time_ms: column(row, "time")?,
        reason: column(row, "reason")?,
        phase: variant_column(row, "phase")?,
        step: count_column(row, "step")?,
        memory_bytes: column::<Option<i64>>(row, "memory_bytes")?.map(i64::unsigned_abs),
        detail: column(row, "detail")?,
    })
}

/// Whether a job was ever taken from a worker before it ended. Attempts of such a job save checkpoints more often, so that the next
/// attempt repeats fewer steps.
pub(super) fn reached_column(row: &SqliteRow) -> Result<Option<Cursor>, StoreError> {
    match column::<Option<&str>>(row, "reached")? {
        Some(_) => json_column(row, "reached").map(Some),
        None => Ok(None),
    }
}

/// Returns the last line that the job's current attempt logged, shortened for a message.
async fn last_log_line(tx: &mut SqliteConnection, row: &JobRow) -> Result<Option<String>, StoreError> {
    const MOST_BYTES: usize = 400;
    let line = sqlx::query_scalar::<_, String>(
        "SELECT line FROM logs WHERE job_id = ? AND attempt = ? ORDER BY id DESC LIMIT 1",
    )
    .bind(row.id.to_string())
    .bind(int(row.attempt))
    .fetch_optional(tx)
    .await
    .doing("read the end of a job's log")?;
    Ok(line.map(|mut line| {
        line.truncate(line.floor_char_boundary(MOST_BYTES));
        line
    }))
}
