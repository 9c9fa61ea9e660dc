//! Preflight over HTTP with real processes: the bundled model, a local reward service, and failures.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::processes::{Server, register};

/// A service that scores exact answers 1 and all others 0, announces its range, and records requests.
struct Grader {
    url: String,
    seen: Arc<Mutex<Vec<Value>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Grader {
    async fn start(delay: Duration) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/score", listener.local_addr().unwrap());
        let seen: Arc<Mutex<Vec<Value>>> = Arc::default();
        let kept = seen.clone();
        let answer = move |body: axum::body::Bytes| {
            let kept = kept.clone();
            async move {
                let request: Value = serde_json::from_slice(&body).unwrap();
                kept.lock().unwrap().push(request.clone());
                if request["type"] == "reward.ping" {
                    return (StatusCode::OK, json!({"range": [0, 1]}).to_string());
                }
                tokio::time::sleep(delay).await;
                let score = |sample: &Value| {
                    let right = sample["completion"].as_str().unwrap().trim() == sample["columns"]["answer"];
                    json!(f64::from(u8::from(right)))
                };
                let rewards: Vec<Value> = request["samples"].as_array().unwrap().iter().map(score).collect();
                (StatusCode::OK, json!({"rewards": rewards}).to_string())
            }
        };
        let app = Router::new().fallback(answer);
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, seen, task }
    }

    fn asked(&self) -> Vec<Value> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|request| request["type"] == "reward.score.request").cloned().collect()
    }
}

impl Drop for Grader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets")
}

/// The bundled model in a directory of its own.
fn unpack_model(to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(assets().join("tiny")).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn rows() -> Vec<Value> {
    let text = std::fs::read_to_string(assets().join("tiny-data/train.jsonl")).unwrap();
    text.lines().take(64).map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn job(rewards: Value) -> Value {
    json!({
        "model": "tiny", "dataset": {"records": rows()}, "rewards": rewards,
        "sampling": {"max_completion_length": 12}, "training": {"prompts_per_step": 4, "max_steps": 50}
    })
}

fn webhook(url: &str) -> Value {
    json!([{"name": "grader", "type": "webhook", "url": url}])
}

async fn server(dir: &tempfile::TempDir) -> Server {
    let server = Server::start(&dir.path().join("data"), "none");
    let model = dir.path().join("tiny");
    unpack_model(&model);
    register(&server, "tiny", &model).await;
    server
}

async fn preflight(server: &Server, query: &str, job: &Value) -> Value {
    let answer = server.post(&format!("/jobs/validate?probe=true{query}"), job).await;
    assert_eq!(answer["valid"], true, "{answer}");
    answer["probe"].clone()
}

fn codes(report: &Value) -> Vec<&str> {
    report["verdict"].as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_preflight_measures_the_job_and_says_that_it_is_ready() {
    let dir = tempfile::tempdir().unwrap();
    let (server, grader) = (server(&dir).await, Grader::start(Duration::ZERO).await);
    let found = preflight(&server, "&probe_prompts=8", &job(webhook(&grader.url))).await;
    assert_eq!((&found["complete"], &found["error"]), (&json!(true), &Value::Null), "{found}");
    assert_eq!((&found["prompts"], &found["completions"]), (&json!(8), &json!(32)));
    assert_eq!(found["reward_range"], json!([0.0, 1.0]));
    let reward = found["reward"].as_f64().unwrap();
    assert!(reward > 0.0 && reward < 0.95, "{found}");
    assert_eq!(found["rewards"]["grader"]["mean"].as_f64().unwrap(), reward);
    assert_eq!(found["rewards"]["grader"]["missing_fraction"], 0.0);
    assert!(found["rewards"]["grader"]["latency_p50_s"].as_f64().unwrap() > 0.0);
    assert_eq!(codes(&found), ["ready"], "{found}");
    let seconds = &found["step_seconds"];
    let part = |name: &str| seconds[name].as_f64().unwrap_or_else(|| panic!("{name}: {found}"));
    assert!((part("generate") + part("reward") + part("train") - part("total")).abs() < 1e-9);
    assert!((found["eta_s"].as_f64().unwrap() - 50.0 * part("total")).abs() < 1e-6);
    assert!(found["peak_memory_bytes"].as_u64().unwrap() > 1_000_000);
    assert!(found["checkpoints_bytes"].as_u64().unwrap() > 0 && found["free_disk_bytes"].as_u64().unwrap() > 0);
    let sample = &found["samples"][0];
    assert!(
        sample["prompt"].is_string() && sample["completion"].is_string() && sample["rewards"]["grader"].is_number()
    );

    // The service can distinguish a preflight from a job, and rows have their numbers in the dataset.
    let asked = grader.asked();
    assert!(asked.iter().all(|request| request["job"]["phase"] == "probe"), "{asked:?}");
    let mut rows: Vec<&str> = asked
        .iter()
        .flat_map(|request| request["samples"].as_array().unwrap())
        .map(|s| s["prompt_id"].as_str().unwrap())
        .collect();
    rows.sort_unstable();
    rows.dedup();
    assert_eq!(rows, ["row_0", "row_16", "row_24", "row_32", "row_40", "row_48", "row_56", "row_8"]);

    // The same seed gives the same completions; nothing was stored.
    let again = preflight(&server, "&probe_prompts=8", &job(webhook(&grader.url))).await;
    assert_eq!(again["samples"], found["samples"]);
    assert_eq!(server.get("/jobs").await["data"], json!([]));
    assert_eq!(server.get("/datasets").await["data"], json!([]));
}

#[tokio::test]
async fn the_verdict_names_what_stands_against_a_job() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(&dir).await;
    let mut never = job(json!([{"type": "regex", "pattern": "zebra"}]));
    let found = preflight(&server, "", &never).await;
    assert_eq!(codes(&found)[0], "sft_first", "{found}");
    never["rewards"] = json!([{"type": "regex", "pattern": "."}]);
    let found = preflight(&server, "", &never).await;
    assert_eq!(codes(&found)[0], "nothing_to_learn", "{found}");

    let mut cold = job(json!([{"type": "exact_match", "column": "answer"}]));
    cold["sampling"]["temperature"] = json!(0.01);
    let found = preflight(&server, "", &cold).await;
    assert!(codes(&found).contains(&"raise_temperature"), "{found}");

    let mut short = job(json!([{"type": "number_match", "column": "answer"}]));
    short["sampling"]["max_completion_length"] = json!(1);
    let found = preflight(&server, "", &short).await;
    assert_eq!(found["truncated_fraction"], 1.0, "{found}");
    assert!(codes(&found).contains(&"raise_max_completion_length"), "{found}");

    // Much slower than the rest of a step on a busy machine.
    let slow = Grader::start(Duration::from_secs(6)).await;
    let mut slowly = job(webhook(&slow.url));
    slowly["training"]["prompts_per_step"] = json!(2);
    let found = preflight(&server, "&probe_prompts=2", &slowly).await;
    assert!(codes(&found).contains(&"reward_is_the_bottleneck"), "{found}");
    assert!(found["rewards"]["grader"]["latency_p50_s"].as_f64().unwrap() >= 6.0);
}

#[tokio::test]
async fn a_reward_service_that_is_down_or_hangs_is_the_verdict_and_ends_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(&dir).await;
    let found = preflight(&server, "", &job(webhook("http://127.0.0.1:9/score"))).await;
    assert_eq!(codes(&found), ["reward_not_usable"], "{found}");
    assert!(found["verdict"][0]["detail"].as_str().unwrap().contains("refused"), "{found}");
    assert_eq!(found["missing_fraction"], 1.0);

    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/score", hanging.local_addr().unwrap());
    let begun = Instant::now();
    let found = preflight(&server, "&probe_timeout_s=20", &job(webhook(&url))).await;
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    assert_eq!((codes(&found), &found["complete"]), (vec!["reward_not_usable"], &json!(false)), "{found}");
    assert!(found["verdict"][0]["detail"].as_str().unwrap().contains("no answer within"), "{found}");
}

#[tokio::test]
async fn one_preflight_runs_at_a_time_and_ends_with_its_client() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(&dir).await;
    let slow = Grader::start(Duration::from_secs(600)).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let send = || {
        let request = http.post(format!("{}/jobs/validate?probe=true", server.url)).json(&job(webhook(&slow.url)));
        request.timeout(Duration::from_secs(120)).send()
    };
    let first = tokio::spawn(send());
    let begun = Instant::now();
    while slow.asked().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60) && !first.is_finished());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let second = send().await.unwrap();
    assert_eq!(second.status(), 429);
    assert!(second.headers()["retry-after"].to_str().unwrap().parse::<u64>().unwrap() > 0);
    assert_eq!(second.json::<Value>().await.unwrap()["code"], "too_many_requests");
    // The client disconnects: its slot is free immediately, long before the preflight would have ended.
    first.abort();
    let begun = Instant::now();
    let quick = job(json!([{"type": "exact_match", "column": "answer"}]));
    loop {
        let answer = http.post(format!("{}/jobs/validate?probe=true", server.url)).json(&quick).send().await.unwrap();
        if answer.status() == 200 {
            break;
        }
        assert_eq!(answer.status(), 429);
        assert!(begun.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_model_that_cannot_be_trained_is_the_verdict_too() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(&dir).await;
    let broken = dir.path().join("broken");
    unpack_model(&broken);
    let mut bytes = std::fs::read(broken.join("model.safetensors")).unwrap();
    let end = bytes.len();
    bytes[end - 2..].fill(0xff);
    std::fs::write(broken.join("model.safetensors"), bytes).unwrap();
    register(&server, "broken", &broken).await;
    let mut spec = job(json!([{"type": "exact_match", "column": "answer"}]));
    spec["model"] = json!("broken");
    let found = preflight(&server, "", &spec).await;
    assert_eq!((codes(&found), &found["error"]["code"]), (vec!["not_measured"], &json!("model_not_finite")), "{found}");
    assert!(found["verdict"][0]["detail"].as_str().unwrap().contains("NaN"), "{found}");
    // An invalid job gets no preflight.
    let answer = server.post("/jobs/validate?probe=true", &json!({"model": "tiny"})).await;
    assert_eq!((&answer["valid"], &answer["probe"]), (&json!(false), &Value::Null));
}
