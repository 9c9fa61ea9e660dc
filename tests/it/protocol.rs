//! Worker protocol versions: a worker of another version gets no jobs, and the message says which side to update.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use rlood::id::WorkerId;
use rlood::protocol::{PROTOCOL, read_claim};
use serde_json::{Value, json};

use crate::server::{Answer, SECRET, Server, job, records};

async fn call(server: &Server, path: &str, body: Value) -> Answer {
    let token = &server.state.config.worker_token;
    let request = Request::post(path)
        .header("authorization", format!("Bearer {token}"))
        .header("content-type", "application/json")
        .body(Body::from(body.to_string()));
    server.send(request.unwrap()).await
}

/// The registration of a worker from before the version number existed.
fn hello(worker: WorkerId) -> Value {
    json!({"worker": worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0.0.9"})
}

fn with_protocol(mut body: Value, number: u32) -> Value {
    body["protocol"] = json!(number);
    body
}

/// Returns the claim of the next job, as a worker receives it.
pub async fn claim(server: &Server) -> Value {
    let worker = WorkerId::new();
    assert_eq!(call(server, "/worker/register", with_protocol(hello(worker), PROTOCOL)).await.status, 200);
    let ask = json!({"worker": worker, "wait_ms": 0, "protocol": PROTOCOL});
    let claim = call(server, "/worker/claim", ask).await;
    assert_eq!(claim.status, 200, "{}", claim.text);
    claim.body
}

#[tokio::test]
async fn a_worker_of_another_protocol_gets_no_job_and_learns_what_to_update() {
    let server = Server::start().await;
    let job = server.create(job()).await;
    let refused = |answer: &Answer, advice: &str| {
        assert_eq!(
            (answer.status.as_u16(), &answer.body["code"]),
            (409, &json!("protocol_mismatch")),
            "{}",
            answer.text
        );
        let detail = answer.body["detail"].as_str().unwrap();
        assert!(detail.contains(advice) && detail.contains(env!("CARGO_PKG_VERSION")), "{detail}");
        assert_eq!(answer.body["retryable"], false);
    };
    let old = hello(WorkerId::new());
    refused(&call(&server, "/worker/register", with_protocol(old.clone(), 0)).await, "update the worker");
    refused(
        &call(&server, "/worker/register", with_protocol(old, PROTOCOL + 1)).await,
        "update and restart the server",
    );
    assert_eq!(server.get("/workers").await.body["data"], json!([]));

    // A worker that the server knows from before its update, and that asks for its next job.
    let known = WorkerId::new();
    let welcome = call(&server, "/worker/register", with_protocol(hello(known), PROTOCOL)).await;
    assert_eq!(welcome.body["protocol"], PROTOCOL, "{}", welcome.text);
    let ask = json!({"worker": known, "wait_ms": 0});
    refused(&call(&server, "/worker/claim", with_protocol(ask.clone(), 0)).await, "update the worker");
    refused(
        &call(&server, "/worker/claim", with_protocol(ask.clone(), PROTOCOL + 1)).await,
        "update and restart the server",
    );
    assert_eq!(server.get(&format!("/jobs/{job}")).await.body["state"], "queued");
    assert_eq!(call(&server, "/worker/claim", with_protocol(ask, PROTOCOL)).await.body["job"], json!(job));
}

/// A job that uses every part of a plan.
fn rich() -> Value {
    let mut job = job();
    job["dataset"] = json!({ "records": records(40) });
    job["rewards"] = json!([
        {"type": "number_match", "column": "answer"},
        {"name": "service", "type": "webhook", "url": "http://127.0.0.1:9/", "secret": SECRET, "cache": true,
         "headers": {"x-team": "a"}, "params": {"whatever": {"deep": [{"er": 1}]}}},
    ]);
    job["eval"] = json!({"fraction": 0.25, "every_steps": 5,
                         "rewards": [{"type": "length", "min_words": 1, "max_words": 5}]});
    job["early_stopping"] = json!({"metric": "eval_reward", "patience": 2, "min_delta": 0.1});
    job["doctor"] = json!({"on_alert": "note", "rules": {"kl_explosion": {"on_alert": "stop"}, "slow_reward": false}});
    job["sampling"] = json!({"chat_template_kwargs": {"enable_thinking": false}});
    job["metadata"] = json!({"team": "a"});
    job
}

#[tokio::test]
async fn what_a_worker_does_not_know_in_a_claim_is_an_error_wherever_it_stands() {
    let server = Server::start().await;
    server.create(rich()).await;
    let claim = claim(&server).await;
    read_claim(&claim).unwrap_or_else(|error| panic!("{error}: {claim:#}"));
    for place in [
        "",
        "/plan",
        "/plan/rloo",
        "/plan/rewards/0",
        "/plan/rewards/1",
        "/plan/eval/rewards/0",
        "/plan/doctor/rules/kl_explosion",
        "/secrets/service",
    ] {
        let mut newer = claim.clone();
        // Fields with default values too: an old worker cannot know whether they match its behavior.
        newer.pointer_mut(place).unwrap_or_else(|| panic!("{place}: {claim:#}"))["sideways"] = json!(false);
        let path = format!("{place}/sideways").trim_start_matches('/').replace('/', ".");
        assert_eq!(
            read_claim(&newer).unwrap_err().to_string(),
            format!("the job that the server sent has the field '{path}', which this version of rlood does not know")
        );
    }
}

/// The recorded names and values of the protocol, one per line, after the version number.
fn on_record() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/protocol/plan.txt").into()
}

/// With RLOOD_PROTOCOL_RECORD set, the record is written, unless it would change under the same version number.
#[tokio::test]
async fn a_plan_that_changes_comes_with_another_number() {
    let document = serde_json::to_value(rlood::http::openapi()).unwrap();
    let mut words =
        Words { schemas: &document["components"]["schemas"], seen: BTreeSet::new(), lines: BTreeSet::new() };
    words.add("Plan");
    let server = Server::start().await;
    server.create(job()).await;
    let claim = claim(&server).await;
    words.lines.extend(claim.as_object().unwrap().keys().map(|name| format!("Claim.{name}")));
    let found = words.lines;

    let recorded = std::fs::read_to_string(on_record()).unwrap();
    let (number, lines) = recorded.split_once('\n').unwrap();
    let recorded: BTreeSet<String> = lines.lines().map(str::to_owned).collect();
    let raised = number != format!("protocol {PROTOCOL}");
    let new: Vec<_> = found.difference(&recorded).collect();
    let gone: Vec<_> = recorded.difference(&found).collect();
    let same = new.is_empty() && gone.is_empty();
    if std::env::var_os("RLOOD_PROTOCOL_RECORD").is_some() && (raised || same) {
        let lines: String = found.iter().map(|line| format!("{line}\n")).collect();
        return std::fs::write(on_record(), format!("protocol {PROTOCOL}\n{lines}")).unwrap();
    }
    assert!(same || raised, "raise PROTOCOL in src/protocol.rs: new {new:#?}, gone {gone:#?}");
    assert!(!raised, "PROTOCOL is new: run this test with RLOOD_PROTOCOL_RECORD=1 once, and commit what it writes");
}

/// Fields and values of schemas and of everything that they refer to.
struct Words<'a> {
    schemas: &'a Value,
    seen: BTreeSet<String>,
    lines: BTreeSet<String>,
}

impl<'a> Words<'a> {
    fn add(&mut self, name: &str) {
        if self.seen.insert(name.to_owned()) {
            self.read(name, &self.schemas[name]);
        }
    }

    fn read(&mut self, of: &str, part: &'a Value) {
        match part {
            Value::Array(parts) => parts.iter().for_each(|part| self.read(of, part)),
            Value::Object(part) => part.iter().for_each(|(key, part)| self.keyword(of, key, part)),
            _ => {}
        }
    }

    fn keyword(&mut self, of: &str, key: &str, part: &'a Value) {
        match (key, part) {
            ("description" | "default" | "example" | "examples", _) => {}
            ("properties", Value::Object(fields)) => {
                for (name, field) in fields {
                    self.lines.insert(format!("{of}.{name}"));
                    self.read(of, field);
                }
            }
            ("enum", Value::Array(values)) => {
                let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                self.lines.extend(values.iter().map(|value| format!("{of} = {}", text(value))));
            }
            ("$ref", Value::String(to)) => self.add(to.rsplit('/').next().unwrap_or_default()),
            _ => self.read(of, part),
        }
    }
}

/// A fake server with fixed responses, except for the claim.
#[derive(Clone)]
struct Puppet {
    registered: (StatusCode, Value),
    claim: Value,
    finished: Arc<Mutex<Vec<(String, Value)>>>,
}

async fn answer(State(puppet): State<Puppet>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
    match path.as_str() {
        "/worker/register" => {
            let (status, body) = puppet.registered;
            (status, axum::Json(body)).into_response()
        }
        "/worker/claim" => axum::Json(puppet.claim).into_response(),
        _ => {
            puppet.finished.lock().unwrap().push((path, serde_json::from_slice(&body).unwrap_or_default()));
            StatusCode::NO_CONTENT.into_response()
        }
    }
}

/// Runs a worker process against the fake server; returns its exit code and its last log lines.
async fn worker_of(puppet: &Puppet) -> (Option<i32>, String) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().fallback(answer).with_state(puppet.clone());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_rlood"));
    command.args(["worker", "--server", &server]).env("RLOOD_WORKER_TOKEN", "sixteen-letters!").kill_on_drop(true);
    command.env("NO_PROXY", "127.0.0.1");
    let output = tokio::time::timeout(Duration::from_secs(120), command.output()).await.expect("it ends").unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test]
async fn a_worker_leaves_a_server_of_another_protocol_and_says_what_to_update() {
    let refusal = json!({"code": "protocol_mismatch", "detail": "the worker is older than the server: update it"});
    let older = json!({"heartbeat_ms": 5000, "lease_ms": 30_000, "protocol": 0});
    for (registered, words) in [
        ((StatusCode::CONFLICT, refusal), "the worker is older than the server: update it"),
        ((StatusCode::OK, older), "the server is older than this worker (worker protocol 0"),
    ] {
        let puppet = Puppet { registered, claim: Value::Null, finished: Arc::default() };
        let (code, said) = worker_of(&puppet).await;
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("cannot work for") && said.contains(words), "{said}");
    }
}

#[tokio::test]
async fn a_worker_gives_a_job_back_that_it_does_not_understand_and_leaves() {
    let server = Server::start().await;
    server.create(job()).await;
    let mut claim = claim(&server).await;
    claim["plan"]["rloo"]["sideways"] = json!(true);
    let registered = (StatusCode::OK, json!({"heartbeat_ms": 5000, "lease_ms": 30_000, "protocol": PROTOCOL}));
    let puppet = Puppet { registered, claim: claim.clone(), finished: Arc::default() };
    let (code, said) = worker_of(&puppet).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("update this worker") && said.contains("'plan.rloo.sideways'"), "{said}");
    let path = format!("/worker/jobs/{}/finish", claim["job"].as_str().unwrap());
    let body = json!({"attempt": claim["attempt"], "outcome": {"outcome": "requeued"}});
    assert_eq!(*puppet.finished.lock().unwrap(), [(path, body)]);
}

#[test]
fn the_worker_of_the_browser_tests_has_the_same_version() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/web/worker.mjs");
    let worker = std::fs::read_to_string(path).unwrap();
    assert!(
        worker.contains(&format!("const PROTOCOL = {PROTOCOL};")),
        "set PROTOCOL = {PROTOCOL} in tests/web/worker.mjs"
    );
}
