//! A server for API tests, called through the router, and the requests that tests send.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use rlood::config::ServeConfig;
use rlood::event::{Event, FinishReason, Sample, SamplePhase};
use rlood::files::DataDir;
use rlood::http::{AppState, router};
use rlood::id::{JobId, WorkerId};
use rlood::protocol::{EventBatch, PROTOCOL, Register};
use rlood::store::{Claimed, Store, clock_ms};
use rlood_client::Client;
use serde_json::{Value, json};
use tower::ServiceExt;

pub const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

pub struct Server {
    pub state: AppState,
    pub router: Router,
    pub dir: tempfile::TempDir,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
    pub body: Value,
}

impl Server {
    /// A server without workers; the models `chat` (with a chat template) and `plain` (without) are registered.
    pub async fn start() -> Server {
        Self::start_with(|_| {}).await
    }

    /// Starts a server with other settings.
    pub async fn start_with(change: impl FnOnce(&mut ServeConfig)) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let files = DataDir::open(&data).unwrap();
        let store = Store::open(&files.database()).await.unwrap();
        let mut config = ServeConfig::loopback(&data).unwrap();
        change(&mut config);
        let state = AppState::new(store, files, Arc::new(config));
        let server = Server { router: router(state.clone()), state, dir };
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let plain = server.dir.path().join("plain");
        copy(&fixtures.join("parity/qwen3"), &plain);
        let path = plain.join("tokenizer_config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().remove("chat_template");
        std::fs::write(&path, config.to_string()).unwrap();
        for (id, source) in [("chat", fixtures.join("parity/qwen3")), ("plain", plain)] {
            let answer = server.post("/models", json!({"id": id, "source": source})).await;
            assert_eq!(answer.status, 201, "{}", answer.text);
        }
        server
    }

    /// Returns a client; the server then listens on a socket.
    pub async fn client(&self) -> Client {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = self.router.clone();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Client::builder(&url).no_proxy().build().unwrap()
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Answer { status: parts.status, headers: parts.headers, text, body }
    }

    pub async fn call(&self, method: &str, path: &str, body: Option<Value>, key: Option<&str>) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        self.send(request.body(body.map_or_else(Body::empty, |body| Body::from(body.to_string()))).unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, Some(body), None).await
    }

    pub async fn create(&self, body: Value) -> JobId {
        let answer = self.post("/jobs", body).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        answer.body["id"].as_str().unwrap().parse().unwrap()
    }

    /// Registers a worker that claims the next job.
    pub async fn claim(&self) -> (JobId, u64) {
        let claimed = self.claimed().await;
        (claimed.job, claimed.attempt)
    }

    /// Claims the next job, and returns everything that the worker gets.
    pub async fn claimed(&self) -> Claimed {
        let worker = WorkerId::new();
        let register = Register {
            worker,
            device: "cpu".to_owned(),
            pid: 1,
            threads: 1,
            version: "0".to_owned(),
            child: false,
            protocol: PROTOCOL,
            kernels: None,
            runtimes: Vec::new(),
        };
        self.state.store.worker_register(&register, clock_ms()).await.unwrap();
        self.state.store.job_claim(worker, clock_ms(), 30_000).await.unwrap().unwrap()
    }

    pub async fn report(&self, job: JobId, attempt: u64, batch: u64, events: Vec<Event>) {
        let batch = EventBatch { attempt, batch, events, log: vec![format!("batch {batch}")] };
        assert!(self.state.store.events_append(job, &batch, clock_ms()).await.unwrap());
    }
}

pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

pub fn records(count: usize) -> Value {
    (0..count).map(|row| json!({"prompt": format!("What is {row} + 1?"), "answer": row + 1})).collect()
}

pub fn job() -> Value {
    json!({"model": "chat", "dataset": {"records": records(8)}, "rewards": [{"type": "number_match", "column": "answer"}],
           "training": {"max_steps": 20}})
}

pub fn with(mut document: Value, key: &str, value: Value) -> Value {
    document[key] = value;
    document
}

pub fn step(step: u64, kind: SamplePhase, metrics: &[(&str, Option<f64>)]) -> Event {
    let metrics = metrics.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect();
    Event::Step { step, kind, metrics }
}

pub fn sample(step: u64, completion: &str, reward: Option<f64>) -> Sample {
    Sample {
        step,
        phase: SamplePhase::Train,
        group_id: "g_0".to_owned(),
        prompt_id: "row_0".to_owned(),
        prompt: "Say it".to_owned(),
        completion: completion.to_owned(),
        rewards: BTreeMap::from([("number_match".to_owned(), reward)]),
        reward,
        kl: Some(0.0),
        advantage: Some(0.5),
        finish_reason: FinishReason::Stop,
        num_tokens: 3,
        episode: None,
    }
}

#[track_caller]
pub fn pointers(answer: &Answer) -> Vec<String> {
    let errors = answer.body["errors"].as_array().unwrap_or_else(|| panic!("{}", answer.text));
    errors
        .iter()
        .map(|error| format!("{} {}", error["pointer"].as_str().unwrap(), error["code"].as_str().unwrap()))
        .collect()
}
