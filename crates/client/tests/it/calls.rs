//! Tests of calls: which requests are repeated, which are not, and what a caller gets.

use std::time::{Duration, Instant};

use futures::TryStreamExt;
use rlood_client::{Content, Document, Error, GenerationRequest, JobFilter, NewKey};
use rlood_types::job::State;
use rlood_types::scopes::Scope;
use serde_json::{Value, json};

use crate::fake::{Fake, Reply, job};

fn document() -> Document {
    Document::from(&json!({"model": "m"}))
}

#[tokio::test]
async fn a_job_is_submitted_with_one_key_until_its_answer_has_arrived_whole() {
    let fake = Fake::start(|number, _| match number {
        0 => Reply::nothing(),
        1 => Reply::problem(503, "overloaded", true).header("retry-after", 0),
        2 => Reply::json(201, &job()).cut(20),
        3 => Reply::problem(409, "idempotency_in_flight", true),
        _ => Reply::json(201, &job()),
    })
    .await;
    let client = fake.client();
    let created = client.create_job(&document()).await.unwrap();
    assert_eq!((created.state, created.plan["model"]["id"].as_str()), (State::Queued, Some("m")));
    client.create_job(&document()).await.unwrap();
    let seen = fake.seen();
    let keys: Vec<&str> = seen.iter().map(|request| request.headers["idempotency-key"].as_str()).collect();
    assert_eq!(keys.len(), 6);
    assert!(keys[..5].iter().all(|key| *key == keys[0] && !key.is_empty()), "{keys:?}");
    assert_ne!(keys[5], keys[0], "another job");
    assert!(seen.iter().all(|request| request.line == "POST /jobs" && request.body == br#"{"model":"m"}"#));
    client.with_idempotency_key("mine").create_demo().await.unwrap();
    assert_eq!(fake.seen()[6].headers["idempotency-key"], "mine");
}

#[tokio::test]
async fn a_pause_is_as_long_as_the_server_asks() {
    let fake = Fake::start(|number, _| match number {
        0 => Reply::problem(429, "too_many_requests", true).header("retry-after", 1),
        1 => Reply::new(200, "ok\n"),
        _ => Reply::problem(503, "not_ready", true).header("retry-after", 6),
    })
    .await;
    let begun = Instant::now();
    fake.client().readyz().await.unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    // The delay is longer than the client would wait, so its caller gets the error immediately.
    let error = fake.client().readyz().await.unwrap_err();
    assert_eq!((error.code(), fake.seen().len()), ("not_ready", 3));
    assert_eq!(error.problem().unwrap().retry_after, Some(Duration::from_secs(6)));
}

#[tokio::test]
async fn tries_end() {
    let fake = Fake::start(|_, _| Reply::new(502, "<html>bad gateway</html>")).await;
    let error = fake.client().list_workers().await.unwrap_err();
    assert_eq!(error.to_string(), "GET /workers: 502: <html>bad gateway</html>");
    assert!(error.is_retryable() && error.code().is_empty());
    assert_eq!(fake.seen().len(), 5);
    let closed = Fake::start(|_, _| Reply::nothing()).await;
    let error = closed.client().livez().await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string() == "GET /livez: no response", "{error:?}");
    assert_eq!(closed.seen().len(), 5);
}

#[tokio::test]
async fn a_rejected_request_is_not_retried_and_its_errors_are_returned() {
    let fake = Fake::start(|_, _| {
        Reply::json(
            422,
            &json!({"code": "invalid_spec", "status": 422, "title": "The job is not valid", "detail": "two errors",
                    "request_id": "req_9", "retryable": false, "errors": [
                        {"pointer": "/rloo/beta", "code": "out_of_range", "detail": "must be at least 0"},
                        {"pointer": "/model", "code": "required", "detail": "name a model"}]}),
        )
    })
    .await;
    let error = fake.client().create_job(&document()).await.unwrap_err();
    let problem = error.problem().unwrap();
    assert_eq!((error.code(), error.status(), error.is_retryable()), ("invalid_spec", Some(422), false));
    assert_eq!((problem.request_id.as_str(), problem.title.as_str()), ("req_9", "The job is not valid"));
    let fields: Vec<&str> = problem.errors.iter().map(|error| error.pointer.as_str()).collect();
    assert_eq!(fields, ["/rloo/beta", "/model"]);
    assert_eq!(fake.seen().len(), 1);
}

#[tokio::test]
async fn a_request_with_side_effects_is_repeated_only_if_it_was_not_begun() {
    let test = json!({"ok": true, "results": [], "latency_ms": 1.0, "ping": null, "exchanges": [], "warnings": []});
    let fake = Fake::start(move |number, _| match number {
        0 => Reply::json(200, &test).cut(5),
        1 => Reply::nothing(),
        2 => Reply::problem(500, "internal", true),
        3 => Reply::problem(503, "overloaded", true),
        _ => Reply::json(200, &test),
    })
    .await;
    let client = fake.client();
    let ask = async || client.test_reward(&json!({"type": "length"}), &json!([])).await;
    assert!(matches!(ask().await, Err(Error::Interrupted { .. })));
    assert!(matches!(ask().await, Err(Error::Unreachable { .. })));
    assert_eq!(ask().await.unwrap_err().code(), "internal");
    assert_eq!(fake.seen().len(), 3);
    assert!(ask().await.unwrap().ok);
    assert_eq!(fake.seen().len(), 5);
    assert!(!fake.seen()[0].headers.contains_key("idempotency-key"));
}

#[tokio::test]
async fn deleting_an_object_that_an_earlier_try_deleted_succeeds() {
    let id = "ds_01jd0000000000000000000000".parse().unwrap();
    let lost = Fake::start(|number, _| match number {
        0 => Reply::nothing(),
        _ => Reply::problem(404, "not_found", false),
    })
    .await;
    lost.client().delete_dataset(id).await.unwrap();
    assert_eq!(lost.seen().len(), 2);
    // Deleting an object that never existed is an error.
    let refused = Fake::start(|number, _| match number {
        0 => Reply::problem(503, "overloaded", true),
        _ => Reply::problem(404, "not_found", false),
    })
    .await;
    assert_eq!(refused.client().delete_dataset(id).await.unwrap_err().code(), "not_found");
    let gone = Fake::start(|_, _| Reply::problem(404, "not_found", false)).await;
    assert_eq!(gone.client().delete_model("org/tiny").await.unwrap_err().status(), Some(404));
    assert_eq!(gone.seen()[0].line, "DELETE /models/org%2Ftiny");
}

#[tokio::test]
async fn a_silent_server_is_left_after_the_time_limit() {
    let fake =
        Fake::start(|number, _| if number == 0 { Reply::nothing() } else { Reply::json(200, &job()).cut(9) }.hangs())
            .await;
    let client =
        fake.builder().timeout(Duration::from_millis(100)).retry(rlood_client::Retry::never()).build().unwrap();
    let id = "job_01jd0000000000000000000000".parse().unwrap();
    for _ in 0..2 {
        let begun = Instant::now();
        let error = client.get_job(id).await.unwrap_err();
        assert!(matches!(error, Error::Stalled { .. }) && error.is_retryable(), "{error:?}");
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}

#[tokio::test]
async fn a_response_that_does_not_match_the_api_is_an_error() {
    let fake = Fake::start(|_, _| Reply::new(200, "<html>welcome</html>")).await;
    let error = fake.client().get_session().await.unwrap_err();
    assert!(matches!(error, Error::NotUnderstood { .. }) && !error.is_retryable(), "{error:?}");
    assert!(error.to_string().starts_with("GET /session: the response does not match the API"), "{error}");
    assert_eq!(fake.seen().len(), 1);
    // A redirect is not followed, because the key would be sent along.
    let moved = Fake::start(|_, _| Reply::new(301, "").header("location", "http://example.com/")).await;
    assert_eq!(moved.client().get_session().await.unwrap_err().status(), Some(301));
}

#[tokio::test]
async fn the_key_is_in_every_request_and_in_no_message() {
    let answer = json!({"key": "rld_new", "id": "key_01jd0000000000000000000000", "name": "ci", "owner": "ci",
        "scopes": ["read"], "prefix": "rld_", "state": "active", "created_at": "2026-01-01T00:00:00.000Z",
        "expires_at": null, "revoked_at": null, "used_at": null});
    let fake = Fake::start(move |_, seen| match seen.headers.get("authorization").map(String::as_str) {
        Some("Bearer rld_secret") => Reply::json(201, &answer),
        _ => Reply::problem(401, "unauthorized", false),
    })
    .await;
    let client = fake.builder().api_key("rld_secret").build().unwrap();
    let new = NewKey { name: "ci".to_owned(), scopes: vec![Scope::Read], owner: None, expires_in_s: None };
    let made = client.create_key(&new).await.unwrap();
    assert_eq!((made.key.as_deref(), made.view.name.as_str()), (Some("rld_new"), "ci"));
    assert!(!format!("{made:?} {client:?}").contains("rld_new"));
    assert_eq!(fake.client().create_key(&new).await.unwrap_err().code(), "unauthorized");
    // A late answer uses its own token instead.
    let id = "rwr_01jd0000000000000000000000".parse().unwrap();
    let _ = client.take_reward_callback(id, "tok", &json!({"results": []})).await;
    assert_eq!(fake.seen().last().unwrap().headers["authorization"], "Bearer tok");
    let _ = client.take_environment_callback("env_1", "tok", &json!({"reward": 1.0})).await;
    let seen = fake.seen();
    let last = seen.last().unwrap();
    let expected = ("POST /environment-callbacks/env_1", "Bearer tok");
    assert_eq!((last.line.as_str(), last.headers["authorization"].as_str()), expected);
}

#[tokio::test]
async fn rows_in_a_file_are_sent_whole_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("rows.ndjson");
    let text: String = (0..40_000).map(|row| format!("{{\"prompt\":\"row {row}\"}}\n")).collect();
    std::fs::write(&rows, &text).unwrap();
    let fake = Fake::start(|number, _| if number == 0 { Reply::nothing() } else { Reply::json(201, &job()) }).await;
    let spec = Document::text(rlood_types::spec::format::Format::Yaml, "model: m\n");
    fake.client().create_job_with_rows(&spec, "application/x-ndjson", Content::from(rows.as_path())).await.unwrap();
    let seen = fake.seen();
    assert_eq!((seen.len(), &seen[0].body), (2, &seen[1].body));
    assert_eq!(seen[1].headers["content-length"], seen[1].body.len().to_string());
    assert!(seen[1].headers["content-type"].starts_with("multipart/form-data; boundary="));
    let body = String::from_utf8(seen[1].body.clone()).unwrap();
    assert!(body.contains("content-type: application/yaml\r\n\r\nmodel: m\n\r\n") && body.contains(&text));
}

#[tokio::test]
async fn a_list_is_read_page_by_page_and_ends() {
    let row = |number: u64| json!({"row": number, "record": {"prompt": "p"}});
    let fake = Fake::start(move |_, seen| match seen.line.split_once("after=").map(|(_, after)| after) {
        None => Reply::json(200, &json!({"data": [row(0), row(1)], "next": "b/1"})),
        Some("b%2F1") => Reply::json(200, &json!({"data": [], "next": "2"})),
        Some("2") => Reply::json(200, &json!({"data": [row(2)], "next": null})),
        Some(_) => Reply::problem(400, "invalid_cursor", false),
    })
    .await;
    let (client, id) = (fake.client(), "ds_01jd0000000000000000000000".parse().unwrap());
    let numbers = |rows: Vec<rlood_client::Row>| rows.into_iter().map(|row| row.row).collect::<Vec<_>>();
    assert_eq!(numbers(client.list_rows(id).collect().await.unwrap()), [0, 1, 2]);
    assert_eq!(numbers(client.list_rows(id).into_stream().try_collect().await.unwrap()), [0, 1, 2]);
    let mut pages = client.list_rows(id).after("2");
    assert_eq!(pages.next_page().await.unwrap().unwrap().data.len(), 1);
    assert!(pages.next_page().await.unwrap().is_none());
    let mut stream = client.list_rows(id).after("?").into_stream();
    assert_eq!(stream.try_next().await.unwrap_err().code(), "invalid_cursor");
    assert!(stream.try_next().await.unwrap().is_none(), "it ends after an error");
}

#[tokio::test]
async fn queries_and_labels_are_encoded() {
    let fake = Fake::start(|_, _| Reply::json(200, &json!({"data": [], "next": null}))).await;
    let metadata = [("team & co".to_owned(), "What is 1 + 2?".to_owned())].into();
    let filter = JobFilter { state: Some(State::Paused), metadata, limit: Some(5), ..JobFilter::default() };
    fake.client().list_jobs(&filter).collect().await.unwrap();
    let expected = "GET /jobs?state=paused&metadata.team+%26+co=What+is+1+%2B+2%3F&limit=5";
    assert_eq!(fake.seen()[0].line, expected);
    let text = |text: &str| Some(text.to_owned());
    let names = JobFilter { name: text("a b"), name_contains: text("b"), id_prefix: text("job_01"), ..filter };
    fake.client().list_jobs(&JobFilter { metadata: [].into(), limit: None, ..names }).collect().await.unwrap();
    assert_eq!(fake.seen()[1].line, "GET /jobs?state=paused&name=a+b&name_contains=b&id_prefix=job_01");
}

#[tokio::test]
async fn a_wait_asks_again_until_the_job_is_settled() {
    let fake = Fake::start(|number, _| {
        let mut job = job();
        job["state"] = Value::from(if number == 0 { "running" } else { "paused" });
        Reply::json(200, &job)
    })
    .await;
    let job = fake.client().wait_for_job("job_01jd0000000000000000000000".parse().unwrap()).await.unwrap();
    assert_eq!((job.state, fake.seen().len()), (State::Paused, 2));
    assert_eq!(fake.seen()[0].line, "GET /jobs/job_01jd0000000000000000000000?wait=30");
}

#[tokio::test]
async fn a_generation_request_contains_only_the_given_settings() {
    let fake = Fake::start(|_, _| Reply::problem(429, "too_many_requests", true)).await;
    let id = "job_01jd0000000000000000000000".parse().unwrap();
    let request = GenerationRequest { checkpoint: Some(2.into()), ..GenerationRequest::new("2 + 2?") };
    assert_eq!(fake.client().generate(id, &request).await.unwrap_err().status(), Some(429));
    assert_eq!(fake.seen()[4].body, br#"{"prompt":"2 + 2?","checkpoint":2}"#);
}

#[tokio::test]
async fn a_test_of_an_environment_is_repeated_while_the_server_is_busy_and_its_episodes_are_read() {
    let report = json!({"ok": false, "model": "tiny", "episodes": [{
        "turns": [{"text": "4", "num_tokens": 1, "observations": [{"role": "user", "content": "Right."}], "reward": 1.0}],
        "return": 1.0, "stop": "env_done"}], "problems": ["one"], "exchanges": [{"latency_ms": 1.5}], "latency_ms": 12.5});
    let fake = Fake::start(move |number, _| match number {
        0 => Reply::problem(429, "too_many_requests", true).header("retry-after", 0),
        1 => Reply::json(200, &report),
        _ => Reply::problem(422, "invalid_body", false),
    })
    .await;
    let request = json!({"environment": {"url": "http://e.example/"}, "rows": [{"prompt": "2 + 2?"}]});
    let test = fake.client().test_environment(&request).await.unwrap();
    assert_eq!(
        (test.ok, test.model.as_str(), test.problems, test.latency_ms),
        (false, "tiny", vec!["one".into()], 12.5)
    );
    assert_eq!((test.episodes[0].total, test.episodes[0].turns[0].text.as_str()), (Some(1.0), "4"));
    let seen = fake.seen();
    assert!(seen.len() == 2 && seen.iter().all(|seen| seen.line == "POST /environments/test"), "{seen:?}");
    assert_eq!(serde_json::from_slice::<Value>(&seen[1].body).unwrap(), request);
    assert_eq!(fake.client().test_environment(&request).await.unwrap_err().code(), "invalid_body");
}
