//! Lifecycle messages: the outbox, their contents, retries and receivers.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use rlood::outgoing::OutgoingPolicy;
use rlood::protocol::Outcome;
use rlood::reward::signature::Key;
use rlood::scopes::{Scope, Scopes};
use rlood::store::{DeliveryState, Next, TryRow};
use rlood::store::{NewKey, StoreError, clock_ms};
use rlood::webhook_sender::WebhookSender;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::server::{Answer, SECRET, Server, job, step};

pub type Received = (HeaderMap, Value);

/// An endpoint that answers as specified, and records the messages.
#[derive(Clone)]
pub struct Endpoint {
    pub url: String,
    pub got: Arc<Mutex<Vec<Received>>>,
    answers: Arc<Mutex<Vec<u16>>>,
}

impl Endpoint {
    /// Answers with these statuses in turn, then with 204.
    pub async fn start(answers: &[u16]) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Self {
            url: format!("http://{}/hook", listener.local_addr().unwrap()),
            got: Arc::default(),
            answers: Arc::new(Mutex::new(answers.iter().rev().copied().collect())),
        };
        let receive = async |State(endpoint): State<Endpoint>, headers: HeaderMap, body: Bytes| {
            let key = Key::parse(SECRET).unwrap();
            let text = |name: &str| headers[name].to_str().unwrap().to_owned();
            let now = u64::try_from(clock_ms() / 1000).unwrap();
            let (id, timestamp, signature) = (text("webhook-id"), text("webhook-timestamp"), text("webhook-signature"));
            key.verify(&id, &timestamp, &signature, &body, now).expect("signed as Standard Webhooks says");
            let body = serde_json::from_slice(&body).unwrap();
            endpoint.got.lock().unwrap().push((headers.clone(), body));
            let status = endpoint.answers.lock().unwrap().pop().unwrap_or(204);
            StatusCode::from_u16(status).unwrap()
        };
        let router = Router::new().fallback(receive).with_state(endpoint.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        endpoint
    }

    fn types(&self) -> Vec<String> {
        self.got.lock().unwrap().iter().map(|(_, body)| body["type"].as_str().unwrap().to_owned()).collect()
    }

    pub async fn wait_for(&self, count: usize) {
        let begun = Instant::now();
        while self.got.lock().unwrap().len() < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", self.types());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

pub fn start_sender(server: &Server) -> AbortOnDropHandle<()> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let policy = OutgoingPolicy::parse(&["loopback"]).unwrap();
    let sender = WebhookSender::new(server.state.store.clone(), policy).unwrap();
    AbortOnDropHandle::new(tokio::spawn(sender.run()))
}

pub async fn subscribe(server: &Server, url: &str, events: Option<&[&str]>) -> String {
    let mut body = json!({"url": url, "secret": SECRET});
    if let Some(events) = events {
        body["events"] = json!(events);
    }
    let made = server.post("/webhooks", body).await;
    assert_eq!(made.status, 201, "{}", made.text);
    assert!(made.body["secret"].is_null() && !made.text.contains("whsec_"), "{}", made.text);
    made.body["id"].as_str().unwrap().to_owned()
}

async fn deliveries(server: &Server, hook: &str) -> Vec<Value> {
    server.get(&format!("/webhooks/{hook}/deliveries?limit=100")).await.body["data"].as_array().unwrap().clone()
}

/// Returns the message as soon as it is in this state.
async fn delivery_in(server: &Server, hook: &str, state: &str) -> Value {
    let begun = Instant::now();
    loop {
        let all = deliveries(server, hook).await;
        if let Some(found) = all.iter().find(|delivery| delivery["state"] == state) {
            return found.clone();
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "none is {state}: {all:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_subscriber_is_told_of_a_jobs_life_in_order() {
    let server = Server::start().await;
    let endpoint = Endpoint::start(&[]).await;
    let hook = subscribe(&server, &endpoint.url, None).await;
    let few = Endpoint::start(&[]).await;
    subscribe(&server, &few.url, Some(&["job.failed"])).await;
    let _sender = start_sender(&server);

    let id = server.create(job()).await;
    let (claimed, attempt) = server.claim().await;
    assert_eq!(claimed, id);
    server.report(id, attempt, 0, vec![step(1, rlood::event::SamplePhase::Train, &[("reward", Some(0.5))])]).await;
    server.state.store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();

    endpoint.wait_for(3).await;
    let told = ["job.queued", "job.started", "job.succeeded"];
    assert_eq!(endpoint.types(), told);
    let (headers, body) = endpoint.got.lock().unwrap()[2].clone();
    assert_eq!(headers["content-type"], "application/json");
    assert!(headers["webhook-id"].to_str().unwrap().starts_with("msg_"));
    let data = &body["data"];
    assert_eq!((&data["job_id"], &data["job_state"], &data["step"]), (&json!(id), &json!("succeeded"), &json!(1)));
    assert_eq!((&data["event"], &data["attempt"]), (&json!("job.succeeded"), &json!(1)));
    assert!(body["timestamp"].as_str().unwrap().ends_with('Z'));

    let begun = Instant::now();
    let log = loop {
        let log = deliveries(&server, &hook).await;
        if log.iter().all(|delivery| delivery["state"] == "delivered") || begun.elapsed() > Duration::from_secs(60) {
            break log;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(log.len(), 3);
    assert!(log.iter().all(|delivery| delivery["tries"][0]["status"] == 204), "{log:?}");
    assert_eq!(log[0]["type"], "job.succeeded", "newest first");
    assert!(few.types().is_empty());
}

#[tokio::test]
async fn a_message_is_in_the_outbox_when_its_event_is_and_survives_a_restart() {
    let server = Server::start().await;
    let endpoint = Endpoint::start(&[500]).await;
    let hook = subscribe(&server, &endpoint.url, Some(&["job.queued", "job.cancelled"])).await;
    let id = server.create(job()).await;
    // No sender runs yet, but the message exists; the failed transaction left none.
    let waiting = deliveries(&server, &hook).await;
    assert_eq!(
        (waiting.len(), &waiting[0]["type"], &waiting[0]["state"]),
        (1, &json!("job.queued"), &json!("pending"))
    );
    let mut broken = job();
    broken["dataset"] = json!({"id": "ds_01jd0000000000000000000000"});
    assert_eq!(server.post("/jobs", broken).await.status, 422);
    assert_eq!(deliveries(&server, &hook).await.len(), 1);

    let first = start_sender(&server);
    endpoint.wait_for(1).await;
    let begun = Instant::now();
    while deliveries(&server, &hook).await[0]["tries"].as_array().unwrap().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(first);
    // The next attempt is due after 5 s, whichever sender makes it.
    let _second = start_sender(&server);
    endpoint.wait_for(2).await;
    assert!(begun.elapsed() > Duration::from_secs(4));
    let got = endpoint.got.lock().unwrap().clone();
    assert_eq!(got[0].0["webhook-id"], got[1].0["webhook-id"]);
    assert_eq!(got[0].1, got[1].1, "the same bytes");
    let log = delivery_in(&server, &hook, "delivered").await;
    assert_eq!(log["tries"].as_array().unwrap().iter().map(|t| t["status"].clone()).collect::<Vec<_>>(), [500, 204]);
    assert_eq!(log["tries"][0]["error"], "answered 500");

    // The end of the job does not remove pending messages.
    drop(_second);
    server.call("POST", &format!("/jobs/{id}/cancel"), None, None).await;
    assert_eq!(server.call("DELETE", &format!("/jobs/{id}"), None, None).await.status, 204);
    assert_eq!(deliveries(&server, &hook).await[0]["type"], "job.cancelled");
}

#[tokio::test]
async fn a_dead_endpoint_holds_up_nobody_else() {
    let server = Server::start().await;
    // An endpoint that accepts connections and never answers.
    let dead = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    for _ in 0..20 {
        subscribe(&server, &format!("http://{}/", dead.local_addr().unwrap()), None).await;
    }
    let endpoint = Endpoint::start(&[]).await;
    subscribe(&server, &endpoint.url, Some(&["job.queued"])).await;
    let _sender = start_sender(&server);
    let begun = Instant::now();
    for _ in 0..5 {
        server.create(job()).await;
    }
    endpoint.wait_for(5).await;
    assert!(begun.elapsed() < Duration::from_secs(14), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn redirects_and_refused_addresses_are_not_followed_at_any_try() {
    let server = Server::start().await;
    for url in
        ["http://169.254.169.254/latest", "http://10.0.0.1/", "ftp://example.com/", "https://u:p@example.com/", "x"]
    {
        let refused = server.post("/webhooks", json!({"url": url})).await;
        assert_eq!((refused.status.as_u16(), &refused.body["errors"][0]["pointer"]), (422, &json!("/url")), "{url}");
    }
    // The URL is stored in normalized form, so that the shown URL is the one that is used.
    for (given, kept) in
        [("HTTP://Example.com", "http://example.com/"), ("http:///x.example/a b", "http://x.example/a%20b")]
    {
        let made = server.post("/webhooks", json!({"url": given})).await;
        assert_eq!((made.status.as_u16(), &made.body["url"]), (201, &json!(kept)), "{}", made.text);
        let id = made.body["id"].as_str().unwrap();
        let changed = server.call("PATCH", &format!("/webhooks/{id}"), Some(json!({"url": given})), None).await;
        assert_eq!(changed.body["url"], kept);
        assert_eq!(server.call("DELETE", &format!("/webhooks/{id}"), None, None).await.status, 204);
    }
    for (url, words) in
        [("http://example.com/\r\nX: y", "control characters"), ("https://u:p@example.com/", "signature")]
    {
        let refused = server.post("/webhooks", json!({"url": url})).await;
        assert!(refused.status == 422 && refused.text.contains(words), "{}", refused.text);
    }
    // An address that was allowed when the webhook was created, but no longer is.
    let endpoint = Endpoint::start(&[307]).await;
    let hook = subscribe(&server, &endpoint.url, Some(&["job.queued"])).await;
    server.create(job()).await;
    let refusing = WebhookSender::new(server.state.store.clone(), OutgoingPolicy::default()).unwrap();
    let refusing = AbortOnDropHandle::new(tokio::spawn(refusing.run()));
    let begun = Instant::now();
    let error = loop {
        let tries = deliveries(&server, &hook).await[0]["tries"].clone();
        if let Some(error) = tries[0]["error"].as_str() {
            break error.to_owned();
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(error.contains("loopback address"), "{error}");
    assert!(endpoint.types().is_empty(), "no connection was made");
    drop(refusing);
    let _sender = start_sender(&server);
    endpoint.wait_for(1).await;
    let begun = Instant::now();
    while deliveries(&server, &hook).await[0]["tries"].as_array().unwrap().len() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(deliveries(&server, &hook).await[0]["tries"][1]["error"], "answered 307");
}

#[tokio::test]
async fn tests_redelivery_rotation_and_gone() {
    let server = Server::start().await;
    let endpoint = Endpoint::start(&[204, 204, 204, 410]).await;
    let hook = subscribe(&server, &endpoint.url, Some(&["job.queued", "job.queued"])).await;
    let _sender = start_sender(&server);
    let path = format!("/webhooks/{hook}");
    assert_eq!(server.get(&path).await.body["events"], json!(["job.queued"]));

    let tested = server.call("POST", &format!("{path}/test"), None, None).await;
    assert_eq!((tested.status.as_u16(), &tested.body["state"]), (200, &json!("delivered")), "{}", tested.text);
    assert_eq!(endpoint.types(), ["webhook.test"]);
    let again = format!("{path}/deliveries/{}/redeliver", tested.body["id"].as_str().unwrap());
    assert_eq!(server.call("POST", &again, None, None).await.status, 202);
    endpoint.wait_for(2).await;
    let got = endpoint.got.lock().unwrap().clone();
    assert_eq!(got[0].0["webhook-id"], got[1].0["webhook-id"]);
    assert_eq!(server.call("POST", &format!("{path}/deliveries/msg_x/redeliver"), None, None).await.status, 404);

    // During a rotation both secrets sign: the endpoint still verifies with the old one.
    let rotated = server.post(&format!("{path}/secret"), json!({})).await;
    let fresh = rotated.body["secret"].as_str().unwrap().to_owned();
    assert!(fresh.starts_with("whsec_") && rotated.body["old_secret_until"].is_string(), "{}", rotated.text);
    server.call("POST", &format!("{path}/test"), None, None).await;
    endpoint.wait_for(3).await;
    let (headers, body) = endpoint.got.lock().unwrap()[2].clone();
    let text = |name: &str| headers[name].to_str().unwrap().to_owned();
    assert_eq!(text("webhook-signature").split(' ').count(), 2);
    let (key, now) = (Key::parse(&fresh).unwrap(), u64::try_from(clock_ms() / 1000).unwrap());
    let bytes = body.to_string();
    key.verify(&text("webhook-id"), &text("webhook-timestamp"), &text("webhook-signature"), bytes.as_bytes(), now)
        .unwrap();

    let gone = server.call("POST", &format!("{path}/test"), None, None).await;
    assert_eq!(gone.body["state"], "failed");
    let view = server.get(&path).await;
    assert_eq!(
        (&view.body["enabled"], &view.body["disabled_reason"]),
        (&json!(false), &json!("the endpoint answered 410 Gone"))
    );
    assert_eq!(server.call("POST", &format!("{path}/test"), None, None).await.status, 409);
    // A message that could not be sent is not queued either.
    let refused = server.call("POST", &again, None, None).await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (409, &json!("conflict")), "{}", refused.text);
    let delivered = tested.body["id"].as_str().unwrap();
    let row = server.state.store.delivery_get(hook.parse().unwrap(), delivered).await.unwrap();
    assert_eq!(row.state, DeliveryState::Delivered);
    let patched = server.call("PATCH", &path, Some(json!({"enabled": true, "description": "mine"})), None).await;
    assert_eq!((&patched.body["enabled"], &patched.body["description"]), (&json!(true), &json!("mine")));
    assert_eq!(server.call("PATCH", &path, Some(json!({"events": []})), None).await.status, 422);
    assert_eq!(server.call("DELETE", &path, None, None).await.status, 204);
    assert_eq!(server.get(&path).await.status, 404);
    // A test message in delivery finds no webhook, which causes no error.
    let late = server.state.store.delivery_test(hook.parse().unwrap(), clock_ms()).await;
    assert!(matches!(late, Err(StoreError::NotFound { .. })), "{late:?}");
}

#[tokio::test]
async fn a_second_rotation_leaves_no_receiver_behind() {
    let server = Server::start().await;
    let endpoint = Endpoint::start(&[]).await;
    let hook = subscribe(&server, &endpoint.url, Some(&["job.queued"])).await;
    let _sender = start_sender(&server);
    let path = format!("/webhooks/{hook}");
    let rotate = async |body: Value| server.post(&format!("{path}/secret"), body).await;
    // The response was lost, so the secret is rotated again.
    let lost = rotate(json!({})).await.body["secret"].as_str().unwrap().to_owned();
    let fresh = rotate(json!({})).await.body["secret"].as_str().unwrap().to_owned();
    // The endpoint still verifies with the first secret; receivers with either of the others succeed too.
    let tested = server.call("POST", &format!("{path}/test"), None, None).await;
    assert_eq!(tested.body["state"], "delivered", "{}", tested.text);
    let (headers, body) = endpoint.got.lock().unwrap().last().unwrap().clone();
    let text = |name: &str| headers[name].to_str().unwrap().to_owned();
    assert_eq!(text("webhook-signature").split(' ').count(), 3);
    let (bytes, now) = (body.to_string(), u64::try_from(clock_ms() / 1000).unwrap());
    for secret in [SECRET, &lost, &fresh] {
        let key = Key::parse(secret).unwrap();
        key.verify(&text("webhook-id"), &text("webhook-timestamp"), &text("webhook-signature"), bytes.as_bytes(), now)
            .unwrap();
    }

    // Rotating to the same secret changes nothing: no secret is lost, and none signs twice.
    let store = &server.state.store;
    let old = async || {
        let row = store.webhook_get(hook.parse().unwrap()).await.unwrap();
        (row.secret, row.old_secrets.into_iter().map(|(secret, _)| secret).collect::<Vec<_>>())
    };
    assert_eq!(rotate(json!({"secret": fresh})).await.status, 200);
    assert_eq!(old().await, (fresh.clone(), vec![lost.clone(), SECRET.to_owned()]));
    // Rotating back to an older secret.
    assert_eq!(rotate(json!({"secret": SECRET})).await.status, 200);
    assert_eq!(old().await, (SECRET.to_owned(), vec![fresh.clone(), lost.clone()]));
    // The number of signatures in a message is limited; ending the old secrets ends all of them.
    for _ in 0..8 {
        assert_eq!(rotate(json!({})).await.status, 200);
    }
    let refused = rotate(json!({})).await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (409, &json!("conflict")), "{}", refused.text);
    let alone = rotate(json!({"secret": SECRET, "keep_old_s": 0})).await;
    assert!(alone.body["old_secret_until"].is_null(), "{}", alone.text);
    assert_eq!(old().await, (SECRET.to_owned(), vec![]));
    // No older secret stays valid longer than requested.
    rotate(json!({"secret": lost})).await;
    rotate(json!({"secret": fresh, "keep_old_s": 60})).await;
    let row = store.webhook_get(hook.parse().unwrap()).await.unwrap();
    assert_eq!(row.old_secrets.len(), 2);
    assert!(row.old_secrets.iter().all(|(_, until)| *until <= clock_ms() + 60_000), "{:?}", row.old_secrets);
}

#[tokio::test]
async fn the_schedule_ends_after_ten_tries() {
    let server = Server::start().await;
    let hook = subscribe(&server, "http://127.0.0.1:9/", Some(&["job.queued"])).await;
    let id = hook.parse().unwrap();
    let message = server.state.store.delivery_test(id, 0).await.unwrap();
    let mut now = 0;
    for tries in 1..=10 {
        let (_, due) = server.state.store.deliveries_due(now).await.unwrap().pop().expect("due");
        assert_eq!((&due.id, due.tries), (&message.id, tries - 1));
        let next = rlood::webhooks::retry_in_ms(tries, 0.0).map_or(Next::GiveUp, |pause| Next::Retry(now + pause));
        let tried = TryRow { time: now, duration_ms: 1, status: None, error: Some("no connection".to_owned()) };
        server.state.store.delivery_tried(&message.id, tried, next, now).await.unwrap();
        if let Next::Retry(at) = next {
            assert!(server.state.store.deliveries_due(at - 1).await.unwrap().is_empty());
            now = at;
        }
    }
    assert_eq!(now, 272_105_000, "three days and some");
    let given_up = server.state.store.delivery_get(id, &message.id).await.unwrap();
    assert_eq!((given_up.state, given_up.tries), (DeliveryState::Failed, 10));
    assert_eq!(server.state.store.delivery_tries(&message.id).await.unwrap().len(), 10);
}

#[tokio::test]
async fn an_owner_is_told_of_its_own_jobs_only() {
    let server = Server::start().await;
    let key = async |owner: &str, scope: Scope| {
        let scopes = Scopes::of([scope]);
        let new = NewKey { name: owner.to_owned(), owner: Some(owner.to_owned()), scopes, expires_at: None };
        server.state.store.api_key_create(new, clock_ms()).await.unwrap().1
    };
    let (alice, bob, admin) =
        (key("alice", Scope::Submit).await, key("bob", Scope::Submit).await, key("root", Scope::Admin).await);
    let call = async |method: &str, path: &str, key: &str, body: Option<Value>| -> Answer {
        let mut request = axum::http::Request::builder().method(method).uri(path);
        request = request.header("authorization", format!("Bearer {key}"));
        request = request.header("content-type", "application/json");
        let body = body.map_or_else(axum::body::Body::empty, |body| axum::body::Body::from(body.to_string()));
        server.send(request.body(body).unwrap()).await
    };
    let body = json!({"url": "https://example.com/hook", "events": ["job.queued"]});
    let mut hooks = Vec::new();
    for key in [&alice, &bob, &admin] {
        let made = call("POST", "/webhooks", key, Some(body.clone())).await;
        assert_eq!(made.status, 201, "{}", made.text);
        assert!(made.body["secret"].as_str().unwrap().starts_with("whsec_"), "shown once");
        hooks.push(made.body["id"].as_str().unwrap().to_owned());
    }
    let mut all = body.clone();
    all["all_jobs"] = json!(true);
    assert_eq!(call("POST", "/webhooks", &bob, Some(all)).await.status, 403);
    assert_eq!(call("POST", "/jobs", &alice, Some(job())).await.status, 201);
    let told = async |hook: &str| {
        let path = format!("/webhooks/{hook}/deliveries");
        call("GET", &path, &admin, None).await.body["data"].as_array().unwrap().len()
    };
    assert_eq!((told(&hooks[0]).await, told(&hooks[1]).await, told(&hooks[2]).await), (1, 0, 1));
    assert_eq!(call("GET", &format!("/webhooks/{}", hooks[0]), &bob, None).await.status, 404);
    assert_eq!(call("GET", "/webhooks", &bob, None).await.body["data"].as_array().unwrap().len(), 1);
    let listed = call("GET", "/webhooks", &admin, None).await;
    assert_eq!(listed.body["data"].as_array().unwrap().len(), 3);
    assert!(!listed.text.contains("whsec_"));
}
