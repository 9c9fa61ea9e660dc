//! Jobs over HTTP, through the router: lists, state changes, labels, waits.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Request, header};
use rlood::event::Phase;
use rlood::protocol::Outcome;
use rlood::store::{HeartbeatUpdate, clock_ms};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::server::{Answer, Server, job, pointers, with};

#[tokio::test]
async fn jobs_are_listed_newest_first_and_filtered() {
    let server = Server::start().await;
    let mut ids = Vec::new();
    for index in 0..5 {
        let document = with(job(), "metadata", json!({"parity": if index % 2 == 0 { "even" } else { "odd" }}));
        let document = with(document, "name", json!(if index % 2 == 0 { "nightly" } else { "nightly run" }));
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
    assert_eq!(ids_of(&server.get("/jobs?state=cancelled,queued").await), reversed);
    assert_eq!(ids_of(&server.get("/jobs?state=cancelled,failed").await), [ids[4].clone()]);
    assert_eq!(ids_of(&server.get("/jobs?name=nightly+run").await), [ids[3].clone(), ids[1].clone()]);
    assert_eq!(ids_of(&server.get("/jobs?name=nightly&state=cancelled").await), [ids[4].clone()]);
    assert_eq!(ids_of(&server.get("/jobs?name=night").await), Vec::<String>::new());
    assert_eq!(ids_of(&server.get("/jobs?name_contains=night").await), reversed);
    let begin = ids[2][..ids[2].len() - 1].to_uppercase().replace("JOB_", "job_");
    assert_eq!(ids_of(&server.get(&format!("/jobs?id_prefix={begin}")).await), [ids[2].clone()]);
    assert_eq!(ids_of(&server.get("/jobs?id_prefix=job_z").await), Vec::<String>::new());
    for (query, code) in [
        ("state=done", "invalid_query"),
        ("state=queued,done", "invalid_query"),
        ("name=a&name=b", "invalid_query"),
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
    assert_eq!(act("pause").await.body["state"], "paused", "a second pause changes nothing");
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
    // A heartbeat is not an event, but a wait that times out returns its progress.
    let beat = HeartbeatUpdate {
        phase: Phase::Reward,
        status_reason: Some("waiting_for_reward".to_owned()),
        step: 0,
        eta_s: None,
        memory_bytes: None,
    };
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
