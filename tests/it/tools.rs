//! Jobs whose model calls tools without an environment: an HTTP tool and an MCP server, a worker that is killed between a call and its
//! answer, and what rewards see of the episodes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, Response, StatusCode, Uri};
use axum::response::IntoResponse;
use axum::{Json, Router};
use rlood_client::Which;
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, signal};
use crate::service::{Service, ok};

const STEPS: u64 = 4;
const KEY: &str = "Bearer key-of-the-tools";
const TEMPLATE: &str = "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }};{% endfor %}<tool_call><|im_end|>\n{% endif %}\
{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A model of random weights whose tokens often end a turn, and often are a whole call of a tool.
fn model_that_calls(dir: &Path) -> std::path::PathBuf {
    let model = model_copy(dir);
    let read = |file: &str| -> Value { serde_json::from_slice(&std::fs::read(model.join(file)).unwrap()).unwrap() };
    let mut tokenizer = read("tokenizer.json");
    // Single bytes that are no ASCII: no text of the test has them, and no merge makes them.
    let spare = |text: &str| {
        let mut letters = text.chars();
        let first = letters.next().unwrap();
        letters.next().is_none() && !first.is_ascii() && !['Ġ', 'Ċ', 'ĉ', 'č'].contains(&first)
    };
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap().clone();
    let mut spares: Vec<(String, u64)> = vocabulary
        .iter()
        .filter(|(text, _)| spare(text))
        .map(|(text, id)| (text.clone(), id.as_u64().unwrap()))
        .collect();
    spares.sort_by_key(|(_, id)| *id);
    let mut ends = vec![2];
    for (index, (old, id)) in spares.into_iter().enumerate() {
        let call = match index % 4 {
            0 => json!({"name": "add", "arguments": {"a": index, "b": 2}}),
            1 => json!({"name": "search", "arguments": {"query": format!("q{index}")}}),
            _ => {
                ends.push(id);
                continue;
            }
        };
        let text = format!("<tool_call>{call}</tool_call>");
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        vocabulary.remove(&old);
        vocabulary.insert(text.clone(), json!(id));
        let added = json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false});
        tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    }
    let write = |file: &str, text: String| std::fs::write(model.join(file), text).unwrap();
    write("tokenizer.json", tokenizer.to_string());
    write("generation_config.json", json!({"eos_token_id": ends, "pad_token_id": 3}).to_string());
    let mut config = read("tokenizer_config.json");
    config["chat_template"] = json!(TEMPLATE);
    write("tokenizer_config.json", config.to_string());
    model
}

/// The tools: `/add` in the Azure form, and `/mcp`.
#[derive(Clone, Default)]
struct Tools(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Calls by their ids, with the number of times that each was received.
    calls: Mutex<BTreeMap<String, (Value, u32)>>,
    lists: AtomicU32,
    /// The process to kill instead of an answer to the next call; 0 = none.
    victim: AtomicU32,
    is_forgetful: AtomicBool,
    flaws: Mutex<Vec<String>>,
}

impl Tools {
    async fn start() -> (Self, String) {
        let tools = Self::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer).with_state(tools.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (tools, url)
    }

    /// Records a call. Returns whether it is answered.
    fn record(&self, id: &str, call: &Value) -> bool {
        let mut calls = self.0.calls.lock().unwrap();
        let entry = calls.entry(id.to_owned()).or_insert_with(|| (call.clone(), 0));
        entry.1 += 1;
        if entry.0 != *call {
            self.0.flaws.lock().unwrap().push(format!("another call under the id {id}: {call}"));
        }
        let victim = self.0.victim.swap(0, Ordering::SeqCst);
        if victim != 0 {
            signal("KILL", victim);
        }
        victim == 0
    }

    /// Returns the number of calls that were received more than once.
    fn repeated(&self) -> usize {
        self.0.calls.lock().unwrap().values().filter(|(_, times)| *times > 1).count()
    }

    fn assert_no_flaw(&self) {
        let flaws = self.0.flaws.lock().unwrap();
        assert!(flaws.is_empty(), "{flaws:?}");
    }
}

async fn answer(
    State(tools): State<Tools>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    if headers.get("authorization").is_none_or(|key| key != KEY) {
        tools.0.flaws.lock().unwrap().push(format!("{method} {uri} without the key"));
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if method != Method::POST {
        return StatusCode::METHOD_NOT_ALLOWED.into_response();
    }
    let request: Value = serde_json::from_slice(&body).unwrap();
    if uri.path() == "/add" {
        if !tools.record(request["call_id"].as_str().unwrap(), &request) {
            return std::future::pending().await;
        }
        let arguments: Value = serde_json::from_str(request["arguments"].as_str().unwrap()).unwrap();
        let sum = arguments["a"].as_i64().unwrap() + arguments["b"].as_i64().unwrap();
        return Json(json!({"type": "function_call_output", "call_id": request["call_id"], "id": request["id"], "output": sum.to_string()}))
            .into_response();
    }
    let result = match request["method"].as_str().unwrap() {
        "initialize" => {
            let result = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "fake", "version": "1"}});
            let answer = Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result}));
            return ([("mcp-session-id", "one")], answer).into_response();
        }
        "notifications/initialized" => return StatusCode::ACCEPTED.into_response(),
        _ if tools.0.is_forgetful.swap(false, Ordering::SeqCst) => return StatusCode::NOT_FOUND.into_response(),
        "tools/list" => {
            tools.0.lists.fetch_add(1, Ordering::SeqCst);
            let query = json!({"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]});
            json!({"tools": [{"name": "delete_everything", "inputSchema": {"type": "object"}}, {"name": "search", "inputSchema": query}]})
        }
        "tools/call" => {
            if !tools.record(request["id"].as_str().unwrap(), &request["params"]) {
                return std::future::pending().await;
            }
            let text = format!("found {}", request["params"]["arguments"]["query"].as_str().unwrap());
            json!({"content": [{"type": "text", "text": text}], "isError": false})
        }
        other => {
            tools.0.flaws.lock().unwrap().push(other.to_owned());
            return StatusCode::BAD_REQUEST.into_response();
        }
    };
    let message = json!({"jsonrpc": "2.0", "id": request["id"], "result": result});
    ([("content-type", "text/event-stream")], format!("event: message\ndata: {message}\n\n")).into_response()
}

fn spec(tools: &str, reward: &str) -> Value {
    let records: Vec<Value> = (0..6)
        .map(|n| json!({"prompt": [{"role": "user", "content": format!("What is {n} and 2?")}], "answer": n}))
        .collect();
    let whole = json!({"type": "integer"});
    let parameters = json!({"type": "object", "properties": {"a": whole, "b": whole}, "required": ["a", "b"]});
    json!({
        "model": "caller",
        "dataset": {"records": records},
        "tools": [
            {"type": "http", "name": "add", "server_url": format!("{tools}/add"), "description": "Adds.", "parameters": parameters,
             "headers": {"authorization": KEY}},
            {"type": "mcp", "url": format!("{tools}/mcp"), "allow": ["search"], "headers": {"authorization": KEY}},
        ],
        "environment": {"max_turns": 3, "max_episode_tokens": 200, "max_observation_tokens": 40, "tool_parser": "hermes"},
        "rewards": [{"name": "calls", "type": "webhook", "url": reward}, {"name": "short", "type": "length", "weight": 0.1}],
        "rloo": {"num_generations": 2, "beta": 0.02},
        "sampling": {"max_completion_length": 8},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_step": 3, "max_steps": STEPS, "seed": 7},
        "checkpoints": {"every_steps": 2},
    })
}

/// Pays for calls: the number of tool messages, and the length of the last answer.
fn reward(request: &Value) -> Value {
    let score = |sample: &Value| {
        let messages = sample["messages"].as_array().unwrap();
        let observed = messages.iter().filter(|message| message["role"] == "tool").count();
        let letters = sample["completion"].as_str().unwrap().len() % 5;
        json!({"sample_id": sample["sample_id"], "reward": observed as f64 + letters as f64 / 10.0})
    };
    let results: Vec<Value> = request["samples"].as_array().unwrap().iter().map(score).collect();
    json!({"version": "1", "id": request["id"], "results": results})
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
async fn a_job_with_tools_is_exact_and_a_kill_between_a_call_and_its_answer_changes_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "caller", &model_that_calls(&dir.path().join("caller"))).await;
    let (tools, url) = Tools::start().await;
    let service = Service::start(|_, request| ok(&reward(request))).await;
    let document = spec(&url, &service.url());
    let job = server.submit(&document).await;
    let expected = outcome(&server, &job).await;
    tools.assert_no_flaw();
    assert_eq!((tools.repeated(), tools.0.lists.load(Ordering::SeqCst)), (0, STEPS as u32), "listed once a rollout");
    let steps: Vec<&Value> = expected.1.iter().filter(|row| !row["loss"].is_null()).collect();
    for row in &steps {
        assert_eq!(row["sampling/log_ratio_max"], 0.0);
        assert_eq!(
            (&row["environment/missing_fraction"], &row["environment/return_mean"]),
            (&json!(0.0), &Value::Null)
        );
    }
    let most = |name: &str| steps.iter().filter_map(|row| row[name].as_f64()).fold(0.0, f64::max);
    assert!(most("tools/call_frequency") > 0.0 && most("environment/turns/max") > 1.0, "{steps:?}");
    assert!(most("environment/stop/no_call") > 0.0, "{steps:?}");
    let calls = tools.0.calls.lock().unwrap().clone();
    assert!(calls.keys().any(|id| id.starts_with("call_")) && calls.len() > 4, "{calls:?}");
    let names: Vec<&Value> = calls.values().map(|(call, _)| &call["name"]).collect();
    assert!(names.contains(&&json!("add")) && names.contains(&&json!("search")), "{names:?}");

    // Rewards see the whole chat, the last answer and the turns.
    let samples: Vec<Value> =
        service.requests().iter().flat_map(|request| request["samples"].as_array().unwrap().clone()).collect();
    let several = samples.iter().find(|sample| sample["turns"].as_array().unwrap().len() > 1).unwrap();
    let roles: Vec<&str> =
        several["messages"].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles[..3], ["user", "assistant", "tool"], "{several}");
    assert!(roles.ends_with(&["assistant"]));
    assert!(several["turns"][0]["tool_calls"][0]["function"]["name"].is_string(), "{several}");
    assert!(several["turns"][0]["observations"][0]["content"].is_string(), "{several}");

    // Headers are never shown, and a fork keeps them.
    let view = server.get(&format!("/jobs/{job}")).await;
    assert!(!view.to_string().contains("key-of-the-tools"), "{view}");
    let fork = json!({"from_step": 2, "overrides": {"training": {"max_steps": STEPS + 1}}});
    let fork = server.post(&format!("/jobs/{job}/fork"), &fork).await;
    server.job_in_state(fork["id"].as_str().unwrap(), "succeeded").await;
    tools.assert_no_flaw();

    // The worker is killed after it has sent a call, and before the answer.
    let job = server.submit(&document).await;
    server.job_when(&job, "step 1", |view| view["step"].as_u64() >= Some(1)).await;
    tools.0.victim.store(server.worker_pids(1).await[0], Ordering::SeqCst);
    tools.0.is_forgetful.store(true, Ordering::SeqCst);
    assert!(outcome(&server, &job).await == expected, "another result after a kill");
    assert_eq!(tools.0.victim.load(Ordering::SeqCst), 0, "the worker was killed");
    // A turn of the rollout may have a call in flight for each of its six episodes.
    let repeated = tools.repeated();
    assert!(
        (1..=6).contains(&repeated),
        "only calls whose answers were lost are repeated, with the same ids: {repeated}"
    );
    tools.assert_no_flaw();
}

#[tokio::test]
async fn a_draft_with_tools_is_checked_where_it_stands() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "caller", &model_that_calls(&dir.path().join("caller"))).await;
    let draft = spec("http://127.0.0.1:9", "http://127.0.0.1:9/");
    let checked = |changes: Value| {
        let mut draft = draft.clone();
        for (pointer, value) in changes.as_object().unwrap() {
            match draft.pointer_mut(pointer) {
                Some(at) => *at = value.clone(),
                None => {
                    let (parent, name) = pointer.rsplit_once('/').unwrap();
                    draft.pointer_mut(parent).unwrap()[name] = value.clone();
                }
            }
        }
        let server = &server;
        async move {
            let answer = server.post("/jobs/validate", &draft).await;
            answer["errors"].as_array().cloned().unwrap_or_default()
        }
    };
    assert_eq!(checked(json!({})).await, [Value::Null; 0]);
    for (changes, pointer, code) in [
        (json!({"/tools/0/server_url": "http://169.254.169.254/"}), "/tools/0/server_url", "address_refused"),
        (json!({"/tools/1/url": "http://169.254.169.254/mcp"}), "/tools/1/url", "address_refused"),
        (json!({"/environment/url": "http://127.0.0.1:9/"}), "/environment/url", "conflict"),
        (json!({"/tools/1/allow": []}), "/tools/1/allow", "required"),
        (json!({"/rewards": [{"type": "environment"}]}), "/rewards/0/type", "needs_environment"),
        (json!({"/rloo/estimator": "remax"}), "/rloo/estimator", "unsupported_with_environment"),
        (json!({"/rloo/estimator": "rloo_turns"}), "/rloo/estimator", "conflict"),
    ] {
        let errors = checked(changes.clone()).await;
        let found = errors.iter().any(|error| error["pointer"] == pointer && error["code"] == code);
        assert!(found, "{changes}: {errors:?}");
    }
    let http_form = json!({"type": "openenv", "url": "http://127.0.0.1:9/step"});
    let errors = checked(json!({"/tools": null, "/environment": http_form})).await;
    let detail =
        errors.iter().find(|error| error["pointer"] == "/environment/url").unwrap()["detail"].as_str().unwrap();
    assert!(detail.starts_with("OpenEnv's HTTP form forgets the state of an episode; "), "{detail}");
}

/// A server of the package `openenv`.
struct Openenv(std::process::Child);

impl Drop for Openenv {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_job_plays_with_openenv_for_one_episode_and_says_what_a_kill_has_lost() {
    use std::io::BufRead;
    let Ok(python) = std::env::var("RLOOD_OPENENV_PYTHON") else {
        println!("skipped: RLOOD_OPENENV_PYTHON names no Python that has the package openenv");
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/peers/openenv_server.py");
    let mut command = std::process::Command::new(python);
    let mut child = command.args([script, "text", "1"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let port = lines.find_map(|line| line.unwrap().strip_prefix("port ").map(str::to_owned)).unwrap();
    let _openenv = Openenv(child);

    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "caller", &model_that_calls(&dir.path().join("caller"))).await;
    let mut document = spec("http://127.0.0.1:9", "http://127.0.0.1:9/");
    document["tools"] = Value::Null;
    document["rewards"] = json!([{"type": "environment"}]);
    document["environment"] = json!({"type": "openenv", "url": format!("http://127.0.0.1:{port}"), "max_turns": 3,
        "max_episode_tokens": 200, "max_observation_tokens": 40, "tool_parser": "none"});
    document["training"] = json!({"prompts_per_step": 3, "max_steps": 12, "max_attempts": 20});
    // The server has room for one episode, and a block has six: the job fails with the advice.
    let job = server.submit(&document).await;
    let failed = server.job_in_state(&job, "failed").await;
    assert!(failed.to_string().contains("max_open_episodes to 1"), "{failed}");

    document["environment"]["max_open_episodes"] = json!(1);
    let job = server.submit(&document).await;
    // A kill between two rollouts meets no episode, so there are several.
    for step in 1..=9_u64 {
        server.job_when(&job, "a step", |view| view["step"].as_u64() >= Some(step)).await;
        if server.get(&format!("/jobs/{job}")).await["state"] == "running" {
            signal("KILL", server.worker_pids(1).await[0]);
        }
    }
    server.job_in_state(&job, "succeeded").await;
    let metrics = server.get(&format!("/jobs/{job}/metrics")).await["data"].as_array().unwrap().clone();
    let restarts: f64 = metrics.iter().filter_map(|row| row["environment/restarts"].as_f64()).sum();
    assert!(restarts >= 1.0, "an episode was under way at one of the kills: {metrics:?}");
    let finished: f64 = metrics.iter().filter_map(|row| row["environment/stop/env_done"].as_f64()).fold(0.0, f64::max);
    assert!(finished > 0.0 && metrics.iter().any(|row| row["environment/return_mean"] == 1.0), "{metrics:?}");
}
