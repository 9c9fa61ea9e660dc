//! Jobs over HTTP, through the router: submission, reading, moves, events, metrics, samples.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use rlood::config::ServeConfig;
use rlood::event::{Event, FinishReason, Phase, Sample, SamplePhase};
use rlood::files::DataDir;
use rlood::http::{AppState, router};
use rlood::id::{DatasetId, JobId, WorkerId};
use rlood::protocol::{EventBatch, Outcome, Register};
use rlood::store::{Beat, Store, clock_ms};
use serde_json::{Value, json};
use tower::ServiceExt;

const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

struct Server {
    state: AppState,
    router: Router,
    dir: tempfile::TempDir,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
    body: Value,
}

impl Server {
    /// A server without workers; the models `chat` (with a chat template) and `plain` (without) are registered.
    async fn start() -> Server {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let files = DataDir::open(&data).unwrap();
        let store = Store::open(&files.database()).await.unwrap();
        let config = ServeConfig::loopback(&data).unwrap();
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

    async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Answer { status: parts.status, headers: parts.headers, text, body }
    }

    async fn call(&self, method: &str, path: &str, body: Option<Value>, key: Option<&str>) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        self.send(request.body(body.map_or_else(Body::empty, |body| Body::from(body.to_string()))).unwrap()).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None, None).await
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, Some(body), None).await
    }

    async fn create(&self, body: Value) -> JobId {
        let answer = self.post("/jobs", body).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        answer.body["id"].as_str().unwrap().parse().unwrap()
    }

    /// A worker that claims the next job.
    async fn claim(&self) -> (JobId, u64) {
        let worker = WorkerId::new();
        let register =
            Register { worker, device: "cpu".to_owned(), pid: 1, threads: 1, version: "0".to_owned(), child: false };
        self.state.store.worker_register(&register, clock_ms()).await.unwrap();
        let claimed = self.state.store.job_claim(worker, clock_ms(), 30_000).await.unwrap().unwrap();
        (claimed.job, claimed.attempt)
    }

    async fn report(&self, job: JobId, attempt: u64, batch: u64, events: Vec<Event>) {
        let batch = EventBatch { attempt, batch, events, log: vec![format!("batch {batch}")] };
        assert!(self.state.store.events_append(job, &batch, clock_ms()).await.unwrap());
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

fn records(count: usize) -> Value {
    (0..count).map(|row| json!({"prompt": format!("What is {row} + 1?"), "answer": row + 1})).collect()
}

fn job() -> Value {
    json!({"model": "chat", "dataset": {"records": records(8)}, "rewards": [{"type": "number_match", "column": "answer"}],
           "training": {"max_steps": 20}})
}

fn with(mut document: Value, key: &str, value: Value) -> Value {
    document[key] = value;
    document
}

fn step(step: u64, kind: SamplePhase, metrics: &[(&str, Option<f64>)]) -> Event {
    let metrics = metrics.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect();
    Event::Step { step, kind, metrics }
}

fn sample(step: u64, completion: &str, reward: Option<f64>) -> Sample {
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
    }
}

#[track_caller]
fn pointers(answer: &Answer) -> Vec<String> {
    let errors = answer.body["errors"].as_array().unwrap_or_else(|| panic!("{}", answer.text));
    errors
        .iter()
        .map(|error| format!("{} {}", error["pointer"].as_str().unwrap(), error["code"].as_str().unwrap()))
        .collect()
}

#[tokio::test]
async fn a_job_with_inline_records_is_queued_and_shown() {
    let server = Server::start().await;
    let answer = server.post("/jobs", with(job(), "name", json!("sums"))).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let id = answer.body["id"].as_str().unwrap();
    assert_eq!(answer.headers[header::LOCATION], format!("/jobs/{id}"));
    let shown = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(shown.status, 200);
    let keys: Vec<_> = shown.body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "id",
            "name",
            "state",
            "requested",
            "phase",
            "status_reason",
            "attempt",
            "step",
            "total_steps",
            "eta_s",
            "queue_position",
            "failure",
            "plan",
            "parent",
            "created_at",
            "started_at",
            "finished_at",
            "metadata"
        ]
    );
    assert_eq!((&shown.body["state"], &shown.body["queue_position"]), (&json!("queued"), &json!(1)));
    assert_eq!((&shown.body["name"], &shown.body["total_steps"]), (&json!("sums"), &json!(20)));
    assert!(shown.body["created_at"].as_str().unwrap().ends_with('Z'));
    // The records are a dataset now; the same records are the same one.
    let dataset = shown.body["plan"]["dataset"].clone();
    let stored = server.get(&format!("/datasets/{}", dataset["id"].as_str().unwrap())).await;
    assert_eq!((stored.status, &stored.body["num_rows"]), (StatusCode::OK, &json!(8)));
    assert_eq!(stored.body["sha256"], dataset["sha256"]);
    let again = server.post("/jobs", job()).await;
    assert_eq!(again.body["plan"]["dataset"], dataset);
    assert_eq!(again.body["queue_position"], 2);
}

#[tokio::test]
async fn all_errors_of_a_job_come_at_once_with_pointers() {
    let server = Server::start().await;
    let document = json!({
        "model": "nobody/nothing", "dataset": {"id": DatasetId::new()}, "modle": 1,
        "rewards": [{"type": "length"}, {"type": "length"}, {"type": "webhook", "url": "http://x/", "secret": "hunter2"}],
        "rloo": {"num_generations": 1, "value_model": "x"}, "sampling": {"temperature": 0}, "lora": {"r": 0}, "training": {"max_steps": 0}
    });
    let answer = server.post("/jobs", document.clone()).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (422, &json!("invalid_spec")));
    assert_eq!(answer.headers[header::CONTENT_TYPE], "application/problem+json");
    let mut found = pointers(&answer);
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "/dataset/id unknown_dataset",
            "/lora/r out_of_range",
            "/model unknown_model",
            "/modle unknown_field",
            "/rewards/1/name duplicate",
            "/rewards/2/secret invalid_value",
            "/rloo/num_generations out_of_range",
            "/rloo/value_model foreign_key",
            "/sampling/temperature out_of_range",
            "/training/max_steps out_of_range"
        ]
    );
    assert!(
        answer.text.contains("registered are plain, chat") || answer.text.contains("registered are chat, plain"),
        "{}",
        answer.text
    );
    assert!(!answer.text.contains("hunter2"), "{}", answer.text);
    // The dry run says the same, with 200.
    let dry = server.post("/jobs/validate", document).await;
    assert_eq!((dry.status.as_u16(), &dry.body["valid"], &dry.body["plan"]), (200, &json!(false), &Value::Null));
    assert_eq!(dry.body["errors"].as_array().unwrap().len(), 10);
    assert_eq!(server.get("/jobs").await.body["data"], json!([]));
}

#[tokio::test]
async fn bad_bodies_are_problems() {
    let server = Server::start().await;
    let request = |kind: &str, body: &'static str| {
        Request::post("/jobs").header(header::CONTENT_TYPE, kind).body(Body::from(body)).unwrap()
    };
    for (kind, body, status, code) in [
        ("application/json", "{\"model\": ", 400, "invalid_json"),
        ("application/json", "", 400, "invalid_json"),
        ("text/plain", "{}", 415, "unsupported_media_type"),
        ("application/json", "[]", 422, "invalid_spec"),
        ("application/json", "null", 422, "invalid_spec"),
        ("application/json", "3", 422, "invalid_spec"),
    ] {
        let answer = server.send(request(kind, body)).await;
        assert_eq!(
            (answer.status.as_u16(), answer.body["code"].as_str().unwrap()),
            (status, code),
            "{body}: {}",
            answer.text
        );
    }
    let large = server.post("/jobs", with(job(), "name", json!("x".repeat(17 << 20)))).await;
    assert_eq!(large.status, 413);
}

#[tokio::test]
async fn datasets_that_cannot_train_are_refused() {
    let server = Server::start().await;
    let refused = async |dataset: Value| {
        let answer =
            server.post("/jobs", with(with(job(), "dataset", dataset), "rewards", json!([{"type": "length"}]))).await;
        assert_eq!(answer.status, 422, "{}", answer.text);
        (pointers(&answer), answer.text)
    };
    let (found, _) = refused(json!({"records": []})).await;
    assert_eq!(found, ["/dataset/records empty_dataset"]);
    let (found, text) = refused(json!({"records": records(7)})).await;
    assert_eq!(found, ["/training/prompts_per_step dataset_too_small"]);
    assert!(text.contains("nearest valid value is 7"), "{text}");
    let mut rows = records(8);
    rows[3] = json!({"question": "?"});
    rows[5] = json!({"prompt": "x", "images": []});
    let (found, _) = refused(json!({"records": rows})).await;
    assert_eq!(found, ["/dataset/records/3/prompt missing_prompt", "/dataset/records/5/images images_unsupported"]);
}

#[tokio::test]
async fn chat_messages_need_a_template_and_prompts_must_fit_the_context() {
    let server = Server::start().await;
    let chat: Vec<_> = (0..8).map(|row| json!({"prompt": [{"role": "user", "content": format!("{row}?")}]})).collect();
    let document = json!({"model": "plain", "dataset": {"records": chat}, "rewards": [{"type": "length"}]});
    let answer = server.post("/jobs", document.clone()).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/dataset no_chat_template".to_owned()]));
    server.create(with(document, "model", json!("chat"))).await;

    let mut rows = records(8);
    rows[2]["prompt"] = json!("word ".repeat(400));
    let answer = server.post("/jobs", with(job(), "dataset", json!({"records": rows}))).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/dataset prompt_too_long".to_owned()]));
    let detail = answer.body["errors"][0]["detail"].as_str().unwrap();
    assert!(
        detail.contains("at most 256 tokens") && detail.contains("(row 2)") && detail.starts_with("1 prompts"),
        "{detail}"
    );

    // The default completion length gives way to the context (256); an explicit one does not.
    let fitted = server.post("/jobs/validate", job()).await;
    let longest = fitted.body["estimate"]["longest_prompt_tokens"].as_u64().unwrap();
    assert!((5..40).contains(&longest), "{longest}");
    assert_eq!(fitted.body["plan"]["sampling"]["max_completion_length"].as_u64().unwrap(), 256 - longest);
    let long = server.post("/jobs/validate", with(job(), "sampling", json!({"max_completion_length": 256}))).await;
    assert_eq!(pointers(&long), ["/sampling/max_completion_length out_of_range"]);
}

#[tokio::test]
async fn a_model_that_cannot_be_read_any_more_is_an_error_of_the_job() {
    let server = Server::start().await;
    let plain: PathBuf = server.dir.path().join("plain");
    std::fs::remove_file(plain.join("tokenizer.json")).unwrap();
    let answer = server.post("/jobs", with(job(), "model", json!("plain"))).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/model invalid_model".to_owned()]));
    assert!(answer.text.contains("tokenizer.json"), "{}", answer.text);
    assert!(!answer.text.contains(server.dir.path().to_str().unwrap()), "{}", answer.text);
}

#[tokio::test]
async fn a_model_whose_files_changed_since_it_was_registered_must_be_registered_again() {
    let server = Server::start().await;
    let plain: PathBuf = server.dir.path().join("plain");
    let job = || with(job(), "model", json!("plain"));
    let weights = plain.join("model.safetensors");
    // The same bytes at another time are the same model.
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes).unwrap();
    server.create(job()).await;
    let mut changed = bytes;
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &changed).unwrap();
    for path in ["/jobs", "/jobs/validate"] {
        let answer = server.post(path, job()).await;
        assert_eq!(pointers(&answer), ["/model model_changed"], "{}", answer.text);
        assert!(answer.text.contains("register it again"), "{}", answer.text);
    }
    let again = server.post("/models", json!({"id": "plain", "source": plain})).await;
    assert_eq!(again.status, 200, "{}", again.text);
    assert!(again.body["card"]["stamp"].is_null() && again.body["card"]["num_parameters"].is_u64(), "{}", again.text);
    server.create(job()).await;
}

#[tokio::test]
async fn a_model_that_is_no_model_is_refused_with_what_it_is() {
    let server = Server::start().await;
    let dir = server.dir.path().join("spoiled");
    copy(&server.dir.path().join("plain"), &dir);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n";
    let page = "<!DOCTYPE html>\n<html><body>Access denied</body></html>";
    for (file, text, expected) in [
        ("tokenizer.json", "{\"model\": {}}", "tokenizer.json: is not a tokenizer"),
        ("model.safetensors", pointer, "model.safetensors: is a Git LFS pointer"),
        ("model.safetensors", page, "model.safetensors: is a web page"),
        ("tokenizer.json", pointer, "tokenizer.json: is a Git LFS pointer"),
        ("config.json", page, "config.json: is a web page"),
        ("chat_template.jinja", "{% if", "the chat template failed"),
    ] {
        let good = std::fs::read(dir.join(file)).ok();
        std::fs::write(dir.join(file), text).unwrap();
        let answer = server.post("/models", json!({"id": "spoiled", "source": dir})).await;
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (422, &json!("invalid_model")), "{file} {text}");
        assert!(answer.body["detail"].as_str().unwrap().contains(expected), "{}", answer.text);
        match good {
            Some(good) => std::fs::write(dir.join(file), good).unwrap(),
            None => std::fs::remove_file(dir.join(file)).unwrap(),
        }
    }
    assert_eq!(server.post("/models", json!({"id": "spoiled", "source": dir})).await.status, 201);
}

#[tokio::test]
async fn a_reward_url_that_this_server_must_not_reach_is_refused_at_submission() {
    let server = Server::start().await;
    for (url, refused) in [
        ("http://10.0.0.5/score", true),
        ("http://[::ffff:10.0.0.1]/", true),
        ("http://169.254.169.254/latest", true),
        ("http://0x0a000001/", true),
        ("http://127.0.0.1:9/score", false),
        ("https://1.1.1.1/score", false),
        // Names are checked when they resolve.
        ("https://rm.example/score", false),
    ] {
        let rewards = json!([{"type": "length"}, {"type": "webhook", "url": url}]);
        let document = with(job(), "rewards", rewards);
        let checked = server.post("/jobs/validate", document.clone()).await;
        let submitted = server.post("/jobs", document).await;
        let expected: &[&str] = if refused { &["/rewards/1/url address_refused"] } else { &[] };
        assert_eq!(pointers(&checked), expected, "{url}: {}", checked.text);
        assert_eq!(submitted.status, if refused { 422 } else { 201 }, "{url}: {}", submitted.text);
        assert_eq!(refused, submitted.text.contains("--allow-outgoing"), "{url}: {}", submitted.text);
    }
}

#[tokio::test]
async fn a_completion_length_of_zero_is_one_error() {
    let server = Server::start().await;
    let answer = server.post("/jobs", with(job(), "sampling", json!({"max_completion_length": 0}))).await;
    assert_eq!(pointers(&answer), ["/sampling/max_completion_length out_of_range"]);
    assert!(answer.text.contains("not 0"), "{}", answer.text);
}

#[tokio::test]
async fn a_dry_run_resolves_the_plan_and_stores_nothing() {
    let server = Server::start().await;
    let answer = server.post("/jobs/validate", with(job(), "optimizer", json!({"learning_rate": 1e-6}))).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.body["valid"], &answer.body["errors"]),
        (200, &json!(true), &json!([]))
    );
    assert_eq!(answer.body["warnings"][0]["code"], "low_learning_rate");
    assert_eq!(
        (&answer.body["plan"]["totals"]["completions"], &answer.body["plan"]["dataset"]["id"]),
        (&json!(640), &Value::Null)
    );
    assert!(answer.body["estimate"]["trainable_parameters"].as_u64().unwrap() > 0);
    assert_eq!(server.get("/datasets").await.body["data"], json!([]));
    for (query, status, code) in [
        ("from=trl", 422, "unsupported"),
        // This server starts no processes.
        ("probe=true", 501, "not_implemented"),
        ("probe=true&probe_prompts=65", 400, "invalid_query"),
        ("probe=true&probe_timeout_s=0", 400, "invalid_query"),
    ] {
        let answer = server.post(&format!("/jobs/validate?{query}"), job()).await;
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (status, &json!(code)), "{}", answer.text);
    }
}

#[tokio::test]
async fn a_form_brings_the_dataset_along() {
    let server = Server::start().await;
    let form = |spec: &Value, rows: &str| {
        let body = format!(
            "--B\r\ncontent-disposition: form-data; name=\"spec\"\r\ncontent-type: application/json\r\n\r\n{spec}\r\n\
             --B\r\ncontent-disposition: form-data; name=\"dataset\"; filename=\"rows.csv\"\r\n\r\n{rows}\r\n--B--\r\n"
        );
        Request::post("/jobs")
            .header(header::CONTENT_TYPE, "multipart/form-data; boundary=B")
            .body(Body::from(body))
            .unwrap()
    };
    let mut spec = job();
    spec.as_object_mut().unwrap().remove("dataset");
    let rows: String = (0..9).map(|row| format!("What is {row}?,{row}\r\n")).collect();
    let answer = server.send(form(&spec, &format!("prompt,answer\r\n{rows}"))).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let dataset = &answer.body["plan"]["dataset"];
    assert_eq!(dataset["num_rows"], 9);
    assert_eq!(
        server.get(&format!("/datasets/{}", dataset["id"].as_str().unwrap())).await.body["columns"],
        json!(["prompt", "answer"])
    );
    let config = server.get(&format!("/jobs/{}/config", answer.body["id"].as_str().unwrap())).await;
    assert_eq!(config.body["dataset"], json!({"id": dataset["id"]}));
    // Errors of the spec and of the rows.
    let answer = server.send(form(&job(), "prompt\na\n")).await;
    assert_eq!(answer.status, 422);
    assert!(pointers(&answer).contains(&"/dataset conflict".to_owned()), "{}", answer.text);
    let answer = server.send(form(&spec, "question\na\n")).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (422, &json!("invalid_dataset")));
}

#[tokio::test]
async fn the_same_idempotency_key_makes_one_job() {
    let server = Server::start().await;
    let first = server.call("POST", "/jobs", Some(job()), Some("k1")).await;
    let second = server.call("POST", "/jobs", Some(job()), Some("k1")).await;
    assert_eq!((first.status.as_u16(), second.status.as_u16()), (201, 201));
    assert_eq!(first.text, second.text);
    assert_eq!(second.headers["idempotency-replayed"], "true");
    assert_eq!(second.headers[header::LOCATION], first.headers[header::LOCATION]);
    assert_eq!(server.get("/jobs").await.body["data"].as_array().unwrap().len(), 1);
    let other = server.call("POST", "/jobs", Some(with(job(), "name", json!("other"))), Some("k1")).await;
    assert_eq!((other.status.as_u16(), &other.body["code"]), (422, &json!("idempotency_mismatch")));
    // A refused body frees its key.
    let bad = server.call("POST", "/jobs", Some(json!({})), Some("k2")).await;
    assert_eq!(bad.status, 422);
    assert_eq!(server.call("POST", "/jobs", Some(job()), Some("k2")).await.status, 201);
}

#[tokio::test]
async fn the_configuration_can_be_submitted_again_and_shows_no_secret() {
    let server = Server::start().await;
    let mut document = job();
    document["rewards"] = json!([
        {"type": "webhook", "name": "rm", "url": "http://127.0.0.1:9/score", "secret": SECRET, "headers": {"x-key": "hush"}, "params": {"a": null}},
        {"type": "contains", "text": "x", "weight": 0}
    ]);
    document["eval"] = json!({"dataset": {"records": records(3)}, "temperature": 0.5});
    document["rloo"] = json!({"kl_coef": 0.1, "reward_clip_range": [-1, 1]});
    document["metadata"] = json!({"team": "x"});
    let id = server.create(document).await;
    let config = server.get(&format!("/jobs/{id}/config")).await;
    assert_eq!(config.status, 200);
    let again = server.post("/jobs", config.body.clone()).await;
    assert_eq!(again.status, 201, "{}", again.text);
    let first = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(first.body["plan"], again.body["plan"]);
    assert_eq!(again.body["plan"]["rloo"]["reward_clip_range"], json!([-1.0, 1.0]));
    for text in [&config.text, &first.text, &again.text, &server.get(&format!("/jobs/{id}/events")).await.text] {
        assert!(!text.contains("whsec_") && !text.contains("hush"), "{text}");
    }
    assert_eq!(server.state.store.job_secrets(id).await.unwrap()["rm"].secret.as_deref(), Some(SECRET));
    assert_eq!(server.get(&format!("/jobs/{id}/config?format=toml")).await.status, 400);
}

#[tokio::test]
async fn jobs_are_listed_newest_first_and_filtered() {
    let server = Server::start().await;
    let mut ids = Vec::new();
    for index in 0..5 {
        let document = with(job(), "metadata", json!({"parity": if index % 2 == 0 { "even" } else { "odd" }}));
        ids.push(server.create(document).await.to_string());
    }
    server.post(&format!("/jobs/{}/cancel", ids[4]), Value::Null).await;
    let ids_of = |answer: &Answer| -> Vec<String> {
        let data = answer.body["data"].as_array().unwrap_or_else(|| panic!("{}", answer.text));
        data.iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    };
    let reversed: Vec<String> = ids.iter().rev().cloned().collect();
    assert_eq!(ids_of(&server.get("/jobs").await), reversed);
    let mut paged = Vec::new();
    let mut path = "/jobs?limit=2".to_owned();
    loop {
        let page = server.get(&path).await;
        paged.extend(ids_of(&page));
        match page.body["next"].as_str() {
            Some(next) => path = format!("/jobs?limit=2&after={next}"),
            None => break,
        }
    }
    assert_eq!(paged, reversed);
    assert_eq!(ids_of(&server.get("/jobs?metadata.parity=odd").await), [ids[3].clone(), ids[1].clone()]);
    assert_eq!(ids_of(&server.get("/jobs?state=cancelled&model=chat").await), [ids[4].clone()]);
    assert_eq!(ids_of(&server.get("/jobs?model=plain").await), Vec::<String>::new());
    for (query, code) in [
        ("state=done", "invalid_query"),
        ("limit=0", "invalid_query"),
        ("limit=101", "invalid_query"),
        ("limit=x", "invalid_query"),
        ("page=2", "invalid_query"),
        ("after=stale", "invalid_cursor"),
    ] {
        let answer = server.get(&format!("/jobs?{query}")).await;
        assert_eq!((answer.status.as_u16(), answer.body["code"].as_str().unwrap()), (400, code), "{query}");
    }
}

#[tokio::test]
async fn illegal_moves_say_where_the_job_stands_and_what_it_allows() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let act = async |action: &str| server.post(&format!("/jobs/{id}/{action}"), Value::Null).await;
    let refused = |answer: &Answer, words: &[&str]| {
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (409, &json!("illegal_move")), "{}", answer.text);
        let detail = answer.body["detail"].as_str().unwrap();
        assert!(words.iter().all(|word| detail.contains(word)), "{detail}");
    };
    refused(&act("resume").await, &["queued", "cancel", "pause"]);
    refused(&act("retry").await, &["queued"]);
    refused(&server.call("DELETE", &format!("/jobs/{id}"), None, None).await, &["queued"]);
    assert_eq!(act("pause").await.body["state"], "paused");
    assert_eq!(act("resume").await.body["state"], "queued");
    assert_eq!(act("cancel").await.body["state"], "cancelled");
    assert_eq!(act("cancel").await.status, 200);
    refused(&act("pause").await, &["cancelled", "retry", "delete"]);
    let retried = act("retry").await;
    assert_eq!((retried.status.as_u16(), &retried.body["parent"]), (201, &json!(id)));
    assert_eq!(
        retried.headers[header::LOCATION].to_str().unwrap(),
        format!("/jobs/{}", retried.body["id"].as_str().unwrap())
    );
    assert_eq!(server.call("DELETE", &format!("/jobs/{id}"), None, None).await.status, 204);
    assert_eq!(server.get(&format!("/jobs/{id}")).await.status, 404);
    for path in ["config", "events", "metrics", "samples", "logs", "summary"] {
        assert_eq!(server.get(&format!("/jobs/{id}/{path}")).await.status, 404, "{path}");
    }
    assert_eq!(server.get("/jobs/nonsense").await.status, 404);
}

#[tokio::test]
async fn name_labels_and_priority_can_be_changed() {
    let server = Server::start().await;
    let first = server.create(job()).await;
    let second = server.create(with(job(), "name", json!("old"))).await;
    let path = format!("/jobs/{second}");
    let answer =
        server.call("PATCH", &path, Some(json!({"name": null, "metadata": {"a": "b"}, "priority": 5})), None).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!((&answer.body["name"], &answer.body["metadata"]), (&Value::Null, &json!({"a": "b"})));
    assert_eq!(
        (&answer.body["queue_position"], &server.get(&format!("/jobs/{first}")).await.body["queue_position"]),
        (&json!(1), &json!(2))
    );
    let config = server.get(&format!("{path}/config")).await.body;
    assert_eq!((&config["metadata"], &config["priority"], config.get("name")), (&json!({"a": "b"}), &json!(5), None));
    let answer = server.call("PATCH", &path, Some(json!({"state": "running"})), None).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/state unknown_field".to_owned()]));
}

#[tokio::test]
async fn a_wait_ends_when_the_job_does_and_not_before() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let begun = std::time::Instant::now();
    assert_eq!(server.get(&format!("/jobs/{id}?wait=1")).await.body["state"], "queued");
    assert!(begun.elapsed() >= Duration::from_millis(900));
    let (path, router) = (format!("/jobs/{id}?wait=600"), server.router.clone());
    let waiting = tokio::spawn(async move {
        let response = router.oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
        let bytes = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        serde_json::from_slice::<Value>(&bytes).unwrap()
    });
    let (job, attempt) = server.claim().await;
    assert_eq!(job, id);
    assert!(!waiting.is_finished());
    // A heartbeat is no event, but a wait that ends without one tells its news.
    let beat =
        Beat { phase: Phase::Reward, status_reason: Some("waiting_for_reward".to_owned()), step: 0, eta_s: None };
    let path = format!("/jobs/{id}?wait=2");
    let beating = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.state.store.job_heartbeat(id, attempt, beat, clock_ms(), 30_000).await.unwrap();
    };
    let (late, ()) = tokio::join!(server.get(&path), beating);
    assert_eq!(late.body["status_reason"], "waiting_for_reward");
    server.state.store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();
    let body = tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap().unwrap();
    assert_eq!(body["state"], "succeeded");
    assert_eq!(server.get(&format!("/jobs/{id}?wait=3601")).await.status, 400);
}

/// Reads a stream of server-sent events piece by piece.
struct Stream {
    body: Body,
    text: String,
}

impl Stream {
    async fn open(server: &Server, path: &str, last_event_id: Option<&str>) -> Stream {
        let mut request = Request::get(path).header(header::ACCEPT, "text/event-stream");
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        let response = server.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Stream { body: response.into_body(), text: String::new() }
    }

    /// The next event as (id, event, data); None when the stream is over.
    async fn next(&mut self) -> Option<(Option<i64>, String, Value)> {
        tokio::time::timeout(Duration::from_secs(10), self.read()).await.expect("an event within 10 s")
    }

    async fn read(&mut self) -> Option<(Option<i64>, String, Value)> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim().to_owned())
                };
                let (id, event, data) = (field("id:"), field("event:"), field("data:"));
                self.text = rest.to_owned();
                match data {
                    Some(data) => {
                        let id = id.map(|id| id.parse().unwrap());
                        return Some((id, event.unwrap(), serde_json::from_str(&data).unwrap()));
                    }
                    None => continue,
                }
            }
            let frame = self.body.frame().await?;
            self.text.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap());
        }
    }
}

#[tokio::test]
async fn a_cut_stream_goes_on_without_gap_or_duplicate_and_ends_with_end() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    // More than one page of replay.
    let warning = |n: u64| Event::Warning { code: "w".to_owned(), message: n.to_string(), data: json!({"n": n}) };
    let warnings = |count: u64, from: u64| (from..from + count).map(warning).collect::<Vec<_>>();
    server.report(id, attempt, 0, warnings(250, 0)).await;
    let path = format!("/jobs/{id}/events");
    let mut stream = Stream::open(&server, &path, None).await;
    let mut seen = Vec::new();
    while seen.len() < 117 {
        seen.push(stream.next().await.unwrap().0.unwrap());
    }
    drop(stream);
    server.report(id, attempt, 1, warnings(30, 250)).await;
    let mut stream = Stream::open(&server, &path, Some(&seen.last().unwrap().to_string())).await;
    let mut finished = false;
    let end = loop {
        let (seq, event, data) = stream.next().await.unwrap();
        let Some(seq) = seq else { break (event, data) };
        assert_eq!((data["seq"].as_i64(), data["type"].as_str()), (Some(seq), Some(event.as_str())));
        seen.push(seq);
        if seen.len() == 270 && !finished {
            // Live: what happens while the client listens arrives too.
            server.report(id, attempt, 2, warnings(10, 280)).await;
            server.state.store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();
            finished = true;
        }
    };
    assert_eq!((end.0.as_str(), &end.1), ("end", &json!({"state": "succeeded"})));
    assert!(stream.next().await.is_none());
    let latest = server.state.store.event_latest_seq(id).await.unwrap();
    assert_eq!(seen, (1..=latest).collect::<Vec<_>>());
    assert!(latest >= 290);
    // After the end a stream replays what was missed and ends again; ?after= does the same.
    let mut stream = Stream::open(&server, &format!("{path}?after={}", latest - 1), None).await;
    let last = stream.next().await.unwrap();
    assert_eq!((last.0, last.1.as_str()), (Some(latest), "job.succeeded"));
    assert_eq!(stream.next().await.unwrap().1, "end");

    // The same as pages.
    let page = server.get(&format!("{path}?after=100&limit=50")).await;
    let seqs: Vec<_> =
        page.body["data"].as_array().unwrap().iter().map(|event| event["seq"].as_i64().unwrap()).collect();
    assert_eq!((seqs, page.body["next"].as_str()), ((101..=150).collect(), Some("150")));
    let keys: Vec<_> = page.body["data"][0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["seq", "type", "time", "attempt", "data"]);
    assert_eq!(server.get(&format!("{path}?after={}", latest)).await.body, json!({"data": [], "next": null}));
    assert_eq!(server.get(&format!("{path}?after=x")).await.body["code"], "invalid_cursor");
}

#[tokio::test]
async fn metrics_come_merged_thinned_and_in_three_forms() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let mut events = vec![step(0, SamplePhase::Eval, &[("eval_reward", Some(0.25))])];
    for n in 1..=300_u64 {
        let reward = match n {
            137 => 9.5,
            211 => -7.25,
            _ => (n as f64 * 0.37).sin(),
        };
        events.push(step(
            n,
            SamplePhase::Train,
            &[("reward", Some(reward)), ("kl", Some(0.001 * n as f64)), ("reward_std", None)],
        ));
        if n % 100 == 0 {
            events.push(step(n, SamplePhase::Eval, &[("eval_reward", Some(0.5))]));
        }
    }
    server.report(id, attempt, 0, events).await;
    let path = format!("/jobs/{id}/metrics");
    let all = server.get(&path).await;
    let rows = all.body["data"].as_array().unwrap();
    assert_eq!((rows.len(), &all.body["next"]), (301, &Value::Null));
    assert_eq!(rows[0], json!({"step": 0, "eval_reward": 0.25}));
    assert_eq!(
        rows[100],
        json!({"step": 100, "eval_reward": 0.5, "kl": 0.1, "reward": (37.0_f64).sin(), "reward_std": null})
    );

    let thin = server.get(&format!("{path}?keys=reward&max_points=20")).await;
    let rows = thin.body["data"].as_array().unwrap();
    assert!((8..=20).contains(&rows.len()), "{}", rows.len());
    assert!(
        rows.contains(&json!({"step": 137, "reward": 9.5})) && rows.contains(&json!({"step": 211, "reward": -7.25}))
    );
    assert_eq!((&rows[0]["step"], &rows[rows.len() - 1]["step"]), (&json!(1), &json!(300)));
    assert_eq!(thin.text, server.get(&format!("{path}?keys=reward&max_points=20")).await.text);

    let range = server.get(&format!("{path}?keys=reward,kl&min_step=10&max_step=12")).await;
    let steps: Vec<_> =
        range.body["data"].as_array().unwrap().iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [10, 11, 12]);
    let csv = server.get(&format!("{path}?keys=eval_reward,reward_std&max_step=2&format=csv")).await;
    assert_eq!(
        (csv.headers[header::CONTENT_TYPE].to_str().unwrap(), csv.text.as_str()),
        ("text/csv; charset=utf-8", "step,eval_reward,reward_std\n0,0.25,\n1,,\n2,,\n")
    );
    let lines = server.get(&format!("{path}?keys=kl&min_step=1&max_step=2&format=ndjson")).await;
    assert_eq!(lines.text, "{\"step\":1,\"kl\":0.001}\n{\"step\":2,\"kl\":0.002}\n");
    for query in ["max_points=1", "format=xml", "min_step=x", "points=3"] {
        assert_eq!(server.get(&format!("{path}?{query}")).await.status, 400, "{query}");
    }

    let summary = server.get(&format!("/jobs/{id}/summary")).await;
    assert_eq!(summary.status, 200, "{}", summary.text);
    assert_eq!((&summary.body["reward"]["best"], &summary.body["reward"]["best_step"]), (&json!(9.5), &json!(137)));
    assert_eq!(
        summary.body["eval_reward"],
        json!({"first": 0.25, "last": 0.5, "best": 0.5, "best_step": 100, "change": 0.25})
    );
    assert_eq!(
        (&summary.body["checkpoints"]["count"], &summary.body["totals"]["optimizer_steps"]),
        (&json!(0), &json!(20))
    );
}

#[tokio::test]
async fn samples_are_sorted_searched_and_paged() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let samples = vec![
        sample(1, "alpha", Some(0.5)),
        sample(1, "beta", None),
        sample(2, "gamma", Some(1.5)),
        sample(2, "delta", Some(-1.0)),
    ];
    server.report(id, attempt, 0, vec![Event::Samples { samples }]).await;
    let path = format!("/jobs/{id}/samples");
    let found = async |query: &str| -> Vec<String> {
        let answer = server.get(&format!("{path}?{query}")).await;
        let data = answer.body["data"].as_array().unwrap_or_else(|| panic!("{}", answer.text));
        data.iter().map(|sample| sample["completion"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(found("sort=best").await, ["gamma", "alpha", "delta", "beta"]);
    assert_eq!(found("sort=worst&limit=2").await, ["delta", "alpha"]);
    assert_eq!(found("step=1&sort=best").await, ["alpha", "beta"]);
    assert_eq!(found("q=ALPH").await, ["alpha"]);
    assert_eq!(found("phase=eval").await, Vec::<String>::new());
    let first = server.get(&format!("{path}?sort=best&limit=3")).await;
    let rest = found(&format!("sort=best&limit=3&after={}", first.body["next"].as_str().unwrap())).await;
    assert_eq!(rest, ["beta"]);
    let keys: Vec<_> = first.body["data"][0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        keys,
        [
            "step",
            "phase",
            "group_id",
            "prompt_id",
            "prompt",
            "completion",
            "rewards",
            "reward",
            "kl",
            "advantage",
            "finish_reason",
            "num_tokens"
        ]
    );
    assert_eq!(server.get(&format!("{path}?sort=random")).await.status, 400);
    let logs = server.get(&format!("/jobs/{id}/logs")).await;
    assert_eq!((&logs.body["data"][0]["line"], &logs.body["data"][0]["attempt"]), (&json!("batch 0"), &json!(attempt)));
}

#[tokio::test]
async fn a_running_job_is_paused_by_a_mark() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    server.claim().await;
    let answer = server.post(&format!("/jobs/{id}/pause"), Value::Null).await;
    assert_eq!((&answer.body["state"], &answer.body["requested"]), (&json!("running"), &json!("pause")));
    let answer = server.post(&format!("/jobs/{id}/cancel"), Value::Null).await;
    assert_eq!((&answer.body["state"], &answer.body["requested"]), (&json!("running"), &json!("cancel")));
    assert_eq!(answer.body["queue_position"], Value::Null);
}

#[test]
fn the_document_describes_a_submitted_job() {
    let document = serde_json::to_value(rlood::http::openapi()).unwrap();
    let spec = &document["components"]["schemas"]["JobSpec"];
    assert_eq!(spec["required"], json!(["model", "dataset", "rewards"]));
    assert_eq!(spec["additionalProperties"], json!(false));
    assert_eq!(spec["properties"]["rloo"]["properties"]["beta"]["default"], json!(0.05));
    assert_eq!(spec["properties"]["rloo"]["required"], Value::Null);
    let rewards = spec["properties"]["rewards"]["items"]["oneOf"].as_array().unwrap();
    let webhook = &rewards[0];
    assert_eq!(webhook["required"], json!(["type", "url"]));
    assert_eq!(
        (&webhook["properties"]["secret"]["writeOnly"], &webhook["properties"]["timeout_ms"]["default"]),
        (&json!(true), &json!(30_000))
    );
    // Every reference leads somewhere.
    let text = document.to_string();
    for reference in text.split("\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(document["components"]["schemas"].get(reference).is_some(), "{reference}");
    }
}
