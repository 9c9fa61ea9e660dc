//! A reward service for contract v1: an example to copy, and the grader of `rlood demo`.
//!
//! The reward is 1.0 if the trimmed completion equals the row's column `answer`, else 0.0. The service shows everything that a real
//! one needs: it verifies the signature before it trusts the body, answers `reward.ping`, returns a result per sample, and returns
//! an error for a sample that cannot be graded, never a 0.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::reward::signature::{Key, KeyError};

/// A running example reward service. Dropping the value stops the service.
#[derive(Debug)]
pub struct ExampleService {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl ExampleService {
    /// Starts the service on a free loopback port. It accepts only requests signed with `secret` (`whsec_…`).
    pub async fn start(secret: &str) -> std::io::Result<Self> {
        let key = Key::parse(secret).map_err(|why: KeyError| std::io::Error::other(why))?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let app =
            Router::new().route("/score", post(score)).layer(DefaultBodyLimit::max(16 << 20)).with_state(Arc::new(key));
        let task = tokio::spawn(async move {
            if let Err(why) = axum::serve(listener, app).await {
                tracing::error!("the example reward service stopped: {why}");
            }
        });
        Ok(Self { address, task })
    }

    /// Returns the URL to which samples are sent.
    pub fn url(&self) -> String {
        format!("http://{}/score", self.address)
    }
}

impl Drop for ExampleService {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The fields of a request that this service reads; all others are ignored.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Request {
    #[serde(rename = "reward.ping")]
    Ping,
    #[serde(rename = "reward.score.request")]
    Score { id: String, samples: Vec<Sample> },
}

#[derive(Deserialize)]
struct Sample {
    sample_id: String,
    completion: String,
    columns: Map<String, Value>,
}

async fn score(State(key): State<Arc<Key>>, headers: HeaderMap, body: Bytes) -> Response {
    if let Some(refusal) = refusal(&key, &headers, &body) {
        return refusal;
    }
    match serde_json::from_slice(&body) {
        Err(why) => (StatusCode::BAD_REQUEST, why.to_string()).into_response(),
        Ok(Request::Ping) => json_response(&json!({"max_batch_samples": 256, "modes": ["sync"], "range": [0, 1]})),
        Ok(Request::Score { id, samples }) => {
            let results: Vec<Value> = samples.iter().map(mark).collect();
            json_response(&json!({"version": "1", "id": id, "results": results}))
        }
    }
}

/// Returns the answer to a request whose signature is not valid; `None` if the signature is valid. The signature covers the received
/// bytes, so it is verified before parsing.
pub(super) fn refusal(key: &Key, headers: &HeaderMap, body: &[u8]) -> Option<Response> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (id, timestamp, signatures) = (header("webhook-id"), header("webhook-timestamp"), header("webhook-signature"));
    let why = key.verify(id, timestamp, signatures, body, now_s).err()?;
    Some((StatusCode::UNAUTHORIZED, why.to_string()).into_response())
}

fn mark(sample: &Sample) -> Value {
    let answer = match sample.columns.get("answer") {
        Some(Value::String(answer)) => answer.trim().to_owned(),
        Some(Value::Number(answer)) => answer.to_string(),
        _ => {
            let error = json!({"code": "no_answer", "message": "the row has no column 'answer'", "retryable": false});
            return json!({"sample_id": sample.sample_id, "reward": null, "error": error});
        }
    };
    let reward = if sample.completion.trim() == answer { 1.0 } else { 0.0 };
    json!({"sample_id": sample.sample_id, "reward": reward})
}

pub(super) fn json_response(value: &Value) -> Response {
    axum::Json(value).into_response()
}
