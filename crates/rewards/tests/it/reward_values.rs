//! Tests of the values that are accepted from a reward service: none beyond the limit, and exactly those that it returned, even
//! if they look like one of the reward's secrets.

use std::collections::BTreeMap;
use std::sync::Arc;

use rlood_rewards::client::RewardClient;
use rlood_rewards::{JobContext, RewardDeps, RewardFailure, Rewards, Scored};
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::protocol::{JournalEntry, RewardAnswer};
use rlood_types::rollout::{RewardValue, RolloutId};
use rlood_types::spec::{RewardPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::journal::Book;
use crate::service::{Service, ok, plan, samples, text};

fn client() -> RewardClient {
    let _ = rustls::crypto::ring::default_provider().install_default();
    RewardClient::new(&OutgoingPolicy::parse(&["loopback"]).unwrap()).unwrap()
}

fn with_headers(headers: &[(&str, &str)]) -> BTreeMap<String, RewardSecrets> {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    BTreeMap::from([("r".to_owned(), RewardSecrets { headers, ..RewardSecrets::default() })])
}

async fn score(
    plan: RewardPlan,
    secrets: &BTreeMap<String, RewardSecrets>,
    journal: Option<Arc<Book>>,
) -> Result<Scored, RewardFailure> {
    let journal = journal.map(|book| book as Arc<dyn rlood_rewards::journal::Journal>);
    let deps = RewardDeps { client: client(), journal, models: None, previous_reports: Vec::new() };
    let rewards = Rewards::with_deps(&[plan], secrets, deps).unwrap();
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(1), probe: false };
    rewards.score(&job, &samples(4, 2)).await
}

fn values(scored: &Scored) -> Vec<RewardValue> {
    scored.scores.iter().map(|score| score.values[0]).collect()
}

#[tokio::test]
async fn a_value_beyond_the_limit_is_as_invalid_as_nan() {
    let said = [1e6, -1e6, 1_000_000.5, -1e300];
    let service = Service::start(move |_, request| {
        let asked = request["samples"].as_array().unwrap();
        let of = |sample: &Value| said[sample["completion"].as_str().unwrap()[1..].parse::<usize>().unwrap()];
        ok(&json!({"rewards": asked.iter().map(of).collect::<Vec<f64>>()}))
    })
    .await;
    let with = async |changes: Value| {
        let mut all = json!({"max_abs_reward": 1e6, "max_invalid_tries": 1});
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        score(plan("r", &service.url(), all), &BTreeMap::new(), None).await
    };
    let number = RewardValue::Number;
    let scored = with(json!({})).await.unwrap();
    assert_eq!(values(&scored), [number(1e6), number(-1e6), RewardValue::Missing, RewardValue::Missing]);
    assert_eq!(service.seen.lock().unwrap().len(), 2, "what is invalid is asked for once more, alone");
    let told = format!("{:?}", scored.warnings);
    assert!(told.contains("1000000.5 is beyond ±1000000 (max_abs_reward)"), "{told}");
    let zeroed = with(json!({"on_invalid": "zero"})).await.unwrap();
    assert_eq!(values(&zeroed), [number(1e6), number(-1e6), number(0.0), number(0.0)]);
    let failure = with(json!({"on_invalid": "fail"})).await.unwrap_err();
    assert!(failure.to_string().contains("max_abs_reward"), "{failure}");
    let wider = with(json!({"max_abs_reward": 2e6})).await.unwrap();
    assert_eq!(values(&wider)[2..], [number(1_000_000.5), RewardValue::Missing]);
    // A job from before the limit existed has no limit.
    let before = score(plan("r", &service.url(), json!({})), &BTreeMap::new(), None).await.unwrap();
    assert_eq!(values(&before), said.map(number));
}

#[tokio::test]
async fn headers_that_look_like_parts_of_an_answer_do_not_change_its_values() {
    let headers = with_headers(&[
        ("x-tenant", "10000000"),
        ("x-a", "sample_id"),
        ("x-b", "results"),
        ("x-c", "s_10"),
        ("x-d", "accuracy"),
        ("x-e", "reward"),
        ("authorization", "Bearer sk-123456789"),
    ]);
    let service = Service::start(|_, request| {
        let result = |sample: &Value| {
            format!(
                r#"{{"sample_id": {}, "reward": 0.10000000149011612, "metrics": {{"accuracy": 10000000}}, "reason": "sk-123456789 of 10000000"}}"#,
                sample["sample_id"]
            )
        };
        let results: Vec<String> = request["samples"].as_array().unwrap().iter().map(result).collect();
        text(200, format!(r#"{{"id": {}, "results": [{}]}}"#, request["id"], results.join(", ")))
    })
    .await;
    let book = Arc::new(Book::default());
    let reward = || plan("r", &service.url(), json!({"cache": true}));
    let first = score(reward(), &headers, Some(book.clone())).await.unwrap();
    assert_eq!(values(&first), [RewardValue::Number(0.10000000149011612); 4]);
    assert!(first.warnings.is_empty(), "{:?}", first.warnings);
    let again = score(reward(), &headers, Some(book.clone())).await.unwrap();
    assert_eq!(values(&again), values(&first));
    assert_eq!(service.seen.lock().unwrap().len(), 1, "the second time the journal answered");
    // Strings in the journal contain no secrets.
    let entries = book.entries.lock().unwrap();
    let bodies = entries.iter().filter_map(|entry| match entry {
        JournalEntry::Answer { answer: RewardAnswer::Body { body }, .. } => Some(body),
        _ => None,
    });
    let bodies: Vec<&String> = bodies.collect();
    assert!(bodies.iter().any(|body| body.contains("(redacted) of (redacted)")), "{bodies:?}");
    assert!(bodies.iter().all(|body| !body.contains("sk-123456789")), "{bodies:?}");
}

#[tokio::test]
async fn a_cached_value_is_used_again_by_its_owner_and_with_its_secret_only() {
    let service =
        Service::start(|_, request| ok(&json!({"rewards": vec![0.5; request["samples"].as_array().unwrap().len()]})))
            .await;
    let client = client();
    let asked = async |scope: &str, header: &str, changes: Value| {
        let mut all = json!({"cache": true, "max_abs_reward": 1e6});
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let deps = RewardDeps {
            client: client.clone().with_cache_scope(scope),
            journal: None,
            models: None,
            previous_reports: Vec::new(),
        };
        let plans = [plan("r", &service.url(), all)];
        let rewards = Rewards::with_deps(&plans, &with_headers(&[("x-key", header)]), deps).unwrap();
        let before = service.seen.lock().unwrap().len();
        let job = JobContext { job: JobId::new(), rollout: RolloutId::train(1), probe: false };
        rewards.score(&job, &samples(4, 2)).await.unwrap();
        service.seen.lock().unwrap().len() - before
    };
    assert_eq!(asked("ann", "ann's key", json!({})).await, 1);
    assert_eq!(asked("ann", "ann's key", json!({})).await, 0, "the next job of the same owner");
    assert_eq!(asked("bob", "ann's key", json!({})).await, 1, "another owner");
    assert_eq!(asked("ann", "another key", json!({})).await, 1, "another secret");
    assert_eq!(asked("ann", "ann's key", json!({"max_abs_reward": 2e6})).await, 1, "another limit");
    assert_eq!(asked("ann", "ann's key", json!({})).await, 0);
}
