//! Jobs whose episodes are played with an environment over HTTP: exact results after kills and outages, and no turn that is executed
//! twice.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use rlood_client::Which;
use serde_json::{Value, json};

use crate::processes::{Server, register, signal};

mod late;

const STEPS: u64 = 4;
const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

/// An environment that says how long the answer was, pays for vowels, and keeps the last answer of each episode.
#[derive(Clone, Default)]
struct Environment(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// The last answered request of each episode and attempt, with its answer.
    last: Mutex<BTreeMap<String, (Value, Value)>>,
    /// How often each turn of each episode was executed.
    executed: Mutex<BTreeMap<String, u32>>,
    closed: Mutex<u32>,
    is_down: AtomicBool,
    /// Receives the requests with their answers, which are then given by callback; without it answers are given at once.
    callbacks: Mutex<Option<tokio::sync::mpsc::UnboundedSender<(Value, Value)>>>,
    /// Number of requests with each id.
    asked: Mutex<BTreeMap<String, u32>>,
    /// Requests that broke the contract.
    flaws: Mutex<Vec<String>>,
}

impl Environment {
    async fn start() -> (Self, String) {
        let environment = Self::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/env", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer).with_state(environment.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (environment, url)
    }

    fn assert_no_flaw(&self) {
        let flaws = self.0.flaws.lock().unwrap();
        assert!(flaws.is_empty(), "{flaws:?}");
        let executed = self.0.executed.lock().unwrap();
        let twice: Vec<_> = executed.iter().filter(|(_, times)| **times != 1).collect();
        assert!(!executed.is_empty() && twice.is_empty(), "executed twice: {twice:?}");
    }
}

async fn answer(State(environment): State<Environment>, headers: HeaderMap, body: Bytes) -> Response {
    let inner = &environment.0;
    if inner.is_down.load(Ordering::Relaxed) {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let body: Value = serde_json::from_slice(&body).unwrap();
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default();
    let (id, kind) = (body["id"].as_str().unwrap(), body["type"].as_str().unwrap());
    let flaw = |what: &str| inner.flaws.lock().unwrap().push(format!("{what}: {body}"));
    if text("webhook-id") != id || text("idempotency-key") != id || text("webhook-signature").is_empty() {
        flaw("headers");
    }
    if kind == "env.ping" {
        return Json(json!({"version": "1"})).into_response();
    }
    if text("rlood-episode") != body["episode"]["id"].as_str().unwrap() {
        flaw("rlood-episode");
    }
    let episode = format!("{} {}", body["episode"]["id"], body["episode"]["attempt"]);
    let reply = match kind {
        "env.reset.request" => {
            let seed = body["episode"]["seed"].as_u64().unwrap();
            json!({"version": "1", "id": id, "session": format!("s{}", seed % 7),
                   "messages": [{"role": "user", "content": "Say it again."}]})
        }
        "env.step.request" => {
            if body["session"].is_null() || body["message"]["role"] != "assistant" {
                flaw("session or message");
            }
            let said = body["text"].as_str().unwrap();
            let vowels = said.chars().filter(|letter| "aeiou".contains(*letter)).count();
            let luck = body["episode"]["index"].as_u64().unwrap() * 3 + body["turn"].as_u64().unwrap();
            json!({"version": "1", "id": id, "reward": ((vowels as u64 + luck) % 5) as f64 / 5.0, "done": body["turn"] == 2,
                   "messages": [{"role": "user", "content": format!("{} letters.", said.len())}]})
        }
        "env.close.request" => {
            *inner.closed.lock().unwrap() += 1;
            return StatusCode::NO_CONTENT.into_response();
        }
        other => {
            flaw(other);
            return StatusCode::BAD_REQUEST.into_response();
        }
    };
    let mut last = inner.last.lock().unwrap();
    if let Some((known, answer)) = last.get(&episode).filter(|(known, _)| known["id"] == body["id"]) {
        *inner.asked.lock().unwrap().entry(id.to_owned()).or_default() += 1;
        if known != &body {
            flaw("another body under the same id");
        }
        return Json(answer.clone()).into_response();
    }
    *inner.executed.lock().unwrap().entry(format!("{episode} {}", body["turn"])).or_default() += 1;
    last.insert(episode, (body.clone(), reply.clone()));
    *inner.asked.lock().unwrap().entry(id.to_owned()).or_default() += 1;
    if let Some(callbacks) = inner.callbacks.lock().unwrap().as_ref() {
        callbacks.send((body, reply)).unwrap();
        return (StatusCode::ACCEPTED, Json(json!({"eta_ms": 1000}))).into_response();
    }
    Json(reply).into_response()
}

fn spec(url: &str) -> Value {
    let records: Vec<Value> =
        (0..6).map(|n| json!({"prompt": [{"role": "user", "content": format!("Say the number {n}.")}]})).collect();
    json!({
        "model": "tiny",
        "dataset": {"records": records},
        "environment": {"url": url, "secret": SECRET, "max_turns": 4, "max_episode_tokens": 90,
                        "max_observation_tokens": 16, "max_outage_s": 1, "params": {"letters": "aeiou"}},
        "rewards": [{"name": "short", "type": "length", "max_words": 20, "weight": 0.1}],
        "rloo": {"num_generations": 2, "beta": 0.02},
        "sampling": {"max_completion_length": 8},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_step": 2, "max_steps": STEPS, "seed": 7},
        "checkpoints": {"every_steps": 2},
    })
}

async fn start(dir: &Path) -> Server {
    start_with(dir, &[]).await
}

async fn start_with(dir: &Path, flags: &[&str]) -> Server {
    let server = Server::start_with(&dir.join("data"), "cpu", flags);
    register(&server, "tiny", &Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny")).await;
    server
}

/// The trained adapter, and the metrics that do not depend on the machine or on interruptions.
async fn outcome(server: &Server, job: &str) -> (Vec<u8>, Vec<Value>) {
    server.job_in_state(job, "succeeded").await;
    let mut metrics = server.get(&format!("/jobs/{job}/metrics")).await["data"].as_array().unwrap().clone();
    for row in &mut metrics {
        let of_machine = ["step_time", "tokens_per_second", "memory", "latency", "environment/seconds"];
        row.as_object_mut().unwrap().retain(|name, _| !of_machine.iter().any(|part| name.contains(part)));
    }
    (server.adapter(job, Some(Which::Last)).await, metrics)
}

#[tokio::test]
async fn a_job_with_an_environment_is_exact_and_ends_with_the_same_bytes_after_kills_and_outages() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path()).await;
    let (environment, url) = Environment::start().await;
    let document = spec(&url);
    let job = server.submit(&document).await;
    let expected = outcome(&server, &job).await;
    environment.assert_no_flaw();
    for row in expected.1.iter().filter(|row| !row["loss"].is_null()) {
        assert_eq!(row["sampling/log_ratio_max"], 0.0);
        assert!(row["environment/turns/mean"].as_f64() >= Some(1.0), "{row}");
        assert_eq!(row["rewards/environment/mean"], row["environment/return_mean"]);
    }
    let turns = expected.1.iter().filter_map(|row| row["environment/turns/max"].as_f64()).fold(0.0, f64::max);
    assert!(turns >= 2.0, "some episodes have several turns: {turns}");
    let closed = async {
        while *environment.0.closed.lock().unwrap() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed).await.expect("episodes are closed");
    let view = server.get(&format!("/jobs/{job}")).await;
    assert!(!view.to_string().contains(SECRET), "secrets are never shown");
    assert_eq!(view["plan"]["rewards"][1]["type"], "environment");

    // A fork keeps the secret: its requests are signed too.
    let fork = json!({"from_step": 2, "overrides": {"training": {"max_steps": STEPS + 1}}});
    let fork = server.post(&format!("/jobs/{job}/fork"), &fork).await;
    server.job_in_state(fork["id"].as_str().unwrap(), "succeeded").await;
    environment.assert_no_flaw();
    let refused = server.post("/jobs/validate", &spec("http://169.254.169.254/env")).await;
    assert_eq!(refused["errors"][0]["pointer"], "/environment/url", "{refused}");

    // The worker is killed in the middle.
    let job = server.submit(&document).await;
    server.job_when(&job, "step 1", |view| view["step"].as_u64() >= Some(1)).await;
    signal("KILL", server.worker_pids(1).await[0]);
    assert!(outcome(&server, &job).await == expected, "another result after a kill");

    // The whole service is killed.
    let job = server.submit(&document).await;
    server.wait_for_checkpoint(&job).await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    server = Server::start(&dir.path().join("data"), "cpu");
    assert!(outcome(&server, &job).await == expected, "another result after the service was killed");
    environment.assert_no_flaw();

    // The environment is away: the job pauses, and resumes by itself when it is back.
    environment.0.is_down.store(true, Ordering::Relaxed);
    let job = server.submit(&document).await;
    let paused = server.job_when(&job, "paused", |view| view["state"] == "paused").await;
    assert_eq!(paused["status_reason"], "environment_outage", "{paused}");
    environment.0.is_down.store(false, Ordering::Relaxed);
    assert!(outcome(&server, &job).await == expected, "another result after an outage");
    environment.assert_no_flaw();
}

#[tokio::test]
async fn a_preflight_of_a_job_with_an_environment_plays_its_episodes() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let (environment, url) = Environment::start().await;
    let answer = server.post("/jobs/validate?probe=true&probe_prompts=4", &spec(&url)).await;
    let found = &answer["probe"];
    assert_eq!((&found["complete"], &found["error"]), (&json!(true), &Value::Null), "{answer}");
    assert_eq!((&found["prompts"], &found["completions"]), (&json!(4), &json!(8)), "{answer}");
    let sample = &found["samples"][0]["rewards"];
    assert!(sample["environment"].is_number() && sample["short"].is_number(), "{answer}");
    environment.assert_no_flaw();
    let begun = environment.0.executed.lock().unwrap().keys().filter(|key| key.ends_with(" null")).count();
    assert!(begun >= 8, "an episode for each completion: {begun}");
    assert_eq!(server.get("/jobs").await["data"], json!([]), "nothing is stored");
}
