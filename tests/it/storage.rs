//! Stored data by kind and owner, its limits, and `rlood gc`.

use std::path::Path;
use std::process::Command;

use axum::body::Body;
use axum::http::Request;
use rlood::scopes::Scope;
use rlood::storage::StorageKind;
use serde_json::{Value, json};

use crate::access::{OPERATOR, call, key, with_operator};
use crate::processes::{self, binary};
use crate::protocol::claim;
use crate::server::{Answer, Server, job, records};

fn of_kind(storage: &Value, kind: &str) -> (u64, u64) {
    let kinds = storage["kinds"].as_array().unwrap();
    let found = kinds.iter().find(|entry| entry["kind"] == kind).unwrap_or_else(|| panic!("{kind}: {storage}"));
    (found["size_bytes"].as_u64().unwrap(), found["count"].as_u64().unwrap())
}

fn sum(list: &Value) -> u64 {
    list.as_array().unwrap().iter().map(|entry| entry["size_bytes"].as_u64().unwrap()).sum()
}

#[tokio::test]
async fn storage_adds_up_by_kind_and_owner_and_a_key_sees_its_owners() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await.text;
    let bob = key(&server, "bob", &[Scope::Read]).await.text;
    let created = call(&server, "POST", "/jobs", &alice, Some(&job())).await;
    assert_eq!(created.status, 201, "{}", created.text);
    std::fs::write(server.state.files.root().join("staging/upload-x"), "12345").unwrap();
    let all = call(&server, "GET", "/system/storage", OPERATOR, None).await;
    assert_eq!(all.status, 200, "{}", all.text);
    let storage = all.body;
    let total = storage["size_bytes"].as_u64().unwrap();
    assert_eq!((sum(&storage["kinds"]), sum(&storage["owners"])), (total, total), "{storage}");
    assert_eq!(of_kind(&storage, "staging"), (5, 1));
    assert_eq!(storage["kinds"].as_array().unwrap().len(), StorageKind::ALL.len());
    assert_eq!(storage["external_models"]["count"], 2, "the fixtures' folders");
    assert!(storage["disk"]["total_bytes"].as_u64() >= storage["disk"]["free_bytes"].as_u64());
    let dataset = created.body["plan"]["dataset"]["id"].as_str().unwrap().parse().unwrap();
    let bytes = std::fs::metadata(server.state.files.dataset(dataset)).unwrap().len();
    assert_eq!(of_kind(&storage, "datasets"), (bytes, 1));

    let own = call(&server, "GET", "/system/storage", &alice, None).await.body;
    let owners: Vec<&Value> = own["owners"].as_array().unwrap().iter().map(|owner| &owner["owner"]).collect();
    assert_eq!((owners, own["size_bytes"].as_u64()), (vec![&json!("alice")], Some(bytes)), "{own}");
    assert_eq!((of_kind(&own, "staging"), of_kind(&own, "database")), ((0, 0), (0, 0)));
    let none = call(&server, "GET", "/system/storage", &bob, None).await.body;
    assert_eq!((&none["size_bytes"], &none["owners"]), (&json!(0), &json!([])));
    let client =
        rlood_client::Client::builder(&client_url(&server).await).no_proxy().api_key(OPERATOR).build().unwrap();
    assert_eq!(client.get_storage().await.unwrap().owners.len(), storage["owners"].as_array().unwrap().len());
}

async fn client_url(server: &Server) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = server.router.clone();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

fn refused(answer: &Answer, kind: &str) {
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (507, &json!("storage_full")), "{}", answer.text);
    let detail = answer.body["detail"].as_str().unwrap();
    assert!(detail.starts_with(kind) && detail.contains("--storage-limit"), "{detail}");
    assert!(detail.contains("2.0 kB") && detail.contains("rlood gc --dry-run"), "{detail}");
}

#[tokio::test]
async fn a_kind_that_has_reached_its_limit_takes_no_more_and_says_what_to_do() {
    let limits = [(StorageKind::Datasets, 2000), (StorageKind::Checkpoints, 2000)];
    let server = Server::start_with(|config| config.storage_limits = limits.into()).await;
    let id = server.create(job()).await;
    let rows: String = (0..200).map(|row| format!("{{\"prompt\": \"What is {row}?\"}}\n")).collect();
    let upload = Request::post("/datasets").header("content-type", "application/x-ndjson").body(Body::from(rows));
    refused(&server.send(upload.unwrap()).await, "datasets");
    // The same for rows that are mapped.
    let pairs: String = (0..200).map(|row| format!("{{\"q\": \"What is {row}?\"}}\n")).collect();
    let mapped = Request::post("/datasets?prompt=q").header("content-type", "application/x-ndjson");
    refused(&server.send(mapped.body(Body::from(pairs)).unwrap()).await, "datasets");
    let mut inline = job();
    inline["dataset"] = json!({ "records": records(200) });
    refused(&server.post("/jobs", inline).await, "datasets");

    let attempt = claim(&server).await["attempt"].as_u64().unwrap();
    let put = async |bytes: usize| {
        let token = &server.state.config.worker_token;
        let request = Request::put(format!("/worker/jobs/{id}/checkpoints/1/adapter?attempt={attempt}"))
            .header("authorization", format!("Bearer {token}"))
            .header("content-length", bytes)
            .body(Body::from(vec![0; bytes]));
        server.send(request.unwrap()).await
    };
    assert_eq!(put(100).await.status, 204);
    refused(&put(2001).await, "checkpoints");
    // A checkpoint that a job saves because it was asked to stop is accepted.
    server.post(&format!("/jobs/{id}/pause"), json!({})).await;
    assert_eq!(put(2001).await.status, 204);
    let storage = server.get("/system/storage").await.body;
    let limit = |kind: &str| {
        storage["kinds"].as_array().unwrap().iter().find(|entry| entry["kind"] == kind).unwrap()["limit_bytes"].clone()
    };
    assert_eq!((limit("datasets"), limit("checkpoints"), limit("samples")), (json!(2000), json!(2000), Value::Null));
}

fn gc(data: &Path, cache: &Path, flags: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(binary());
    command.args(["gc", "--log", "error", "--data-dir"]).arg(data).arg("--cache-dir").arg(cache).args(flags);
    let output = command.output().unwrap();
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
    )
}

#[tokio::test]
async fn gc_lists_first_and_then_removes_the_orphan_and_spares_what_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let (data, cache) = (dir.path().join("data"), dir.path().join("cache"));
    let (code, text) = gc(&data, &cache, &["--dry-run"]);
    assert!(code == Some(1) && text.contains("--data-dir"), "{text}");
    let server = processes::Server::start(&data, "none");
    processes::register(&server, "tiny", &processes::model_copy(&dir.path().join("model"))).await;
    let job = server.submit(&processes::spec("tiny", 2)).await;
    let dataset = server.get(&format!("/jobs/{job}")).await["plan"]["dataset"]["id"].as_str().unwrap().to_owned();
    let orphan = data.join("datasets/ds_00000000000000000000000000.ndjson");
    std::fs::write(&orphan, vec![0; 1234]).unwrap();
    // Next to a running server, a file without a row may be about to get one.
    let (code, text) = gc(&data, &cache, &[]);
    assert!(code == Some(0) && orphan.is_file() && text.contains("0 bytes"), "{text}");
    assert!(text.contains(&dataset) && text.contains("pinned"), "{text}");
    server.terminate();
    let (code, text) = gc(&data, &cache, &["--dry-run"]);
    assert!(code == Some(0) && text.contains("1.2 kB") && text.contains("would be removed"), "{text}");
    assert!(orphan.is_file());
    let (code, text) = gc(&data, &cache, &["--retain-datasets", "1s"]);
    assert!(code == Some(0) && text.contains("removed") && text.contains("1.2 kB"), "{text}");
    assert!(!orphan.exists() && data.join(format!("datasets/{dataset}.ndjson")).is_file());
    assert!(dir.path().join("model/model.safetensors").is_file());
}
