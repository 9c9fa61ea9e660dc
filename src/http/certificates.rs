//! `GET /checkpoints/{id}/certificate`: the evidence by which a server of the checkpoint can be checked. The worker writes it with the
//! checkpoint; for a checkpoint of an earlier version, a separate process computes it at the first request.

use std::path::PathBuf;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use rlood_types::certificate::{Certificate, CertifyReport, CertifyTask, FILE};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::artifacts::file_of;
use super::auth::Caller;
use super::auth::models::plain_id;
use super::download::{RangeHeaders, send_file};
use super::error::{Code, Problem, ProblemBody};
use super::extract::Path;
use super::job_models::find_model;
use crate::files::FilesError;
use crate::id::CheckpointId;
use crate::one_shot::OneShotError;
use crate::store::CheckpointRow;

/// Time limit for computing a certificate, including loading.
const LIMIT: Duration = Duration::from_secs(600);
/// `Retry-After` while another certificate is computed, in seconds.
const RETRY_S: u64 = 10;
/// Header that names the checkpoint.
const CHECKPOINT: &str = "x-rlood-checkpoint";

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_certificate))
}

/// Get the certificate of a checkpoint.
///
/// It has the log-probabilities of a few prompts and their continuations under the base model and under the checkpoint, so that
/// `rlood verify` can tell whether a server applies the checkpoint. Checkpoints have it as the file `certificate.json`. For a
/// checkpoint of an earlier version the server computes it at the first request, on its CPU, one at a time.
#[utoipa::path(method(get, head), path = "/checkpoints/{id}/certificate", tag = "Artifacts",
    params(("id" = CheckpointId, Path, description = "The checkpoint"), RangeHeaders),
    responses(
        (status = 200, description = "The certificate", body = serde_json::Value, headers(
            ("ETag" = String, description = "The SHA-256 of the file, in quotes"),
            ("Accept-Ranges" = String, description = "bytes"),
            ("Repr-Digest" = String, description = "The digest of the whole file (RFC 9530)"),
            ("x-rlood-checkpoint" = String, description = "The id of the checkpoint"),
        )),
        (status = 206, description = "The requested range of bytes", body = Vec<u8>, content_type = "application/json"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 416, description = "The requested range is outside the file", body = ProblemBody),
        (status = 422, description = "The model's or the checkpoint's files cannot be used", body = ProblemBody),
        (status = 429, description = "Another certificate is being computed; see `Retry-After`", body = ProblemBody),
        (status = 503, description = "The process that computed the certificate ended unexpectedly", body = ProblemBody)))]
async fn get_certificate(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<CheckpointId>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let row = state.store.checkpoint_get(id).await?;
    let mut response = match row.files.iter().any(|file| file.name == FILE) {
        true => send_file(&method, &headers, &file_of(&state, &row, FILE)?).await?,
        false => {
            let json = computed(&state, &caller, &row).await?;
            Response::builder()
                .header(CONTENT_TYPE, "application/json")
                .body(Body::from(json))
                .map_err(Problem::internal)?
        }
    };
    response.headers_mut().insert(CHECKPOINT, id.to_string().parse().map_err(Problem::internal)?);
    Ok(response)
}

/// Returns the certificate that an earlier request left beside the checkpoint's files, or computes it.
async fn computed(state: &AppState, caller: &Caller, row: &CheckpointRow) -> Result<Vec<u8>, Problem> {
    let dir = state.files.checkpoint_dir(row.job, row.step, row.attempt);
    let path = state.files.checkpoint_file(row.job, row.step, row.attempt, FILE)?;
    if let Ok(kept) = tokio::fs::read(&path).await
        && Certificate::read(&kept).is_ok()
    {
        return Ok(kept);
    }
    let Some(certifications) = &state.certifications else {
        let detail = "the checkpoint has no certificate, and this server starts no processes of its own to compute one";
        return Err(Problem::new(Code::NotImplemented, detail));
    };
    let plan = state.store.job_get(row.job).await?.plan()?;
    let model = find_model(state, caller, &plan).await?;
    let task = CertifyTask::Certify {
        model_name: plain_id(&plan.model.id).to_owned(),
        plan: Box::new(plan),
        model_dir: model.source.into(),
        checkpoint_dir: dir,
        step: row.step,
    };
    let certificate = match certifications.run(&task, LIMIT).await.map_err(|error| without_report(&error))? {
        CertifyReport::Certified(certificate) => certificate,
        CertifyReport::Failed(why) => {
            let detail = format!("the certificate cannot be computed: {why}");
            return Err(Problem::new(Code::InvalidModel, detail));
        }
        CertifyReport::Measured { .. } => return Err(Problem::internal("the process answered another question")),
    };
    let json = serde_json::to_vec(&certificate).map_err(Problem::internal)?;
    keep(state, path, json.clone()).await?;
    Ok(json)
}

/// Writes the certificate beside the checkpoint's files, complete or not at all.
async fn keep(state: &AppState, path: PathBuf, json: Vec<u8>) -> Result<(), Problem> {
    let write = move || {
        let temporary = path.with_extension("json.tmp");
        std::fs::write(&temporary, json)
            .and_then(|()| std::fs::rename(&temporary, &path))
            .map_err(|source| FilesError::Io { doing: "write the certificate to", path, source })
    };
    Ok(state.files.in_background(move |_| write()).await?)
}

fn without_report(error: &OneShotError) -> Problem {
    match error {
        OneShotError::Busy => {
            let detail = "the certificate of another checkpoint is being computed; try again when it is there";
            Problem::new(Code::TooManyRequests, detail).retry_after(RETRY_S)
        }
        OneShotError::Stopping => {
            let detail = "the server is shutting down; try again after the restart";
            Problem::new(Code::NotReady, detail).retry_after(RETRY_S)
        }
        OneShotError::TimedOut(_) | OneShotError::Killed(_) | OneShotError::Ended(_) | OneShotError::Failed(_) => {
            let detail = format!("the certificate was not computed: {error}; try again when no job runs");
            Problem::new(Code::GenerationFailed, detail).retry_after(RETRY_S)
        }
    }
}
