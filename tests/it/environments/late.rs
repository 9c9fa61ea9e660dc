//! Environments that answer by callback: the address through the router, and jobs whose worker and server are killed between a 202 and its
//! callback.

use rlood::callback::{CallbackTerms, Later};
use rlood::protocol::{JournalEntry, Outcome, RewardAnswer};
use rlood::rollout::RolloutId;
use rlood::store::clock_ms;
use tokio::sync::mpsc;

use super::*;
use crate::server;

const PUBLIC: &str = "https://rlood.example/base";

/// A server with a public address, and a job whose worker has asked an environment.
struct Waiting {
    server: server::Server,
    job: rlood::id::JobId,
    terms: CallbackTerms,
}

impl Waiting {
    async fn new() -> Self {
        let server = server::Server::start_with(|config| config.public_url = Some(PUBLIC.to_owned())).await;
        let job = server.create(server::job()).await;
        server.claim().await;
        let key = server.state.store.server_secret("reward_callbacks", "a-key").await.unwrap();
        Self { server, job, terms: CallbackTerms { public_url: None, key } }
    }

    async fn append(&self, entry: JournalEntry) {
        self.server.state.store.journal_append(self.job, 1, &[entry], clock_ms()).await.unwrap();
    }

    /// The worker records a question. The answer to it has this name.
    async fn ask(&self, id: &str, part: &str, left_ms: u64) {
        let later = Some(Later { left_ms, sample_ids: vec![part.to_owned()], accepted: None });
        let (key, id, body) = (format!("key of {id}"), id.to_owned(), "{}".to_owned());
        self.append(JournalEntry::Request { rollout: RolloutId::train(1), reward: "e".into(), key, id, body, later })
            .await;
    }

    async fn post_at(&self, path: &str, token: Option<&str>, body: &str) -> server::Answer {
        let mut request = axum::http::Request::builder().method("POST").uri(path);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        self.server.send(request.body(body.to_owned().into()).unwrap()).await
    }

    async fn post(&self, id: &str, body: &str) -> server::Answer {
        self.post_at(&format!("/environment-callbacks/{id}"), Some(&self.terms.token(id)), body).await
    }
}

#[tokio::test]
async fn a_callback_is_checked_as_an_answer_and_stored_once() {
    let waiting = Waiting::new().await;
    waiting.ask("env_1", "env.step", 60_000).await;
    waiting.ask("env_2", "env.reset", 60_000).await;
    let good = r#"{"version": "1", "id": "env_1", "reward": 0.5, "done": true, "metrics": {"moves": 3}}"#;
    for token in [None, Some("x".to_owned()), Some(waiting.terms.token("env_2"))] {
        let answer = waiting.post_at("/environment-callbacks/env_1", token.as_deref(), good).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{}", answer.text);
        assert!(answer.headers.contains_key("www-authenticate"));
    }
    assert_eq!(waiting.post_at("/environment-callbacks/env_9", Some("x"), good).await.status, StatusCode::NOT_FOUND);
    let wrong_path = waiting.post_at("/reward-callbacks/env_1", Some(&waiting.terms.token("env_1")), good).await;
    assert_eq!(wrong_path.status, StatusCode::NOT_FOUND, "{}", wrong_path.text);
    for (id, body, pointer) in [
        ("env_1", r#"{"reward": "1"}"#, "/reward invalid_type"),
        ("env_1", r#"{"reward": NaN}"#, " syntax"),
        ("env_1", r#"{"id": "env_2"}"#, "/id invalid_value"),
        ("env_1", r#"{"metrics": {"a b": 1}}"#, "/metrics invalid_value"),
        ("env_1", r#"{"error": {"code": "busy", "retryable": true}}"#, "/error/retryable invalid_value"),
        ("env_2", r#"{"tools": {}}"#, "/tools invalid_type"),
        ("env_2", "[]", " invalid_type"),
    ] {
        let answer = waiting.post(id, body).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{body}: {}", answer.text);
        assert_eq!(server::pointers(&answer), [pointer], "{body}");
    }
    let long = format!(r#"{{"messages": [{{"role": "user", "content": "{}"}}]}}"#, "a".repeat(1 << 20));
    assert_eq!(waiting.post("env_1", &long).await.status, StatusCode::PAYLOAD_TOO_LARGE);

    let counted = |accepted: u64| json!({"accepted": accepted, "duplicate": 1 - accepted, "unknown": 0});
    let answer = waiting.post("env_1", good).await;
    assert_eq!((answer.status, &answer.body), (StatusCode::OK, &counted(1)), "{}", answer.text);
    for other in [good, r#"{"reward": 9}"#] {
        assert_eq!(waiting.post("env_1", other).await.body, counted(0), "the first answer counts");
    }
    let chunk = waiting.server.state.store.callback_arrived("env_1").await.unwrap();
    assert_eq!((chunk.entries.len(), chunk.entries[0].result.as_str(), chunk.done), (1, good, true));
}

#[tokio::test]
async fn a_callback_after_the_deadline_or_the_end_is_gone_and_a_repeated_question_has_the_whole_time_again() {
    let waiting = Waiting::new().await;
    let good = r#"{"reward": 0.5}"#;
    waiting.ask("env_1", "env.step", 0).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    let late = waiting.post("env_1", good).await;
    assert_eq!((late.status, &late.body["code"]), (StatusCode::GONE, &json!("gone")), "{}", late.text);
    assert!(late.text.contains("no reward"), "{}", late.text);
    // The next attempt at the job asks again, because nobody accepted the question.
    waiting.ask("env_1", "env.step", 60_000).await;
    assert_eq!(waiting.post("env_1", good).await.status, StatusCode::OK);

    waiting.ask("env_2", "env.step", 60_000).await;
    let (key, id) = ("key of env_2".to_owned(), "env_2".to_owned());
    let answer = RewardAnswer::Body { body: good.to_owned() };
    waiting.append(JournalEntry::Answer { rollout: RolloutId::train(1), key, id, answer }).await;
    // A question that is answered does not open again.
    waiting.ask("env_2", "env.step", 60_000).await;
    assert_eq!(waiting.post("env_2", good).await.status, StatusCode::GONE);
    waiting.server.state.store.job_finish(waiting.job, 1, Outcome::Succeeded, clock_ms()).await.unwrap();
    assert_eq!(waiting.post("env_1", good).await.status, StatusCode::GONE);
}

/// Sends the answers of an environment to the callback addresses, except those of the kind that it holds.
#[derive(Clone, Default)]
struct Courier {
    /// Address of the server, which a proxy would have under its public address.
    server: Arc<Mutex<String>>,
    held_kind: Arc<Mutex<Option<&'static str>>>,
    held: Arc<Mutex<Vec<(Value, Value)>>>,
}

impl Courier {
    fn start(environment: &Environment, server: &Server) -> Self {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        *environment.0.callbacks.lock().unwrap() = Some(sender);
        let courier = Self { server: Arc::new(Mutex::new(server.url.clone())), ..Self::default() };
        let this = courier.clone();
        tokio::spawn(async move {
            while let Some((request, answer)) = receiver.recv().await {
                let is_held = this.held_kind.lock().unwrap().is_some_and(|kind| request["type"] == kind);
                match is_held {
                    true => this.held.lock().unwrap().push((request, answer)),
                    false => assert_eq!(this.send(&request, &answer, None).await, 200),
                }
            }
        });
        courier
    }

    async fn send(&self, request: &Value, answer: &Value, token: Option<&str>) -> u16 {
        let path = request["reply"]["callback_url"].as_str().unwrap().strip_prefix(PUBLIC).unwrap().to_owned();
        let token = token.unwrap_or(request["reply"]["token"].as_str().unwrap());
        let url = format!("{}{path}", self.server.lock().unwrap());
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        http.post(url).bearer_auth(token).json(answer).send().await.unwrap().status().as_u16()
    }

    /// Holds the answers to these requests until [`Courier::release`].
    fn hold(&self, kind: &'static str) {
        *self.held_kind.lock().unwrap() = Some(kind);
    }

    async fn release(&self) {
        *self.held_kind.lock().unwrap() = None;
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        assert!(!held.is_empty());
        for (request, answer) in held {
            assert_eq!(self.send(&request, &answer, None).await, 200, "{request}");
        }
    }
}

fn waits(view: &Value) -> bool {
    view["state"] == "running" && view["status_reason"] == "waiting_for_reward"
}

#[tokio::test]
async fn a_kill_between_a_202_and_its_callback_changes_no_byte_and_no_turn_is_taken_twice() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--public-url", PUBLIC];
    let mut server = start_with(dir.path(), &flags).await;
    let (environment, url) = Environment::start().await;
    let document = spec(&url);
    let job = server.submit(&document).await;
    let expected = outcome(&server, &job).await;

    // The worker is killed between the 202 and the callbacks of a reset.
    let courier = Courier::start(&environment, &server);
    courier.hold("env.reset.request");
    let job = server.submit(&document).await;
    server.job_when(&job, "waiting", |view| waits(view) && !courier.held.lock().unwrap().is_empty()).await;
    // By then every question of the round is recorded as accepted.
    tokio::time::sleep(Duration::from_secs(1)).await;
    signal("KILL", server.worker_pids(1).await[0]);
    server.job_when(&job, "another attempt that waits", |view| waits(view) && view["attempt"] == 2).await;
    let (request, answer) = courier.held.lock().unwrap()[0].clone();
    assert_eq!(request["reply"]["modes"], json!(["sync", "async"]));
    assert_eq!(courier.send(&request, &answer, Some("forged")).await, 401);
    courier.release().await;
    assert!(outcome(&server, &job).await == expected, "another result after a kill before the callbacks of a reset");

    // The whole service is killed between the 202 and the callbacks of a turn, and the answers arrive while there is no worker.
    courier.hold("env.step.request");
    let job = server.submit(&document).await;
    server.job_when(&job, "waiting for a turn", |view| waits(view) && !courier.held.lock().unwrap().is_empty()).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    server = Server::start_with(&dir.path().join("data"), "none", &flags);
    courier.server.lock().unwrap().clone_from(&server.url);
    courier.release().await;
    drop(server);
    let server = Server::start_with(&dir.path().join("data"), "cpu", &flags);
    courier.server.lock().unwrap().clone_from(&server.url);
    assert!(outcome(&server, &job).await == expected, "another result after a kill before the callbacks of a turn");

    environment.assert_no_flaw();
    let asked = environment.0.asked.lock().unwrap();
    let repeated: Vec<_> = asked.iter().filter(|(_, times)| **times != 1).collect();
    assert!(repeated.is_empty(), "asked again: {repeated:?}");
}
