//! A reward service for rlood's reward contract v1, on axum. Nothing of rlood is used: copy it.
//!
//! ```sh
//! REWARD_SECRET=whsec_… cargo run --release --example reward_service -- 127.0.0.1:8090
//! ```
//!
//! It marks sums: 1 if the completion is the row's column `answer`, 0.5 if the answer stands in it, else 0. Put your own marks
//! into `mark`. Without REWARD_SECRET it believes everybody: for a look on your own machine only.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::Sha256;
use tokio::net::TcpListener;

const MAX_SAMPLES: usize = 64;
const MAX_BYTES: usize = 4 << 20;
/// How far a request's timestamp may lie from this clock, s.
const TOLERANCE_S: u64 = 300;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8090".to_owned());
    let secrets = std::env::var("REWARD_SECRET").unwrap_or_default();
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    serve(listener, &secrets).await
}

/// Serves POSTs on any path; `secrets` holds two, separated by a space, while one is rotated.
pub async fn serve(listener: TcpListener, secrets: &str) -> std::io::Result<()> {
    let decode = |secret: &str| STANDARD.decode(secret.trim_start_matches("whsec_"));
    let keys: Result<Vec<Vec<u8>>, _> = secrets.split_whitespace().map(decode).collect();
    let keys = keys.map_err(|error| std::io::Error::other(format!("REWARD_SECRET: {error}")))?;
    let app = Router::new().fallback(post(score)).layer(DefaultBodyLimit::max(MAX_BYTES)).with_state(Arc::new(keys));
    axum::serve(listener, app).await
}

/// What the caller did wrong.
struct Refused(StatusCode, String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, axum::Json(json!({"error": {"code": "refused", "message": self.1}}))).into_response()
    }
}

/// What is read of a request; further fields are ignored.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Request {
    #[serde(rename = "reward.ping")]
    Ping,
    #[serde(rename = "reward.score.request")]
    Score { version: String, id: String, samples: Vec<Sample> },
}

#[derive(Deserialize)]
struct Sample {
    sample_id: String,
    completion: String,
    #[serde(default)]
    columns: Map<String, Value>,
}

async fn score(
    State(keys): State<Arc<Vec<Vec<u8>>>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<axum::Json<Value>, Refused> {
    verify(&keys, &headers, &body)?;
    let refused = |status, reason: &dyn std::fmt::Display| Refused(status, reason.to_string());
    match serde_json::from_slice(&body).map_err(|error| refused(StatusCode::BAD_REQUEST, &error))? {
        Request::Ping => Ok(axum::Json(json!({"max_batch_samples": MAX_SAMPLES, "modes": ["sync"], "range": [0, 1]}))),
        Request::Score { version, .. } if version != "1" => {
            Err(refused(StatusCode::UNPROCESSABLE_ENTITY, &"version 1 of the contract is spoken here"))
        }
        // The request is split in halves and comes again.
        Request::Score { samples, .. } if samples.len() > MAX_SAMPLES => {
            Err(refused(StatusCode::PAYLOAD_TOO_LARGE, &format!("at most {MAX_SAMPLES} samples in one request")))
        }
        // The same samples always get the same marks. Where they would not (a sampled judge), keep the answer by id: a request
        // whose answer was lost comes again with the same id.
        Request::Score { id, samples, .. } => {
            let results: Vec<Value> = samples.iter().map(mark).collect();
            Ok(axum::Json(json!({"version": "1", "id": id, "results": results})))
        }
    }
}

/// Standard Webhooks: one of our keys must have signed these very bytes, just now.
fn verify(keys: &[Vec<u8>], headers: &HeaderMap, body: &[u8]) -> Result<(), Refused> {
    if keys.is_empty() {
        return Ok(());
    }
    let refused = |reason: &str| Err(Refused(StatusCode::UNAUTHORIZED, reason.to_owned()));
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let (id, stamp) = (text("webhook-id"), text("webhook-timestamp"));
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if !stamp.parse::<u64>().is_ok_and(|stamp| stamp.abs_diff(now_s) <= TOLERANCE_S) {
        return refused("webhook-timestamp is missing or more than five minutes away from this clock");
    }
    // Several signatures, separated by spaces, while a secret is rotated: one that fits is enough.
    let given = || text("webhook-signature").split(' ').filter_map(|signature| signature.strip_prefix("v1,"));
    let fits = |key: &Vec<u8>| {
        given().filter_map(|signature| STANDARD.decode(signature).ok()).any(|signature| {
            let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return false };
            mac.update(format!("{id}.{stamp}.").as_bytes());
            mac.update(body);
            // In constant time.
            mac.verify_slice(&signature).is_ok()
        })
    };
    if keys.iter().any(fits) { Ok(()) } else { refused("no signature in webhook-signature fits") }
}

/// The result of one sample. What cannot be marked gets an error, never a 0.
fn mark(sample: &Sample) -> Value {
    let answer = match sample.columns.get("answer") {
        Some(Value::String(answer)) => answer.trim().to_owned(),
        Some(Value::Number(answer)) => answer.to_string(),
        _ => {
            let error = json!({"code": "no_answer", "message": "the row has no column 'answer'", "retryable": false});
            return json!({"sample_id": sample.sample_id, "reward": null, "error": error});
        }
    };
    let completion = sample.completion.trim();
    let reward = match completion {
        completion if completion == answer => 1.0,
        completion if completion.contains(&answer) => 0.5,
        _ => 0.0,
    };
    json!({"sample_id": sample.sample_id, "reward": reward, "metrics": {"length": completion.chars().count()}})
}
