//! Tests of rewards with a real HTTP server that injects faults: a sample never gets a number that the service
//! did not give for it.
//!
//! This file is longer than others: it has one test per fault, with the expected state after each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Response, StatusCode};
use rlood_rewards::signature::Key;
use rlood_rewards::{JobContext, RewardFailure, Rewards, Scored};
use rlood_types::event::Event;
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::rollout::{RewardSample, RewardValue, RolloutId};
use rlood_types::spec::{RewardPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::service::{Reply, Service, hang, ok, plan, samples, text, truth};

fn rewards(plans: &[RewardPlan]) -> Rewards {
    Rewards::build(plans, &BTreeMap::new(), &OutgoingPolicy::parse(&["loopback"]).unwrap()).unwrap()
}

fn job() -> JobContext {
    JobContext { job: JobId::new(), rollout: RolloutId::train(12), probe: false }
}

async fn score(url: &str, changes: Value, samples: &[RewardSample]) -> Result<Scored, RewardFailure> {
    rewards(&[plan("r", url, changes)]).score(&job(), samples).await
}

/// Returns the values of the only reward, one per sample.
fn values(scored: &Scored) -> Vec<RewardValue> {
    scored.scores.iter().map(|score| score.values[0]).collect()
}

fn numbers(count: usize) -> Vec<RewardValue> {
    (0..count).map(|index| RewardValue::Number(index as f64)).collect()
}

fn warning(scored: &Scored) -> String {
    match scored.warnings.first() {
        Some(Event::Warning { message, .. }) => message.clone(),
        other => panic!("a warning expected, found {other:?}"),
    }
}

#[tokio::test]
async fn the_request_is_the_contracts_and_its_signature_fits() {
    let service = Service::start(|_, request| ok(&truth(request))).await;
    let secret = Key::generate().unwrap();
    let headers = BTreeMap::from([
        ("authorization".to_owned(), "Bearer t".to_owned()),
        ("webhook-id".to_owned(), "mine".to_owned()),
    ]);
    let secrets = BTreeMap::from([(
        "r".to_owned(),
        RewardSecrets { secret: Some(secret.clone()), headers, ..RewardSecrets::default() },
    )]);
    let plans = [plan("r", &service.url(), json!({"params": {"k": 1}}))];
    let rewards = Rewards::build(&plans, &secrets, &OutgoingPolicy::parse(&["loopback"]).unwrap()).unwrap();
    let job = job();
    let scored = rewards.score(&job, &samples(4, 2)).await.unwrap();
    assert_eq!(values(&scored), numbers(4));
    assert!(scored.warnings.is_empty() && scored.metrics["rewards/r/latency"].unwrap() > 0.0);

    let (headers, body) = service.seen.lock().unwrap()[0].clone();
    let header = |name: &str| headers[name].to_str().unwrap().to_owned();
    let now = jiff::Timestamp::now().as_second() as u64;
    let key = Key::parse(&secret).unwrap();
    let id = header("webhook-id");
    key.verify(&id, &header("webhook-timestamp"), &header("webhook-signature"), &body, now).unwrap();
    assert!(id.starts_with("rwr_") && header("idempotency-key") == id);
    assert_eq!((header("content-type").as_str(), header("authorization").as_str()), ("application/json", "Bearer t"));
    assert_eq!(header("traceparent").split('-').map(str::len).collect::<Vec<_>>(), [2, 32, 16, 2]);
    let request: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(request["type"], "reward.score.request");
    assert_eq!(
        (&request["version"], &request["id"], &request["deadline_ms"]),
        (&json!("1"), &json!(id), &json!(300_000))
    );
    assert_eq!(request["job"], json!({"id": job.job, "step": 12, "phase": "train"}));
    assert_eq!(request["reward"], json!({"name": "r", "params": {"k": 1}}));
    assert_eq!(
        request["samples"][3],
        json!({"sample_id": "s_3", "group_id": "g_1", "prompt_id": "row_1", "messages": [{"role": "user", "content": "What?"}],
               "prompt": "What?", "completion": "c3", "finish_reason": "stop", "num_tokens": 3, "columns": {"reference": 3}})
    );
}

#[tokio::test]
async fn groups_are_sent_together_with_at_most_max_concurrency_requests() {
    let service = Service::start(|_, request| ok(&truth(request))).await;
    let changes = json!({"max_batch_samples": 10, "max_concurrency": 2});
    assert_eq!(values(&score(&service.url(), changes, &samples(40, 4)).await.unwrap()), numbers(40));
    let sizes: Vec<usize> =
        service.requests().iter().map(|request| request["samples"].as_array().unwrap().len()).collect();
    assert_eq!(sizes, [8, 8, 8, 8, 8]);
}

#[tokio::test]
async fn transport_failures_are_retried_with_the_same_id_and_bytes() {
    let service = Service::start(|count, request| match count {
        0 => text(503, "starting"),
        1 => Response::builder().status(429).header("retry-after", "1").body(Body::empty()).unwrap(),
        2 => text(408, ""),
        _ => ok(&truth(request)),
    })
    .await;
    let start = Instant::now();
    assert_eq!(values(&score(&service.url(), json!({}), &samples(2, 2)).await.unwrap()), numbers(2));
    assert!(start.elapsed() >= Duration::from_secs(1), "Retry-After was not honoured");
    let seen = service.seen.lock().unwrap();
    assert_eq!(seen.len(), 4);
    for (headers, body) in seen.iter() {
        assert_eq!((&headers["webhook-id"], body), (&seen[0].0["webhook-id"], &seen[0].1));
    }
}

#[tokio::test]
async fn a_service_that_refuses_or_hangs_or_storms_ends_in_an_outage_not_in_zeros() {
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}/", listener.local_addr().unwrap())
    };
    let hanging = Service::start(|_, _| hang()).await;
    let storm = Service::start(|_, _| {
        Response::builder().status(429).header("retry-after", "3600").body(Body::empty()).unwrap()
    })
    .await;
    for (url, cause) in [(closed, "cannot connect"), (hanging.url(), "no answer within 200 ms"), (storm.url(), "429")] {
        let rewards = rewards(&[plan("r", &url, json!({"timeout_ms": 200, "max_outage_s": 1}))]);
        let start = Instant::now();
        let failure = rewards.score(&job(), &samples(2, 2)).await.unwrap_err();
        assert!(matches!(&failure, RewardFailure::Outage { cause: found, .. } if found.contains(cause)), "{failure}");
        assert_eq!(failure.pause_reason(), Some("reward_outage"));
        assert!(start.elapsed() < Duration::from_secs(5), "{cause}: {:?}", start.elapsed());
        assert!(!rewards.waiting(), "nothing waits any more");
    }
}

#[tokio::test]
async fn an_outage_is_visible_and_the_job_continues_after_it() {
    let service = Service::start(|count, request| if count < 4 { text(500, "") } else { ok(&truth(request)) }).await;
    let rewards = Arc::new(rewards(&[plan("r", &service.url(), json!({}))]));
    let scoring = tokio::spawn({
        let rewards = rewards.clone();
        async move { rewards.score(&job(), &samples(2, 2)).await }
    });
    let mut waited = false;
    while !scoring.is_finished() {
        waited |= rewards.waiting();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(values(&scoring.await.unwrap().unwrap()), numbers(2));
    assert!(waited && !rewards.waiting());
}

#[tokio::test]
async fn dropping_the_future_stops_the_requests() {
    let service = Service::start(|_, _| text(500, "")).await;
    let rewards = rewards(&[plan("r", &service.url(), json!({}))]);
    let cancelled = tokio::time::timeout(Duration::from_millis(300), rewards.score(&job(), &samples(2, 2))).await;
    assert!(cancelled.is_err());
    assert!(!rewards.waiting());
    let before = service.seen.lock().unwrap().len();
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(service.seen.lock().unwrap().len(), before);
}

#[tokio::test]
async fn invalid_answers_are_retried_and_then_missing_with_a_reason() {
    let html = "<html><body>It works!</body></html>";
    let cases: Vec<(Box<Reply>, &str)> = vec![
        (Box::new(move |_, _| text(200, html)), "not JSON"),
        (Box::new(|_, _| ok(&json!({"rewards": [1.0]}))), "1 rewards for 2 samples"),
        (Box::new(|_, _| ok(&json!({"rewards": [1.0, 2.0, 3.0]}))), "3 rewards for 2 samples"),
        (
            Box::new(|_, _| text(200, r#"{"rewards": [NaN, Infinity]}"#)),
            "\"NaN\", not a finite number at index 0 (s_0)",
        ),
        (Box::new(|_, _| ok(&json!({"rewards": ["1.0", "0"]}))), "\"1.0\", not a finite number at index 0"),
        (Box::new(|_, _| ok(&json!({"results": [{"sample_id": "x_9", "reward": 1}]}))), "no result"),
        (Box::new(|_, _| ok(&json!({"id": "rwr_other", "rewards": [1, 2]}))), "another request"),
        (Box::new(|_, _| text(202, "{}")), "202"),
        (Box::new(|_, _| text(200, vec![b'['; 9 << 20])), "larger than 8 MiB"),
    ];
    for (reply, reason) in cases {
        let service = Service::start(reply).await;
        let failure = score(&service.url(), json!({}), &samples(2, 2)).await.unwrap_err();
        // A first rollout without a single valid answer pauses the job, instead of training on nothing.
        assert_eq!(failure.pause_reason(), Some("reward_invalid"), "{failure}");
        assert!(failure.to_string().contains(reason), "expected '{reason}' in: {failure}");
        assert_eq!(service.requests().len(), 3, "{reason}: asked once and retried twice");
    }
}

#[tokio::test]
async fn on_invalid_decides_between_missing_zero_and_failure() {
    let service = Service::start(|_, request| {
        let mut answer = truth(request);
        for result in answer["results"].as_array_mut().unwrap() {
            if result["sample_id"] == "s_1" {
                result["reward"] = json!("high");
            }
        }
        ok(&answer)
    })
    .await;
    let ask = |on_invalid: &str| score_owned(service.url(), json!({"on_invalid": on_invalid}));
    let masked = ask("mask").await.unwrap();
    assert_eq!(values(&masked), [RewardValue::Number(0.0), RewardValue::Missing, RewardValue::Number(2.0)]);
    assert!(warning(&masked).contains("1 of 3 samples have no value") && warning(&masked).contains("\"high\""));
    let zero = ask("zero").await.unwrap();
    assert_eq!(values(&zero), [RewardValue::Number(0.0), RewardValue::Number(0.0), RewardValue::Number(2.0)]);
    assert!(warning(&zero).contains("1 invalid answers count as 0"), "{}", warning(&zero));
    let failure = ask("fail").await.unwrap_err();
    assert_eq!((failure.pause_reason(), failure.to_failure(3).code.as_str()), (None, "reward_invalid"));
    // Only the sample with the invalid answer was requested again.
    let asked = service.requests().iter().map(|r| r["samples"].as_array().unwrap().len()).collect::<Vec<_>>();
    assert_eq!(asked, [3, 1, 1, 3, 1, 1, 3, 1, 1]);
}

#[tokio::test]
async fn a_group_with_fewer_values_than_the_plan_wants_is_left_out_as_a_whole() {
    let service = Service::start(|_, request| {
        let mut answer = truth(request);
        for result in answer["results"].as_array_mut().unwrap() {
            if result["sample_id"] == "s_1" {
                *result = json!({"sample_id": "s_1", "reward": null, "error": {"code": "refused"}});
            } else if result["sample_id"] == "s_5" {
                result["reward"] = Value::Null;
            }
        }
        ok(&answer)
    })
    .await;
    let (number, missing) = (RewardValue::Number, RewardValue::Missing);
    let rest = [number(4.0), RewardValue::NotApplicable, number(6.0), number(7.0)];
    for (min_valid, first) in [
        (2, [number(0.0), missing, number(2.0), number(3.0)]),
        (3, [number(0.0), missing, number(2.0), number(3.0)]),
        (4, [missing; 4]),
    ] {
        let scored = score(&service.url(), json!({"min_valid_per_group": min_valid}), &samples(8, 4)).await.unwrap();
        assert_eq!(values(&scored), [first, rest].concat(), "{min_valid}");
    }
}

async fn score_owned(url: String, changes: Value) -> Result<Scored, RewardFailure> {
    score(&url, changes, &samples(3, 3)).await
}

#[tokio::test]
async fn missing_results_are_requested_again_under_a_new_id() {
    let service = Service::start(|count, request| {
        let mut answer = truth(request);
        if count == 0 {
            let results = answer["results"].as_array_mut().unwrap();
            results.remove(2);
            results.push(json!({"sample_id": "s_0", "reward": 99}));
            results.push(json!({"sample_id": "s_77", "reward": 77}));
        }
        ok(&answer)
    })
    .await;
    assert_eq!(values(&score(&service.url(), json!({}), &samples(4, 4)).await.unwrap()), numbers(4));
    let requests = service.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[1]["samples"].as_array().unwrap().len(), 1);
    assert_eq!(requests[1]["samples"][0]["sample_id"], "s_2");
    assert_ne!(requests[0]["id"], requests[1]["id"]);
}

#[tokio::test]
async fn null_is_not_applicable_an_error_is_missing_and_a_retryable_error_is_retried() {
    let service = Service::start(|count, request| {
        let mut answer = truth(request);
        if count == 0 {
            answer["results"][0] = json!({"sample_id": "s_0", "reward": null});
            answer["results"][1] = json!({"sample_id": "s_1", "reward": null, "error": {"code": "refused"}});
            answer["results"][2] =
                json!({"sample_id": "s_2", "reward": null, "error": {"code": "judge_timeout", "retryable": true}});
        }
        ok(&answer)
    })
    .await;
    let scored = score(&service.url(), json!({}), &samples(4, 4)).await.unwrap();
    let number = RewardValue::Number;
    assert_eq!(values(&scored), [RewardValue::NotApplicable, RewardValue::Missing, number(2.0), number(3.0)]);
    assert!(warning(&scored).contains("refused"));
}

#[tokio::test]
async fn a_413_splits_in_half_until_it_fits() {
    let service = Service::start(|_, request| {
        if request["samples"].as_array().unwrap().len() > 2 { text(413, "") } else { ok(&truth(request)) }
    })
    .await;
    assert_eq!(values(&score(&service.url(), json!({}), &samples(8, 8)).await.unwrap()), numbers(8));
    assert_eq!(service.requests().len(), 7, "8 → 4 + 4 → 2 + 2 + 2 + 2");
    let never = Service::start(|_, _| text(413, "")).await;
    let failure = score(&never.url(), json!({}), &samples(2, 2)).await.unwrap_err();
    assert!(failure.to_string().contains("413 (too large) to a request with a single sample"), "{failure}");
}

#[tokio::test]
async fn a_permanent_4xx_masks_redirects_are_not_followed_and_410_pauses() {
    let target = Service::start(|_, request| ok(&truth(request))).await;
    let elsewhere = target.url();
    let redirect = Service::start(move |_, _| {
        Response::builder().status(307).header("location", elsewhere.clone()).body(Body::empty()).unwrap()
    })
    .await;
    let failure = score(&redirect.url(), json!({}), &samples(2, 2)).await.unwrap_err();
    assert!(failure.to_string().contains("redirects are not followed"), "{failure}");
    assert!(target.requests().is_empty());
    let forbidden = Service::start(|_, _| text(403, "no key")).await;
    let failure = score(&forbidden.url(), json!({}), &samples(2, 2)).await.unwrap_err();
    assert!(failure.to_string().contains("403 Forbidden: no key"), "{failure}");
    assert_eq!(forbidden.requests().len(), 1, "a permanent answer is not retried");
    let gone = Service::start(|_, _| text(StatusCode::GONE.as_u16(), "")).await;
    let failure = score(&gone.url(), json!({}), &samples(2, 2)).await.unwrap_err();
    assert_eq!(failure, RewardFailure::Gone { reward: "r".into() });
    assert_eq!(failure.pause_reason(), Some("reward_gone"));
}

#[tokio::test]
async fn a_broken_body_is_a_transport_failure() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 4096];
            let _ = stream.read(&mut buffer).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"rewards\": [1,").await;
        }
    });
    let changes = json!({"max_outage_s": 0});
    let failure = score(&url, changes, &samples(2, 2)).await.unwrap_err();
    assert!(matches!(failure, RewardFailure::Outage { .. }), "{failure}");
    server.abort();
}

#[tokio::test]
async fn several_rewards_answer_side_by_side_in_the_plans_order() {
    let service = Service::start(|_, request| ok(&truth(request))).await;
    let builtin: RewardPlan = serde_json::from_value(json!({
        "name": "match", "weight": 0.0, "required": false, "type": "exact_match", "column": "completion", "ignore_case": false
    }))
    .unwrap();
    let away = plan("away", "http://127.0.0.1:9/", json!({"required": false, "max_outage_s": 0}));
    let rewards = rewards(&[builtin, plan("r", &service.url(), json!({})), away]);
    let mut samples = samples(2, 2);
    samples[1].columns.insert("completion".to_owned(), json!("c1"));
    let scored = rewards.score(&job(), &samples).await.unwrap();
    let number = RewardValue::Number;
    assert_eq!(scored.scores[0].values, [RewardValue::Missing, number(0.0), RewardValue::Missing]);
    assert_eq!(scored.scores[1].values, [number(1.0), number(1.0), RewardValue::Missing]);
    let messages: Vec<String> = scored.warnings.iter().map(|warning| format!("{warning:?}")).collect();
    assert!(messages.iter().any(|message| message.contains("no column 'completion'")), "{messages:?}");
    assert!(
        messages.iter().any(|message| message.contains("away")),
        "an optional reward's outage is a warning: {messages:?}"
    );
}

#[tokio::test]
async fn addresses_that_are_not_permitted_are_never_reached() {
    let service = Service::start(|_, request| ok(&truth(request))).await;
    let none = OutgoingPolicy::default();
    let literal = [plan("r", &service.url(), json!({}))];
    let error = Rewards::build(&literal, &BTreeMap::new(), &none).err().unwrap();
    assert!(error.to_string().contains("loopback address 127.0.0.1") && error.to_string().contains("--allow-outgoing"));
    let named = [plan("r", &format!("http://localhost:{}/", service.port()), json!({}))];
    let failure =
        Rewards::build(&named, &BTreeMap::new(), &none).unwrap().score(&job(), &samples(2, 2)).await.unwrap_err();
    assert!(matches!(failure, RewardFailure::Refused { .. }), "{failure}");
    assert!(service.requests().is_empty());
}
