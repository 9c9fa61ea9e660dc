//! The runtime `trl` at the API: which jobs are accepted, which worker gets them, and what they say of themselves. The training itself
//! is tested with a runner without TRL in `crates/worker/src/runtime/trl/tests.rs`, and with TRL in `tests/trl`.

use std::collections::BTreeMap;
use std::path::Path;

use rlood::id::WorkerId;
use rlood::protocol::{PROTOCOL, Register};
use rlood::spec::RuntimeFacts;
use rlood::store::clock_ms;
use serde_json::{Value, json};

use axum::body::Body;
use axum::http::{Request, header};
use rlood::callback::CallbackTerms;
use rlood_test_support::images::png;

use crate::server::{Answer, Server, copy};

fn job(runtime: Value, devices: u32) -> Value {
    let records: Vec<Value> = (0..8).map(|row| json!({"prompt": format!("prompt {row}")})).collect();
    json!({
        "model": "plain", "dataset": {"records": records}, "rewards": [{"type": "length"}], "runtime": runtime,
        "resources": {"devices": devices}, "rloo": {"num_generations": 4},
        "training": {"prompts_per_step": 2, "max_steps": 2}, "sampling": {"max_completion_length": 4}
    })
}

/// Registers a worker with an environment for this many devices; 0 = without one.
async fn worker(server: &Server, devices: u32) -> WorkerId {
    worker_with(server, devices, &[]).await
}

/// Registers a worker whose environment has these extras.
async fn worker_with(server: &Server, devices: u32, extras: &[&str]) -> WorkerId {
    let versions = BTreeMap::from([("trl".to_owned(), "1.16.0".to_owned()), ("torch".to_owned(), "2.15.0".to_owned())]);
    let extras = extras.iter().map(|&extra| extra.to_owned()).collect();
    let facts = RuntimeFacts { runtime: "trl".to_owned(), versions, extras, devices, gpus: false };
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
        runtimes: Some(facts).filter(|_| devices > 0).into_iter().collect(),
    };
    server.state.store.worker_register(&register, clock_ms()).await.unwrap();
    worker
}

fn codes(answer: &Value) -> Vec<(&str, &str)> {
    let errors = answer["errors"].as_array().unwrap().iter();
    errors.map(|error| (error["pointer"].as_str().unwrap(), error["code"].as_str().unwrap())).collect()
}

#[tokio::test]
async fn a_job_of_trl_is_accepted_where_a_worker_has_it_and_says_what_it_guarantees() {
    let server = Server::start().await;
    let refused = server.post("/jobs", job(json!("trl"), 1)).await;
    assert_eq!((refused.status.as_u16(), codes(&refused.body)), (422, vec![("/runtime", "runtime_unavailable")]));
    assert!(refused.text.contains("rlood runtime install trl"), "{}", refused.text);

    worker(&server, 4).await;
    let workers = server.get("/workers").await;
    assert_eq!(workers.body["data"][0]["runtimes"][0]["versions"]["torch"], "2.15.0", "{}", workers.text);
    let accepted = server.post("/jobs", job(json!("trl"), 2)).await;
    assert_eq!(accepted.status, 201, "{}", accepted.text);
    let runtime = &accepted.body["runtime"];
    assert_eq!(runtime["guarantees"], json!({"resume": "exact_cpu", "stop": "step"}));
    assert_eq!((&runtime["name"], &runtime["versions"]["trl"]), (&json!("trl"), &json!("1.16.0")));

    let own = server.post("/jobs", job(json!("own"), 1)).await;
    assert_eq!(own.body["runtime"]["guarantees"], json!({"resume": "exact", "stop": "token"}), "{}", own.text);
    let refused = server.post("/jobs", job(json!("own"), 2)).await;
    assert_eq!(codes(&refused.body), [("/resources/devices", "needs_runtime")]);
    assert!(refused.text.contains(r#"\"runtime\": {\"name\": \"trl\"}"#), "the line to add: {}", refused.text);
    let refused = server.post("/jobs", job(json!("trl"), 8)).await;
    assert_eq!(codes(&refused.body), [("/resources/devices", "out_of_range")]);

    // The document of the job can be submitted again, and asks for the same.
    let id = accepted.body["id"].as_str().unwrap();
    let config = server.get(&format!("/jobs/{id}/config")).await;
    assert_eq!(config.body["runtime"]["name"], "trl", "{}", config.text);
    assert_eq!(config.body["resources"]["devices"], 2);
}

#[tokio::test]
async fn a_job_of_trl_waits_for_a_worker_that_can_run_it_and_blocks_no_other() {
    let server = Server::start().await;
    let (none, two, four) = (worker(&server, 0).await, worker(&server, 2).await, worker(&server, 4).await);
    let large = server.create(job(json!("trl"), 4)).await;
    let small = server.create(job(json!("trl"), 1)).await;
    let own = server.create(job(json!("own"), 1)).await;
    let claim = async |worker| {
        let claimed = server.state.store.job_claim(worker, clock_ms(), 30_000).await.unwrap();
        claimed.map(|claimed| claimed.job)
    };
    assert_eq!(claim(none).await, Some(own), "it takes the first job that it can run");
    assert_eq!(claim(two).await, Some(small));
    assert_eq!(claim(four).await, Some(large));
    assert_eq!(claim(worker(&server, 0).await).await, None);
}

#[tokio::test]
async fn a_model_of_another_architecture_is_registered_where_trl_can_train_it() {
    let server = Server::start().await;
    let dir = server.dir.path().join("newest");
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity/qwen3"), &dir);
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["model_type"] = json!("newest_5");
    std::fs::write(&path, config.to_string()).unwrap();
    let register = || server.post("/models", json!({"id": "newest", "source": dir}));
    let refused = register().await;
    assert_eq!(refused.status, 422, "{}", refused.text);
    assert!(
        refused.text.contains("newest_5") && refused.text.contains("rlood runtime install trl"),
        "{}",
        refused.text
    );

    worker(&server, 1).await;
    let accepted = register().await;
    assert_eq!(accepted.status, 201, "{}", accepted.text);
    let card = &accepted.body["card"];
    assert_eq!((&card["architecture"], &card["needs_runtime"]), (&json!("newest_5"), &json!("trl")));
    let with = |runtime: &str| {
        let mut job = job(json!(runtime), 1);
        job["model"] = json!("newest");
        job
    };
    let refused = server.post("/jobs", with("own")).await;
    assert_eq!(codes(&refused.body), [("/model", "needs_runtime")], "{}", refused.text);
    let accepted = server.post("/jobs", with("auto")).await;
    assert_eq!(
        (accepted.status.as_u16(), &accepted.body["runtime"]["name"]),
        (201, &json!("trl")),
        "{}",
        accepted.text
    );
    let plain = server.get("/models/plain").await;
    assert_eq!(plain.body["card"].get("needs_runtime"), None, "{}", plain.text);
}

/// Registers a model of another architecture, which reads images or does not.
async fn register_foreign(server: &Server, id: &str, reads_images: bool) {
    let dir = server.dir.path().join(id);
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity/qwen3"), &dir);
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["model_type"] = json!("newest_5");
    if reads_images {
        config["vision_config"] = json!({"depth": 2});
    }
    std::fs::write(&path, config.to_string()).unwrap();
    let accepted = server.post("/models", json!({"id": id, "source": dir})).await;
    assert_eq!(accepted.status, 201, "{}", accepted.text);
}

#[tokio::test]
async fn images_need_trl_and_a_model_that_reads_them_and_reach_workers_and_rewards() {
    let server = Server::start().await;
    worker_with(&server, 1, &[]).await;
    register_foreign(&server, "reader", true).await;
    register_foreign(&server, "writer", false).await;
    let bytes = png(3, 4, 0);
    let text = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, &bytes);
    let row = json!({"prompt": [{"role": "user", "content": "?"}], "images": [{"bytes_b64": text}]});
    let upload = Request::post("/datasets").header(header::CONTENT_TYPE, "application/x-ndjson");
    let lines = format!("{row}\n{}\n", json!({"prompt": [{"role": "user", "content": "text"}], "images": []}));
    let dataset = server.send(upload.body(Body::from(lines)).unwrap()).await;
    assert_eq!(dataset.status, 201, "{}", dataset.text);
    let dataset = dataset.body["id"].as_str().unwrap().to_owned();
    let with = |model: &str, runtime: &str| {
        let mut job = job(json!(runtime), 1);
        (job["model"], job["dataset"]) = (json!(model), json!({"id": dataset}));
        job
    };
    let own = server.post("/jobs", with("chat", "own")).await;
    assert_eq!(codes(&own.body), [("/dataset", "needs_runtime")], "{}", own.text);
    assert!(own.text.contains("the job trains on images") && own.text.contains("trl"), "{}", own.text);
    let blind = server.post("/jobs", with("writer", "trl")).await;
    assert_eq!(codes(&blind.body), [("/model", "reads_no_images")], "{}", blind.text);
    let missing = server.post("/jobs", with("reader", "trl")).await;
    assert_eq!(codes(&missing.body), [("/runtime", "runtime_extra_missing")], "{}", missing.text);
    assert!(missing.text.contains("rlood runtime install trl --extras vlm"), "{}", missing.text);

    let able = worker_with(&server, 1, &["vlm"]).await;
    let of_trl = json!({"config": {"max_steps": 1}, "model": "reader", "dataset": {"id": dataset}, "rewards": [{"type": "length"}]});
    let mapped = server.post("/jobs/validate?from=trl", of_trl).await;
    assert_eq!(mapped.body["spec"]["runtime"], json!({"name": "trl"}), "{}", mapped.text);
    let accepted = server.post("/jobs", with("reader", "auto")).await;
    assert_eq!(
        (accepted.status.as_u16(), &accepted.body["runtime"]["name"]),
        (201, &json!("trl")),
        "{}",
        accepted.text
    );
    let inline = json!({"records": [row, row]});
    let refused = server.post("/jobs", crate::server::with(with("reader", "trl"), "dataset", inline)).await;
    let found = codes(&refused.body);
    let expected = ["/dataset/records/0/images", "/dataset/records/1/images"].map(|at| (at, "images_unsupported"));
    assert_eq!(found, expected, "{}", refused.text);

    let claimed = server.state.store.job_claim(able, clock_ms(), 30_000).await.unwrap().unwrap();
    let (job, sha256) = (claimed.job, hex::encode(<sha2::Sha256 as sha2::Digest>::digest(&bytes)));
    let fetch = async |path: String, token: Option<&str>| -> Answer {
        let request = Request::get(path);
        let request = match token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        };
        server.send(request.body(Body::empty()).unwrap()).await
    };
    let token = server.state.config.worker_token.clone();
    let of_worker =
        |dataset: &str, attempt| format!("/worker/jobs/{job}/datasets/{dataset}/images/{sha256}?attempt={attempt}");
    assert_eq!(fetch(of_worker(&dataset, 1), Some(&token)).await.status, 200);
    assert_eq!(fetch(of_worker(&dataset, 2), Some(&token)).await.status, 409, "another attempt");
    assert_eq!(fetch(of_worker(&rlood::id::DatasetId::new().to_string(), 1), Some(&token)).await.status, 404);

    // A reward service reads the image with the token of its URL.
    let key = server.state.store.server_secret("reward_callbacks", "fresh").await.unwrap();
    let terms = CallbackTerms { public_url: Some(String::new()), key };
    let now_s = clock_ms() / 1000;
    let url = terms.image_url(&job.to_string(), &sha256, now_s).unwrap();
    let image = fetch(url.clone(), None).await;
    assert_eq!((image.status.as_u16(), image.headers["content-type"].to_str().unwrap()), (200, "image/png"));
    assert_eq!(fetch(url.replace("token=", "token=x"), None).await.status, 404);
    let later = url.replace("expires=", "expires=9");
    assert_eq!(fetch(later, None).await.status, 404, "the token is of its time");
    let expired = terms.image_url(&job.to_string(), &sha256, now_s - 9 * 86_400).unwrap();
    assert_eq!(fetch(expired, None).await.status, 410);
}
