//! How the server does with a large database: how soon it serves after a start, what a claim, a page of jobs and a run's metrics
//! cost, how many metric points it takes in.
//!
//! ```text
//! cargo test --release --test it -- scale:: --nocapture                      a tenth of the size, bars with room for a busy machine
//! RLOOD_SCALE=full cargo test --release --test it -- scale:: --nocapture     10k jobs, 10M points, 100k queued jobs
//! ```
//!
//! The full form wants an idle machine and holds the real bars; `RLOOD_SCALE_RESULTS=benches/results/scale.md` writes them.

use std::path::Path;
use std::time::{Duration, Instant};

use rlood::store::NewModel;
use serde_json::{Value, json};

use super::processes::Server;
use super::setting::{Setting, T0};

/// Numbers a step.
const KEYS: usize = 25;
const TOKEN: &str = "the-token-of-the-workers-at-scale";

struct Size {
    jobs: usize,
    /// Steps of each job but the first.
    steps: usize,
    /// Of the first.
    long_run: usize,
    queued: usize,
    /// Of the bars: 1 on an idle machine.
    slack: f64,
}

fn size() -> Size {
    match std::env::var("RLOOD_SCALE").as_deref() {
        Ok("full") => Size { jobs: 10_000, steps: 40, long_run: 4_000, queued: 100_000, slack: 1.0 },
        _ => Size { jobs: 1_000, steps: 40, long_run: 1_000, queued: 10_000, slack: 25.0 },
    }
}

/// Figures beside their bars.
#[derive(Default)]
struct Report {
    lines: Vec<String>,
    missed: Vec<String>,
}

impl Report {
    fn at_most(&mut self, what: &str, found: f64, bar: f64, unit: &str, slack: f64) {
        self.line(what, found, format!("≤ {bar} {unit}"), unit, found <= bar * slack);
    }

    fn at_least(&mut self, what: &str, found: f64, bar: f64, unit: &str, slack: f64) {
        self.line(what, found, format!("≥ {bar} {unit}"), unit, found * slack >= bar);
    }

    fn line(&mut self, what: &str, found: f64, bar: String, unit: &str, held: bool) {
        let line = format!("| {what} | {found:.1} {unit} | {bar} |");
        println!("{line}");
        if !held {
            self.missed.push(line.clone());
        }
        self.lines.push(line);
    }
}

fn names() -> Vec<String> {
    let mut names: Vec<String> = ["reward", "kl", "loss", "grad_norm", "entropy"].map(str::to_owned).to_vec();
    names.extend((names.len()..KEYS).map(|number| format!("metric/number_{number}")));
    names
}

/// One real job, and copies of it with SQL alone: `prefix` tells their ids apart.
async fn copies(setting: &Setting, prefix: char, count: usize) {
    let done = setting
        .sql(&format!(
            "WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < {count}) \
             INSERT INTO jobs (id, name, state, priority, queue_order, total_steps, model, spec, plan, secrets, metadata, created_at) \
             SELECT 'job_0{prefix}' || printf('%024d', v), 'copy', 'queued', v % 3, (SELECT MAX(queue_order) FROM jobs) + v, 10, \
             model, spec, plan, secrets, metadata, created_at + v FROM n, (SELECT * FROM jobs ORDER BY queue_order LIMIT 1)"
        ))
        .await
        .unwrap();
    assert_eq!(done, count as u64);
}

async fn fill_history(setting: &Setting, size: &Size) {
    setting.job().await;
    copies(setting, 'a', size.jobs).await;
    let metrics = names().iter().map(|name| format!("\"{name}\":0.123456789012")).collect::<Vec<_>>().join(",");
    let headlines = "{\"step\":1,\"kind\":\"train\",\"metrics\":{\"reward\":0.123456789012,\"kl\":0.1,\"loss\":0.1}}";
    for (jobs, steps) in [
        ("id LIKE 'job_0a%' AND id <> 'job_0a' || printf('%024d', 1)", size.steps),
        ("id = 'job_0a' || printf('%024d', 1)", size.long_run),
    ] {
        let count = format!("WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < {steps})");
        for insert in [
            format!(
                "{count} INSERT INTO steps SELECT id, v, 'train', 1, {T0} + v, '{{{metrics}}}', 0.123456789012 FROM jobs, n WHERE {jobs}"
            ),
            format!(
                "{count} INSERT INTO events SELECT id, v, 'step', 1, {T0} + v, '{headlines}' FROM jobs, n WHERE {jobs}"
            ),
        ] {
            setting.sql(&insert).await.unwrap();
        }
    }
    let next = "UPDATE jobs SET next_seq = 1 + COALESCE((SELECT MAX(seq) FROM events WHERE job_id = jobs.id), 0)";
    setting.sql(next).await.unwrap();
    // One in ten still waits; the others are over.
    let over = format!("UPDATE jobs SET state = 'cancelled', finished_at = {T0} WHERE queue_order % 10 > 0");
    setting.sql(&over).await.unwrap();
}

fn p99(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[(times.len() * 99).div_ceil(100) - 1].as_secs_f64() * 1e3
}

struct Http {
    client: reqwest::Client,
    url: String,
}

impl Http {
    fn of(server: &Server) -> Self {
        Self { client: reqwest::Client::builder().no_proxy().build().unwrap(), url: server.url.clone() }
    }

    async fn get(&self, path: &str) -> String {
        let answer = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
        answer.text().await.unwrap()
    }

    async fn post(&self, path: &str, body: &Value) -> Option<Value> {
        let request = self.client.post(format!("{}{path}", self.url)).bearer_auth(TOKEN).json(body);
        let answer = request.send().await.unwrap();
        let status = answer.status();
        let text = answer.text().await.unwrap();
        assert!(status.is_success(), "{path}: {status} {text}");
        serde_json::from_str(&text).ok()
    }

    async fn times(&self, count: usize, path: impl Fn(usize) -> String) -> Vec<Duration> {
        let mut times = Vec::new();
        for number in 0..count {
            let path = path(number);
            let begun = Instant::now();
            let text = self.get(&path).await;
            times.push(begun.elapsed());
            assert!(text.len() > 20, "{path}: {text}");
        }
        times
    }
}

fn start(data: &Path) -> Server {
    Server::start_in(data, "none", &[("RLOOD_WORKER_TOKEN", TOKEN)])
}

/// Leaves the data directory to a server.
async fn handed_over(setting: Setting) -> tempfile::TempDir {
    let model = NewModel {
        id: "org/tiny".to_owned(),
        source: "/models/tiny".to_owned(),
        sha256: "aa".to_owned(),
        card: json!({}),
        owner: String::new(),
    };
    setting.store.model_create(model, T0).await.unwrap();
    std::fs::write(setting.files.dataset(setting.dataset), b"{\"prompt\":\"a\"}\n").unwrap();
    setting.store.close().await;
    setting.dir
}

#[tokio::test]
async fn a_large_database_is_served_as_quickly_as_a_small_one() {
    let size = size();
    let mut report = Report::default();
    let begun = Instant::now();
    let setting = Setting::new().await;
    fill_history(&setting, &size).await;
    let points = ((size.jobs - 1) * size.steps + size.long_run) * KEYS;
    let dir = handed_over(setting).await;
    println!("{} jobs, {points} points, filled in {:.0} s", size.jobs, begun.elapsed().as_secs_f64());

    // Killed, so that it finds what a crash leaves.
    let mut server = start(dir.path());
    let http = Http::of(&server);
    http.get("/jobs").await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let begun = Instant::now();
    let server = start(dir.path());
    let http = Http::of(&server);
    http.get("/jobs").await;
    report.at_most("from start to the first page of jobs", begun.elapsed().as_secs_f64(), 2.0, "s", size.slack);

    let jobs = |number: usize| format!("/jobs?limit={}", if number.is_multiple_of(2) { 20 } else { 100 });
    report.at_most("GET /jobs, p99", p99(http.times(300, jobs).await), 50.0, "ms", size.slack);
    let states = |number: usize| format!("/jobs?state={}", ["queued", "cancelled"][number % 2]);
    report.at_most("GET /jobs?state=, p99", p99(http.times(300, states).await), 50.0, "ms", size.slack);
    let run = |number: usize| format!("/jobs/job_0a{:024}/metrics", 2 + number % (size.jobs - 1));
    report.at_most("GET a run's metrics, p99", p99(http.times(300, run).await), 50.0, "ms", size.slack);
    let long = |_| format!("/jobs/job_0a{:024}/metrics?max_points=500", 1);
    let what = format!("GET the metrics of a run of {} steps, thinned to 500, p99", size.long_run);
    report.at_most(&what, p99(http.times(100, long).await), 50.0, "ms", size.slack);
    let events = |number: usize| format!("/jobs/job_0a{:024}/events?limit=100", 2 + number % (size.jobs - 1));
    report.at_most("GET a run's events, p99", p99(http.times(100, events).await), 50.0, "ms", size.slack);

    let rate = ingest(&http).await;
    report.at_least("metric points taken in", rate, 20_000.0, "points/s", size.slack);
    drop(server);
    drop(dir);

    let setting = Setting::new().await;
    setting.job().await;
    copies(&setting, 'b', size.queued).await;
    let dir = handed_over(setting).await;
    let server = start(dir.path());
    let http = Http::of(&server);
    let what = |what: &str| format!("{what} with {} jobs in the queue, p99", size.queued);
    report.at_most(&what("a claim"), p99(claims(&http, 300).await), 20.0, "ms", size.slack);
    report.at_most(&what("GET /jobs"), p99(http.times(200, jobs).await), 50.0, "ms", size.slack);
    drop(server);

    if let Ok(path) = std::env::var("RLOOD_SCALE_RESULTS") {
        let head = format!(
            "# A large database\n\n{} jobs, {points} metric points, {} queued jobs; {} cores. \
             `RLOOD_SCALE=full cargo test --release --test it -- scale:: --nocapture`\n\n| what | found | bar |\n|---|---|---|\n",
            size.jobs,
            size.queued,
            std::thread::available_parallelism().map_or(0, usize::from),
        );
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(path), head + &report.lines.join("\n") + "\n")
            .unwrap();
    }
    assert!(report.missed.is_empty(), "missed:\n{}", report.missed.join("\n"));
}

async fn registered(http: &Http) -> String {
    let worker = rlood::id::WorkerId::new().to_string();
    let register = json!({"worker": worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0.1.0"});
    http.post("/worker/register", &register).await.unwrap();
    worker
}

async fn claims(http: &Http, count: usize) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..count {
        let worker = registered(http).await;
        let begun = Instant::now();
        let claim = http.post("/worker/claim", &json!({"worker": worker, "wait_ms": 0})).await.unwrap();
        times.push(begun.elapsed());
        assert_eq!(claim["attempt"], 1, "{claim}");
    }
    times
}

/// Points a second, from four workers at once, in batches of 20 steps as a worker sends them.
async fn ingest(http: &Http) -> f64 {
    const BATCHES: u64 = 60;
    const STEPS: u64 = 20;
    let metrics: Value =
        names().iter().map(|name| (name.clone(), json!(0.123456789012))).collect::<serde_json::Map<_, _>>().into();
    let mut claimed = Vec::new();
    for _ in 0..4 {
        let worker = registered(http).await;
        let claim = http.post("/worker/claim", &json!({"worker": worker, "wait_ms": 0})).await.unwrap();
        claimed.push(claim["job"].as_str().unwrap().to_owned());
    }
    let begun = Instant::now();
    let senders = claimed.iter().map(|job| {
        let metrics = &metrics;
        async move {
            for batch in 0..BATCHES {
                let step = |number| json!({"type": "step", "step": batch * STEPS + number, "kind": "train", "metrics": metrics});
                let events: Vec<Value> = (1..=STEPS).map(step).collect();
                let body = json!({"attempt": 1, "batch": batch, "events": events, "log": ["a line"]});
                http.post(&format!("/worker/jobs/{job}/events"), &body).await;
                let beat = json!({"attempt": 1, "phase": "train", "status_reason": null, "step": batch, "eta_s": null});
                http.post(&format!("/worker/jobs/{job}/heartbeat"), &beat).await;
            }
        }
    });
    futures::future::join_all(senders).await;
    (4 * BATCHES * STEPS) as f64 * KEYS as f64 / begun.elapsed().as_secs_f64()
}
