//! Errors of the server while it prepares a claim. They never count against a job: the claim is released, and the job waits with
//! its own error count. When several jobs fail one after another, the server stops handing out jobs for a while.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::super::AppState;
use super::super::error::{Problem, chain};
use crate::id::JobId;
use crate::store::{StoreError, clock_ms};

/// Number of consecutive jobs that could not be handed out before the server pauses handing out jobs. Otherwise a broken disk would
/// affect the whole queue.
const JOBS_IN_A_ROW: usize = 3;
/// Duration of the first pause in handing out jobs; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum duration of a pause in handing out jobs.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// Errors since the server last handed out a job.
#[derive(Debug, Default)]
pub(super) struct Trouble(Mutex<Row>);

#[derive(Debug, Default)]
struct Row {
    /// Jobs that could not be handed out since then.
    jobs: BTreeSet<JobId>,
    /// Number of pauses since then.
    pauses: u32,
    /// No job is handed out before this time.
    until: Option<Instant>,
    /// Claims that could not be released yet.
    left_over: Vec<(JobId, u64)>,
}

impl Trouble {
    fn row(&self) -> MutexGuard<'_, Row> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the server has paused handing out jobs.
    fn is_pausing(&self) -> bool {
        self.row().until.is_some_and(|until| until > Instant::now())
    }

    fn note(&self, job: JobId) {
        let mut row = self.row();
        row.jobs.insert(job);
        if row.jobs.len() >= JOBS_IN_A_ROW {
            let pause = FIRST_PAUSE.saturating_mul(1 << row.pauses.min(8)).min(MAX_PAUSE);
            row.pauses += 1;
            row.until = Some(Instant::now() + pause);
        }
    }

    fn clear(&self) {
        let mut row = self.row();
        row.jobs.clear();
        (row.pauses, row.until) = (0, None);
    }
}

/// Resets the error counts after a claim was prepared successfully.
pub(super) async fn completed(state: &AppState, job: JobId, attempt: u64, errors: u32) {
    state.workers.trouble.clear();
    if errors > 0
        && let Err(error) = state.store.claim_completed(job, attempt).await
    {
        // Only logged, because the only effect is that the job's next delay is longer than necessary.
        tracing::warn!(%job, error = chain(&error), "the count of a job's consecutive server errors could not be reset");
    }
}

/// Releases a claim that could not be prepared.
pub(super) async fn failed(state: &AppState, job: JobId, attempt: u64, problem: &Problem) {
    let cause = problem.cause();
    tracing::error!(%job, attempt, cause, "a job could not be handed to a worker; the worker's claim is released, and the job waits");
    state.workers.trouble.note(job);
    release(state, job, attempt).await;
}

/// Whether jobs may be handed out again. First releases claims that could not be released before, because otherwise the server
/// would treat such a claim as abandoned at the next request of its worker.
pub(super) async fn is_over(state: &AppState) -> bool {
    let left_over = std::mem::take(&mut state.workers.trouble.row().left_over);
    for (job, attempt) in left_over {
        release(state, job, attempt).await;
    }
    state.workers.trouble.row().left_over.is_empty() && !state.workers.trouble.is_pausing()
}

async fn release(state: &AppState, job: JobId, attempt: u64) {
    match state.store.claim_release(job, attempt, clock_ms()).await {
        Ok(()) | Err(StoreError::LeaseLost) => {}
        Err(error) => {
            tracing::error!(%job, attempt, error = chain(&error), "a worker's claim on a job could not be released; the server will retry");
            state.workers.trouble.row().left_over.push((job, attempt));
        }
    }
}

/// Returns when a worker's waiting request should check the queue again although no job was queued, for example when a pause
/// ends; `None` if there is no such time.
pub(super) async fn next_try(state: &AppState) -> Result<Option<Instant>, Problem> {
    let now_ms = clock_ms();
    let due = state.store.claim_due(now_ms).await?.map(|due| {
        let wait_ms = u64::try_from(due.saturating_sub(now_ms)).unwrap_or(0);
        Instant::now() + Duration::from_millis(wait_ms)
    });
    let row = state.workers.trouble.row();
    let until = row.until.filter(|until| *until > Instant::now());
    let release = (!row.left_over.is_empty()).then(|| Instant::now() + FIRST_PAUSE);
    Ok(due.into_iter().chain(until).chain(release).min())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_bad_job_stops_nobody_and_three_in_a_row_make_a_pause_that_doubles() {
        let trouble = Trouble::default();
        let bad = JobId::new();
        for _ in 0..10 {
            trouble.note(bad);
        }
        assert!(!trouble.is_pausing());
        trouble.note(JobId::new());
        assert!(!trouble.is_pausing());
        for expected in [1, 2, 4, 8, 10, 10] {
            trouble.note(JobId::new());
            tokio::time::advance(Duration::from_millis(expected * 1000 - 1)).await;
            assert!(trouble.is_pausing(), "{expected} s");
            tokio::time::advance(Duration::from_millis(2)).await;
            assert!(!trouble.is_pausing(), "{expected} s");
        }
        trouble.clear();
        trouble.note(bad);
        assert!(!trouble.is_pausing());
    }
}
