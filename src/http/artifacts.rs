//! Checkpoints and adapters of a job, to list and to download.

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::download::{Download, RangeHeaders, send_file, send_tar};
use super::error::{Code, Problem, ProblemBody};
use super::extract::{Json, Path, Query};
use super::idempotency::{Answer, identity, once};
use super::list::{List, PageQuery, Time};
use crate::event::Metrics;
use crate::id::{CheckpointId, JobId};
use crate::protocol::FileEntry;
use crate::store::{CheckpointRow, JobRow, StoreError, clock_ms};
use rlood_types::certificate;

/// Names the checkpoint that an answer comes from.
const X_RLOOD_CHECKPOINT: HeaderName = HeaderName::from_static("x-rlood-checkpoint");
/// The adapter's files that PEFT and vLLM load, in the order of the tar archive.
const ADAPTER_FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
const MANIFEST: &str = "manifest.json";

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list_checkpoints))
        .routes(routes!(get_adapter))
        .routes(routes!(get_checkpoint))
        .routes(routes!(get_file))
        .routes(routes!(get_manifest))
        .routes(routes!(get_archive))
        .routes(routes!(pin_checkpoint, unpin_checkpoint))
}

/// A checkpoint that a job has published.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Checkpoint {
    /// The checkpoint's id, `ckpt_…`.
    pub id: CheckpointId,
    /// The job that saved the checkpoint.
    pub job_id: JobId,
    /// Number of optimizer steps completed.
    pub step: u64,
    /// The files of the checkpoint, with sizes and hashes.
    pub files: Vec<FileEntry>,
    /// Metrics of the checkpoint's step, and of the evaluation of its weights if there was one (prefix `eval_`); null = undefined.
    #[schema(value_type = std::collections::BTreeMap<String, Option<f64>>)]
    pub metrics: Metrics,
    /// Whether this is the job's best checkpoint so far.
    pub best: bool,
    /// Whether the checkpoint is kept when older checkpoints are deleted.
    pub pinned: bool,
    /// When the checkpoint was published.
    pub created_at: Time,
}

impl From<CheckpointRow> for Checkpoint {
    fn from(row: CheckpointRow) -> Self {
        let CheckpointRow { id, job, step, attempt: _, files, metrics, best, pinned, temporary: _, created_at } = row;
        Self { id, job_id: job, step, files, metrics, best, pinned, created_at: Time(created_at) }
    }
}

/// List a job's checkpoints, newest first.
#[utoipa::path(get, path = "/jobs/{id}/checkpoints", tag = "Artifacts",
    params(("id" = JobId, Path, description = "The job"), PageQuery),
    responses((status = 200, description = "A page", body = List<Checkpoint>)))]
async fn list_checkpoints(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(query): Query<PageQuery>,
) -> Result<Json<List<Checkpoint>>, Problem> {
    let limit = query.limit()? as usize;
    state.store.job_get(id).await?;
    let mut rows = state.store.checkpoint_list(id).await?;
    rows.sort_by_key(|row| std::cmp::Reverse(row.step));
    if let Some(after) = &query.after {
        // The cursor of the list is the step of the last checkpoint on the previous page, so it stays valid when that
        // checkpoint is deleted.
        let step: u64 = after.strip_prefix('s').and_then(|step| step.parse().ok()).ok_or(StoreError::BadCursor)?;
        rows.retain(|row| row.step < step);
    }
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|row| format!("s{}", row.step));
    Ok(Json(List { data: rows.into_iter().map(Checkpoint::from).collect(), next }))
}

/// Get a checkpoint by its id.
#[utoipa::path(get, path = "/checkpoints/{id}", tag = "Artifacts",
    params(("id" = CheckpointId, Path, description = "The checkpoint")),
    responses((status = 200, description = "The checkpoint", body = Checkpoint)))]
async fn get_checkpoint(
    State(state): State<AppState>,
    Path(id): Path<CheckpointId>,
) -> Result<Json<Checkpoint>, Problem> {
    Ok(Json(state.store.checkpoint_get(id).await?.into()))
}

/// Pin a checkpoint: it is kept when older checkpoints are deleted, regardless of `keep_last` and `keep_best`. Idempotent.
#[utoipa::path(post, path = "/checkpoints/{id}/pin", tag = "Artifacts",
    params(("id" = CheckpointId, Path, description = "The checkpoint"), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key gets the same answer for 24 hours")),
    responses((status = 200, description = "The checkpoint", body = Checkpoint)))]
async fn pin_checkpoint(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<CheckpointId>,
) -> Result<Response, Problem> {
    let store = state.store.clone();
    let work = async move {
        let row = store.checkpoint_pin(id, true, clock_ms()).await?;
        Answer::new(StatusCode::OK, None, &Checkpoint::from(row))
    };
    once(&state, &caller, &headers, "POST /checkpoints/{id}/pin", &identity(id), work).await
}

/// Unpin a checkpoint: it may be deleted again when the job saves its next checkpoint. Idempotent.
#[utoipa::path(delete, path = "/checkpoints/{id}/pin", tag = "Artifacts",
    params(("id" = CheckpointId, Path, description = "The checkpoint")),
    responses((status = 200, description = "The checkpoint", body = Checkpoint)))]
async fn unpin_checkpoint(
    State(state): State<AppState>,
    Path(id): Path<CheckpointId>,
) -> Result<Json<Checkpoint>, Problem> {
    Ok(Json(state.store.checkpoint_pin(id, false, clock_ms()).await?.into()))
}

/// Download a file of a checkpoint.
///
/// The ETag is the file's SHA-256. `Range` (one range), `If-Range`, `If-Match` and `If-None-Match` are honored.
#[utoipa::path(method(get, head), path = "/checkpoints/{id}/files/{name}", tag = "Artifacts",
    params(
        ("id" = CheckpointId, Path, description = "The checkpoint"),
        ("name" = String, Path, description = "The name of the file, as the checkpoint lists it"),
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
    ))]
async fn get_file(
    State(state): State<AppState>,
    Path((id, name)): Path<(CheckpointId, String)>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let row = state.store.checkpoint_get(id).await?;
    send_file(&method, &headers, &file_of(&state, &row, &name)?).await
}

/// Get the manifest of a checkpoint: its files with their hashes, as the worker wrote them.
#[utoipa::path(method(get, head), path = "/checkpoints/{id}/manifest.json", tag = "Artifacts",
    params(("id" = CheckpointId, Path, description = "The checkpoint"), RangeHeaders),
    responses(
        (status = 200, description = "The manifest", body = serde_json::Value, headers(
            ("ETag" = String, description = "The SHA-256 of the file, in quotes"),
            ("Accept-Ranges" = String, description = "bytes"),
            ("Repr-Digest" = String, description = "The digest of the whole file (RFC 9530)"),
        )),
        (status = 206, description = "The requested range of bytes", body = Vec<u8>, content_type = "application/json"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 416, description = "The requested range is outside the file", body = ProblemBody),
    ))]
async fn get_manifest(
    State(state): State<AppState>,
    Path(id): Path<CheckpointId>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let row = state.store.checkpoint_get(id).await?;
    send_file(&method, &headers, &file_of(&state, &row, MANIFEST)?).await
}

/// Download all files of a checkpoint as one tar.
///
/// The server builds the archive while it sends it. The bytes are the same every time, so ranges and conditional requests work as
/// for a file. `manifest.json` contains the digest of each file.
#[utoipa::path(method(get, head), path = "/checkpoints/{id}/archive.tar", tag = "Artifacts",
    params(("id" = CheckpointId, Path, description = "The checkpoint"), RangeHeaders),
    responses(
        (status = 200, description = "The archive", body = Vec<u8>, content_type = "application/x-tar", headers(
            ("ETag" = String, description = "An ETag that is computed from the names and SHA-256 of the archive's files, in quotes"),
            ("Repr-Digest" = String, description = "The digest of the whole archive (RFC 9530); only for archives of up to 64 MiB"),
            ("Accept-Ranges" = String, description = "bytes"),
        )),
        (status = 206, description = "The requested range of bytes", body = Vec<u8>, content_type = "application/x-tar"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 416, description = "The requested range is outside the archive", body = ProblemBody),
    ))]
async fn get_archive(
    State(state): State<AppState>,
    Path(id): Path<CheckpointId>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let row = state.store.checkpoint_get(id).await?;
    let files: Result<Vec<Download>, Problem> =
        row.files.iter().map(|file| file_of(&state, &row, &file.name)).collect();
    send_tar(&method, &headers, &format!("{}.tar", row.id), &files?).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AdapterQuery {
    /// Which checkpoint to use: the newest or the best one. Default: the job's result, which is the newest one unless the job ended
    /// early (see the job's `ending`).
    #[param(inline)]
    which: Option<Which>,
}

/// Selects a checkpoint of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Which {
    /// The newest checkpoint of the job.
    Last,
    /// The best checkpoint by the job's metric.
    Best,
}

/// Download a job's LoRA adapter as a tar in PEFT's layout.
///
/// `adapter_config.json` and `adapter_model.safetensors` are at the root of the archive, and the checkpoint's `certificate.json`. `PeftModel.from_pretrained` and vLLM's
/// `--lora-modules` accept the unpacked folder. A full fine-tuning job has no adapter (409): the archives of its checkpoints
/// contain the whole model.
#[utoipa::path(method(get, head), path = "/jobs/{id}/adapter", tag = "Artifacts",
    params(("id" = JobId, Path, description = "The job"), AdapterQuery, RangeHeaders),
    responses(
        (status = 200, description = "The adapter", body = Vec<u8>, content_type = "application/x-tar", headers(
            ("ETag" = String, description = "An ETag that is computed from the names and SHA-256 of the archive's files, in quotes"),
            ("Repr-Digest" = String, description = "The digest of the whole archive (RFC 9530); only for archives of up to 64 MiB"),
            ("Accept-Ranges" = String, description = "bytes"),
            ("X-Rlood-Checkpoint" = String, description = "Id of the checkpoint that the adapter belongs to"),
        )),
        (status = 206, description = "The requested range of bytes", body = Vec<u8>, content_type = "application/x-tar"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 404, description = "There is no such job, or the job has no checkpoint: `no_checkpoint` = not yet, `no_such_checkpoint` = no longer", body = ProblemBody),
        (status = 409, description = "The job trains all weights: its checkpoints hold a model, not an adapter", body = ProblemBody)))]
async fn get_adapter(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(AdapterQuery { which }): Query<AdapterQuery>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let job = state.store.job_get(id).await?;
    let row = match which {
        None => state.store.checkpoint_result(id, job.ending.as_ref()).await?,
        Some(Which::Last) => state.store.checkpoint_latest(id).await?,
        Some(Which::Best) => state.store.checkpoint_best(id).await?,
    };
    let Some(row) = row else {
        // A job with any checkpoint has a newest and a best one, so only the job's result can be missing here.
        if state.store.checkpoint_latest(id).await?.is_some() {
            let detail =
                "no checkpoint from before the alert that ended the job is kept; ask for which=last or which=best";
            return Err(Problem::new(Code::NoSuchCheckpoint, detail));
        }
        return Err(no_checkpoint(&state, &job));
    };
    if row.files.iter().any(|file| file.name == "model.safetensors") {
        let detail = format!(
            "the job trains all weights, so it has no adapter; GET /checkpoints/{}/archive.tar returns the model in the format that transformers loads",
            row.id
        );
        return Err(Problem::new(Code::NoAdapter, detail));
    }
    let mut names = ADAPTER_FILES.to_vec();
    // Checkpoints of earlier versions have no certificate.
    names.extend(row.files.iter().any(|file| file.name == certificate::FILE).then_some(certificate::FILE));
    let files: Result<Vec<Download>, Problem> = names.iter().map(|name| file_of(&state, &row, name)).collect();
    let mut response = send_tar(&method, &headers, &format!("{id}-step{}-adapter.tar", row.step), &files?).await?;
    name_checkpoint(&mut response, row.id);
    Ok(response)
}

/// Adds the header that names the checkpoint of an answer.
pub(super) fn name_checkpoint(response: &mut Response, id: CheckpointId) {
    if let Ok(id) = HeaderValue::from_str(&id.to_string()) {
        response.headers_mut().insert(X_RLOOD_CHECKPOINT, id);
    }
}

/// The problem for a job without any checkpoint: an unfinished job will have one, a finished job never will.
pub(super) fn no_checkpoint(state: &AppState, job: &JobRow) -> Problem {
    if !job.state.is_terminal() {
        let detail = "the job has not saved a checkpoint yet; a 'checkpoint.saved' event reports each new checkpoint";
        return Problem::new(Code::NoCheckpoint, detail);
    }
    let kept_ms = state.config.retention.checkpoints_ms;
    let removed = kept_ms.zip(job.finished_at).filter(|(kept, finished)| finished.saturating_add(*kept) < clock_ms());
    let why = match removed {
        Some((kept_ms, _)) => {
            format!("the server removes checkpoints that are not pinned {} after a job's end", life(kept_ms))
        }
        None => "the job ended before it saved a checkpoint, or its checkpoints were removed".to_owned(),
    };
    let detail = format!(
        "the job is {} and has no checkpoint: {why}; POST /jobs/{}/retry trains it again from the start",
        job.state.as_str(),
        job.id
    );
    Problem::new(Code::NoSuchCheckpoint, detail)
}

/// Formats a retention time as in the server's flags: `90d`, `12h`.
fn life(ms: i64) -> String {
    match ms / 1000 {
        seconds if seconds % 86_400 == 0 => format!("{}d", seconds / 86_400),
        seconds if seconds % 3600 == 0 => format!("{}h", seconds / 3600),
        seconds => format!("{seconds}s"),
    }
}

/// Finds a file by its name in the checkpoint's list of files, so that the name in a request never becomes a path.
pub(super) fn file_of(state: &AppState, row: &CheckpointRow, name: &str) -> Result<Download, Problem> {
    let file = row.files.iter().find(|file| file.name == name);
    let FileEntry { name, size_bytes, sha256 } =
        file.ok_or_else(|| Problem::not_found("file of this checkpoint", name))?;
    Ok(Download {
        path: state.files.checkpoint_file(row.job, row.step, row.attempt, name)?,
        name: name.clone(),
        size_bytes: *size_bytes,
        sha256: *sha256,
    })
}
