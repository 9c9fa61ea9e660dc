//! The limit of a reward's values and the scope of its cache, in jobs and in `POST /rewards/test`.

use serde_json::{Value, json};

use crate::server::{Server, job, pointers, with};
use crate::service::{Service, ok, text};

#[tokio::test]
async fn a_new_job_has_a_limit_and_bounded_weights() {
    let server = Server::start().await;
    let reward = |more: Value| {
        let mut reward = json!({"type": "number_match", "column": "answer"});
        reward.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with(job(), "rewards", json!([reward]))
    };
    for (more, pointer) in [
        (json!({"weight": 1_000_001}), "/rewards/0/weight out_of_range"),
        (json!({"weight": -1e9}), "/rewards/0/weight out_of_range"),
        (json!({"max_abs_reward": 0}), "/rewards/0/max_abs_reward out_of_range"),
        (json!({"max_abs_reward": 1e13}), "/rewards/0/max_abs_reward out_of_range"),
        (json!({"max_abs_reward": "big"}), "/rewards/0/max_abs_reward invalid_type"),
        (json!({"max_abs_reward": 0.5}), "/rewards/0/max_abs_reward conflict"),
        (json!({"blank_reference": "zero"}), "/rewards/0/blank_reference invalid_value"),
    ] {
        let answer = server.post("/jobs", reward(more.clone())).await;
        assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec![pointer.to_owned()]), "{more}");
    }
    let answer = server.post("/jobs", reward(json!({"weight": -1e6}))).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let stored = &answer.body["plan"]["rewards"][0];
    assert_eq!((&stored["max_abs_reward"], &stored["blank_reference"]), (&json!(1e6), &json!("not_applicable")));
    // The configuration contains both, and can be submitted again.
    let config = server.get(&format!("/jobs/{}/config", answer.body["id"].as_str().unwrap())).await.body;
    assert_eq!(server.post("/jobs", config).await.body["plan"]["rewards"][0], *stored);
    let asked = server.post("/jobs", reward(json!({"max_abs_reward": 5, "blank_reference": "compare"}))).await;
    let asked = &asked.body["plan"]["rewards"][0];
    assert_eq!((&asked["max_abs_reward"], &asked["blank_reference"]), (&json!(5.0), &json!("compare")));
}

#[tokio::test]
async fn a_test_of_a_reward_obeys_the_same_rules() {
    let server = Server::start().await;
    let service = Service::start(|_, request| {
        let key = "10000000";
        match request["type"].as_str() {
            Some("reward.ping") => ok(&json!({"modes": [key]})),
            _ => text(200, format!(r#"{{"results": [{{"sample_id": "s_0", "reward": 0.10000000149011612, "reason": "{key}", "metrics": {{"a": 10000000, "b": "{key}"}}}}, {{"sample_id": "s_1", "reward": 2e6}}]}}"#)),
        }
    })
    .await;
    let samples = json!([{"prompt": "p", "completion": "a", "answer": " "}, {"prompt": "p", "completion": "b"}]);
    let reward = json!({"type": "webhook", "url": service.url(), "headers": {"x-tenant": "10000000"}});
    let tested = server.post("/rewards/test", json!({"reward": reward, "samples": samples})).await;
    let results = &tested.body["results"];
    assert_eq!(results[0]["reward"], 0.10000000149011612, "{}", tested.text);
    assert_eq!(results[0]["reason"], "(redacted)");
    assert_eq!(results[0]["metrics"], json!({"a": 10_000_000, "b": "(redacted)"}));
    assert_eq!((&results[1]["reward"], &results[1]["error"]["code"]), (&Value::Null, &json!("invalid_value")));
    assert_eq!(tested.body["ping"]["reply"]["modes"], json!(["(redacted)"]));
    let shown = tested.body["exchanges"][1]["response"]["body"].as_str().unwrap();
    assert!(shown.contains("0.10000000149011612") && !shown.contains("\"10000000\""), "{shown}");

    let blank = json!({"type": "contains", "column": "answer"});
    let tested = server.post("/rewards/test", json!({"reward": blank, "samples": samples})).await;
    assert_eq!(tested.body["ok"], true, "{}", tested.text);
    for result in tested.body["results"].as_array().unwrap() {
        assert_eq!((&result["not_applicable"], &result["reward"]), (&json!(true), &Value::Null));
    }
    assert!(tested.body["warnings"][0].as_str().unwrap().contains("sample 's_1' has no column 'answer'"));
}

#[tokio::test]
async fn a_claim_names_no_owner_and_jobs_of_one_owner_share_their_scope() {
    let server = Server::start().await;
    let mut scopes = Vec::new();
    for _ in 0..2 {
        server.create(job()).await;
        scopes.push(crate::protocol::claim(&server).await["cache_scope"].as_str().unwrap().to_owned());
    }
    assert_eq!(scopes[0], scopes[1]);
    assert_eq!(scopes[0].len(), 64);
    let other = Server::start().await;
    other.create(job()).await;
    assert_ne!(
        crate::protocol::claim(&other).await["cache_scope"],
        scopes[0].as_str(),
        "nobody can guess it from a name"
    );
}
