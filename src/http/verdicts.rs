//! Verdicts: compares the base model and a checkpoint on the same rows. A verdict is a task: it is queued, runs in its own process,
//! and its result is stored.

mod judging;
mod sampling;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody};
use super::extract::{HashedJson, Json, Path, Query};
use super::idempotency::{Answer, identity, once};
use super::job_models;
use super::jobs::invalid;
use super::list::{self, List, Time};
use super::python_rewards;
use crate::id::{CheckpointId, JobId, VerdictId};
use crate::spec::{CheckpointChoice, VerdictDocument, VerdictSpec};
use crate::store::{NewTask, TaskKind, TaskRow, clock_ms};
use crate::task::{TaskProgress, TaskState};
use crate::verdict::{
    RowOutcome, VerdictError, VerdictResult, VerdictRow, VerdictSampling, VerdictWord, usual_sampling,
};

pub(crate) use judging::run;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create_verdict, get_job_verdict))
        .routes(routes!(get_verdict))
        .routes(routes!(list_verdict_rows))
        .routes(routes!(cancel_verdict))
}

/// A comparison of a checkpoint with its base model.
#[derive(Debug, Serialize, ToSchema)]
pub struct Verdict {
    /// The verdict's id, `vrd_…`.
    id: VerdictId,
    /// The job of the checkpoint.
    job_id: JobId,
    /// The checkpoint that is compared.
    checkpoint_id: CheckpointId,
    /// Optimizer step of the checkpoint.
    step: u64,
    /// Current state of the verdict.
    state: TaskState,
    /// Progress, in completed units.
    progress: TaskProgress,
    /// Sampling parameters of both models.
    sampling: VerdictSampling,
    /// When the verdict was requested.
    created_at: Time,
    /// When it started; null while it is queued.
    started_at: Option<Time>,
    /// When it ended; null before that.
    finished_at: Option<Time>,
    /// Why it failed; null otherwise.
    error: Option<VerdictError>,
    /// The result; null until the verdict is complete.
    result: Option<VerdictResult>,
}

impl Verdict {
    fn of(row: TaskRow) -> Result<Self, Problem> {
        let read = |text: &str| Problem::internal(format!("the stored {text} of verdict {} cannot be read", row.id));
        Ok(Self {
            id: row.id.parse().map_err(|_| read("id"))?,
            job_id: row.job,
            checkpoint_id: row.checkpoint,
            step: row.step,
            state: row.state,
            progress: TaskProgress { done: row.done, total: row.total },
            sampling: serde_json::from_value(row.request).map_err(|_| read("request"))?,
            created_at: Time(row.created_at),
            started_at: row.started_at.map(Time),
            finished_at: row.finished_at.map(Time),
            error: row.error.map(serde_json::from_value).transpose().map_err(|_| read("error"))?,
            result: row.result.map(serde_json::from_value).transpose().map_err(|_| read("result"))?,
        })
    }
}

/// A short form of a verdict, for the summary of its job.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct VerdictSummary {
    id: VerdictId,
    /// The checkpoint that is compared.
    checkpoint_id: CheckpointId,
    /// Optimizer step of the checkpoint.
    step: u64,
    /// Current state of the verdict.
    state: TaskState,
    /// The outcome; null until the verdict is complete.
    verdict: Option<VerdictWord>,
    /// The outcome in one sentence.
    summary: Option<String>,
    /// Limitations of the comparison; null if none.
    note: Option<String>,
    /// Number of rows with a reward for both models.
    rows: Option<u64>,
    /// Mean difference, trained minus base.
    difference: Option<f64>,
    /// 95 % confidence interval of the difference.
    interval: Option<[f64; 2]>,
    /// Why the verdict failed; null otherwise.
    error: Option<VerdictError>,
}

/// Returns the newest verdict of a job.
pub(super) async fn summary_of(state: &AppState, job: JobId) -> Result<Option<VerdictSummary>, Problem> {
    let Some(row) = state.store.task_newest(TaskKind::Verdict, job).await? else { return Ok(None) };
    let Verdict { id, checkpoint_id, step, state, error, result, .. } = Verdict::of(row)?;
    let (verdict, summary, note, rows, difference, interval) = match result {
        Some(result) => (
            Some(result.verdict),
            Some(result.summary),
            result.note,
            Some(result.test.rows),
            Some(result.test.difference),
            result.test.interval,
        ),
        None => (None, None, None, None, None, None),
    };
    Ok(Some(VerdictSummary {
        id,
        checkpoint_id,
        step,
        state,
        verdict,
        summary,
        note,
        rows,
        difference,
        interval,
        error,
    }))
}

/// Compare a checkpoint with its base model.
///
/// Both models answer the same rows: those that only the verdict reads (`eval.test_fraction` or `eval.test_dataset`), otherwise the
/// evaluation's, which also chose the checkpoint. Default: the best checkpoint (otherwise the newest; the job's result if an alert,
/// divergence or early stopping ended it), sampled as in the evaluation. The response comes immediately; `GET /verdicts/{id}` reports progress and the result. If an unfinished verdict on
/// the same checkpoint with the same sampling exists, it is returned instead of a second one (200).
#[utoipa::path(post, path = "/jobs/{id}/verdict", tag = "Verdicts",
    params(("id" = JobId, Path), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours")),
    request_body = VerdictDocument,
    responses(
        (status = 202, description = "Queued", body = Verdict),
        (status = 200, description = "The same verdict is already queued or running", body = Verdict),
        (status = 404, description = "There is no such job, or it has no checkpoint", body = ProblemBody),
        (status = 409, description = "The job has no evaluation, so there are no rows to compare the models on", body = ProblemBody),
        (status = 422, description = "The request is not valid", body = ProblemBody)))]
async fn create_verdict(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
    HashedJson(body, sha256): HashedJson<Value>,
) -> Result<Response, Problem> {
    let work = begin(state.clone(), caller.clone(), id, body);
    let identity = identity(format_args!("{id} {sha256}"));
    once(&state, &caller, &headers, "POST /jobs/{id}/verdict", &identity, work).await
}

async fn begin(state: AppState, caller: Caller, id: JobId, body: Value) -> Result<Answer, Problem> {
    let job = state.store.job_get(id).await?;
    let plan = job.plan()?;
    python_rewards::check_plan(&state, &caller, id, &plan).await?;
    if plan.environment.is_some() {
        let detail = "a verdict samples single turns, and this job plays episodes with an environment: compare eval_environment/return_mean of its evaluations instead";
        return Err(Problem::new(Code::NoEvaluation, detail));
    }
    if plan.eval.is_none() {
        let detail = "the job has no evaluation, so there are no rows to compare on: submit it with eval {fraction} or eval {dataset}";
        return Err(Problem::new(Code::NoEvaluation, detail));
    }
    let VerdictSpec { checkpoint, sampling } =
        VerdictSpec::read(&body, &plan, usual_sampling(&plan)).map_err(|errors| invalid(Code::InvalidBody, errors))?;
    let usual = if job.ending.is_some() { CheckpointChoice::Result } else { CheckpointChoice::Best };
    let checkpoint = job_models::find(&state, &job, checkpoint.unwrap_or(usual)).await?;
    let request = json!(sampling);
    let known = state.store.task_list(TaskKind::Verdict, id, Some(checkpoint.id)).await?;
    if let Some(same) = known.into_iter().find(|task| !task.state.is_final() && task.request == request) {
        return Answer::new(StatusCode::OK, Some(format!("/verdicts/{}", same.id)), &Verdict::of(same)?);
    }
    let new = NewTask {
        id: VerdictId::new().to_string(),
        kind: TaskKind::Verdict,
        job: id,
        checkpoint: checkpoint.id,
        step: checkpoint.step,
        request,
    };
    let row = state.store.task_create(new, clock_ms()).await?;
    Answer::new(StatusCode::ACCEPTED, Some(format!("/verdicts/{}", row.id)), &Verdict::of(row)?)
}

/// Get the newest verdict of a job.
#[utoipa::path(get, path = "/jobs/{id}/verdict", tag = "Verdicts", params(("id" = JobId, Path)), responses(
    (status = 200, description = "The verdict, whose comparison may still be running", body = Verdict),
    (status = 404, description = "There is no such job, or it has no verdict (`no_verdict`)", body = ProblemBody)))]
async fn get_job_verdict(State(state): State<AppState>, Path(id): Path<JobId>) -> Result<Json<Verdict>, Problem> {
    state.store.job_get(id).await?;
    match state.store.task_newest(TaskKind::Verdict, id).await? {
        Some(row) => Ok(Json(Verdict::of(row)?)),
        None => {
            let detail = format!(
                "the job has no verdict yet: a job with an evaluation gets one when it succeeds, and POST /jobs/{id}/verdict requests one"
            );
            Err(Problem::new(Code::NoVerdict, detail))
        }
    }
}

/// Get a verdict by its id.
#[utoipa::path(get, path = "/verdicts/{id}", tag = "Verdicts", params(("id" = VerdictId, Path)), responses(
    (status = 200, description = "The verdict", body = Verdict),
    (status = 404, description = "There is no such verdict", body = ProblemBody)))]
async fn get_verdict(State(state): State<AppState>, Path(id): Path<VerdictId>) -> Result<Json<Verdict>, Problem> {
    Ok(Json(Verdict::of(state.store.task_get(TaskKind::Verdict, &id.to_string()).await?)?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RowQuery {
    /// Only rows that the trained model won, lost or tied, or that lack a reward.
    outcome: Option<RowOutcome>,
    /// The cursor `next` of the previous page.
    after: Option<String>,
    /// Rows per page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
}

/// List the rows of a verdict, with the texts of both models.
#[utoipa::path(get, path = "/verdicts/{id}/rows", tag = "Verdicts", params(("id" = VerdictId, Path), RowQuery), responses(
    (status = 200, description = "A page of the compared rows, in the order of the dataset", body = List<VerdictRow>),
    (status = 404, description = "There is no such verdict", body = ProblemBody)))]
async fn list_verdict_rows(
    State(state): State<AppState>,
    Path(id): Path<VerdictId>,
    Query(query): Query<RowQuery>,
) -> Result<Json<List<Value>>, Problem> {
    let RowQuery { outcome, after, limit } = query;
    let limit = list::limit(limit)?;
    state.store.task_get(TaskKind::Verdict, &id.to_string()).await?;
    let page = state.store.verdict_row_page(id, outcome, after.as_deref(), limit).await?;
    Ok(Json(List::of(page, |row| row)))
}

/// Cancel a verdict. A verdict that has ended stays as it is.
#[utoipa::path(post, path = "/verdicts/{id}/cancel", tag = "Verdicts",
    params(("id" = VerdictId, Path), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key gets the same answer for 24 hours")),
    responses(
        (status = 200, description = "The verdict", body = Verdict),
        (status = 404, description = "There is no such verdict", body = ProblemBody)))]
async fn cancel_verdict(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<VerdictId>,
) -> Result<Response, Problem> {
    let store = state.store.clone();
    let work = async move {
        let row = store.task_cancel(TaskKind::Verdict, &id.to_string(), clock_ms()).await?;
        Answer::new(StatusCode::OK, None, &Verdict::of(row)?)
    };
    once(&state, &caller, &headers, "POST /verdicts/{id}/cancel", &identity(id), work).await
}
