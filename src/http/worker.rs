//! The server side of the worker protocol. The messages and the list of routes are in [`crate::protocol`].
//!
//! Every call on a job names its attempt. The store rejects calls from an attempt that no longer owns the job. Files are uploaded
//! before they are published, and become visible only when they are published.
//!
//! Longer than other files: all routes of the protocol, one short handler each.

mod damaged;
mod models;
mod trouble;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use futures::StreamExt;
use serde::Deserialize;
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;

use super::AppState;
use super::auth::WorkerPass;
use super::auth::models::plain_id;
use super::download::{Download, send_file};
use super::error::{Code, Problem};
use super::extract::{Json, Path, Query, body_problem};
use super::python_rewards;
use super::storage::check_limit;
use crate::config::random_token;
use crate::digest::Sha256Digest;
use crate::event::Event;
use crate::files::{DataDir, FilesError, StagedDone};
use crate::id::{DatasetId, JobId, WorkerId};
use crate::job::{Failure, FailureClass};
use crate::protocol::{
    CallbackUpdates, Claim, ClaimRequest, EventBatch, Finish, Heartbeat, HeartbeatReply, JournalBatch, JournalPage,
    Outcome, PROTOCOL, Publish, Published, Register, Registered, ResumePoint, RewardReports,
};
use crate::storage::StorageKind;
use crate::store::publish;
use crate::store::{Claimed, HeartbeatUpdate, PublishCheckpoint, StoreError, clock_ms};

/// Maximum time in ms that a worker's request for a job is held open while the queue is empty.
const MAX_WAIT_MS: u64 = 60_000;
/// Maximum time that a worker's request for new results of reward callbacks is held open.
const HOLD_CALLBACKS_FOR: Duration = Duration::from_secs(20);
/// Maximum size of a checkpoint file, in bytes.
const FILE_LIMIT_BYTES: u64 = 1 << 38;
/// Maximum number of refused workers to remember.
const MAX_REFUSED_WORKERS: usize = 1000;
/// Maximum size of a request that writes to a job's journal, in bytes: a worker's batch of entries, or a single reward answer
/// of 8 MiB as a JSON string.
const JOURNAL_LIMIT_BYTES: usize = 32 << 20;

/// The routes of this module. The caller adds the layer that checks the worker token.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .route("/worker/register", post(register))
        .route("/worker/claim", post(claim))
        .route("/worker/jobs/{id}/datasets/{dataset}", get(send_dataset))
        .route("/worker/jobs/{id}/datasets/{dataset}/images/{sha256}", get(send_dataset_image))
        .route("/worker/jobs/{id}/resume/{name}", get(send_resume_file))
        .route("/worker/jobs/{id}/initial/{name}", get(send_initial_file))
        .route("/worker/jobs/{id}/models/{model}", get(models::list_model_files))
        .route("/worker/jobs/{id}/models/{model}/{name}", get(models::send_model_file))
        .route("/worker/jobs/{id}/damaged", post(damaged::inspect_file))
        .route("/worker/jobs/{id}/heartbeat", post(take_heartbeat))
        .route("/worker/jobs/{id}/events", post(append_events))
        .route("/worker/jobs/{id}/checkpoints/{step}/{name}", put(upload_file))
        .route("/worker/jobs/{id}/checkpoints/{step}", post(publish_checkpoint))
        .route("/worker/jobs/{id}/rollout-adapters/{adapter}/{name}", put(upload_rollout_adapter))
        .route("/worker/jobs/{id}/journal/{after}", get(send_journal))
        .route("/worker/jobs/{id}/journal", post(append_journal).layer(DefaultBodyLimit::max(JOURNAL_LIMIT_BYTES)))
        .route("/worker/jobs/{id}/rewards", post(store_rewards))
        .route("/worker/jobs/{id}/callbacks/{after}", get(send_callbacks))
        .route("/worker/jobs/{id}/finish", post(finish_job))
}

#[derive(Debug, Deserialize)]
struct Fence {
    attempt: u64,
}

async fn register(State(state): State<AppState>, Json(body): Json<Register>) -> Result<Json<Registered>, Problem> {
    let Register { worker, ref device, pid, ref version, protocol, .. } = body;
    if let Err(problem) = same_protocol(protocol) {
        // A worker of another version is refused at each try, but logged only once.
        if state.refused_workers.is_new(worker) {
            tracing::warn!(%worker, device, pid, version, "the server refuses a worker: {}", problem.detail());
        }
        return Err(problem);
    }
    state.store.worker_register(&body, clock_ms()).await?;
    tracing::info!(%worker, device, pid, "a worker registered");
    let (heartbeat_ms, lease_ms) = (state.config.heartbeat_ms, state.config.lease_ms);
    Ok(Json(Registered { heartbeat_ms, lease_ms, protocol: PROTOCOL }))
}

/// Refuses a worker with another protocol version, because it would ignore settings that it does not know.
fn same_protocol(theirs: u32) -> Result<(), Problem> {
    let ours = env!("CARGO_PKG_VERSION");
    let (age, advice) = match theirs.cmp(&PROTOCOL) {
        std::cmp::Ordering::Equal => return Ok(()),
        std::cmp::Ordering::Less => ("older", format!("update the worker to the server's version of rlood ({ours})")),
        std::cmp::Ordering::Greater => (
            "newer",
            format!("update and restart the server, or run the worker with the server's version of rlood ({ours})"),
        ),
    };
    let detail =
        format!("the worker is {age} than the server (worker protocol {theirs}, the server's is {PROTOCOL}): {advice}");
    Err(Problem::new(Code::ProtocolMismatch, detail))
}

/// State that the worker routes keep in memory between calls. None of it needs to survive a restart of the server.
#[derive(Debug, Default)]
pub struct WorkerState {
    trouble: trouble::Trouble,
    inspections: damaged::Inspections,
    listings: models::Listings,
    received: ReceivedBytes,
}

/// Number of bytes that were uploaded for a checkpoint so far, by job and attempt.
#[derive(Debug, Default)]
struct ReceivedBytes(Mutex<HashMap<(JobId, u64), u64>>);

impl ReceivedBytes {
    fn add(&self, job: JobId, attempt: u64, bytes: usize) {
        let mut received = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *received.entry((job, attempt)).or_default() += bytes as u64;
    }

    fn of(&self, job: JobId, attempt: u64) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&(job, attempt)).copied().unwrap_or(0)
    }

    fn forget(&self, job: JobId, up_to_attempt: u64) {
        let mut received = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        received.retain(|(of, attempt), _| *of != job || *attempt > up_to_attempt);
    }
}

/// Workers that were refused, so that each is logged only once.
#[derive(Debug, Default)]
pub struct RefusedWorkers(Mutex<BTreeSet<WorkerId>>);

impl RefusedWorkers {
    fn is_new(&self, worker: WorkerId) -> bool {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() >= MAX_REFUSED_WORKERS {
            seen.clear();
        }
        seen.insert(worker)
    }
}

async fn claim(
    State(state): State<AppState>,
    pass: WorkerPass,
    Json(body): Json<ClaimRequest>,
) -> Result<Response, Problem> {
    same_protocol(body.protocol)?;
    let deadline = Instant::now() + Duration::from_millis(body.wait_ms.min(MAX_WAIT_MS));
    let mut queue = state.store.queue_changed();
    loop {
        queue.mark_unchanged();
        if let Some(claim) = next_claim(&state, &body).await? {
            return Ok(Json(claim).into_response());
        }
        let until = trouble::next_try(&state).await?.map_or(deadline, |next| next.min(deadline));
        let woken = tokio::select! {
            woken = tokio::time::timeout_at(until, queue.changed()) => woken.map_or(until < deadline, |woken| woken.is_ok()),
            () = state.stopping.cancelled() => false,
        };
        if !woken {
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
        pass.check(&state).await?;
    }
}

/// Returns the next job that the server can hand out. An error of the server while it prepares a claim is not the job's fault: the
/// claim is released, the job waits briefly, and the next job is tried.
async fn next_claim(state: &AppState, asked: &ClaimRequest) -> Result<Option<Claim>, Problem> {
    while trouble::is_over(state).await
        && let Some(claimed) = next_job(state, asked.worker).await?
    {
        let (job, attempt, errors) = (claimed.job, claimed.attempt, claimed.server_errors);
        match prepare(state, asked, claimed).await {
            Ok(Some(claim)) => {
                trouble::completed(state, job, attempt, errors).await;
                return Ok(Some(claim));
            }
            // While the claim was prepared, the job failed or its claim ended; the next job is tried.
            Ok(None) => {}
            Err(problem) => trouble::failed(state, job, attempt, &problem).await,
        }
    }
    Ok(None)
}

/// Returns the next job for this worker. None while the disk is nearly full, because results could not be stored.
async fn next_job(state: &AppState, worker: WorkerId) -> Result<Option<Claimed>, Problem> {
    if state.disk_low.load(Ordering::Relaxed) {
        state.store.worker_seen(worker, clock_ms()).await?;
        return Ok(None);
    }
    Ok(state.store.job_claim(worker, clock_ms(), lease_ms(state)).await?)
}

/// Completes a claim with everything that a worker needs; `None` if the job cannot run or no longer belongs to this claim.
async fn prepare(state: &AppState, asked: &ClaimRequest, claimed: Claimed) -> Result<Option<Claim>, Problem> {
    let Claimed { job, attempt, plan, secrets, resume, checkpoint_soon, server_errors: _ } = claimed;
    let model = match state.store.model_get(&plan.model.id).await {
        Ok(model) => Some(model.source),
        // A job may name a directory instead of a registered model.
        Err(StoreError::NotFound { .. }) => {
            Some(plan.model.id.clone()).filter(|id| std::path::Path::new(id).is_absolute())
        }
        Err(error) => return Err(error.into()),
    };
    let failed = |code: &str, message: String, suggestion: &str| Failure {
        class: FailureClass::User,
        code: code.to_owned(),
        message,
        phase: None,
        step: None,
        suggestion: Some(suggestion.to_owned()),
    };
    let usable = match (model, python_rewards::withdrawn(state, job, &plan).await?) {
        (_, Some(withdrawn)) => Err(failed("python_rewards_off", withdrawn.detail, withdrawn.suggestion)),
        (None, None) => {
            let message = format!("the model '{}' was deleted while the job was queued", plan.model.id);
            Err(failed("model_missing", message, "register the model again and retry the job"))
        }
        (Some(model), None) => Ok(model),
    };
    let model_path = match usable {
        Ok(model) => model,
        Err(failure) => {
            return match state.store.job_finish(job, attempt, Outcome::Failed { failure }, clock_ms()).await {
                Ok(()) | Err(StoreError::LeaseLost) => Ok(None),
                Err(error) => Err(error.into()),
            };
        }
    };
    let mut reward_models = std::collections::BTreeMap::new();
    for id in plan.reward_models.keys() {
        match state.store.model_get(id).await {
            Ok(model) => drop(reward_models.insert(id.clone(), model.source)),
            // A deleted reward model is left out here: the worker reports it, with the name of the reward.
            Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    blocking(state, move |files| files.staged_remove(job, attempt)).await?;
    state.workers.received.forget(job, attempt);
    // The server does not read the file's bytes here, even if it is small: the worker compares what it fetches,
    // and reports damaged files.
    let resume = resume.map(|checkpoint| ResumePoint { step: checkpoint.step, files: checkpoint.files });
    let initial = blocking(state, move |files| files.initial_files(job)).await?.unwrap_or_default();
    let reward_reports = state.store.reward_health(job).await?.into_iter().map(|row| row.report).collect();
    tracing::info!(%job, attempt, worker = %asked.worker, resume = resume.as_ref().map(|r| r.step), "claimed");
    Ok(Some(Claim {
        job,
        worker: asked.worker,
        attempt,
        // The name goes into the adapter's config, where only the repository has a meaning.
        model_name: plain_id(&plan.model.id).to_owned(),
        plan,
        secrets,
        model_path,
        reward_models,
        resume,
        initial,
        lease_ms: state.config.lease_ms,
        allow_outgoing: super::reach::allow_outgoing(state).await?,
        reward_reports,
        callbacks: Some(super::callbacks::terms(state).await?),
        checkpoint_soon,
        cache_scope: Some(cache_scope(state, job).await?),
    }))
}

/// Returns the scope of a worker's reward cache for this job: a hash of its owner, because workers need not know owners.
async fn cache_scope(state: &AppState, job: JobId) -> Result<String, Problem> {
    let fresh = random_token().map_err(Problem::internal)?;
    let key = state.store.server_secret("cache_scope", &fresh).await?;
    let owner = state.store.job_owner(job).await?.unwrap_or_default();
    Ok(Sha256Digest::of(format!("{key} {owner}")).to_string())
}

async fn send_dataset(
    State(state): State<AppState>,
    Path((job, dataset)): Path<(JobId, DatasetId)>,
    Query(Fence { attempt }): Query<Fence>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    state.store.claim_check(job, attempt).await?;
    let plan = state.store.job_get(job).await?.plan()?;
    // The worker reads the prompts of the verdict too, because the warm-up leaves them out.
    let of_eval = plan.eval.iter().flat_map(|eval| eval.datasets());
    let of_warm_up = plan.warm_up.iter().map(|warm_up| &warm_up.dataset);
    let mut datasets = std::iter::once(&plan.dataset).chain(of_eval).chain(of_warm_up);
    let found = datasets.find(|plan| plan.id == dataset);
    let found = found.ok_or_else(|| Problem::not_found("dataset of this job", dataset))?;
    // If the stored hash cannot be parsed, the ETag is a hash of its text. The worker checks the bytes against the expected
    // hash anyway.
    let sha256 = found.sha256.parse().unwrap_or_else(|_| Sha256Digest::of(&found.sha256));
    send(state.files.dataset(dataset), "dataset.ndjson".to_owned(), sha256, &headers).await
}

/// Sends an image of the rows that the job trains on.
async fn send_dataset_image(
    State(state): State<AppState>,
    Path((job, dataset, sha256)): Path<(JobId, DatasetId, String)>,
    Query(Fence { attempt }): Query<Fence>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    state.store.claim_check(job, attempt).await?;
    if state.store.job_get(job).await?.plan()?.dataset.id != dataset {
        return Err(Problem::not_found("dataset of this job", dataset));
    }
    super::dataset_images::send_image(&state, dataset, &sha256, &Method::GET, &headers).await
}

async fn send_resume_file(
    State(state): State<AppState>,
    Path((job, name)): Path<(JobId, String)>,
    Query(Fence { attempt }): Query<Fence>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    state.store.claim_check(job, attempt).await?;
    let checkpoint = state.store.checkpoint_latest(job).await?;
    let listed = checkpoint.and_then(|checkpoint| {
        let file = checkpoint.files.iter().find(|file| file.name == name)?;
        Some((file.sha256, checkpoint.step, checkpoint.attempt))
    });
    let Some((sha256, step, writer)) = listed else {
        return Err(Problem::not_found("file of the newest checkpoint", name));
    };
    send(state.files.checkpoint_file(job, step, writer, &name)?, name, sha256, &headers).await
}

async fn send_initial_file(
    State(state): State<AppState>,
    Path((job, name)): Path<(JobId, String)>,
    Query(Fence { attempt }): Query<Fence>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    state.store.claim_check(job, attempt).await?;
    let files = blocking(&state, move |files| files.initial_files(job)).await?.unwrap_or_default();
    let Some(sha256) = files.iter().find(|file| file.name == name).map(|file| file.sha256) else {
        return Err(Problem::not_found("file that the job starts with", name));
    };
    send(state.files.initial_file(job, &name)?, name, sha256, &headers).await
}

/// Sends a checkpoint file to a worker, whole or from an offset. The worker compares its size and hash with the
/// list in the claim.
async fn send(path: PathBuf, name: String, sha256: Sha256Digest, headers: &HeaderMap) -> Result<Response, Problem> {
    let unreadable = |error| Problem::internal(format!("cannot read {}: {error}", path.display()));
    let size_bytes = tokio::fs::metadata(&path).await.map_err(unreadable)?.len();
    send_file(&Method::GET, headers, &Download { path, name, size_bytes, sha256 }).await
}

async fn take_heartbeat(
    State(state): State<AppState>,
    Path(job): Path<JobId>,
    Json(body): Json<Heartbeat>,
) -> Result<Json<HeartbeatReply>, Problem> {
    let Heartbeat { attempt, phase, status_reason, step, eta_s, memory_bytes } = body;
    let update = HeartbeatUpdate { phase, status_reason, step, eta_s, memory_bytes };
    let requested = state.store.job_heartbeat(job, attempt, update, clock_ms(), lease_ms(&state)).await?;
    let received_bytes = state.workers.received.of(job, attempt);
    Ok(Json(HeartbeatReply { requested, lease_ms: state.config.lease_ms, received_bytes }))
}

async fn append_events(
    State(state): State<AppState>,
    Path(job): Path<JobId>,
    Json(body): Json<EventBatch>,
) -> Result<StatusCode, Problem> {
    let now = clock_ms();
    state.store.events_append(job, &body, now).await?;
    if body.events.iter().any(|event| matches!(event, Event::Samples { .. })) {
        state.store.samples_retain(job, state.config.samples_max_bytes, now).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

async fn send_journal(
    State(state): State<AppState>,
    Path((job, after)): Path<(JobId, i64)>,
    Query(Fence { attempt }): Query<Fence>,
) -> Result<Json<JournalPage>, Problem> {
    Ok(Json(state.store.journal_page(job, attempt, after, clock_ms()).await?))
}

/// The request for new callback entries is held open while there are none.
async fn send_callbacks(
    State(state): State<AppState>,
    pass: WorkerPass,
    Path((job, after)): Path<(JobId, i64)>,
    Query(Fence { attempt }): Query<Fence>,
) -> Result<Json<CallbackUpdates>, Problem> {
    let deadline = Instant::now() + HOLD_CALLBACKS_FOR;
    let mut changes = state.store.callbacks_changed();
    loop {
        changes.mark_unchanged();
        let page = state.store.callback_updates(job, attempt, after).await?;
        if !page.updates.is_empty() {
            return Ok(Json(page));
        }
        let woken = tokio::select! {
            woken = tokio::time::timeout_at(deadline, changes.changed()) => matches!(woken, Ok(Ok(()))),
            () = state.stopping.cancelled() => false,
        };
        if !woken {
            return Ok(Json(page));
        }
        pass.check(&state).await?;
    }
}

async fn append_journal(
    State(state): State<AppState>,
    Path(job): Path<JobId>,
    Json(body): Json<JournalBatch>,
) -> Result<StatusCode, Problem> {
    state.store.journal_append(job, body.attempt, &body.entries, clock_ms()).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn upload_file(
    State(state): State<AppState>,
    Path((job, step, name)): Path<(JobId, u64, String)>,
    Query(Fence { attempt }): Query<Fence>,
    request: Request,
) -> Result<StatusCode, Problem> {
    crate::protocol::check_file_name(&name).map_err(FilesError::from)?;
    state.store.claim_check(job, attempt).await?;
    let announced = announced_bytes(&request);
    if !has_room(&state, job, announced).await? {
        return Err(Problem::new(Code::StorageFull, "the server's disk has no room for this uploaded file"));
    }
    // The storage limit does not apply to a checkpoint that was saved because the job was asked to stop: its progress must not
    // be lost.
    if state.store.job_get(job).await?.requested.is_none() {
        check_limit(&state, StorageKind::Checkpoints, announced).await?;
    }
    let uploaded = receive(&state, (job, attempt), request).await?;
    state.files.checkpoint_place(uploaded, job, step, attempt, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes a file of an adapter from a worker that has no folder in common with the rollout servers' sidecars.
async fn upload_rollout_adapter(
    State(state): State<AppState>,
    Path((job, adapter, name)): Path<(JobId, String, String)>,
    Query(Fence { attempt }): Query<Fence>,
    request: Request,
) -> Result<StatusCode, Problem> {
    state.store.claim_check(job, attempt).await?;
    if !has_room(&state, job, announced_bytes(&request)).await? {
        return Err(Problem::new(Code::StorageFull, "the server's disk has no room for this uploaded adapter"));
    }
    let uploaded = receive(&state, (job, attempt), request).await?;
    state.files.rollout_adapter_place(uploaded, (job, attempt), &adapter, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn announced_bytes(request: &Request) -> u64 {
    let length = request.headers().get(header::CONTENT_LENGTH);
    length.and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// Receives an uploaded file.
async fn receive(state: &AppState, (job, attempt): (JobId, u64), request: Request) -> Result<StagedDone, Problem> {
    let mut staged = state.files.stage(FILE_LIMIT_BYTES).await?;
    let mut body = request.into_body().into_data_stream();
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|error| body_problem(&error))?;
        state.workers.received.add(job, attempt, piece.len());
        staged.write(&piece).await?;
    }
    Ok(staged.finish().await?)
}

/// Whether there is space for a checkpoint file. The reserve stays free. A checkpoint saved because the job was asked to stop may
/// use three quarters of the reserve: jobs pause when the disk is low, and their progress must not be lost.
async fn has_room(state: &AppState, job: JobId, size_bytes: u64) -> Result<bool, Problem> {
    let (free, reserve) = (state.files.free_bytes()?, state.config.edge.disk_reserve_bytes);
    let fits = |reserve: u64| size_bytes.saturating_add(reserve) <= free;
    Ok(fits(reserve) || (fits(reserve / 4) && state.store.job_get(job).await?.requested.is_some()))
}

async fn publish_checkpoint(
    State(state): State<AppState>,
    Path((job, step)): Path<(JobId, u64)>,
    Json(body): Json<Publish>,
) -> Result<Json<Published>, Problem> {
    let Publish { attempt, files, metrics, temporary } = body;
    state.store.claim_check(job, attempt).await?;
    if !files.iter().any(|file| file.name == "manifest.json") {
        return Err(Problem::new(
            Code::InvalidBody,
            "every checkpoint needs a manifest.json: upload and list this file too",
        ));
    }
    let checkpoint = PublishCheckpoint { job, attempt, step, files: &files, metrics: &metrics, temporary };
    let checkpoint = publish::publish_checkpoint(&state.store, &state.files, checkpoint, clock_ms()).await?;
    Ok(Json(Published { checkpoint }))
}

async fn store_rewards(
    State(state): State<AppState>,
    Path(job): Path<JobId>,
    Json(body): Json<RewardReports>,
) -> Result<StatusCode, Problem> {
    state.store.reward_reports_store(job, &body, clock_ms()).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn finish_job(
    State(state): State<AppState>,
    Path(job): Path<JobId>,
    Json(body): Json<Finish>,
) -> Result<StatusCode, Problem> {
    let Finish { attempt, outcome } = body;
    state.store.job_finish(job, attempt, outcome, clock_ms()).await?;
    state.workers.received.forget(job, attempt);
    if let Err(problem) = blocking(&state, move |files| files.staged_remove(job, attempt)).await {
        tracing::warn!(%job, ?problem, "uploaded checkpoint files that were not published could not be removed");
    }
    Ok(StatusCode::NO_CONTENT)
}

fn lease_ms(state: &AppState) -> i64 {
    i64::try_from(state.config.lease_ms).unwrap_or(i64::MAX)
}

/// Runs blocking work on the data directory outside the async threads.
async fn blocking<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce(&DataDir) -> Result<T, FilesError> + Send + 'static,
) -> Result<T, Problem> {
    state.files.in_background(work).await.map_err(Problem::from)
}
