//! Claims: which worker may run a job and write its results. Every write of a worker is checked against the attempt of its claim.
//!
//! This file is longer than others because claim, heartbeat, release and finish change the same rows in one transaction each.

use std::collections::BTreeMap;

use futures::future::BoxFuture;
use rlood_types::webhooks::message::{
    CancelledDetail, FailedDetail, PausedDetail, QueuedDetail, StartedDetail, SucceededDetail,
};
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnection;

use super::artifacts::{judged_checkpoint, latest_checkpoint};
use super::attempts::{End, baseline_store, end_store, failure_after, progress, was_interrupted};
use super::doctor::doctor_rewind;
use super::events::event_insert;
use super::moves::{Transition, job_transition};
use super::server_errors::LONGEST_PAUSE_MS;
use super::task_rows::verdict_begin;
use super::workers::{worker_mark_lost, worker_touch};
use super::{
    CheckpointRow, Doing, JobRow, Store, StoreError, id_column, int, json_column, variant_column, variant_name,
};
use crate::event::Phase;
use crate::failpoint::without;
use crate::id::{CheckpointId, JobId, WorkerId};
use crate::job::{Failure, FailureClass, Requested, State};
use crate::protocol::Outcome;
use crate::spec::{Arithmetic, Plan, RewardSecrets};

/// A new claim of a job from the queue.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// Id of the job.
    pub job: JobId,
    /// Number of the attempt, which all writes of this claim must carry.
    pub attempt: u64,
    /// The resolved plan of the job.
    pub plan: Plan,
    /// Secrets of the rewards, by reward name.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// Newest published checkpoint of the job, to resume from; `None` = none.
    pub resume: Option<CheckpointRow>,
    /// Whether this attempt should save more often, because an earlier one was interrupted and the next one should repeat less.
    pub checkpoint_soon: bool,
    /// Number of consecutive claims before this one that ended with a server error.
    pub server_errors: u32,
}

/// The progress of an attempt that a heartbeat reports.
#[derive(Debug, Clone)]
pub struct HeartbeatUpdate {
    /// Current phase of the training loop.
    pub phase: Phase,
    /// Reason for a wait; `None` = the job is not waiting.
    pub status_reason: Option<String>,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Estimated seconds remaining; `None` = unknown.
    pub eta_s: Option<f64>,
    /// Resident memory of the worker process, in bytes; `None` = not reported.
    pub memory_bytes: Option<u64>,
}

/// How a checkpoint is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// The bytes of a file differ from the published ones.
    Mismatch,
    /// The bytes of a file cannot be read from the disk.
    Unreadable,
}

impl Damage {
    fn as_text(self) -> &'static str {
        match self {
            Damage::Mismatch => "does not match its hashes",
            Damage::Unreadable => "cannot be read from the server's disk",
        }
    }
}

/// Selects the next job of the queue. `?1` is the current time, and `?2` the longest pause after a server error: a pause that would
/// last longer was stored before the clock was set back, and is ignored. `?3` is the worker, which runs a job of the runtime `trl` only if it
/// has an environment and devices for it. A job whose models or datasets are being downloaded is not
/// selected. The index is named because the planner would otherwise sort all queued rows.
pub const NEXT_JOB: &str = "SELECT * FROM jobs INDEXED BY jobs_queue \
     WHERE state = 'queued' AND waits_for_data = 0 AND (claim_not_before <= ?1 OR claim_not_before > ?1 + ?2) \
     AND NOT EXISTS (SELECT 1 FROM models WHERE models.id = jobs.model AND models.state = 'downloading') \
     AND NOT EXISTS (SELECT 1 FROM json_each(jobs.plan, '$.reward_models') AS used CROSS JOIN models \
     ON models.id = used.key WHERE models.state = 'downloading') \
     AND (json_extract(plan, '$.runtime.name') IS NOT 'trl' OR COALESCE(json_extract(plan, '$.resources.devices'), 1) <= \
     COALESCE((SELECT trl_devices FROM workers WHERE workers.id = ?3), 0)) \
     ORDER BY priority DESC, queue_order LIMIT 1";
/// Selects claims whose lease expired before this time.
pub const LAPSED_JOBS: &str = "SELECT * FROM jobs INDEXED BY jobs_leases WHERE state = 'running' AND lease_until < ?";
/// Selects the jobs that a worker holds.
pub const JOBS_OF_WORKER: &str = "SELECT * FROM jobs INDEXED BY jobs_worker WHERE state = 'running' AND worker = ?";

/// Maximum number of consecutive failed attempts without progress before the job fails.
pub const MAX_FAILED_ATTEMPTS: u32 = 3;

impl Store {
    /// Claims the next job of the queue (highest priority, then first come) for this worker; `None` if the queue is empty. Rows
    /// that a former attempt wrote after the newest checkpoint are removed, which the event `rewind` reports. A worker runs one job
    /// at a time: a job that it held before returns to the queue. `NotFound` if the worker has to register (again).
    pub fn job_claim(
        &self,
        worker: WorkerId,
        now: i64,
        lease_ms: i64,
    ) -> BoxFuture<'_, Result<Option<Claimed>, StoreError>> {
        Box::pin(async move {
            let doing = "claim a job";
            let mut tx = self.begin(doing).await?;
            worker_touch(&mut tx, worker, now).await?;
            let mut changed = Vec::new();
            for held in jobs_of_worker(&mut tx, worker).await? {
                job_release(&mut tx, &held, Charge::Failed("claim_abandoned"), now).await?;
                changed.push(held.id);
            }
            let claimed = loop {
                let next = sqlx::query(NEXT_JOB).bind(now).bind(LONGEST_PAUSE_MS).bind(worker.to_string());
                let next = next.fetch_optional(&mut *tx).await.doing(doing)?;
                let Some(next) = next else { break None };
                let row = JobRow::read(&next)?;
                changed.push(row.id);
                match (row.plan(), json_column(&next, "secrets")) {
                    (Ok(plan), Ok(secrets)) => {
                        break Some(claim_row(&mut tx, &row, plan, secrets, worker, now, lease_ms).await?);
                    }
                    // A job whose plan cannot be parsed fails, so that it does not block the queue.
                    (Err(_), _) | (_, Err(_)) => {
                        let failure = Failure {
                            class: FailureClass::Infra,
                            code: "plan_unreadable".to_owned(),
                            message: "the stored plan of this job cannot be read by this version".to_owned(),
                            phase: None,
                            step: None,
                            suggestion: Some("submit the job again".to_owned()),
                        };
                        job_fail(&mut tx, &row, failure, now).await?;
                    }
                }
            };
            self.commit(tx, doing).await?;
            changed.into_iter().for_each(|job| self.wake_job(job));
            Ok(claimed)
        })
    }

    /// Discards the damaged or unreadable checkpoint from which an attempt should resume: removes its row, rewinds further, and
    /// returns the next older one. A fork that continued another job's checkpoint and has no older one fails, because from step 0
    /// it would be a different run. The claim then ends with `LeaseLost`.
    pub fn claim_discard_checkpoint(
        &self,
        job: JobId,
        attempt: u64,
        checkpoint: CheckpointId,
        damage: Damage,
        now: i64,
    ) -> BoxFuture<'_, Result<Option<CheckpointRow>, StoreError>> {
        Box::pin(async move {
            let doing = "discard a damaged checkpoint";
            let mut tx = self.begin(doing).await?;
            let row = owned_row(&mut tx, job, attempt).await?;
            let step: Option<i64> =
                sqlx::query_scalar("DELETE FROM checkpoints WHERE id = ? AND job_id = ? RETURNING step")
                    .bind(checkpoint.to_string())
                    .bind(job.to_string())
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(doing)?;
            let resume = latest_checkpoint(&mut tx, job).await?;
            if let (Some(step), None) = (step, &resume)
                && continues_another(&mut tx, job).await?
            {
                job_fail(&mut tx, &row, nothing_to_continue(step), now).await?;
                self.commit(tx, doing).await?;
                self.wake_job(job);
                return Err(StoreError::LeaseLost);
            }
            if let Some(step) = step {
                let data = json!({
                    "code": "checkpoint_damaged",
                    "message": format!("the checkpoint of step {step} {}: resuming from an older one", damage.as_text()),
                    "data": { "checkpoint": checkpoint, "step": step },
                });
                event_insert(&mut tx, job, "warning", now, data).await?;
            }
            rewind(&mut tx, job, resume.as_ref(), now).await?;
            self.commit(tx, doing).await?;
            self.wake_job(job);
            Ok(resume)
        })
    }

    /// Extends the lease of a claim and returns the user's pending request to cancel or pause the job. `LeaseLost` if the attempt
    /// does not own the job.
    pub async fn job_heartbeat(
        &self,
        job: JobId,
        attempt: u64,
        update: HeartbeatUpdate,
        now: i64,
        lease_ms: i64,
    ) -> Result<Option<Requested>, StoreError> {
        let doing = "take a heartbeat";
        let HeartbeatUpdate { phase, status_reason, step, eta_s, memory_bytes } = update;
        let mut tx = self.begin_relaxed(doing).await?;
        owned_row(&mut tx, job, attempt).await?;
        let row = sqlx::query(
            "UPDATE jobs SET phase = ?, status_reason = ?, step = MAX(step, ?), eta_s = ?, \
             memory_bytes = COALESCE(?, memory_bytes), lease_until = ? WHERE id = ? AND state = 'running' RETURNING requested, worker",
        )
        .bind(variant_name(&phase)?)
        .bind(status_reason)
        .bind(int(step))
        .bind(eta_s)
        .bind(memory_bytes.map(int))
        .bind(lease_end(now, lease_ms))
        .bind(job.to_string())
        .fetch_optional(&mut *tx)
        .await
        .doing(doing)?
        .ok_or(StoreError::LeaseLost)?;
        worker_touch(&mut tx, id_column(&row, "worker")?, now).await?;
        let requested = variant_column(&row, "requested")?;
        self.commit(tx, doing).await?;
        Ok(requested)
    }

    /// Checks that the attempt owns the job; `LeaseLost` otherwise.
    pub async fn claim_check(&self, job: JobId, attempt: u64) -> Result<(), StoreError> {
        let mut reader = self.readers.acquire().await.doing("check a worker's claim on a job")?;
        owned_row(&mut reader, job, attempt).await.map(|_| ())
    }

    /// Ends an attempt. A user's request that arrived in the meantime takes effect: an interrupted job with a pending cancel or
    /// pause becomes cancelled or paused, and a job that stopped for a pause that was withdrawn is queued again.
    pub fn job_finish(
        &self,
        job: JobId,
        attempt: u64,
        outcome: Outcome,
        now: i64,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let doing = "finish a job";
            let mut tx = self.begin(doing).await?;
            let row = owned_row(&mut tx, job, attempt).await?;
            let cancel = row.requested == Some(Requested::Cancel);
            let pause = row.requested == Some(Requested::Pause);
            match outcome {
                Outcome::Succeeded => {
                    let data = SucceededDetail { step: row.step, ending: row.ending.clone() };
                    let status_reason = row.ending.as_ref().map(|_| "early_stopping".to_owned());
                    job_transition(
                        &mut tx,
                        &row,
                        Transition { status_reason, ..Transition::to(State::Succeeded) },
                        "job.succeeded",
                        data,
                        now,
                    )
                    .await?;
                    if self.judges
                        && let Some(judged) = judged_checkpoint(&mut tx, &row).await?
                        && let Some(task) = verdict_begin(&mut tx, job, &row.plan()?, judged, now).await?
                    {
                        let data = json!({"id": task.id, "checkpoint_id": task.checkpoint, "step": task.step});
                        event_insert(&mut tx, job, &task.event(), now, data).await?;
                    }
                }
                Outcome::Failed { failure } => match failure.may_pass() {
                    // A failure of the machine counts like a lost worker and the job is queued again; after the last attempt, the job
                    // fails with this failure.
                    Some(code) if row.failed_attempts + 1 < MAX_FAILED_ATTEMPTS || progress(&mut tx, &row).await?.0 => {
                        job_release(&mut tx, &row, Charge::Failed(code), now).await?;
                    }
                    Some(_) | None => job_fail(&mut tx, &row, failure, now).await?,
                },
                // A pause that the user requested is recorded as such, even if the job would have paused for another reason. Only the
                // user can end it.
                Outcome::Paused { reason: Some(reason) } if !cancel && !pause => {
                    let data = PausedDetail { reason: Some(reason.clone()) };
                    let transition = Transition { status_reason: Some(reason), ..Transition::to(State::Paused) };
                    job_transition(&mut tx, &row, transition, "job.paused", data, now).await?;
                }
                Outcome::Paused { .. } | Outcome::Requeued | Outcome::Preempted if pause => {
                    let data = PausedDetail { reason: row.requested_reason.clone() };
                    let transition =
                        Transition { status_reason: row.requested_reason.clone(), ..Transition::to(State::Paused) };
                    job_transition(&mut tx, &row, transition, "job.paused", data, now).await?;
                }
                Outcome::Cancelled | Outcome::Paused { .. } | Outcome::Requeued | Outcome::Preempted if cancel => {
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
                Outcome::Cancelled => {
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
                Outcome::Paused { .. } => job_release(&mut tx, &row, Charge::Free("pause_taken_back"), now).await?,
                Outcome::Requeued => job_release(&mut tx, &row, Charge::Free("worker_shutdown"), now).await?,
                Outcome::Preempted => job_release(&mut tx, &row, Charge::Free("preempted"), now).await?,
            }
            self.commit(tx, doing).await?;
            self.wake_job(job);
            self.wake_queue();
            self.wake_tasks();
            Ok(())
        })
    }

    /// Takes every job whose lease has expired from its worker; returns these jobs.
    pub async fn leases_reap(&self, now: i64) -> Result<Vec<JobId>, StoreError> {
        let doing = "take back lapsed claims";
        // Usually no lease has expired, so a reader connection checks first and the writer stays free.
        if sqlx::query(LAPSED_JOBS).bind(now).fetch_optional(&self.readers).await.doing(doing)?.is_none() {
            return Ok(Vec::new());
        }
        let mut tx = self.begin(doing).await?;
        let rows = sqlx::query(LAPSED_JOBS).bind(now).fetch_all(&mut *tx).await.doing(doing)?;
        let mut reaped = Vec::new();
        for row in &rows {
            let row = JobRow::read(row)?;
            job_release(&mut tx, &row, Charge::Failed("lease_expired"), now).await?;
            if let Some(worker) = row.worker {
                worker_mark_lost(&mut tx, worker, now).await?;
            }
            reaped.push(row.id);
        }
        self.commit(tx, doing).await?;
        reaped.iter().for_each(|job| self.wake_job(*job));
        self.wake_queue();
        Ok(reaped)
    }

    /// Sets every lease to end `lease_ms` from now. To be called after this server was unavailable or its clock was set, before the
    /// next reap. Workers then have time to reconnect, and a worker that is gone keeps its job no longer than that.
    pub async fn leases_renew(&self, now: i64, lease_ms: i64) -> Result<(), StoreError> {
        if without!(BootMargin) {
            return Ok(());
        }
        sqlx::query("UPDATE jobs SET lease_until = ? WHERE state = 'running'")
            .bind(lease_end(now, lease_ms))
            .execute(&self.writer)
            .await
            .doing("extend the claims of a worker on its jobs")?;
        Ok(())
    }
}

/// Returns when a claim expires without another heartbeat. A worker sends several heartbeats in that time.
fn lease_end(now: i64, lease_ms: i64) -> i64 {
    let lease_ms = if without!(LeaseMargin) { lease_ms / 6 } else { lease_ms };
    now.saturating_add(lease_ms)
}

async fn claim_row(
    tx: &mut SqliteConnection,
    row: &JobRow,
    plan: Plan,
    secrets: BTreeMap<String, RewardSecrets>,
    worker: WorkerId,
    now: i64,
    lease_ms: i64,
) -> Result<Claimed, StoreError> {
    let attempt: i64 = sqlx::query_scalar(
        "UPDATE jobs SET state = 'running', attempt = attempt + 1, worker = ?, lease_until = ?, phase = 'loading', \
         status_reason = NULL, eta_s = NULL, memory_bytes = NULL, last_batch = NULL, started_at = COALESCE(started_at, ?) \
         WHERE id = ? AND state = 'queued' RETURNING attempt",
    )
    .bind(worker.to_string())
    .bind(lease_end(now, lease_ms))
    .bind(now)
    .bind(row.id.to_string())
    .fetch_optional(&mut *tx)
    .await
    .doing("claim a job")?
    .ok_or(StoreError::LeaseLost)?;
    let (version, previous_version) = change_version(tx, row.id, worker).await?;
    let resume = latest_checkpoint(tx, row.id).await?;
    let step = resume.as_ref().map(|checkpoint| checkpoint.step);
    if let Some(previous) = &previous_version {
        event_insert(tx, row.id, "warning", now, version_changed(previous, &version, plan.arithmetic)).await?;
    }
    let data = StartedDetail { worker, attempt: attempt.unsigned_abs(), resume_step: step, version, previous_version };
    event_insert(tx, row.id, "job.started", now, data).await?;
    rewind(tx, row.id, resume.as_ref(), now).await?;
    baseline_store(tx, row, step.unwrap_or(0)).await?;
    let checkpoint_soon = was_interrupted(tx, row.id).await?;
    let (job, attempt, server_errors) = (row.id, attempt.unsigned_abs(), row.server_errors);
    Ok(Claimed { job, attempt, plan, secrets, resume, checkpoint_soon, server_errors })
}

/// Records which rlood version runs the job from now on. Returns it, and the version of the previous attempt if it was different.
async fn change_version(
    tx: &mut SqliteConnection,
    job: JobId,
    worker: WorkerId,
) -> Result<(String, Option<String>), StoreError> {
    let doing = "record the version of a worker";
    let version: String = sqlx::query_scalar("SELECT version FROM workers WHERE id = ?")
        .bind(worker.to_string())
        .fetch_one(&mut *tx)
        .await
        .doing(doing)?;
    let previous: Option<String> = sqlx::query_scalar("SELECT version FROM jobs WHERE id = ?")
        .bind(job.to_string())
        .fetch_one(&mut *tx)
        .await
        .doing(doing)?;
    if previous.as_ref() != Some(&version) {
        sqlx::query("UPDATE jobs SET version = ? WHERE id = ?")
            .bind(&version)
            .bind(job.to_string())
            .execute(&mut *tx)
            .await
            .doing(doing)?;
    }
    let previous = previous.filter(|previous| *previous != version);
    Ok((version, previous))
}

/// Returns the data of the event which reports that another rlood version resumes a job: both versions, and the arithmetic rules
/// that continue to apply.
fn version_changed(previous: &str, version: &str, arithmetic: Arithmetic) -> Value {
    json!({
        "code": "version_changed",
        "message": format!(
            "rlood {previous} ran this job so far and rlood {version} resumes it; the job keeps the rules of arithmetic it was accepted with"
        ),
        "data": { "previous_version": previous, "version": version, "arithmetic": arithmetic },
    })
}

/// Rewinds a job to its checkpoint: deletes everything reported after it (it will be reported again), and reports this as an event.
async fn rewind(tx: &mut SqliteConnection, job: JobId, to: Option<&CheckpointRow>, now: i64) -> Result<(), StoreError> {
    let doing = "rewind a job";
    let step = to.map_or(0, |checkpoint| int(checkpoint.step));
    // Without a checkpoint, the evaluation before the first step (step 0) is repeated too. With a checkpoint, an evaluation of its
    // step that a later attempt reported came after it.
    let (last_kept, writer) = to.map_or((-1, 0), |checkpoint| (step, int(checkpoint.attempt)));
    let mut deleted = 0;
    for table in [
        "DELETE FROM steps WHERE job_id = ?1 AND (step > ?2 OR (step = ?2 AND attempt > ?3))",
        "DELETE FROM samples WHERE job_id = ?1 AND (step > ?2 OR (step = ?2 AND attempt > ?3))",
    ] {
        let query = sqlx::query(table).bind(job.to_string()).bind(last_kept).bind(writer);
        deleted += query.execute(&mut *tx).await.doing(doing)?.rows_affected();
    }
    doctor_rewind(tx, job, last_kept).await?;
    sqlx::query("UPDATE jobs SET step = ? WHERE id = ?")
        .bind(step)
        .bind(job.to_string())
        .execute(&mut *tx)
        .await
        .doing(doing)?;
    if deleted > 0 {
        event_insert(tx, job, "rewind", now, json!({ "step": step })).await?;
    }
    Ok(())
}

/// Whether the job is a fork that continued another job's checkpoint.
async fn continues_another(tx: &mut SqliteConnection, job: JobId) -> Result<bool, StoreError> {
    let forked =
        "SELECT EXISTS (SELECT 1 FROM events WHERE job_id = ? AND type = 'job.forked' AND data ->> '$.continues')";
    sqlx::query_scalar(forked).bind(job.to_string()).fetch_one(tx).await.doing("check whether a job is a fork")
}

fn nothing_to_continue(step: i64) -> Failure {
    Failure {
        class: FailureClass::Infra,
        code: "checkpoint_damaged".to_owned(),
        message: format!(
            "the checkpoint of step {step} does not match its hashes, and this fork has no older one to resume from"
        ),
        phase: None,
        step: None,
        suggestion: Some(
            "fork again, from another checkpoint of the parent job; check the health of the disk".to_owned(),
        ),
    }
}

/// Returns the running row of the attempt, or `LeaseLost`.
pub(super) async fn owned_row(
    connection: &mut SqliteConnection,
    job: JobId,
    attempt: u64,
) -> Result<JobRow, StoreError> {
    let owned = if without!(Fence) {
        "SELECT * FROM jobs WHERE id = ?1 AND state = 'running' AND ?2 = ?2"
    } else {
        "SELECT * FROM jobs WHERE id = ?1 AND state = 'running' AND attempt = ?2"
    };
    let row = sqlx::query(owned)
        .bind(job.to_string())
        .bind(int(attempt))
        .fetch_optional(connection)
        .await
        .doing("check a worker's claim on a job")?
        .ok_or(StoreError::LeaseLost)?;
    JobRow::read(&row)
}

pub(super) async fn jobs_of_worker(tx: &mut SqliteConnection, worker: WorkerId) -> Result<Vec<JobRow>, StoreError> {
    sqlx::query(JOBS_OF_WORKER)
        .bind(worker.to_string())
        .fetch_all(tx)
        .await
        .doing("find the jobs of a worker")?
        .iter()
        .map(JobRow::read)
        .collect()
}

/// Whether an attempt that ended without an outcome counts as failed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Charge {
    /// The attempt failed: a strike, unless it made progress.
    Failed(&'static str),
    /// The attempt ended by a shutdown, a preemption or a server restart, which is never a strike.
    Free(&'static str),
}

/// Takes a running job from its worker. A pending request of the user takes effect now. Otherwise the job returns to its old place
/// in the queue, or fails after [`MAX_FAILED_ATTEMPTS`] strikes in a row or the maximum number of failures in its plan.
pub(super) async fn job_release(
    tx: &mut SqliteConnection,
    row: &JobRow,
    charge: Charge,
    now: i64,
) -> Result<(), StoreError> {
    job_release_seen(tx, row, charge, None, now).await
}

/// Takes a running job from its worker as [`job_release`] does; `detail` is how the worker's process ended, if the server saw it.
pub(super) fn job_release_seen<'a>(
    tx: &'a mut SqliteConnection,
    row: &'a JobRow,
    charge: Charge,
    detail: Option<&'a str>,
    now: i64,
) -> BoxFuture<'a, Result<(), StoreError>> {
    Box::pin(async move {
        if row.requested == Some(Requested::Cancel) {
            return job_transition(tx, row, Transition::to(State::Cancelled), "job.cancelled", CancelledDetail {}, now)
                .await;
        }
        let (progressed, _) = progress(tx, row).await?;
        let (reason, failed) = match charge {
            Charge::Failed(reason) => (reason, true),
            Charge::Free(reason) => (reason, false),
        };
        let failed_attempts = if progressed { 0 } else { row.failed_attempts + u32::from(failed) };
        // If the worker stopped for a pause that the user withdrew, this does not count as the end of an attempt.
        if reason != "pause_taken_back" {
            end_store(tx, row, End { reason, detail, failed, progressed }, now).await?;
        }
        if row.requested == Some(Requested::Pause) {
            let status_reason = row.requested_reason.clone();
            let data = PausedDetail { reason: status_reason.clone() };
            let transition =
                Transition { failed_attempts: Some(failed_attempts), status_reason, ..Transition::to(State::Paused) };
            return job_transition(tx, row, transition, "job.paused", data, now).await;
        }
        if failed && let Some(failure) = failure_after(tx, row, failed_attempts).await? {
            return job_fail(tx, row, failure, now).await;
        }
        let transition = Transition { failed_attempts: Some(failed_attempts), ..Transition::to(State::Queued) };
        let data = QueuedDetail {
            reason: Some(reason.to_owned()),
            failed_attempts: Some(failed_attempts),
            phase: row.phase,
            step: Some(row.step),
            memory_bytes: row.memory_bytes,
            ..QueuedDetail::default()
        };
        job_transition(tx, row, transition, "job.requeued", data, now).await
    })
}

pub(super) async fn job_fail(
    tx: &mut SqliteConnection,
    row: &JobRow,
    mut failure: Failure,
    now: i64,
) -> Result<(), StoreError> {
    failure.phase = failure.phase.or(row.phase);
    failure.step = failure.step.or(Some(row.step));
    let data = FailedDetail { failure: failure.clone() };
    let transition = Transition { failure: Some(failure), ..Transition::to(State::Failed) };
    job_transition(tx, row, transition, "job.failed", data, now).await
}
