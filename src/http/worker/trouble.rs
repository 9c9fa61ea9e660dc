//! Errors of the server while it prepares a claim. They are never charged to a job: the claim is released, the job waits with a
//! count of its own, and when several jobs fail one after another it is the server that needs the pause.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::super::AppState;
use super::super::error::{Problem, chain};
use crate::id::JobId;
use crate::store::{StoreError, clock_ms};

/// Jobs in a row that could not be handed out, after which none is for a while: otherwise a broken disk would go through the
/// whole queue.
const JOBS_IN_A_ROW: usize = 3;
/// The first such pause; it doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What went wrong since the last claim that was handed out.
#[derive(Debug, Default)]
pub(super) struct Trouble(Mutex<Row>);

#[derive(Debug, Default)]
struct Row {
    /// Whose claims failed.
    jobs: BTreeSet<JobId>,
    /// Pauses so far.
    pauses: u32,
    /// No job is handed out before.
    until: Option<Instant>,
    /// Claims that could not even be released.
    left_over: Vec<(JobId, u64)>,
}

impl Trouble {
    fn row(&self) -> MutexGuard<'_, Row> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no job is handed out now.
    fn is_pausing(&self) -> bool {
        self.row().until.is_some_and(|until| until > Instant::now())
    }

    fn note(&self, job: JobId) {
        let mut row = self.row();
        row.jobs.insert(job);
        if row.jobs.len() >= JOBS_IN_A_ROW {
            let pause = FIRST_PAUSE.saturating_mul(1 << row.pauses.min(8)).min(LONGEST_PAUSE);
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

/// A claim was prepared: the server is well, and so is the job.
pub(super) async fn completed(state: &AppState, job: JobId, attempt: u64, errors: u32) {
    state.workers.trouble.clear();
    if errors > 0
        && let Err(error) = state.store.claim_completed(job, attempt).await
    {
        // Only the next pause of the job would be longer than it need be.
        tracing::warn!(%job, error = chain(&error), "the count of server errors could not be reset");
    }
}

/// A claim could not be prepared: releases it.
pub(super) async fn failed(state: &AppState, job: JobId, attempt: u64, problem: &Problem) {
    let cause = problem.cause();
    tracing::error!(%job, attempt, cause, "a job could not be handed out; its claim is released, and it waits");
    state.workers.trouble.note(job);
    release(state, job, attempt).await;
}

/// Whether jobs are handed out now. Releases first what could not be released before: the next call of its worker would take it
/// for abandoned.
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
            tracing::error!(%job, attempt, error = chain(&error), "a claim could not be released; it is tried again");
            state.workers.trouble.row().left_over.push((job, attempt));
        }
    }
}

/// When a claim that waits should look again although nothing was queued; `None` when there is no such time.
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
