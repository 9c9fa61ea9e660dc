//! Tests with slow peers over real sockets. One second here represents sixty in a worker; `RLOOD_LONG=1` uses the real times.

use std::net::SocketAddr;
use std::time::Duration;

use reqwest::{Client, Method};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};

use super::*;
use crate::event::Metrics;
use crate::id::{CheckpointId, JobId};
use crate::protocol::Publish;
use crate::worker;

const BODY_BYTES: usize = 10_000_000;

/// Returns the test's duration of one second of a worker.
fn scale() -> f64 {
    if std::env::var_os("RLOOD_LONG").is_some() { 1.0 } else { 1.0 / 60.0 }
}

fn seconds(worker_seconds: f64) -> Duration {
    Duration::from_secs_f64(worker_seconds * scale())
}

fn limits() -> TransferLimits {
    let TransferLimits { stall, answer_base, answer_bytes_per_s } = TransferLimits::default();
    TransferLimits {
        stall: stall.mul_f64(scale()),
        answer_base: answer_base.mul_f64(scale()),
        answer_bytes_per_s: (answer_bytes_per_s as f64 / scale()) as u64,
    }
}

fn client() -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    http_client().no_proxy().build().unwrap()
}

/// Starts a peer that runs `serve` with its first connection.
async fn peer<F>(serve: impl FnOnce(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { serve(listener.accept().await.unwrap().0).await });
    address
}

/// Reads this many bytes in equal pieces, spread over the time.
async fn read_slowly(stream: &mut TcpStream, size_bytes: usize, time: Duration) {
    const PIECES: u32 = 90;
    let begun = Instant::now();
    let mut piece = vec![0; size_bytes.div_ceil(PIECES as usize)];
    let mut left = size_bytes;
    for number in 1..=PIECES {
        tokio::time::sleep_until(begun + time * number / PIECES).await;
        let length = piece.len().min(left);
        stream.read_exact(&mut piece[..length]).await.unwrap();
        left -= length;
    }
}

async fn answer_ok(stream: &mut TcpStream) {
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
}

async fn upload(to: SocketAddr, limits: TransferLimits) -> Result<Response, ClientError> {
    let request = client().request(Method::PUT, format!("http://{to}/"));
    send_body(request, bytes_body(vec![7; BODY_BYTES]), limits, watch::Sender::default().subscribe()).await
}

/// The peer's kernel accepts bytes that the peer has not read; this many bytes are more than socket buffers hold.
const MORE_THAN_SOCKETS_HOLD: usize = 64 << 20;

#[tokio::test]
async fn a_peer_that_takes_90_s_for_10_mb_gets_them() {
    let address = peer(async |mut stream: TcpStream| {
        read_slowly(&mut stream, BODY_BYTES, seconds(90.0)).await;
        answer_ok(&mut stream).await;
    })
    .await;
    let begun = Instant::now();
    assert_eq!(upload(address, limits()).await.unwrap().status(), 204);
    assert!(begun.elapsed() >= seconds(90.0) && begun.elapsed() > limits().stall);
}

#[tokio::test]
async fn a_peer_that_takes_90_s_to_answer_is_waited_for() {
    let address = peer(async |mut stream: TcpStream| {
        read_slowly(&mut stream, BODY_BYTES, Duration::ZERO).await;
        sleep(seconds(90.0)).await;
        answer_ok(&mut stream).await;
    })
    .await;
    assert_eq!(upload(address, limits()).await.unwrap().status(), 204);

    // The same for a publication, which has a small body.
    let address = peer(async |mut stream: TcpStream| {
        stream.read_u8().await.unwrap();
        sleep(seconds(90.0)).await;
        let body = serde_json::json!({"checkpoint": CheckpointId::new()}).to_string();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    })
    .await;
    let client = worker::client::Client::new(&format!("http://{address}"), "the-token", true).unwrap();
    let claim_ref = worker::client::ClaimRef { job: JobId::new(), attempt: 1 };
    let publish = Publish { attempt: 1, files: Vec::new(), metrics: Metrics::new(), temporary: false };
    client.with_limits(limits()).publish(claim_ref, 5, &publish).await.unwrap();
}

#[tokio::test]
async fn a_peer_that_takes_nothing_more_ends_the_upload_after_the_stated_time() {
    let address = peer(async |mut stream: TcpStream| {
        stream.read_u8().await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let request = client().request(Method::PUT, format!("http://{address}/"));
    let body = bytes_body(vec![7; MORE_THAN_SOCKETS_HOLD]);
    let begun = Instant::now();
    let error = send_body(request, body, limits(), watch::Sender::default().subscribe()).await.unwrap_err();
    assert!(matches!(error, ClientError::Stalled { limit } if limit == limits().stall), "{error}");
    assert!(error.is_transient());
    assert!(begun.elapsed() >= limits().stall && begun.elapsed() < limits().answer_base, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_peer_that_never_answers_ends_the_upload_after_the_time_for_its_size() {
    let address = peer(async |mut stream: TcpStream| {
        read_slowly(&mut stream, BODY_BYTES, Duration::ZERO).await;
        std::future::pending::<()>().await;
    })
    .await;
    let begun = Instant::now();
    let error = upload(address, limits()).await.unwrap_err();
    let limit = limits().answer(BODY_BYTES as u64);
    assert!(matches!(error, ClientError::Stalled { limit: at } if at == limit), "{error}");
    assert!(begun.elapsed() >= limit);
}

#[tokio::test]
async fn bytes_reported_by_the_server_keep_a_blocked_upload_alive() {
    let address = peer(async |mut stream: TcpStream| {
        stream.read_u8().await.unwrap();
        sleep(seconds(200.0)).await;
        let mut rest = vec![0; 1 << 20];
        let mut left = MORE_THAN_SOCKETS_HOLD;
        while left > 0 {
            left = left.saturating_sub(stream.read(&mut rest).await.unwrap());
        }
        answer_ok(&mut stream).await;
    })
    .await;
    let received = watch::Sender::new(0);
    let listening = received.subscribe();
    let heartbeats = tokio::spawn(async move {
        for count in 1.. {
            sleep(seconds(10.0)).await;
            received.send_replace(count * 1000);
        }
    });
    let request = client().request(Method::PUT, format!("http://{address}/"));
    let body = bytes_body(vec![7; MORE_THAN_SOCKETS_HOLD]);
    assert_eq!(send_body(request, body, limits(), listening).await.unwrap().status(), 204);
    heartbeats.abort();
}

#[tokio::test]
async fn a_download_ends_when_nothing_has_come_for_the_stated_time_and_not_before() {
    let address = peer(async |mut stream: TcpStream| {
        stream.read_u8().await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n").await.unwrap();
        for _ in 0..5 {
            sleep(seconds(45.0)).await;
            stream.write_all(&[7; 100]).await.unwrap();
        }
        std::future::pending::<()>().await;
    })
    .await;
    let begun = Instant::now();
    let response = client().get(format!("http://{address}/")).send().await.unwrap();
    let error = read_body(response, limits().stall).await.unwrap_err();
    assert!(matches!(error, ClientError::Stalled { limit } if limit == limits().stall), "{error}");
    assert!(begun.elapsed() >= seconds(5.0 * 45.0 + 60.0), "{:?}", begun.elapsed());
}

#[test]
fn the_wait_for_an_answer_grows_with_what_it_is_about() {
    let limits = TransferLimits::default();
    assert_eq!(limits.answer(0).as_secs(), 120);
    assert_eq!(limits.answer(64_000_000_000).as_secs(), 120 + 1280);
    assert!(limits.answer(u64::MAX) > Duration::from_secs(1_000_000));
}

/// Shows why the client has no `read_timeout`. Another version of reqwest may behave differently.
#[tokio::test]
async fn the_read_timeout_of_reqwest_cuts_uploads_that_flow_and_answers_that_come_late() {
    let limited = |limit: Duration| Client::builder().no_proxy().read_timeout(limit).build().unwrap();
    let _ = client();
    let flowing = peer(async |mut stream: TcpStream| {
        let mut piece = [0; 4096];
        while stream.read(&mut piece).await.is_ok_and(|read| read > 0) {}
    })
    .await;
    let pieces = stream::iter(0..80).then(|_| async {
        sleep(Duration::from_millis(10)).await;
        std::io::Result::Ok(Bytes::from_static(&[7; 1000]))
    });
    let begun = Instant::now();
    let body = reqwest::Body::wrap_stream(Box::pin(pieces));
    let cut = limited(Duration::from_millis(400)).put(format!("http://{flowing}/")).body(body).send().await;
    assert!(cut.unwrap_err().is_timeout());
    assert!(begun.elapsed() < Duration::from_millis(790), "before the body was sent: {:?}", begun.elapsed());

    let silent = peer(async |stream: TcpStream| {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let request =
        limited(Duration::from_millis(200)).post(format!("http://{silent}/")).timeout(Duration::from_secs(20));
    let begun = Instant::now();
    assert!(request.send().await.unwrap_err().is_timeout());
    assert!(begun.elapsed() < Duration::from_secs(10), "the shorter of the two counts");
}
