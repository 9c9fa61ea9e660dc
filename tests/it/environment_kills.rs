//! An environment that is killed in the middle of a job: with its state on disk nothing is different, without it episodes begin again
//! and that is said.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use rlood_client::Which;
use serde_json::{Value, json};

use crate::env_serve::{Serving, children_of, has_python};
use crate::processes::{Server, register, signal};
use crate::server::SECRET;

/// Says how many letters the answer has, pays for vowels, and writes a line to a file for each turn that it takes for the first time.
const GAME: &str = r#"
import os

class Talk:
    def reset(self, row, seed):
        self.seed, self.turns = seed, 0
        return "Say it again."

    def step(self, message):
        if not self.replaying:
            with open(os.environ["EXECUTED"], "a") as file:
                file.write("%d %d %s\n" % (self.seed, self.turns, message["content"].encode().hex()))
        self.turns += 1
        vowels = sum(letter in "aeiou" for letter in message["content"])
        return "%d letters." % len(message["content"]), (vowels + self.seed + self.turns) % 5 / 5, self.turns == 3
"#;

/// Stands between the job and its environment. After one of the answers it kills the environment, and loses the answer.
#[derive(Clone)]
struct Line(Arc<Inner>);

struct Inner {
    http: reqwest::Client,
    folder: PathBuf,
    environment: Mutex<Serving>,
    /// The number of the turn whose answer is lost; 0 = none.
    kill_at: u64,
    turns: AtomicU64,
    /// Number of requests to begin an episode again.
    restarted: AtomicU64,
    /// The answers that the environment gave, by request id.
    answers: Mutex<BTreeMap<String, Vec<Bytes>>>,
}

impl Line {
    async fn start(folder: &Path, keeps_state: bool, kill_at: u64) -> (Self, String) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("game.py"), GAME).unwrap();
        let line = Line(Arc::new(Inner {
            http: reqwest::Client::builder().no_proxy().build().unwrap(),
            folder: folder.to_owned(),
            environment: Mutex::new(environment(folder, keeps_state)),
            kill_at,
            turns: AtomicU64::new(0),
            restarted: AtomicU64::new(0),
            answers: Mutex::default(),
        }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/Talk", listener.local_addr().unwrap());
        let handle = move |State((line, keeps_state)): State<(Line, bool)>, headers: HeaderMap, body: Bytes| async move {
            line.pass(headers, body, keeps_state).await
        };
        let app = Router::new().fallback(handle).with_state((line.clone(), keeps_state));
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (line, url)
    }

    async fn pass(&self, mut headers: HeaderMap, body: Bytes, keeps_state: bool) -> Response {
        let url = format!("{}/Talk", self.0.environment.lock().unwrap().url);
        headers.remove("host");
        headers.remove("content-length");
        let Ok(answer) = self.0.http.post(url).headers(headers).body(body.clone()).send().await else {
            return StatusCode::BAD_GATEWAY.into_response();
        };
        let (status, Ok(answer)) = (answer.status(), answer.bytes().await) else {
            return StatusCode::BAD_GATEWAY.into_response();
        };
        let request: Value = serde_json::from_slice(&body).unwrap();
        if status == 200 && request["type"] != "env.ping" {
            let id = request["id"].as_str().unwrap().to_owned();
            self.0.answers.lock().unwrap().entry(id).or_default().push(answer.clone());
        }
        if request["type"] == "env.reset.request" && request["episode"]["attempt"] != 0 {
            self.0.restarted.fetch_add(1, Ordering::SeqCst);
        }
        if request["type"] == "env.step.request" && self.0.turns.fetch_add(1, Ordering::SeqCst) + 1 == self.0.kill_at {
            let line = self.clone();
            tokio::task::spawn_blocking(move || line.kill(keeps_state)).await.unwrap();
            return StatusCode::BAD_GATEWAY.into_response();
        }
        (StatusCode::from_u16(status.as_u16()).unwrap(), answer).into_response()
    }

    /// Kills the environment and starts it again.
    fn kill(&self, keeps_state: bool) {
        let mut running = self.0.environment.lock().unwrap();
        children_of(running.child.id()).into_iter().for_each(|pid| signal("KILL", pid));
        running.child.kill().unwrap();
        running.child.wait().unwrap();
        *running = environment(&self.0.folder, keeps_state);
    }

    /// The turns that were taken, sorted.
    fn executed(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.0.folder.join("executed")).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

fn environment(folder: &Path, keeps_state: bool) -> Serving {
    let executed = folder.join("executed");
    let arguments = ["game.py:Talk", "--listen", "127.0.0.1:0", "--state", "state"];
    let arguments = if keeps_state { &arguments[..] } else { &arguments[..3] };
    Serving::start_with(folder, arguments, &[("EXECUTED", executed.to_str().unwrap())])
}

fn spec(url: &str) -> Value {
    let records: Vec<Value> = (0..6).map(|n| json!({"prompt": format!("Say the number {n}.")})).collect();
    json!({
        "model": "tiny",
        "dataset": {"records": records},
        "environment": {"url": url, "secret": SECRET, "max_turns": 4, "max_episode_tokens": 90,
                        "max_observation_tokens": 16, "max_concurrency": 1},
        "rloo": {"num_generations": 2, "beta": 0.02},
        "sampling": {"max_completion_length": 8},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_step": 2, "max_steps": 3, "seed": 7},
    })
}

/// The bytes of the job's adapter, and its metrics and events.
async fn trained(server: &Server, url: &str) -> (Vec<u8>, Vec<Value>, Vec<Value>) {
    let job = server.submit(&spec(url)).await;
    server.job_in_state(&job, "succeeded").await;
    let list = |what: &str| format!("/jobs/{job}/{what}");
    let metrics = server.get(&list("metrics")).await["data"].as_array().unwrap().clone();
    let (mut events, mut after) = (Vec::new(), Some(String::new()));
    while let Some(from) = after {
        let page = server.get(&list(&format!("events?limit=100{from}"))).await;
        events.extend(page["data"].as_array().unwrap().clone());
        let next =
            page["next"].as_str().map(str::to_owned).or_else(|| page["next"].as_u64().map(|next| next.to_string()));
        after = next.map(|next| format!("&after={next}"));
    }
    (server.adapter(&job, Some(Which::Last)).await, metrics, events)
}

fn restarts(metrics: &[Value]) -> f64 {
    metrics.iter().filter_map(|row| row["environment/restarts"].as_f64()).sum()
}

fn warnings(events: &[Value]) -> usize {
    events.iter().filter(|event| event.to_string().contains("environment_restarted")).count()
}

#[tokio::test]
async fn a_killed_environment_changes_nothing_with_its_state_and_is_counted_without() {
    if !has_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny")).await;

    let (calm, url) = Line::start(&dir.path().join("calm"), true, 0).await;
    let (expected, metrics, events) = trained(&server, &url).await;
    let turns = calm.executed();
    assert!(turns.len() > 12, "{turns:?}");
    assert_eq!((restarts(&metrics), warnings(&events)), (0.0, 0));

    let (killed, url) = Line::start(&dir.path().join("killed"), true, 9).await;
    let (adapter, metrics, events) = trained(&server, &url).await;
    assert!(adapter == expected, "another result after the environment was killed");
    assert_eq!(killed.executed(), turns, "a turn was taken twice, or not at all");
    assert_eq!((restarts(&metrics), warnings(&events)), (0.0, 0));
    let answers = killed.0.answers.lock().unwrap().clone();
    assert_eq!(killed.0.restarted.load(Ordering::SeqCst), 0);
    assert!(answers.values().any(|answers| answers.len() == 2), "the lost answer was asked for again");
    assert!(answers.values().all(|answers| answers.iter().all(|answer| *answer == answers[0])), "the same bytes");

    let (forgetful, url) = Line::start(&dir.path().join("forgetful"), false, 9).await;
    let (adapter, metrics, events) = trained(&server, &url).await;
    let counted = restarts(&metrics);
    assert!(counted >= 1.0 && warnings(&events) >= 1, "{counted} restarts, {} warnings", warnings(&events));
    let said = events.iter().find(|event| event.to_string().contains("environment_restarted")).unwrap().to_string();
    assert!(said.contains("not guaranteed to be those of a run without the loss"), "{said}");
    // The episode was begun again as another attempt. The adapter may differ, and with a model this sure of itself it need not.
    assert!(forgetful.0.restarted.load(Ordering::SeqCst) >= 1 && !adapter.is_empty());
    assert!(!forgetful.executed().is_empty());
    // The rewards are those that the environment gave: none is invented for the episodes that it forgot.
    for row in metrics.iter().filter(|row| !row["environment/return_mean"].is_null()) {
        assert_eq!(row["rewards/environment/mean"], row["environment/return_mean"]);
        assert_eq!(row["environment/missing_fraction"], 0.0);
    }
}
