//! Asynchronous reward answers: callbacks with a token per request, status URLs, deadlines, restarts of all processes.
//!
//! Longer than other files: one asynchronous service, tested through the router, the client and real processes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use rlood::callback::{Accepted, CallbackTerms, Later};
use rlood::event::Event;
use rlood::id::{JobId, RewardRequestId};
use rlood::outgoing::OutgoingPolicy;
use rlood::protocol::{JournalEntry, Outcome, RewardAnswer};
use rlood::reward::signature::Key;
use rlood::reward::{JobContext, RewardFailure, Rewards, Scored};
use rlood::rollout::{RewardValue, RolloutId};
use rlood::spec::RewardSecrets;
use rlood::store::clock_ms;
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, signal, spec};
use crate::server::{self, job, with};
use crate::service::{ok, plan, samples, text, truth};

/// Maximum time for a cancel or a pause to take effect.
const HONOURED: Duration = Duration::from_secs(12);
const PUBLIC: &str = "https://rlood.example/base";

/// One call to a service: `POST` to score, `GET` for a status.
struct Call {
    method: Method,
    path: String,
    headers: HeaderMap,
    bytes: Bytes,
    body: Value,
}

type Answer = axum::http::Response<axum::body::Body>;
type Reply = dyn Fn(&Call) -> Answer + Send + Sync;

#[derive(Clone)]
struct Shared {
    calls: Arc<Mutex<Vec<Arc<Call>>>>,
    reply: Arc<Reply>,
}

/// A service that records every call and answers as the test specifies.
struct Service {
    url: String,
    calls: Arc<Mutex<Vec<Arc<Call>>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Service {
    async fn start(reply: impl Fn(&Call) -> Answer + Send + Sync + 'static) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let calls = Arc::<Mutex<Vec<Arc<Call>>>>::default();
        let shared = Shared { calls: calls.clone(), reply: Arc::new(reply) };
        let answer = |State(shared): State<Shared>, method: Method, uri: Uri, headers: HeaderMap, bytes: Bytes| async move {
            let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            let call = Arc::new(Call { method, path: uri.path().to_owned(), headers, bytes, body });
            shared.calls.lock().unwrap().push(call.clone());
            tokio::task::spawn_blocking(move || (shared.reply)(&call)).await.unwrap()
        };
        let app = Router::new().fallback(answer).with_state(shared);
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, calls, task }
    }

    fn calls(&self, method: Method) -> Vec<Arc<Call>> {
        self.calls.lock().unwrap().iter().filter(|call| call.method == method).cloned().collect()
    }

    /// Returns the nth score request (from 1) as soon as it has arrived.
    async fn request(&self, number: usize) -> Arc<Call> {
        let begun = Instant::now();
        loop {
            let found = self.calls(Method::POST).get(number - 1).cloned();
            if let Some(call) = found {
                return call;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "there is no request {number}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn accepted(more: Value) -> Answer {
    text(202, more.to_string())
}

/// Returns the sample ids of a request.
fn ids(request: &Value) -> Vec<String> {
    let samples = request["samples"].as_array().unwrap().iter();
    samples.map(|sample| sample["sample_id"].as_str().unwrap().to_owned()).collect()
}

fn result(id: &str, reward: f64) -> Value {
    json!({"sample_id": id, "reward": reward})
}

// ---- the address, called through the router

/// A server with a public address, a running job, and a request that may be answered later.
struct Waiting {
    server: server::Server,
    job: JobId,
    id: String,
    token: String,
}

impl Waiting {
    async fn new(left_ms: u64) -> Self {
        let server = server::Server::start_with(|config| config.public_url = Some(PUBLIC.to_owned())).await;
        let job = server.create(job()).await;
        server.claim().await;
        let mut waiting = Self { server, job, id: String::new(), token: String::new() };
        waiting.id = waiting.send("k1", left_ms).await;
        waiting.token = waiting.terms().await.token(&waiting.id);
        waiting
    }

    async fn terms(&self) -> CallbackTerms {
        let key = self.server.state.store.server_secret("reward_callbacks", "a-key").await.unwrap();
        CallbackTerms { public_url: None, key }
    }

    /// The worker writes a request to the journal.
    async fn send(&self, key: &str, left_ms: u64) -> String {
        let id = RewardRequestId::new().to_string();
        let sample_ids = ["s_0", "s_1", "s_2"].map(str::to_owned).to_vec();
        let later = Some(Later { left_ms, sample_ids, accepted: None });
        self.append(JournalEntry::Request {
            rollout: RolloutId::train(1),
            reward: "r".into(),
            key: key.into(),
            id: id.clone(),
            body: "{}".into(),
            later,
        })
        .await;
        id
    }

    async fn append(&self, entry: JournalEntry) {
        self.server.state.store.journal_append(self.job, 1, &[entry], clock_ms()).await.unwrap();
    }

    async fn post_raw(&self, id: &str, token: Option<&str>, body: &str) -> server::Answer {
        let mut request = Request::builder().method("POST").uri(format!("/reward-callbacks/{id}"));
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        self.server.send(request.body(body.to_owned().into()).unwrap()).await
    }

    async fn post(&self, body: Value) -> server::Answer {
        self.post_raw(&self.id, Some(&self.token), &body.to_string()).await
    }

    async fn arrived(&self) -> Value {
        let chunk = self.server.state.store.callback_arrived(&self.id).await.unwrap();
        chunk.entries.iter().map(|entry| serde_json::from_str::<Value>(&entry.result).unwrap()).collect()
    }
}

fn counted(accepted: u64, duplicate: u64, unknown: u64) -> Value {
    json!({"accepted": accepted, "duplicate": duplicate, "unknown": unknown})
}

#[tokio::test]
async fn parts_accumulate_the_first_result_of_a_sample_stays_and_done_ends_it() {
    let waiting = Waiting::new(60_000).await;
    let answer = waiting.post(json!({"results": [result("s_0", 0.5), result("s_9", 1.0), result("s_0", 0.7)]})).await;
    assert_eq!((answer.status, &answer.body), (StatusCode::OK, &counted(1, 1, 1)), "{}", answer.text);
    let answer = waiting.post(json!({"results": [result("s_0", 9.0), result("s_1", -1.5)]})).await;
    assert_eq!(answer.body, counted(1, 1, 0));
    assert_eq!(waiting.arrived().await, json!([result("s_0", 0.5), result("s_1", -1.5)]));
    // The final call, and the same call again after its response was lost.
    let end = json!({"results": [result("s_1", -1.5)], "done": true});
    for _ in 0..2 {
        let answer = waiting.post(end.clone()).await;
        assert_eq!((answer.status, &answer.body), (StatusCode::OK, &counted(0, 1, 0)));
    }
    let page = waiting.server.state.store.callback_updates(waiting.job, 1, 0).await.unwrap();
    let samples: Vec<Option<&str>> =
        page.updates.iter().map(|update| update.entry.as_ref().map(|entry| entry.sample_id.as_str())).collect();
    assert_eq!(samples, [Some("s_0"), Some("s_1"), None], "the updates of the worker");
    let late = waiting.post(json!({"results": [result("s_2", 1.0)]})).await;
    assert_eq!(late.status, StatusCode::GONE, "{}", late.text);
    assert_eq!(waiting.arrived().await.as_array().unwrap().len(), 2, "what is refused is not kept");
}

#[tokio::test]
async fn who_may_answer_and_until_when() {
    let waiting = Waiting::new(60_000).await;
    let body = json!({"results": [result("s_0", 0.5)]}).to_string();
    let other = waiting.send("k2", 60_000).await;
    let others_token = waiting.terms().await.token(&other);
    for token in [None, Some("x"), Some(""), Some(others_token.as_str())] {
        let answer = waiting.post_raw(&waiting.id, token, &body).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{token:?}: {}", answer.text);
        assert!(answer.headers.contains_key("www-authenticate"));
    }
    assert_eq!(waiting.arrived().await, json!([]));
    for unknown in [RewardRequestId::new().to_string(), "nonsense".to_owned()] {
        let answer = waiting.post_raw(&unknown, Some(&waiting.token), &body).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{}", answer.text);
    }
    // A call after the deadline.
    let late = waiting.send("k3", 0).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    let token = waiting.terms().await.token(&late);
    let answer = waiting.post_raw(&late, Some(&token), &body).await;
    assert_eq!((answer.status, &answer.body["code"]), (StatusCode::GONE, &json!("gone")), "{}", answer.text);
    // After completion: a call with stored results may be repeated, any other is too late.
    assert_eq!(waiting.post_raw(&waiting.id, Some(&waiting.token), &body).await.status, StatusCode::OK);
    let answered = JournalEntry::Answer {
        rollout: RolloutId::train(1),
        key: "k1".into(),
        id: waiting.id.clone(),
        answer: RewardAnswer::Body { body: "{}".into() },
    };
    waiting.append(answered).await;
    assert_eq!(waiting.post_raw(&waiting.id, Some(&waiting.token), &body).await.body, counted(0, 1, 0));
    let answer = waiting.post(json!({"results": [result("s_1", 0.5)]})).await;
    assert_eq!(answer.status, StatusCode::GONE, "{}", answer.text);
    // After the job has ended.
    waiting.server.state.store.job_finish(waiting.job, 1, Outcome::Succeeded, clock_ms()).await.unwrap();
    for (id, token) in [(&waiting.id, &waiting.token), (&other, &others_token)] {
        let answer = waiting.post_raw(id, Some(token), &body).await;
        assert_eq!(answer.status, StatusCode::GONE, "{}", answer.text);
    }
    assert_eq!(waiting.post_raw(&other, Some("x"), &body).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_body_with_anything_wrong_in_it_is_refused_whole_and_says_where() {
    let waiting = Waiting::new(60_000).await;
    for (body, pointers) in [
        (
            r#"{"results": [{"sample_id": "s_0", "reward": 1}, {"sample_id": "s_1", "reward": NaN}]}"#,
            ["/results/1/reward invalid_value"].as_slice(),
        ),
        (
            r#"{"results": [{"sample_id": "s_0", "reward": 1e999}, {"reward": 1}]}"#,
            &["/results/0/reward invalid_value", "/results/1/sample_id required"],
        ),
        (
            r#"{"results": [{"sample_id": "s_0", "reward": "1"}], "done": "yes"}"#,
            &["/done invalid_type", "/results/0/reward invalid_value"],
        ),
        (r#"{"rewards": [1, 2, 3]}"#, &["/results required"]),
        ("[1, 2, 3]", &[" invalid_type"]),
        ("not JSON", &[" syntax"]),
        ("", &[" syntax"]),
    ] {
        let answer = waiting.post_raw(&waiting.id, Some(&waiting.token), body).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{body}: {}", answer.text);
        assert_eq!(server::pointers(&answer), pointers, "{body}");
    }
    assert_eq!(waiting.arrived().await, json!([]));
}

#[tokio::test]
async fn a_service_needs_no_key_and_no_token_is_stored() {
    let waiting = Waiting::new(60_000).await;
    let mut config = (*waiting.server.state.config).clone();
    config.api_key = Some("an-admin-key-of-some-length".to_owned());
    let mut state = waiting.server.state.clone();
    state.config = Arc::new(config);
    let router = rlood::http::router(state);
    let keyed = server::Server { router, state: waiting.server.state.clone(), dir: tempfile::tempdir().unwrap() };
    let call = |path: String| {
        let body = json!({"results": [result("s_0", 0.5)]}).to_string();
        let authorization = format!("Bearer {}", waiting.token);
        Request::builder().method("POST").uri(path).header("authorization", authorization).body(body.into()).unwrap()
    };
    let answer = keyed.send(call(format!("/reward-callbacks/{}", waiting.id))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    assert_eq!(keyed.send(call("/jobs".to_owned())).await.status, StatusCode::UNAUTHORIZED);
    waiting.server.state.store.close().await;
    for entry in std::fs::read_dir(waiting.server.dir.path().join("data")).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            let bytes = std::fs::read(entry.path()).unwrap();
            let found = bytes.windows(waiting.token.len()).any(|window| window == waiting.token.as_bytes());
            assert!(!found, "the token stands in {:?}", entry.path());
        }
    }
}

#[tokio::test]
async fn the_next_attempt_learns_what_was_taken_and_how_long_it_is_waited_for() {
    let waiting = Waiting::new(60_000).await;
    let other = waiting.send("k2", 3_600_000).await;
    waiting.send("k3", 1_000).await;
    let promise = Accepted { status_url: Some("/s".into()), eta_ms: Some(5) };
    let (rollout, id) = (RolloutId::train(1), waiting.id.clone());
    waiting.append(JournalEntry::Accepted { rollout, key: "k1".into(), id, accepted: promise.clone() }).await;
    let token = waiting.terms().await.token(&other);
    let body = json!({"results": [result("s_0", 0.5)]}).to_string();
    assert_eq!(waiting.post_raw(&other, Some(&token), &body).await.status, StatusCode::OK);
    let now = clock_ms();
    let page = waiting.server.state.store.journal_page(waiting.job, 1, 0, now + 30_000).await.unwrap();
    let later: Vec<Later> = page
        .entries
        .into_iter()
        .map(|entry| match entry {
            JournalEntry::Request { later: Some(later), .. } => later,
            other => panic!("{other:?}"),
        })
        .collect();
    let accepted: Vec<_> = later.iter().map(|later| later.accepted.clone()).collect();
    assert_eq!(accepted, [Some(promise), Some(Accepted::default()), None], "results are as good as a 202");
    assert!((20_000..=30_000).contains(&later[0].left_ms), "{later:?}");
    assert!((3_560_000..=3_570_000).contains(&later[1].left_ms) && later[2].left_ms == 0, "{later:?}");
    assert_eq!(later[0].sample_ids, ["s_0", "s_1", "s_2"]);
    let unknown = JournalEntry::Accepted { rollout, key: "k9".into(), id: other, accepted: Accepted::default() };
    let refused = waiting.server.state.store.journal_append(waiting.job, 1, &[unknown], clock_ms()).await;
    assert!(matches!(refused, Err(rlood::store::StoreError::NotFound { .. })), "{refused:?}");
}

// ---- status addresses, without a server

async fn score_with(
    service: &Service,
    secrets: RewardSecrets,
    changes: Value,
) -> (Result<Scored, RewardFailure>, Vec<Event>) {
    let plans = [plan("r", &format!("{}/score", service.url), changes)];
    let outgoing = OutgoingPolicy::parse(&["loopback"]).unwrap();
    let rewards = Rewards::build(&plans, &BTreeMap::from([("r".to_owned(), secrets)]), &outgoing).unwrap();
    let mut notices = rewards.notices().unwrap();
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(1), probe: false };
    let scored = rewards.score(&job, &samples(4, 2)).await;
    assert!(!rewards.waiting());
    let mut told = Vec::new();
    while let Ok(notice) = notices.try_recv() {
        told.push(notice);
    }
    (scored, told)
}

async fn score(service: &Service, changes: Value) -> Result<Scored, RewardFailure> {
    score_with(service, RewardSecrets::default(), changes).await.0
}

fn values(scored: &Scored) -> Vec<RewardValue> {
    scored.scores.iter().map(|score| score.values[0]).collect()
}

fn numbers(values: &[f64]) -> Vec<RewardValue> {
    values.iter().copied().map(RewardValue::Number).collect()
}

#[tokio::test]
async fn a_status_address_is_looked_at_until_it_shows_everything() {
    let looks = AtomicUsize::new(0);
    let service = Service::start(move |call| match (&call.method, looks.load(Ordering::SeqCst)) {
        (&Method::POST, _) => accepted(json!({"id": "their-own", "eta_ms": 100, "status_url": "/status/7?x=1"})),
        (_, look) => {
            looks.fetch_add(1, Ordering::SeqCst);
            match look {
                0 => Response::builder().status(202).header("retry-after", "1").body("".into()).unwrap(),
                1 => text(503, "busy"),
                2 => ok(&json!({"results": [result("s_1", 1.0), result("s_9", 9.0)], "eta_ms": 1})),
                _ => ok(&json!({"results": [result("s_1", 7.0), result("s_0", 0.0), result("s_2", 2.0),
                                            {"sample_id": "s_3", "reward": null, "error": {"code": "no"}}], "done": true})),
            }
        }
    })
    .await;
    let secret = Key::generate().unwrap();
    let headers = BTreeMap::from([("authorization".to_owned(), "Bearer t".to_owned())]);
    let secrets = RewardSecrets { secret: Some(secret.clone()), headers, ..RewardSecrets::default() };
    let (scored, _) = score_with(&service, secrets, json!({})).await;
    let mut expected = numbers(&[0.0, 1.0, 2.0]);
    expected.push(RewardValue::Missing);
    assert_eq!(values(&scored.unwrap()), expected, "the first result of a sample stays");
    let posts = service.calls(Method::POST);
    assert_eq!(posts.len(), 1, "a request that was taken is not sent again");
    assert_eq!(posts[0].body["reply"], json!({"modes": ["sync"]}), "no public address, no callback");
    let looks = service.calls(Method::GET);
    assert_eq!((looks.len(), looks[0].path.as_str()), (4, "/status/7"));
    let header = |name: &str| looks[0].headers[name].to_str().unwrap().to_owned();
    assert_eq!(
        (header("webhook-id"), header("authorization")),
        (posts[0].body["id"].as_str().unwrap().into(), "Bearer t".into())
    );
    let now = jiff::Timestamp::now().as_second() as u64;
    let key = Key::parse(&secret).unwrap();
    key.verify(&header("webhook-id"), &header("webhook-timestamp"), &header("webhook-signature"), b"", now).unwrap();
}

#[tokio::test]
async fn the_shorthands_of_a_whole_answer_are_read_at_a_status_address() {
    for body in [json!({"rewards": [0, 1, 2, 3]}), json!([0, 1, 2, 3]), json!({"scores": [0, 1, 2, 3], "status": "ok"})]
    {
        let service = Service::start(move |call| match call.method {
            Method::POST => accepted(json!({"status_url": "status", "eta_ms": 0})),
            _ => ok(&body),
        })
        .await;
        assert_eq!(values(&score(&service, json!({})).await.unwrap()), numbers(&[0.0, 1.0, 2.0, 3.0]));
    }
}

#[tokio::test]
async fn a_request_that_the_service_lost_is_sent_again_with_the_same_id_and_bytes() {
    let posts = AtomicUsize::new(0);
    let service = Service::start(move |call| match call.method {
        Method::POST if posts.fetch_add(1, Ordering::SeqCst) > 0 => ok(&truth(&call.body)),
        Method::POST => accepted(json!({"status_url": "/status", "eta_ms": 0})),
        _ => text(404, "who?"),
    })
    .await;
    assert_eq!(values(&score(&service, json!({})).await.unwrap()), numbers(&[0.0, 1.0, 2.0, 3.0]));
    let posts = service.calls(Method::POST);
    assert_eq!((posts.len(), &posts[0].bytes), (2, &posts[1].bytes));
    // A service that never finishes: the samples are missing, with the reason.
    let service = Service::start(|call| match call.method {
        Method::POST => accepted(json!({"status_url": "/status", "eta_ms": 0})),
        _ => text(410, ""),
    })
    .await;
    let failure = score(&service, json!({"max_invalid_tries": 1})).await.unwrap_err();
    assert!(failure.to_string().contains("lost it"), "{failure}");
    assert_eq!(service.calls(Method::POST).len(), 2);
}

#[tokio::test]
async fn what_is_missing_at_the_deadline_is_asked_again_alone_and_two_silent_deadlines_pause() {
    let service = Service::start(|call| match call.method {
        Method::POST if ids(&call.body) == ["s_3"] => ok(&truth(&call.body)),
        Method::POST => accepted(json!({"status_url": "/status", "eta_ms": 0})),
        _ => ok(&json!({"results": [result("s_0", 0.0), result("s_1", 1.0), result("s_2", 2.0)]})),
    })
    .await;
    let (scored, told) =
        score_with(&service, RewardSecrets::default(), json!({"deadline_ms": 1500, "timeout_ms": 1000})).await;
    assert_eq!(values(&scored.unwrap()), numbers(&[0.0, 1.0, 2.0, 3.0]));
    let posts = service.calls(Method::POST);
    assert_eq!((posts.len(), ids(&posts[1].body)), (2, vec!["s_3".to_owned()]));
    assert_ne!(posts[0].body["id"], posts[1].body["id"]);
    assert!(
        matches!(&told[..], [Event::Warning { code, message, .. }] if code == "reward_late" && message.contains("3 of 4")),
        "{told:?}"
    );

    let silent = Service::start(|call| match call.method {
        Method::POST => accepted(json!({"status_url": "/status", "eta_ms": 0})),
        _ => text(204, ""),
    })
    .await;
    let failure = score(&silent, json!({"deadline_ms": 800, "timeout_ms": 800})).await.unwrap_err();
    assert_eq!(failure.pause_reason(), Some("reward_outage"), "{failure}");
    assert!(failure.to_string().contains("0 of 4 results"), "{failure}");
    assert_eq!(silent.calls(Method::POST).len(), 2);
}

#[tokio::test]
async fn a_status_address_is_held_to_the_rules_on_addresses() {
    let promise = |status_url: String| {
        Service::start(move |call| match call.method {
            Method::POST => accepted(json!({"status_url": status_url, "eta_ms": 0})),
            _ => text(500, ""),
        })
    };
    for (status_url, why) in [
        ("http://169.254.169.254/latest/meta-data", "link-local"),
        ("http://10.0.0.1/", "private"),
        ("file:///etc/passwd", "scheme"),
        ("http://user:pass@127.0.0.1/", "user name or password"),
    ] {
        let service = promise(status_url.to_owned()).await;
        let failure = score(&service, json!({})).await.unwrap_err();
        assert!(failure.to_string().contains(why), "{status_url}: {failure}");
        assert!(service.calls(Method::GET).is_empty());
    }
    // For another origin, the service's own headers are not sent and redirects are not followed.
    let elsewhere =
        Service::start(|_| Response::builder().status(307).header("location", "/other").body("".into()).unwrap()).await;
    let service = promise(format!("{}/status", elsewhere.url)).await;
    let headers = BTreeMap::from([("authorization".to_owned(), "Bearer hidden".to_owned())]);
    let secrets = RewardSecrets { headers, ..RewardSecrets::default() };
    let (failure, _) = score_with(&service, secrets, json!({"max_invalid_tries": 1})).await;
    let failure = failure.unwrap_err().to_string();
    assert!(failure.contains("redirects are not followed"), "{failure}");
    let looks = elsewhere.calls(Method::GET);
    assert!(
        looks.len() >= 2
            && looks.iter().all(|call| call.path == "/status" && !call.headers.contains_key("authorization"))
    );
    assert!(service.calls(Method::POST).iter().all(|call| call.headers["authorization"] == "Bearer hidden"));
}

#[tokio::test]
async fn while_a_secret_is_rotated_both_sign() {
    let service = Service::start(|call| ok(&truth(&call.body))).await;
    let (new, old) = (Key::generate().unwrap(), Key::generate().unwrap());
    let secrets =
        RewardSecrets { secret: Some(new.clone()), previous_secret: Some(old.clone()), headers: BTreeMap::new() };
    score_with(&service, secrets, json!({})).await.0.unwrap();
    let call = service.request(1).await;
    let header = |name: &str| call.headers[name].to_str().unwrap();
    let signatures: Vec<&str> = header("webhook-signature").split(' ').collect();
    let now = jiff::Timestamp::now().as_second() as u64;
    assert_eq!(signatures.len(), 2);
    for (secret, signature) in [(&new, signatures[0]), (&old, signatures[1])] {
        let key = Key::parse(secret).unwrap();
        key.verify(header("webhook-id"), header("webhook-timestamp"), signature, &call.bytes, now).unwrap();
        key.verify(header("webhook-id"), header("webhook-timestamp"), header("webhook-signature"), &call.bytes, now)
            .unwrap();
    }
}

#[tokio::test]
async fn both_secrets_are_checked_and_never_shown() {
    let server = server::Server::start().await;
    let reward = |more: Value| {
        let mut reward = json!({"type": "webhook", "url": "http://127.0.0.1:9/"});
        reward.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with(job(), "rewards", json!([reward]))
    };
    let old = Key::generate().unwrap();
    for (more, pointer) in [
        (json!({"previous_secret": old}), "/rewards/0/previous_secret conflict"),
        (json!({"secret": old, "previous_secret": old}), "/rewards/0/previous_secret conflict"),
        (json!({"secret": server::SECRET, "previous_secret": "x"}), "/rewards/0/previous_secret invalid_value"),
        (json!({"secret": server::SECRET, "previous_secret": 7}), "/rewards/0/previous_secret invalid_type"),
    ] {
        let answer = server.post("/jobs", reward(more)).await;
        assert_eq!(server::pointers(&answer), [pointer], "{}", answer.text);
        assert!(!answer.text.contains(&old));
    }
    let id = server.create(reward(json!({"secret": server::SECRET, "previous_secret": old}))).await;
    for path in [format!("/jobs/{id}"), format!("/jobs/{id}/config"), format!("/jobs/{id}/events")] {
        let answer = server.get(&path).await;
        assert!(
            answer.status == 200 && !answer.text.contains(&old) && !answer.text.contains("previous_secret"),
            "{path}: {}",
            answer.text
        );
    }
    let secrets = server.state.store.job_secrets(id).await.unwrap();
    assert_eq!(secrets["webhook"].previous_secret.as_ref(), Some(&old));

    // An existing job gets new secrets; its next claim uses them.
    let patch = async |secrets: Value| {
        server.call("PATCH", &format!("/jobs/{id}"), Some(json!({"reward_secrets": secrets})), None).await
    };
    for (secrets, pointer) in [
        (json!({"other": {"secret": old}}), "/reward_secrets/other unknown_reward"),
        (json!({"webhook": {"secret": "x"}}), "/reward_secrets/webhook/secret invalid_value"),
        (json!({"webhook": {"secrets": old}}), "/reward_secrets/webhook/secrets unknown_field"),
        (json!({"webhook": old}), "/reward_secrets/webhook invalid_type"),
    ] {
        let answer = patch(secrets).await;
        assert_eq!(server::pointers(&answer), [pointer], "{}", answer.text);
    }
    let new = Key::generate().unwrap();
    let answer = patch(json!({"webhook": {"secret": new, "previous_secret": server::SECRET}})).await;
    assert!(answer.status == 200 && !answer.text.contains(&new), "{}", answer.text);
    let events = server.get(&format!("/jobs/{id}/events")).await.text;
    assert!(events.contains("reward_secrets") && !events.contains(&new), "{events}");
    let secrets = &server.state.store.job_secrets(id).await.unwrap()["webhook"];
    assert_eq!(
        (secrets.secret.as_deref(), secrets.previous_secret.as_deref()),
        (Some(new.as_str()), Some(server::SECRET))
    );
    // The end of the rotation.
    assert_eq!(patch(json!({"webhook": {"secret": new}})).await.status, 200);
    let secrets = &server.state.store.job_secrets(id).await.unwrap()["webhook"];
    assert_eq!((secrets.secret.as_deref(), secrets.previous_secret.as_deref()), (Some(new.as_str()), None));
}

// ---- real processes

/// A service's callback client: sends results to the server's address.
struct Caller {
    http: reqwest::Client,
    server: String,
}

impl Caller {
    fn new(server: &Server) -> Self {
        Self { http: reqwest::Client::builder().no_proxy().build().unwrap(), server: server.url.clone() }
    }

    /// Sends to the path of the request's reply, without the public host, for which no proxy exists here.
    async fn send(&self, request: &Value, body: Value) -> (u16, Value) {
        self.send_as(request, request["reply"]["token"].as_str().unwrap(), body).await
    }

    async fn send_as(&self, request: &Value, token: &str, body: Value) -> (u16, Value) {
        let path = request["reply"]["callback_url"].as_str().unwrap().strip_prefix(PUBLIC).unwrap();
        let sent =
            self.http.post(format!("{}{path}", self.server)).bearer_auth(token).json(&body).send().await.unwrap();
        (sent.status().as_u16(), sent.json().await.unwrap())
    }
}

fn later_spec(service: &Service, steps: u64, deadline_ms: u64) -> Value {
    let mut spec = spec("tiny", steps);
    spec["rewards"] = json!([{"name": "people", "type": "webhook", "url": format!("{}/score", service.url),
                              "deadline_ms": deadline_ms}]);
    spec
}

fn waits(view: &Value) -> bool {
    view["state"] == "running" && view["status_reason"] == "waiting_for_reward"
}

/// Returns all results of a request, with the rewards 0, 1, 2 …
fn everything(request: &Value) -> Vec<Value> {
    ids(request).iter().enumerate().map(|(at, id)| result(id, at as f64)).collect()
}

#[tokio::test]
async fn hours_long_answers_survive_every_restart_and_nothing_is_sent_twice() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let service = Service::start(|_| accepted(json!({"eta_ms": 86_400_000}))).await;
    let flags = ["--public-url", PUBLIC];
    let mut server = Server::start_with(&data, "cpu", &flags);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let job = server.submit(&later_spec(&service, 2, 86_400_000)).await;
    let request = service.request(1).await.body.clone();
    assert_eq!(request["reply"]["modes"], json!(["sync", "async"]));
    assert_eq!(request["deadline_ms"], 86_400_000_u64);
    server.job_when(&job, "waiting_for_reward", waits).await;
    let all = everything(&request);
    let caller = Caller::new(&server);
    assert_eq!(caller.send_as(&request, "wrong", json!({"results": all})).await.0, 401);
    let (status, body) = caller.send(&request, json!({"results": all[..1]})).await;
    assert_eq!((status, &body["accepted"]), (200, &json!(1)), "{body}");

    // A pause takes effect while the request waits, and the wait continues afterwards.
    let begun = Instant::now();
    server.post(&format!("/jobs/{job}/pause"), &json!({})).await;
    server.job_in_state(&job, "paused").await;
    assert!(begun.elapsed() < HONOURED, "{:?}", begun.elapsed());
    assert_eq!(caller.send(&request, json!({"results": all[1..2]})).await.0, 200, "while the job is paused");
    server.post(&format!("/jobs/{job}/resume"), &json!({})).await;
    server.job_when(&job, "waiting_for_reward", waits).await;

    // SIGKILL to the worker.
    signal("KILL", server.worker_pids(1).await[0]);
    server.job_when(&job, "another attempt that waits", |view| waits(view) && view["attempt"] == 3).await;

    // SIGKILL to the server; the other results arrive while it is down.
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let server = Server::start_with(&data, "none", &flags);
    let caller = Caller::new(&server);
    let mut rest: Vec<Value> = all[2..].to_vec();
    rest.push(result(all[0]["sample_id"].as_str().unwrap(), 99.0));
    let (status, body) = caller.send(&request, json!({"results": rest, "done": true})).await;
    assert_eq!((status, &body["accepted"], &body["duplicate"]), (200, &json!(all.len() - 2), &json!(1)), "{body}");
    drop(server);
    let server = Server::start_with(&data, "cpu", &flags);
    let caller = Caller::new(&server);
    let second = service.request(2).await.body.clone();
    assert_ne!(second["id"], request["id"], "the first is answered");
    assert_eq!(second["job"]["step"], 2);
    assert_eq!(
        caller.send(&second, json!({"results": everything(&second)})).await.0,
        200,
        "all of it ends it without done"
    );
    server.job_in_state(&job, "succeeded").await;
    assert_eq!(service.calls(Method::POST).len(), 2, "nothing was sent twice");
    let (status, body) = caller.send(&request, json!({"results": all})).await;
    assert_eq!((status, &body["code"]), (410, &json!("gone")));

    // The first results that were sent are the ones that were trained on.
    let page = server.get(&format!("/jobs/{job}/samples?step=1")).await;
    let mut rewards: Vec<f64> =
        page["data"].as_array().unwrap().iter().map(|sample| sample["rewards"]["people"].as_f64().unwrap()).collect();
    rewards.sort_by(f64::total_cmp);
    assert_eq!(rewards, (0..all.len()).map(|at| at as f64).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_service_may_answer_before_its_202_and_may_be_cancelled_at_any_time() {
    let dir = tempfile::tempdir().unwrap();
    let address: Arc<Mutex<String>> = Arc::default();
    let server_url = address.clone();
    let service = Service::start(move |call| {
        let request = call.body.clone();
        let step = request["job"]["step"].as_u64().unwrap_or(0);
        if request["type"] == "reward.ping" || step > 2 {
            return accepted(json!({}));
        }
        // Step 1: in parts, before and after the 202. Step 2: completely before the response, while the request hangs.
        let server = server_url.lock().unwrap().clone();
        let send = move |body: Value| {
            let path = request["reply"]["callback_url"].as_str().unwrap().strip_prefix(PUBLIC).unwrap().to_owned();
            let token = request["reply"]["token"].as_str().unwrap().to_owned();
            let url = format!("{server}{path}");
            async move {
                let http = reqwest::Client::builder().no_proxy().build().unwrap();
                let sent = http.post(url).bearer_auth(token).json(&body).send().await.unwrap();
                assert_eq!(sent.status(), 200);
            }
        };
        let runtime = tokio::runtime::Handle::current();
        let all = everything(&call.body);
        if step == 1 {
            runtime.block_on(send(json!({"results": all[..1]})));
            let rest = send(json!({"results": all[1..]}));
            runtime.spawn(async move {
                tokio::time::sleep(Duration::from_millis(700)).await;
                rest.await;
            });
            return accepted(json!({}));
        }
        runtime.block_on(send(json!({"results": all})));
        std::thread::sleep(Duration::from_secs(9));
        text(500, "too slow")
    })
    .await;
    let server = Server::start_with(&dir.path().join("data"), "cpu", &["--public-url", PUBLIC]);
    *address.lock().unwrap() = server.url.clone();
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let job = server.submit(&later_spec(&service, 9, 3_600_000)).await;
    server.job_when(&job, "step 3, which nobody answers", |view| view["step"] == 2 && waits(view)).await;
    let begun = Instant::now();
    server.post(&format!("/jobs/{job}/cancel"), &json!({})).await;
    server.job_in_state(&job, "cancelled").await;
    assert!(begun.elapsed() < HONOURED, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_test_of_a_reward_waits_for_an_answer_that_comes_later() {
    let dir = tempfile::tempdir().unwrap();
    let address: Arc<Mutex<String>> = Arc::default();
    let server_url = address.clone();
    let service = Service::start(move |call| {
        let request = call.body.clone();
        if request["type"] == "reward.ping" {
            return ok(&json!({"modes": ["async"]}));
        }
        if request["reply"]["callback_url"].is_string() {
            let server = server_url.lock().unwrap().clone();
            tokio::runtime::Handle::current().spawn(async move {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let http = reqwest::Client::builder().no_proxy().build().unwrap();
                let path = request["reply"]["callback_url"].as_str().unwrap().strip_prefix(PUBLIC).unwrap();
                let token = request["reply"]["token"].as_str().unwrap();
                let mut results = everything(&request);
                results[1]["reason"] = json!("asked with 'CANARY-of/later' in x-key");
                let body = json!({"results": results, "done": true});
                http.post(format!("{server}{path}")).bearer_auth(token).json(&body).send().await.unwrap();
            });
        }
        accepted(json!({}))
    })
    .await;
    let test = json!({"reward": {"type": "webhook", "url": format!("{}/score", service.url), "deadline_ms": 7_200_000,
                                 "headers": {"x-key": "CANARY-of/later"}},
                      "samples": [{"prompt": "p", "completion": "a"}, {"prompt": "p", "completion": "b"}]});
    let data = dir.path().join("data");
    let server = Server::start_with(&data, "none", &["--public-url", PUBLIC]);
    *address.lock().unwrap() = server.url.clone();
    let report = server.post("/rewards/test", &test).await;
    assert_eq!((&report["ok"], &report["results"][1]["reward"]), (&json!(true), &json!(1.0)), "{report}");
    assert!(report["warnings"].to_string().contains("a job 7200 s"), "{report}");
    assert_eq!(report["results"][1]["reason"], "asked with '(redacted)' in x-key", "{report}");
    let request = service.calls(Method::POST).last().unwrap().body.clone();
    assert!(!report.to_string().contains(request["reply"]["token"].as_str().unwrap()), "the token is not shown");
    drop(server);
    let server = Server::start(&data, "none");
    let report = server.post("/rewards/test", &test).await;
    let message = report["results"][0]["error"]["message"].as_str().unwrap();
    assert!(message.contains("202") && message.contains("--public-url"), "{report}");
}
