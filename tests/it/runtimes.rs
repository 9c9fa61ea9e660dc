//! The runtime `trl` at the API: which jobs are accepted, which worker gets them, and what they say of themselves. The training itself
//! is tested with a runner without TRL in `crates/worker/src/runtime/trl/tests.rs`, and with TRL in `tests/trl`.

use std::collections::BTreeMap;
use std::path::Path;

use rlood::id::WorkerId;
use rlood::protocol::{PROTOCOL, Register};
use rlood::spec::RuntimeFacts;
use rlood::store::clock_ms;
use serde_json::{Value, json};

use crate::server::{Server, copy};

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
    let versions = BTreeMap::from([("trl".to_owned(), "1.16.0".to_owned()), ("torch".to_owned(), "2.15.0".to_owned())]);
    let facts = RuntimeFacts { runtime: "trl".to_owned(), versions, extras: vec![], devices, gpus: false };
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
