//! Tests of following one job and all jobs over connections that break.

use std::time::Duration;

use futures::TryStreamExt;
use rlood_client::{Error, JobChange, JobUpdate};
use rlood_types::id::JobId;
use rlood_types::job::State;
use serde_json::json;

use crate::fake::{Fake, Reply, Seen, job};

fn id() -> JobId {
    "job_01jd0000000000000000000000".parse().unwrap()
}

fn event(seq: i64) -> String {
    let data =
        json!({"seq": seq, "type": "step", "time": "2026-01-01T00:00:00.000Z", "attempt": 1, "data": {"step": seq}});
    format!("id: {seq}\nevent: step\ndata: {data}\n\n")
}

fn events(seqs: impl IntoIterator<Item = i64>) -> String {
    let head = "retry: 3000\n: events of the job follow\n\n".to_owned();
    head + &seqs.into_iter().map(event).collect::<String>()
}

const END: &str = "event: end\ndata: {\"state\":\"succeeded\"}\n\n";

fn stream(text: String) -> Reply {
    Reply::new(200, text).header("content-type", "text/event-stream").unframed()
}

fn last_of(seen: &Seen) -> Option<i64> {
    seen.headers.get("last-event-id").map(|last| last.parse().unwrap())
}

fn seqs(updates: &[JobUpdate]) -> Vec<i64> {
    let seq = |update: &JobUpdate| match update {
        JobUpdate::Event(event) => Some(event.seq),
        JobUpdate::Removed { .. } | JobUpdate::End { .. } => None,
    };
    updates.iter().filter_map(seq).collect()
}

#[tokio::test]
async fn an_interrupted_stream_continues_without_gap_or_duplicate() {
    let fake = Fake::start(|number, seen| {
        let next = last_of(seen).unwrap_or(0) + 1;
        match number {
            // Breaks in the middle of the fourth event.
            0 => stream(events(1..=4)).cut(events(1..=3).len() + 30),
            1 => Reply::problem(503, "overloaded", true).header("retry-after", 0),
            // Starts earlier than requested.
            2 => stream(events(next - 2..next + 3)),
            3 => Reply::nothing(),
            4..8 => stream(events(next..next + 2)),
            _ => stream(events(next..next + 2) + END),
        }
    })
    .await;
    let updates: Vec<JobUpdate> = fake.client().follow_job(id(), 0).into_stream().try_collect().await.unwrap();
    assert_eq!(seqs(&updates), (1..=16).collect::<Vec<_>>());
    assert_eq!(updates.last(), Some(&JobUpdate::End { state: State::Succeeded }));
    let seen = fake.seen();
    assert_eq!(
        seen.iter().map(last_of).collect::<Vec<_>>(),
        [None, Some(3), Some(3), Some(6), Some(6), Some(8), Some(10), Some(12), Some(14)]
    );
    assert!(seen.iter().all(|request| request.headers["accept"] == "text/event-stream"));
}

#[tokio::test]
async fn events_that_are_missing_between_two_are_asked_for_again() {
    let fake = Fake::start(|number, seen| match number {
        0 => stream(events([6, 8, 9]) + END),
        _ => stream(events(last_of(seen).unwrap() + 1..=9) + END),
    })
    .await;
    let mut updates = fake.client().follow_job(id(), 5);
    let mut told = Vec::new();
    while let Some(update) = updates.next().await.unwrap() {
        told.push(update);
    }
    assert_eq!((seqs(&told), updates.last_seq()), (vec![6, 7, 8, 9], 9));
    assert_eq!(fake.seen().iter().map(last_of).collect::<Vec<_>>(), [Some(5), Some(6)]);
    assert!(updates.next().await.unwrap().is_none(), "nothing comes after the end");
    assert_eq!(fake.seen().len(), 2);
}

#[tokio::test]
async fn events_removed_by_retention_are_reported() {
    let removed = "id: 40\nevent: removed\ndata: {\"to_seq\": 40}\n\n";
    let fake = Fake::start(move |_, _| stream(removed.to_owned() + &event(41) + END)).await;
    let updates: Vec<JobUpdate> = fake.client().follow_job(id(), 2).into_stream().try_collect().await.unwrap();
    assert_eq!(updates[0], JobUpdate::Removed { to_seq: 40 });
    assert_eq!((seqs(&updates), updates.len()), (vec![41], 3));
}

#[tokio::test]
async fn a_stream_that_brings_nothing_ends_with_an_error_and_so_does_a_refusal() {
    let fake = Fake::start(|_, _| stream(events([]))).await;
    let error = fake.client().follow_job(id(), 0).next().await.unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }), "{error:?}");
    assert_eq!(fake.seen().len(), 5);
    let silent = Fake::start(|_, _| stream(events([])).hangs()).await;
    let client = silent.builder().stall_timeout(Duration::from_millis(50)).build().unwrap();
    assert!(matches!(client.follow_job(id(), 0).next().await, Err(Error::Stalled { .. })));
    let beyond = Fake::start(|_, _| Reply::problem(400, "invalid_cursor", false)).await;
    let mut stream = beyond.client().follow_job(id(), 99).into_stream();
    assert_eq!(stream.try_next().await.unwrap_err().code(), "invalid_cursor");
    assert!(stream.try_next().await.unwrap().is_none());
    assert_eq!(beyond.seen().len(), 1);
    let foreign = Fake::start(|_, _| self::stream("event: step\ndata: {}\n\n".to_owned())).await;
    assert!(matches!(foreign.client().follow_job(id(), 0).next().await, Err(Error::NotUnderstood { .. })));
}

#[tokio::test]
async fn changes_of_all_jobs_say_when_to_read_the_list_again() {
    let gone = format!("event: gone\ndata: {{\"id\": \"{}\"}}\n\nevent: reload\ndata: {{}}\n\n", id());
    let fake = Fake::start(move |number, _| match number {
        0 => stream(format!("event: job\ndata: {}\n\n", job())),
        _ => stream(gone.clone()),
    })
    .await;
    let mut changes = fake.client().follow_jobs();
    let mut told = Vec::new();
    for _ in 0..5 {
        told.push(match changes.next().await.unwrap() {
            JobChange::Reload => "reload",
            JobChange::Changed(job) if job.id == id() => "job",
            JobChange::Gone(gone) if gone == id() => "gone",
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(told, ["reload", "job", "reload", "gone", "reload"]);
    assert_eq!(fake.seen()[0].line, "GET /jobs/changes");
}
