//! Canary values in every secret field of a real server, and services that echo everything: afterwards no canary occurs in any API
//! response, any page, the logs, a process's command line, or a file of a checkpoint.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::http::Response;
use base64::Engine;
use serde_json::{Value, json};

use super::processes::{model_copy, spec};

/// The canary values and their encoded forms.
fn canaries() -> Vec<(&'static str, String)> {
    let whsec = base64::engine::general_purpose::STANDARD.encode(b"canary-signing-secret-0123456789");
    vec![
        ("the API key", "rld_canary-api-key-0123456789".to_owned()),
        ("the worker token", "canary-worker-token-0123456789".to_owned()),
        ("the signing secret, encoded", whsec),
        ("the signing secret", "canary-signing-secret".to_owned()),
        ("a reward's header", "canary-header-value".to_owned()),
        ("a judge's key", "sk-canary-judge-key".to_owned()),
        ("a header that is escaped", "canary-escaped".to_owned()),
        ("a short header", "CANARY7".to_owned()),
        ("a refused secret", "canary-not-a-secret".to_owned()),
        ("a mistyped field", "canary-in-a-wrong-field".to_owned()),
        ("a stranger's key", "canary-wrong-key".to_owned()),
    ]
}

/// Echoes everything that was sent: headers in errors, in reasons, and in response headers.
async fn repeat(request: Request) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let bytes = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let said = format!("{:?}", parts.headers).replace("Sensitive", "");
    let said = parts.headers.values().fold(said, |said, value| said + " " + &String::from_utf8_lossy(value.as_bytes()));
    // The encodings of PHP, Go, URLs, forms, HTML, and JSON inside JSON.
    let escaped = parts.headers.get("x-escaped").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let said = [("/", "\\/"), ("&", "\\u0026"), ("/", "%2F"), ("&", "%26"), ("&", "&amp;"), ("/", "\\\\\\/")]
        .iter()
        .fold(said, |said, (plain, written)| said + " " + &escaped.replace(plain, written));
    let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    let status = match parts.uri.path() {
        "/angry" => 401,
        "/busy" => 503,
        _ => 200,
    };
    let result = |sample: &Value| json!({"sample_id": sample["sample_id"], "reward": 0.5, "reason": said, "metrics": {"length": 3.0}});
    let results: Vec<Value> = body["samples"].as_array().into_iter().flatten().map(result).collect();
    let text = match status {
        200 => json!({"version": "1", "id": body["id"], "results": results}).to_string(),
        _ => said.clone(),
    };
    Response::builder().status(status).header("x-echo", said.replace(['\n', '\r'], " ")).body(Body::from(text)).unwrap()
}

async fn parrot() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = axum::Router::new().fallback(repeat);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    url
}

struct Watched {
    child: Child,
    url: String,
    key: String,
    log: PathBuf,
    http: reqwest::Client,
    /// All responses, with their source.
    answers: Vec<(String, Vec<u8>)>,
}

impl Watched {
    fn start(dir: &Path, key: &str, token: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let log = dir.join("log");
        let mut child = Command::new(env!("CARGO_BIN_EXE_rlood"))
            .args(["serve", "--listen", "127.0.0.1:0", "--log", "debug", "--log-format", "json", "--devices", "cpu"])
            .args(["--allow-outgoing", "loopback", "--model-root"])
            .arg(dir)
            .arg("--data-dir")
            .arg(dir.join("data"))
            .envs([("RLOOD_API_KEY", key), ("RLOOD_WORKER_TOKEN", token)])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.strip_prefix("listening on ").unwrap().trim().to_owned();
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        Self { child, url, key: key.to_owned(), log, http, answers: Vec::new() }
    }

    /// Sends a request and stores the whole response.
    async fn ask(&mut self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let method: reqwest::Method = method.parse().unwrap();
        let mut request = self.http.request(method.clone(), format!("{}{path}", self.url)).bearer_auth(&self.key);
        if let Some(body) = body {
            request = request.json(body);
        }
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        let headers = format!("{:?}", answer.headers());
        let bytes = answer.bytes().await.unwrap().to_vec();
        let value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        self.answers.push((format!("{method} {path}: {status}"), [headers.into_bytes(), bytes].concat()));
        (status, value)
    }

    async fn wait(&mut self, job: &str, state: &str) {
        let begun = Instant::now();
        loop {
            let (_, view) = self.ask("GET", &format!("/jobs/{job}"), None).await;
            if view["state"] == state {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(180), "waited for {state}: {view}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns every GET route of the document with these ids.
fn routes(document: &Value, ids: &[(&str, Vec<String>)]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        if methods.get("get").is_none() {
            continue;
        }
        let mut open = vec![path.clone()];
        for (prefix, values) in ids {
            // `/jobs/{id}` takes job ids, `/datasets/{id}` dataset ids.
            if let Some(rest) = path.strip_prefix(prefix).filter(|rest| rest.starts_with("/{id}")) {
                open = values.iter().map(|id| format!("{prefix}/{id}{}", &rest["/{id}".len()..])).collect();
            }
        }
        found.extend(
            open.into_iter()
                .map(|path| path.replace("{name}", "adapter_config.json"))
                .filter(|path| !path.contains('{')),
        );
    }
    found
}

fn files_below(dir: PathBuf) -> Vec<PathBuf> {
    let (mut dirs, mut files) = (vec![dir], Vec::new());
    while let Some(dir) = dirs.pop() {
        let paths = std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
        let (inner, found): (Vec<PathBuf>, Vec<PathBuf>) = paths.partition(|path| path.is_dir());
        dirs.extend(inner);
        files.extend(found);
    }
    files
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::too_many_lines, reason = "one server sees every secret, and all that it said is searched at the end")]
async fn no_secret_is_seen_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let canaries = canaries();
    let of = |name: &str| canaries.iter().find(|(known, _)| *known == name).unwrap().1.clone();
    let url = parrot().await;
    let mut server = Watched::start(dir.path(), &of("the API key"), &of("the worker token"));
    let model = model_copy(&dir.path().join("model"));
    assert_eq!(server.ask("POST", "/models", Some(&json!({"id": "tiny", "source": model}))).await.0, 201);

    let secret = format!("whsec_{}", of("the signing secret, encoded"));
    let webhook = |name: &str, path: &str| {
        json!({"name": name, "type": "webhook", "url": format!("{url}{path}"), "secret": secret, "max_outage_s": 1,
               "headers": {"x-canary": of("a reward's header"), "authorization": format!("Bearer {}", of("a judge's key")),
                           "x-escaped": format!("{}/cd&ef=gh/ij", of("a header that is escaped")),
                           "x-short": of("a short header")}})
    };
    let judge = json!({"name": "judge", "type": "openai_judge", "url": format!("{url}/v1/chat/completions"), "model": "m",
                       "rubric": "Is it good?", "weight": 0.0, "required": false, "max_outage_s": 1,
                       "headers": {"authorization": format!("Bearer {}", of("a judge's key"))}});
    let job = |rewards: Value| {
        let mut spec = spec("tiny", 2);
        spec["rewards"] = rewards;
        spec
    };
    // A run that succeeds, one whose service rejects requests, one whose service is busy.
    let good = job(json!([webhook("good", "/good"), {"type": "length"}]));
    let angry = job(json!([webhook("angry", "/angry"), judge]));
    let busy = job(json!([webhook("busy", "/busy")]));
    let mut jobs = Vec::new();
    for (spec, end) in [(&good, "succeeded"), (&angry, "paused"), (&busy, "paused")] {
        let (status, view) = server.ask("POST", "/jobs", Some(spec)).await;
        assert_eq!(status, 201, "{view}");
        let id = view["id"].as_str().unwrap().to_owned();
        server.wait(&id, end).await;
        jobs.push(id);
    }
    let first = jobs[0].clone();
    for (path, body) in [
        (format!("/jobs/{first}/retry"), json!({})),
        (format!("/jobs/{first}/fork"), json!({"from_step": 2, "overrides": {"training": {"max_steps": 4}}})),
        ("/jobs/validate".to_owned(), good.clone()),
        ("/jobs/validate?probe=true".to_owned(), good.clone()),
    ] {
        let (_, view) = server.ask("POST", &path, Some(&body)).await;
        jobs.extend(view["id"].as_str().map(str::to_owned));
    }
    let sample = json!([{"prompt": "a", "completion": "b"}]);
    for path in ["/good", "/angry", "/busy"] {
        let body = json!({"reward": webhook("tested", path), "samples": sample});
        assert_eq!(server.ask("POST", "/rewards/test", Some(&body)).await.0, 200);
    }
    // Refused values are not repeated in errors either.
    for (pointer, value) in [
        ("secret", json!(of("a refused secret"))),
        ("secret", json!([of("a refused secret")])),
        ("headers", json!({"x-bad\n": of("a refused secret")})),
        ("headers", json!({"x-bad": format!("{}\n", of("a refused secret"))})),
        ("headers", json!(of("a refused secret"))),
        ("secrett", json!(of("a mistyped field"))),
    ] {
        let mut reward = webhook("refused", "/good");
        reward[pointer] = value;
        let (status, view) = server.ask("POST", "/jobs", Some(&job(json!([reward.clone()])))).await;
        assert_eq!(status, 422, "{view}");
        server.ask("POST", "/jobs/validate", Some(&job(json!([reward.clone()])))).await;
        server.ask("POST", "/rewards/test", Some(&json!({"reward": reward, "samples": sample}))).await;
    }
    let wrong =
        server.http.get(format!("{}/jobs", server.url)).bearer_auth(of("a stranger's key")).send().await.unwrap();
    assert_eq!(wrong.status(), 401);
    let text = wrong.bytes().await.unwrap().to_vec();
    server.answers.push(("a stranger".to_owned(), text));

    let (_, document) = server.ask("GET", "/openapi.json", None).await;
    let (_, datasets) = server.ask("GET", "/datasets", None).await;
    let list = |page: &Value| -> Vec<String> {
        page["data"].as_array().into_iter().flatten().filter_map(|row| row["id"].as_str().map(str::to_owned)).collect()
    };
    let (_, checkpoints) = server.ask("GET", &format!("/jobs/{first}/checkpoints"), None).await;
    let ids = [
        ("/jobs", jobs.clone()),
        ("/datasets", list(&datasets)),
        ("/checkpoints", list(&checkpoints)),
        ("/models", vec!["tiny".to_owned()]),
    ];
    let mut paths = routes(&document, &ids);
    paths.extend(
        jobs.iter().flat_map(|id| ["json", "yaml", "toml"].map(|form| format!("/jobs/{id}/config?format={form}"))),
    );
    paths.extend(["/", "/docs", "/metrics", "/workers"].map(str::to_owned));
    paths.insert(format!("/jobs/compare?ids={},{}", jobs[0], jobs[1]));
    for path in &paths {
        // Only finished jobs are listed here, so every event stream ends.
        server.ask("GET", path, None).await;
    }
    assert!(paths.len() > 40, "{paths:?}");

    let mut seen = Vec::new();
    let mut look = |place: &str, bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        for (name, canary) in &canaries {
            if let Some(at) = text.find(canary.as_str()) {
                let from = text.floor_char_boundary(at.saturating_sub(80));
                let to = text.floor_char_boundary((at + 60).min(text.len()));
                seen.push(format!("{name} in {place}: …{}…", &text[from..to]));
            }
        }
    };
    for (place, bytes) in &server.answers {
        look(place, bytes);
    }
    look("the log", &std::fs::read(&server.log).unwrap());
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        // A process may exit before its command line is read.
        if let Ok(line) = std::fs::read(process.path().join("cmdline"))
            && String::from_utf8_lossy(&line).contains("rlood")
        {
            look("a command line", &line);
        }
    }
    let mut files = 0;
    for folder in ["data/checkpoints", "data/datasets"] {
        for file in files_below(dir.path().join(folder)) {
            files += 1;
            look("a file of a checkpoint or dataset", &std::fs::read(file).unwrap());
        }
    }
    assert!(files > 3, "{files} files");
    assert!(
        seen.is_empty(),
        "{} of {} answers and {files} files:\n{}",
        seen.len(),
        server.answers.len(),
        seen.join("\n")
    );
    println!("{} answers, {} paths, {files} files, the log: no canary", server.answers.len(), paths.len());
}
