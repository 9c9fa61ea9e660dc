//! Sends a job's models to workers that do not have them: the list of files with hashes, and the files themselves.
//!
//! Each file is hashed once: the list is stored in the database with a stamp of names, sizes and modification times.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};

use super::super::AppState;
use super::super::download::{Download, send_file};
use super::super::error::{Code, Problem, chain};
use super::super::extract::{Json, Path, Query};
use super::Fence;
use crate::id::JobId;
use crate::modelcard;
use crate::protocol::{FileEntry, ModelFiles, check_file_name};
use crate::store::background::{spawn, spawn_blocking};
use crate::store::{Store, StoreError};

/// Maximum time that a worker's request for the list of a model's files is held open while the server hashes them; the
/// worker then asks again.
const HOLD_FOR: Duration = Duration::from_secs(10);

/// Why a model cannot be sent to a worker.
#[derive(Debug, Clone)]
enum Unlisted {
    /// The model's files cannot be used. The text contains no paths.
    Unusable(String),
    /// The server failed. The text is for the log.
    Failed(String),
}

type Listing = Shared<BoxFuture<'static, Result<Arc<Vec<FileEntry>>, Unlisted>>>;

/// Models that are being hashed, by directory. Workers that want the same one wait for the same hashing.
#[derive(Default)]
pub(super) struct Listings(Mutex<HashMap<PathBuf, Listing>>);

impl fmt::Debug for Listings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listings")
    }
}

impl Listings {
    /// Returns the hashing of this model directory that is in progress, or starts a new one.
    fn begin(&self, dir: &FilePath, start: impl FnOnce() -> Listing) -> Listing {
        let mut listings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A finished list is not reused, because the files may have changed since.
        listings.retain(|_, listing| listing.peek().is_none());
        listings.entry(dir.to_owned()).or_insert_with(start).clone()
    }
}

/// Lists the files of a model with their hashes: `GET /worker/jobs/{id}/models/{model}`.
pub(super) async fn list_model_files(
    State(state): State<AppState>,
    Path((job, model)): Path<(JobId, String)>,
    Query(Fence { attempt }): Query<Fence>,
) -> Result<Json<ModelFiles>, Problem> {
    state.store.claim_check(job, attempt).await?;
    let dir = directory_of(&state, job, &model).await?;
    let listing = state.workers.listings.begin(&dir, || start_listing(state.store.clone(), dir.clone()));
    let listed = tokio::select! {
        listed = listing => listed,
        () = tokio::time::sleep(HOLD_FOR) => return Ok(Json(ModelFiles { files: None })),
        () = state.stopping.cancelled() => return Ok(Json(ModelFiles { files: None })),
    };
    match listed {
        Ok(files) => Ok(Json(ModelFiles { files: Some(files.to_vec()) })),
        Err(Unlisted::Unusable(detail)) => Err(Problem::new(Code::InvalidModel, detail)),
        Err(Unlisted::Failed(cause)) => Err(Problem::internal(cause)),
    }
}

/// Sends a file of a model: `GET /worker/jobs/{id}/models/{model}/{name}`, also from an offset with `Range`.
pub(super) async fn send_model_file(
    State(state): State<AppState>,
    Path((job, model, name)): Path<(JobId, String, String)>,
    Query(Fence { attempt }): Query<Fence>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    state.store.claim_check(job, attempt).await?;
    let dir = directory_of(&state, job, &model).await?;
    // The file is not hashed again: the worker has the list with its hash, and compares after the download.
    let row = state.store.model_files_get(&dir.to_string_lossy()).await?;
    let listed = row.and_then(|row| row.files.into_iter().find(|file| file.name == name));
    let Some(FileEntry { name, size_bytes, sha256 }) = listed else {
        return Err(Problem::not_found("file in this model's list of files", name));
    };
    send_file(&method, &headers, &Download { path: dir.join(&name), name, size_bytes, sha256 }).await
}

/// Returns the directory of a model of this job.
async fn directory_of(state: &AppState, job: JobId, model: &str) -> Result<PathBuf, Problem> {
    let plan = state.store.job_get(job).await?.plan()?;
    if plan.model.id != model && !plan.reward_models.contains_key(model) {
        return Err(Problem::not_found("model of this job", model));
    }
    match state.store.model_get(model).await {
        Ok(row) => Ok(PathBuf::from(row.source)),
        // A job may name a directory instead of a registered model.
        Err(StoreError::NotFound { .. }) if FilePath::new(model).is_absolute() => Ok(PathBuf::from(model)),
        Err(error) => Err(error.into()),
    }
}

/// Lists a model's files in the background, even if the caller disconnects.
fn start_listing(store: Store, dir: PathBuf) -> Listing {
    let listing = spawn(async move { list(&store, dir).await });
    listing.map(|listed| listed.unwrap_or_else(|error| Err(Unlisted::Failed(chain(&error))))).boxed().shared()
}

async fn list(store: &Store, dir: PathBuf) -> Result<Arc<Vec<FileEntry>>, Unlisted> {
    let source = dir.to_string_lossy().into_owned();
    let failed = |error: StoreError| Unlisted::Failed(chain(&error));
    let known = store.model_files_get(&source).await.map_err(failed)?;
    let read = spawn_blocking(move || {
        let files = modelcard::files_of(&dir)?;
        // The stamp of sizes and modification times is taken before the bytes are read, so that a file that changes meanwhile
        // has another stamp next time.
        let stamp = modelcard::stamp(&dir, &files);
        match known.filter(|known| known.stamp == stamp) {
            Some(known) => Ok((known.files, None)),
            None => Ok((modelcard::hash_files(&dir, &files)?, Some(stamp))),
        }
    });
    let read: Result<_, modelcard::ModelCardError> = read.await.map_err(|error| Unlisted::Failed(chain(&error)))?;
    let (files, new_stamp) = read.map_err(|error| {
        let file = error.file.rsplit('/').next().unwrap_or("");
        Unlisted::Unusable(format!("{file}: {}", error.detail))
    })?;
    if let Some(bad) = files.iter().find(|file| check_file_name(&file.name).is_err()) {
        let detail = format!(
            "{}: workers on other machines accept file names of 1 to 100 characters from A-Z, a-z, 0-9, '.', '_' and '-': rename \
             the file, also in model.safetensors.index.json, and register the model again",
            bad.name
        );
        return Err(Unlisted::Unusable(detail));
    }
    if let Some(stamp) = new_stamp {
        store.model_files_put(&source, &stamp, &files).await.map_err(failed)?;
    }
    Ok(Arc::new(files))
}
