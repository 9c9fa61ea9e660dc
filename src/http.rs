//! The router, its shared state and its layers.
//!
//! Every module below registers its routes with `pub fn routes() -> OpenApiRouter<AppState>`; [`router`] composes them and adds the
//! layers. A request passes, from the outside in: request id and access log, panic guard, host and origin check, body timeout,
//! decompression, body limit, authentication and ownership, the handler. Every failure on the way is a [`error::Problem`].

pub mod adapters;
pub mod alerts;
pub mod artifacts;
pub mod audit;
pub mod auth;
pub mod browser;
pub mod callbacks;
pub mod certificates;
mod compare;
mod contract;
mod cookie;
pub mod dataset_downloads;
mod dataset_images;
mod dataset_preview;
mod dataset_ranges;
mod dataset_sources;
pub mod datasets;
pub mod demo;
pub mod docs;
pub mod download;
mod environments;
pub mod error;
mod event_stream;
pub mod events;
pub mod exports;
pub mod extract;
pub mod fork;
pub mod generate;
pub mod guide;
pub mod heavy;
pub mod idempotency;
mod job_models;
pub mod jobs;
pub mod keys;
pub mod list;
mod lookup;
mod measures;
mod messages;
pub mod metrics;
pub mod models;
mod named_models;
pub mod openapi;
pub mod preflight;
mod prometheus;
mod prompts;
pub mod pushes;
mod python_rewards;
mod reach;
mod rescore;
pub mod retry;
mod reward_health;
mod reward_models;
mod reward_test_journal;
pub mod rewards;
pub mod rollout_adapters;
mod rows;
mod runtimes;
pub mod samples;
pub mod schemas;
pub mod session;
pub mod sparklines;
mod staged_images;
pub mod storage;
pub mod submit;
pub mod summary;
pub mod system;
mod tasks;
pub mod throttle;
mod uploads;
pub mod v1;
pub mod verdicts;
pub mod waiting_jobs;
mod warm_start;
pub mod web;
pub mod webhooks;
pub mod worker;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tokio_util::sync::CancellationToken;
use tower::ServiceBuilder;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::timeout::RequestBodyTimeoutLayer;
use utoipa_axum::router::OpenApiRouter;

use crate::config::ServeConfig;
use crate::downloads::Downloads;
use crate::files::DataDir;
use crate::listen::{self, Connection};
use crate::store::Store;
use crate::supervisor::one_shot::{Certifications, Preflights};
use crate::supervisor::serving::Serving;
use error::{Code, IsProblem, Problem, REQUEST_ID, shortened};

pub use openapi::openapi;

/// Maximum size of a JSON body, in bytes. Routes that stream set their own limit.
pub const JSON_LIMIT_BYTES: usize = 16 * 1024 * 1024;
/// Maximum body of `POST /session`, which needs no key: the longest key with every character escaped, in bytes.
const SESSION_LIMIT_BYTES: usize = 64 * 1024;

/// State that all handlers share. Cheap to clone.
#[derive(Clone)]
pub struct AppState {
    pub store: Store,
    pub files: DataDir,
    pub config: Arc<ServeConfig>,
    /// Maximum size of a dataset, in bytes.
    pub dataset_limit_bytes: u64,
    pub started: Instant,
    /// Counts of answered requests, exported by `/metrics`.
    pub requests: Arc<system::RequestCounts>,
    /// Runs preflights. None if this server starts no processes.
    pub preflights: Option<Preflights>,
    /// Serves models over `/v1`. None if this server starts no processes.
    pub serving: Option<Serving>,
    /// Tokenizers of the served models.
    pub texts: v1::Texts,
    /// Computes certificates of checkpoints that have none. None if this server starts no processes.
    pub certifications: Option<Certifications>,
    /// Limits how many memory- or CPU-intensive requests run concurrently.
    pub heavy: heavy::Slots,
    /// Limits how many tests of reward services run concurrently.
    pub service_tests: heavy::Slots,
    /// Limits how many searches of samples run concurrently.
    pub searches: heavy::Slots,
    /// Limits how many requests to re-score samples run concurrently.
    pub rescores: heavy::Slots,
    /// Whether free disk space is below the limit. While true, the server hands no job to a worker.
    pub disk_low: Arc<AtomicBool>,
    /// Counts of connections, exported by `/metrics`.
    pub connections: Arc<listen::Connections>,
    /// Whether the database has ever held a key. Once true, every request needs a key.
    pub has_keys: Arc<AtomicBool>,
    /// The event streams that are open, counted per key.
    pub streams: Arc<auth::Streams>,
    /// Addresses that recently sent invalid keys.
    pub failures: Arc<throttle::Failures>,
    /// Workers that were refused, for example because of their version.
    pub refused_workers: Arc<worker::RefusedWorkers>,
    /// State of the worker routes.
    pub workers: Arc<worker::WorkerState>,
    /// Downloads of models from a hub that are in progress.
    pub downloads: Downloads,
    /// Hub tokens of the requests for pushes that have not ended.
    pub push_tokens: pushes::Tokens,
    /// The latest report of disk usage by kind and owner.
    pub storage: Arc<storage::LastReport>,
    /// Cancelled when the server starts to shut down. Requests that wait for something are then answered immediately.
    pub stopping: CancellationToken,
}

impl AppState {
    /// Returns the state of a newly started server.
    pub fn new(store: Store, files: DataDir, config: Arc<ServeConfig>) -> Self {
        let slots = config.edge.heavy_slots.map_or_else(heavy::default_slots, |slots| slots as usize);
        let downloads = Downloads::new(store.clone(), files.root());
        Self {
            downloads,
            push_tokens: pushes::Tokens::default(),
            store,
            files,
            config,
            dataset_limit_bytes: rows::DEFAULT_LIMIT_BYTES,
            started: Instant::now(),
            requests: Arc::default(),
            preflights: None,
            serving: None,
            texts: v1::Texts::default(),
            certifications: None,
            heavy: heavy::Slots::new(slots),
            service_tests: heavy::Slots::new(heavy::MAX_SERVICE_TESTS),
            searches: heavy::Slots::new(samples::SEARCHES),
            rescores: heavy::Slots::new(rescore::MAX_CONCURRENT),
            disk_low: Arc::default(),
            connections: Arc::default(),
            has_keys: Arc::default(),
            streams: Arc::default(),
            failures: Arc::default(),
            refused_workers: Arc::default(),
            workers: Arc::default(),
            storage: Arc::default(),
            stopping: CancellationToken::new(),
        }
    }
}

/// Returns the routes of the OpenAPI document, without layers.
pub(crate) fn documented_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(openapi::head())
        .merge(submit::routes())
        .merge(fork::routes())
        .merge(retry::routes())
        .merge(alerts::routes())
        .merge(jobs::routes())
        .merge(compare::routes())
        .merge(generate::routes())
        .merge(verdicts::routes())
        .merge(v1::routes())
        .merge(exports::routes())
        .merge(pushes::routes())
        .merge(certificates::routes())
        .merge(sparklines::routes())
        .merge(dataset_preview::routes())
        .merge(demo::routes())
        .merge(events::routes())
        .merge(artifacts::routes())
        .merge(rollout_adapters::routes())
        .merge(datasets::routes())
        .merge(dataset_images::routes())
        .merge(adapters::routes())
        .merge(models::routes())
        .merge(rewards::routes())
        .merge(environments::routes())
        .merge(reward_health::routes())
        .merge(callbacks::routes())
        .merge(rescore::routes())
        .merge(system::routes())
        .merge(storage::routes())
        .merge(session::routes().layer(DefaultBodyLimit::max(SESSION_LIMIT_BYTES)))
        .merge(keys::routes())
        .merge(audit::routes())
        .merge(webhooks::routes())
}

/// Returns the router with all routes and layers. Serve it, or call it in a test with `tower::ServiceExt::oneshot`.
pub fn router(state: AppState) -> Router {
    let body = |pause: Duration| {
        ServiceBuilder::new()
            .map_request(with_known_coding)
            .layer(RequestBodyTimeoutLayer::new(pause))
            .layer(RequestDecompressionLayer::new())
            .map_request(|request: axum::http::Request<_>| request.map(Body::new))
    };
    let worker = worker::routes()
        .split_for_parts()
        .0
        .layer(middleware::from_fn_with_state(state.clone(), auth::require_worker))
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(JSON_LIMIT_BYTES))
        .layer(body(state.config.edge.transfer_pause));
    // The authentication layer also covers unknown routes and methods, so that a client without a key does not learn which
    // routes exist.
    let guarded = documented_routes()
        .split_for_parts()
        .0
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(state.clone(), auth::require_access));
    guarded
        .merge(web::routes())
        .merge(docs::routes())
        .merge(guide::routes())
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(JSON_LIMIT_BYTES))
        .layer(body(state.config.edge.body_pause))
        .merge(worker)
        .layer(middleware::from_fn_with_state(state.clone(), browser::guard_browser))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(state.clone(), outermost))
        .with_state(state)
}

/// Normalizes the names in `content-encoding`, which are case-insensitive; `x-gzip` means gzip (RFC 9110, 8.4.1). The
/// decompression layer knows only the lower-case names.
fn with_known_coding(mut request: Request) -> Request {
    if let Some(coding) = request.headers_mut().get_mut(header::CONTENT_ENCODING) {
        let known = [("gzip", "gzip"), ("x-gzip", "gzip"), ("identity", "identity")];
        let given = coding.as_bytes().trim_ascii();
        if let Some((_, name)) = known.iter().find(|(name, _)| given.eq_ignore_ascii_case(name.as_bytes())) {
            *coding = HeaderValue::from_static(name);
        }
    }
    request
}

async fn unknown_route(method: Method, uri: Uri) -> Problem {
    Problem::new(
        Code::NotFound,
        format!("there is no {method} {}; /openapi.json and /docs list every route", shortened(uri.path())),
    )
}

async fn wrong_method(method: Method, uri: Uri) -> Problem {
    Problem::new(
        Code::MethodNotAllowed,
        format!("the path {} does not accept the method {method}; see the 'allow' header", shortened(uri.path())),
    )
}

fn panicked(payload: Box<dyn Any + Send + 'static>) -> Response {
    let text = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("the panic has no message");
    Problem::internal(format!("the handler of a request panicked: {text}")).into_response()
}

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The outermost layer of the router. Assigns the request id, turns errors of other layers into problem documents, sets the
/// security headers, counts and logs the request.
async fn outermost(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let id = request_id(request.headers());
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let mut response = REQUEST_ID
        .scope(id.clone(), async move {
            match reserve_for_workers(&request) {
                Ok(()) => into_problem(next.run(request).await),
                Err(problem) => problem.into_response(),
            }
        })
        .await;
    if v1::is_openai(&path) {
        response = v1::translated(response).await;
    }

    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert(X_REQUEST_ID, value);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
    headers.insert(
        "permissions-policy",
        HeaderValue::from_static("camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    );
    let foreign_readers = !state.config.edge.cors_origins.is_empty();
    let readers = if foreign_readers { "cross-origin" } else { "same-origin" };
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static(readers));
    if state.config.public_url.as_deref().is_some_and(|url| url.starts_with("https:")) {
        headers.insert(header::STRICT_TRANSPORT_SECURITY, HeaderValue::from_static("max-age=31536000"));
    }
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'; sandbox"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));

    let status = response.status();
    state.requests.count(&method, route.as_ref().map_or("unmatched", MatchedPath::as_str), status, begun.elapsed());
    let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::debug!(request_id = %id, %method, path, status = status.as_u16(), ms, "answered");
    response
}

/// Answers 503 to a request that is not from a worker when only the connections reserved for workers are free.
fn reserve_for_workers(request: &Request) -> Result<(), Problem> {
    let Some(connection) = request.extensions().get::<Connection>() else { return Ok(()) };
    if request.uri().path().starts_with("/worker/") {
        return Ok(());
    }
    let asks_for_stream = event_stream::wants_stream(request.headers());
    connection.admit(asks_for_stream).map_err(|_| {
        let code = if asks_for_stream { Code::TooManyRequests } else { Code::Overloaded };
        Problem::new(code, "all of the server's connections that are not reserved for workers are busy; try again")
            .retry_after(5)
    })
}

/// Returns the client's `x-request-id` if it is harmless, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(X_REQUEST_ID).and_then(|value| value.to_str().ok());
    let harmless = |text: &&str| {
        (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
    };
    given
        .filter(harmless)
        .map_or_else(|| format!("req_{}", ulid::Ulid::generate().to_string().to_lowercase()), str::to_owned)
}

/// Turns an error response of axum's own layers and extractors into a problem document with the same status.
fn into_problem(response: Response) -> Response {
    let status = response.status();
    if !(status.is_client_error() || status.is_server_error()) || response.extensions().get::<IsProblem>().is_some() {
        return response;
    }
    let detail = match status {
        StatusCode::UNSUPPORTED_MEDIA_TYPE => {
            "send the request's body uncompressed or with 'content-encoding: gzip', in a content type that this route accepts"
        }
        _ => Code::of_status(status).title(),
    };
    let problem = match status {
        StatusCode::PAYLOAD_TOO_LARGE => extract::too_large(),
        _ => Problem::new(Code::of_status(status), detail),
    };
    let mut problem = problem.into_response();
    *problem.status_mut() = status;
    for name in [header::ALLOW, header::RETRY_AFTER, header::WWW_AUTHENTICATE, header::ACCEPT_ENCODING] {
        if let Some(value) = response.headers().get(&name) {
            problem.headers_mut().insert(name, value.clone());
        }
    }
    problem
}
