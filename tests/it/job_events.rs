//! A job's events over HTTP: pages, and a stream that resumes after a disconnect.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, header};
use rlood::event::Event;
use rlood::id::{CheckpointId, VerdictId};
use rlood::job::State;
use rlood::protocol::Outcome;
use rlood::store::retention::Leftover;
use rlood::store::{NewTask, TaskEnd, TaskKind, clock_ms};
use rlood_client::{JobUpdate, JobUpdates};
use serde_json::{Value, json};

use crate::server::{Server, job};

async fn next(updates: &mut JobUpdates) -> Option<JobUpdate> {
    tokio::time::timeout(Duration::from_secs(10), updates.next()).await.expect("an event within 10 s").unwrap()
}

/// Returns the sequence number of an event.
fn seq(update: Option<JobUpdate>) -> i64 {
    match update {
        Some(JobUpdate::Event(event)) => event.seq,
        other => panic!("{other:?}"),
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
    let client = server.client().await;
    let mut updates = client.follow_job(id, 0);
    let mut seen = Vec::new();
    while seen.len() < 117 {
        seen.push(seq(next(&mut updates).await));
    }
    drop(updates);
    server.report(id, attempt, 1, warnings(30, 250)).await;
    let mut updates = client.follow_job(id, seen[116]);
    while seen.len() < 270 {
        seen.push(seq(next(&mut updates).await));
    }
    // Live: what happens while the client listens arrives too.
    server.report(id, attempt, 2, warnings(10, 280)).await;
    server.state.store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();
    let end = loop {
        match next(&mut updates).await {
            Some(JobUpdate::End { state }) => break state,
            event => seen.push(seq(event)),
        }
    };
    assert_eq!((end, next(&mut updates).await), (State::Succeeded, None));
    let latest = server.state.store.event_latest_seq(id).await.unwrap();
    assert_eq!(seen, (1..=latest).collect::<Vec<_>>());
    assert!(latest >= 290);
    // After the end a stream replays missed events and ends again; ?after= has the same effect. The exact bytes:
    let after = format!("{path}?after={}", latest - 1);
    let request = Request::get(after).header(header::ACCEPT, "Text/Event-Stream").body(Body::empty()).unwrap();
    let raw = server.send(request).await;
    assert_eq!((raw.status.as_u16(), &raw.headers[header::CONTENT_TYPE]), (200, &"text/event-stream".parse().unwrap()));
    let (head, events) = raw.text.split_once("\n\n").unwrap();
    assert_eq!(head, "retry: 3000\n: events of the job follow");
    let (last, end) = events.split_once("\n\n").unwrap();
    let (fields, data) = last.split_once("data: ").unwrap();
    assert_eq!(fields, format!("id: {latest}\nevent: job.succeeded\n"));
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!((data["seq"].as_i64(), data["type"].as_str()), (Some(latest), Some("job.succeeded")));
    assert_eq!(end, "event: end\ndata: {\"state\":\"succeeded\"}\n\n");

    // The same as pages.
    let page = server.get(&format!("{path}?after=100&limit=50")).await;
    let seqs: Vec<_> =
        page.body["data"].as_array().unwrap().iter().map(|event| event["seq"].as_i64().unwrap()).collect();
    assert_eq!((seqs, page.body["next"].as_str()), ((101..=150).collect(), Some("150")));
    let keys: Vec<_> = page.body["data"][0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["seq", "type", "time", "attempt", "data"]);
    assert_eq!(server.get(&format!("{path}?after={}", latest)).await.body, json!({"data": [], "next": null}));
    assert_eq!(server.get(&format!("{path}?after=x")).await.body["code"], "invalid_cursor");
    // A number that the job has not reached belongs to events missing from a backup: it must not be ignored.
    let beyond = latest + 1;
    for accept in ["application/json", "text/event-stream"] {
        let request = || Request::get(&path).header(header::ACCEPT, accept);
        let header = request().header("last-event-id", beyond.to_string());
        let query = Request::get(format!("{path}?after={beyond}")).header(header::ACCEPT, accept);
        for request in [header, query] {
            let refused = server.send(request.body(Body::empty()).unwrap()).await;
            assert_eq!((refused.status.as_u16(), &refused.body["code"]), (400, &json!("invalid_cursor")), "{accept}");
            assert!(refused.body["detail"].as_str().unwrap().contains(&latest.to_string()), "{}", refused.text);
        }
    }
    // The newest event stays a valid cursor after retention removed the events.
    let retained = server.state.store.leftovers_remove(Leftover::Events, clock_ms() + 1).await.unwrap();
    assert!(retained > 0);
    let over = Some(JobUpdate::End { state: State::Succeeded });
    assert_eq!(next(&mut client.follow_job(id, latest)).await, over);
    // A client that missed removed events is notified.
    let mut updates = client.follow_job(id, 5);
    assert_eq!(next(&mut updates).await, Some(JobUpdate::Removed { to_seq: latest }));
    assert_eq!(next(&mut updates).await, over);
    let page = server.get(&format!("{path}?after=5")).await.body;
    assert_eq!(page, json!({"data": [], "next": null, "removed": {"to_seq": latest}}));
    assert_eq!(server.get(&format!("{path}?after={latest}")).await.body, json!({"data": [], "next": null}));
}

#[tokio::test]
async fn the_stream_of_a_job_with_a_verdict_ends_when_that_is_complete() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let store = &server.state.store;
    store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();
    let task =
        |kind, id: String, job| NewTask { id, kind, job, checkpoint: CheckpointId::new(), step: 1, request: json!({}) };
    let verdict = || task(TaskKind::Verdict, VerdictId::new().to_string(), id);
    store.task_create(verdict(), clock_ms()).await.unwrap();
    let client = server.client().await;
    let kind = |update: Option<JobUpdate>| match update {
        Some(JobUpdate::Event(event)) => event.kind,
        other => panic!("{other:?}"),
    };
    let quiet = async |updates: &mut JobUpdates| {
        let waited = tokio::time::timeout(Duration::from_millis(300), updates.next()).await;
        assert!(waited.is_err(), "the verdict is not complete: {waited:?}");
    };
    let mut updates = client.follow_job(id, 0);
    let mut kinds = Vec::new();
    while kinds.last().is_none_or(|kind| kind != "verdict.queued") {
        kinds.push(kind(next(&mut updates).await));
    }
    assert!(kinds.contains(&"job.succeeded".to_owned()), "{kinds:?}");
    quiet(&mut updates).await;
    let running = store.task_claim(TaskKind::Verdict, clock_ms()).await.unwrap().unwrap();
    quiet(&mut updates).await;
    let error = json!({"code": "killed", "message": "the process was killed"});
    store.task_finish(&running, TaskEnd::Failed(error), clock_ms()).await.unwrap();
    assert_eq!(kind(next(&mut updates).await), "verdict.failed");
    let over = Some(JobUpdate::End { state: State::Succeeded });
    assert_eq!(next(&mut updates).await, over);

    // The newest verdict counts, and no export.
    let second = store.task_create(verdict(), clock_ms() + 1).await.unwrap();
    let export = task(TaskKind::Export, "exp_01jd0000000000000000000000".to_owned(), id);
    store.task_create(export, clock_ms() + 2).await.unwrap();
    let mut updates = client.follow_job(id, updates.last_seq());
    assert_eq!(kind(next(&mut updates).await), "verdict.queued");
    assert_eq!(kind(next(&mut updates).await), "export.queued");
    quiet(&mut updates).await;
    store.task_cancel(TaskKind::Verdict, &second.id, clock_ms()).await.unwrap();
    assert_eq!(kind(next(&mut updates).await), "verdict.cancelled");
    assert_eq!(next(&mut updates).await, over);
}
