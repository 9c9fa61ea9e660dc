//! Real processes and a reward service that records all requests: whatever is killed, paused or shut down, at whatever time, the
//! run ends exactly like an uninterrupted one, and answered samples are never requested again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use rlood_client::Which;
use serde_json::{Value, json};
use sqlx::{Connection, Row};
use tokio::sync::mpsc;

use crate::processes::{Server, is_alive, model_copy, register, signal};

/// Steps of every run. Every rollout is trained on twice, and every fourth step has a checkpoint.
const STEPS: u64 = 8;

/// A reward service that records all requests, and signals when a certain request has arrived.
#[derive(Clone)]
struct Desk(Arc<Mutex<Books>>);

#[derive(Default)]
struct Books {
    /// The body of every request, as received.
    asked: Vec<Vec<u8>>,
    /// The request (from 0) to signal: the receiver, and whether the request stays unanswered.
    watched: Option<(usize, mpsc::UnboundedSender<()>, bool)>,
}

impl Desk {
    async fn start() -> (Self, String) {
        let desk = Self(Arc::default());
        let app = axum::Router::new().fallback(answer).with_state(desk.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/score", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (desk, url)
    }

    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.0.lock().unwrap()
    }

    /// Clears the record, and signals when the request with this number has arrived.
    fn watch(&self, number: usize, silent: bool) -> mpsc::UnboundedReceiver<()> {
        let (sender, receiver) = mpsc::unbounded_channel();
        *self.books() = Books { asked: Vec::new(), watched: Some((number, sender, silent)) };
        receiver
    }

    fn asked(&self) -> Vec<Value> {
        self.books().asked.iter().map(|body| serde_json::from_slice(body).unwrap()).collect()
    }
}

async fn answer(State(desk): State<Desk>, headers: HeaderMap, body: axum::body::Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body).unwrap();
    if request["type"] == "reward.ping" {
        return axum::Json(json!({})).into_response();
    }
    assert_eq!(headers["webhook-id"], request["id"].as_str().unwrap());
    let silent = {
        let mut books = desk.books();
        let number = books.asked.len();
        books.asked.push(body.to_vec());
        match &books.watched {
            Some((watched, sender, silent)) if *watched == number => {
                sender.send(()).unwrap();
                *silent
            }
            _ => false,
        }
    };
    if silent {
        std::future::pending::<()>().await;
    }
    let samples = request["samples"].as_array().unwrap();
    if samples.len() > 2 {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    }
    let reward = |sample: &Value| {
        let bytes: u64 = sample["completion"].as_str().unwrap().bytes().map(u64::from).sum();
        json!({"sample_id": sample["sample_id"], "reward": (bytes % 7) as f64 / 7.0})
    };
    let results: Vec<Value> = samples.iter().map(reward).collect();
    axum::Json(json!({"version": "1", "id": request["id"], "results": results})).into_response()
}

fn spec(url: &str) -> Value {
    let records = |from: u64, to: u64| -> Vec<Value> {
        (from..to).map(|n| json!({"prompt": format!("Say the number {n} in a few words.")})).collect()
    };
    json!({
        "model": "tiny",
        "dataset": {"records": records(0, 6)},
        "eval": {"dataset": {"records": records(6, 8)}, "every_steps": 4, "before_start": true, "num_generations": 1},
        "rewards": [{"name": "desk", "type": "webhook", "url": url, "max_concurrency": 1}],
        "rloo": {"num_generations": 2, "beta": 0.02, "num_iterations": 2},
        "sampling": {"max_completion_length": 6},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_step": 2, "max_steps": STEPS, "seed": 7},
        "checkpoints": {"every_steps": 4}
    })
}

/// The results that must not depend on interruptions.
#[derive(Debug, PartialEq)]
struct Outcome {
    adapter: Vec<u8>,
    metrics: Vec<Value>,
    samples: Vec<Value>,
    /// Step, phase and samples of every different request.
    asked: BTreeSet<String>,
}

async fn outcome(server: &Server, job: &str, desk: &Desk) -> Outcome {
    server.job_in_state(job, "succeeded").await;
    let mut metrics = server.get(&format!("/jobs/{job}/metrics")).await["data"].as_array().unwrap().clone();
    for row in &mut metrics {
        let of_machine = ["step_time", "tokens_per_second", "memory", "latency"];
        row.as_object_mut().unwrap().retain(|name, _| !of_machine.iter().any(|part| name.contains(part)));
    }
    let mut samples = Vec::new();
    let mut next = Some(String::new());
    while let Some(after) = next {
        let after = if after.is_empty() { after } else { format!("&after={after}") };
        let page = server.get(&format!("/jobs/{job}/samples?limit=100{after}")).await;
        samples.extend(page["data"].as_array().unwrap().iter().cloned());
        next = page["next"].as_str().map(str::to_owned);
    }
    let content =
        |request: Value| format!("{} {}", json!([request["job"]["step"], request["job"]["phase"]]), request["samples"]);
    Outcome {
        adapter: server.adapter(job, Some(Which::Last)).await,
        metrics,
        samples,
        asked: desk.asked().into_iter().map(content).collect(),
    }
}

/// Checks that each id has one body, and that no sample is requested under two ids.
fn check_ledger(what: &str, desk: &Desk) {
    let (mut bodies, mut ids) = (BTreeMap::new(), BTreeMap::new());
    for body in &desk.books().asked {
        let request: Value = serde_json::from_slice(body).unwrap();
        let id = request["id"].as_str().unwrap().to_owned();
        assert!(bodies.entry(id.clone()).or_insert(body) == &body, "{what}: {id} has two bodies");
        let content = format!("{} {}", request["job"], request["samples"]);
        assert_eq!(ids.entry(content).or_insert(id.clone()), &id, "{what}: the same samples under two ids");
    }
}

/// Checks the events: rewinds revoke steps, and the remaining ones contain every step once.
async fn check_history(what: &str, server: &Server, job: &str) {
    let mut events = Vec::new();
    let mut next = Some("0".to_owned());
    while let Some(after) = next {
        let page = server.get(&format!("/jobs/{job}/events?limit=100&after={after}")).await;
        events.extend(page["data"].as_array().unwrap().iter().cloned());
        next = page["next"].as_str().map(str::to_owned);
    }
    let mut steps: Vec<u64> = Vec::new();
    for event in &events {
        let step = event["data"]["step"].as_u64();
        match (event["type"].as_str().unwrap(), step) {
            ("step", Some(step)) if event["data"]["kind"] == "train" => steps.push(step),
            ("rewind", Some(step)) => steps.retain(|done| *done <= step),
            _ => {}
        }
    }
    assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "{what}: {events:?}");
}

/// Returns the ids of the requests whose answers are in the journal.
async fn answered(data: &Path) -> BTreeSet<String> {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(data.join("rlood.db"));
    let mut database = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let rows = sqlx::query("SELECT request_id FROM journal WHERE answer IS NOT NULL").fetch_all(&mut database).await;
    rows.unwrap().iter().map(|row| row.get("request_id")).collect()
}

async fn gone(pid: u32) {
    let begun = Instant::now();
    while is_alive(pid) {
        assert!(begun.elapsed() < Duration::from_secs(30), "process {pid} does not end");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[derive(Debug, Clone, Copy)]
enum Disturbance {
    /// Kills the worker (SIGKILL) while the request waits for its answer.
    WorkerBeforeAnswer,
    /// Kills the worker (SIGKILL) this many ms after the answer.
    WorkerAfterAnswer(u64),
    /// Kills the server (SIGKILL), and with it its worker, while the request waits.
    Server,
    /// Sends SIGTERM to the server while the request waits.
    Shutdown,
    /// Pauses and resumes the job while the request waits.
    Pause,
}

#[tokio::test]
async fn whatever_is_killed_whenever_the_run_is_the_undisturbed_one_and_asks_no_answer_again() {
    use Disturbance::{Pause, Server as ServerKilled, Shutdown, WorkerAfterAnswer, WorkerBeforeAnswer};
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let (desk, url) = Desk::start().await;
    let mut server = Server::start(&data, "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;

    let job = server.submit(&spec(&url)).await;
    let expected = outcome(&server, &job, &desk).await;
    // Three evaluations; four rollouts, each in one request that is too large and its halves.
    assert_eq!(desk.asked().len(), 15);
    check_ledger("undisturbed", &desk);
    check_history("undisturbed", &server, &job).await;

    let disturbances = [
        (0, WorkerBeforeAnswer),
        (2, WorkerBeforeAnswer),
        (3, WorkerAfterAnswer(0)),
        (5, WorkerAfterAnswer(15)),
        (6, ServerKilled),
        (6, WorkerAfterAnswer(60)),
        (7, Shutdown),
        (10, Pause),
        (12, WorkerBeforeAnswer),
        (14, WorkerAfterAnswer(5)),
    ];
    for (number, disturbance) in disturbances {
        let what = format!("request {number}, {disturbance:?}");
        let mut reached = desk.watch(number, !matches!(disturbance, WorkerAfterAnswer(_)));
        let worker = server.worker_pids(1).await[0];
        let job = server.submit(&spec(&url)).await;
        tokio::time::timeout(Duration::from_secs(120), reached.recv()).await.unwrap_or_else(|_| panic!("{what}"));
        match disturbance {
            WorkerBeforeAnswer => signal("KILL", worker),
            WorkerAfterAnswer(after_ms) => {
                tokio::time::sleep(Duration::from_millis(after_ms)).await;
                signal("KILL", worker);
            }
            ServerKilled => {
                server.child.kill().unwrap();
                server.child.wait().unwrap();
            }
            Shutdown => {
                signal("TERM", server.child.id());
                assert!(server.child.wait().unwrap().success(), "{what}");
            }
            Pause => {
                server.post(&format!("/jobs/{job}/pause"), &json!({})).await;
                server.job_in_state(&job, "paused").await;
            }
        }
        if !matches!(disturbance, Pause) {
            gone(worker).await;
        }
        // From here on, samples whose answers are in the journal must not be requested.
        let (settled, before) = (answered(&data).await, desk.asked().len());
        match disturbance {
            WorkerBeforeAnswer | WorkerAfterAnswer(_) => {}
            ServerKilled | Shutdown => server = Server::start(&data, "cpu"),
            Pause => drop(server.post(&format!("/jobs/{job}/resume"), &json!({})).await),
        }
        let found = outcome(&server, &job, &desk).await;
        assert!(found.adapter == expected.adapter, "{what}: another adapter");
        assert_eq!(found.metrics, expected.metrics, "{what}");
        assert_eq!(found.samples, expected.samples, "{what}");
        assert_eq!(found.asked, expected.asked, "{what}");
        check_ledger(&what, &desk);
        check_history(&what, &server, &job).await;
        for request in &desk.asked()[before..] {
            assert!(!settled.contains(request["id"].as_str().unwrap()), "{what}: answered and asked again: {request}");
        }
        // At most one request was in progress.
        let repeated = desk.asked().len() - expected.asked.len();
        assert!(repeated <= 1, "{what}: {repeated} requests are repeated");
        assert_eq!(answered(&data).await, BTreeSet::new(), "{what}: a job that is over leaves no journal");
    }
}
