//! Exports: a checkpoint converted to a format that other programs load. An export is a task: it is queued, runs in its own
//! process, and its files are kept for a week.

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
use crate::store::background::spawn_blocking;
use crate::store::{CheckpointRow, NewTask, TaskKind, TaskRow, clock_ms};
use crate::task::{TaskProgress, TaskState};

pub(crate) use exporting::run;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create_export, list_exports))
        .routes(routes!(get_export, delete_export))
        .routes(routes!(cancel_export))
        .routes(routes!(get_export_file))
        .routes(routes!(get_export_archive))
}

/// A checkpoint converted to another format.
#[derive(Debug, Serialize, ToSchema)]
pub struct Export {
    /// The export's id, `exp_…`.
    id: ExportId,
    /// The job that saved the checkpoint.
    job_id: JobId,
    /// The checkpoint that is exported.
    checkpoint_id: CheckpointId,
    /// Optimizer step of the checkpoint.
    step: u64,
    /// The format of the export.
    format: ExportFormat,
    /// Data type of the stored weights; null until it is known, if the request did not set it.
    dtype: Option<ExportDtype>,
    /// Current state of the export.
    state: TaskState,
    /// Progress, counted in weights.
    progress: TaskProgress,
    /// Total size of the files in bytes; null until the export is complete.
    size_bytes: Option<u64>,
    /// The files, by name; empty until the export is complete.
    files: Vec<FileEntry>,
    /// How much of the adapter's update survives rounding to the dtype; null without an adapter, and until the export is complete.
    survived: Option<Survived>,
    /// A recommendation if too little of the update survives; null otherwise.
    advice: Option<String>,
    /// When the export was requested.
    created_at: Time,
    /// When the export started; null while it is queued.
    started_at: Option<Time>,
    /// When the export ended; null before that.
    finished_at: Option<Time>,
    /// When the files will be deleted; null until the export is complete.
    expires_at: Option<Time>,
    /// Why the export failed; null otherwise.
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

/// Export a checkpoint to a format that other programs load.
///
/// `merged` is a model directory: base weights plus the adapter's update, added in f32 and rounded once, with config, tokenizer and
/// the base model's sharding. For full fine-tuning it is the checkpoint in the requested dtype. `gguf` is the same model as one file for
/// llama.cpp, and `gguf_adapter` the adapter alone for it; families and tokenizers that were not compared with llama.cpp fail with the code
/// `unsupported`. `survived` reports how much of the update the dtype keeps, and `advice` recommends an alternative if that is too little. The response comes immediately; `GET
/// /exports/{id}` reports progress. If an export of the same checkpoint and format is queued, running or complete, it is returned
/// instead of a second one (200). The files are kept for 7 days.
#[utoipa::path(post, path = "/checkpoints/{id}/exports", tag = "Artifacts",
    params(("id" = CheckpointId, Path), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours")),
    request_body = ExportRequest,
    responses(
        (status = 202, description = "Queued", body = Export),
        (status = 200, description = "The same export already exists: it is complete, queued or running", body = Export),
        (status = 404, description = "There is no such checkpoint", body = ProblemBody),
        (status = 422, description = "The request is not valid", body = ProblemBody),
        (status = 507, description = "The server's disk is nearly full", body = ProblemBody)))]
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
    request.check().map_err(|(field, why)| {
        Problem::new(Code::InvalidBody, format!("{field}: {why}")).item(format!("/{field}"), "invalid", why)
    })?;
    let checkpoint = state.store.checkpoint_get(id).await?;
    let (row, is_new) = find_or_create(&state, &checkpoint, request).await?;
    let status = if is_new { StatusCode::ACCEPTED } else { StatusCode::OK };
    Answer::new(status, Some(format!("/exports/{}", row.id)), &Export::of(row)?)
}

/// Returns the queued, running or complete export of this request, or queues one. Also returns whether it is new.
pub(super) async fn find_or_create(
    state: &AppState,
    checkpoint: &CheckpointRow,
    request: ExportRequest,
) -> Result<(TaskRow, bool), Problem> {
    let request = json!(request);
    let known = state.store.task_list(TaskKind::Export, checkpoint.job, Some(checkpoint.id)).await?;
    let is_usable = |task: &TaskRow| !matches!(task.state, TaskState::Failed | TaskState::Cancelled);
    if let Some(same) = known.into_iter().find(|task| is_usable(task) && task.request == request) {
        return Ok((same, false));
    }
    check_disk(state)?;
    let new = NewTask {
        id: ExportId::new().to_string(),
        kind: TaskKind::Export,
        job: checkpoint.job,
        checkpoint: checkpoint.id,
        step: checkpoint.step,
        request,
    };
    Ok((state.store.task_create(new, clock_ms()).await?, true))
}

/// List the exports of a checkpoint, newest first.
#[utoipa::path(get, path = "/checkpoints/{id}/exports", tag = "Artifacts", params(("id" = CheckpointId, Path)), responses(
    (status = 200, description = "All exports of the checkpoint", body = List<Export>),
    (status = 404, description = "There is no such checkpoint", body = ProblemBody)))]
async fn list_exports(
    State(state): State<AppState>,
    Path(id): Path<CheckpointId>,
) -> Result<Json<List<Export>>, Problem> {
    let checkpoint = state.store.checkpoint_get(id).await?;
    let rows = state.store.task_list(TaskKind::Export, checkpoint.job, Some(id)).await?;
    let data = rows.into_iter().map(Export::of).collect::<Result<_, _>>()?;
    Ok(Json(List { data, next: None }))
}

/// Get an export by its id.
#[utoipa::path(get, path = "/exports/{id}", tag = "Artifacts", params(("id" = ExportId, Path)), responses(
    (status = 200, description = "The export", body = Export),
    (status = 404, description = "There is no such export, or it has expired", body = ProblemBody)))]
async fn get_export(State(state): State<AppState>, Path(id): Path<ExportId>) -> Result<Json<Export>, Problem> {
    Ok(Json(Export::of(find(&state, id).await?)?))
}

async fn find(state: &AppState, id: ExportId) -> Result<TaskRow, Problem> {
    Ok(state.store.task_get(TaskKind::Export, &id.to_string()).await?)
}

/// Cancel an export. An export that has ended stays as it is.
#[utoipa::path(post, path = "/exports/{id}/cancel", tag = "Artifacts",
    params(("id" = ExportId, Path), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key gets the same answer for 24 hours")),
    responses(
        (status = 200, description = "The export", body = Export),
        (status = 404, description = "There is no such export", body = ProblemBody)))]
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

/// Delete an export and its files. A running export is cancelled first.
#[utoipa::path(delete, path = "/exports/{id}", tag = "Artifacts", params(("id" = ExportId, Path)), responses(
    (status = 204, description = "Deleted"),
    (status = 404, description = "There is no such export", body = ProblemBody)))]
async fn delete_export(State(state): State<AppState>, Path(id): Path<ExportId>) -> Result<StatusCode, Problem> {
    let row = state.store.task_cancel(TaskKind::Export, &id.to_string(), clock_ms()).await?;
    let (files, name) = (state.files.clone(), row.id.clone());
    spawn_blocking(move || files.export_remove(&name)).await.map_err(Problem::internal)??;
    state.store.task_delete(TaskKind::Export, &row.id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the files of an export that has succeeded.
async fn files_of(state: &AppState, id: ExportId) -> Result<Vec<Download>, Problem> {
    let row = find(state, id).await?;
    let result: Option<ExportResult> =
        row.result.map(serde_json::from_value::<ExportResult>).transpose().map_err(Problem::internal)?;
    let Some(result) = result else {
        let detail = "the export has no files: it is not complete, or it failed; GET /exports/{id} returns its state";
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
/// The ETag is the file's SHA-256. `Range` (one range), `If-Range`, `If-Match` and `If-None-Match` are honored.
#[utoipa::path(method(get, head), path = "/exports/{id}/files/{name}", tag = "Artifacts",
    params(
        ("id" = ExportId, Path, description = "The export"),
        ("name" = String, Path, description = "The name of the file, as the export lists it"),
        RangeHeaders,
    ),
    responses(
        (status = 200, description = "The bytes of the file; a file whose name ends with .json is sent as JSON",
            content((Vec<u8> = "application/octet-stream"), (serde_json::Value = "application/json")), headers(
            ("ETag" = String, description = "The SHA-256 of the file, in quotes"),
            ("Accept-Ranges" = String, description = "bytes"),
            ("Repr-Digest" = String, description = "The digest of the whole file (RFC 9530)"),
        )),
        (status = 206, description = "The requested range of bytes",
            content((Vec<u8> = "application/octet-stream"), (Vec<u8> = "application/json"))),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 416, description = "The requested range is outside the file", body = ProblemBody),
        (status = 503, description = "The export is not complete yet", body = ProblemBody),
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
/// The server builds the archive while it sends it. The bytes are the same every time, so ranges and conditional requests work
/// as for a file.
#[utoipa::path(method(get, head), path = "/exports/{id}/archive.tar", tag = "Artifacts",
    params(("id" = ExportId, Path, description = "The export"), RangeHeaders),
    responses(
        (status = 200, description = "The archive", body = Vec<u8>, content_type = "application/x-tar", headers(
            ("ETag" = String, description = "An ETag that is computed from the names and SHA-256 of the archive's files, in quotes"),
            ("Repr-Digest" = String, description = "The digest of the whole archive (RFC 9530); only for archives of up to 64 MiB"),
            ("Accept-Ranges" = String, description = "bytes"),
        )),
        (status = 206, description = "The requested range of bytes", body = Vec<u8>, content_type = "application/x-tar"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 416, description = "The requested range is outside the archive", body = ProblemBody),
        (status = 503, description = "The export is not complete yet", body = ProblemBody),
    ))]
async fn get_export_archive(
    State(state): State<AppState>,
    Path(id): Path<ExportId>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    send_tar(&method, &headers, &format!("{id}.tar"), &files_of(&state, id).await?).await
}
