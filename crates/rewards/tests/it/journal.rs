//! Tests of rewards with a journal: an answered request is never repeated, wherever the process is lost.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use rlood_rewards::journal::{Journal, JournalClosed, JournaledRequest};
use rlood_rewards::{JobContext, RewardFailure, Rewards};
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::protocol::{JournalEntry, RewardAnswer};
use rlood_types::rollout::{RewardValue, RolloutId};
use serde_json::{Value, json};

use crate::service::{Service, ok, plan, samples, text, truth};

/// A journal that outlives its process. The process is lost at the n-th entry (from 1), before or after the entry is durable.
#[derive(Default)]
pub struct Book {
    pub entries: Arc<Mutex<Vec<JournalEntry>>>,
    pub appended: AtomicUsize,
    pub lost_at: Option<(usize, bool)>,
}

impl Book {
    fn answered(&self) -> BTreeMap<String, RewardAnswer> {
        let entries = self.entries.lock().unwrap();
        let answers = entries.iter().filter_map(|entry| match entry {
            JournalEntry::Answer { id, answer, .. } => Some((id.clone(), answer.clone())),
            _ => None,
        });
        answers.collect()
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
                JournalEntry::Answer { key, id, answer, .. } if key == wanted => {
                    found = Some(JournaledRequest::Answered { id: id.clone(), answer: answer.clone() });
                }
                _ => {}
            }
        }
        found
    }

    fn append(&self, entry: JournalEntry) -> BoxFuture<'_, Result<(), JournalClosed>> {
        let number = self.appended.fetch_add(1, Ordering::SeqCst) + 1;
        let (at, durable) = self.lost_at.unwrap_or((usize::MAX, false));
        if number < at || (number == at && durable) {
            self.entries.lock().unwrap().push(entry);
        }
        let result = if number < at { Ok(()) } else { Err(JournalClosed) };
        async move { result }.boxed()
    }
}

/// A service for five groups of two in batches of four. It rejects more than three samples as too large, has no result for
/// sample 5 at first, returns a retryable error for sample 7, and is busy now and then.
fn awkward(request: &Value, tries: usize) -> axum::http::Response<axum::body::Body> {
    let asked = request["samples"].as_array().unwrap();
    if tries == 1 && asked[0]["sample_id"] == "s_8" {
        return text(503, "busy");
    }
    if asked.len() > 3 {
        return text(413, "");
    }
    let mut answer = truth(request);
    let results = answer["results"].as_array_mut().unwrap();
    if asked.len() > 1 {
        results.retain(|result| result["sample_id"] != "s_5");
        for result in results.iter_mut().filter(|result| result["sample_id"] == "s_7") {
            *result =
                json!({"sample_id": "s_7", "reward": null, "error": {"code": "judge_timeout", "retryable": true}});
        }
    }
    ok(&answer)
}

/// All requests: id, samples, body.
type Ledger = Vec<(String, Vec<String>, Vec<u8>)>;

fn ledger(service: &Service) -> Ledger {
    let row = |(headers, body): &(axum::http::HeaderMap, Vec<u8>)| {
        let request: Value = serde_json::from_slice(body).unwrap();
        let samples = request["samples"].as_array().unwrap().iter();
        let samples = samples.map(|sample| sample["sample_id"].as_str().unwrap().to_owned()).collect();
        assert_eq!(headers["webhook-id"], request["id"].as_str().unwrap());
        assert_eq!(headers["idempotency-key"], request["id"].as_str().unwrap());
        (request["id"].as_str().unwrap().to_owned(), samples, body.clone())
    };
    service.seen.lock().unwrap().iter().map(row).collect()
}

async fn start() -> Service {
    let tries: Mutex<BTreeMap<String, usize>> = Mutex::default();
    Service::start(move |_, request| {
        let mut tries = tries.lock().unwrap();
        let tries = tries.entry(request["id"].as_str().unwrap().to_owned()).or_default();
        *tries += 1;
        awkward(request, *tries)
    })
    .await
}

async fn score(service: &Service, book: Book, job: JobId) -> Result<Vec<RewardValue>, RewardFailure> {
    let plans = [plan("r", &service.url(), json!({"max_batch_samples": 4, "max_concurrency": 2}))];
    let outgoing = OutgoingPolicy::parse(&["loopback"]).unwrap();
    let rewards = Rewards::with_journal(&plans, &BTreeMap::new(), &outgoing, Some(Arc::new(book))).unwrap();
    let scored =
        rewards.score(&JobContext { job, rollout: RolloutId::train(4), probe: false }, &samples(10, 2)).await?;
    Ok(scored.scores.iter().map(|score| score.values[0]).collect())
}

/// Checks that no sample was requested under two ids, unless the service left the sample open, and that each id has one body.
fn check(what: &str, ledger: &Ledger) {
    let (mut bodies, mut ids) = (BTreeMap::new(), BTreeMap::new());
    for (id, samples, body) in ledger {
        assert_eq!(bodies.entry(id).or_insert(body), &body, "{what}: {id} has two bodies");
        assert_eq!(ids.entry(samples).or_insert(id), &id, "{what}: {samples:?} are asked under two ids");
    }
}

#[tokio::test]
async fn a_process_lost_at_any_entry_repeats_no_answered_request() {
    let truth: Vec<RewardValue> = (0..10).map(|index| RewardValue::Number(f64::from(index))).collect();
    let whole = start().await;
    let book = Book::default();
    let entries = book.entries.clone();
    assert_eq!(score(&whole, book, JobId::new()).await.unwrap(), truth);
    let asked = ledger(&whole);
    check("undisturbed", &asked);
    // Each of these has a request and an answer: 3 batches, 4 halves, 2 samples requested again.
    let appended = entries.lock().unwrap().len();
    assert_eq!(appended, 18);

    let losses = (1..=appended).flat_map(|at| [(at, false), (at, true)]);
    let attempts = losses.map(|lost_at| {
        let truth = truth.clone();
        async move {
            let what = format!("{lost_at:?}");
            let service = start().await;
            let job = JobId::new();
            let first = Book { lost_at: Some(lost_at), ..Book::default() };
            let entries = first.entries.clone();
            let lost = score(&service, first, job).await;
            assert!(matches!(lost, Err(RewardFailure::JournalClosed { .. })), "{what}: {lost:?}");
            let second = Book { entries: entries.clone(), ..Book::default() };
            let answered = second.answered();
            let before = ledger(&service).len();
            assert_eq!(score(&service, second, job).await.unwrap(), truth, "{what}");
            let ledger = ledger(&service);
            check(&what, &ledger);
            for (id, ..) in &ledger[before..] {
                assert!(!answered.contains_key(id), "{what}: {id} was answered and is asked again");
            }
            // A further run sends no request at all.
            let third = Book { entries, ..Book::default() };
            assert_eq!(score(&service, third, job).await.unwrap(), truth, "{what}");
            assert_eq!(self::ledger(&service).len(), ledger.len(), "{what}");
        }
    });
    futures::future::join_all(attempts).await;
}

#[tokio::test]
async fn a_process_lost_at_any_time_repeats_no_answered_request() {
    let truth: Vec<RewardValue> = (0..10).map(|index| RewardValue::Number(f64::from(index))).collect();
    let attempts = (0..40u64).map(|number| {
        let truth = truth.clone();
        async move {
            let service = start().await;
            let job = JobId::new();
            let entries = Arc::default();
            let book = |entries: &Arc<Mutex<Vec<JournalEntry>>>| Book { entries: entries.clone(), ..Book::default() };
            for life in 1..4 {
                let patience = Duration::from_millis(number * 7 * life);
                let _ = tokio::time::timeout(patience, score(&service, book(&entries), job)).await;
            }
            let last = book(&entries);
            let (answered, before) = (last.answered(), ledger(&service).len());
            assert_eq!(score(&service, last, job).await.unwrap(), truth);
            let ledger = ledger(&service);
            check(&format!("number {number}"), &ledger);
            assert!(ledger[before..].iter().all(|(id, ..)| !answered.contains_key(id)), "number {number}");
        }
    });
    futures::future::join_all(attempts).await;
}

#[tokio::test]
async fn answers_that_paused_the_job_are_requested_again_after_the_service_is_fixed() {
    let mended = Arc::new(AtomicUsize::new(0));
    let is_mended = mended.clone();
    let service = Service::start(move |_, request| match is_mended.load(Ordering::SeqCst) {
        0 => text(401, "wrong key"),
        _ => ok(&truth(request)),
    })
    .await;
    let (job, book) = (JobId::new(), Book::default());
    let entries = book.entries.clone();
    let failure = score(&service, book, job).await.unwrap_err();
    assert_eq!(failure.pause_reason(), Some("reward_invalid"), "{failure}");
    let rollout = RolloutId::train(4);
    // The store removes the answers in the same way.
    let written = std::mem::take(&mut *entries.lock().unwrap());
    assert_eq!(written.last(), Some(&JournalEntry::Forget { rollout, reward: "r".into() }));
    mended.store(1, Ordering::SeqCst);
    let values = score(&service, Book { entries, ..Book::default() }, job).await.unwrap();
    assert!(values.iter().all(|value| value.number().is_some()), "{values:?}");
}

#[tokio::test]
async fn answers_that_fail_the_job_are_removed_from_the_journal() {
    let service = Service::start(|_, _| ok(&json!({"results": "none"}))).await;
    let plans = [plan("r", &service.url(), json!({"max_invalid_tries": 0, "on_invalid": "fail"}))];
    let outgoing = OutgoingPolicy::parse(&["loopback"]).unwrap();
    let book = Book::default();
    let entries = book.entries.clone();
    let rewards = Rewards::with_journal(&plans, &BTreeMap::new(), &outgoing, Some(Arc::new(book))).unwrap();
    let context = JobContext { job: JobId::new(), rollout: RolloutId::train(4), probe: false };
    let failed = rewards.score(&context, &samples(4, 2)).await;
    assert!(matches!(failed, Err(RewardFailure::Invalid { .. })), "{failed:?}");
    let entries = entries.lock().unwrap();
    assert!(entries.iter().any(|entry| matches!(entry, JournalEntry::Answer { .. })), "{entries:?}");
    let forget = JournalEntry::Forget { rollout: RolloutId::train(4), reward: "r".into() };
    assert_eq!(entries.last(), Some(&forget));
}
