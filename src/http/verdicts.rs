//! Verdicts: base model and checkpoint on the same rows. A verdict is a task: it waits, runs in a process of its own, and keeps
//! its result.

mod judging;

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
use super::generate;
use super::idempotency::{Answer, identity, once};
use super::jobs::invalid;
use super::list::{self, List, Time};
use crate::id::{CheckpointId, JobId, VerdictId};
use crate::spec::{CheckpointChoice, VerdictDocument, VerdictSpec};
use crate::store::{NewTask, TaskKind, TaskRow, clock_ms};
use crate::task::{TaskProgress, TaskState};
use crate::verdict::{
    RowOutcome, VerdictError, VerdictResult, VerdictRow, VerdictSampling, VerdictWord, usual_sampling,
};

pub(crate) use judging::run;

/// The routes of this module.
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
    /// Its id.
    id: VerdictId,
    /// The job.
    job_id: JobId,
    /// The checkpoint that was judged.
    checkpoint_id: CheckpointId,
    /// The checkpoint's step.
    step: u64,
    /// Current state.
    state: TaskState,
    /// How far it is.
    progress: TaskProgress,
    /// How both models are sampled.
    sampling: VerdictSampling,
    /// When it was asked for.
    created_at: Time,
    /// When it began.
    started_at: Option<Time>,
    /// When it ended.
    finished_at: Option<Time>,
    /// Why it failed; null otherwise.
    error: Option<VerdictError>,
    /// What came of it; null before.
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

/// A verdict in a few words, in the summary of its job.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct VerdictSummary {
    id: VerdictId,
    /// The checkpoint that was judged.
    checkpoint_id: CheckpointId,
    /// The checkpoint's step.
    step: u64,
    /// Current state.
    state: TaskState,
    /// What it says; null before.
    verdict: Option<VerdictWord>,
    /// One sentence for people.
    summary: Option<String>,
    /// What limits it.
    note: Option<String>,
    /// Rows with a reward of both models.
    rows: Option<u64>,
    /// The mean difference, trained less base.
    difference: Option<f64>,
    /// The 95 % interval of the difference.
    interval: Option<[f64; 2]>,
    /// Why it failed.
    error: Option<VerdictError>,
}

/// The newest verdict of a job.
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
/// Both models answer the same rows: those that only the verdict reads (`eval.test_fraction` or `eval.test_dataset`), else the
/// evaluation's, which also chose the checkpoint. Default: the best checkpoint (else the newest), sampled as the evaluation samples.
/// The answer comes at once; `GET /verdicts/{id}` tells how far it is and what came of it. A verdict on the same checkpoint with
/// the same sampling that has not ended is returned instead of a second one (200).
#[utoipa::path(post, path = "/jobs/{id}/verdict", tag = "Verdicts",
    params(("id" = JobId, Path), ("Idempotency-Key" = Option<String>, Header, description = "The same key and body give the same answer for 24 hours")),
    request_body = VerdictDocument,
    responses(
        (status = 202, description = "It waits for its turn", body = Verdict),
        (status = 200, description = "It is under way already", body = Verdict),
        (status = 404, description = "No such job, or it has no checkpoint", body = ProblemBody),
        (status = 409, description = "The job has no evaluation: there are no rows to judge", body = ProblemBody),
        (status = 422, description = "The request is not valid", body = ProblemBody)))]
async fn create_verdict(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
    HashedJson(body, sha256): HashedJson<Value>,
) -> Result<Response, Problem> {
    let work = begin(state.clone(), id, body);
    let identity = identity(format_args!("{id} {sha256}"));
    once(&state, &caller, &headers, "POST /jobs/{id}/verdict", &identity, work).await
}

async fn begin(state: AppState, id: JobId, body: Value) -> Result<Answer, Problem> {
    let job = state.store.job_get(id).await?;
    let plan = job.plan()?;
    if plan.eval.is_none() {
        let detail = "the job has no evaluation, so there are no rows to judge: submit it with eval {fraction} or eval {dataset}";
        return Err(Problem::new(Code::NoEvaluation, detail));
    }
    let VerdictSpec { checkpoint, sampling } =
        VerdictSpec::read(&body, &plan, usual_sampling(&plan)).map_err(|errors| invalid(Code::InvalidBody, errors))?;
    let checkpoint = generate::find(&state, &job, checkpoint.unwrap_or(CheckpointChoice::Best)).await?;
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

/// The newest verdict of a job.
#[utoipa::path(get, path = "/jobs/{id}/verdict", tag = "Verdicts", params(("id" = JobId, Path)), responses(
    (status = 200, description = "The verdict, which may still be under way", body = Verdict),
    (status = 404, description = "No such job, or it has no verdict (`no_verdict`)", body = ProblemBody)))]
async fn get_job_verdict(State(state): State<AppState>, Path(id): Path<JobId>) -> Result<Json<Verdict>, Problem> {
    state.store.job_get(id).await?;
    match state.store.task_newest(TaskKind::Verdict, id).await? {
        Some(row) => Ok(Json(Verdict::of(row)?)),
        None => {
            let detail = format!(
                "the job has no verdict yet: a job with an evaluation gets one when it succeeds, and POST /jobs/{id}/verdict asks for one"
            );
            Err(Problem::new(Code::NoVerdict, detail))
        }
    }
}

/// One verdict.
#[utoipa::path(get, path = "/verdicts/{id}", tag = "Verdicts", params(("id" = VerdictId, Path)), responses(
    (status = 200, description = "The verdict", body = Verdict),
    (status = 404, description = "No such verdict", body = ProblemBody)))]
async fn get_verdict(State(state): State<AppState>, Path(id): Path<VerdictId>) -> Result<Json<Verdict>, Problem> {
    Ok(Json(Verdict::of(state.store.task_get(TaskKind::Verdict, &id.to_string()).await?)?))
}

/// `?outcome=&after=&limit=`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RowQuery {
    /// Only rows that the trained model won, lost or tied, or that miss a reward.
    outcome: Option<RowOutcome>,
    /// The cursor `next` of the page before.
    after: Option<String>,
    /// Rows on a page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
}

/// The rows that a verdict judged, with the texts of both models.
#[utoipa::path(get, path = "/verdicts/{id}/rows", tag = "Verdicts", params(("id" = VerdictId, Path), RowQuery), responses(
    (status = 200, description = "A page, in the order of the rows", body = List<VerdictRow>),
    (status = 404, description = "No such verdict", body = ProblemBody)))]
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

/// Cancel a verdict. One that has ended stays as it is.
#[utoipa::path(post, path = "/verdicts/{id}/cancel", tag = "Verdicts",
    params(("id" = VerdictId, Path), ("Idempotency-Key" = Option<String>, Header, description = "The same key gives the same answer for 24 hours")),
    responses(
        (status = 200, description = "The verdict", body = Verdict),
        (status = 404, description = "No such verdict", body = ProblemBody)))]
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
