//! Pushes: a checkpoint uploaded to a repository of the model hub, with a model card. A push is a task: it is queued, and what it
//! uploaded stays on the hub, where the next push of the same files finds it.

mod card;
mod facts;
mod failure;
mod pushing;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody};
use super::exports;
use super::extract::{HashedJson, Json, Path};
use super::idempotency::{Answer, identity, once};
use super::list::{List, Time};
use super::models::hub::{has_own_rights, problem};
use crate::export::{ExportDtype, ExportFormat, ExportRequest};
use crate::hub::{HubError, Repo, RepoKind, Token};
use crate::id::{CheckpointId, ExportId, JobId, PushId};
use crate::push::{PushError, PushFormat, PushRequest, PushResult, PushStage};
use crate::store::{NewTask, StoreError, TaskKind, TaskRow, clock_ms};
use crate::task::{TaskProgress, TaskState};

pub(crate) use pushing::run;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create_push, list_pushes))
        .routes(routes!(get_push))
        .routes(routes!(cancel_push))
}

/// Hub tokens of the requests for pushes that have not ended. They exist in memory only. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Tokens(Arc<Mutex<HashMap<String, Token>>>);

impl Tokens {
    fn insert(&self, push: &str, token: Token) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(push.to_owned(), token);
    }

    fn take(&self, push: &str) -> Option<Token> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(push)
    }
}

/// The owner of the token of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum TokenOf {
    /// The token came with the request; a restarted server does not have it.
    Request,
    /// The operator's setting.
    Server,
}

/// A push as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    request: PushRequest,
    format: PushFormat,
    /// The export whose files are pushed; null for an adapter.
    export: Option<ExportId>,
    token_of: TokenOf,
}

impl Stored {
    fn of(row: &TaskRow) -> Result<Self, Problem> {
        serde_json::from_value(row.request.clone())
            .map_err(|_| Problem::internal(format!("the stored request of push {} cannot be read", row.id)))
    }
}

/// A push of a checkpoint to the model hub.
#[derive(Debug, Serialize, ToSchema)]
pub struct Push {
    /// The push's id, `psh_…`.
    id: PushId,
    /// The job that saved the checkpoint.
    job_id: JobId,
    /// The checkpoint that is pushed.
    checkpoint_id: CheckpointId,
    /// Optimizer step of the checkpoint.
    step: u64,
    /// The repository, `org/name`.
    repo: String,
    /// The branch that gets the commit.
    revision: String,
    /// The files that are pushed.
    format: PushFormat,
    /// The requested data type of a merged model's weights; null = that of the base model.
    dtype: Option<ExportDtype>,
    /// Whether the repository is created as private.
    private: bool,
    /// Whether the model card shows some prompts and completions.
    with_samples: bool,
    /// Whether a model card is written.
    card: bool,
    /// Current state of the push.
    state: TaskState,
    /// The current stage of the push; null once it has ended.
    stage: Option<PushStage>,
    /// Progress of the stage.
    progress: TaskProgress,
    /// The export that makes the merged model; null for an adapter.
    export_id: Option<ExportId>,
    /// The commit, 40 hexadecimal digits; null until the push is complete.
    commit: Option<String>,
    /// Page of the repository at the branch; null until the push is complete.
    url: Option<String>,
    /// Whether the push made the commit; false if the branch had the same files already, null until the push is complete.
    is_new: Option<bool>,
    /// When the push was requested.
    created_at: Time,
    /// When the push started; null while it is queued.
    started_at: Option<Time>,
    /// When the push ended; null before that.
    finished_at: Option<Time>,
    /// Why the push failed; null otherwise.
    error: Option<PushError>,
}

impl Push {
    async fn of(state: &AppState, row: TaskRow) -> Result<Self, Problem> {
        let read = |text: &str| Problem::internal(format!("the stored {text} of push {} cannot be read", row.id));
        let Stored { request, format, export, token_of: _ } = Stored::of(&row)?;
        let result: Option<PushResult> =
            row.result.clone().map(serde_json::from_value).transpose().map_err(|_| read("result"))?;
        let mut stage = (!row.state.is_final()).then_some(PushStage::Uploading);
        let mut progress = TaskProgress { done: row.done, total: row.total };
        if let Some(export) = export.filter(|_| stage.is_some()) {
            match state.store.task_get(TaskKind::Export, &export.to_string()).await {
                Ok(export) if !export.state.is_final() => {
                    stage = Some(PushStage::Exporting);
                    progress = TaskProgress { done: export.done, total: export.total };
                }
                Ok(_) | Err(StoreError::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let error = row.error.clone().map(serde_json::from_value).transpose().map_err(|_| read("error"))?;
        let PushRequest { repo, revision, format: _, dtype, private, with_samples, card } = request;
        let (commit, url, is_new) = match result {
            Some(PushResult { commit, url, is_new }) => (Some(commit), Some(url), Some(is_new)),
            None => (None, None, None),
        };
        Ok(Self {
            id: row.id.parse().map_err(|_| read("id"))?,
            job_id: row.job,
            checkpoint_id: row.checkpoint,
            step: row.step,
            repo,
            revision: revision.unwrap_or_else(|| MAIN.to_owned()),
            format,
            dtype,
            private,
            with_samples,
            card,
            state: row.state,
            stage,
            progress,
            export_id: export,
            commit,
            url,
            is_new,
            created_at: Time(row.created_at),
            started_at: row.started_at.map(Time),
            finished_at: row.finished_at.map(Time),
            error,
        })
    }
}

/// The branch of a push that names none.
const MAIN: &str = "main";

/// Push a checkpoint to the model hub.
///
/// The server uploads the adapter, or a merged model that it exports first, to the repository, with a model card that contains the
/// data, rewards, reward curve, verdict and how to load the model; prompts and completions only with `with_samples`. The repository
/// is created as public unless `private` is set. Send a hub token with write permission in the header `x-hub-token`; without it the
/// server uses its own one, if the caller may use it. The response comes immediately; `GET /pushes/{id}` reports progress. Files
/// that the hub has already are not uploaded again, so a push that failed or was interrupted continues when it is requested again.
/// If the same push is queued or running, it is returned instead of a second one (200).
#[utoipa::path(post, path = "/checkpoints/{id}/pushes", tag = "Artifacts",
    params(("id" = CheckpointId, Path),
        ("x-hub-token" = Option<String>, Header, description = "A hub token with write permission; the server does not store it"),
        ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours")),
    request_body = PushRequest,
    responses(
        (status = 202, description = "Queued", body = Push),
        (status = 200, description = "The same push is already queued or running", body = Push),
        (status = 404, description = "There is no such checkpoint", body = ProblemBody),
        (status = 422, description = "The request is not valid, or there is no hub token (`no_hub_token`)", body = ProblemBody),
        (status = 507, description = "The server's disk is nearly full", body = ProblemBody)))]
async fn create_push(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<CheckpointId>,
    HashedJson(request, sha256): HashedJson<PushRequest>,
) -> Result<Response, Problem> {
    let work = begin(state.clone(), caller.clone(), id, request);
    let identity = identity(format_args!("{id} {sha256}"));
    once(&state, &caller, &headers, "POST /checkpoints/{id}/pushes", &identity, work).await
}

async fn begin(state: AppState, caller: Caller, id: CheckpointId, request: PushRequest) -> Result<Answer, Problem> {
    let wrong = |field: &str, why: String| {
        Problem::new(Code::InvalidBody, format!("{field}: {why}")).item(format!("/{field}"), "invalid", why)
    };
    request.check().map_err(|(field, why)| wrong(field, why))?;
    repo_of(&request).map_err(|(field, why)| wrong(field, why))?;
    let checkpoint = state.store.checkpoint_get(id).await?;
    let is_adapter = state.store.job_get(checkpoint.job).await?.plan()?.lora.is_some();
    let format = match (request.format, is_adapter) {
        (Some(PushFormat::Adapter), false) => {
            let why = "the job trained all weights, so the checkpoint is no adapter: set format to merged";
            return Err(wrong("format", why.to_owned()));
        }
        (Some(format), _) => format,
        (None, true) if request.dtype.is_none() => PushFormat::Adapter,
        (None, true) => return Err(wrong("dtype", "an adapter is pushed unchanged: set format to merged".to_owned())),
        (None, false) => PushFormat::Merged,
    };
    let token_of = token_of(&state, &caller, &request)?;
    for known in state.store.task_list(TaskKind::Push, checkpoint.job, Some(id)).await? {
        if !known.state.is_final() && Stored::of(&known)?.request == request {
            let location = format!("/pushes/{}", known.id);
            return Answer::new(StatusCode::OK, Some(location), &Push::of(&state, known).await?);
        }
    }
    let export = match format {
        PushFormat::Adapter => None,
        PushFormat::Merged => {
            let request = ExportRequest { format: ExportFormat::Merged, dtype: request.dtype, context_length: None };
            let (row, _) = exports::find_or_create(&state, &checkpoint, request).await?;
            Some(row.id.parse().map_err(|_| Problem::internal("the stored id of an export cannot be read"))?)
        }
    };
    let new = NewTask {
        id: PushId::new().to_string(),
        kind: TaskKind::Push,
        job: checkpoint.job,
        checkpoint: id,
        step: checkpoint.step,
        request: json!(Stored { request, format, export, token_of }),
    };
    // The token is there before the push can start.
    if let Some(token) = caller.hub_token() {
        state.push_tokens.insert(&new.id, token.clone());
    }
    let row = state.store.task_create(new, clock_ms()).await?;
    Answer::new(StatusCode::ACCEPTED, Some(format!("/pushes/{}", row.id)), &Push::of(&state, row).await?)
}

/// Parses the repository of a push and its branch. Returns the field that is wrong, and why.
fn repo_of(request: &PushRequest) -> Result<Repo, (&'static str, String)> {
    let revision = request.revision.as_deref().unwrap_or(MAIN);
    let id = &request.repo;
    if ["datasets/", "spaces/"].iter().any(|kind| id.starts_with(kind)) {
        return Err((
            "repo",
            "a checkpoint is pushed to a repository of a model: give org/name without a kind".to_owned(),
        ));
    }
    if id.contains('@') {
        return Err(("repo", "the repository is given as org/name: the branch belongs into revision".to_owned()));
    }
    Repo::new(RepoKind::Model, id, MAIN).map_err(|error| ("repo", error.to_string()))?;
    if !id.contains('/') {
        return Err((
            "repo",
            format!("the account is missing: give org/{id}, with your account or organization as org"),
        ));
    }
    Repo::new(RepoKind::Model, id, revision)
        .map_err(|_| ("revision", "must be the name of a branch: letters, digits and - _ . /".to_owned()))
}

/// Returns whose token the push uses.
fn token_of(state: &AppState, caller: &Caller, request: &PushRequest) -> Result<TokenOf, Problem> {
    let environment = &state.config.hub.environment;
    let repo = request.repo.clone();
    if environment.offline {
        return Err(Problem::new(Code::Unsupported, HubError::OfflinePush { repo }.to_string()));
    }
    match (caller.hub_token(), &environment.token) {
        (Some(_), _) => Ok(TokenOf::Request),
        (None, Some(_)) if has_own_rights(state, caller) => Ok(TokenOf::Server),
        _ => Err(Problem::new(Code::NoHubToken, problem(&HubError::NoToken { repo }).detail().to_owned())),
    }
}

/// List the pushes of a checkpoint, newest first.
#[utoipa::path(get, path = "/checkpoints/{id}/pushes", tag = "Artifacts", params(("id" = CheckpointId, Path)), responses(
    (status = 200, description = "All pushes of the checkpoint", body = List<Push>),
    (status = 404, description = "There is no such checkpoint", body = ProblemBody)))]
async fn list_pushes(State(state): State<AppState>, Path(id): Path<CheckpointId>) -> Result<Json<List<Push>>, Problem> {
    let checkpoint = state.store.checkpoint_get(id).await?;
    let mut data = Vec::new();
    for row in state.store.task_list(TaskKind::Push, checkpoint.job, Some(id)).await? {
        data.push(Push::of(&state, row).await?);
    }
    Ok(Json(List { data, next: None }))
}

/// Get a push by its id.
#[utoipa::path(get, path = "/pushes/{id}", tag = "Artifacts", params(("id" = PushId, Path)), responses(
    (status = 200, description = "The push", body = Push),
    (status = 404, description = "There is no such push", body = ProblemBody)))]
async fn get_push(State(state): State<AppState>, Path(id): Path<PushId>) -> Result<Json<Push>, Problem> {
    let row = state.store.task_get(TaskKind::Push, &id.to_string()).await?;
    Ok(Json(Push::of(&state, row).await?))
}

/// Cancel a push. A push that has ended stays as it is.
///
/// The commit is the last request of a push, so the repository keeps the files that it had. The server completes an export that the
/// push waits for.
#[utoipa::path(post, path = "/pushes/{id}/cancel", tag = "Artifacts",
    params(("id" = PushId, Path), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key gets the same answer for 24 hours")),
    responses(
        (status = 200, description = "The push", body = Push),
        (status = 404, description = "There is no such push", body = ProblemBody)))]
async fn cancel_push(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<PushId>,
) -> Result<Response, Problem> {
    let of_push = state.clone();
    let work = async move {
        let row = of_push.store.task_cancel(TaskKind::Push, &id.to_string(), clock_ms()).await?;
        drop(of_push.push_tokens.take(&row.id));
        Answer::new(StatusCode::OK, None, &Push::of(&of_push, row).await?)
    };
    once(&state, &caller, &headers, "POST /pushes/{id}/cancel", &identity(id), work).await
}
