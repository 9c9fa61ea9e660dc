//! The dashboard's requests to the server: its files, reward curves and changes of many jobs, the demo job.

use axum::body::{Body, HttpBody};
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use rlood::event::SamplePhase;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::server::{Server, job, step, with};

#[tokio::test]
async fn the_page_names_files_that_a_browser_keeps_and_asks_again_for_nothing_it_has() {
    let server = Server::start().await;
    let page = server.get("/").await;
    assert_eq!((page.status.as_u16(), &page.headers[header::CACHE_CONTROL]), (200, &"no-cache".parse().unwrap()));
    let policy = page.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(policy.contains("script-src 'self'; style-src 'self';") && !policy.contains("unsafe"), "{policy}");
    let script = page.text.split("src=\"").nth(1).unwrap().split('"').next().unwrap();
    assert!(script.starts_with("/web/") && script.ends_with("/app.js"), "{script}");
    let app = server.get(script).await;
    assert_eq!(app.status, 200);
    assert!(app.headers[header::CACHE_CONTROL].to_str().unwrap().contains("immutable"));
    assert!(!app.text.contains("import{"), "one script, which asks for no other");

    let ask = |path: &str, name: header::HeaderName, value: &str| {
        Request::builder().uri(path).header(name, value).body(Body::empty()).unwrap()
    };
    let again = server.send(ask("/", header::IF_NONE_MATCH, page.headers[header::ETAG].to_str().unwrap())).await;
    assert_eq!((again.status.as_u16(), again.text.as_str()), (304, ""));
    let response = server.router.clone().oneshot(ask(script, header::ACCEPT_ENCODING, "gzip, br")).await.unwrap();
    assert_eq!(response.headers()[header::CONTENT_ENCODING], "gzip");
    assert!(response.body().size_hint().exact().unwrap() < app.text.len() as u64 / 2);
    // A page that was loaded before the server was replaced still gets its files; a wrong name gets 404.
    assert_eq!(server.get("/web/0123456789abcdef/app.js").await.status, 200);
    for wrong in ["/web/x/nothing.js", "/web/x/..%2f..%2fCargo.toml", "/web/x/README.md"] {
        assert_eq!(server.get(wrong).await.status, 404, "{wrong}");
    }
}

#[tokio::test]
async fn a_course_keeps_both_ends_and_every_outlier_in_few_points() {
    let server = Server::start().await;
    let id = server.create(with(job(), "training", json!({"max_steps": 500}))).await;
    let (_, attempt) = server.claim().await;
    let reward = |number: u64| match number {
        137 => Some(-9.0),
        138 => None,
        377 => Some(9.0),
        _ => Some(number as f64 / 500.0),
    };
    let train = |number| step(number, SamplePhase::Train, &[("reward", reward(number)), ("kl", Some(0.1))]);
    let mut events: Vec<_> = (1..=400).map(train).collect();
    events.push(step(400, SamplePhase::Eval, &[("eval_reward", Some(50.0)), ("reward", Some(50.0))]));
    server.report(id, attempt, 0, events).await;
    let unknown = rlood::id::JobId::new();
    let answer = server.get(&format!("/jobs/courses?ids={id},{unknown}&points=20")).await;
    assert_eq!((answer.status.as_u16(), answer.body["data"].as_array().unwrap().len()), (200, 1), "{}", answer.text);
    let course = &answer.body["data"][0];
    assert_eq!((&course["id"], &course["first"], &course["last"]), (&json!(id), &json!(0.002), &json!(0.8)));
    let points: Vec<(u64, f64)> = serde_json::from_value(course["points"].clone()).unwrap();
    assert!((10..=22).contains(&points.len()), "{}", points.len());
    assert!(points.contains(&(137, -9.0)) && points.contains(&(377, 9.0)));
    assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0));

    // A step that is reported again counts once, with its last value.
    server.report(id, attempt, 1, vec![step(400, SamplePhase::Train, &[("reward", Some(0.5))])]).await;
    let answer = server.get(&format!("/jobs/courses?ids={id}")).await;
    assert_eq!(answer.body["data"][0]["last"], 0.5);
    for (query, code) in [("", "invalid_query"), ("?ids=x", "invalid_query"), ("?ids=job_1&points=3", "invalid_query")]
    {
        let answer = server.get(&format!("/jobs/courses{query}")).await;
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (400, &json!(code)), "{query}");
    }
}

#[tokio::test]
async fn a_job_says_where_it_runs_and_which_event_is_its_latest() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let queued = server.get(&format!("/jobs/{id}")).await.body;
    assert_eq!((&queued["device"], &queued["last_seq"]), (&Value::Null, &json!(1)));
    let (_, attempt) = server.claim().await;
    server.report(id, attempt, 0, vec![step(1, SamplePhase::Train, &[("reward", Some(0.5))])]).await;
    let running = server.get(&format!("/jobs/{id}")).await.body;
    assert_eq!(running["device"], "cpu");
    let events = server.get(&format!("/jobs/{id}/events")).await.body;
    assert_eq!(running["last_seq"], events["data"].as_array().unwrap().last().unwrap()["seq"]);
}

#[tokio::test]
async fn whoever_follows_all_jobs_hears_of_new_changed_and_deleted_ones() {
    let server = Server::start().await;
    let nobody_streams = server.get("/jobs/changes").await;
    assert_eq!((nobody_streams.status, nobody_streams.body), (StatusCode::OK, json!({"data": [], "next": null})));
    let request =
        Request::get("/jobs/changes").header(header::ACCEPT, "text/event-stream").body(Body::empty()).unwrap();
    let response = server.router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let mut body = response.into_body();
    let mut text = String::new();
    // The stream is subscribed once its first line has arrived.
    let mut until = async |end: &str| {
        while !text.contains(end) {
            let frame = tokio::time::timeout(std::time::Duration::from_secs(20), body.frame()).await;
            let data = frame.expect("news in time").expect("an open stream").unwrap().into_data().unwrap();
            text.push_str(std::str::from_utf8(&data).unwrap());
        }
        std::mem::take(&mut text)
    };
    until("changes of all jobs follow").await;
    let id = server.create(with(job(), "name", json!("new"))).await;
    let told = until("\n\n").await;
    assert!(told.contains("event: job") && told.contains(&id.to_string()) && told.contains("\"queued\""), "{told}");
    assert_eq!(server.post(&format!("/jobs/{id}/cancel"), json!({})).await.status, 200);
    assert!(until("\"cancelled\"").await.contains("event: job"));
    assert_eq!(server.call("DELETE", &format!("/jobs/{id}"), None, None).await.status, 204);
    assert!(until(&format!("{{\"id\":\"{id}\"}}")).await.contains("event: gone"));
}

#[tokio::test]
async fn the_demo_job_needs_nothing_and_repeats_itself_only_when_asked() {
    let server = Server::start().await;
    let first = server.call("POST", "/demo", None, Some("once")).await;
    assert_eq!((first.status.as_u16(), &first.body["state"]), (201, &json!("queued")), "{}", first.text);
    assert_eq!(first.body["plan"]["model"]["id"], "rlood/tiny");
    let again = server.call("POST", "/demo", None, Some("once")).await;
    assert_eq!(again.body["id"], first.body["id"]);
    let second = server.call("POST", "/demo", None, None).await;
    assert_ne!(second.body["id"], first.body["id"]);
    assert_eq!(second.body["plan"]["dataset"], first.body["plan"]["dataset"]);
    assert_eq!(server.get("/datasets").await.body["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn the_demo_job_finds_its_model_in_a_directory_that_was_moved_or_restored() {
    let server = Server::start().await;
    assert_eq!(server.post("/demo", json!({})).await.status, 201);
    let store = &server.state.store;
    let model = store.model_get("rlood/tiny").await.unwrap();
    for former in [model.source.as_str(), "/nowhere/demo-model", "/nowhere/tiny"] {
        store.model_move("rlood/tiny", &model.source, former).await.unwrap();
        std::fs::remove_dir_all(&model.source).unwrap();
        let answer = server.post("/demo", json!({})).await;
        assert_eq!(answer.status, 201, "{former}: {}", answer.text);
        let found = store.model_get("rlood/tiny").await.unwrap();
        assert_eq!((&found.source, &found.sha256), (&model.source, &model.sha256));
    }
}

#[tokio::test]
async fn somebody_elses_model_of_the_demos_name_stays_where_it_is() {
    let server = Server::start().await;
    let source = server.dir.path().join("plain");
    let answer = server.post("/models", json!({"id": "rlood/tiny", "source": source})).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let store = &server.state.store;
    let mine = store.model_get("rlood/tiny").await.unwrap();
    std::fs::rename(&source, server.dir.path().join("elsewhere")).unwrap();
    assert_eq!(server.post("/demo", json!({})).await.status, 422);
    assert_eq!(store.model_get("rlood/tiny").await.unwrap(), mine);
}
