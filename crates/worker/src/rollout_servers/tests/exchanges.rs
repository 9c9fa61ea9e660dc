//! Exchanges with a real vLLM server. Without further settings they are replayed from `tests/fixtures/vllm`. With `RLOOD_VLLM_URL`
//! the requests go to that server, and with `RLOOD_VLLM_RECORD` what it answers is written to the fixtures.
//!
//! `tests/vllm/run.sh` starts the servers: which one a test needs is the name of its [`Kind`], in `RLOOD_VLLM_KIND`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Which server a test needs, by its flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A server that was started with `--logprobs-mode processed_logprobs`.
    Processed,
    /// A server with the default, `raw_logprobs`.
    Raw,
    /// A server with `--api-key secret --max-num-queued-reqs 2 --max-num-seqs 1`.
    Guarded,
    /// A server like `Processed`, which the test ends.
    Mortal,
}

/// One request and its answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Exchange {
    method: String,
    path: String,
    body: Value,
    status: u16,
    answer: String,
}

/// The exchanges of one test, in a file of their own.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Recording {
    /// Version that the server reported.
    vllm: String,
    exchanges: Vec<Exchange>,
}

struct Proxy {
    dir: PathBuf,
    file: PathBuf,
    /// The real server; `None` = replay.
    upstream: Option<String>,
    is_recording: bool,
    recording: Mutex<Recording>,
    left: Mutex<Vec<Exchange>>,
}

/// A server for one test.
pub(super) struct Server {
    /// Address for the client under test.
    pub url: String,
    /// Directory of the test's adapters.
    pub dir: tempfile::TempDir,
    proxy: Arc<Proxy>,
}

/// Starts the server of a test: replayed, or in front of the real one. `None` = this real server is of another kind.
pub(super) async fn server(test: &str, kind: Kind) -> Option<Server> {
    let upstream = std::env::var("RLOOD_VLLM_URL").ok();
    if upstream.is_some()
        && std::env::var("RLOOD_VLLM_KIND").ok().as_deref() != Some(&format!("{kind:?}").to_lowercase())
    {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = rlood_test_support::fixture("vllm").join(format!("{test}.json"));
    let left = match upstream {
        Some(_) => Vec::new(),
        None => serde_json::from_slice::<Recording>(&std::fs::read(&file).unwrap()).unwrap().exchanges,
    };
    let is_recording = std::env::var_os("RLOOD_VLLM_RECORD").is_some();
    let dir_path = dir.path().to_owned();
    let proxy =
        Proxy { dir: dir_path, file, upstream, is_recording, recording: Mutex::default(), left: Mutex::new(left) };
    let proxy = Arc::new(proxy);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().fallback(answer).with_state(proxy.clone());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    Some(Server { url, dir, proxy })
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.proxy.is_recording && !std::thread::panicking() {
            let recording = self.proxy.recording.lock().unwrap();
            let lines: Vec<String> =
                recording.exchanges.iter().map(|exchange| serde_json::to_string(exchange).unwrap()).collect();
            let text = format!("{{\"vllm\":{},\"exchanges\":[\n{}\n]}}\n", json!(recording.vllm), lines.join(",\n"));
            std::fs::create_dir_all(self.proxy.file.parent().unwrap()).unwrap();
            std::fs::write(&self.proxy.file, text).unwrap();
        }
    }
}

async fn answer(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, 1 << 24).await.unwrap();
    let json: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    if parts.uri.path() == "/v1/load_lora_adapter" {
        assert_eq!(json["load_inplace"], json!(false), "it would be read again in every engine step");
    }
    let key = parts.headers.get("authorization").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let asked = proxy.portable(&json!({"authorization": key, "body": json}).to_string());
    let asked: Value = serde_json::from_str(&asked).unwrap();
    let (method, path) = (parts.method.to_string(), parts.uri.path().to_owned());
    match &proxy.upstream {
        Some(upstream) => proxy.pass_on(upstream, method, path, asked, key, body).await,
        None => proxy.replay(&method, &path, &asked),
    }
}

impl Proxy {
    /// Replaces paths of this machine by names.
    fn portable(&self, text: &str) -> String {
        let model = rlood_test_support::fixture("parity/qwen3").canonicalize().unwrap().display().to_string();
        text.replace(&self.dir.display().to_string(), "{dir}").replace(&model, "{model}")
    }

    fn replay(&self, method: &str, path: &str, asked: &Value) -> Response {
        let mut left = self.left.lock().unwrap();
        let is_it = |exchange: &Exchange| exchange.method == method && exchange.path == path && exchange.body == *asked;
        let Some(index) = left.iter().position(is_it) else {
            panic!("{method} {path} {asked} is not among the recorded exchanges of {}", self.file.display());
        };
        let Exchange { status, answer, .. } = left.remove(index);
        if status == 0 {
            // The server was gone. A connection cannot be refused here, so an answer of a proxy stands for it.
            return (StatusCode::BAD_GATEWAY, "no connection to the server").into_response();
        }
        let answer = answer.replace("{dir}", &self.dir.display().to_string());
        (StatusCode::from_u16(status).unwrap(), answer).into_response()
    }

    async fn pass_on(
        &self,
        upstream: &str,
        method: String,
        path: String,
        asked: Value,
        key: Option<String>,
        body: Bytes,
    ) -> Response {
        let client = crate::reward::http_client::client_builder().build().unwrap();
        let mut request = client.request(method.parse().unwrap(), format!("{upstream}{path}"));
        if let Some(key) = key {
            request = request.header("authorization", key);
        }
        if !body.is_empty() {
            request = request.header("content-type", "application/json").body(body.to_vec());
        }
        let (status, answer) = match request.send().await {
            Ok(response) => (response.status().as_u16(), response.text().await.unwrap_or_default()),
            Err(_) => (0, String::new()),
        };
        let mut recording = self.recording.lock().unwrap();
        if let Some(version) =
            serde_json::from_str::<Value>(&answer).ok().and_then(|value| Some(value["version"].as_str()?.to_owned()))
        {
            recording.vllm = version;
        }
        recording.exchanges.push(Exchange { method, path, body: asked, status, answer: self.portable(&answer) });
        match StatusCode::from_u16(status) {
            Ok(status) => (status, answer).into_response(),
            Err(_) => (StatusCode::BAD_GATEWAY, "no connection to the server").into_response(),
        }
    }
}
