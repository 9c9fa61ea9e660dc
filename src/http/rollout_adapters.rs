//! The adapters that workers publish for rollout servers, for an `rlood adapter-sidecar` beside a server without the shared folder.

use std::path::PathBuf;

use axum::extract::State;
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::download::{Download, RangeHeaders, send_file};
use super::error::{Problem, ProblemBody};
use super::extract::Path;
use crate::digest::Sha256Digest;
use crate::id::JobId;
use crate::store::background::spawn_blocking;

/// The files of a published adapter.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_rollout_adapter_file))
}

/// Download a file of an adapter that a running job has published for its rollout servers.
#[utoipa::path(get, path = "/jobs/{id}/rollout-adapters/{adapter}/{file}", tag = "Artifacts",
    params(("id" = JobId, Path, description = "The job"),
        ("adapter" = String, Path, description = "Name of the adapter on the rollout servers, `rlood-job_…-a1-s7-…`"),
        ("file" = String, Path, description = "`adapter_config.json` or `adapter_model.safetensors`"), RangeHeaders),
    responses(
        (status = 200, description = "The file", body = Vec<u8>, content_type = "application/octet-stream", headers(
            ("ETag" = String, description = "SHA-256 of the file, in quotes"),
            ("Repr-Digest" = String, description = "The digest of the whole file (RFC 9530)"),
            ("Accept-Ranges" = String, description = "bytes"))),
        (status = 206, description = "The requested range of bytes", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 404, description = "The job has no such adapter now", body = ProblemBody)))]
async fn get_rollout_adapter_file(
    State(state): State<AppState>,
    Path((id, adapter, file)): Path<(JobId, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    state.store.job_get(id).await?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let is_of_job = adapter.strip_prefix(&format!("rlood-{id}-")).is_some_and(|rest| rest.chars().all(is_plain));
    let Some(name) = FILES.into_iter().find(|name| *name == file).filter(|_| is_of_job) else {
        return Err(Problem::not_found("rollout adapter", adapter));
    };
    let shared = state.config.adapter_dir().join(&adapter).join(name);
    // A worker on another machine uploads its adapters. The name has the attempt.
    let attempt = adapter.split("-a").last().and_then(|rest| rest.split('-').next()?.parse().ok()).unwrap_or(0);
    let uploaded = state.files.rollout_adapter_file((id, attempt), &adapter, name).map_err(Problem::internal)?;
    let found = spawn_blocking(move || read(shared, name).or_else(|_| read(uploaded, name)));
    let found = found.await.map_err(Problem::internal)?;
    match found {
        Ok(download) => send_file(&method, &headers, &download).await,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Problem::not_found("rollout adapter", adapter))
        }
        Err(error) => Err(Problem::internal(error)),
    }
}

/// Reads a file's size and hash.
fn read(path: PathBuf, name: &str) -> std::io::Result<Download> {
    let (size_bytes, sha256) = Sha256Digest::of_reader(&mut std::fs::File::open(&path)?)?;
    Ok(Download { path, name: name.to_owned(), size_bytes, sha256 })
}
