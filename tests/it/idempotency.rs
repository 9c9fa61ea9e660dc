//! `Idempotency-Key` on every request that creates or changes something: executed once, answered twice, without storing a secret.

use rlood::http::openapi;
use rlood::scopes::{Scope, Scopes};
use rlood::store::{NewKey, clock_ms};
use serde_json::{Value, json};
use sqlx::Connection;

use crate::server::{Answer, Server, job};

/// Read requests, and requests with their own way to be repeated: sessions and callbacks.
const WITHOUT: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/serve/{model}/v1/chat/completions",
    "/serve/{model}/v1/completions",
    "/serve/{model}/tokenize",
    "/serve/{model}/detokenize",
    "/datasets/preview",
    "/jobs/validate",
    "/jobs/{id}/generate",
    "/rewards/test",
    "/environments/test",
    "/session",
    "/reward-callbacks/{id}",
    "/environment-callbacks/{id}",
];

#[test]
fn every_post_that_makes_or_moves_something_takes_a_key() {
    let document = serde_json::to_value(openapi()).unwrap();
    for (path, item) in document["paths"].as_object().unwrap() {
        let Some(operation) = item.get("post").filter(|_| !WITHOUT.contains(&path.as_str())) else { continue };
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        let takes = |parameter: &Value| {
            parameter["in"] == "header" && parameter["name"].as_str().unwrap().eq_ignore_ascii_case("idempotency-key")
        };
        assert!(parameters.iter().any(takes), "POST {path}");
    }
}

async fn send(server: &Server, path: &str, body: Value, key: &str) -> Answer {
    server.call("POST", path, Some(body), Some(key)).await
}

fn assert_replayed(answer: &Answer, status: u16) {
    assert_eq!(answer.status, status, "{}", answer.text);
    assert_eq!(answer.headers["idempotency-replayed"], "true");
}

fn assert_mismatch(answer: &Answer) {
    assert_eq!(
        (answer.status.as_u16(), &answer.body["code"]),
        (422, &json!("idempotency_mismatch")),
        "{}",
        answer.text
    );
}

async fn kept_answers(server: &Server) -> Vec<String> {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(server.state.files.database());
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::query_scalar("SELECT response FROM idempotency_keys").fetch_all(&mut connection).await.unwrap()
}

/// All bytes of the database.
fn database(server: &Server) -> Vec<u8> {
    let path = server.state.files.database();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend(std::fs::read(path.with_extension("db-wal")).unwrap_or_default());
    bytes
}

fn count(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).filter(|window| *window == text.as_bytes()).count()
}

#[tokio::test]
async fn a_repeated_webhook_is_one_and_shows_its_secret_once() {
    let server = Server::start().await;
    let body = json!({"url": "https://example.com/a"});
    let first = send(&server, "/webhooks", body.clone(), "k").await;
    assert_eq!(first.status, 201, "{}", first.text);
    let secret = first.body["secret"].as_str().unwrap();
    let again = send(&server, "/webhooks", body, "k").await;
    assert_replayed(&again, 201);
    assert_eq!((&again.body["id"], &again.body["secret"]), (&first.body["id"], &Value::Null));
    assert_eq!(again.headers["location"], first.headers["location"]);
    assert_mismatch(&send(&server, "/webhooks", json!({"url": "https://example.com/b"}), "k").await);
    assert_eq!(server.get("/webhooks").await.body["data"].as_array().unwrap().len(), 1);

    let id = first.body["id"].as_str().unwrap();
    let rotated = send(&server, &format!("/webhooks/{id}/secret"), json!({}), "k").await;
    let new = rotated.body["secret"].as_str().unwrap();
    assert_ne!(new, secret);
    let again = send(&server, &format!("/webhooks/{id}/secret"), json!({}), "k").await;
    assert_replayed(&again, 200);
    assert_eq!(again.body["secret"], Value::Null);
    // The server signs with the secrets, so it stores them; the stored responses do not contain them.
    let answers = kept_answers(&server).await;
    assert!(answers.len() == 2 && answers.iter().all(|answer| !answer.contains("whsec_")), "{answers:?}");
}

#[tokio::test]
async fn a_repeated_key_is_one_and_its_text_is_not_kept() {
    let server = Server::start().await;
    let admin = NewKey { name: "admin".into(), owner: None, scopes: Scopes::of([Scope::Admin]), expires_at: None };
    let (_, admin) = server.state.store.api_key_create(admin, clock_ms()).await.unwrap();
    let make = async |name: &str| {
        let body = json!({"name": name, "scopes": ["read"]}).to_string();
        let request = axum::http::Request::post("/keys")
            .header("authorization", format!("Bearer {admin}"))
            .header("content-type", "application/json")
            .header("idempotency-key", "k");
        server.send(request.body(body.into()).unwrap()).await
    };
    let first = make("ci").await;
    assert_eq!(first.status, 201, "{}", first.text);
    let text = first.body["key"].as_str().unwrap();
    let again = make("ci").await;
    assert_replayed(&again, 201);
    assert_eq!((&again.body["id"], &again.body["key"]), (&first.body["id"], &Value::Null));
    assert_mismatch(&make("other").await);
    assert_eq!(count(&database(&server), text), 0, "the text is in the database");
}

#[tokio::test]
async fn a_model_a_pin_a_test_and_a_rescore_are_done_once() {
    let server = Server::start().await;
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/parity/qwen3");
    let body = json!({"id": "once", "source": source});
    assert_eq!(send(&server, "/models", body.clone(), "k").await.status, 201);
    assert_replayed(&send(&server, "/models", body, "k").await, 201);
    assert_mismatch(&send(&server, "/models", json!({"id": "twice", "source": source}), "k").await);
    assert_eq!(server.get("/models/twice").await.status, 404);

    // No sender runs here, so the test message stays pending.
    let hook = server.post("/webhooks", json!({"url": "https://example.com/a"})).await.body["id"].clone();
    let hook = hook.as_str().unwrap();
    let message = server.state.store.delivery_test(hook.parse().unwrap(), clock_ms()).await.unwrap().id;
    let path = format!("/webhooks/{hook}/deliveries/{message}/redeliver");
    let first = server.call("POST", &path, None, Some("k")).await;
    assert_eq!(first.status, 202, "{}", first.text);
    let again = server.call("POST", &path, None, Some("k")).await;
    assert_replayed(&again, 202);
    assert_eq!(again.text, first.text);

    // A failed request frees its key: there are no samples yet.
    let id = server.create(job()).await;
    let rescore = json!({"reward": {"type": "length"}});
    for _ in 0..2 {
        assert_eq!(send(&server, &format!("/jobs/{id}/rescore"), rescore.clone(), "k").await.status, 404);
    }
    let none = "/checkpoints/ckpt_01jd0000000000000000000000/pin";
    assert_eq!(server.call("POST", none, None, Some("k")).await.status, 404);
}
