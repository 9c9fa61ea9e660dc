//! A job's key figures.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::alerts::{AlertView, EndingView, Marked};
use super::error::{Problem, ProblemBody};
use super::extract::{Json, Path, Query};
use super::verdicts::{self, VerdictSummary};
use crate::doctor::PhaseChange;
use crate::event::SamplePhase;
use crate::id::JobId;
use crate::job::State as JobState;
use crate::spec::Totals;
use crate::store::{JobRow, StepRow, clock_ms};

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_summary))
}

/// A job's key figures.
#[derive(Debug, Serialize, ToSchema)]
struct Summary {
    /// The job's id, `job_…`.
    id: JobId,
    /// The newest comparison of a checkpoint with the base model; null without one.
    verdict: Option<VerdictSummary>,
    /// Current state of the job.
    state: JobState,
    /// Number of optimizer steps completed.
    step: u64,
    /// Total number of optimizer steps.
    total_steps: u64,
    /// Mean reward of training steps; null before the first step.
    reward: Option<Course>,
    /// Mean reward of evaluations; null without an evaluation.
    eval_reward: Option<Course>,
    /// Latest KL divergence, averaged over tokens; null before the first value.
    kl: Option<f64>,
    /// Number of prompt and completion tokens so far.
    num_tokens: Option<f64>,
    /// Totals that follow from the plan.
    totals: Totals,
    /// Durations of the job.
    durations: Durations,
    /// Checkpoints that can be downloaded.
    checkpoints: Checkpoints,
    /// Latest training reward minus the evaluation's; null without an evaluation, or if it has its own rewards.
    eval_gap: Option<f64>,
    /// Why the job ended before its last step; null otherwise.
    ending: Option<EndingView>,
    /// All alerts of the job, latest first.
    alerts: Vec<AlertView>,
    /// Exploration, exploitation or convergence; null before the first rollouts.
    training_phase: Option<PhaseChange>,
}

/// Development of a metric over the job.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Course {
    /// Value at the first step.
    pub(super) first: f64,
    /// Value at the latest step.
    pub(super) last: f64,
    /// Highest value of all steps.
    pub(super) best: f64,
    /// Step of the highest value (the first of equal ones).
    pub(super) best_step: u64,
    /// The latest value minus the first.
    change: f64,
}

/// Durations of the job, in seconds.
#[derive(Debug, Serialize, ToSchema)]
struct Durations {
    /// Time from submission to the first claim (to now, or to the end, if there was none).
    queued_s: f64,
    /// Time from the first claim to the end (or to now), including pauses; null before the first claim.
    running_s: Option<f64>,
    /// Mean duration of a step; null before the first step.
    mean_step_s: Option<f64>,
}

/// Checkpoints that can be downloaded.
#[derive(Debug, Serialize, ToSchema)]
struct Checkpoints {
    /// Number of stored checkpoints.
    count: usize,
    /// The newest checkpoint; null without any.
    last: Option<Marked>,
    /// The best checkpoint by the plan's `metric_for_best`; null without any.
    best: Option<Marked>,
}

/// Accepts no parameters, so that unknown ones cause an error.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoQuery {}

/// Get a job's key figures: verdict, rewards, change in evaluation, totals, durations, checkpoints.
#[utoipa::path(get, path = "/jobs/{id}/summary", tag = "Jobs", params(("id" = JobId, Path, description = "The job")), responses(
    (status = 200, description = "The summary", body = Summary), (status = 400, description = "This route accepts no query parameters", body = ProblemBody),
    (status = 404, description = "There is no such job", body = ProblemBody)))]
async fn get_summary(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(NoQuery {}): Query<NoQuery>,
) -> Result<Json<Summary>, Problem> {
    let row = state.store.job_get(id).await?;
    let plan = row.plan()?;
    let steps = state.store.step_page(id, None, 0, i64::MAX as u64).await?;
    let checkpoints = Checkpoints {
        count: state.store.checkpoint_list(id).await?.len(),
        last: state.store.checkpoint_latest(id).await?.map(Marked::from),
        best: state.store.checkpoint_best(id).await?.map(Marked::from),
    };
    let latest = |key: &str| steps.iter().rev().find_map(|step| step.metrics.get(key).copied().flatten());
    Ok(Json(Summary {
        id,
        verdict: verdicts::summary_of(&state, id).await?,
        state: row.state,
        step: row.step,
        total_steps: row.total_steps,
        reward: course(&steps, SamplePhase::Train, "reward"),
        eval_reward: course(&steps, SamplePhase::Eval, "eval_reward"),
        kl: latest("kl"),
        num_tokens: latest("num_tokens"),
        totals: plan.totals,
        durations: durations(&row, &steps, clock_ms()),
        checkpoints,
        eval_gap: latest("eval_gap"),
        ending: match row.ending {
            Some(ending) => {
                let result = state.store.checkpoint_result(id, Some(&ending)).await?;
                Some(EndingView::new(ending, result.map(|row| (row.id, row.step))))
            }
            None => None,
        },
        alerts: state.store.alert_list(id, false).await?.into_iter().map(AlertView::from).collect(),
        training_phase: state.store.training_phase(id).await?,
    }))
}

/// Follows a metric over the steps of one kind; `None` if no step has it.
pub(super) fn course(steps: &[StepRow], kind: SamplePhase, key: &str) -> Option<Course> {
    let of_kind = steps.iter().filter(|step| step.kind == kind);
    let mut values = of_kind.filter_map(|step| Some((step.step, step.metrics.get(key).copied().flatten()?)));
    let (first_step, first) = values.next()?;
    let (mut last, mut best, mut best_step) = (first, first, first_step);
    for (step, value) in values {
        last = value;
        if value > best {
            (best, best_step) = (value, step);
        }
    }
    Some(Course { first, last, best, best_step, change: last - first })
}

fn durations(row: &JobRow, steps: &[StepRow], now: i64) -> Durations {
    let seconds = |from: i64, to: i64| (to - from).max(0) as f64 / 1000.0;
    let end = row.finished_at.unwrap_or(now);
    let times: Vec<f64> = steps.iter().filter_map(|step| step.metrics.get("step_time").copied().flatten()).collect();
    Durations {
        queued_s: seconds(row.created_at, row.started_at.unwrap_or(end)),
        running_s: row.started_at.map(|started| seconds(started, end)),
        mean_step_s: (!times.is_empty()).then(|| times.iter().sum::<f64>() / times.len() as f64),
    }
}
