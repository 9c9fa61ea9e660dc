//! Sign-ins that are started and never finished: they end soon, and do not affect other clients.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::processes::Server;

const KEY: &str = "operator-key-0123456789";
/// More than the limit per address, and several times the number that used to fill the memory of sign-ins.
const UNFINISHED: usize = 600;

/// A sign-in whose body lacks its last bytes.
async fn begin(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    let head =
        "POST /session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 65000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    // A refused connection may already be closed.
    let _ = stream.write_all(&vec![b' '; 64_000]).await;
    stream
}

#[tokio::test]
async fn unfinished_sign_ins_block_nobody_and_end_within_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_in(dir.path(), "none", &[("RLOOD_API_KEY", KEY)]);
    let begun = Instant::now();
    let mut unfinished = Vec::new();
    for _ in 0..UNFINISHED {
        unfinished.push(begin(&server).await);
    }
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for _ in 0..20 {
        let url = format!("{}/session", server.url);
        let answer = client.post(url).json(&json!({"key": KEY})).send().await.unwrap();
        assert_eq!(answer.status(), 201, "{}", answer.text().await.unwrap());
        unfinished.push(begin(&server).await);
    }
    let opened = begun.elapsed();
    let (mut displaced, mut too_slow) = (0, 0);
    for mut stream in unfinished {
        let mut answer = Vec::new();
        let end = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await;
        end.expect("each connection is closed").ok();
        // When a connection is closed while the client still sends, the response may be lost.
        displaced += usize::from(answer.starts_with(b"HTTP/1.1 429"));
        too_slow += usize::from(answer.starts_with(b"HTTP/1.1 408"));
    }
    assert!(displaced > 0 && too_slow <= 512, "{displaced} made room, {too_slow} took too long");
    let took = begun.elapsed() - opened;
    assert!(took < Duration::from_secs(10), "the last ones ended after {took:?}");
}
