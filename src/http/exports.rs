//! Exports: a checkpoint in the form that other programs load. An export is a task: it waits, runs in a process of its own, and its
//! files are kept for a week.

mod exporting;

use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::download::{Download, RangeHeaders, send_file, send_tar};
use super::error::{Code, Problem, ProblemBody};
use super::extract::{HashedJson, Json, Path};
use super::idempotency::{Answer, identity, once};
use super::list::{List, Time};
use super::rows::check_disk;
use crate::export::{ExportDtype, ExportError, ExportFormat, ExportRequest, ExportResult, Survived};
use crate::id::{CheckpointId, ExportId, JobId};
use crate::protocol::FileEntry;
use crate::store::{NewTask, TaskKind, TaskRow, clock_ms};
use crate::task::{TaskProgress, TaskState};

pub(crate) use exporting::run;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create_export, list_exports))
        .routes(routes!(get_export, delete_export))
        .routes(routes!(cancel_export))
        .routes(routes!(get_export_file))
        .routes(routes!(get_export_archive))
}

/// A checkpoint in another form.
#[derive(Debug, Serialize, ToSchema)]
pub struct Export {
    /// Its id.
    id: ExportId,
    /// The job.
    job_id: JobId,
    /// The checkpoint.
    checkpoint_id: CheckpointId,
    /// The checkpoint's step.
    step: u64,
    /// What it is.
    format: ExportFormat,
    /// How the weights are stored; null until that is known, where it was not asked for.
    dtype: Option<ExportDtype>,
    /// Current state.
    state: TaskState,
    /// How far it is, in weights.
    progress: TaskProgress,
    /// Bytes of all files; null before the end.
    size_bytes: Option<u64>,
    /// Its files, by name; empty before the end.
    files: Vec<FileEntry>,
    /// What of the adapter's update survives the rounding to the dtype; null without an adapter, and before the end.
    survived: Option<Survived>,
    /// What to do where too little of it survives.
    advice: Option<String>,
    /// When it was asked for.
    created_at: Time,
    /// When it began.
    started_at: Option<Time>,
    /// When it ended.
    finished_at: Option<Time>,
    /// When its files are removed.
    expires_at: Option<Time>,
    /// Why it failed; null otherwise.
    error: Option<ExportError>,
}

impl Export {
    fn of(row: TaskRow) -> Result<Self, Problem> {
        let read = |text: &str| Problem::internal(format!("the stored {text} of export {} cannot be read", row.id));
        let request: ExportRequest = serde_json::from_value(row.request.clone()).map_err(|_| read("request"))?;
        let result: Option<ExportResult> =
            row.result.clone().map(serde_json::from_value).transpose().map_err(|_| read("result"))?;
        let error = row.error.clone().map(serde_json::from_value).transpose().map_err(|_| read("error"))?;
        let (dtype, files, survived, advice) = match result {
            Some(ExportResult { dtype, files, survived, advice }) => (Some(dtype), files, survived, advice),
            None => (request.dtype, Vec::new(), None, None),
        };
        Ok(Self {
            id: row.id.parse().map_err(|_| read("id"))?,
            job_id: row.job,
            checkpoint_id: row.checkpoint,
            step: row.step,
            format: request.format,
            dtype,
            state: row.state,
            progress: TaskProgress { done: row.done, total: row.total },
            size_bytes: (row.state == TaskState::Succeeded).then(|| files.iter().map(|file| file.size_bytes).sum()),
            files,
            survived,
            advice,
            created_at: Time(row.created_at),
            started_at: row.started_at.map(Time),
            finished_at: row.finished_at.map(Time),
            expires_at: row.expires_at.map(Time),
            error,
        })
    }
}

/// Export a checkpoint: write it in the form that other programs load.
///
/// `merged` is a model directory: base weights plus the adapter's update, added in f32 and rounded once; config, tokenizer and the
/// base's sharding with it. Of full fine-tuning it is the checkpoint in the dtype. `survived` says what of the update the dtype
/// keeps, and `advice` what to do where that is too little. The answer comes at once; `GET /exports/{id}` tells how far it is. An
/// export of the same checkpoint and form that is under way or done is returned instead of a second one (200). Its files are
/// kept for 7 days.
#[utoipa::path(post, path = "/checkpoints/{id}/exports", tag = "Artifacts",
    params(("id" = CheckpointId, Path), ("Idempotency-Key" = Option<String>, Header, description = "The same key and body give the same answer for 24 hours")),
    request_body = ExportRequest,
    responses(
        (status = 202, description = "It waits for its turn", body = Export),
        (status = 200, description = "It is there, or under way already", body = Export),
        (status = 404, description = "No such checkpoint", body = ProblemBody),
        (status = 422, description = "The request is not valid", body = ProblemBody),
        (status = 507, description = "The disk is nearly full", body = ProblemBody)))]
async fn create_export(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<CheckpointId>,
    HashedJson(request, sha256): HashedJson<ExportRequest>,
) -> Result<Response, Problem> {
    let work = begin(state.clone(), id, request);
    let identity = identity(format_args!("{id} {sha256}"));
    once(&state, &caller, &headers, "POST /checkpoints/{id}/exports", &identity, work).await
}

async fn begin(state: AppState, id: CheckpointId, request: ExportRequest) -> Result<Answer, Problem> {
    let checkpoint = state.store.checkpoint_get(id).await?;
    let request = json!(request);
    let known = state.store.task_list(TaskKind::Export, checkpoint.job, Some(id)).await?;
    let is_usable = |task: &TaskRow| !matches!(task.state, TaskState::Failed | TaskState::Cancelled);
    if let Some(same) = known.into_iter().find(|task| is_usable(task) && task.request == request) {
        return Answer::new(StatusCode::OK, Some(format!("/exports/{}", same.id)), &Export::of(same)?);
    }
    check_disk(&state)?;
    let new = NewTask {
        id: ExportId::new().to_string(),
        kind: TaskKind::Export,
        job: checkpoint.job,
        checkpoint: id,
        step: checkpoint.step,
        request,
    };
    let row = state.store.task_create(new, clock_ms()).await?;
    Answer::new(StatusCode::ACCEPTED, Some(format!("/exports/{}", row.id)), &Export::of(row)?)
}

/// List the exports of a checkpoint, newest first.
#[utoipa::path(get, path = "/checkpoints/{id}/exports", tag = "Artifacts", params(("id" = CheckpointId, Path)), responses(
    (status = 200, description = "All of them", body = List<Export>),
    (status = 404, description = "No such checkpoint", body = ProblemBody)))]
async fn list_exports(
    State(state): State<AppState>,
    Path(id): Path<CheckpointId>,
) -> Result<Json<List<Export>>, Problem> {
    let checkpoint = state.store.checkpoint_get(id).await?;
    let rows = state.store.task_list(TaskKind::Export, checkpoint.job, Some(id)).await?;
    let data = rows.into_iter().map(Export::of).collect::<Result<_, _>>()?;
    Ok(Json(List { data, next: None }))
}

/// One export.
#[utoipa::path(get, path = "/exports/{id}", tag = "Artifacts", params(("id" = ExportId, Path)), responses(
    (status = 200, description = "The export", body = Export),
    (status = 404, description = "No such export, or it has expired", body = ProblemBody)))]
async fn get_export(State(state): State<AppState>, Path(id): Path<ExportId>) -> Result<Json<Export>, Problem> {
    Ok(Json(Export::of(find(&state, id).await?)?))
}

async fn find(state: &AppState, id: ExportId) -> Result<TaskRow, Problem> {
    Ok(state.store.task_get(TaskKind::Export, &id.to_string()).await?)
}

/// Cancel an export. One that has ended stays as it is.
#[utoipa::path(post, path = "/exports/{id}/cancel", tag = "Artifacts",
    params(("id" = ExportId, Path), ("Idempotency-Key" = Option<String>, Header, description = "The same key gives the same answer for 24 hours")),
    responses(
        (status = 200, description = "The export", body = Export),
        (status = 404, description = "No such export", body = ProblemBody)))]
async fn cancel_export(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<ExportId>,
) -> Result<Response, Problem> {
    let store = state.store.clone();
    let work = async move {
        let row = store.task_cancel(TaskKind::Export, &id.to_string(), clock_ms()).await?;
        Answer::new(StatusCode::OK, None, &Export::of(row)?)
    };
    once(&state, &caller, &headers, "POST /exports/{id}/cancel", &identity(id), work).await
}

/// Remove an export and its files; one that is under way is cancelled first.
#[utoipa::path(delete, path = "/exports/{id}", tag = "Artifacts", params(("id" = ExportId, Path)), responses(
    (status = 204, description = "It is gone"),
    (status = 404, description = "No such export", body = ProblemBody)))]
async fn delete_export(State(state): State<AppState>, Path(id): Path<ExportId>) -> Result<StatusCode, Problem> {
    let row = state.store.task_cancel(TaskKind::Export, &id.to_string(), clock_ms()).await?;
    let (files, name) = (state.files.clone(), row.id.clone());
    tokio::task::spawn_blocking(move || files.export_remove(&name)).await.map_err(Problem::internal)??;
    state.store.task_delete(TaskKind::Export, &row.id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The files of an export that has succeeded.
async fn files_of(state: &AppState, id: ExportId) -> Result<Vec<Download>, Problem> {
    let row = find(state, id).await?;
    let result: Option<ExportResult> =
        row.result.map(serde_json::from_value::<ExportResult>).transpose().map_err(Problem::internal)?;
    let Some(result) = result else {
        let detail = "the export has no files: it is not done, or it failed; GET /exports/{id} says which";
        return Err(Problem::new(Code::NotReady, detail).retry_after(2));
    };
    let download = |file: FileEntry| {
        let path = state.files.export_file(&row.id, &file.name)?;
        Ok(Download { path, name: file.name, size_bytes: file.size_bytes, sha256: file.sha256 })
    };
    result.files.into_iter().map(download).collect()
}

/// Download a file of an export.
///
/// The ETag is the file's SHA-256. `Range` (one range), `If-Range`, `If-Match` and `If-None-Match` are honoured.
#[utoipa::path(method(get, head), path = "/exports/{id}/files/{name}", tag = "Artifacts",
    params(
        ("id" = ExportId, Path, description = "The export"),
        ("name" = String, Path, description = "The file, as the export lists it"),
        RangeHeaders,
    ),
    responses(
        (status = 200, description = "The file; a name that ends with .json is sent as JSON",
            content((Vec<u8> = "application/octet-stream"), (serde_json::Value = "application/json")), headers(
            ("ETag" = String, description = "The file's SHA-256, quoted"),
            ("Accept-Ranges" = String, description = "bytes"),
            ("Repr-Digest" = String, description = "RFC 9530, of the whole file"),
        )),
        (status = 206, description = "A part of it",
            content((Vec<u8> = "application/octet-stream"), (Vec<u8> = "application/json"))),
        (status = 304, description = "The client has it"),
        (status = 416, description = "The range lies outside the file", body = ProblemBody),
        (status = 503, description = "It is not done", body = ProblemBody),
    ))]
async fn get_export_file(
    State(state): State<AppState>,
    Path((id, name)): Path<(ExportId, String)>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let files = files_of(&state, id).await?;
    let Some(file) = files.into_iter().find(|file| file.name == name) else {
        return Err(Problem::not_found("file of this export", name));
    };
    send_file(&method, &headers, &file).await
}

/// Download all files of an export as one tar.
///
/// It is made on the way, the same bytes every time; so ranges and conditions are honoured as of a file.
#[utoipa::path(method(get, head), path = "/exports/{id}/archive.tar", tag = "Artifacts",
    params(("id" = ExportId, Path, description = "The export"), RangeHeaders),
    responses(
        (status = 200, description = "The archive", body = Vec<u8>, content_type = "application/x-tar", headers(
            ("ETag" = String, description = "Of the names and SHA-256 of its files, quoted"),
            ("Repr-Digest" = String, description = "RFC 9530, of the whole archive, up to 64 MiB"),
            ("Accept-Ranges" = String, description = "bytes"),
        )),
        (status = 206, description = "A part of it", body = Vec<u8>, content_type = "application/x-tar"),
        (status = 304, description = "The client has it"),
        (status = 416, description = "The range lies outside the archive", body = ProblemBody),
        (status = 503, description = "It is not done", body = ProblemBody),
    ))]
async fn get_export_archive(
    State(state): State<AppState>,
    Path(id): Path<ExportId>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    send_tar(&method, &headers, &format!("{id}.tar"), &files_of(&state, id).await?).await
}
