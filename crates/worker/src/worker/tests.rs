//! Tests of one attempt with a test server and a test engine.
//!
//! This file is longer than others, because all tests share the server and the engine in it. It is not below `tests/`, because
//! the worker's public items do not allow another engine or another clock.

mod fetch;
mod models;

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::attempt;
use super::client::Client;
use super::clock;
use super::{EXIT_DEVICE, EXIT_PANIC, TrainFn, Worker};
use crate::digest::Sha256Digest;
use crate::engine::error::EngineError;
use crate::engine::host::{Host, RunEnd, SavedCheckpoint, ScoreRequest, StopReason, TrainInput};
use crate::event::{Event, FinishReason, Metrics, SamplePhase};
use crate::id::{CheckpointId, DatasetId, JobId, WorkerId};
use crate::modelcard;
use crate::protocol::{Claim, FileEntry};
use crate::rollout::{RewardSample, RolloutId};
use crate::spec::Plan;

const ROWS: &str = "{\"prompt\": \"one\", \"answer\": \"1\"}\n{\"prompt\": \"two\", \"answer\": \"2\"}\n";

/// Requests that the server received, and how it answers.
#[derive(Default)]
struct Seen {
    /// Method and last part of the path, with the relevant part of the body.
    calls: Mutex<Vec<String>>,
    /// Number of event requests that are answered with 503 first.
    busy: Mutex<u32>,
    /// Whether heartbeats are answered with 409 `lease_lost`.
    lost: bool,
    /// Value of `requested` in the answers to heartbeats.
    requested: Option<&'static str>,
    /// Pages of the journal.
    journal: Vec<Value>,
    /// Whether the journal rejects entries because the disk is full.
    journal_full: bool,
    /// Whether the server is unreachable.
    away: AtomicBool,
    /// Files of `resume` and `initial` by route and name: their bytes, or `None` for a transfer that is interrupted.
    files: Mutex<BTreeMap<String, Option<&'static str>>>,
    /// Answers to reports of a damaged file, in order; 404 after the last one.
    inspections: Mutex<VecDeque<Value>>,
    /// Files of the model that the server has.
    model: models::Served,
    /// Whether uploads are answered with 503.
    refuses_uploads: AtomicBool,
}

impl Seen {
    /// Returns the requests without heartbeats and reward reports, whose times vary.
    fn story(&self) -> Vec<String> {
        self.calls
            .lock()
            .unwrap()
            .iter()
            .filter(|call| !call.starts_with("heartbeat") && *call != "rewards")
            .cloned()
            .collect()
    }

    fn heartbeats(&self) -> usize {
        self.calls.lock().unwrap().iter().filter(|call| call.starts_with("heartbeat")).count()
    }
}

#[expect(clippy::too_many_lines, reason = "the match has one arm for each call of the worker protocol")]
async fn answer(State(seen): State<Arc<Seen>>, request: Request) -> Response {
    if seen.away.load(Ordering::SeqCst) {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    let (parts, body) = request.into_parts();
    let bytes: Bytes = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    let path: Vec<&str> = parts.uri.path().split('/').skip(4).collect();
    let (call, response) = match (&parts.method, path.as_slice()) {
        (&Method::POST, ["heartbeat"]) if seen.lost => {
            let problem = json!({"code": "lease_lost", "detail": "another attempt owns the job"});
            ("heartbeat".to_owned(), (StatusCode::CONFLICT, Json(problem)).into_response())
        }
        (&Method::POST, ["heartbeat"]) => {
            let call = format!("heartbeat {}", body["status_reason"].as_str().unwrap_or_default());
            (call.trim_end().to_owned(), Json(json!({"requested": seen.requested, "lease_ms": 1000})).into_response())
        }
        (&Method::GET, ["datasets", _]) => ("dataset".to_owned(), ROWS.into_response()),
        (&Method::POST, ["events"]) => {
            let mut busy = seen.busy.lock().unwrap();
            if *busy > 0 {
                *busy -= 1;
                (format!("events {} refused", body["batch"]), StatusCode::SERVICE_UNAVAILABLE.into_response())
            } else {
                let events = body["events"].as_array().unwrap().iter();
                let steps: Vec<&Value> = events.map(|event| event.get("code").unwrap_or(&event["step"])).collect();
                (format!("events {} {}", body["batch"], json!(steps)), StatusCode::NO_CONTENT.into_response())
            }
        }
        (&Method::GET, [route @ ("resume" | "initial"), name]) => {
            let file = seen.files.lock().unwrap().get(&format!("{route} {name}")).copied().expect("a known file");
            let response = match file {
                Some(bytes) => bytes.into_response(),
                None => {
                    let pieces = [Ok("some"), Err(std::io::Error::other("the disk gives no more"))];
                    axum::body::Body::from_stream(futures::stream::iter(pieces)).into_response()
                }
            };
            (format!("{route} {name}"), response)
        }
        (&Method::GET, ["models", rest @ ..]) => seen.model.answer(rest, &parts.headers),
        (&Method::POST, ["damaged"]) => {
            let call = format!("damaged {} {} {}", body["list"], body["step"], body["file"]).replace('"', "");
            match seen.inspections.lock().unwrap().pop_front() {
                Some(inspection) => (call, Json(inspection).into_response()),
                None => (call, StatusCode::NOT_FOUND.into_response()),
            }
        }
        (&Method::PUT, ["checkpoints", ..]) if seen.refuses_uploads.load(Ordering::SeqCst) => {
            ("upload refused".to_owned(), StatusCode::SERVICE_UNAVAILABLE.into_response())
        }
        (&Method::PUT, ["checkpoints", step, name]) => (
            format!("upload {step} {name} {}", String::from_utf8_lossy(&bytes)),
            StatusCode::NO_CONTENT.into_response(),
        ),
        (&Method::POST, ["checkpoints", step]) => {
            (format!("publish {step}"), Json(json!({"checkpoint": CheckpointId::new()})).into_response())
        }
        (&Method::GET, ["journal", after]) => {
            let page = seen.journal.get(after.parse::<usize>().unwrap()).cloned();
            ("journal".to_owned(), Json(page.unwrap_or_else(|| json!({"entries": [], "next": null}))).into_response())
        }
        (&Method::POST, ["journal"]) if seen.journal_full => {
            let problem = json!({"code": "storage_full", "detail": "no room"});
            ("append refused".to_owned(), (StatusCode::INSUFFICIENT_STORAGE, Json(problem)).into_response())
        }
        (&Method::POST, ["journal"]) => {
            let entries = body["entries"].as_array().unwrap().iter();
            let kinds: Vec<&str> = entries.map(|entry| entry["entry"].as_str().unwrap()).collect();
            (format!("append {}", kinds.join(" ")), StatusCode::NO_CONTENT.into_response())
        }
        (&Method::POST, ["rewards"]) => ("rewards".to_owned(), StatusCode::NO_CONTENT.into_response()),
        (&Method::POST, ["finish"]) => {
            let code = body["outcome"]["failure"]["code"].as_str().unwrap_or_default();
            let outcome = body["outcome"]["outcome"].as_str().unwrap();
            (format!("finish {outcome} {code}").trim_end().to_owned(), StatusCode::NO_CONTENT.into_response())
        }
        other => panic!("unexpected call {other:?}"),
    };
    assert_eq!(parts.headers["authorization"], "Bearer the-token");
    seen.calls.lock().unwrap().push(call);
    response
}

fn model_dir() -> PathBuf {
    rlood_test_support::fixture("parity/qwen3")
}

fn claim() -> Claim {
    let dataset = json!({"id": DatasetId::new(), "sha256": Sha256Digest::of(ROWS), "num_rows": 2});
    let plan: Plan = serde_json::from_value(json!({
        "name": null, "model": {"id": "tiny", "sha256": modelcard::fingerprint(&model_dir()).unwrap()},
        "dataset": dataset, "eval": null,
        "rewards": [{"name": "length", "weight": 1.0, "required": true, "type": "length",
                     "min_words": 1, "max_words": 5, "sentence_bonus": 0.5}],
        "rloo": {"num_generations": 2, "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, "num_iterations": 1,
                 "steps_per_generation": 1, "normalize_advantages": false, "reward_clip_range": null,
                 "mask_truncated_completions": false, "combine": "renormalize"},
        "sampling": {"max_completion_length": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                     "repetition_penalty": 1.0, "stop": [], "chat_template_kwargs": {}},
        "lora": {"r": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": ["q_proj"], "use_rslora": false},
        "optimizer": {"learning_rate": 0.001, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
                      "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0},
        "training": {"prompts_per_step": 1, "max_steps": 3, "seed": 1, "shuffle_dataset": true},
        "checkpoints": {"every_steps": 1, "keep_last": 1, "keep_best": 0},
        "metadata": {},
        "totals": {"optimizer_steps": 3, "completions_per_step": 2, "prompts_per_block": 1, "generation_blocks": 3,
                   "completions": 6, "epochs": 1.5, "dropped_rows_per_epoch": 0, "max_completion_tokens": 24}
    }))
    .unwrap();
    Claim {
        job: JobId::new(),
        worker: WorkerId::new(),
        attempt: 1,
        plan,
        secrets: BTreeMap::new(),
        model_path: model_dir().to_string_lossy().into_owned(),
        model_name: "tiny".to_owned(),
        reward_models: BTreeMap::new(),
        resume: None,
        initial: Vec::new(),
        lease_ms: 1000,
        allow_outgoing: Vec::new(),
        reward_reports: Vec::new(),
        callbacks: None,
        checkpoint_soon: false,
        cache_scope: None,
    }
}

/// Runs one attempt. `meanwhile` gets the worker when the attempt has started.
async fn attempt_with(seen: Seen, train: TrainFn, meanwhile: impl FnOnce(&Worker)) -> (Option<u8>, Arc<Seen>) {
    attempt_at(seen, train, claim(), meanwhile).await
}

async fn attempt_at(
    seen: impl Into<Arc<Seen>>,
    train: TrainFn,
    claim: Claim,
    meanwhile: impl FnOnce(&Worker),
) -> (Option<u8>, Arc<Seen>) {
    attempt_with_cache(seen.into(), train, claim, None, meanwhile).await
}

async fn attempt_with_cache(
    seen: Arc<Seen>,
    train: TrainFn,
    claim: Claim,
    cache: Option<(PathBuf, Option<u64>)>,
    meanwhile: impl FnOnce(&Worker),
) -> (Option<u8>, Arc<Seen>) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let router = axum::Router::new().fallback(answer).with_state(seen.clone());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let scratch = tempfile::tempdir().unwrap();
    let worker = Worker {
        adapter_dir: scratch.path().join("adapters"),
        uploads_adapters: false,
        vllm_python: None,
        client: Client::new(&server, "the-token", true).unwrap(),
        id: WorkerId::new(),
        child: false,
        device: "cpu".to_owned(),
        threads: 1,
        scratch_dir: scratch.path().to_owned(),
        cache,
        leaving: CancellationToken::new(),
        preempted: Arc::default(),
        leave_within: Duration::from_secs(1),
        heartbeat_ms: 20.into(),
        train,
        trl: None,
        reward_pace: crate::reward::client::Pace::default(),
        reward_client: std::sync::Mutex::default(),
    };
    meanwhile(&worker);
    let ended = attempt::run(&worker, claim).await;
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "nothing is left behind");
    (ended, seen)
}

fn step(host: &mut dyn Host, step: u64) {
    let event = Event::Step { step, kind: SamplePhase::Train, metrics: Metrics::new() };
    host.event(event).unwrap();
}

fn save(host: &mut dyn Host, scratch: &Path, step: u64) -> Result<(), RunEnd> {
    std::fs::create_dir_all(scratch).unwrap();
    let files = ["adapter.bin", "manifest.json"].map(|name| {
        std::fs::write(scratch.join(name), name).unwrap();
        FileEntry { name: name.to_owned(), size_bytes: name.len() as u64, sha256: Sha256Digest::of(name) }
    });
    host.saved(&SavedCheckpoint { dir: scratch, step, files: &files, metrics: &Metrics::new(), last: true })
}

fn sample() -> RewardSample {
    RewardSample {
        sample_id: "s_0".to_owned(),
        group_id: "g_0".to_owned(),
        prompt_id: "row_0".to_owned(),
        source: None,
        prompt: "one".to_owned(),
        messages: None,
        completion: "1".to_owned(),
        finish_reason: FinishReason::Stop,
        num_tokens: 1,
        completion_ids: None,
        columns: serde_json::Map::new(),
        episode: None,
    }
}

/// Returns a claim with a webhook reward on port 1, where nothing listens.
fn down(max_outage_s: u64) -> Claim {
    let mut claim = claim();
    let down = json!([{"name": "down", "weight": 1.0, "required": true, "type": "webhook", "url": "http://127.0.0.1:1/",
        "params": {}, "max_concurrency": 1, "max_batch_samples": 8, "max_batch_bytes": 100_000, "timeout_ms": 1000,
        "deadline_ms": 1000, "max_tries": 1, "max_invalid_tries": 1, "on_invalid": "mask", "max_outage_s": max_outage_s}]);
    claim.plan.rewards = serde_json::from_value(down).unwrap();
    claim.allow_outgoing = vec!["loopback".to_owned()];
    claim
}

fn until_stopped(host: &dyn Host) -> StopReason {
    let begun = Instant::now();
    loop {
        if let Some(stop) = host.stop() {
            return stop;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "no stop arrived");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[tokio::test]
async fn everything_is_stored_once_and_in_order_by_a_busy_server() {
    fn train(input: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        assert_eq!(input.rows.len(), 2);
        assert_eq!((input.rows[1].prompt.as_str(), input.rows[1].columns["answer"].as_str()), (Some("two"), Some("2")));
        step(host, 1);
        step(host, 2);
        save(host, input.scratch_dir, 2).unwrap();
        step(host, 3);
        Ok(())
    }
    let (ended, seen) = attempt_with(Seen { busy: Mutex::new(2), ..Seen::default() }, train, |_| {}).await;
    assert_eq!(ended, None);
    let story = seen.story();
    let stored: Vec<&String> =
        story.iter().filter(|call| call.starts_with("events") && !call.ends_with("refused")).collect();
    let numbers: Vec<&str> = stored.iter().map(|call| call.split(' ').nth(1).unwrap()).collect();
    assert_eq!(numbers, (0..stored.len()).map(|n| n.to_string()).collect::<Vec<_>>(), "{story:?}");
    let at =
        |text: &str| story.iter().position(|call| call.contains(text)).unwrap_or_else(|| panic!("{text}: {story:?}"));
    let stored_steps = story.iter().rposition(|call| call.starts_with("events") && call.contains("2]")).unwrap();
    assert!(stored_steps < at("upload 2 adapter.bin adapter.bin"), "{story:?}");
    assert!(at("upload 2 adapter.bin") < at("upload 2 manifest.json manifest.json"), "{story:?}");
    assert!(at("upload 2 manifest.json") < at("publish 2"), "{story:?}");
    assert_eq!(story.iter().filter(|call| call.ends_with("refused")).count(), 2);
    assert_eq!(story.last().unwrap(), "finish succeeded");
}

#[tokio::test]
async fn an_unreachable_reward_service_pauses_the_job_with_a_warning() {
    fn train(_: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        let sample = sample();
        match host.score(&ScoreRequest { id: RolloutId::train(1), samples: &[sample] }) {
            Err(RunEnd::Stopped(stop)) => Err(RunEnd::Stopped(stop)),
            other => panic!("should stop: {other:?}"),
        }
    }
    let claim = down(0);
    let (_, seen) = attempt_at(Seen::default(), train, claim, |_| {}).await;
    let story = seen.story();
    assert!(story.iter().any(|call| call.starts_with("events") && call.contains("reward_outage")), "{story:?}");
    assert_eq!(story.last().unwrap(), "finish paused");
    let at = |text: &str| story.iter().position(|call| call.contains(text)).unwrap_or_else(|| panic!("{story:?}"));
    assert!(at("reward_unanswered") <= at("reward_outage"), "the first failure is told at once: {story:?}");
    assert!(at("append request") < at("reward_unanswered"), "a request is written down before it is sent: {story:?}");
}

#[tokio::test]
async fn heartbeats_continue_while_the_engine_computes() {
    fn train(_: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
        std::thread::sleep(Duration::from_millis(600));
        Ok(())
    }
    let (_, seen) = attempt_with(Seen::default(), train, |_| {}).await;
    assert!(seen.heartbeats() >= 5, "{} heartbeats", seen.heartbeats());
}

#[tokio::test]
async fn a_lost_claim_ends_the_run_and_reports_nothing() {
    fn train(input: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        assert_eq!(until_stopped(host), StopReason::LeaseLost);
        assert!(matches!(save(host, input.scratch_dir, 1), Err(RunEnd::Stopped(StopReason::LeaseLost))));
        Err(RunEnd::Stopped(StopReason::LeaseLost))
    }
    let (ended, seen) = attempt_with(Seen { lost: true, ..Seen::default() }, train, |_| {}).await;
    assert_eq!(ended, None);
    let story = seen.story();
    assert!(
        story.iter().all(|call| ["dataset", "events", "journal"].iter().any(|read| call.starts_with(read))),
        "{story:?}"
    );
}

#[tokio::test]
async fn a_users_request_reaches_the_engine_and_a_pause_may_still_save() {
    fn train(input: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        let stop = until_stopped(host);
        save(host, input.scratch_dir, 1).unwrap();
        Err(RunEnd::Stopped(stop))
    }
    // A stop that arrives while the model is still loading has nothing to save, so both outcomes are correct.
    let (_, seen) = attempt_with(Seen { requested: Some("pause"), ..Seen::default() }, train, |_| {}).await;
    assert_eq!(seen.story().last().unwrap(), "finish paused");
    let (_, seen) = attempt_with(Seen { requested: Some("cancel"), ..Seen::default() }, train_cancelled, |_| {}).await;
    assert_eq!(seen.story().last().unwrap(), "finish cancelled");
}

fn train_cancelled(input: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
    assert_eq!(until_stopped(host), StopReason::Cancel);
    assert!(matches!(save(host, input.scratch_dir, 1), Err(RunEnd::Stopped(StopReason::Cancel))));
    Err(RunEnd::Stopped(StopReason::Cancel))
}

#[tokio::test]
async fn a_worker_that_leaves_requeues_its_job() {
    fn train(_: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        Err(RunEnd::Stopped(until_stopped(host)))
    }
    let (ended, seen) = attempt_with(Seen::default(), train, |worker| {
        let leaving = worker.leaving.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            leaving.cancel();
        });
    })
    .await;
    assert_eq!(ended, None);
    assert_eq!(seen.story().last().unwrap(), "finish requeued");
}

#[tokio::test]
async fn a_worker_exits_in_time_although_its_report_is_not_accepted() {
    fn train(_: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        Err(RunEnd::Stopped(until_stopped(host)))
    }
    let silent = Seen { busy: Mutex::new(u32::MAX), ..Seen::default() };
    let attempt = attempt_with(silent, train, |worker| worker.leaving.cancel());
    let (ended, seen) = tokio::time::timeout(Duration::from_secs(10), attempt).await.expect("it leaves");
    assert_eq!(ended, None);
    assert!(!seen.story().iter().any(|call| call.starts_with("finish")), "{:?}", seen.story());
}

#[tokio::test]
async fn a_panic_of_the_engine_reports_no_outcome_and_ends_the_process() {
    fn train(_: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
        panic!("an engine of the test's own panics");
    }
    let (ended, seen) = attempt_with(Seen::default(), train, |_| {}).await;
    assert_eq!(ended, Some(EXIT_PANIC));
    assert!(!seen.story().iter().any(|call| call.starts_with("finish")), "{:?}", seen.story());
}

#[tokio::test]
async fn a_failed_gpu_reports_no_outcome_and_ends_the_process_so_that_the_job_is_queued_again() {
    fn train(_: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
        Err(RunEnd::Failed(EngineError::Device("an illegal address of the test's own".to_owned())))
    }
    let (ended, seen) = attempt_with(Seen::default(), train, |_| {}).await;
    assert_eq!(ended, Some(EXIT_DEVICE));
    assert!(!seen.story().iter().any(|call| call.starts_with("finish")), "{:?}", seen.story());
}

#[tokio::test]
async fn errors_of_the_engine_and_a_changed_model_fail_the_job_with_their_code() {
    fn train(_: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
        Err(RunEnd::Failed(EngineError::Prompts("a prompt is longer than the context".to_owned())))
    }
    let (ended, seen) = attempt_with(Seen::default(), train, |_| {}).await;
    assert_eq!(ended, None);
    assert_eq!(seen.story().last().unwrap(), "finish failed prompts_invalid");

    let mut changed = claim();
    changed.plan.model.sha256 = "00".repeat(32);
    let (_, seen) = attempt_at(Seen::default(), train, changed, |_| {}).await;
    assert_eq!(seen.story().last().unwrap(), "finish failed model_changed");

    let mut damaged = claim();
    damaged.plan.dataset.sha256 = "11".repeat(32);
    let (_, seen) = attempt_at(Seen::default(), train, damaged, |_| {}).await;
    assert_eq!(seen.story().last().unwrap(), "finish failed transfer_damaged");
    assert_eq!(seen.story().iter().filter(|call| *call == "dataset").count(), 3);
}

#[tokio::test]
async fn an_outage_is_reported_while_the_job_is_waiting() {
    fn train(_: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        let sample = sample();
        match host.score(&ScoreRequest { id: RolloutId::train(1), samples: &[sample] }) {
            Err(RunEnd::Stopped(stop)) => Err(RunEnd::Stopped(stop)),
            other => panic!("should stop: {other:?}"),
        }
    }
    let begun = Instant::now();
    let (_, seen) = attempt_at(Seen::default(), train, down(600), |worker| {
        let leaving = worker.leaving.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            leaving.cancel();
        });
    })
    .await;
    assert!(begun.elapsed() < Duration::from_secs(10));
    let story = seen.story();
    let told = story.iter().filter(|call| call.contains("reward_unanswered")).count();
    assert_eq!(told, 1, "once an outage: {story:?}");
    let waiting = |call: &String| call == "heartbeat waiting_for_reward";
    assert!(seen.calls.lock().unwrap().iter().any(waiting), "the status says so from the first failed try");
    assert_eq!(story.last().unwrap(), "finish requeued");
}

#[tokio::test]
async fn journaled_rollouts_are_not_sampled_again() {
    fn train(_: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        let groups = host.recorded(RolloutId::train(1)).unwrap().expect("the journal's completions");
        assert_eq!((groups[0].row, groups[0].completions[0].segments.ids().as_slice()), (3, [7, 8].as_slice()));
        assert!(host.recorded(RolloutId::train(1).round(1)).unwrap().is_none());
        assert!(host.recorded(RolloutId::eval(1)).unwrap().is_some(), "from the second page");
        Ok(())
    }
    let rollout = |id: RolloutId| {
        json!({"entry": "rollout", "rollout": id, "groups":
               [{"row": 3, "completions": [{"ids": [7, 8], "finish_reason": "stop"}]}]})
    };
    let journal = vec![
        json!({"entries": [rollout(RolloutId::train(1))], "next": 1}),
        json!({"entries": [rollout(RolloutId::eval(1))], "next": null}),
    ];
    let (_, seen) = attempt_with(Seen { journal, ..Seen::default() }, train, |_| {}).await;
    let story = seen.story();
    assert_eq!(story.iter().filter(|call| *call == "journal").count(), 2, "{story:?}");
    assert_eq!(story.last().unwrap(), "finish succeeded");
}

#[tokio::test]
async fn no_request_is_sent_that_could_not_be_journaled() {
    fn train(_: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        let sample = sample();
        match host.score(&ScoreRequest { id: RolloutId::train(1), samples: &[sample] }) {
            Err(RunEnd::Stopped(stop)) => Err(RunEnd::Stopped(stop)),
            other => panic!("should stop: {other:?}"),
        }
    }
    let (_, seen) = attempt_at(Seen { journal_full: true, ..Seen::default() }, train, down(600), |_| {}).await;
    let story = seen.story();
    assert!(story.contains(&"append refused".to_owned()), "{story:?}");
    assert!(!story.iter().any(|call| call.contains("reward_unanswered")), "no try was made: {story:?}");
    assert_eq!(story.last().unwrap(), "finish paused");
}

/// Runs steps for a second or two and then saves a checkpoint, without calling rewards.
fn compute(input: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
    for number in 1..=60 {
        if let Some(stop) = host.stop() {
            return Err(RunEnd::Stopped(stop));
        }
        if let Err(RunEnd::Stopped(stop)) =
            host.event(Event::Step { step: number, kind: SamplePhase::Train, metrics: Metrics::new() })
        {
            return Err(RunEnd::Stopped(stop));
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    match save(host, input.scratch_dir, 60) {
        Ok(()) => Ok(()),
        Err(RunEnd::Stopped(stop)) => Err(RunEnd::Stopped(stop)),
        Err(other) => panic!("{other:?}"),
    }
}

/// Makes the server unreachable after a while, for this many minutes of the worker's clock.
async fn attempt_through_an_outage(minutes: u64) -> (Option<u8>, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let server = seen.clone();
    let outage = async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        server.away.store(true, Ordering::SeqCst);
        for _ in 0..minutes * 6 {
            clock::advance(Duration::from_secs(10));
            tokio::time::sleep(Duration::from_millis(15)).await;
        }
        server.away.store(false, Ordering::SeqCst);
    };
    let (attempt, ()) = tokio::join!(attempt_at(seen, compute, claim(), |_| {}), outage);
    attempt
}

#[tokio::test]
async fn a_worker_survives_an_outage_of_almost_fifteen_minutes() {
    // Just below the limit, because calls that started before the outage count from their first attempt.
    let (ended, seen) = attempt_through_an_outage(14).await;
    assert_eq!(ended, None);
    let story = seen.story();
    let mut steps: Vec<u64> = Vec::new();
    for call in story.iter().filter(|call| call.starts_with("events")) {
        let told: Vec<Value> = serde_json::from_str(call.splitn(3, ' ').nth(2).unwrap()).unwrap();
        steps.extend(told.iter().filter_map(Value::as_u64));
    }
    assert_eq!(steps, (1..=60).collect::<Vec<_>>(), "each step once, in order: {story:?}");
    assert!(story.iter().any(|call| call == "publish 60"), "{story:?}");
    assert_eq!(story.last().unwrap(), "finish succeeded");
}

#[tokio::test]
async fn a_worker_gives_up_after_fifteen_minutes_and_commits_nothing_more() {
    let (ended, seen) = attempt_through_an_outage(16).await;
    assert_eq!(ended, None);
    let story = seen.story();
    assert!(!story.iter().any(|call| call.starts_with("publish") || call.starts_with("finish")), "{story:?}");
}
