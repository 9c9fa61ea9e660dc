//! Jobs that wait for datasets of a hub.
//!
//! Such a job has a provisional plan, because a plan depends on the rows. Once all of its datasets are stored, the job's document is
//! read again as if it had just been submitted, and the job gets its final plan.

use std::time::Duration;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem};
use super::lookup::{Prepared, prepare};
use super::named_models::UseOfHub;
use super::submit::read_spec;
use super::submit::stored::store_prompts;
use crate::error_text::with_causes;
use crate::spec::{FieldError, Plan, resolve};
use crate::store::{JobRow, clock_ms};

/// Attempts to plan a job while the server is busy, and the pause between two of them.
const MAX_PLAN_ATTEMPTS: u32 = 5;
const PLAN_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Plans the jobs whose datasets are stored: now, and each time that another dataset was downloaded. Never returns.
pub(crate) async fn run(state: AppState) {
    loop {
        plan_jobs(&state).await;
        state.downloads.dataset_stored().notified().await;
    }
}

/// Plans all jobs that waited for datasets which are stored now.
async fn plan_jobs(state: &AppState) {
    let rows = match state.store.jobs_to_plan().await {
        Ok(rows) => rows,
        Err(error) => {
            return tracing::error!(error = with_causes(&error), "jobs that wait for datasets could not be read");
        }
    };
    for row in rows {
        let planned = match plan_patiently(state, &row).await {
            Ok(()) => Ok(()),
            Err(problem) => {
                tracing::warn!(job = %row.id, ?problem, "a job cannot start with the datasets that were downloaded");
                state.store.job_not_planned(row.id, problem.detail().to_owned(), clock_ms()).await
            }
        };
        if let Err(error) = planned {
            tracing::error!(error = with_causes(&error), "the plan of a job could not be stored");
        }
    }
}

/// Plans a job, and repeats this while the server is too busy.
async fn plan_patiently(state: &AppState, row: &JobRow) -> Result<(), Problem> {
    for _ in 1..MAX_PLAN_ATTEMPTS {
        match plan_job(state, row).await {
            Err(problem) if problem.code().retryable() => tokio::time::sleep(PLAN_RETRY_DELAY).await,
            planned => return planned,
        }
    }
    plan_job(state, row).await
}

/// Replaces the provisional plan of a job. Its document names stored datasets only, so nothing is downloaded here.
async fn plan_job(state: &AppState, row: &JobRow) -> Result<(), Problem> {
    let caller = Caller::on_behalf_of(&row.owner);
    let before = row.plan()?;
    let (mut spec, mut errors) = read_spec(state, &caller, state.store.job_document(row.id).await?).await?;
    spec.arithmetic = before.arithmetic;
    let prepared = prepare(state, &caller, &mut spec, None, UseOfHub::Register).await?;
    let Prepared { context, errors: found, warnings: _, train, eval, warm_up } = prepared;
    errors.extend(found);
    let resolved = resolve(&spec, &context).map(|resolution| resolution.plan);
    let mut plan = match resolved {
        Ok(plan) if errors.is_empty() => with_rewards_of(plan, before),
        Ok(_) => return Err(cannot_run(&errors)),
        Err(more) => {
            errors.extend(more);
            return Err(cannot_run(&errors));
        }
    };
    store_prompts(state, &row.owner, (train, eval, warm_up), &mut spec.redacted, &mut plan).await?;
    Ok(state.store.job_planned(row.id, &spec.redacted, &plan, clock_ms()).await?)
}

/// Takes the rewards of the provisional plan, which was made from the submitted document. The stored one has no secrets.
fn with_rewards_of(plan: Plan, before: Plan) -> Plan {
    let mut plan = Plan { rewards: before.rewards, ..plan };
    if let (Some(eval), Some(before)) = (&mut plan.eval, before.eval) {
        eval.rewards = before.rewards;
        if let (Some(guard), Some(before)) = (&mut eval.guard, before.guard) {
            guard.rewards = before.rewards;
        }
    }
    plan
}

fn cannot_run(errors: &[FieldError]) -> Problem {
    let listed: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.pointer, error.detail)).collect();
    Problem::new(Code::InvalidSpec, format!("the job is not valid with its dataset: {}", listed.join("; ")))
}
