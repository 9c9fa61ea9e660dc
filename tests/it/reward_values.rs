//! Which values are taken from a reward service: not those beyond the limit, and exactly those that it said, whatever the
//! secrets it was asked with look like; and what a run does with values that are none.

use std::collections::BTreeMap;
use std::sync::Arc;

use rlood::engine::error::EngineError;
use rlood::event::SamplePhase;
use rlood::id::JobId;
use rlood::outgoing::OutgoingPolicy;
use rlood::protocol::{JournalEntry, RewardAnswer};
use rlood::reward::client::RewardClient;
use rlood::reward::{JobContext, RewardFailure, Rewards, Scored, Surroundings};
use rlood::sample::{RewardValue, RolloutId};
use rlood::spec::{Combine, RewardNormalization, RewardPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::journal::Book;
use crate::rewards::{Service, ok, plan, samples, text};
use crate::server::{Server, job, pointers, with};
use crate::train::{self, Start, TestHost};

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
    let journal = journal.map(|book| book as Arc<dyn rlood::reward::journal::Journal>);
    let surroundings = Surroundings { client: client(), journal, models: None, former: Vec::new() };
    let rewards = Rewards::within(&[plan], secrets, surroundings).unwrap();
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
    // A job of before there was a limit has none.
    let before = score(plan("r", &service.url(), json!({})), &BTreeMap::new(), None).await.unwrap();
    assert_eq!(values(&before), said.map(number));
}

#[tokio::test]
async fn a_new_job_has_a_limit_and_bounded_weights() {
    let server = Server::start().await;
    let reward = |more: Value| {
        let mut reward = json!({"type": "number_match", "column": "answer"});
        reward.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with(job(), "rewards", json!([reward]))
    };
    for (more, pointer) in [
        (json!({"weight": 1_000_001}), "/rewards/0/weight out_of_range"),
        (json!({"weight": -1e9}), "/rewards/0/weight out_of_range"),
        (json!({"max_abs_reward": 0}), "/rewards/0/max_abs_reward out_of_range"),
        (json!({"max_abs_reward": 1e13}), "/rewards/0/max_abs_reward out_of_range"),
        (json!({"max_abs_reward": "big"}), "/rewards/0/max_abs_reward invalid_type"),
        (json!({"max_abs_reward": 0.5}), "/rewards/0/max_abs_reward conflict"),
        (json!({"blank_reference": "zero"}), "/rewards/0/blank_reference invalid_value"),
    ] {
        let answer = server.post("/jobs", reward(more.clone())).await;
        assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec![pointer.to_owned()]), "{more}");
    }
    let answer = server.post("/jobs", reward(json!({"weight": -1e6}))).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let stored = &answer.body["plan"]["rewards"][0];
    assert_eq!((&stored["max_abs_reward"], &stored["blank_reference"]), (&json!(1e6), &json!("not_applicable")));
    // The configuration has both, and can be submitted again.
    let config = server.get(&format!("/jobs/{}/config", answer.body["id"].as_str().unwrap())).await.body;
    assert_eq!(server.post("/jobs", config).await.body["plan"]["rewards"][0], *stored);
    let asked = server.post("/jobs", reward(json!({"max_abs_reward": 5, "blank_reference": "compare"}))).await;
    let asked = &asked.body["plan"]["rewards"][0];
    assert_eq!((&asked["max_abs_reward"], &asked["blank_reference"]), (&json!(5.0), &json!("compare")));
}

#[tokio::test]
async fn a_test_of_a_reward_obeys_the_same_rules() {
    let server = Server::start().await;
    let service = Service::start(|_, request| {
        let key = "10000000";
        match request["type"].as_str() {
            Some("reward.ping") => ok(&json!({"modes": [key]})),
            _ => text(200, format!(r#"{{"results": [{{"sample_id": "s_0", "reward": 0.10000000149011612, "reason": "{key}", "metrics": {{"a": 10000000, "b": "{key}"}}}}, {{"sample_id": "s_1", "reward": 2e6}}]}}"#)),
        }
    })
    .await;
    let samples = json!([{"prompt": "p", "completion": "a", "answer": " "}, {"prompt": "p", "completion": "b"}]);
    let reward = json!({"type": "webhook", "url": service.url(), "headers": {"x-tenant": "10000000"}});
    let tested = server.post("/rewards/test", json!({"reward": reward, "samples": samples})).await;
    let results = &tested.body["results"];
    assert_eq!(results[0]["reward"], 0.10000000149011612, "{}", tested.text);
    assert_eq!(results[0]["reason"], "(redacted)");
    assert_eq!(results[0]["metrics"], json!({"a": 10_000_000, "b": "(redacted)"}));
    assert_eq!((&results[1]["reward"], &results[1]["error"]["code"]), (&Value::Null, &json!("invalid_value")));
    assert_eq!(tested.body["ping"]["reply"]["modes"], json!(["(redacted)"]));
    let shown = tested.body["exchanges"][1]["response"]["body"].as_str().unwrap();
    assert!(shown.contains("0.10000000149011612") && !shown.contains("\"10000000\""), "{shown}");

    let blank = json!({"type": "contains", "column": "answer"});
    let tested = server.post("/rewards/test", json!({"reward": blank, "samples": samples})).await;
    assert_eq!(tested.body["ok"], true, "{}", tested.text);
    for result in tested.body["results"].as_array().unwrap() {
        assert_eq!((&result["not_applicable"], &result["reward"]), (&json!(true), &Value::Null));
    }
    assert!(tested.body["warnings"][0].as_str().unwrap().contains("sample 's_1' has no column 'answer'"));
}

#[tokio::test]
async fn headers_that_look_like_parts_of_an_answer_change_none_of_its_values_now_or_when_it_is_replayed() {
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
    // What is written down has no secret in its strings.
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
        let surroundings = Surroundings {
            client: client.clone().with_cache_scope(scope),
            journal: None,
            models: None,
            former: Vec::new(),
        };
        let plans = [plan("r", &service.url(), all)];
        let rewards = Rewards::within(&plans, &with_headers(&[("x-key", header)]), surroundings).unwrap();
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

#[tokio::test]
async fn a_claim_names_no_owner_and_jobs_of_one_owner_share_their_scope() {
    let server = Server::start().await;
    let mut scopes = Vec::new();
    for _ in 0..2 {
        server.create(job()).await;
        scopes.push(crate::protocol::claim(&server).await["cache_scope"].as_str().unwrap().to_owned());
    }
    assert_eq!(scopes[0], scopes[1]);
    assert_eq!(scopes[0].len(), 64);
    let other = Server::start().await;
    other.create(job()).await;
    assert_ne!(
        crate::protocol::claim(&other).await["cache_scope"],
        scopes[0].as_str(),
        "nobody can guess it from a name"
    );
}

#[test]
fn rewards_whose_squares_are_beyond_all_numbers_end_the_run_by_name_before_they_are_trained_on() {
    for (normalization, combine, value, what) in [
        (RewardNormalization::Running, Combine::Renormalize, 1e200, "the variance of the rewards"),
        (RewardNormalization::Batch, Combine::Renormalize, 1e200, "the variance of the rewards"),
        (
            RewardNormalization::None,
            Combine::Nansum,
            f64::MAX,
            "the weighted sum of the rewards of a completion of row",
        ),
    ] {
        // A plan of before there was a limit.
        let mut plan = train::plan();
        plan.rloo.reward_normalization = normalization;
        plan.rloo.combine = combine;
        plan.rewards = vec![train::reward("a")];
        plan.rewards[0].weight = 2.0;
        let mut sign = -1.0;
        let mut host = TestHost::scoring(move |_| {
            sign = -sign;
            RewardValue::Number(sign * value)
        });
        let error = train::train(&plan, train::rows(), Start::default(), &mut host).unwrap_err();
        assert!(matches!(&error, EngineError::StateNotFinite { what: named } if named.contains(what)), "{error}");
        assert!(host.metrics(SamplePhase::Train).is_empty(), "no step was done");
    }
}

#[test]
fn rows_whose_reference_is_blank_train_nothing_and_the_run_goes_on() {
    let plan = train::plan();
    // Every other prompt has none.
    let blank = |sample: &rlood::sample::RewardSample| sample.prompt_id.ends_with(['1', '3', '5', '7', '9']);
    let mut count = 0.0;
    let mut host = TestHost::scoring(move |sample| {
        count += 1.0;
        if blank(sample) { RewardValue::NotApplicable } else { RewardValue::Number(count) }
    });
    train::run(&plan, &mut host);
    let samples = host.samples();
    let (without, with): (Vec<_>, Vec<_>) =
        samples.iter().partition(|sample| sample.prompt_id.ends_with(['1', '3', '5', '7', '9']));
    assert!(!without.is_empty() && !with.is_empty());
    assert!(without.iter().all(|sample| sample.reward.is_none() && sample.advantage == Some(0.0)));
    assert!(
        with.iter().all(|sample| sample.reward.is_some()) && with.iter().any(|sample| sample.advantage != Some(0.0))
    );
}
