//! A job's events over HTTP: pages, and the stream that a cut connection goes on with.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::BodyExt;
use rlood::event::Event;
use rlood::protocol::Outcome;
use rlood::store::clock_ms;
use rlood::store::retention::Leftover;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::server::{Server, job};

/// Reads a stream of server-sent events piece by piece.
struct Stream {
    body: Body,
    text: String,
}

impl Stream {
    async fn open(server: &Server, path: &str, last_event_id: Option<&str>) -> Stream {
        let mut request = Request::get(path).header(header::ACCEPT, "Text/Event-Stream");
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        let response = server.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Stream { body: response.into_body(), text: String::new() }
    }

    /// The next event as (id, event, data); None when the stream is over.
    async fn next(&mut self) -> Option<(Option<i64>, String, Value)> {
        tokio::time::timeout(Duration::from_secs(10), self.read()).await.expect("an event within 10 s")
    }

    async fn read(&mut self) -> Option<(Option<i64>, String, Value)> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim().to_owned())
                };
                let (id, event, data) = (field("id:"), field("event:"), field("data:"));
                self.text = rest.to_owned();
                match data {
                    Some(data) => {
                        let id = id.map(|id| id.parse().unwrap());
                        return Some((id, event.unwrap(), serde_json::from_str(&data).unwrap()));
                    }
                    None => continue,
                }
            }
            let frame = self.body.frame().await?;
            self.text.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap());
        }
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
    let mut stream = Stream::open(&server, &path, None).await;
    let mut seen = Vec::new();
    while seen.len() < 117 {
        seen.push(stream.next().await.unwrap().0.unwrap());
    }
    drop(stream);
    server.report(id, attempt, 1, warnings(30, 250)).await;
    let mut stream = Stream::open(&server, &path, Some(&seen.last().unwrap().to_string())).await;
    let mut finished = false;
    let end = loop {
        let (seq, event, data) = stream.next().await.unwrap();
        let Some(seq) = seq else { break (event, data) };
        assert_eq!((data["seq"].as_i64(), data["type"].as_str()), (Some(seq), Some(event.as_str())));
        seen.push(seq);
        if seen.len() == 270 && !finished {
            // Live: what happens while the client listens arrives too.
            server.report(id, attempt, 2, warnings(10, 280)).await;
            server.state.store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();
            finished = true;
        }
    };
    assert_eq!((end.0.as_str(), &end.1), ("end", &json!({"state": "succeeded"})));
    assert!(stream.next().await.is_none());
    let latest = server.state.store.event_latest_seq(id).await.unwrap();
    assert_eq!(seen, (1..=latest).collect::<Vec<_>>());
    assert!(latest >= 290);
    // After the end a stream replays what was missed and ends again; ?after= does the same.
    let mut stream = Stream::open(&server, &format!("{path}?after={}", latest - 1), None).await;
    let last = stream.next().await.unwrap();
    assert_eq!((last.0, last.1.as_str()), (Some(latest), "job.succeeded"));
    assert_eq!(stream.next().await.unwrap().1, "end");

    // The same as pages.
    let page = server.get(&format!("{path}?after=100&limit=50")).await;
    let seqs: Vec<_> =
        page.body["data"].as_array().unwrap().iter().map(|event| event["seq"].as_i64().unwrap()).collect();
    assert_eq!((seqs, page.body["next"].as_str()), ((101..=150).collect(), Some("150")));
    let keys: Vec<_> = page.body["data"][0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["seq", "type", "time", "attempt", "data"]);
    assert_eq!(server.get(&format!("{path}?after={}", latest)).await.body, json!({"data": [], "next": null}));
    assert_eq!(server.get(&format!("{path}?after=x")).await.body["code"], "invalid_cursor");
    // A number that the job has not reached is of events that a backup did not hold: nothing is skipped in silence.
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
    // The newest itself is known, and stays so when retention took the events away.
    let retained = server.state.store.leftovers_remove(Leftover::Events, clock_ms() + 1).await.unwrap();
    assert!(retained > 0);
    let mut stream = Stream::open(&server, &path, Some(&latest.to_string())).await;
    assert_eq!(stream.next().await.unwrap().1, "end");
    // Whoever missed some of those is told.
    let mut stream = Stream::open(&server, &path, Some("5")).await;
    let told = stream.next().await.unwrap();
    assert_eq!((told.0, told.1.as_str()), (Some(latest), "removed"));
    assert_eq!(stream.next().await.unwrap().1, "end");
    let page = server.get(&format!("{path}?after=5")).await.body;
    assert_eq!(page, json!({"data": [], "next": null, "removed": {"to_seq": latest}}));
    assert_eq!(server.get(&format!("{path}?after={latest}")).await.body, json!({"data": [], "next": null}));
}
