//! A key that is revoked while one of its requests waits.

use std::time::{Duration, Instant};

use axum::http::header;
use rlood::id::WorkerId;
use rlood::job::State;
use rlood::scopes::Scope;
use rlood::store::clock_ms;
use serde_json::json;

use crate::access::{OPERATOR, call, key, with_operator};
use crate::server::job;

/// Waits until the condition is true.
async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < Duration::from_secs(30), "in time");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_key_that_is_revoked_while_its_question_waits_gets_no_answer() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await;
    let patient = key(&server, "alice", &[Scope::Read]).await;
    let doomed = key(&server, "alice", &[Scope::Read]).await;
    let created = call(&server, "POST", "/jobs", &alice.text, Some(&job())).await;
    let path = format!("/jobs/{}", created.body["id"].as_str().unwrap());
    for (key, status) in [(&patient, 200), (&doomed, 401)] {
        let waiting = async { call(&server, "GET", &format!("{path}?wait=30"), &key.text, None).await };
        let meanwhile = async {
            // The request was admitted, and waits for longer than any other response takes.
            until(async || server.state.store.api_key_get(key.id).await.unwrap().used_at.is_some()).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
            if status == 401 {
                server.state.store.api_key_revoke(key.id, clock_ms()).await.unwrap();
            }
            let step = if status == 401 { "cancel" } else { "pause" };
            assert_eq!(call(&server, "POST", &format!("{path}/{step}"), OPERATOR, None).await.status, 200);
        };
        let (answer, ()) = tokio::join!(waiting, meanwhile);
        assert_eq!(answer.status, status, "{}", answer.text);
        if status == 401 {
            assert!(!answer.text.contains("plan"), "{}", answer.text);
            assert!(answer.headers[header::WWW_AUTHENTICATE].to_str().unwrap().starts_with("Bearer"));
        } else {
            assert_eq!(call(&server, "POST", &format!("{path}/resume"), OPERATOR, None).await.status, 200);
        }
    }
}

#[tokio::test]
async fn a_worker_whose_key_is_revoked_while_it_waits_gets_no_job() {
    let server = with_operator().await;
    let worker_key = key(&server, "machines", &[Scope::Worker]).await;
    let worker = WorkerId::new();
    let register = json!({"worker": worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0", "child": false});
    let store = &server.state.store;
    store.worker_register(&serde_json::from_value(register).unwrap(), 1).await.unwrap();
    let body = json!({"worker": worker, "wait_ms": 30_000, "protocol": rlood::protocol::PROTOCOL});
    let waiting = async { call(&server, "POST", "/worker/claim", &worker_key.text, Some(&body)).await };
    let meanwhile = async {
        // The request has checked the queue, which is empty.
        until(async || store.worker_list().await.unwrap()[0].seen_at > 1).await;
        store.api_key_revoke(worker_key.id, clock_ms()).await.unwrap();
        call(&server, "POST", "/jobs", OPERATOR, Some(&job())).await.body["id"].as_str().unwrap().parse().unwrap()
    };
    let (claimed, id) = tokio::join!(waiting, meanwhile);
    assert_eq!(claimed.status, 401, "{}", claimed.text);
    assert_eq!(store.job_get(id).await.unwrap().state, State::Queued);
}
