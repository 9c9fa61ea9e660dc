//! Real processes: `rlood serve` with its workers, driven over HTTP like a user would.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rlood_client::{Client, Which};
use serde_json::{Value, json};

/// Maximum time for a cancel or a pause to take effect, in every phase.
const HONOURED: Duration = Duration::from_secs(12);
/// Maximum time for everything else on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// A server process; it and its workers are killed when dropped.
pub struct Server {
    pub child: Child,
    pub url: String,
    pub client: Client,
    pub http: reqwest::Client,
}

impl Server {
    /// Starts on a free port; returns when the server prints its address.
    pub fn start(data_dir: &Path, devices: &str) -> Self {
        Self::start_with(data_dir, devices, &[])
    }

    /// Starts a server with additional flags.
    pub fn start_with(data_dir: &Path, devices: &str, flags: &[&str]) -> Self {
        Self::start_by(command(data_dir, devices).args(flags))
    }

    /// Starts a server with these environment variables.
    pub fn start_in(data_dir: &Path, devices: &str, variables: &[(&str, &str)]) -> Self {
        Self::start_by(command(data_dir, devices).envs(variables.iter().copied()))
    }

    /// Starts a server with this command.
    pub fn start_by(command: &mut Command) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url =
            line.strip_prefix("listening on ").unwrap_or_else(|| panic!("first line: {line:?}")).trim().to_owned();
        let client = Client::builder(&url).no_proxy().build().unwrap();
        Self { child, url, client, http: reqwest::Client::builder().no_proxy().build().unwrap() }
    }

    #[cfg(feature = "failpoints")]
    /// Returns the job if the server answers.
    pub async fn try_job(&self, job: &str) -> Option<Value> {
        let answer = self.http.get(format!("{}/jobs/{job}", self.url)).send().await.ok()?;
        if answer.status().is_success() { answer.json().await.ok() } else { None }
    }

    pub async fn get(&self, path: &str) -> Value {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.text().await.unwrap());
        answer.json().await.unwrap()
    }

    pub async fn bytes(&self, path: &str) -> Vec<u8> {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.text().await.unwrap());
        answer.bytes().await.unwrap().to_vec()
    }

    /// Downloads and verifies a job's adapter as a tar.
    pub async fn adapter(&self, job: &str, which: Option<Which>) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("adapter.tar");
        self.client.download_adapter(job.parse().unwrap(), which, &to).await.unwrap();
        std::fs::read(to).unwrap()
    }

    pub async fn post(&self, path: &str, body: &Value) -> Value {
        let answer = self.http.post(format!("{}{path}", self.url)).json(body).send().await.unwrap();
        let status = answer.status();
        let text = answer.text().await.unwrap();
        assert!(status.is_success(), "{path}: {status} {text}");
        serde_json::from_str(&text).unwrap_or(Value::Null)
    }

    /// Registers a model and submits a job; returns its id.
    pub async fn submit(&self, spec: &Value) -> String {
        self.post("/jobs", spec).await["id"].as_str().unwrap().to_owned()
    }

    /// Returns the job as soon as it satisfies the condition.
    pub async fn job_when(&self, job: &str, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let view = self.get(&format!("/jobs/{job}")).await;
            if condition(&view) {
                return view;
            }
            assert!(begun.elapsed() < PATIENCE, "waited for {what}: {view}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn job_in_state(&self, job: &str, state: &str) -> Value {
        let over = |view: &Value| ["succeeded", "failed", "cancelled"].iter().any(|end| view["state"] == *end);
        let view = self.job_when(job, state, |view| view["state"] == state || over(view)).await;
        assert_eq!(view["state"], state, "{view}");
        view
    }

    /// Returns the steps of the job's checkpoints, ascending.
    pub async fn checkpoint_steps(&self, job: &str) -> Vec<u64> {
        let list = self.get(&format!("/jobs/{job}/checkpoints")).await;
        let mut steps: Vec<u64> =
            list["data"].as_array().unwrap().iter().map(|checkpoint| checkpoint["step"].as_u64().unwrap()).collect();
        steps.sort_unstable();
        steps
    }

    pub async fn wait_for_checkpoint(&self, job: &str) {
        let begun = Instant::now();
        while self.checkpoint_steps(job).await.is_empty() {
            assert!(begun.elapsed() < PATIENCE, "no checkpoint: {}", self.get(&format!("/jobs/{job}")).await);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Returns the process ids of the workers, as soon as there are this many.
    pub async fn worker_pids(&self, count: usize) -> Vec<u32> {
        let begun = Instant::now();
        loop {
            let list = self.get("/workers").await;
            let workers = list["data"].as_array().unwrap();
            if workers.len() == count {
                return workers.iter().map(|worker| worker["pid"].as_u64().unwrap().try_into().unwrap()).collect();
            }
            assert!(begun.elapsed() < PATIENCE, "{list}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Sends SIGTERM; returns the exit status and how long the shutdown took.
    pub fn terminate(mut self) -> (ExitStatus, Duration) {
        let begun = Instant::now();
        signal("TERM", self.child.id());
        (self.child.wait().unwrap(), begun.elapsed())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The binary under test, or that of `RLOOD_BINARY`: performance figures need a release build.
pub fn binary() -> PathBuf {
    std::env::var_os("RLOOD_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_rlood").into(), PathBuf::from)
}

/// `rlood serve` on a free port, with no other settings.
pub fn command(data_dir: &Path, devices: &str) -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RLOOD_")) {
        command.env_remove(name);
    }
    // Tests do not contact a hub unless they configure one.
    command.env_remove("HF_TOKEN").env("HF_HUB_OFFLINE", "1").env("HF_HOME", data_dir.join("no-cache"));
    command.args(["serve", "--log", "error", "--devices", devices, "--data-dir"]);
    command.arg(data_dir).env("RLOOD_LISTEN", "127.0.0.1:0").stdin(Stdio::null());
    // Tests count processes and requests; tests of verdicts enable them explicitly.
    command.env("RLOOD_AUTO_VERDICT", "false");
    command
}

pub fn signal(name: &str, pid: u32) {
    // Uses the shell's built-in `kill`, because the program is not installed everywhere.
    assert!(Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap().success());
}

/// True while a process exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Copies a small model, and returns where the copy is.
pub fn model_copy(to: &Path) -> PathBuf {
    copy_of("parity/qwen3", to)
}

/// Copies the model in this folder of `tests/fixtures`, and returns where the copy is.
pub fn copy_of(fixture: &str, to: &Path) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    std::fs::create_dir_all(to).unwrap();
    for name in
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    to.to_owned()
}

/// A job with this many steps that saves every second one.
pub fn spec(model: &str, max_steps: u64) -> Value {
    let records: Vec<Value> =
        (0..6).map(|n| json!({"prompt": format!("Say the number {n} in a few words.")})).collect();
    json!({
        "model": model,
        "dataset": {"records": records},
        "rewards": [{"type": "length", "min_words": 1, "max_words": 3}],
        "rloo": {"num_generations": 2, "beta": 0.02},
        "sampling": {"max_completion_length": 6},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_step": 2, "max_steps": max_steps, "seed": 7},
        "checkpoints": {"every_steps": 2}
    })
}

/// Registers the model of a directory under this name.
pub async fn register(server: &Server, id: &str, dir: &Path) {
    server.post("/models", &json!({"id": id, "source": dir})).await;
}

#[tokio::test]
async fn two_cpu_workers_run_two_jobs_at_once_and_a_cancel_is_honoured_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu,cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let pids = server.worker_pids(2).await;
    assert_ne!(pids[0], pids[1]);
    let (first, second) = (server.submit(&spec("tiny", 100_000)).await, server.submit(&spec("tiny", 100_000)).await);
    // Each job completed a step while the other was running.
    for job in [&first, &second] {
        server.job_when(job, "a step", |view| view["state"] == "running" && view["step"].as_u64() > Some(0)).await;
    }
    for job in [&first, &second] {
        let view = server.get(&format!("/jobs/{job}")).await;
        assert_eq!(view["state"], "running", "{view}");
        assert!(view["phase"].is_string(), "{view}");
    }
    let begun = Instant::now();
    for job in [&first, &second] {
        server.post(&format!("/jobs/{job}/cancel"), &json!({})).await;
    }
    for job in [&first, &second] {
        server.job_in_state(job, "cancelled").await;
    }
    assert!(begun.elapsed() < HONOURED, "{:?}", begun.elapsed());
    assert_eq!(server.worker_pids(2).await.len(), 2);
}

#[tokio::test]
async fn pause_and_cancel_are_honoured_while_a_reward_service_hangs() {
    let dir = tempfile::tempdir().unwrap();
    // The system accepts connections, but no server answers them.
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut spec = spec("tiny", 10);
    spec["rewards"] = json!([{"name": "slow", "type": "webhook",
                              "url": format!("http://{}/score", hanging.local_addr().unwrap())}]);
    let job = server.submit(&spec).await;
    for (wish, state) in [("pause", "paused"), ("cancel", "cancelled")] {
        server.job_when(&job, "the reward phase", |view| view["state"] == "running" && view["phase"] == "reward").await;
        let begun = Instant::now();
        server.post(&format!("/jobs/{job}/{wish}"), &json!({})).await;
        server.job_in_state(&job, state).await;
        assert!(begun.elapsed() < HONOURED, "{wish}: {:?}", begun.elapsed());
        if state == "paused" {
            server.post(&format!("/jobs/{job}/resume"), &json!({})).await;
        }
    }
}

#[tokio::test]
async fn a_job_that_pauses_over_its_reward_service_says_in_its_events_what_the_service_did() {
    let dir = tempfile::tempdir().unwrap();
    let app = axum::Router::new().fallback(|| async { (axum::http::StatusCode::UNAUTHORIZED, "wrong signature") });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut spec = spec("tiny", 10);
    spec["rewards"] = json!([{"name": "picky", "type": "webhook", "url": url}]);
    let job = server.submit(&spec).await;
    let paused = server.job_in_state(&job, "paused").await;
    assert_eq!(paused["status_reason"], "reward_invalid");
    let events = server.get(&format!("/jobs/{job}/events")).await;
    let events = events["data"].as_array().unwrap();
    let warning = events.iter().find(|event| event["type"] == "warning").unwrap_or_else(|| panic!("{events:?}"));
    assert_eq!(warning["data"]["code"], "reward_invalid");
    let message = warning["data"]["message"].as_str().unwrap();
    assert!(message.contains("picky") && message.contains("401") && message.contains("wrong signature"), "{message}");
    assert!(warning["data"]["data"]["suggestion"].as_str().unwrap().contains("/rewards/test"), "{warning}");
}

#[tokio::test]
async fn a_changed_model_fails_its_job_and_the_worker_lives_on() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    let pids = server.worker_pids(1).await;
    register(&server, "good", &model_copy(&dir.path().join("good"))).await;
    let changing = model_copy(&dir.path().join("changing"));
    register(&server, "changing", &changing).await;
    // The second job waits in the queue while its model is replaced.
    let first = server.submit(&spec("good", 100_000)).await;
    server.job_when(&first, "running", |view| view["state"] == "running").await;
    let second = server.submit(&spec("changing", 2)).await;
    let config = std::fs::read_to_string(changing.join("config.json")).unwrap();
    std::fs::write(changing.join("config.json"), format!("{config}\n")).unwrap();
    server.post(&format!("/jobs/{first}/cancel"), &json!({})).await;
    let failed = server.job_in_state(&second, "failed").await;
    assert_eq!(failed["failure"]["code"], "model_changed", "{failed}");
    assert_eq!(failed["failure"]["class"], "user");
    assert_eq!(failed["attempt"], 1);
    let third = server.submit(&spec("good", 2)).await;
    server.job_in_state(&third, "succeeded").await;
    assert_eq!(server.worker_pids(1).await, pids, "the worker is the same process");
}

#[tokio::test]
async fn workers_end_when_their_server_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(&dir.path().join("data"), "cpu,cpu");
    let pids = server.worker_pids(2).await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let begun = Instant::now();
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(begun.elapsed() < Duration::from_secs(10), "a worker outlives its server");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn an_idle_server_stops_at_once_with_code_zero() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    server.worker_pids(1).await;
    let (status, took) = server.terminate();
    assert!(status.success(), "{status}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn a_server_that_stops_answers_what_waits_and_what_still_arrives() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(&dir.path().join("data"), "none");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let job = server.submit(&spec("tiny", 2)).await;
    let waiting = server.http.get(format!("{}/jobs/{job}?wait=3600", server.url)).send();
    let waiting = tokio::spawn(async move { waiting.await.unwrap().json::<Value>().await.unwrap() });
    let address = server.url.strip_prefix("http://").unwrap();
    let mut unasked = tokio::net::TcpStream::connect(address).await.unwrap();
    unasked.write_all(b"GET /jobs HTTP/1.1\r\nhost: local").await.unwrap();
    let mut upload = tokio::net::TcpStream::connect(address).await.unwrap();
    let row = "{\"prompt\":\"a\"}\n";
    let head = format!("content-type: application/x-ndjson\r\ncontent-length: {}\r\n\r\n", row.len());
    upload.write_all(format!("POST /datasets HTTP/1.1\r\nhost: localhost\r\n{head}").as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;

    let begun = Instant::now();
    signal("TERM", server.child.id());
    let view = waiting.await.unwrap();
    assert_eq!(view["state"], "queued", "{view}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // Sends single bytes with pauses: seven seconds in total.
    for byte in row.as_bytes() {
        tokio::time::sleep(Duration::from_millis(7000 / row.len() as u64)).await;
        upload.write_all(&[*byte]).await.unwrap();
    }
    let mut answer = String::new();
    upload.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    let status = server.child.wait().unwrap();
    assert!(status.success() && begun.elapsed() < Duration::from_secs(15), "{status}, {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_server_that_stops_waits_for_no_request_that_never_comes() {
    use tokio::io::AsyncWriteExt;
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(dir.path(), "none");
    let address = server.url.strip_prefix("http://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /jobs HTTP/1.1\r\nhost: local").await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let begun = Instant::now();
    signal("TERM", server.child.id());
    let status = server.child.wait().unwrap();
    assert!(status.success() && begun.elapsed() < Duration::from_secs(6), "{status}, {:?}", begun.elapsed());
}

#[test]
fn two_servers_on_one_data_directory_are_one_too_many() {
    let dir = tempfile::tempdir().unwrap();
    let _first = Server::start(dir.path(), "none");
    let second = command(dir.path(), "none").output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&second.stdout), "");
    let error = String::from_utf8_lossy(&second.stderr);
    assert!(error.contains("in use by another rlood server"), "{error}");
}

#[test]
fn settings_that_cannot_be_used_end_with_code_two_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    for (extra, part) in [
        (["--listen", "0.0.0.0:0"], "set RLOOD_API_KEY"),
        (["--devices", "gpu"], "must be cpu or cuda:N"),
        (["--allow-outgoing", "10.0.0.0/99"], "10.0.0.0/99"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
        command.arg("serve").args(extra).arg("--data-dir").arg(dir.path().join("data"));
        if extra[0] != "--listen" {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let output = command.env_remove("RLOOD_API_KEY").output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{extra:?}");
        assert!(error.contains(part), "{extra:?}: {error}");
        assert!(!dir.path().join("data").exists(), "{extra:?}: nothing is made before the settings are checked");
    }
}

#[test]
fn check_says_what_is_there_and_what_is_in_the_way() {
    let dir = tempfile::tempdir().unwrap();
    let check = |listen: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
        command
            .args(["check", "--devices", "cpu,cpu", "--threads", "4", "--listen", listen, "--data-dir"])
            .arg(dir.path());
        let output = command.env_remove("RLOOD_API_KEY").output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let (code, text) = check("127.0.0.1:0");
    assert_eq!(code, Some(0), "{text}");
    for part in [
        concat!("rlood     ", env!("CARGO_PKG_VERSION")),
        "sqlite    3.",
        "MiB free",
        "cpu, cpu, 2 compute threads each",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // A warning appears only if other users can read the test's directory.
    assert!(!text.contains("warn  data"), "{text}");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (code, text) = check("127.0.0.1:0");
    assert!(code == Some(0) && text.contains("warn  data      other users can read"), "{text}");
    let server = Server::start(dir.path(), "none");
    let (code, text) = check(server.url.strip_prefix("http://").unwrap());
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("FAIL  data") && text.contains("FAIL  listen"), "{text}");
}

/// A server with the model, and a job of it that is done; its learning rate is high enough that it says something else then.
pub async fn trained(dir: &Path, lora: bool) -> (Server, String) {
    let server = Server::start(&dir.join("data"), "cpu");
    register(&server, "small", &model_copy(&dir.join("small"))).await;
    let mut job = spec("small", 4);
    // About half of what random weights say has such a letter: groups are not tied.
    job["rewards"] = json!([{"type": "regex", "pattern": "[a-m]"}]);
    job["rloo"]["num_generations"] = json!(4);
    job["optimizer"]["learning_rate"] = json!(0.1);
    if !lora {
        job["lora"] = Value::Null;
    }
    job["sampling"] = json!({"max_completion_length": 6, "temperature": 0.8});
    let job = server.submit(&job).await;
    server.job_in_state(&job, "succeeded").await;
    (server, job)
}
