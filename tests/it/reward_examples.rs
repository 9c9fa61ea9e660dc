//! The services of `examples/reward_service`, unchanged: each passes `rlood reward check`, and a job of a real
//! server trains with it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, spec};
use crate::server::SECRET;

#[path = "../../examples/reward_service/main.rs"]
#[expect(dead_code, reason = "its main reads the command line")]
mod in_rust;

/// A service's process; killed when dropped.
struct Service {
    child: Child,
    url: String,
}

impl Service {
    /// Returns `None`, with a message, if the program is not installed.
    fn start(program: &str, arguments: &[&str]) -> Option<Self> {
        let mut child = spawn(Command::new(program).args(arguments).env("REWARD_SECRET", SECRET))?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{program}: {line:?}")).trim().to_owned();
        Some(Self { child, url: format!("{url}/score") })
    }
}

/// Returns `None`, with a message, if the program is not installed.
fn spawn(command: &mut Command) -> Option<Child> {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn() {
        Ok(child) => Some(child),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: there is no {program} on this machine");
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn example(name: &str) -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/reward_service").join(name);
    path.to_str().unwrap().to_owned()
}

/// Runs the check like a user.
fn check(url: &str) -> (Option<i32>, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
    command.args(["reward", "check", url, "--json", "--strict"]).env("RLOOD_REWARD_SECRET", SECRET);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains(SECRET), "{text}");
    let report = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text} {:?}", output.stderr));
    (output.status.code(), report)
}

/// The service passes without a warning, and a job trains with it.
async fn passes_and_trains(url: &str, asynchronous: bool) {
    let (code, report) = tokio::task::spawn_blocking({
        let url = url.to_owned();
        move || check(&url)
    })
    .await
    .unwrap();
    assert_eq!(code, Some(0), "{report:#}");
    let of =
        |check: &str| report["findings"].as_array().unwrap().iter().find(|f| f["check"] == check).cloned().unwrap();
    assert_eq!(of("async")["detail"].as_str().unwrap().contains("2 callbacks"), asynchronous, "{report:#}");

    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut job = spec("tiny", 2);
    let records: Vec<Value> = (0..4).map(|n| json!({"prompt": format!("Say {n}."), "answer": n})).collect();
    job["dataset"] = json!({ "records": records });
    job["rewards"] = json!([{"name": "marks", "type": "webhook", "url": url, "secret": SECRET}]);
    let job = server.submit(&job).await;
    server.job_in_state(&job, "succeeded").await;
    let samples = server.get(&format!("/jobs/{job}/samples?limit=100")).await;
    let samples = samples["data"].as_array().unwrap();
    assert_eq!(samples.len(), 2 * 2 * 2);
    for sample in samples {
        let (row, completion) = (sample["prompt_id"].as_str().unwrap(), sample["completion"].as_str().unwrap().trim());
        let answer = row.strip_prefix("row_").unwrap();
        let expected = if completion == answer {
            1.0
        } else if completion.contains(answer) {
            0.5
        } else {
            0.0
        };
        assert_eq!(sample["rewards"]["marks"], json!(expected), "{sample}");
    }
}

/// The guide has one Python block, which uses the tests' own secret.
#[tokio::test]
async fn the_service_in_the_guide_passes_without_a_warning() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guides/write-a-reward-service.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let (_, rest) = guide.split_once("```python\n").unwrap();
    let (code, _) = rest.split_once("```\n").unwrap();
    assert!(code.contains(SECRET.strip_prefix("whsec_").unwrap()), "{code}");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("(\"127.0.0.1\", {port})");
    assert_eq!(code.matches("(\"127.0.0.1\", 9000)").count(), 1, "{code}");
    let code = code.replace("(\"127.0.0.1\", 9000)", &address);
    let Some(mut child) = spawn(Command::new("python3").args(["-c", &code]).stderr(Stdio::null())) else { return };
    let begun = std::time::Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(child.try_wait().unwrap().is_none(), "it ended: {code}");
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "it does not listen: {code}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let service = Service { child, url: format!("http://127.0.0.1:{port}/score") };
    let url = service.url.clone();
    let (code, report) = tokio::task::spawn_blocking(move || check(&url)).await.unwrap();
    assert_eq!(code, Some(0), "{report:#}");
}

#[tokio::test]
async fn the_service_in_python_passes_and_trains() {
    let Some(service) = Service::start("python3", &[&example("service.py"), "--port", "0"]) else { return };
    passes_and_trains(&service.url, false).await;
}

#[tokio::test]
async fn the_service_in_python_that_calls_back_passes_and_trains() {
    let Some(service) = Service::start("python3", &[&example("service.py"), "--port", "0", "--async"]) else { return };
    passes_and_trains(&service.url, true).await;
}

#[tokio::test]
async fn the_service_in_node_passes_and_trains() {
    let Some(service) = Service::start("node", &[&example("service.mjs"), "0"]) else { return };
    passes_and_trains(&service.url, false).await;
}

#[tokio::test]
async fn the_service_in_rust_passes_and_trains() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    tokio::spawn(async move { in_rust::serve(listener, SECRET).await.unwrap() });
    passes_and_trains(&url, false).await;
}
