//! SIGKILL to workers and servers at random times of many runs: each ends with the same bytes as an uninterrupted run, with events
//! without gaps or duplicates, and no sample is requested under two ids.
//!
//! ```text
//! cargo test --release --test it -- kills::                                         20 kills of each
//! RLOOD_KILL_MINUTES=60 cargo test --release --test it -- kills:: --nocapture        as many as fit
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rlood_client::Which;
use serde_json::{Value, json};

use super::processes::{Server, binary, copy_of, model_copy, register, signal, spec};
use super::service::{Service, ok};

/// Steps of a run; every second one has a checkpoint.
pub const STEPS: u64 = 6;
/// Number of kills of each kind in the short form.
const KILLS: u32 = 20;

/// A reward service whose rewards depend only on the text.
pub async fn judge() -> Service {
    slow_judge(Duration::ZERO).await
}

/// The same service with this response time.
pub async fn slow_judge(takes: Duration) -> Service {
    Service::start(move |_, request| {
        std::thread::sleep(takes);
        let result = |sample: &Value| {
            let text = sample["completion"].as_str().unwrap();
            let reward = text.bytes().map(f64::from).sum::<f64>() % 17.0;
            json!({"sample_id": sample["sample_id"], "reward": reward})
        };
        let results: Vec<Value> = request["samples"].as_array().unwrap().iter().map(result).collect();
        ok(&json!({"version": "1", "id": request["id"], "results": results}))
    })
    .await
}

/// A small job that uses this service.
pub fn judged(url: &str) -> Value {
    let mut spec = spec("tiny", STEPS);
    spec["rewards"] = json!([{"name": "judge", "type": "webhook", "url": url}]);
    spec
}

/// Returns name and bytes of every file of the adapter.
pub async fn adapter(server: &Server, job: &str) -> BTreeMap<String, Vec<u8>> {
    let tar = server.adapter(job, Some(Which::Last)).await;
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(tar.as_slice()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        files.insert(name, bytes);
    }
    assert!(files.contains_key("adapter_model.safetensors"), "{:?}", files.keys());
    files
}

/// Checks that the events have no gap, that each step is reported once (or once more after a rewind), and that the end
/// comes once and last.
pub async fn check_history(what: &str, server: &Server, job: &str, steps: u64) {
    let (mut events, mut after) = (Vec::new(), String::new());
    loop {
        let page = server.get(&format!("/jobs/{job}/events?limit=100{after}")).await;
        events.extend(page["data"].as_array().unwrap().iter().cloned());
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    let (mut told, mut saved, mut started) = (BTreeSet::new(), BTreeSet::new(), 0);
    for (event, seq) in events.iter().zip(1..) {
        assert_eq!(event["seq"], seq, "{what}: a gap");
        let step = event["data"]["step"].as_u64();
        match event["type"].as_str().unwrap() {
            "step" => {
                let step = step.unwrap();
                assert_eq!(step, told.last().map_or(1, |last| last + 1), "{what}: steps in order");
                told.insert(step);
            }
            "rewind" => {
                told.retain(|known| *known <= step.unwrap());
                saved.retain(|known| *known <= step.unwrap());
            }
            "checkpoint.saved" => assert!(saved.insert(step.unwrap()), "{what}: {step:?} is saved twice"),
            "job.started" => started += 1,
            _ => {}
        }
    }
    assert_eq!(told, (1..=steps).collect(), "{what}");
    let ends: Vec<usize> = (0..events.len()).filter(|place| events[*place]["type"] == "job.succeeded").collect();
    assert_eq!(ends, [events.len() - 1], "{what}");
    let view = server.get(&format!("/jobs/{job}")).await;
    assert_eq!(view["attempt"], started, "{what}: {view}");
    let metrics = server.get(&format!("/jobs/{job}/metrics")).await;
    let rows: Vec<u64> = metrics["data"].as_array().unwrap().iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(rows, (1..=steps).collect::<Vec<_>>(), "{what}");
}

/// Checks that each sample of each job has one id, and each id one body.
pub fn check_requests(what: &str, service: &Service) {
    let (mut ids, mut bodies) = (BTreeMap::new(), BTreeMap::new());
    for (_, body) in service.seen.lock().unwrap().iter() {
        let request: Value = serde_json::from_slice(body).unwrap();
        let id = request["id"].as_str().unwrap().to_owned();
        assert_eq!(bodies.entry(id.clone()).or_insert_with(|| body.clone()), body, "{what}: {id} has two bodies");
        for sample in request["samples"].as_array().unwrap() {
            let sample = format!("{} {} {}", request["job"]["id"], request["job"]["step"], sample["sample_id"]);
            let first = ids.entry(sample.clone()).or_insert_with(|| id.clone());
            assert_eq!(*first, id, "{what}: {sample} is asked for under two ids");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_workers_and_servers_at_any_moment_change_nothing() {
    harass("parity/qwen3", &json!(["q_proj", "v_proj"]), 1.0).await;
}

/// Three of its four layers keep a state and the end of a convolution in place of keys and values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_workers_and_servers_change_nothing_for_a_hybrid() {
    harass("hybrid", &json!("all-linear"), 0.25).await;
}

/// Runs one job on the model of this fixture again and again, and kills the worker or the server each time at another moment. `share` is
/// the share of the kills, or of the minutes, that the test has.
async fn harass(fixture: &str, target_modules: &Value, share: f64) {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let service = judge().await;
    let mut spec = judged(&service.url());
    spec["lora"]["target_modules"] = target_modules.clone();
    let mut server = Server::start(&data, "cpu");
    register(&server, "tiny", &copy_of(fixture, &dir.path().join("model"))).await;
    // The first run also warms up; the second one is measured.
    let job = server.submit(&spec).await;
    server.job_in_state(&job, "succeeded").await;
    let expected = adapter(&server, &job).await;
    let begun = Instant::now();
    let job = server.submit(&spec).await;
    server.job_in_state(&job, "succeeded").await;
    let whole = begun.elapsed();
    assert!(adapter(&server, &job).await == expected, "two undisturbed runs differ");

    let minutes = std::env::var("RLOOD_KILL_MINUTES").ok().map(|text| text.parse::<f64>().expect("minutes"));
    let begun = Instant::now();
    let goes_on = |runs: u32| match minutes {
        Some(minutes) => begun.elapsed().as_secs_f64() < minutes * 60.0 * share,
        None => f64::from(runs) < f64::from(2 * KILLS) * share,
    };
    let (mut kills, mut runs, mut attempts) = ([0, 0], 0, 0);
    let mut random = Moments::new();
    while goes_on(runs) {
        let job = server.submit(&spec).await;
        let moment = whole.mul_f64(random.next() * 1.1);
        tokio::time::sleep(moment).await;
        let (victim, what) = if runs % 2 == 0 { (0, "worker") } else { (1, "server") };
        let what = format!("run {runs}: the {what} was killed after {moment:?}");
        if victim == 0 {
            signal("KILL", server.worker_pids(1).await[0]);
        } else {
            server.child.kill().unwrap();
            server.child.wait().unwrap();
            server = Server::start(&data, "cpu");
        }
        kills[victim] += 1;
        let view = server.job_in_state(&job, "succeeded").await;
        attempts += view["attempt"].as_u64().unwrap();
        assert!(adapter(&server, &job).await == expected, "{what}: another adapter");
        check_history(&what, &server, &job, STEPS).await;
        check_requests(&what, &service);
        runs += 1;
    }
    println!(
        "{fixture}: {runs} runs, {} kills of the worker, {} of the server, {attempts} attempts, {:.0} s; an undisturbed run takes {whole:?}",
        kills[0],
        kills[1],
        begun.elapsed().as_secs_f64()
    );
}

/// Times spread evenly over 0 to 1: all parts of a run are hit, whatever their number.
struct Moments(f64);

impl Moments {
    fn new() -> Self {
        let nanos = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
        Self(f64::from(nanos) / 1e9)
    }

    fn next(&mut self) -> f64 {
        // Multiples of the golden ratio never cluster.
        self.0 = (self.0 + 0.618_033_988_749_894_8).fract();
        self.0
    }
}

/// A separately started worker; killed when dropped.
struct ByHand(Child);

impl ByHand {
    fn start(server: &Server, scratch: &Path) -> Self {
        let mut command = Command::new(binary());
        command.args(["worker", "--server", &server.url, "--device", "cpu", "--log", "error", "--scratch-dir"]);
        command.arg(scratch).env("RLOOD_WORKER_TOKEN", TOKEN).stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const TOKEN: &str = "the-token-of-workers-started-by-hand";

/// `RLOOD_OUTAGE_SECONDS=60` selects the long form.
#[tokio::test]
async fn a_worker_started_by_hand_goes_on_while_its_server_is_away() {
    let away = std::env::var("RLOOD_OUTAGE_SECONDS").map_or(3, |text| text.parse().expect("seconds"));
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let token = ("RLOOD_WORKER_TOKEN", TOKEN);
    let mut server = Server::start_in(&data, "none", &[token]);
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let _worker = ByHand::start(&server, &dir.path().join("scratch"));
    let mut spec = spec("tiny", 60);
    spec["checkpoints"] = json!({"every_steps": 20});
    let job = server.submit(&spec).await;
    server.job_in_state(&job, "succeeded").await;
    let expected = adapter(&server, &job).await;

    let job = server.submit(&spec).await;
    server.job_when(&job, "a step", |view| view["step"].as_u64() > Some(0)).await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    tokio::time::sleep(Duration::from_secs(away)).await;
    let server = Server::start_in(&data, "none", &[token, ("RLOOD_LISTEN", &address)]);
    let view = server.job_in_state(&job, "succeeded").await;
    assert_eq!(view["attempt"], 1, "it kept its claim: {view}");
    assert!(adapter(&server, &job).await == expected);
    check_history("an outage", &server, &job, 60).await;
    println!("the server was away for {away} s");
}
