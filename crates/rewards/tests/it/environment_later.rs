//! Environments that answer 202, and give their answer later: at a status address, or by callback.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::Response;
use futures::FutureExt;
use futures::future::BoxFuture;
use rlood_rewards::RewardFailure;
use rlood_rewards::journal::{Journal, JournalClosed, JournaledRequest};
use rlood_types::callback::{CallbackTerms, Chunk, Entry};
use rlood_types::environment::{EpisodeCall, Reply};
use rlood_types::id::JobId;
use rlood_types::protocol::{JournalEntry, RewardAnswer};
use rlood_types::rollout::RolloutId;
use rlood_types::spec::EnvironmentPlan;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::environment::{client_of, plan, reset, step};
use crate::service::{Service, ok, text};

const PUBLIC: &str = "https://rlood.example";

/// A journal whose server takes callbacks. It outlives its process.
struct Book {
    terms: CallbackTerms,
    entries: Mutex<Vec<JournalEntry>>,
    callbacks: watch::Sender<BTreeMap<String, Chunk>>,
}

impl Book {
    fn new(public_url: Option<&str>) -> Arc<Self> {
        let terms = CallbackTerms { public_url: public_url.map(str::to_owned), key: "a-key".to_owned() };
        Arc::new(Self { terms, entries: Mutex::default(), callbacks: watch::Sender::default() })
    }

    /// Stores a callback, as the server does.
    fn call_back(&self, request: &Value, part: &str, answer: &Value) {
        let id = request["id"].as_str().unwrap();
        assert_eq!(request["reply"]["callback_url"], format!("{PUBLIC}/environment-callbacks/{id}"));
        assert_eq!(request["reply"]["token"], self.terms.token(id));
        let entry = Entry { sample_id: part.to_owned(), result: answer.to_string() };
        self.callbacks.send_modify(|all| drop(all.insert(id.to_owned(), Chunk { entries: vec![entry], done: true })));
    }

    fn answers(&self) -> Vec<RewardAnswer> {
        let entries = self.entries.lock().unwrap();
        let answer = |entry: &JournalEntry| match entry {
            JournalEntry::Answer { answer, .. } => Some(answer.clone()),
            _ => None,
        };
        entries.iter().filter_map(answer).collect()
    }

    fn is_accepted(&self) -> bool {
        self.entries.lock().unwrap().iter().any(|entry| matches!(entry, JournalEntry::Accepted { .. }))
    }
}

impl Journal for Book {
    fn find(&self, wanted: &str) -> Option<JournaledRequest> {
        let mut found = None;
        for entry in self.entries.lock().unwrap().iter() {
            match entry {
                JournalEntry::Request { key, id, body, later, .. } if key == wanted => {
                    found = Some(JournaledRequest::Sent { id: id.clone(), body: body.clone(), later: later.clone() });
                }
                JournalEntry::Accepted { key, accepted, .. } if key == wanted => {
                    if let Some(JournaledRequest::Sent { later: Some(later), .. }) = &mut found {
                        later.accepted = Some(accepted.clone());
                    }
                }
                JournalEntry::Answer { key, id, answer, .. } if key == wanted => {
                    found = Some(JournaledRequest::Answered { id: id.clone(), answer: answer.clone() });
                }
                _ => {}
            }
        }
        found
    }

    fn append(&self, entry: JournalEntry) -> BoxFuture<'_, Result<(), JournalClosed>> {
        self.entries.lock().unwrap().push(entry);
        async { Ok(()) }.boxed()
    }

    fn callbacks(&self) -> Option<&CallbackTerms> {
        Some(&self.terms)
    }

    fn arrived<'a>(&'a self, id: &'a str, seen: usize) -> BoxFuture<'a, Result<Chunk, JournalClosed>> {
        async move {
            let mut callbacks = self.callbacks.subscribe();
            let has_new = |all: &BTreeMap<String, Chunk>| all.get(id).is_some_and(|chunk| chunk.entries.len() > seen);
            Ok(callbacks.wait_for(has_new).await.map_err(|_| JournalClosed)?[id].clone())
        }
        .boxed()
    }
}

fn accepted(more: &Value) -> Response<Body> {
    text(202, more.to_string())
}

fn beginning() -> Value {
    json!({"version": "1", "session": "s", "messages": [{"role": "user", "content": "Go."}]})
}

fn turn() -> Value {
    json!({"version": "1", "reward": 0.5, "done": true, "messages": [{"role": "user", "content": "Done."}]})
}

/// The plan with these changes.
fn plan_with(url: &str, changes: &Value) -> EnvironmentPlan {
    let mut whole = serde_json::to_value(plan(url)).unwrap();
    whole.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    serde_json::from_value(whole).unwrap()
}

struct Asking<'a> {
    service: &'a Service,
    job: JobId,
    book: Arc<Book>,
    changes: Value,
}

impl<'a> Asking<'a> {
    fn new(service: &'a Service, public_url: Option<&str>, changes: Value) -> Self {
        Self { service, job: JobId::new(), book: Book::new(public_url), changes }
    }

    async fn ask(&self, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RewardFailure> {
        let environment = client_of(&plan_with(&self.service.url(), &self.changes), self.job);
        environment.with_journal(Some(self.book.clone())).ask(RolloutId::train(1), calls).await
    }

    async fn ask_one(&self, call: EpisodeCall) -> Result<Reply, RewardFailure> {
        self.ask(&[call]).await.map(|mut replies| replies.remove(0))
    }

    /// The POST requests so far.
    fn posts(&self) -> Vec<Value> {
        let seen = self.service.seen.lock().unwrap();
        seen.iter().filter_map(|(_, body)| serde_json::from_slice(body).ok()).collect()
    }
}

fn is_step(reply: &Reply) -> bool {
    matches!(reply, Reply::Step(answer) if answer.reward == Some(0.5) && answer.done)
}

#[tokio::test]
async fn a_status_address_is_polled_for_the_answer_to_a_reset_and_to_a_turn() {
    let polls = AtomicUsize::new(0);
    let service = Service::start(move |_, request| match request["type"].as_str() {
        Some(_) => {
            polls.store(0, Ordering::SeqCst);
            accepted(&json!({"eta_ms": 0, "status_url": "/status/7"}))
        }
        None => match polls.fetch_add(1, Ordering::SeqCst) {
            0 => text(202, "{}"),
            1 => text(503, ""),
            // A valid answer to a reset is one to a turn too.
            _ => ok(&{
                let mut answer = beginning();
                answer.as_object_mut().unwrap().extend(turn().as_object().unwrap().clone());
                answer
            }),
        },
    })
    .await;
    let asking = Asking::new(&service, None, json!({}));
    assert!(matches!(asking.ask_one(reset()).await.unwrap(), Reply::Reset(answer) if answer.messages.len() == 1));
    assert!(is_step(&asking.ask_one(step(0)).await.unwrap()));
    let posts = asking.posts();
    assert_eq!(posts.len(), 2, "a request that was taken is not sent again");
    assert_eq!(posts[0]["reply"], json!({"modes": ["sync"]}), "no public address, no callback");
    for (headers, _) in service.seen.lock().unwrap().iter() {
        assert!(headers.contains_key("webhook-signature") && headers.contains_key("rlood-episode"), "{headers:?}");
    }
    // The answers are in the journal: nothing is asked again.
    assert!(is_step(&asking.ask_one(step(0)).await.unwrap()));
    assert_eq!(asking.posts().len(), 2);
}

#[tokio::test]
async fn a_callback_is_the_answer_and_a_process_lost_between_the_202_and_the_callback_asks_nothing_twice() {
    let service = Service::start(|_, _| accepted(&json!({}))).await;
    let asking = Asking::new(&service, Some(PUBLIC), json!({}));
    for (call, part, answer) in [(reset(), "env.reset", beginning()), (step(0), "env.step", turn())] {
        let before = asking.posts().len();
        asking.book.entries.lock().unwrap().retain(|entry| !matches!(entry, JournalEntry::Accepted { .. }));
        let lost = asking.ask_one(call.clone());
        tokio::select! {
            reply = lost => panic!("{reply:?}"),
            () = async {
                while !asking.book.is_accepted() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            } => {}
        }
        let request = asking.posts()[before].clone();
        assert_eq!(request["reply"]["modes"], json!(["sync", "async"]));
        asking.book.call_back(&request, part, &answer);
        let reply = asking.ask_one(call).await.unwrap();
        assert!(matches!(&reply, Reply::Reset(_)) || is_step(&reply), "{reply:?}");
        assert_eq!(asking.posts().len(), before + 1, "asked once");
        assert_eq!(asking.book.answers().last(), Some(&RewardAnswer::Body { body: answer.to_string() }));
    }
    // No token stands in the journal.
    let entries = format!("{:?}", asking.book.entries.lock().unwrap());
    assert!(asking.posts().iter().all(|post| !entries.contains(post["reply"]["token"].as_str().unwrap())));
}

#[tokio::test]
async fn a_request_that_was_lost_is_sent_again_with_its_bytes_and_errors_are_those_of_answers_at_once() {
    let asked = async |answers: &'static [(u16, &'static str)]| {
        let polls = AtomicUsize::new(0);
        let service = Service::start(move |_, request| match request["type"].as_str() {
            Some(_) => accepted(&json!({"eta_ms": 0, "status_url": "/status"})),
            None => {
                let (status, body) = answers[polls.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1)];
                text(status, body)
            }
        })
        .await;
        let asking = Asking::new(&service, None, json!({}));
        let reply = asking.ask_one(step(0)).await.unwrap();
        (reply, asking.posts())
    };
    let good = (200, r#"{"reward": 0.5, "done": true}"#);
    let busy = (200, r#"{"error": {"code": "busy", "retryable": true}}"#);
    for lost in [[(404, ""), good], [(410, ""), good], [busy, good]] {
        let (reply, posts) = asked(Box::leak(Box::new(lost))).await;
        assert!(is_step(&reply) && posts.len() == 2 && posts[0] == posts[1], "{reply:?} {posts:?}");
    }
    let (reply, posts) = asked(&[(404, "")]).await;
    assert!(
        matches!(&reply, Reply::Failed { code, message } if code == "invalid_answer" && message.contains("lost it"))
    );
    assert_eq!(posts.len(), 2);
    let (reply, _) = asked(&[(200, r#"{"error": {"code": "sandbox_full"}}"#)]).await;
    assert!(matches!(&reply, Reply::Failed { code, .. } if code == "sandbox_full"), "{reply:?}");
    let (reply, _) = asked(&[(200, r#"{"reward": "1"}"#)]).await;
    assert!(matches!(&reply, Reply::Failed { code, .. } if code == "invalid_answer"), "{reply:?}");
}

#[tokio::test]
async fn an_answer_that_misses_the_deadline_leaves_no_reward_and_silence_pauses_the_job() {
    let service = Service::start(|_, request| match request["turn"].as_u64() {
        Some(0) => ok(&turn()),
        _ => accepted(&json!({})),
    })
    .await;
    let asking = Asking::new(&service, Some(PUBLIC), json!({"deadline_ms": 300, "timeout_ms": 300}));
    let replies = asking.ask(&[step(0), step(1)]).await.unwrap();
    assert!(is_step(&replies[0]));
    assert!(matches!(&replies[1], Reply::Failed { code, .. } if code == "deadline"), "missing, and not 0: {replies:?}");
    // A late callback changes nothing: the journal has the outcome.
    let late = asking.posts().into_iter().find(|post| post["turn"] == 1).unwrap();
    asking.book.call_back(&late, "env.step", &turn());
    assert!(matches!(asking.ask_one(step(1)).await.unwrap(), Reply::Failed { code, .. } if code == "deadline"));

    let environment = client_of(&plan_with(&service.url(), &asking.changes), asking.job);
    let environment = environment.with_journal(Some(asking.book.clone()));
    let reply = environment.ask(RolloutId::train(2), &[step(1)]).await;
    assert!(matches!(reply.as_deref(), Ok([Reply::Failed { .. }])), "{reply:?}");
    let silent = environment.ask(RolloutId::train(3), &[step(1), step(2)]).await.unwrap_err();
    assert!(matches!(&silent, RewardFailure::Outage { cause, .. } if cause.contains("2 of 2 requests")), "{silent:?}");
}
