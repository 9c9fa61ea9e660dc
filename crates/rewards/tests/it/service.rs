//! A reward service for tests, with samples and plans for it. The root's tests use it too.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Response};
use rlood_types::event::FinishReason;
use rlood_types::rollout::RewardSample;
use rlood_types::spec::RewardPlan;
use serde_json::{Map, Value, json};

/// Headers and body of every request, in order.
pub type Seen = Arc<Mutex<Vec<(HeaderMap, Vec<u8>)>>>;
pub type Reply = dyn Fn(usize, &Value) -> Response<Body> + Send + Sync;

/// A reward service whose nth answer (from 0) the test determines. It records every request.
pub struct Service {
    address: SocketAddr,
    pub seen: Seen,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Clone)]
struct Shared {
    seen: Seen,
    count: Arc<AtomicUsize>,
    reply: Arc<Reply>,
}

impl Service {
    pub async fn start(reply: impl Fn(usize, &Value) -> Response<Body> + Send + Sync + 'static) -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), reply).await
    }

    /// Starts the service at an address that was recorded elsewhere.
    pub async fn start_at(
        address: SocketAddr,
        reply: impl Fn(usize, &Value) -> Response<Body> + Send + Sync + 'static,
    ) -> Self {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let shared = Shared { seen: seen.clone(), count: Arc::default(), reply: Arc::new(reply) };
        let answer = |State(shared): State<Shared>, headers: HeaderMap, body: axum::body::Bytes| async move {
            shared.seen.lock().unwrap().push((headers, body.to_vec()));
            let request: Value = serde_json::from_slice(&body).unwrap_or_default();
            let response = (shared.reply)(shared.count.fetch_add(1, Ordering::SeqCst), &request);
            if response.headers().contains_key("x-hang") {
                std::future::pending::<()>().await;
            }
            response
        };
        let app = Router::new().fallback(answer).with_state(shared);
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, seen, task }
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    pub fn url(&self) -> String {
        format!("http://{}/score", self.address)
    }

    pub fn requests(&self) -> Vec<Value> {
        self.seen.lock().unwrap().iter().map(|(_, body)| serde_json::from_slice(body).unwrap()).collect()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn text(status: u16, body: impl Into<Body>) -> Response<Body> {
    Response::builder().status(status).body(body.into()).unwrap()
}

pub fn ok(value: &Value) -> Response<Body> {
    text(200, value.to_string())
}

pub fn hang() -> Response<Body> {
    Response::builder().header("x-hang", "1").body(Body::empty()).unwrap()
}

/// Returns the correct answer: the number in each completion (`c7` → 7).
pub fn truth(request: &Value) -> Value {
    let result = |sample: &Value| {
        let reward: f64 = sample["completion"].as_str().unwrap()[1..].parse().unwrap();
        json!({"sample_id": sample["sample_id"], "reward": reward})
    };
    let results: Vec<Value> = request["samples"].as_array().unwrap().iter().map(result).collect();
    json!({"version": "1", "id": request["id"], "results": results})
}

/// Returns samples `c0`, `c1`, … in groups of `group`.
pub fn samples(count: usize, group: usize) -> Vec<RewardSample> {
    let sample = |index: usize| RewardSample {
        sample_id: format!("s_{index}"),
        group_id: format!("g_{}", index / group),
        prompt_id: format!("row_{}", index / group),
        source: None,
        prompt: "What?".into(),
        messages: Some(json!([{"role": "user", "content": "What?"}])),
        completion: format!("c{index}"),
        finish_reason: FinishReason::Stop,
        num_tokens: 3,
        completion_ids: None,
        columns: Map::from_iter([("reference".to_owned(), json!(index))]),
        episode: None,
    };
    (0..count).map(sample).collect()
}

pub fn plan(name: &str, url: &str, changes: Value) -> RewardPlan {
    let mut plan = json!({
        "name": name, "weight": 1.0, "required": true, "type": "webhook", "url": url, "params": {},
        "max_concurrency": 8, "max_batch_samples": 32, "max_batch_bytes": 1_000_000, "timeout_ms": 30_000,
        "deadline_ms": 300_000, "max_tries": 5, "max_invalid_tries": 2, "on_invalid": "mask", "max_outage_s": 600
    });
    for (key, value) in changes.as_object().unwrap() {
        plan[key] = value.clone();
    }
    serde_json::from_value(plan).unwrap()
}
