//! `rlood reward-server`: a reward model behind HTTP, for jobs on other machines. Speaks the reward contract v1, and
//! OpenRLHF's remote reward model on the same address: whoever sends `query` is answered with `rewards`.

mod answer;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};
use tokio::sync::{Mutex, Semaphore};

use crate::causes::with_causes;
use crate::config::{Precision, RewardFormat, RewardServerArgs};
use crate::engine::backend::BackendKind;
use crate::reward::signature::Key;
use crate::reward_model::{Scorer, ScorerOptions};
use crate::spec::{ComputeDtype, RewardTextFormat};
use answer::Refusal;

/// Requests that may wait for the model; further ones are told to come back.
const WAITING: usize = 64;
/// A larger body is refused, and the client splits it.
const BODY_LIMIT_BYTES: usize = 64 << 20;
/// Most samples of one request, as `reward.ping` says.
const MAX_BATCH_SAMPLES: usize = 1024;

/// Why the server could not run.
#[derive(Debug, thiserror::Error)]
pub enum RewardServerError {
    /// The model or a setting cannot be used.
    #[error("{0}")]
    Setting(String),
    /// A system call failed.
    #[error("cannot {doing}")]
    System {
        /// What was being done.
        doing: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// `rlood reward-server`: serves until SIGTERM or SIGINT; code 0 then. The first line of standard output is the address.
///
/// # Errors
/// When the model or the address cannot be used.
pub async fn run(args: RewardServerArgs) -> Result<ExitCode, RewardServerError> {
    let RewardServerArgs { model, listen, secret, device, label, format, max_length, dtype, threads: _ } = args;
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
        .map_err(|error| RewardServerError::Setting(format!("the model cannot be loaded: {error}")))?
        .map_err(|error| RewardServerError::Setting(with_causes(&error)))?;
    let system = |doing: &str| {
        let doing = doing.to_owned();
        move |source| RewardServerError::System { doing, source }
    };
    let listener = tokio::net::TcpListener::bind(&listen).await.map_err(system(&format!("listen on {listen}")))?;
    let address = listener.local_addr().map_err(system("tell the address"))?;
    if key.is_none() && !address.ip().is_loopback() {
        tracing::warn!("without --secret everybody who reaches {address} may use the model");
    }
    let card = scorer.card();
    tracing::info!(model_type = card.model_type, label = scorer.label(), max_tokens = card.max_tokens, "loaded");
    println!("listening on http://{address}");
    let leave = leave_on_signal().map_err(system("listen for signals"))?;
    axum::serve(listener, router(scorer, key)).with_graceful_shutdown(leave).await.map_err(system("serve"))?;
    Ok(ExitCode::SUCCESS)
}

fn leave_on_signal() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// What requests share.
#[derive(Clone)]
struct Serving {
    scorer: Arc<Scorer>,
    key: Option<Arc<Key>>,
    /// The model computes one request at a time, with all threads.
    turn: Arc<Mutex<()>>,
    places: Arc<Semaphore>,
}

/// Everything the server answers: POST on any path, GET / and /health.
fn router(scorer: Scorer, key: Option<Key>) -> Router {
    let serving = Serving {
        scorer: Arc::new(scorer),
        key: key.map(Arc::new),
        turn: Arc::default(),
        places: Arc::new(Semaphore::new(WAITING)),
    };
    Router::new()
        .route("/", get(describe).post(score))
        .route("/health", get(describe))
        .fallback(axum::routing::post(score))
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .with_state(serving)
}

/// What is served.
async fn describe(State(serving): State<Serving>) -> Response {
    let card = serving.scorer.card();
    axum::Json(json!({
        "model_type": card.model_type,
        "label": serving.scorer.label(),
        "labels": card.labels,
        "max_tokens": card.max_tokens,
        "num_parameters": card.num_parameters,
        "has_chat_template": card.chat_template.is_some(),
        "signed": serving.key.is_some(),
    }))
    .into_response()
}

async fn score(State(serving): State<Serving>, headers: HeaderMap, body: Bytes) -> Response {
    match try_score(serving, &headers, &body).await {
        Ok(answer) => axum::Json(answer).into_response(),
        Err(refusal) => refused(&refusal),
    }
}

async fn try_score(serving: Serving, headers: &HeaderMap, body: &[u8]) -> Result<Value, Refusal> {
    if let Some(key) = &serving.key {
        check_signature(key, headers, body)?;
    }
    let body: Value = serde_json::from_slice(body).map_err(|error| {
        Refusal::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is not JSON: {error}"))
    })?;
    let Some(asked) = answer::read(&body, MAX_BATCH_SAMPLES)? else {
        return Ok(answer::pong(MAX_BATCH_SAMPLES));
    };
    let Ok(_place) = serving.places.clone().try_acquire_owned() else {
        let detail = format!("{WAITING} requests wait for the model; try again later");
        return Err(Refusal::new(StatusCode::TOO_MANY_REQUESTS, "busy", detail));
    };
    let turn = serving.turn.clone().lock_owned().await;
    let scorer = serving.scorer.clone();
    let answered = tokio::task::spawn_blocking(move || {
        // Given back when the model is done, also when the client has gone.
        let _turn = turn;
        answer::answer(&asked, &scorer)
    });
    answered.await.unwrap_or_else(|error| {
        tracing::error!(%error, "scoring panicked");
        Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "scoring failed; see the server's log"))
    })
}

/// Standard Webhooks: who knows the secret.
fn check_signature(key: &Key, headers: &HeaderMap, body: &[u8]) -> Result<(), Refusal> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    key.verify(text("webhook-id"), text("webhook-timestamp"), text("webhook-signature"), body, now_s).map_err(|error| {
        let detail = format!("{error}: requests here are signed with the secret that this server was started with");
        Refusal::new(StatusCode::UNAUTHORIZED, "not_signed", detail)
    })
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
