//! A reward service fails and recovers, with real processes: the job pauses, the server pings the service, and the job resumes. A
//! job that a user paused stays paused.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use rlood::reward::signature::Key;
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, spec};

/// rlood's own delays, reduced to a fiftieth: the first ping comes after 0.1 s, then at most every 0.6 s.
const PACE: [&str; 2] = ["--reward-pace", "0.02"];

#[derive(Clone)]
struct Service {
    away: Arc<AtomicBool>,
    pings: Arc<AtomicUsize>,
    key: Arc<Key>,
    /// Requests during the outage, without pings.
    asked_away: Arc<Mutex<Vec<Value>>>,
}

async fn answer(State(service): State<Service>, headers: HeaderMap, body: Bytes) -> Response {
    let header = |name: &str| headers[name].to_str().unwrap();
    let now_s = jiff::Timestamp::now().as_second() as u64;
    let [id, at, signature] = ["webhook-id", "webhook-timestamp", "webhook-signature"].map(header);
    if service.key.verify(id, at, signature, &body, now_s).is_err() {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let request: Value = serde_json::from_slice(&body).unwrap();
    let is_ping = request["type"] == "reward.ping";
    service.pings.fetch_add(usize::from(is_ping), Ordering::SeqCst);
    if service.away.load(Ordering::SeqCst) {
        if !is_ping {
            service.asked_away.lock().unwrap().push(request);
        }
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    if is_ping {
        return StatusCode::NO_CONTENT.into_response();
    }
    // Slows the run down, so that a fast machine does not finish before the outage.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let samples = request["samples"].as_array().unwrap();
    let rewards: Vec<usize> = samples.iter().map(|sample| sample["completion"].as_str().unwrap().len() % 3).collect();
    axum::Json(json!({ "rewards": rewards })).into_response()
}

impl Service {
    async fn start(secret: &str) -> (Self, String) {
        let service = Self {
            away: Arc::default(),
            pings: Arc::default(),
            key: Arc::new(Key::parse(secret).unwrap()),
            asked_away: Arc::default(),
        };
        let app = axum::Router::new().fallback(answer).with_state(service.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/score", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (service, url)
    }

    fn be(&self, away: bool) {
        self.away.store(away, Ordering::SeqCst);
    }

    /// Returns after this many more pings.
    async fn pinged(&self, more: usize) {
        let enough = self.pings.load(Ordering::SeqCst) + more;
        for _ in 0..2000 {
            if self.pings.load(Ordering::SeqCst) >= enough {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("nobody asks whether the service is back");
    }
}

async fn history(server: &Server, job: &str) -> Vec<Value> {
    server.get(&format!("/jobs/{job}/events?limit=100")).await["data"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_job_waits_for_its_service_through_a_restart_and_goes_on_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let secret = Key::generate().unwrap();
    let (service, url) = Service::start(&secret).await;
    let mut server = Server::start_with(&data, "cpu", &PACE);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut spec = spec("tiny", 6);
    spec["checkpoints"]["every_steps"] = json!(1000);
    spec["rewards"] = json!([{"name": "r", "type": "webhook", "url": url, "secret": secret, "max_outage_s": 2}]);

    let job = server.submit(&spec).await;
    server.job_when(&job, "two steps", |view| view["step"].as_u64() >= Some(2)).await;
    service.be(true);
    let waiting = |view: &Value| view["status_reason"] == "waiting_for_reward";
    server.job_when(&job, "waiting_for_reward", waiting).await;
    let paused = server.job_in_state(&job, "paused").await;
    assert_eq!(paused["status_reason"], "reward_outage", "{paused}");
    // The paused job lost nothing: its completed steps are saved.
    assert_eq!(server.checkpoint_steps(&job).await, [paused["step"].as_u64().unwrap()]);
    let health = server.get(&format!("/jobs/{job}/rewards")).await;
    assert_ne!(health["data"][0]["breaker"]["state"], "closed", "{health}");
    assert!(health["data"][0]["errors"]["server_error"].as_u64() >= Some(5), "{health}");
    // The same request was repeated during the whole outage.
    let asked = std::mem::take(&mut *service.asked_away.lock().unwrap());
    assert!(asked.len() >= 5 && asked.iter().all(|request| *request == asked[0]), "{asked:?}");

    service.pinged(2).await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let server = Server::start_with(&data, "cpu", &PACE);
    service.pinged(2).await;
    assert_eq!(server.get(&format!("/jobs/{job}")).await["state"], "paused");
    assert_eq!(*service.asked_away.lock().unwrap(), Vec::<Value>::new(), "pings only");
    service.be(false);
    server.job_in_state(&job, "succeeded").await;
    let events = history(&server, &job).await;
    let resumed: Vec<&Value> = events.iter().filter(|event| event["type"] == "job.resumed").collect();
    assert_eq!(resumed.len(), 1, "{resumed:?}");
    assert_eq!(resumed[0]["data"], json!({"by": "server", "reason": "reward_outage"}));
}

#[tokio::test]
async fn what_a_user_paused_stays_paused_and_what_a_user_resumes_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let secret = Key::generate().unwrap();
    let (service, url) = Service::start(&secret).await;
    service.be(true);
    let server = Server::start_with(&dir.path().join("data"), "cpu", &PACE);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut spec = spec("tiny", 2);
    spec["rewards"] = json!([{"name": "r", "type": "webhook", "url": url, "secret": secret, "max_outage_s": 1}]);
    let [users, own] = [server.submit(&spec).await, server.submit(&spec).await];
    for job in [&users, &own] {
        server.job_when(job, "the outage", |view| view["status_reason"] == "reward_outage").await;
    }
    let view = server.post(&format!("/jobs/{users}/pause"), &json!({})).await;
    assert_eq!((&view["state"], &view["status_reason"]), (&json!("paused"), &Value::Null));
    // A user may resume the job early: it pauses again, and the server continues to ping.
    server.post(&format!("/jobs/{own}/resume"), &json!({})).await;
    server.job_when(&own, "the next attempt", |view| view["attempt"] == 2).await;
    server.job_when(&own, "the outage", |view| view["status_reason"] == "reward_outage").await;

    service.be(false);
    server.job_in_state(&own, "succeeded").await;
    // The other job had the same opportunities.
    let view = server.get(&format!("/jobs/{users}")).await;
    assert_eq!((&view["state"], &view["status_reason"], &view["attempt"]), (&json!("paused"), &Value::Null, &json!(1)));
    let pauses: Vec<Value> =
        history(&server, &users).await.into_iter().filter(|event| event["type"] == "job.paused").collect();
    assert_eq!(pauses[1]["data"]["reason"], Value::Null, "{pauses:?}");
    server.post(&format!("/jobs/{users}/resume"), &json!({})).await;
    server.job_in_state(&users, "succeeded").await;
}

#[tokio::test]
async fn a_service_is_asked_once_for_all_jobs_that_wait_for_it() {
    use sqlx::Connection;
    const JOBS: usize = 30;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let secret = Key::generate().unwrap();
    let (service, url) = Service::start(&secret).await;
    service.be(true);
    let mut server = Server::start_with(&data, "none", &PACE);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut jobs = Vec::new();
    for number in 0..JOBS {
        let mut spec = spec("tiny", 2);
        spec["rewards"] = json!([{"name": format!("r{number}"), "type": "webhook", "url": url, "secret": secret}]);
        // With other credentials it may be a different service.
        if number == 0 {
            spec["rewards"][0]["headers"] = json!({"x-tenant": "b"});
        }
        jobs.push(server.submit(&spec).await);
    }
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let database = rlood::files::DataDir::open(&data).unwrap().database();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(database);
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let pause = "UPDATE jobs SET state = 'paused', status_reason = 'reward_outage' WHERE state = 'queued'";
    assert_eq!(sqlx::query(pause).execute(&mut connection).await.unwrap().rows_affected(), JOBS as u64);
    connection.close().await.unwrap();

    let begun = std::time::Instant::now();
    let server = Server::start_with(&data, "none", &PACE);
    service.pinged(6).await;
    // The first ping after 0.1 s, the next 0.2 s later, then more slowly: two credentials cause two pings per round.
    let rounds = 1 + begun.elapsed().as_millis() / 200;
    let pings = service.pings.load(Ordering::SeqCst);
    assert!(pings as u128 <= 2 * rounds, "{pings} pings in {rounds} rounds");
    // A job with new secrets is checked with these.
    let other = Key::generate().unwrap();
    let renewed = json!({"reward_secrets": {"r1": {"secret": other}}});
    let patched = reqwest::Client::new().patch(format!("{}/jobs/{}", server.url, jobs[1])).json(&renewed).send().await;
    assert!(patched.unwrap().status().is_success());
    service.be(false);
    for job in jobs.iter().take(1).chain(&jobs[2..]) {
        server.job_when(job, "the queue", |view| view["state"] == "queued").await;
    }
    let refused = server.get(&format!("/jobs/{}", jobs[1])).await;
    assert_eq!(refused["state"], "paused", "the service knows no such secret: {refused}");
}
