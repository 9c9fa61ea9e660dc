//! The reward contract as JSON Schema: the committed files match the document, and real requests and responses are valid.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use boon::{Compiler, Schemas};
use rlood::commands::reward_check::examine;
use rlood::config::RewardCheckArgs;
use rlood::demo::reward_service::ExampleService;
use rlood::http::schemas::contract_schemas;
use rlood::outgoing::OutgoingPolicy;
use rlood::reward::webhook::Webhook;
use rlood::reward::{JobContext, Rewards};
use rlood::rollout::RolloutId;
use rlood::spec::{RewardKind, RewardPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::server::SECRET;
use crate::service::{Service, ok, plan, samples, truth};

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi/reward-contract")
}

/// Returns why a value does not match a committed schema; `None` if it matches.
pub fn complaint(file: &str, value: &Value) -> Option<String> {
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    let schema: Value = serde_json::from_slice(&std::fs::read(committed().join(file)).unwrap()).unwrap();
    let id = schema["$id"].as_str().unwrap().to_owned();
    compiler.add_resource(&id, schema).unwrap();
    let index = compiler.compile(&id, &mut schemas).unwrap();
    schemas.validate(value, index).err().map(|error| error.to_string())
}

fn policy() -> OutgoingPolicy {
    OutgoingPolicy::parse(&["loopback"]).unwrap()
}

fn build(plans: &[RewardPlan]) -> Rewards {
    Rewards::build(plans, &BTreeMap::new(), &policy()).unwrap()
}

#[track_caller]
pub fn fits(file: &str, value: &Value) {
    assert_eq!(complaint(file, value), None, "{file}: {value:#}");
}

#[test]
fn the_committed_schemas_are_what_the_document_says() {
    let generated = contract_schemas();
    for (name, text) in &generated {
        let found = std::fs::read_to_string(committed().join(name)).unwrap_or_default();
        assert!(
            found == *text,
            "openapi/reward-contract/{name} is old: run `cargo run --release -- openapi --schemas openapi/reward-contract`"
        );
    }
    let files = std::fs::read_dir(committed()).unwrap().count();
    assert_eq!(files, generated.len(), "a file that nobody writes");
}

#[tokio::test]
async fn what_a_job_sends_and_what_services_answer_fit() {
    let service = Service::start(|_, request| match request["type"].as_str() {
        Some("reward.ping") => ok(&json!({"max_batch_samples": 4, "modes": ["sync"], "range": [-1, 1.5]})),
        _ => ok(&truth(request)),
    })
    .await;
    let rewards = build(&[plan("r", &service.url(), json!({"max_batch_samples": 4}))]);
    let job = JobContext { job: rlood::id::JobId::new(), rollout: RolloutId::train(3), probe: false };
    rewards.score(&job, &samples(12, 4)).await.unwrap();
    let probe = JobContext { probe: true, ..job };
    let mut plain = samples(1, 1);
    plain[0].messages = None;
    let image = json!({"sha256": "0".repeat(64), "media_type": "image/png", "width": 2, "height": 3});
    plain[0].columns.insert("images".to_owned(), json!([image]));
    rewards.score(&probe, &plain).await.unwrap();
    let seen: Vec<Value> =
        service.seen.lock().unwrap().iter().map(|(_, body)| serde_json::from_slice(body).unwrap()).collect();
    assert_eq!(seen.len(), 4);
    for request in &seen {
        fits("request.schema.json", request);
        fits("answer.schema.json", &truth(request));
    }
    assert_eq!(seen[3]["samples"][0]["images"], json!([image]), "references, and no address without a public one");
    assert_eq!(seen[3]["samples"][0]["columns"].get("images"), None);
    let mut later = seen[0].clone();
    later["reply"] =
        json!({"modes": ["sync", "async"], "callback_url": "https://r.example/reward-callbacks/x", "token": "t"});
    fits("request.schema.json", &later);

    let webhook = plan("r", &service.url(), json!({}));
    let RewardKind::Webhook(webhook) = webhook.kind else { panic!("a webhook") };
    let webhook = Webhook::new("r", &webhook, &RewardSecrets::default(), &policy()).unwrap();
    assert!(webhook.ping().await.ok);
    let ping = serde_json::from_slice(&service.seen.lock().unwrap().last().unwrap().1).unwrap();
    fits("ping.schema.json", &ping);
    fits("ping-answer.schema.json", &json!({"max_batch_samples": 4, "modes": ["sync"], "range": [-1, 1.5]}));
    fits("ping-answer.schema.json", &json!({}));
}

#[tokio::test]
async fn what_a_check_asks_is_a_request_of_the_contract_too() {
    let service = Service::start(|_, request| {
        ok(&json!({"rewards": vec![0.5; request["samples"].as_array().map_or(0, Vec::len)]}))
    })
    .await;
    let args = RewardCheckArgs {
        url: service.url(),
        secret: None,
        headers: Vec::new(),
        samples: None,
        columns: Vec::new(),
        params: None,
        timeout_ms: 5_000,
        max_batch_samples: 32,
        callback_listen: "127.0.0.1:0".to_owned(),
        callback_url: None,
        json: true,
        strict: false,
    };
    examine(&args, false).await.unwrap();
    let seen: Vec<Value> =
        service.seen.lock().unwrap().iter().filter_map(|(_, body)| serde_json::from_slice(body).ok()).collect();
    let requests: Vec<&Value> =
        seen.iter().filter(|body| body["version"] == "1" && body["samples"].is_array()).collect();
    assert!(requests.len() > 30, "{}", requests.len());
    for request in requests.into_iter().filter(|request| request["type"] == "reward.score.request") {
        fits("request.schema.json", request);
    }
    let example = ExampleService::start(SECRET).await.unwrap();
    assert!(
        examine(&RewardCheckArgs { url: example.url(), secret: Some(SECRET.to_owned()), ..args }, false)
            .await
            .unwrap()
            .ok
    );
}

#[test]
fn every_form_of_an_answer_fits_and_what_is_none_does_not() {
    for answer in [
        json!({"version": "1", "id": "rwr_1", "results": [
            {"sample_id": "s_0", "reward": 0.73, "metrics": {"x": 1}, "reason": "so"},
            {"sample_id": "s_1", "reward": null, "error": {"code": "judge_timeout", "message": "late", "retryable": true}}]}),
        json!({"rewards": [0.1, null]}),
        json!({"scores": [1]}),
        json!([0.1, null, -3]),
        json!({"reward": null}),
    ] {
        fits("answer.schema.json", &answer);
    }
    for answer in
        [json!({}), json!({"rewards": ["1"]}), json!(0.5), json!({"results": [{"reward": 1}]}), json!({"ok": true})]
    {
        assert!(complaint("answer.schema.json", &answer).is_some(), "{answer}");
    }
    fits("accepted.schema.json", &json!({"id": "rwr_1", "eta_ms": 5000}));
    fits("callback.schema.json", &json!({"results": [{"sample_id": "s_0", "reward": 1}], "done": true}));
    fits("callback.schema.json", &json!({"done": true}));
    fits("callback-answer.schema.json", &json!({"accepted": 1, "duplicate": 0, "unknown": 2}));
    assert!(complaint("callback.schema.json", &json!({"results": {"s_0": 1}})).is_some());
    assert!(complaint("request.schema.json", &json!({"type": "reward.score.request", "version": "1"})).is_some());
    assert!(complaint("ping.schema.json", &json!({"type": "reward.pong", "version": "1", "id": "rwr_1"})).is_some());
}
