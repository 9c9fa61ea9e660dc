//! Reward health through the router: worker reports are shown, also after the job's end, and only to the job's owner.

use rlood::event::{Event, RewardChange};
use rlood::protocol::{
    BreakerReport, BreakerState, FailedTry, Outcome, RawMessage, RewardHealth, RewardLatency, RewardReport,
    RewardReports,
};
use rlood::store::{StoreError, clock_ms};
use serde_json::{Value, json};

use crate::server::{SECRET, Server, job, with};

fn document() -> Value {
    let webhook = json!({"type": "webhook", "name": "judge", "url": "http://127.0.0.1:9/score", "secret": SECRET});
    let eval = json!({"dataset": {"records": [{"prompt": "p", "answer": 1}]}, "every_steps": 5,
                      "rewards": [{"type": "number_match", "column": "answer", "name": "judge"}]});
    with(with(job(), "rewards", json!([webhook, {"type": "length"}])), "eval", eval)
}

fn report(name: &str, evaluation: bool, missing: u64) -> RewardReport {
    let health = RewardHealth {
        samples: 8,
        missing,
        requests: 5,
        retries: 2,
        answers: 3,
        answers_ms: 1500.0,
        latency_ms: Some(RewardLatency { p50: 400.0, p95: 700.0, max: 700.0 }),
        errors: [("timeout".to_owned(), 2), ("sample".to_owned(), 1)].into(),
        degraded: true,
        breaker: Some(BreakerReport {
            state: BreakerState::Open,
            opened: 1,
            failures_in_a_row: 5,
            retry_at_ms: Some(1_767_225_600_000),
        }),
        failures: vec![FailedTry {
            time_ms: 1_767_225_600_000,
            class: "timeout".to_owned(),
            message: "no answer within 300 ms".to_owned(),
            latency_ms: 300.0,
            step: 2,
            samples: vec!["row_0/s_0".to_owned()],
            request: RawMessage { url: Some("http://127.0.0.1:9/score".to_owned()), ..RawMessage::default() },
            response: None,
        }],
        ..RewardHealth::default()
    };
    RewardReport { name: name.to_owned(), evaluation, health }
}

#[tokio::test]
async fn what_a_worker_tells_is_shown_and_stays_when_the_job_is_over() {
    let server = Server::start().await;
    let id = server.create(document()).await;
    let path = format!("/jobs/{id}/rewards");
    let fresh = server.get(&path).await.body;
    let names: Vec<Value> = fresh["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|reward| json!([reward["name"], reward["type"], reward["evaluation"]]))
        .collect();
    assert_eq!(
        json!(names),
        json!([["judge", "webhook", false], ["length", "length", false], ["judge", "number_match", true]])
    );
    assert_eq!((&fresh["data"][0]["samples"], &fresh["data"][0]["updated_at"]), (&json!(0), &Value::Null));

    let (_, attempt) = server.claim().await;
    let store = &server.state.store;
    let reports = |attempt, missing| RewardReports {
        attempt,
        rewards: vec![report("judge", false, missing), report("judge", true, 0)],
    };
    store.reward_reports_store(id, &reports(attempt, 1), clock_ms()).await.unwrap();
    store.reward_reports_store(id, &reports(attempt, 2), clock_ms()).await.unwrap();
    let late = store.reward_reports_store(id, &reports(attempt + 1, 8), clock_ms()).await;
    assert!(matches!(late, Err(StoreError::LeaseLost)), "{late:?}");
    let change = Event::Reward {
        reward: "judge".to_owned(),
        change: RewardChange::BreakerOpened,
        message: "reward 'judge': …".to_owned(),
        data: json!({"open_s": 30}),
    };
    server.report(id, attempt, 0, vec![change]).await;
    store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();

    let shown = server.get(&path).await.body["data"][0].clone();
    assert_eq!((&shown["missing_fraction"], &shown["failed"], &shown["retries"]), (&json!(0.25), &json!(2), &json!(2)));
    assert_eq!(shown["latency_ms"], json!({"p50": 400.0, "p95": 700.0, "max": 700.0}));
    assert_eq!(
        shown["breaker"],
        json!({"state": "open", "opened": 1, "failures_in_a_row": 5, "retry_at": "2026-01-01T00:00:00.000Z"})
    );
    assert_eq!(shown["failures"][0]["time"], "2026-01-01T00:00:00.000Z");
    let events = server.get(&format!("/jobs/{id}/events")).await.body;
    let opened = events["data"].as_array().unwrap().iter().find(|event| event["type"] == "reward.breaker_opened");
    assert_eq!(opened.unwrap()["data"]["reward"], "judge");

    let text = server.get("/metrics").await.text;
    let labels = format!("job=\"{id}\",reward=\"judge\",rewards_of");
    for line in [
        format!("rlood_reward_missing_total{{{labels}=\"train\"}} 2"),
        format!("rlood_reward_missing_total{{{labels}=\"eval\"}} 0"),
        format!("rlood_reward_breaker_state{{{labels}=\"train\",state=\"open\"}} 1"),
        format!("rlood_reward_breaker_state{{{labels}=\"train\",state=\"closed\"}} 0"),
        format!("rlood_reward_errors_total{{{labels}=\"train\",class=\"timeout\"}} 2"),
        format!("rlood_reward_latency_seconds{{{labels}=\"train\",quantile=\"0.5\"}} 0.4"),
        format!("rlood_reward_latency_seconds_sum{{{labels}=\"train\"}} 1.5"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert_eq!(server.get("/jobs/job_00000000000000000000000000/rewards").await.status, 404);
    assert_eq!(server.call("DELETE", &format!("/jobs/{id}"), None, None).await.status, 204);
    assert!(!server.get("/metrics").await.text.contains(&id.to_string()), "a deleted job leaves nothing");
}

#[tokio::test]
async fn a_report_that_is_too_long_is_kept_without_its_texts() {
    let server = Server::start().await;
    let id = server.create(document()).await;
    let (_, attempt) = server.claim().await;
    let mut large = report("judge", false, 1);
    large.health.failures[0].request.body = "x".repeat(400_000);
    let reports = RewardReports { attempt, rewards: vec![large] };
    server.state.store.reward_reports_store(id, &reports, clock_ms()).await.unwrap();
    let health = server.state.store.reward_health(id).await.unwrap().remove(0).report.health;
    assert_eq!((health.missing, health.failures.len()), (1, 0));
}
