//! `rlood reward-server`: serves a reward model over HTTP for jobs on other machines. Supports the reward contract v1, and
//! OpenRLHF's remote reward model at the same address: a request with `query` is answered with `rewards`.
//!
//! A repeated `webhook-id` is a retry after a lost response: the server scores it again, with the same result.

mod answer;
mod edge;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::future::LocalBoxFuture;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::config::{self, Precision, RewardFormat, RewardServerArgs};
use crate::engine::backend::BackendKind;
use crate::error_text::with_causes;
use crate::listen::{self, Stop};
use crate::reward::signature::Key;
use crate::reward_model::{Scorer, ScorerOptions};
use crate::spec::{ComputeDtype, RewardTextFormat};
use answer::{Asked, Refusal};
use edge::Edge;

/// Maximum number of requests that wait for the reward model; further ones get 429.
const MAX_WAITING: usize = 64;
/// Maximum number of samples per request, as announced in `reward.ping`.
const MAX_BATCH_SAMPLES: usize = 1024;
/// Time limit for requests in flight when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Why the server could not run.
#[derive(Debug, thiserror::Error)]
pub enum RewardServerError {
    /// The model or a setting is invalid.
    #[error("{0}")]
    Setting(String),
    /// A system call failed.
    #[error("cannot {doing}")]
    System {
        /// The operation that failed.
        doing: String,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
}

/// `rlood reward-server`: serves until SIGTERM or SIGINT, then returns code 0. The first line of standard output is the address.
///
/// # Errors
/// Fails when the model or the address cannot be used.
pub fn run(args: RewardServerArgs) -> LocalBoxFuture<'static, Result<ExitCode, RewardServerError>> {
    Box::pin(async move {
        let RewardServerArgs {
            model,
            listen,
            secret,
            allowed_hosts,
            max_connections,
            device,
            label,
            format,
            max_length,
            dtype,
            threads: _,
        } = args;
        let sockets = config::Edge::of_reward_server(allowed_hosts.as_deref().unwrap_or_default(), max_connections)
            .map_err(|error| RewardServerError::Setting(error.to_string()))?;
        let key = secret.as_deref().map(Key::parse).transpose();
        let key = key.map_err(|error| RewardServerError::Setting(format!("--secret: {error}")))?;
        let options = ScorerOptions {
            dir: model,
            backend: BackendKind::of_device(&device.to_string())
                .map_err(|error| RewardServerError::Setting(error.to_string()))?,
            dtype: match dtype {
                Precision::Bf16 => ComputeDtype::Bf16,
                Precision::F32 => ComputeDtype::F32,
            },
            label,
            format: match format {
                RewardFormat::Auto => RewardTextFormat::Auto,
                RewardFormat::Chat => RewardTextFormat::Chat,
                RewardFormat::Text => RewardTextFormat::Text,
                RewardFormat::Pair => RewardTextFormat::Pair,
            },
            max_length,
            chat_template_kwargs: serde_json::Map::new(),
        };
        let scorer = tokio::task::spawn_blocking(move || Scorer::load(&options))
            .await
            .map_err(|error| RewardServerError::Setting(format!("the reward model cannot be loaded: {error}")))?
            .map_err(|error| RewardServerError::Setting(with_causes(&error)))?;
        let system = |doing: &str| {
            let doing = doing.to_owned();
            move |source| RewardServerError::System { doing, source }
        };
        let listener = tokio::net::TcpListener::bind(&listen).await.map_err(system(&format!("listen on {listen}")))?;
        let address = listener.local_addr().map_err(system("read the address that the reward server listens on"))?;
        if key.is_none() && !address.ip().is_loopback() {
            tracing::warn!("without --secret every client that reaches {address} may use the reward model");
        }
        let card = scorer.card();
        tracing::info!(model_type = card.model_type, label = scorer.label(), max_tokens = card.max_tokens, "loaded");
        println!("listening on http://{address}");
        let mut signals = Signals::new().map_err(system("listen for the signals SIGTERM and SIGINT"))?;
        let edge = Edge::new(address.ip(), sockets.allowed_hosts.clone(), key);
        let stop = Stop { begin: CancellationToken::new(), cut: CancellationToken::new() };
        let (begin, cut) = (stop.begin.clone(), stop.cut.clone());
        let mut serving = tokio::spawn(listen::serve(listener, router(scorer, edge), sockets, Arc::default(), stop));
        signals.next().await;
        begin.cancel();
        let drained = tokio::select! {
            ended = &mut serving => ended,
            () = signals.next() => return Ok(ExitCode::FAILURE),
            () = tokio::time::sleep(DRAIN_TIMEOUT) => {
                cut.cancel();
                serving.await
            }
        };
        if let Err(error) = drained {
            tracing::error!(%error, "the reward server's listener ended with an error");
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Signals that stop the server: the first one shuts down cleanly, the second one exits immediately.
struct Signals(Signal, Signal);

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

/// State that all requests share.
#[derive(Clone)]
struct Serving {
    scorer: Arc<Scorer>,
    edge: Arc<Edge>,
    /// Lock of the reward model, which scores one request at a time with all threads.
    turn: Arc<Mutex<()>>,
    /// Lock for parsing request bodies, one at a time, because parsed JSON may need many times the memory of its text.
    parsing: Arc<Mutex<()>>,
    places: Arc<Semaphore>,
}

/// Returns all routes: POST on any path, GET / and /health.
fn router(scorer: Scorer, edge: Edge) -> Router {
    let serving = Serving {
        scorer: Arc::new(scorer),
        edge: Arc::new(edge),
        turn: Arc::default(),
        parsing: Arc::default(),
        places: Arc::new(Semaphore::new(MAX_WAITING)),
    };
    Router::new()
        .route("/", get(describe).post(score))
        .route("/health", get(describe))
        .fallback(axum::routing::post(score))
        .layer(middleware::from_fn_with_state(serving.clone(), check_caller))
        .with_state(serving)
}

async fn check_caller(State(serving): State<Serving>, request: Request, next: Next) -> Response {
    match serving.edge.check_caller(&request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refused(&refusal),
    }
}

/// Answers `GET /` with a description of the served model.
async fn describe(State(serving): State<Serving>) -> Response {
    let card = serving.scorer.card();
    axum::Json(json!({
        "model_type": card.model_type,
        "label": serving.scorer.label(),
        "labels": card.labels,
        "max_tokens": card.max_tokens,
        "num_parameters": card.num_parameters,
        "has_chat_template": card.chat_template.is_some(),
        "signed": serving.edge.key.is_some(),
    }))
    .into_response()
}

async fn score(State(serving): State<Serving>, request: Request) -> Response {
    match try_score(serving, request).await {
        Ok(answer) => axum::Json(answer).into_response(),
        Err(refusal) => refused(&refusal),
    }
}

async fn try_score(serving: Serving, request: Request) -> Result<Value, Refusal> {
    let Serving { scorer, edge, turn, parsing, places } = serving;
    let headers = request.headers().clone();
    edge.check_head(&headers, now_s())?;
    let full = || edge::busy(format!("{MAX_WAITING} requests already wait for the reward model; try again later"));
    if places.available_permits() == 0 && !edge::is_small(&headers) {
        return Err(full());
    }
    let body = edge.read(request).await?;
    edge.check_signature(&headers, &body.bytes, now_s())?;
    // A request that waits for the model is kept as unparsed bytes, because that needs the least memory.
    let parsing = parsing.lock_owned().await;
    let (body, is_ping) = blocking(move || {
        let _parsing = parsing;
        read(&body.bytes).map(|asked| (body, asked.is_none()))
    })
    .await?;
    if is_ping {
        return Ok(answer::pong(MAX_BATCH_SAMPLES));
    }
    let Ok(_place) = places.try_acquire_owned() else { return Err(full()) };
    let turn = turn.lock_owned().await;
    blocking(move || {
        // The lock of the model is released when scoring has finished, even if the client disconnected.
        let _turn = turn;
        match read(&body.bytes)? {
            Some(asked) => answer::answer(&asked, &scorer),
            None => Ok(answer::pong(MAX_BATCH_SAMPLES)),
        }
    })
    .await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "scoring panicked");
        Err(Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "the reward model could not score the samples; see the server's log",
        ))
    })
}

/// Parses a request body; None = the request is a ping.
fn read(body: &[u8]) -> Result<Option<Asked>, Refusal> {
    let body: Value = serde_json::from_slice(body).map_err(|error| {
        Refusal::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the request's body is not JSON: {error}"))
    })?;
    answer::read(&body, MAX_BATCH_SAMPLES)
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn refused(refusal: &Refusal) -> Response {
    let Refusal { status, code, detail } = refusal;
    let body = json!({"error": {"code": code, "message": detail}});
    let mut response = (*status, axum::Json(body)).into_response();
    if *status == StatusCode::TOO_MANY_REQUESTS {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
    }
    response
}
