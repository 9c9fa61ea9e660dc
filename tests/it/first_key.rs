//! A server without keys allows rewards on loopback and models in any directory; its first key closes both immediately.

use std::time::{Duration, Instant};

use rlood::id::WorkerId;
use rlood::outgoing::OutgoingPolicy;
use rlood::protocol::PROTOCOL;
use rlood::scopes::Scope;
use rlood::webhook_sender::WebhookSender;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::access::{call, key, request};
use crate::lifecycle::{Endpoint, subscribe};
use crate::server::{Answer, Server, job, pointers, with};

/// A port of this machine on which no server listens.
const LOOPBACK: &str = "http://127.0.0.1:9/score";

async fn create_first_key(server: &Server) {
    let made = server.post("/keys", json!({"name": "first", "scopes": ["admin"]})).await;
    assert_eq!(made.status, 201, "{}", made.text);
}

fn with_webhook() -> Value {
    with(job(), "rewards", json!([{"type": "webhook", "url": LOOPBACK}]))
}

fn test_of_a_reward() -> Value {
    json!({"reward": {"type": "webhook", "url": LOOPBACK, "timeout_ms": 1000, "max_tries": 1},
           "samples": [{"prompt": "p", "completion": "c"}]})
}

/// Returns the addresses that the worker's next claim allows for rewards.
async fn claimed_outgoing(server: &Server) -> Value {
    let worker = WorkerId::new();
    let token = server.state.config.worker_token.clone();
    let register = json!({"worker": worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0", "child": false,
                          "protocol": PROTOCOL});
    assert_eq!(call(server, "POST", "/worker/register", &token, Some(&register)).await.status, 200);
    let claim = json!({"worker": worker, "wait_ms": 0, "protocol": PROTOCOL});
    let claim = call(server, "POST", "/worker/claim", &token, Some(&claim)).await;
    assert_eq!(claim.status, 200, "{}", claim.text);
    claim.body["allow_outgoing"].clone()
}

#[tokio::test]
async fn the_first_key_closes_private_addresses_and_foreign_directories_at_once() {
    let server = Server::start().await;
    let model = server.dir.path().join("plain");
    let elsewhere = json!({"id": "elsewhere", "source": model});
    let validated = server.post("/jobs/validate", with_webhook()).await;
    assert_eq!((validated.status.as_u16(), &validated.body["valid"]), (200, &json!(true)), "{}", validated.text);
    assert!(!server.post("/rewards/test", test_of_a_reward()).await.text.contains("must not reach"));
    server.create(job()).await;
    assert_eq!(claimed_outgoing(&server).await, json!(["loopback"]));
    server.create(job()).await;

    create_first_key(&server).await;
    let submit = key(&server, "mallory", &[Scope::Submit]).await.text;
    let post = async |path: &str, body: Value| call(&server, "POST", path, &submit, Some(&body)).await;
    let refused = post("/jobs/validate", with_webhook()).await;
    assert_eq!(pointers(&refused), ["/rewards/0/url address_refused"], "{}", refused.text);
    assert_eq!(post("/jobs", with_webhook()).await.status, 422);
    let tested = post("/rewards/test", test_of_a_reward()).await;
    assert!(tested.text.contains("must not reach"), "{}", tested.text);
    let webhook = post("/webhooks", json!({"url": LOOPBACK})).await;
    assert_eq!((webhook.status.as_u16(), pointers(&webhook)), (422, vec!["/url invalid".to_owned()]));
    let refused = post("/models", elsewhere).await;
    assert!(refused.status == 422 && refused.text.contains("--model-root"), "{}", refused.text);
    assert_eq!(claimed_outgoing(&server).await, json!([]));
    // Models registered before stay shared by all owners.
    assert_eq!(post("/jobs/validate", job()).await.body["valid"], true);
}

#[tokio::test]
async fn what_the_operator_permits_stays_with_the_first_key() {
    let server = Server::start_with(|config| {
        config.default_outgoing = false;
        config.model_roots = Some(vec![std::env::temp_dir().canonicalize().unwrap()]);
        config.model_roots.as_mut().unwrap().push(env!("CARGO_MANIFEST_DIR").into());
    })
    .await;
    create_first_key(&server).await;
    let submit = key(&server, "alice", &[Scope::Submit]).await.text;
    let post = async |path: &str, body: Value| -> Answer {
        server.send(request("POST", path, Some(&submit), Some(&body))).await
    };
    assert_eq!(post("/jobs/validate", with_webhook()).await.body["valid"], true);
    let model = server.dir.path().join("plain");
    let registered = post("/models", json!({"id": "again", "source": model})).await;
    assert_eq!(registered.status, 201, "{}", registered.text);
    assert_eq!(post("/jobs", job()).await.status, 201);
    assert_eq!(claimed_outgoing(&server).await, json!(["loopback"]));
}

#[tokio::test]
async fn messages_to_private_addresses_end_with_the_first_key() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = Server::start().await;
    let policy = OutgoingPolicy::parse(&["loopback"]).unwrap();
    let sender = WebhookSender::new(server.state.store.clone(), policy).unwrap();
    let sender = sender.narrowed_by_keys(OutgoingPolicy::default()).unwrap();
    let _sender = AbortOnDropHandle::new(tokio::spawn(sender.run()));
    let endpoint = Endpoint::start(&[]).await;
    let hook = subscribe(&server, &endpoint.url, Some(&["job.queued"])).await;
    server.create(job()).await;
    endpoint.wait_for(1).await;
    create_first_key(&server).await;
    let admin = key(&server, "admin", &[Scope::Admin]).await.text;
    assert_eq!(call(&server, "POST", "/jobs", &admin, Some(&job())).await.status, 201);
    let begun = Instant::now();
    loop {
        let page = call(&server, "GET", &format!("/webhooks/{hook}/deliveries"), &admin, None).await;
        if let Some(error) = page.body["data"][0]["tries"][0]["error"].as_str() {
            assert!(error.contains("loopback address"), "{error}");
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", page.text);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
