//! Performance with a large database: time to serve after a start, cost of a claim, of a page of jobs and of a run's metrics, and
//! the ingest rate of metrics; each during other requests.
//!
//! ```text
//! cargo test --release --test it -- scale:: --nocapture                      a tenth of the size, bars with room for a busy machine
//! RLOOD_SCALE=full cargo test --release --test it -- scale:: --nocapture     10k jobs, 10M points, 100k queued jobs
//! ```
//!
//! The full form needs an idle machine and checks the real limits. `RLOOD_SCALE_RESULTS=benches/results/scale` writes the figures
//! (.md and .json); `RLOOD_SCALE_DIR=DIR` keeps the databases there and reuses them, so that only the first run creates them;
//! `RLOOD_BINARY=FILE` measures another binary than the tests' own.

mod report;
mod stock;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::processes::Server;
use report::Report;
use stock::{Stock, job_id, metric_names};

const TOKEN: &str = "the-token-of-the-workers-at-scale";

struct Size {
    jobs: usize,
    /// Steps of each job except the first.
    steps: usize,
    /// Steps of the first job.
    long_run: usize,
    queued: usize,
    /// Factor on the limits: 1 on an idle machine.
    slack: f64,
}

fn size() -> Size {
    match std::env::var("RLOOD_SCALE").as_deref() {
        Ok("full") => Size { jobs: 10_000, steps: 40, long_run: 10_000, queued: 100_000, slack: 1.0 },
        _ => Size { jobs: 1_000, steps: 40, long_run: 1_000, queued: 10_000, slack: 25.0 },
    }
}

fn p99(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[(times.len() * 99).div_ceil(100) - 1].as_secs_f64() * 1e3
}

#[derive(Clone)]
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

/// A measured request: its name, and its path by the request's number.
type Page<'a> = (&'static str, Box<dyn Fn(usize) -> String + 'a>);

/// Background load: a worker that reports and sends heartbeats, and a client that reads jobs. Stops when dropped.
struct Bustle {
    task: tokio::task::JoinHandle<()>,
    answered: Arc<AtomicUsize>,
}

impl Bustle {
    /// Starts the load on the copies with this prefix.
    async fn begin(http: &Http, prefix: char, jobs: usize) -> Self {
        let run = Run::claim(http).await;
        let answered = Arc::new(AtomicUsize::new(0));
        let (http, count) = (http.clone(), answered.clone());
        let task = tokio::spawn(async move {
            for number in 0.. {
                let job = job_id(prefix, 1 + number % jobs);
                match number % 5 {
                    0 => run.report(&http, number as u64, 4).await,
                    1 => drop(http.get(&format!("/jobs/{job}")).await),
                    2 => drop(http.get(&format!("/jobs/{job}/events?limit=20")).await),
                    3 => drop(http.get("/jobs?limit=20").await),
                    _ => drop(http.get(&format!("/jobs/{job}/metrics?max_points=200")).await),
                }
                count.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        Self { task, answered }
    }

    fn end(self) {
        assert!(!self.task.is_finished(), "the others were not answered");
        println!("{} other requests meanwhile", self.answered.load(Ordering::Relaxed));
        self.task.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_database_is_served_as_quickly_as_a_small_one() {
    let size = size();
    let mut report = Report::new(size.slack);
    let stock = Stock::history(&size).await;
    history(&mut report, &size, stock.path()).await;
    let stock = Stock::queue(&size).await;
    queue(&mut report, &size, stock.path()).await;
    report.write(&size);
    assert!(report.missed.is_empty(), "missed:\n{}", report.missed.join("\n"));
}

async fn history(report: &mut Report, size: &Size, data: &Path) {
    // Killed, so that the next start finds the state after a crash.
    let mut server = start(data);
    let http = Http::of(&server);
    http.get("/jobs").await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let begun = Instant::now();
    let server = start(data);
    let http = Http::of(&server);
    http.get("/jobs").await;
    report.at_most("from start to the first page of jobs", begun.elapsed().as_secs_f64(), 2.0, "s");

    let bustle = Bustle::begin(&http, 'a', size.jobs).await;
    let deep: Value = serde_json::from_str(&http.get("/jobs?limit=100").await).unwrap();
    let deep = deep["next"].as_str().unwrap().to_owned();
    let pages: [Page<'_>; 10] = [
        ("GET /jobs", Box::new(|_| "/jobs".to_owned())),
        ("GET /jobs?limit=100", Box::new(|_| "/jobs?limit=100".to_owned())),
        ("… after=", Box::new(move |_| format!("/jobs?after={deep}"))),
        (
            "… state=, each",
            Box::new(|number| {
                format!("/jobs?state={}", ["queued", "succeeded", "failed", "cancelled", "paused"][number % 5])
            }),
        ),
        ("… model=", Box::new(|number| format!("/jobs?model={}", ["org/tiny", "org/none"][number % 2]))),
        (
            "… name=, name_contains=, id_prefix=",
            Box::new(|number| match number % 4 {
                0 => "/jobs?name=copy".to_owned(),
                1 => "/jobs?name=none".to_owned(),
                2 => "/jobs?name_contains=none".to_owned(),
                _ => format!("/jobs?id_prefix={}", &job_id('a', 1 + number)[..29]),
            }),
        ),
        ("… metadata.KEY=, common, rare, none", Box::new(|number| format!("/jobs?metadata.{}", stock::label(number)))),
        (
            "… two labels, state and model",
            Box::new(|number| {
                let state = ["queued", "failed", "running"][number % 3];
                format!("/jobs?metadata.sweep=all&metadata.team=t{}&state={state}&model=org/tiny", number % 12)
            }),
        ),
        (
            "… state and model",
            Box::new(|number| {
                format!(
                    "/jobs?state={}&model={}",
                    ["running", "queued"][number % 2],
                    ["org/tiny", "org/none"][number / 2 % 2]
                )
            }),
        ),
        ("GET /jobs/courses of a page of 100", {
            let ids: Vec<String> = (1..=100).map(|number| job_id('a', number)).collect();
            Box::new(move |_| format!("/jobs/courses?ids={}", ids.join(",")))
        }),
    ];
    for (what, path) in &pages {
        report.at_most(&format!("{what}, p99"), p99(http.times(300, path).await), 50.0, "ms");
    }
    let run = |number: usize| job_id('a', 2 + number % (size.jobs - 1));
    let long = job_id('a', 1);
    let metrics: [Page<'_>; 7] = [
        ("GET a run's metrics", Box::new(|number| format!("/jobs/{}/metrics", run(number)))),
        ("… thinned to 20", Box::new(|number| format!("/jobs/{}/metrics?max_points=20", run(number)))),
        ("… of the long run, all", Box::new(|_| format!("/jobs/{long}/metrics"))),
        ("… of the long run, two keys", Box::new(|_| format!("/jobs/{long}/metrics?keys=reward,kl"))),
        ("… of the long run, thinned to 500", Box::new(|_| format!("/jobs/{long}/metrics?max_points=500"))),
        ("… of the long run, thinned to 4,000", Box::new(|_| format!("/jobs/{long}/metrics?max_points=4000"))),
        ("GET a run's events", Box::new(|number| format!("/jobs/{}/events?limit=100", run(number)))),
    ];
    for (what, path) in &metrics {
        report.at_most(&format!("{what}, p99"), p99(http.times(150, path).await), 50.0, "ms");
    }
    bustle.end();

    let rate = ingest(&http).await;
    report.at_least("metric points taken in", rate, 20_000.0, "points/s");
}

async fn queue(report: &mut Report, size: &Size, data: &Path) {
    let server = start(data);
    let http = Http::of(&server);
    let bustle = Bustle::begin(&http, 'b', size.queued).await;
    let what = |what: &str| format!("{what} with {} jobs in the queue, p99", size.queued);
    report.at_most(&what("a claim"), p99(claims(&http, 300).await), 20.0, "ms");
    let jobs = |number: usize| format!("/jobs?limit={}", if number.is_multiple_of(2) { 20 } else { 100 });
    report.at_most(&what("GET /jobs"), p99(http.times(200, jobs).await), 50.0, "ms");
    let one = |number: usize| format!("/jobs/{}", job_id('b', 1 + number * 37 % size.queued));
    report.at_most(&what("GET /jobs/{id} with its place"), p99(http.times(200, one).await), 50.0, "ms");
    bustle.end();
}

/// A job and its worker.
struct Run {
    job: String,
    attempt: u64,
    /// Number of the first batch; each batch is accepted once.
    first_batch: u64,
}

impl Run {
    async fn claim(http: &Http) -> Self {
        let worker = registered(http).await;
        let claim = http
            .post("/worker/claim", &json!({"worker": worker, "wait_ms": 0, "protocol": rlood::protocol::PROTOCOL}))
            .await
            .unwrap();
        let text = |name: &str| claim[name].as_str().unwrap().to_owned();
        Self { job: text("job"), attempt: claim["attempt"].as_u64().unwrap(), first_batch: 0 }
    }

    /// Reports some steps and sends a heartbeat.
    async fn report(&self, http: &Http, batch: u64, steps: u64) {
        let metrics: Value = metric_names()
            .iter()
            .map(|name| (name.clone(), json!(0.123456789012)))
            .collect::<serde_json::Map<_, _>>()
            .into();
        let step =
            |number| json!({"type": "step", "step": batch * steps + number, "kind": "train", "metrics": metrics});
        let events: Vec<Value> = (1..=steps).map(step).collect();
        let batch = self.first_batch + batch;
        let body = json!({"attempt": self.attempt, "batch": batch, "events": events, "log": ["a line"]});
        http.post(&format!("/worker/jobs/{}/events", self.job), &body).await;
        let beat =
            json!({"attempt": self.attempt, "phase": "train", "status_reason": null, "step": batch, "eta_s": null});
        http.post(&format!("/worker/jobs/{}/heartbeat", self.job), &beat).await;
    }
}

async fn registered(http: &Http) -> String {
    let worker = rlood::id::WorkerId::new().to_string();
    let register = json!({"worker": worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0.1.0", "protocol": rlood::protocol::PROTOCOL});
    http.post("/worker/register", &register).await.unwrap();
    worker
}

async fn claims(http: &Http, count: usize) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..count {
        let worker = registered(http).await;
        let begun = Instant::now();
        let claim = http
            .post("/worker/claim", &json!({"worker": worker, "wait_ms": 0, "protocol": rlood::protocol::PROTOCOL}))
            .await
            .unwrap();
        times.push(begun.elapsed());
        assert!(claim["attempt"].as_u64() >= Some(1), "{claim}");
    }
    times
}

/// Measures points per second from four concurrent workers, in batches of 20 steps as a worker sends them.
async fn ingest(http: &Http) -> f64 {
    const BATCHES: u64 = 60;
    const STEPS: u64 = 20;
    let mut runs = Vec::new();
    for _ in 0..4 {
        runs.push(Run::claim(http).await);
    }
    let begun = Instant::now();
    let senders = runs.iter().map(|run| async {
        for batch in 0..BATCHES {
            run.report(http, batch, STEPS).await;
        }
    });
    futures::future::join_all(senders).await;
    (runs.len() as u64 * BATCHES * STEPS) as f64 * metric_names().len() as f64 / begun.elapsed().as_secs_f64()
}
