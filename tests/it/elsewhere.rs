//! Workers on other machines, where the server's paths do not exist: they download the models.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use rlood::job::State as JobState;
use rlood::modelcard;
use rlood_worker::model_cache::ModelCache;
use serde_json::{Value, json};

use super::processes::{self, binary, model_copy, register, spec};
use super::protocol::claim;
use super::server::{Answer, Server, job};

const TOKEN: &str = "the-token-of-a-worker-elsewhere";

/// A proxy between worker and server: claims contain paths that do not exist, and the first transfer of the weights is interrupted.
#[derive(Clone)]
struct OtherMachine {
    http: reqwest::Client,
    server: String,
    cuts: Arc<Mutex<u32>>,
    /// Paths and ranges of the requests for model files.
    asked: Arc<Mutex<Vec<String>>>,
}

async fn forward(State(machine): State<OtherMachine>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut headers = parts.headers;
    headers.remove("host");
    if path.contains("/models/") {
        let range = headers.get("range").map_or("", |range| range.to_str().unwrap());
        let file = parts.uri.path().rsplit('/').next().unwrap();
        machine.asked.lock().unwrap().push(format!("{file} {range}").trim().to_owned());
    }
    let request = machine.http.request(parts.method, format!("{}{path}", machine.server)).headers(headers);
    let body = to_bytes(body, usize::MAX).await.unwrap();
    let answer = request.body(body).send().await.unwrap();
    let mut response = Response::builder().status(answer.status());
    *response.headers_mut().unwrap() = answer.headers().clone();
    if path.ends_with("/claim") && answer.status() == 200 {
        let mut claim: Value = answer.json().await.unwrap();
        claim["model_path"] = json!("/no/such/folder/here");
        for (_, path) in claim["reward_models"].as_object_mut().unwrap() {
            *path = json!("/nor/this/one");
        }
        response.headers_mut().unwrap().remove("content-length");
        return response.body(Body::from(claim.to_string())).unwrap();
    }
    let mut left = machine.cuts.lock().unwrap();
    if path.contains("/model.safetensors") && *left > 0 {
        *left -= 1;
        let half = answer.content_length().unwrap() / 2;
        let mut sent = 0;
        let pieces = futures::StreamExt::map(answer.bytes_stream(), move |piece| {
            let piece = piece.unwrap();
            sent += piece.len() as u64;
            if sent > half { Err(std::io::Error::other("the line is cut")) } else { Ok(piece) }
        });
        return response.body(Body::from_stream(pieces)).unwrap();
    }
    drop(left);
    response.body(Body::from_stream(answer.bytes_stream())).unwrap()
}

/// A worker process; killed when dropped.
struct Worker(Child);

impl Worker {
    fn start(server: &str, cache: &Path) -> Self {
        let mut command = Command::new(binary());
        command.args(["worker", "--server", server, "--device", "cpu", "--cache-dir"]).arg(cache);
        command.env("RLOOD_WORKER_TOKEN", TOKEN).env("NO_PROXY", "127.0.0.1").stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_paths_differ_trains_the_same_adapter_from_a_fetched_copy() {
    let dir = tempfile::tempdir().unwrap();
    let server = processes::Server::start_in(&dir.path().join("data"), "none", &[("RLOOD_WORKER_TOKEN", TOKEN)]);
    let model = model_copy(&dir.path().join("model"));
    register(&server, "org/tiny", &model).await;
    let judge = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reward_models/qwen3");
    register(&server, "org/judge", &judge).await;
    let mut spec = spec("org/tiny", 2);
    spec["rewards"] = json!([{"type": "reward_model", "model": "org/judge"}]);
    let run = async || {
        let id = server.submit(&spec).await;
        let wait = server.client.wait_for_job(id.parse().unwrap());
        let over = tokio::time::timeout(Duration::from_secs(300), wait).await.unwrap().unwrap();
        assert_eq!((over.state, over.attempt), (JobState::Succeeded, 1), "{over:?}");
        id
    };
    let (here, elsewhere) = (dir.path().join("cache-here"), dir.path().join("cache-elsewhere"));
    let in_place = {
        let _worker = Worker::start(&server.url, &here);
        run().await
    };
    assert!(!here.exists(), "it reads the server's files");

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = format!("http://{}", listener.local_addr().unwrap());
    let machine = OtherMachine {
        http: reqwest::Client::builder().no_proxy().build().unwrap(),
        server: server.url.clone(),
        cuts: Arc::new(Mutex::new(1)),
        asked: Arc::default(),
    };
    let asked = machine.asked.clone();
    let app = Router::new().fallback(forward).with_state(machine);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let fetched = {
        let _worker = Worker::start(&proxy, &elsewhere);
        let fetched = run().await;
        // The second job uses the files that the first one downloaded.
        let before = asked.lock().unwrap().len();
        run().await;
        assert_eq!(asked.lock().unwrap().len(), before);
        fetched
    };
    assert!(server.adapter(&in_place, None).await == server.adapter(&fetched, None).await, "the adapters differ");
    let asked = asked.lock().unwrap().clone();
    let weights: Vec<&String> = asked.iter().filter(|call| call.starts_with("model.safetensors")).collect();
    assert_eq!(weights.len(), 3, "a cut one, its rest, the judge's: {asked:?}");
    assert!(weights[1].contains("bytes=") && !weights[1].contains("bytes=0-"), "{asked:?}");
    let logs = server.get(&format!("/jobs/{fetched}/logs")).await.to_string();
    assert!(
        logs.contains("downloading the model 'org/tiny'") && logs.contains("downloaded the model 'org/judge'"),
        "{logs}"
    );
    let entries = ModelCache::open(&elsewhere, None).unwrap().entries().unwrap();
    let names: Vec<(&str, bool)> = entries.iter().map(|entry| (entry.name.as_str(), entry.is_whole)).collect();
    assert_eq!(names.len(), 2, "{entries:?}");
    assert!(names.contains(&("org/tiny", true)) && names.contains(&("org/judge", true)), "{entries:?}");
}

async fn get(server: &Server, path: &str, range: Option<&str>) -> Answer {
    let token = &server.state.config.worker_token;
    let request = axum::http::Request::get(path).header("authorization", format!("Bearer {token}"));
    let request = if let Some(range) = range { request.header("range", range) } else { request };
    server.send(request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn the_worker_of_a_job_gets_its_models_files_from_any_byte_on_and_nobody_elses() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let claim = claim(&server).await;
    let attempt = claim["attempt"].as_u64().unwrap();
    let path = |model: &str, rest: &str| format!("/worker/jobs/{id}/models/{model}{rest}?attempt={attempt}");
    let listed = get(&server, &path("chat", ""), None).await;
    assert_eq!(listed.status, 200, "{}", listed.text);
    let files: Vec<rlood::protocol::FileEntry> = serde_json::from_value(listed.body["files"].clone()).unwrap();
    assert_eq!(modelcard::fingerprint_entries(&files), claim["plan"]["model"]["sha256"].as_str().unwrap());
    let dir = Path::new(claim["model_path"].as_str().unwrap()).to_owned();
    let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let whole = get(&server, &path("chat", "/config.json"), None).await;
    assert_eq!((whole.status, whole.text.as_str()), (StatusCode::OK, config.as_str()));
    let rest = get(&server, &path("chat", "/config.json"), Some("bytes=10-")).await;
    assert_eq!((rest.status, rest.text.as_str()), (StatusCode::PARTIAL_CONTENT, &config[10..]));
    assert_eq!(rest.headers["content-range"], format!("bytes 10-{}/{}", config.len() - 1, config.len()));
    for (path, status) in [
        (path("plain", ""), 404),
        (path("chat", "/README.md"), 404),
        (path("chat", "/..%2Fconfig.json"), 404),
        (format!("/worker/jobs/{id}/models/chat?attempt={}", attempt + 1), 409),
    ] {
        let refused = get(&server, &path, None).await;
        assert_eq!(refused.status, status, "{path}: {}", refused.text);
    }
    let without_token = server.get(&path("chat", "")).await;
    assert_eq!(without_token.status, 401);
}

#[tokio::test]
async fn each_file_of_a_model_is_hashed_once_until_it_changes() {
    let server = Server::start().await;
    let dir = server.dir.path().join("plain");
    let id = server.create(super::server::with(job(), "model", json!("plain"))).await;
    let attempt = claim(&server).await["attempt"].as_u64().unwrap();
    let path = format!("/worker/jobs/{id}/models/plain?attempt={attempt}");
    let first = get(&server, &path, None).await;
    assert_eq!(first.status, 200, "{}", first.text);
    // Size and time are unchanged, so the bytes are not read again.
    let file = dir.join("generation_config.json");
    let (text, modified) = (std::fs::read(&file).unwrap(), std::fs::metadata(&file).unwrap().modified().unwrap());
    let mut changed = text.clone();
    let at = changed.iter().position(|byte| *byte == b'\n').unwrap();
    changed[at] = b' ';
    std::fs::write(&file, &changed).unwrap();
    let set_modified = |time| std::fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
    set_modified(modified);
    assert_eq!(get(&server, &path, None).await.body, first.body);
    set_modified(modified + Duration::from_secs(1));
    assert_ne!(get(&server, &path, None).await.body, first.body);
}
