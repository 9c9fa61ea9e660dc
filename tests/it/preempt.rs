//! Workers that are preempted repeatedly: a job that makes progress ends with the bytes of an uninterrupted run, a job that cannot
//! start fails after three attempts, and a worker that gets SIGTERM saves a checkpoint first.
//!
//! ```text
//! cargo test --release --test it -- preempt::                                        shortened intervals
//! RLOOD_PREEMPT_LONG=1 cargo test --release --test it -- preempt:: --nocapture        a kill every 3 to 20 s
//! ```

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::kills::{adapter, check_history, check_requests, slow_judge};
use super::processes::{Server, binary, is_alive, model_copy, register, signal, spec};

/// Steps of the job that is killed.
const STEPS: u64 = 200;
const TOKEN: &str = "the-token-of-workers-started-by-hand";

/// Deterministic intervals from `low` to `high` seconds.
struct Intervals(u64);

impl Intervals {
    fn next(&mut self, low: f64, high: f64) -> Duration {
        // Knuth's constants; the upper bits are the most random ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let part = (self.0 >> 11) as f64 / (1_u64 << 53) as f64;
        Duration::from_secs_f64(low + (high - low) * part)
    }
}

/// The events of one type.
async fn events(server: &Server, job: &str, kind: &str) -> Vec<Value> {
    let (mut found, mut after) = (Vec::new(), String::new());
    loop {
        let page = server.get(&format!("/jobs/{job}/events?limit=100{after}")).await;
        found.extend(page["data"].as_array().unwrap().iter().filter(|event| event["type"] == kind).cloned());
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => return found,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_of_200_steps_whose_worker_is_killed_again_and_again_ends_with_the_bytes_of_a_calm_run() {
    let long = std::env::var_os("RLOOD_PREEMPT_LONG").is_some();
    let dir = tempfile::tempdir().unwrap();
    // A minimum duration per step, also on the fastest machine.
    let service = slow_judge(Duration::from_millis(if long { 150 } else { 20 })).await;
    let mut spec = spec("tiny", STEPS);
    spec["rewards"] = json!([{"name": "judge", "type": "webhook", "url": service.url()}]);
    // The plan requests no checkpoint before the end: all progress is in the journal.
    spec["checkpoints"] = json!({"every_steps": 1000, "keep_last": 2});
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let begun = Instant::now();
    let calm = server.submit(&spec).await;
    server.job_in_state(&calm, "succeeded").await;
    let whole = begun.elapsed();
    let expected = adapter(&server, &calm).await;

    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    let mut intervals = Intervals(u64::from(seed));
    let begun = Instant::now();
    let job = server.submit(&spec).await;
    let mut kills = 0;
    loop {
        let interval = if long { intervals.next(3.0, 20.0) } else { intervals.next(1.0, 2.0) };
        if long {
            tokio::time::sleep(interval).await;
        }
        // In the short form, loading the model would take most of a worker's lifetime.
        let begun =
            |view: &Value| view["attempt"] == kills + 1 && view["phase"] != "loading" && view["state"] == "running";
        let over = |view: &Value| view["state"] == "succeeded" || view["state"] == "failed";
        let view = server.job_when(&job, "an attempt", |view| over(view) || long || begun(view)).await;
        if over(&view) {
            break;
        }
        if !long {
            tokio::time::sleep(interval).await;
        }
        signal("KILL", server.worker_pids(1).await[0]);
        kills += 1;
        let view =
            server.job_when(&job, "the kill", |view| view["state"] != "running" || view["attempt"] != kills).await;
        assert_ne!(view["state"], "failed", "seed {seed}: {view}");
        if over(&view) {
            break;
        }
    }
    let view = server.job_in_state(&job, "succeeded").await;
    let took = begun.elapsed();
    println!("{kills} kills, {} attempts, {took:?}; a calm run takes {whole:?}; seed {seed}", view["attempt"]);
    assert!(kills >= 2, "the job was hardly disturbed: {kills} kills");
    assert!(adapter(&server, &job).await == expected, "seed {seed}: another adapter than that of the calm run");
    check_history("killed again and again", &server, &job, STEPS).await;
    check_requests("killed again and again", &service);
    // Intermediate checkpoints are removed; the planned ones exist.
    assert_eq!(server.checkpoint_steps(&job).await, server.checkpoint_steps(&calm).await);
    for end in events(&server, &job, "job.requeued").await {
        let data = &end["data"];
        assert_eq!(data["reason"], "worker_lost", "{end}");
        assert!(data["memory_bytes"].as_u64() > Some(1 << 20) && data["phase"].is_string(), "{end}");
    }
}

#[tokio::test]
async fn a_worker_that_dies_before_it_has_done_anything_is_given_three_attempts() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut spec = spec("tiny", 2);
    // A step that takes long to sample: the journal is empty when the worker dies.
    spec["sampling"]["max_completion_length"] = json!(200);
    spec["rloo"]["num_generations"] = json!(256);
    spec["training"]["prompts_per_step"] = json!(6);
    let job = server.submit(&spec).await;
    for attempt in 1..=3 {
        let view =
            server.job_when(&job, "an attempt", |view| view["state"] == "running" && view["attempt"] == attempt).await;
        assert_eq!(view["step"], 0, "{view}");
        // Simulates a crash in a native library. The first signal only removes Rust's own handler, which waits for the fault to
        // recur. With AMX it ends the process.
        let pid = server.worker_pids(1).await[0];
        signal("SEGV", pid);
        tokio::time::sleep(Duration::from_millis(20)).await;
        if is_alive(pid) {
            signal("SEGV", pid);
        }
        server.job_when(&job, "its end", |view| view["state"] != "running" || view["attempt"] != attempt).await;
    }
    let view = server.job_in_state(&job, "failed").await;
    let failure = &view["failure"];
    assert_eq!(
        (&view["attempt"], &failure["code"], &failure["class"]),
        (&json!(3), &json!("worker_lost"), &json!("infra"))
    );
    let message = failure["message"].as_str().unwrap();
    assert!(
        message.starts_with("3 attempts in a row ended without progress past step 0: attempt 1: worker_lost"),
        "{message}"
    );
    assert!(message.matches("SIGSEGV").count() >= 3, "{message}");
}

/// A separately started worker; killed when dropped.
struct ByHand(Child);

impl ByHand {
    fn start(server: &Server, dir: &std::path::Path, grace_s: u32) -> Self {
        let mut command = Command::new(binary());
        command.args(["worker", "--server", &server.url, "--device", "cpu", "--log", "error", "--scratch-dir"]);
        command.arg(dir.join("scratch")).args(["--grace-s", &grace_s.to_string()]);
        Self(command.env("RLOOD_WORKER_TOKEN", TOKEN).stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_preempted_worker_saves_and_leaves_within_its_grace_and_the_job_is_not_charged() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_in(&dir.path().join("data"), "none", &[("RLOOD_WORKER_TOKEN", TOKEN)]);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    // A minimum duration per step, also on the fastest machine.
    let service = slow_judge(Duration::from_millis(20)).await;
    let mut spec = spec("tiny", 100);
    spec["rewards"] = json!([{"name": "judge", "type": "webhook", "url": service.url()}]);
    spec["checkpoints"] = json!({"every_steps": 1000});
    let calm = server.submit(&spec).await;
    let mut worker = ByHand::start(&server, dir.path(), 10);
    server.job_in_state(&calm, "succeeded").await;

    let job = server.submit(&spec).await;
    for attempt in 1..=2 {
        let further = |view: &Value| view["attempt"] == attempt && view["step"].as_u64() >= Some(4 * attempt);
        server.job_when(&job, "some steps", further).await;
        let begun = Instant::now();
        signal("TERM", worker.0.id());
        let status = worker.0.wait().unwrap();
        assert!(status.success(), "{status}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(!is_alive(worker.0.id()));
        let view = server.get(&format!("/jobs/{job}")).await;
        assert_eq!(view["state"], "queued", "{view}");
        let saved = server.checkpoint_steps(&job).await;
        assert!(saved.last() >= Some(&(4 * attempt)), "its last step is saved: {saved:?}");
        worker = ByHand::start(&server, dir.path(), 10);
    }
    let view = server.job_in_state(&job, "succeeded").await;
    assert_eq!(view["attempt"], 3, "{view}");
    let requeued = events(&server, &job, "job.requeued").await;
    let told: Vec<_> =
        requeued.iter().map(|event| (&event["data"]["reason"], &event["data"]["failed_attempts"])).collect();
    assert_eq!(told, [(&json!("preempted"), &json!(0)), (&json!("preempted"), &json!(0))]);
    assert!(adapter(&server, &job).await == adapter(&server, &calm).await);
}

#[tokio::test]
async fn checkpoints_come_by_the_clock_too_and_change_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    // A minimum duration per step, also on the fastest machine.
    let service = slow_judge(Duration::from_millis(40)).await;
    let mut spec = spec("tiny", 60);
    spec["rewards"] = json!([{"name": "judge", "type": "webhook", "url": service.url()}]);
    spec["checkpoints"] = json!({"every_steps": 1000, "keep_last": 1000});
    let by_steps = server.submit(&spec).await;
    let plan = server.get(&format!("/jobs/{by_steps}")).await["plan"].clone();
    assert_eq!(plan["checkpoints"].get("every_seconds"), None, "{plan}");
    server.job_in_state(&by_steps, "succeeded").await;
    assert_eq!(server.checkpoint_steps(&by_steps).await, [60]);
    spec["checkpoints"]["every_seconds"] = json!(1);
    let by_time = server.submit(&spec).await;
    server.job_in_state(&by_time, "succeeded").await;
    let saved = server.checkpoint_steps(&by_time).await;
    assert!(saved.len() > 1 && saved.len() < 60, "{saved:?}");
    assert!(adapter(&server, &by_time).await == adapter(&server, &by_steps).await);
}
