//! A whole job against a service with every kind of fault. No reward is invented, and because every reward arrives in the end, the
//! adapter is identical, bit for bit, to that of a run without faults.
//!
//! rlood's own delays are shortened to a hundredth (`--reward-pace`), so that the test takes seconds; their pattern stays the same.
//! `RLOOD_TEST_CHAOS=STEPS` runs longer, with an outage every 250 requests.

use std::collections::BTreeSet;
use std::io::Read;
use std::time::{Duration, Instant};

use rlood_client::Which;
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, spec};
use service::{Fault, Service, Weather};

mod service;

/// Optimizer steps of the short form, each with 8 completions in 4 requests.
const STEPS: u64 = 10;
/// A pause over an outage comes after this, s.
const MAX_OUTAGE_S: u64 = 2;

fn job(service: &Service, secret: &str, steps: u64) -> Value {
    let mut spec = spec("tiny", steps);
    spec["training"]["prompts_per_step"] = json!(4);
    spec["checkpoints"]["every_steps"] = json!(5);
    spec["rewards"] = json!([{
        "name": "wild", "type": "webhook", "url": service.url(), "secret": secret,
        "headers": {"authorization": "Bearer not-to-be-shown"},
        "timeout_ms": 300, "max_batch_samples": 2, "max_concurrency": 4,
        "max_tries": 20, "max_invalid_tries": 100, "max_outage_s": MAX_OUTAGE_S
    }]);
    spec
}

/// Every file of the adapter.
async fn adapter(server: &Server, job: &str) -> Vec<(String, Vec<u8>)> {
    let tar = server.adapter(job, Some(Which::Last)).await;
    let mut archive = tar::Archive::new(tar.as_slice());
    let read = |mut entry: tar::Entry<'_, &[u8]>| {
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.path().unwrap().to_string_lossy().into_owned(), bytes)
    };
    archive.entries().unwrap().map(|entry| read(entry.unwrap())).collect()
}

/// All items of a list.
async fn all(server: &Server, path: &str) -> Vec<Value> {
    let mut items = Vec::new();
    let mut after = String::new();
    loop {
        let page = server.get(&format!("{path}?limit=100{after}")).await;
        items.extend(page["data"].as_array().unwrap().iter().cloned());
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => return items,
        }
    }
}

/// Runs a job to its end; returns the observed states as `state/status_reason`.
async fn run(server: &Server, job: &str, limit: Duration) -> BTreeSet<String> {
    let begun = Instant::now();
    let mut seen = BTreeSet::new();
    loop {
        let view = server.get(&format!("/jobs/{job}")).await;
        let state = view["state"].as_str().unwrap();
        seen.insert(format!("{state}/{}", view["status_reason"].as_str().unwrap_or_default()));
        if ["succeeded", "failed", "cancelled"].contains(&state) {
            assert_eq!(state, "succeeded", "{view}");
            return seen;
        }
        assert!(begun.elapsed() < limit, "it does not end: {view}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn no_reward_is_invented_whatever_the_service_does_and_the_adapter_is_that_of_a_calm_run() {
    let long = std::env::var("RLOOD_TEST_CHAOS").ok().and_then(|steps| steps.parse::<u64>().ok());
    let steps = long.unwrap_or(STEPS);
    let limit = Duration::from_secs(120 + 5 * steps);
    let secret = rlood::reward::signature::Key::generate().unwrap();
    let service = Service::start(&secret).await;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_with(&dir.path().join("data"), "cpu", &["--reward-pace", "0.01"]);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;

    let calm = server.submit(&job(&service, &secret, steps)).await;
    run(&server, &calm, limit).await;
    assert_eq!(service.books().requests as u64, steps * 4);
    let expected = adapter(&server, &calm).await;

    service.books().said.clear();
    service.books().requests = 0;
    let outage_every = if long.is_some() { 250 } else { 75 };
    service.books().weather = Some(Weather { outage_every, outage_lasts: Duration::from_secs(MAX_OUTAGE_S + 2) });
    let wild = server.submit(&job(&service, &secret, steps)).await;
    let seen = run(&server, &wild, limit).await;
    for (name, bytes) in &expected {
        let found = adapter(&server, &wild).await.into_iter().find(|(found, _)| found == name);
        assert!(found.is_some_and(|(_, found)| found == *bytes), "{name} is another one");
    }

    // Recorded rewards were really sent by the service.
    let samples = all(&server, &format!("/jobs/{wild}/samples")).await;
    assert_eq!(samples.len() as u64, steps * 8);
    let faults = service.books().faults.clone();
    let said = service.books().said.clone();
    for sample in &samples {
        let value = sample["rewards"]["wild"].as_f64().unwrap_or_else(|| panic!("no value: {sample}"));
        assert_eq!(sample["reward"].as_f64(), Some(value), "{sample}");
        let values = &said[sample["completion"].as_str().unwrap()];
        assert!(values.contains(&value.to_bits()), "never said: {sample}");
    }

    // Every kind of fault occurred.
    for fault in [
        Fault::None,
        Fault::Error,
        Fault::Timeout,
        Fault::Garbage,
        Fault::WrongLength,
        Fault::Drip,
        Fault::Cut,
        Fault::Partly,
        Fault::Storm,
        Fault::Outage,
    ] {
        assert!(faults.get(&fault).is_some_and(|number| *number > 0), "{fault:?} did not happen: {faults:?}");
    }
    assert!(service.books().pings_while_away > 0, "the server asks while the service is away");
    for state in ["running/waiting_for_reward", "paused/reward_outage"] {
        assert!(seen.contains(state), "{state} was not seen: {seen:?}");
    }
    let events = all(&server, &format!("/jobs/{wild}/events")).await;
    let count = |kind: &str| events.iter().filter(|event| event["type"] == kind).count();
    for kind in ["reward.degraded", "reward.breaker_opened", "reward.breaker_closed", "job.paused", "job.resumed"] {
        assert!(count(kind) > 0, "{kind}");
    }
    let resumed = events.iter().find(|event| event["type"] == "job.resumed").unwrap();
    assert_eq!((&resumed["data"]["by"], &resumed["data"]["reason"]), (&json!("server"), &json!("reward_outage")));
    check_health(&server, &wild).await;
}

/// Checks the health report of the reward after the job's end.
async fn check_health(server: &Server, job: &str) {
    let health = server.get(&format!("/jobs/{job}/rewards")).await;
    let reward = &health["data"][0];
    assert_eq!((&reward["missing"], &reward["missing_fraction"]), (&json!(0), &json!(0.0)), "{reward}");
    for class in ["server_error", "timeout", "rate_limited", "connection", "busy", "invalid_answer"] {
        assert!(reward["errors"][class].as_u64().is_some_and(|number| number > 0), "{class}: {}", reward["errors"]);
    }
    let count = |name: &str| reward[name].as_u64().unwrap();
    assert!(count("requests") > count("answers") && count("retries") > 0, "{reward}");
    let latency = &reward["latency_ms"];
    let [p50, p95, max] = ["p50", "p95", "max"].map(|name| latency[name].as_f64().unwrap());
    assert!(0.0 < p50 && p50 <= p95 && p95 <= max, "{latency}");
    assert!(reward["breaker"]["opened"].as_u64() > Some(0), "{}", reward["breaker"]);
    assert_eq!(reward["breaker"]["state"], "closed");
    assert_eq!(reward["concurrency"]["max"], 4);
    let failures = reward["failures"].as_array().unwrap();
    assert_eq!(failures.len(), 5);
    for failure in failures {
        assert_eq!(failure["request"]["headers"]["idempotency-key"].as_str().unwrap_or("rwr_").get(..4), Some("rwr_"));
        assert!(failure["request"]["body"].as_str().unwrap().contains("reward.score.request"), "{failure}");
        assert!(!failure["samples"].as_array().unwrap().is_empty(), "{failure}");
    }
    assert!(!reward["slowest"]["samples"].as_array().unwrap().is_empty());
    assert!(!health.to_string().contains("not-to-be-shown"));

    let metrics = String::from_utf8(server.bytes("/metrics").await).unwrap();
    let labels = format!("job=\"{job}\",reward=\"wild\",rewards_of=\"train\"");
    for line in [
        format!("rlood_reward_latency_seconds{{{labels},quantile=\"0.95\"}} "),
        format!("rlood_reward_errors_total{{{labels},class=\"timeout\"}} "),
        format!("rlood_reward_breaker_state{{{labels},state=\"closed\"}} 1"),
        format!("rlood_reward_missing_fraction{{{labels}}} 0"),
        format!("rlood_reward_retries_total{{{labels}}} "),
    ] {
        assert!(metrics.contains(&line), "{line}\n{metrics}");
    }
}
