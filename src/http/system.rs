//! Health, metrics, workers and the OpenAPI document.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::{Method, StatusCode, header};
use axum::response::IntoResponse;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, chain};
use super::extract::Json;
use super::list::{List, Time};
use super::prometheus::{family, line};
use crate::id::{JobId, WorkerId};
use crate::job::State as JobState;
use crate::protocol::KernelFacts;
use crate::spec::RuntimeFacts;
use crate::store::{WorkerRow, clock_ms};

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(livez))
        .routes(routes!(readyz))
        .routes(routes!(metrics))
        .routes(routes!(list_workers))
        .routes(routes!(get_openapi))
}

/// Number and total duration of answered requests, by method, route and status.
#[derive(Debug, Default)]
pub struct RequestCounts(Mutex<BTreeMap<Answered, Times>>);

/// Upper bounds of the buckets in the histogram of request durations, in seconds.
const BUCKETS_S: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];

/// Durations of answered requests.
#[derive(Debug, Clone, Default)]
struct Times {
    number: u64,
    time: Duration,
    /// Number of requests in each bucket: at most its bound, but above the bound before.
    buckets: [u64; BUCKETS_S.len()],
}

/// Method, route and status of an answered request.
type Answered = (String, String, u16);

impl RequestCounts {
    /// Counts one answered request. `route` is a pattern (`/jobs/{id}`), never a path, so that the table stays small.
    pub fn count(&self, method: &Method, route: &str, status: StatusCode, took: Duration) {
        let method = match method.as_str() {
            known @ ("GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS") => known,
            _ => "other",
        };
        let key = (method.to_owned(), route.to_owned(), status.as_u16());
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let times = counts.entry(key).or_default();
        times.number += 1;
        times.time += took;
        if let Some(bucket) = BUCKETS_S.iter().position(|bound| took.as_secs_f64() <= *bound) {
            times.buckets[bucket] += 1;
        }
    }

    fn write(&self, text: &mut String) {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        family(
            text,
            "rlood_http_request_duration_seconds",
            "histogram",
            "Time from a request until its response headers were sent.",
        );
        for ((method, route, status), Times { number, time, buckets }) in counts {
            let labels = format!("method=\"{method}\",route=\"{route}\",status=\"{status}\"");
            let mut within = 0;
            for (bound, count) in BUCKETS_S.iter().zip(buckets) {
                within += count;
                line(text, &format!("rlood_http_request_duration_seconds_bucket{{{labels},le=\"{bound}\"}}"), within);
            }
            line(text, &format!("rlood_http_request_duration_seconds_bucket{{{labels},le=\"+Inf\"}}"), number);
            let labels = format!("{{{labels}}}");
            line(text, &format!("rlood_http_request_duration_seconds_sum{labels}"), time.as_secs_f64());
            line(text, &format!("rlood_http_request_duration_seconds_count{labels}"), number);
        }
    }
}

/// Check that the process is alive.
#[utoipa::path(get, path = "/livez", tag = "System", security(()),
    responses((status = 200, description = "Alive", body = String, content_type = "text/plain", example = json!("ok\n"))))]
async fn livez() -> &'static str {
    "ok\n"
}

/// Check that the server is ready: the database answers, the disk has free space.
#[utoipa::path(get, path = "/readyz", tag = "System", security(()),
    responses((status = 200, description = "Ready", body = String, content_type = "text/plain", example = json!("ok\n"))))]
async fn readyz(State(state): State<AppState>) -> Result<&'static str, Problem> {
    let not_ready = |detail: String, cause: String| Problem::new(Code::NotReady, detail).because(cause).retry_after(5);
    state
        .store
        .ping()
        .await
        .map_err(|error| not_ready("the server's database does not answer".to_owned(), chain(&error)))?;
    let free = state
        .files
        .free_bytes()
        .map_err(|error| not_ready("the server's data directory cannot be read".to_owned(), chain(&error)))?;
    let reserve = state.config.edge.disk_reserve_bytes;
    if free < reserve {
        let detail =
            format!("the server's disk is nearly full: {free} bytes are free, {reserve} are required; free some space");
        return Err(not_ready(detail, String::new()));
    }
    Ok("ok\n")
}

/// Get metrics in Prometheus's text format.
///
/// Metrics of rewards (`rlood_reward_*`) name the jobs that the key may see: all of them with the scope admin. The other metrics
/// are the server's, and name no job.
#[utoipa::path(get, path = "/metrics", tag = "System",
    responses((status = 200, description = "The server's metrics in the Prometheus text format", body = String, content_type = "text/plain")))]
async fn metrics(State(state): State<AppState>, caller: Caller) -> Result<impl IntoResponse, Problem> {
    let jobs = state.store.job_counts().await?;
    let workers = state.store.worker_list().await?;
    let mut text = String::new();

    family(&mut text, "rlood_build_info", "gauge", "The server's version, as a label.");
    line(&mut text, &format!("rlood_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1);
    family(&mut text, "rlood_uptime_seconds", "gauge", "Time since the server started.");
    line(&mut text, "rlood_uptime_seconds", state.started.elapsed().as_secs());
    family(&mut text, "rlood_jobs", "gauge", "Jobs by state.");
    for job_state in JobState::ALL {
        let number = jobs.iter().find(|(state, _)| *state == job_state).map_or(0, |(_, number)| *number);
        line(&mut text, &format!("rlood_jobs{{state=\"{}\"}}", job_state.as_str()), number);
    }
    family(&mut text, "rlood_workers", "gauge", "Worker processes by state.");
    let lost_before = clock_ms() - lease_ms(&state);
    for worker_state in [WorkerState::Idle, WorkerState::Running, WorkerState::Lost] {
        let number = workers.iter().filter(|row| WorkerState::of(row, lost_before) == worker_state).count();
        line(&mut text, &format!("rlood_workers{{state=\"{}\"}}", worker_state.as_str()), number);
    }
    if let Ok(free) = state.files.free_bytes() {
        family(&mut text, "rlood_disk_free_bytes", "gauge", "Free space on the file system of the data directory.");
        line(&mut text, "rlood_disk_free_bytes", free);
    }
    super::reward_health::write_metrics(&state, &caller, &mut text).await?;
    super::v1::write_metrics(&state, &mut text);
    state.requests.write(&mut text);
    super::measures::write(&state, &mut text).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

/// Current state of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// Waiting for a job.
    Idle,
    /// Running a claimed job.
    Running,
    /// The worker's lease expired (its job is queued again), or the server has not heard from it for twice as long.
    Lost,
}

impl WorkerState {
    fn of(row: &WorkerRow, lost_before: i64) -> Self {
        match row.job {
            _ if row.lost || row.seen_at < lost_before => WorkerState::Lost,
            Some(_) => WorkerState::Running,
            None => WorkerState::Idle,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            WorkerState::Idle => "idle",
            WorkerState::Running => "running",
            WorkerState::Lost => "lost",
        }
    }
}

/// A connected worker process.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Worker {
    /// The worker's id, `wrk_…`.
    pub id: WorkerId,
    /// Device of the worker: `cpu`, `cuda:0`.
    #[schema(example = "cpu")]
    pub device: String,
    /// Process id on the worker's machine.
    pub pid: u32,
    /// Current state of the worker.
    pub state: WorkerState,
    /// The job that it runs; null if it runs none, or the job belongs to another owner.
    pub job_id: Option<JobId>,
    /// Number of compute threads.
    pub threads: u32,
    /// The worker's rlood version.
    pub version: String,
    /// CPU kernels of the worker; null on a GPU, and for workers of versions before this field.
    pub kernels: Option<KernelFacts>,
    /// Runtimes beside rlood's own engine that the worker can start.
    pub runtimes: Vec<RuntimeFacts>,
    /// When the server last heard from the worker.
    pub seen_at: Time,
}

/// List the workers, oldest first.
#[utoipa::path(get, path = "/workers", tag = "System",
    responses((status = 200, description = "All workers", body = List<Worker>)))]
async fn list_workers(State(state): State<AppState>, caller: Caller) -> Result<Json<List<Worker>>, Problem> {
    let lost_before = clock_ms() - lease_ms(&state);
    let word = |row: WorkerRow| {
        let state = WorkerState::of(&row, lost_before);
        let WorkerRow {
            id,
            device,
            pid,
            threads,
            version,
            kernels,
            runtimes,
            child: _,
            seen_at,
            created_at: _,
            lost: _,
            job,
        } = row;
        Worker { id, device, pid, state, job_id: job, threads, version, kernels, runtimes, seen_at: Time(seen_at) }
    };
    let mut data: Vec<Worker> = state.store.worker_list().await?.into_iter().map(word).collect();
    for worker in &mut data {
        if let (Some(job), Some(_)) = (worker.job_id, caller.sees())
            && !state.store.job_owner(job).await?.is_some_and(|owner| caller.may_see(&owner))
        {
            worker.job_id = None;
        }
    }
    Ok(Json(List { data, next: None }))
}

/// An idle worker contacts the server only with claim requests, which the server may hold open for a while, so it counts as
/// lost after twice the lease.
fn lease_ms(state: &AppState) -> i64 {
    i64::try_from(state.config.lease_ms.saturating_mul(2)).unwrap_or(i64::MAX / 2)
}

/// Get this OpenAPI document.
#[utoipa::path(get, path = "/openapi.json", tag = "System", security(()),
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value)))]
async fn get_openapi() -> impl IntoResponse {
    // Not a `LazyLock`, which would name its function: a static and what it names are compiled into the unit tests too.
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    let document = DOCUMENT.get_or_init(|| super::openapi().to_json().unwrap_or_default());
    ([(header::CONTENT_TYPE, "application/json")], document.as_str())
}
