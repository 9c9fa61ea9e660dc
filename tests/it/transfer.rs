//! A worker on another machine, behind a proxy that slows uploads down and delays responses. `RLOOD_LONG=1`: at 2 kB per second,
//! with responses to publications that take 90 s.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::response::Response;
use futures::StreamExt;
use rlood::job::State as JobState;

use super::processes::{Server, binary, model_copy, register, spec};

const TOKEN: &str = "the-token-of-a-worker-elsewhere";

/// The proxy's effect on the worker's calls.
#[derive(Clone)]
struct Slow {
    http: reqwest::Client,
    server: String,
    /// Transfer rate of upload bodies.
    bytes_per_s: f64,
    /// Delay before the response to a publication.
    delay: Duration,
}

async fn forward(State(slow): State<Slow>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let pace = slow.bytes_per_s;
    let is_upload = parts.method == Method::PUT;
    let is_publication = parts.method == Method::POST && path.contains("/checkpoints/");
    let pieces = body.into_data_stream().flat_map(move |piece| {
        let bytes = piece.unwrap();
        let steps: Vec<_> =
            bytes.chunks(if is_upload { 512 } else { 1 << 20 }).map(|chunk| bytes.slice_ref(chunk)).collect();
        futures::stream::iter(steps).then(move |step| async move {
            if is_upload {
                tokio::time::sleep(Duration::from_secs_f64(step.len() as f64 / pace)).await;
            }
            std::io::Result::Ok(step)
        })
    });
    let mut headers = parts.headers;
    headers.remove("host");
    let request = slow.http.request(parts.method, format!("{}{path}", slow.server)).headers(headers);
    let answer = request.body(reqwest::Body::wrap_stream(pieces)).send().await.unwrap();
    if is_publication {
        tokio::time::sleep(slow.delay).await;
    }
    let mut response = Response::builder().status(answer.status());
    *response.headers_mut().unwrap() = answer.headers().clone();
    response.body(Body::from_stream(answer.bytes_stream())).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_behind_a_slow_proxy_delivers_its_checkpoint_at_the_first_attempt() {
    let long = std::env::var_os("RLOOD_LONG").is_some();
    let (bytes_per_s, delay) = if long { (2_000.0, 90) } else { (20_000.0, 1) };
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_in(&dir.path().join("data"), "none", &[("RLOOD_WORKER_TOKEN", TOKEN)]);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let job = server.submit(&spec("tiny", 2)).await;

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = format!("http://{}", listener.local_addr().unwrap());
    let slow = Slow {
        http: reqwest::Client::builder().no_proxy().build().unwrap(),
        server: server.url.clone(),
        bytes_per_s,
        delay: Duration::from_secs(delay),
    };
    let app = Router::new().fallback(forward).with_state(slow);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let begun = Instant::now();
    let mut worker = Command::new(binary())
        .args(["worker", "--server", &proxy, "--device", "cpu"])
        .env("RLOOD_WORKER_TOKEN", TOKEN)
        .env("NO_PROXY", "127.0.0.1")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let id = job.parse().unwrap();
    let over = tokio::time::timeout(Duration::from_secs(1200), server.client.wait_for_job(id)).await.unwrap().unwrap();
    worker.kill().unwrap();
    worker.wait().unwrap();
    assert_eq!((over.state, over.attempt), (JobState::Succeeded, 1), "{over:?}");
    let checkpoint = server.client.list_checkpoints(id).collect().await.unwrap().remove(0);
    let arrived = server.client.download_files(&checkpoint, &dir.path().join("arrived")).await.unwrap();
    let bytes = arrived.iter().map(|file| file.size_bytes as f64).sum::<f64>();
    println!("{bytes} bytes at {bytes_per_s} a second: {:.1} s in all", begun.elapsed().as_secs_f64());
    assert!(begun.elapsed().as_secs_f64() > bytes / bytes_per_s + delay as f64, "the proxy was not slow");
}
