//! Every named failpoint of a run with every action: an error, a panic, a process exit, a full disk. Whatever fails, the job ends
//! exactly like an uninterrupted one. Only with the feature `failpoints`:
//!
//! ```text
//! cargo test --release --features failpoints --test it -- failpoints::
//! RLOOD_FAILPOINTS_DAY=N …    one action a point, another one the next day
//! ```

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::kills::{STEPS, adapter, check_history, check_requests, judge, judged};
use super::processes::{Server, model_copy, register, spec};

const ACTIONS: [&str; 4] = ["error", "panic", "exit", "no_space"];
/// Number of concurrent runs, which mostly wait.
const AT_ONCE: usize = 4;
const PATIENCE: Duration = Duration::from_secs(180);
/// Failpoints that a run must pass, so that a renamed or lost one is noticed.
const EXPECTED: [&str; 24] = [
    "checkpoint.file:adapter_model.safetensors",
    "checkpoint.file:manifest.json",
    "checkpoint.manifest",
    "checkpoint.renamed",
    "client.after:claim",
    "client.after:events",
    "client.after:finish",
    "client.after:journal",
    "client.after:publish",
    "client.before:upload",
    "files.renamed",
    "files.synced",
    "files.verified",
    "files.write",
    "publish.placed",
    "publish.published",
    "store.after_commit:append events",
    "store.after_commit:append to the journal",
    "store.after_commit:claim a job",
    "store.after_commit:finish a job",
    "store.after_commit:publish a checkpoint",
    "store.before_commit:finish a job",
    "store.event:checkpoint.saved",
    "store.event:job.succeeded",
];

fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_tree(&path, &target);
        } else {
            std::fs::copy(&path, target).unwrap();
        }
    }
}

/// Runs the prepared job with these failpoints, restarting the server and resuming the job as an operator would.
async fn run(data: &Path, notes: &Path, points: &str, job: &str) -> Server {
    std::fs::create_dir_all(notes).unwrap();
    let variables = [("RLOOD_FAILPOINTS", points), ("RLOOD_FAILPOINTS_DIR", notes.to_str().unwrap())];
    let mut server = Server::start_in(data, "cpu", &variables);
    let begun = Instant::now();
    loop {
        if let Some(view) = server.try_job(job).await {
            match view["state"].as_str().unwrap() {
                "succeeded" => return server,
                "paused" => {
                    assert_eq!(view["status_reason"], "disk_full", "{points}: {view}");
                    let resume = server.http.post(format!("{}/jobs/{job}/resume", server.url)).json(&json!({}));
                    let answer = resume.send().await.unwrap();
                    // The server resumes such jobs too, perhaps a moment earlier.
                    let status = answer.status();
                    assert!(status.is_success() || status == 409, "{points}: {}", answer.text().await.unwrap());
                }
                "queued" | "running" => {}
                _ => panic!("{points}: {view}"),
            }
            assert!(begun.elapsed() < PATIENCE, "{points}: {view}");
        }
        if server.child.try_wait().unwrap().is_some() {
            server = Server::start_in(data, "cpu", &variables);
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_fails_wherever_the_job_ends_as_it_should() {
    let dir = tempfile::tempdir().unwrap();
    let prepared = dir.path().join("prepared");
    // The queued job contains the address of its service, so one service per run is created first.
    let model = model_copy(&dir.path().join("model"));
    let prepare = async |data: &Path, url: &str| {
        let server = Server::start(data, "none");
        register(&server, "tiny", &model).await;
        let job = server.submit(&judged(url)).await;
        assert!(server.terminate().0.success());
        job
    };
    let service = judge().await;
    let job = prepare(&prepared, &service.url()).await;
    let notes = dir.path().join("notes");
    let data = dir.path().join("undisturbed");
    copy_tree(&prepared, &data);
    let server = run(&data, &notes, "*=note", &job).await;
    let expected = adapter(&server, &job).await;
    check_history("undisturbed", &server, &job, STEPS).await;
    drop(server);
    let points: BTreeSet<String> =
        std::fs::read_dir(&notes).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    for point in EXPECTED {
        assert!(points.contains(point), "no run passes {point}: {points:?}");
    }

    let day = std::env::var("RLOOD_FAILPOINTS_DAY").ok().map(|day| day.parse::<usize>().unwrap());
    let cases: Vec<(&String, &str)> = points
        .iter()
        .enumerate()
        .flat_map(|(index, point)| match day {
            Some(day) => vec![(point, ACTIONS[(index + day) % ACTIONS.len()])],
            None => ACTIONS.map(|action| (point, action)).to_vec(),
        })
        .collect();
    let count = cases.len();
    let begun = Instant::now();
    let cases = cases.into_iter().enumerate().map(|(number, (point, action))| {
        let (dir, expected, prepare) = (dir.path(), &expected, &prepare);
        async move {
            let what = format!("{point}={action}");
            let service = judge().await;
            let (data, notes) = (dir.join(format!("data-{number}")), dir.join(format!("notes-{number}")));
            let job = prepare(&data, &service.url()).await;
            let server = run(&data, &notes, &what, &job).await;
            assert!(notes.join(point).exists(), "{what} was not reached");
            assert!(adapter(&server, &job).await == *expected, "{what}: another adapter");
            check_history(&what, &server, &job, STEPS).await;
            check_requests(&what, &service);
            drop(server);
            std::fs::remove_dir_all(&data).unwrap();
        }
    });
    futures::stream::iter(cases).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    let actions = count / points.len();
    println!("{} points × {actions} actions = {count} runs in {:.0} s", points.len(), begun.elapsed().as_secs_f64());
}

/// A worker implemented by the test.
struct Hands {
    http: reqwest::Client,
    url: String,
    worker: String,
}

impl Hands {
    async fn new(server: &Server, token: &str) -> Self {
        let mut headers = reqwest::header::HeaderMap::new();
        headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
        let http = reqwest::Client::builder().no_proxy().default_headers(headers).build().unwrap();
        let hands = Self { http, url: server.url.clone(), worker: rlood::id::WorkerId::new().to_string() };
        let register = json!({"worker": hands.worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0.1.0",
                              "protocol": rlood::protocol::PROTOCOL});
        hands.post("register", &register).await;
        hands
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let answer = self.http.post(format!("{}/worker/{path}", self.url)).json(body).send().await.unwrap();
        let status = answer.status();
        let text = answer.text().await.unwrap();
        assert!(status.is_success(), "{path}: {status} {text}");
        serde_json::from_str(&text).unwrap_or(Value::Null)
    }

    /// Claims a job; returns the claim and how long it took.
    async fn claim(&self) -> (Value, Duration) {
        let begun = Instant::now();
        let ask = json!({"worker": self.worker, "wait_ms": 0, "protocol": rlood::protocol::PROTOCOL});
        (self.post("claim", &ask).await, begun.elapsed())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_claim_waits_while_a_checkpoint_of_300_mb_is_hashed_at_10_mb_a_second() {
    const TOKEN: &str = "the-token-of-the-hands-of-a-test";
    const SIZE_BYTES: usize = 300_000_000;
    let dir = tempfile::tempdir().unwrap();
    let (data, notes) = (dir.path().join("data"), dir.path().join("notes"));
    std::fs::create_dir(&notes).unwrap();
    let server = Server::start_in(&data, "none", &[("RLOOD_WORKER_TOKEN", TOKEN)]);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let (large, other) = (server.submit(&spec("tiny", 4)).await, server.submit(&spec("tiny", 4)).await);
    let hands = Hands::new(&server, TOKEN).await;
    assert_eq!(hands.claim().await.0["job"], large);
    let mut files = Vec::new();
    for (name, bytes) in [("w", vec![0; SIZE_BYTES]), ("manifest.json", b"{}".to_vec())] {
        files.push(json!({"name": name, "size_bytes": bytes.len(), "sha256": hex::encode(Sha256::digest(&bytes))}));
        let path = format!("{}/worker/jobs/{large}/checkpoints/2/{name}?attempt=1", server.url);
        assert!(hands.http.put(path).body(bytes).send().await.unwrap().status().is_success());
    }
    let publish = json!({"attempt": 1, "files": files, "metrics": {}});
    let begun = Instant::now();
    hands.post(&format!("jobs/{large}/checkpoints/2"), &publish).await;
    println!("published in {:?}", begun.elapsed());
    let requeued = json!({"attempt": 1, "outcome": {"outcome": "requeued"}});
    hands.post(&format!("jobs/{large}/finish"), &requeued).await;
    assert!(server.terminate().0.success());

    let slow = [
        ("RLOOD_WORKER_TOKEN", TOKEN),
        ("RLOOD_FAILPOINTS", "files.hash=slow:10000000"),
        ("RLOOD_FAILPOINTS_DIR", notes.to_str().unwrap()),
    ];
    let server = Server::start_in(&data, "none", &slow);
    let (first, second) = (Hands::new(&server, TOKEN).await, Hands::new(&server, TOKEN).await);
    let (claim, took) = first.claim().await;
    assert_eq!((&claim["job"], &claim["resume"]["step"]), (&json!(large), &json!(2)));
    assert!(took < Duration::from_secs(1), "{took:?}");
    // The server reads the file for half a minute because its worker asks; the other worker is not affected.
    let report = json!({"attempt": 2, "list": "resume", "step": 2, "file": "w"});
    let begun = Instant::now();
    let inspect = async {
        loop {
            let found = first.post(&format!("jobs/{large}/damaged"), &report).await;
            let beat = json!({"attempt": 2, "phase": "loading", "status_reason": null, "step": 0, "eta_s": null});
            first.post(&format!("jobs/{large}/heartbeat"), &beat).await;
            if found["verdict"] != "checking" {
                return found;
            }
        }
    };
    let meanwhile = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        second.claim().await
    };
    let (found, (claim, took)) = tokio::join!(inspect, meanwhile);
    assert_eq!(claim["job"], json!(other));
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(found["verdict"], "whole");
    assert!(begun.elapsed() > Duration::from_secs(25), "hashing was not slow: {:?}", begun.elapsed());
}
