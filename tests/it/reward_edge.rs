//! `rlood reward-server` with web pages, unauthenticated clients and slow clients.

use std::time::{Duration, Instant};

use rlood::reward::signature::Key;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::reward_server::RewardServer;

const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const LARGE: &str = "content-length: 60000000\r\n";

/// Sends headers and the available part of a body.
async fn send(server: &RewardServer, head: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    stream.write_all(format!("POST /score HTTP/1.1\r\n{head}\r\n").as_bytes()).await.unwrap();
    // A refused connection may already be closed.
    let _ = stream.write_all(body).await;
    stream
}

/// Returns the status of the response to headers alone, which does not wait for the body.
async fn status_of_head(server: &RewardServer, head: &str) -> u16 {
    let mut stream = send(server, head, b"").await;
    let mut answer = [0; 12];
    let read = tokio::time::timeout(Duration::from_secs(3), stream.read_exact(&mut answer)).await;
    read.expect("an answer before the body").unwrap();
    std::str::from_utf8(&answer[9..]).unwrap().parse().unwrap()
}

#[tokio::test]
async fn what_may_not_use_the_model_is_told_before_its_body_is_read() {
    let open = RewardServer::start("qwen3", &["--allowed-hosts", "rm.internal"]);
    let json = format!("content-type: application/json\r\n{LARGE}");
    for (head, status) in [
        (format!("host: evil.example\r\n{json}"), 421),
        (format!("host: localhost\r\norigin: https://evil.example\r\n{json}"), 403),
        // A request that a web page may send without a CORS preflight.
        (format!("host: localhost\r\ncontent-type: text/plain\r\n{LARGE}"), 415),
        (format!("host: localhost\r\n{LARGE}"), 415),
        ("host: localhost\r\ncontent-type: application/json\r\ncontent-length: 70000000\r\n".to_owned(), 413),
        (json.clone(), 400),
    ] {
        assert_eq!(status_of_head(&open, &head).await, status, "{head}");
    }
    let ping = json!({"type": "reward.ping", "version": "1", "id": "x"}).to_string();
    for host in ["localhost", "rm.internal:8090", "127.0.0.1"] {
        let head = format!("host: {host}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n", ping.len());
        let mut stream = send(&open, &head, ping.as_bytes()).await;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer[9..], b"200", "{host}");
    }

    let signed = RewardServer::start("modernbert", &["--secret", SECRET]);
    let head = format!("host: localhost\r\n{json}");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let signature = Key::parse(SECRET).unwrap().sign("x", now, b"another body");
    let signed_at =
        |time: u64| format!("{head}webhook-id: x\r\nwebhook-timestamp: {time}\r\nwebhook-signature: {signature}\r\n");
    assert_eq!(status_of_head(&signed, &head).await, 401, "without a signature");
    assert_eq!(status_of_head(&signed, &signed_at(now - 400)).await, 401, "signed long ago");
    // A repeated request is a retry, and is answered again.
    let signature = Key::parse(SECRET).unwrap().sign("x", now, ping.as_bytes());
    for _ in 0..2 {
        let request = signed.http.post(&signed.url).header("webhook-id", "x").header("webhook-timestamp", now);
        let request = request.header("content-type", "application/json").header("webhook-signature", &signature);
        assert_eq!(request.body(ping.clone()).send().await.unwrap().status(), 200);
    }
}

/// Resident memory in MiB.
fn memory_mib(server: &RewardServer) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().unwrap() / 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_slow_strangers_hold_neither_the_memory_nor_the_model() {
    let server = RewardServer::start("qwen3", &["--max-connections", "250"]);
    let before = memory_mib(&server);
    let head = format!("host: localhost\r\ncontent-type: application/json\r\n{LARGE}");
    let piece = vec![b' '; 4 << 20];
    let mut strangers = Vec::new();
    for _ in 0..200 {
        strangers.push(send(&server, &head, &piece).await);
    }
    let body = json!({"query": ["What? A"], "prompts": ["What? "]});
    for _ in 0..5 {
        let (status, answer) = server.post(&body).await;
        assert_eq!(status, 200, "{answer}");
        strangers.push(send(&server, &head, &piece).await);
    }
    let grown = memory_mib(&server).saturating_sub(before);
    assert!(grown < 512, "{grown} MiB");
    // 4 MiB at 16 KiB/s would take four minutes: the pause limit ends the bodies earlier.
    let begun = Instant::now();
    for mut stranger in strangers {
        let mut answer = Vec::new();
        let end = tokio::time::timeout(Duration::from_secs(30), stranger.read_to_end(&mut answer)).await;
        end.expect("each connection is closed").ok();
    }
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn on_sigterm_the_reward_server_finishes_what_it_has_and_leaves() {
    let mut server = RewardServer::start("qwen3", &[]);
    let idle = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    assert_eq!(server.post(&json!({"query": ["a b c"]})).await.0, 200);
    let begun = Instant::now();
    kill_process(Pid::from_child(&server.child), Signal::TERM).unwrap();
    let status = loop {
        if let Some(status) = server.child.try_wait().unwrap() {
            break status;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "an idle connection holds it up");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(status.success(), "{status}");
    drop(idle);
}
