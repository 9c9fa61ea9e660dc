//! Gated repositories on a server with keys: each owner sees what its own token opened, and learns of nothing else.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::hub::{Faults, Running, start};
use crate::hub_models::{TOKEN, post, repository, serve};
use crate::processes::{Server, spec};

const OPERATOR: &str = "an-admin-key-of-the-test";

/// A server with keys, which may not use a token of its own for others.
fn with_keys(data: &Path, hub: &Running) -> Server {
    serve(data, hub, &[("RLOOD_API_KEY", OPERATOR), ("RLOOD_ALLOW_OUTGOING", "loopback")])
}

/// Creates a key of an owner and returns its header.
async fn key(server: &Server, owner: &str) -> String {
    let body = json!({"name": owner, "owner": owner, "scopes": ["read", "submit"]});
    let (status, made) = post(server, "/keys", &[("authorization", &format!("Bearer {OPERATOR}"))], &body).await;
    assert_eq!(status, 201, "{made}");
    format!("Bearer {}", made["key"].as_str().unwrap())
}

async fn call(server: &Server, method: reqwest::Method, path: &str, key: &str) -> (u16, Value) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let request = http.request(method, format!("{}{path}", server.url)).header("authorization", key);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap_or_default())
}

async fn get(server: &Server, path: &str, key: &str) -> (u16, Value) {
    call(server, reqwest::Method::GET, path, key).await
}

/// Returns the ids of the models that a key sees.
async fn listed(server: &Server, key: &str) -> Vec<String> {
    let models = get(server, "/models", key).await.1;
    models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_gated_data_set_is_read_only_by_those_whose_token_opens_it() {
    let rows = b"{\"question\":\"a secret\",\"answer\":\"1\"}\n".to_vec();
    let files = BTreeMap::from([("train.jsonl".to_owned(), rows)]);
    let hub = start(files, Faults { gated: Some(TOKEN), ..Faults::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let server = with_keys(&dir.path().join("data"), &hub);
    let (ann, bob) = (key(&server, "ann").await, key(&server, "bob").await);
    let wanted = json!({"hub": "fake/rows", "map": {"prompt": "question"}});
    let with_token = [("authorization", ann.as_str()), ("x-hub-token", TOKEN)];
    let (status, made) = post(&server, "/datasets", &with_token, &wanted).await;
    assert_eq!((status, &made["num_rows"]), (201, &json!(1)), "{made}");

    for token in [None, Some("hf_wrong")] {
        let mut headers = vec![("authorization", bob.as_str())];
        headers.extend(token.map(|token| ("x-hub-token", token)));
        for path in ["/datasets", "/datasets/preview"] {
            let (status, refused) = post(&server, path, &headers, &wanted).await;
            assert_eq!((status, &refused["errors"][0]["code"]), (422, &json!("gated")), "{path}: {refused}");
        }
        let mut job = spec("none", 1);
        job["dataset"] = wanted.clone();
        let (_, checked) = post(&server, "/jobs/validate", &headers, &job).await;
        let errors = checked["errors"].as_array().unwrap();
        let of_dataset = errors.iter().find(|error| error["pointer"].as_str().unwrap().starts_with("/dataset"));
        assert!(of_dataset.is_some_and(|error| error["detail"].as_str().unwrap().contains("license")), "{checked}");
        assert!(!checked.to_string().contains("secret"), "{checked}");
    }
    let own = [("authorization", bob.as_str()), ("x-hub-token", TOKEN)];
    let (status, look) = post(&server, "/datasets/preview", &own, &wanted).await;
    assert_eq!((status, &look["rows"][0]["record"]["answer"]), (200, &json!("1")), "{look}");
    let (status, other) = post(&server, "/datasets", &own, &wanted).await;
    assert!(status == 201 && other["id"] != made["id"], "{other}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_owner_has_its_own_row_of_a_gated_model_and_learns_of_no_other() {
    let hub = start(repository(), Faults { gated: Some(TOKEN), ..Faults::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let server = with_keys(&data, &hub);
    let operator = format!("Bearer {OPERATOR}");
    let (ann, bob, eve) = (key(&server, "ann").await, key(&server, "bob").await, key(&server, "eve").await);
    let (wanted, path) = (json!({"hub": "fake/tiny"}), "/models/fake%2Ftiny");

    let mut ids: Vec<String> = Vec::new();
    for (key, owner) in [(&operator, ""), (&ann, "ann"), (&bob, "bob")] {
        // Before it asks with a token, an owner reads the same as if no other had ever asked.
        if !owner.is_empty() {
            assert_eq!(get(&server, path, key).await.0, 404, "{owner}");
            assert_eq!(listed(&server, key).await, Vec::<String>::new(), "{owner}");
        }
        let headers = [("authorization", key.as_str()), ("x-hub-token", TOKEN)];
        let (status, model) = post(&server, "/models", &headers, &wanted).await;
        assert_eq!((status, &model["owner"], &model["private"]), (202, &json!(owner), &json!(true)), "{model}");
        let id = model["id"].as_str().unwrap().to_owned();
        assert!(id.starts_with("fake/tiny~") && !ids.contains(&id), "{id}");
        // The id without its end means the owner's own.
        assert_eq!(get(&server, path, key).await.1["id"], json!(id));
        if !owner.is_empty() {
            assert_eq!(listed(&server, key).await, std::slice::from_ref(&id));
        }
        for other in &ids {
            let found = get(&server, &format!("/models/{}", other.replace('/', "%2F")), key).await.0;
            assert_eq!(found, 404, "{owner}");
        }
        ids.push(id);
    }
    assert_eq!(listed(&server, &operator).await.len(), 3);

    // An owner without a token reads what it would read on an empty server.
    let (status, refused) = post(&server, "/models", &[("authorization", &eve)], &wanted).await;
    assert_eq!((status, &refused["errors"][0]["code"]), (422, &json!("gated")), "{refused}");
    let (_, checked) = post(&server, "/jobs/validate", &[("authorization", &eve)], &spec("fake/tiny", 2)).await;
    assert!(checked["valid"] == false && !checked.to_string().contains("taken"), "{checked}");
    let (_, checked) = post(&server, "/jobs/validate", &[("authorization", &eve)], &spec(&ids[1], 2)).await;
    assert_eq!(checked["errors"][0]["code"], "unknown_model", "{checked}");

    for _ in 0..600 {
        if get(&server, path, &bob).await.1["state"] == "ready" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let of_bob = get(&server, path, &bob).await.1;
    assert_eq!(of_bob["state"], "ready", "{of_bob}");
    let (_, checked) = post(&server, "/jobs/validate", &[("authorization", &bob)], &spec("fake/tiny", 2)).await;
    assert_eq!((&checked["valid"], &checked["plan"]["model"]["id"]), (&json!(true), &json!(ids[2])), "{checked}");

    // The three share one folder, which stays for the others.
    let remove = async |path: &str, key: &str| call(&server, reqwest::Method::DELETE, path, key).await.0;
    assert_eq!(remove(&format!("/models/{}", ids[2].replace('/', "%2F")), &ann).await, 404);
    assert_eq!(remove(path, &ann).await, 204);
    assert_eq!(get(&server, path, &ann).await.0, 404);
    let folder = Path::new(of_bob["source"].as_str().unwrap());
    assert!(folder.join("model.safetensors").is_file());
    assert_eq!(remove(path, &bob).await, 204);
    assert!(folder.join("model.safetensors").is_file(), "the operator's model");
    assert_eq!(remove(&format!("/models/{}", ids[0].replace('/', "%2F")), &operator).await, 204);
    assert!(!folder.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operators_token_is_used_for_those_whom_the_setting_names() {
    let hub = start(repository(), Faults { gated: Some(TOKEN), ..Faults::default() }).await;
    for (setting, status_of_a_user) in [("admins", 422), ("everyone", 202)] {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let variables = [
            ("RLOOD_API_KEY", OPERATOR),
            ("RLOOD_ALLOW_OUTGOING", "loopback"),
            ("HF_TOKEN", TOKEN),
            ("RLOOD_HUB_TOKEN_FOR", setting),
        ];
        let server = serve(&data, &hub, &variables);
        let (user, operator) = (key(&server, "ann").await, format!("Bearer {OPERATOR}"));
        let wanted = json!({"id": "anns/tiny", "hub": "fake/tiny"});
        let (status, answer) = post(&server, "/models", &[("authorization", &user)], &wanted).await;
        assert_eq!(status, status_of_a_user, "{setting}: {answer}");
        assert!(!answer.to_string().contains(TOKEN), "{answer}");
        let wanted = json!({"id": "operators/tiny", "hub": "fake/tiny"});
        let (status, answer) = post(&server, "/models", &[("authorization", &operator)], &wanted).await;
        assert_eq!(status, 202, "{setting}: {answer}");
        assert!(!answer.to_string().contains(TOKEN), "{answer}");
    }
}
