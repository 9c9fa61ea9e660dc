//! Jobs whose completions come from rollout servers: real processes, and servers that speak vLLM's API and compute with the engine.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use rlood_client::Which;
use rlood_engine::backend::BackendKind;
use rlood_engine::certificate::logps;
use rlood_engine::generate::{GeneratePrompt, GenerateRequest, generate};
use rlood_engine::model::{Adapter, Policy};
use rlood_engine::random::{Key, Stream};
use rlood_engine::sampling::Sampler;
use rlood_engine::text::Text;
use serde_json::{Value, json};

use crate::processes::{Server, binary, model_copy, register, signal};

const STEPS: u64 = 6;

/// A server with vLLM's routes, as far as the worker uses them.
#[derive(Clone)]
struct Vllm(Arc<Inner>);

struct Inner {
    url: String,
    model: PathBuf,
    key: Option<&'static str>,
    /// Added to the log-probs that it reports for sampled tokens, in nats.
    shift: f64,
    adapters: Mutex<BTreeMap<String, String>>,
    is_down: AtomicBool,
    /// Number of prompts that it sampled.
    sampled: AtomicUsize,
}

impl Vllm {
    async fn start(model: &Path, key: Option<&'static str>, shift: f64) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let vllm = Self(Arc::new(Inner {
            url,
            model: model.to_owned(),
            key,
            shift,
            adapters: Mutex::default(),
            is_down: AtomicBool::new(false),
            sampled: AtomicUsize::new(0),
        }));
        let app = Router::new().fallback(answer).with_state(vllm.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        vllm
    }

    fn set_down(&self, is_down: bool) {
        self.0.is_down.store(is_down, Ordering::Relaxed);
        // A restarted server has no adapters.
        self.0.adapters.lock().unwrap().clear();
    }

    fn sampled(&self) -> usize {
        self.0.sampled.load(Ordering::Relaxed)
    }
}

async fn answer(State(vllm): State<Vllm>, method: Method, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let server = &vllm.0;
    if server.is_down.load(Ordering::Relaxed) {
        let error = json!({"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}});
        return (StatusCode::INTERNAL_SERVER_ERROR, Json(error)).into_response();
    }
    let is_known = |key: &str| headers.get("authorization").is_some_and(|value| *value == format!("Bearer {key}"));
    if uri.path().starts_with("/v1") && !server.key.is_none_or(is_known) {
        return (StatusCode::UNAUTHORIZED, Json(json!({"error": "Unauthorized"}))).into_response();
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    match (method.as_str(), uri.path()) {
        ("GET", "/health") => StatusCode::OK.into_response(),
        ("GET", "/version") => Json(json!({"version": "0.32.0"})).into_response(),
        ("GET", "/v1/models") => Json(models(server)).into_response(),
        ("POST", "/v1/load_lora_adapter") => {
            let (name, path) = (body["lora_name"].as_str().unwrap(), body["lora_path"].as_str().unwrap());
            server.adapters.lock().unwrap().insert(name.to_owned(), path.to_owned());
            "Success: LoRA adapter added successfully.".into_response()
        }
        ("POST", "/v1/unload_lora_adapter") => {
            server.adapters.lock().unwrap().remove(body["lora_name"].as_str().unwrap());
            "Success: LoRA adapter removed successfully.".into_response()
        }
        ("POST", "/v1/completions") => {
            let vllm = vllm.clone();
            tokio::task::spawn_blocking(move || complete(&vllm.0, &body)).await.unwrap()
        }
        other => panic!("vLLM is not asked for {other:?}"),
    }
}

fn models(server: &Inner) -> Value {
    let base = json!({"id": "base", "root": server.model, "parent": null, "max_model_len": 128});
    let adapters = server.adapters.lock().unwrap();
    let adapters = adapters.iter().map(|(name, path)| json!({"id": name, "root": path, "parent": "base"}));
    json!({"object": "list", "data": std::iter::once(base).chain(adapters).collect::<Vec<_>>()})
}

fn complete(server: &Inner, body: &Value) -> Response {
    let model = body["model"].as_str().unwrap();
    let adapter = server.adapters.lock().unwrap().get(model).cloned();
    if adapter.is_none() && model != "base" {
        let error = json!({"error": {"message": format!("The model `{model}` does not exist."), "type": "NotFoundError", "code": 404}});
        return (StatusCode::NOT_FOUND, Json(error)).into_response();
    }
    let mut policy = Policy::load(&server.model, BackendKind::Cpu).unwrap();
    if let Some(adapter) = &adapter {
        policy.load_lora(Path::new(adapter)).unwrap();
    }
    let which = if adapter.is_some() { Adapter::On } else { Adapter::Off };
    let prompt: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
    let choices: Vec<Value> = if body["prompt_logprobs"].is_number() {
        let of_prompt = logps(&policy, &[&prompt], which, &|| false).unwrap().remove(0);
        let entries = prompt
            .iter()
            .skip(1)
            .zip(of_prompt)
            .map(|(id, logp)| json!({id.to_string(): {"logprob": logp, "rank": 1}}));
        let entries: Vec<Value> = std::iter::once(Value::Null).chain(entries).collect();
        vec![
            json!({"index": 0, "finish_reason": "length", "token_ids": [0], "prompt_token_ids": prompt, "prompt_logprobs": entries}),
        ]
    } else {
        // Slow enough that a job can be disturbed in the middle.
        std::thread::sleep(Duration::from_millis(100));
        if adapter.is_some() {
            server.sampled.fetch_add(1, Ordering::Relaxed);
        }
        let n = body["n"].as_u64().unwrap();
        (0..n).map(|index| choice(server, &policy, which, body, &prompt, index)).collect()
    };
    Json(json!({"model": model, "choices": choices})).into_response()
}

/// The completion with the request's seed plus `index`, as vLLM numbers them.
fn choice(server: &Inner, policy: &Policy, which: Adapter, body: &Value, prompt: &[u32], index: u64) -> Value {
    assert_eq!((&body["top_p"], &body["top_k"], &body["ignore_eos"]), (&json!(1), &json!(0), &json!(true)));
    let text = Text::load(&server.model).unwrap();
    let stop: Vec<u32> = serde_json::from_value(body["stop_token_ids"].clone()).unwrap();
    let request = GenerateRequest {
        prompts: &[GeneratePrompt { row: 0, ids: prompt, given: &[] }],
        num_generations: NonZeroUsize::MIN,
        sampler: Sampler { temperature: body["temperature"].as_f64().unwrap(), ..Sampler::PLAIN },
        max_completion_length: body["max_tokens"].as_u64().unwrap() as usize,
        stop: &[],
        key: Key::new(body["seed"].as_u64().unwrap() + index, Stream::Generate),
        eos_token_ids: &stop,
        adapter: which,
        max_rows: 1,
    };
    let one = generate(policy, &text, &request, &|| false).unwrap().unwrap().remove(0).remove(0);
    let logps: Vec<f64> = one.segments.logps().unwrap().iter().map(|logp| f64::from(*logp) + server.shift).collect();
    json!({
        "index": index, "finish_reason": one.finish_reason, "stop_reason": null, "token_ids": one.segments.ids(),
        "prompt_token_ids": prompt, "logprobs": {"token_logprobs": logps},
    })
}

fn spec(servers: &[&Vllm]) -> Value {
    let records: Vec<Value> =
        (0..6).map(|n| json!({"prompt": format!("Say the number {n} in a few words.")})).collect();
    let servers: Vec<Value> = servers.iter().map(|vllm| json!({"url": vllm.0.url, "api_key": vllm.0.key})).collect();
    json!({
        "model": "tiny",
        "dataset": {"records": records},
        "eval": {"fraction": 0.3, "every_steps": 3, "before_start": true, "num_generations": 1, "auto_verdict": false},
        "rewards": [{"name": "vowels", "type": "regex", "pattern": "[aeiou]"}],
        "rloo": {"num_generations": 2, "beta": 0.02},
        "sampling": {"max_completion_length": 6},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_step": 2, "max_steps": STEPS, "seed": 7},
        "checkpoints": {"every_steps": 3},
        "rollout": {"engine": "vllm", "servers": servers, "timeout_s": 1},
    })
}

async fn start(dir: &Path) -> (Server, PathBuf) {
    let server = Server::start(&dir.join("data"), "cpu");
    let model = model_copy(&dir.join("model"));
    register(&server, "tiny", &model).await;
    (server, model)
}

/// The trained adapter, and the metrics that do not depend on the machine or on interruptions.
async fn outcome(server: &Server, job: &str) -> (Vec<u8>, Vec<Value>) {
    server.job_in_state(job, "succeeded").await;
    let mut metrics = server.get(&format!("/jobs/{job}/metrics")).await["data"].as_array().unwrap().clone();
    for row in &mut metrics {
        let of_machine = ["step_time", "tokens_per_second", "memory", "latency", "rollout/"];
        row.as_object_mut().unwrap().retain(|name, _| !of_machine.iter().any(|part| name.contains(part)));
    }
    (server.adapter(job, Some(Which::Last)).await, metrics)
}

fn rollout_folder(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("data/rollout-adapters")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn a_job_on_two_servers_is_exact_and_ends_with_the_same_bytes_after_kills_and_outages() {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, model) = start(dir.path()).await;
    let vllms = [Vllm::start(&model, Some("key-of-one"), 0.0).await, Vllm::start(&model, None, 0.0).await];
    let document = spec(&[&vllms[0], &vllms[1]]);
    let job = server.submit(&document).await;
    let expected = outcome(&server, &job).await;
    let training: Vec<&Value> = expected.1.iter().filter(|row| !row["loss"].is_null()).collect();
    assert_eq!(training.len(), STEPS as usize);
    for row in training {
        assert_eq!(row["sampling/log_ratio_max"], 0.0);
        assert_eq!((&row["sampling/mismatch_kl"], &row["sampling/ess"]), (&json!(0.0), &json!(1.0)));
    }
    assert!(vllms.iter().all(|vllm| vllm.sampled() > 3), "both servers sample");
    assert!(vllms.iter().all(|vllm| vllm.0.adapters.lock().unwrap().is_empty()), "all adapters are unloaded");
    assert_eq!(rollout_folder(dir.path()), 0, "no directory is left");
    let view = server.get(&format!("/jobs/{job}")).await;
    assert_eq!(view["plan"]["rollout"]["servers"][0], json!({"url": vllms[0].0.url}));
    assert!(!view.to_string().contains("key-of-one"));

    // The worker is killed in the middle, and one of the servers dies.
    let job = server.submit(&document).await;
    server.job_when(&job, "step 1", |view| view["step"].as_u64() >= Some(1)).await;
    signal("KILL", server.worker_pids(1).await[0]);
    vllms[1].set_down(true);
    assert!(outcome(&server, &job).await == expected, "another result after a kill");

    // The whole service is killed.
    let job = server.submit(&document).await;
    server.wait_for_checkpoint(&job).await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    server = Server::start(&dir.path().join("data"), "cpu");
    assert!(outcome(&server, &job).await == expected, "another result after the service was killed");

    // No server is left: the job pauses, and resumes by itself when a server is back.
    vllms[0].set_down(true);
    let job = server.submit(&document).await;
    let paused = server.job_when(&job, "paused", |view| view["state"] == "paused").await;
    assert_eq!(paused["status_reason"], "rollout_outage", "{paused}");
    vllms[0].set_down(false);
    assert!(outcome(&server, &job).await == expected, "another result after an outage");
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
    let has = |code: &str| events["data"].as_array().unwrap().iter().any(|event| event["data"]["code"] == code);
    assert!(has("rollout_server_out") && has("rollout_outage"), "{events}");
}

#[tokio::test]
async fn a_mismatch_fails_an_uncorrected_job_and_a_fork_keeps_the_keys_of_its_servers() {
    let dir = tempfile::tempdir().unwrap();
    let (server, model) = start(dir.path()).await;
    let vllm = Vllm::start(&model, Some("the-key"), -0.08).await;
    let mut document = spec(&[&vllm]);
    document["rollout"]["correction"] = json!({"mode": "none"});
    let job = server.submit(&document).await;
    let failed = server.job_in_state(&job, "failed").await;
    assert_eq!(
        (&failed["failure"]["class"], &failed["failure"]["code"]),
        (&json!("user"), &json!("rollout_mismatch")),
        "{failed}"
    );
    assert!(failed["failure"]["message"].as_str().unwrap().contains("nats per token at step 1"), "{failed}");

    document["rollout"]["correction"] = json!({"mode": "token_truncate", "max": 2, "min": 0.5});
    let job = server.submit(&document).await;
    server.job_in_state(&job, "succeeded").await;
    let fork = server
        .post(&format!("/jobs/{job}/fork"), &json!({"from_step": 3, "overrides": {"training": {"max_steps": 5}}}))
        .await;
    let fork = fork["id"].as_str().unwrap();
    server.job_in_state(fork, "succeeded").await;
    assert_eq!(server.get(&format!("/jobs/{fork}")).await["plan"]["rollout"]["correction"]["min"], 0.5);

    // Another key: the job says so, and a renewed key lets it run.
    document["rollout"]["servers"][0]["api_key"] = json!("wrong");
    let job = server.submit(&document).await;
    let failed = server.job_in_state(&job, "failed").await;
    assert_eq!(failed["failure"]["code"], "rollout_servers_unfit", "{failed}");
    assert!(failed["failure"]["message"].as_str().unwrap().contains("rollout.servers[].api_key"), "{failed}");
}

/// The outcome of a job whose adapters the fake server read from the sidecar's folder.
async fn sampled_beside_vllm(server: &Server, job: &str, vllm: &Vllm) -> (Vec<u8>, Vec<Value>) {
    let running = server.job_when(job, "step 2", |view| view["step"].as_u64() >= Some(2)).await;
    assert_eq!(running["failure"], Value::Null);
    let paths: Vec<String> = vllm.0.adapters.lock().unwrap().values().cloned().collect();
    assert!(!paths.is_empty() && paths.iter().all(|path| path.contains("/beside-vllm/rlood-job_")), "{paths:?}");
    outcome(server, job).await
}

/// Starts a sidecar between `server` and `vllm`. Returns its process and address.
fn start_sidecar(server: &Server, vllm: &Vllm, folder: &Path) -> (Child, String) {
    let flags = ["adapter-sidecar", "--listen", "127.0.0.1:0", "--server", &server.url, "--vllm", &vllm.0.url, "--dir"];
    let mut command = Command::new(binary());
    let mut sidecar = command.args(flags).arg(folder).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(sidecar.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.strip_prefix("listening on ").unwrap().trim().to_owned();
    (sidecar, url)
}

#[tokio::test]
async fn a_worker_without_a_shared_folder_uploads_its_adapters_for_the_sidecars() {
    const TOKEN: &str = "the-token-of-a-worker-elsewhere";
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let server = Server::start_in(&data, "none", &[("RLOOD_WORKER_TOKEN", TOKEN)]);
    let model = model_copy(&dir.path().join("model"));
    register(&server, "tiny", &model).await;
    let mut worker = Command::new(binary());
    worker.args(["worker", "--server", &server.url, "--device", "cpu"]).env("RLOOD_WORKER_TOKEN", TOKEN);
    let mut worker = worker.env_remove("RLOOD_ADAPTER_DIR").stdin(Stdio::null()).spawn().unwrap();
    let vllm = Vllm::start(&model, None, 0.0).await;
    let (mut sidecar, url) = start_sidecar(&server, &vllm, &dir.path().join("beside-vllm"));
    let mut document = spec(&[&vllm]);
    document["training"]["max_steps"] = json!(8);
    document["rollout"]["servers"][0]["url"] = json!(url);
    document["rollout"]["servers"][0]["path_map"] = json!({"from": "/", "to": "/not/there"});
    let job = server.submit(&document).await;
    let uploaded = data.join("staging").join(&job).join("1/rollout-adapters");
    server.job_when(&job, "step 6", |view| view["step"].as_u64() >= Some(6)).await;
    let kept = std::fs::read_dir(&uploaded).unwrap().count();
    assert!((1..=4).contains(&kept), "only the newest adapters stay: {kept}");
    sampled_beside_vllm(&server, &job, &vllm).await;
    assert!(!uploaded.exists() && rollout_folder(dir.path()) == 0);
    for process in [&mut worker, &mut sidecar] {
        process.kill().unwrap();
        process.wait().unwrap();
    }
}

#[tokio::test]
async fn a_sidecar_downloads_the_adapters_and_passes_on_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (server, model) = start(dir.path()).await;
    let vllm = Vllm::start(&model, Some("the-key"), 0.0).await;
    let (mut sidecar, url) = start_sidecar(&server, &vllm, &dir.path().join("beside-vllm"));
    let mut document = spec(&[&vllm]);
    document["rollout"]["servers"][0]["url"] = json!(url);
    // vLLM would not find the worker's folder; the sidecar does not need it.
    document["rollout"]["servers"][0]["path_map"] = json!({"from": "/", "to": "/not/there"});
    let job = server.submit(&document).await;
    let (_, metrics) = sampled_beside_vllm(&server, &job, &vllm).await;
    assert!(metrics.iter().all(|row| row["sampling/mismatch_kl"].is_null() || row["sampling/mismatch_kl"] == 0.0));
    assert!(vllm.0.adapters.lock().unwrap().is_empty());

    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    for (method, path) in [("POST", "/collective_rpc"), ("POST", "/invocations"), ("POST", "/adapters"), ("GET", "/v1")]
    {
        let answer = http.request(method.parse().unwrap(), format!("{url}{path}")).send().await.unwrap();
        assert_eq!(answer.status(), 404, "{path}");
    }
    let load = |name: &str| {
        http.post(format!("{url}/v1/load_lora_adapter")).json(&json!({"lora_name": name, "lora_path": "/etc"}))
    };
    assert_eq!(load("../../etc").send().await.unwrap().status(), 400);
    let unknown = load(&format!("rlood-{job}-a1-s99-0123456789ab")).send().await.unwrap();
    assert_eq!(unknown.status(), 404);
    assert!(unknown.text().await.unwrap().contains("No adapter found for"));
    sidecar.kill().unwrap();
    sidecar.wait().unwrap();
}
