//! Event streams: their limits, and that workers are not affected by them.

use std::time::{Duration, Instant};

use rlood::id::WorkerId;
use rlood::protocol::PROTOCOL;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::backup::{path, run};
use crate::processes::{Server, model_copy, register, spec};

const KEY: &str = "operator-key-0123456789";
const TOKEN: &str = "worker-token-0123456789";

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// Asks for a stream, on a connection of its own.
async fn stream(server: &Server, key: &str) -> reqwest::Response {
    let request = client().get(format!("{}/jobs/changes", server.url)).header("accept", "text/event-stream");
    request.bearer_auth(key).send().await.unwrap()
}

#[tokio::test]
async fn a_key_has_fifty_streams_and_another_key_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_in(dir.path(), "none", &[("RLOOD_API_KEY", KEY)]);
    let created = run(&["keys", "create", "--scopes", "read", "--data-dir", path(dir.path())]);
    let other = String::from_utf8(created.stdout).unwrap().trim().to_owned();
    let mut open = Vec::new();
    for _ in 0..50 {
        let answer = stream(&server, KEY).await;
        assert_eq!(answer.status(), 200);
        open.push(answer);
    }
    let refused = stream(&server, KEY).await;
    assert_eq!(refused.status(), 429);
    assert!(refused.headers()["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(refused.headers()["content-type"], "application/problem+json");
    let problem: serde_json::Value = refused.json().await.unwrap();
    assert_eq!((&problem["code"], &problem["retryable"]), (&json!("too_many_requests"), &json!(true)));
    assert!(problem["detail"].as_str().unwrap().contains("50 open event streams"), "{problem}");
    // Other requests of the key, and streams of other keys, still work.
    let list = client().get(format!("{}/jobs", server.url)).bearer_auth(KEY).send().await.unwrap();
    assert_eq!(list.status(), 200);
    assert_eq!(stream(&server, &other).await.status(), 200);
    // A stream that ends frees its slot.
    open.pop();
    let begun = Instant::now();
    while stream(&server, KEY).await.status() != 200 {
        assert!(begun.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn one_http2_connection_carries_sixteen_streams() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "none");
    let client = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let ask = async || {
        let request = client.get(format!("{}/jobs/changes", server.url)).header("accept", "text/event-stream");
        request.send().await.unwrap()
    };
    let mut open = Vec::new();
    for _ in 0..16 {
        open.push(ask().await);
    }
    assert!(open.iter().all(|answer| answer.status() == 200));
    assert_eq!(ask().await.status(), 429);
    assert_eq!(client.get(format!("{}/jobs", server.url)).send().await.unwrap().status(), 200);
}

/// A worker's request over a new connection.
async fn register_worker(server: &Server) -> u16 {
    let body = json!({"worker": WorkerId::new(), "device": "cpu", "pid": 1, "threads": 1, "version": "0",
                      "child": false, "protocol": PROTOCOL});
    let request = client().post(format!("{}/worker/register", server.url)).bearer_auth(TOKEN).json(&body);
    request.send().await.map_or(0, |answer| answer.status().as_u16())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_and_slow_bodies_on_all_connections_leave_workers_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let variables = [("RLOOD_MAX_CONNECTIONS", "64"), ("RLOOD_WORKER_TOKEN", TOKEN)];
    let server = Server::start_in(&dir.path().join("data"), "cpu", &variables);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let job = server.submit(&spec("tiny", 100_000)).await;
    let running = server.job_when(&job, "a step", |view| view["step"].as_u64() > Some(0)).await;
    assert_eq!(running["attempt"], 1);

    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    let streams = "GET /jobs/changes HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n";
    let slow =
        "POST /jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{";
    let mut sockets = Vec::new();
    for number in 0..160 {
        let mut socket = TcpStream::connect(&address).await.unwrap();
        let _ = socket.write_all(if number % 2 == 0 { streams } else { slow }.as_bytes()).await;
        sockets.push(socket);
    }
    // Wait for the first responses, so that all requests were processed.
    let mut head = [0; 12];
    let answered = async { sockets[0].read_exact(&mut head).await.is_ok() };
    let _ = tokio::time::timeout(Duration::from_secs(5), answered).await;
    for _ in 0..20 {
        assert_eq!(register_worker(&server).await, 200, "a worker's new connection is let in and answered");
    }
    // Read directly from the database, because the API's share of connections may be used up.
    let log = dir.path().join("data").join("rlood.db");
    let store = rlood::store::Store::open_as_is(&log).await.unwrap();
    let id = job.parse().unwrap();
    let begun = Instant::now();
    let step = store.job_get(id).await.unwrap().step;
    loop {
        let row = store.job_get(id).await.unwrap();
        assert_eq!(row.attempt, 1, "the claim is held");
        if row.step > step + 1 {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "the job goes on");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    store.close().await;
    drop(sockets);
}
