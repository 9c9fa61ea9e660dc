//! Tests of the load on services: no more requests than they can handle, none during an outage, none for cached values.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use rlood_rewards::client::{Pace, RewardClient};
use rlood_rewards::{JobContext, RewardDeps, RewardFailure, Rewards, Scored};
use rlood_types::event::Event;
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::protocol::{BreakerState, JournalEntry};
use rlood_types::rollout::{RewardSample, RewardValue, RolloutId};
use rlood_types::spec::{RewardPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::journal::Book;
use crate::service::{Service, ok, plan, samples, text, truth};

fn client() -> RewardClient {
    let _ = rustls::crypto::ring::default_provider().install_default();
    RewardClient::new(&OutgoingPolicy::parse(&["loopback"]).unwrap()).unwrap()
}

fn deps(client: &RewardClient) -> RewardDeps {
    RewardDeps { client: client.clone(), journal: None, models: None, previous_reports: Vec::new() }
}

fn rewards(plans: &[RewardPlan], client: &RewardClient) -> Rewards {
    Rewards::with_deps(plans, &BTreeMap::new(), deps(client)).unwrap()
}

async fn score(rewards: &Rewards, step: u64, samples: &[RewardSample]) -> Result<Scored, RewardFailure> {
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(step), probe: false };
    rewards.score(&job, samples).await
}

fn numbers(scored: &Scored) -> Vec<f64> {
    scored.scores.iter().map(|score| score.values[0].number().unwrap()).collect()
}

/// A service that handles a few concurrent requests and answers 429 to more.
#[derive(Clone, Default)]
struct Narrow {
    inside: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
    answered: Arc<AtomicUsize>,
}

#[tokio::test]
async fn a_service_that_bears_few_requests_at_once_gets_few_and_every_sample_its_value() {
    let narrow = Narrow::default();
    let answer = async |State(narrow): State<Narrow>, body: axum::body::Bytes| {
        let inside = narrow.inside.fetch_add(1, Ordering::SeqCst);
        let response = if inside >= 2 {
            narrow.refused.fetch_add(1, Ordering::SeqCst);
            StatusCode::TOO_MANY_REQUESTS.into_response()
        } else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            narrow.answered.fetch_add(1, Ordering::SeqCst);
            axum::Json(truth(&serde_json::from_slice(&body).unwrap())).into_response()
        };
        narrow.inside.fetch_sub(1, Ordering::SeqCst);
        response
    };
    let app = axum::Router::new().fallback(answer).with_state(narrow.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });

    let client = client().with_pace(Pace::new(0.05).unwrap());
    let rewards = rewards(&[plan("r", &url, json!({"max_batch_samples": 2, "max_concurrency": 16}))], &client);
    let scored = score(&rewards, 1, &samples(200, 2)).await.unwrap();
    assert_eq!(numbers(&scored), (0..200).map(f64::from).collect::<Vec<_>>());
    let (refused, answered) = (narrow.refused.load(Ordering::SeqCst), narrow.answered.load(Ordering::SeqCst));
    assert_eq!(answered, 100);
    // Sixteen concurrent requests without a limit would be rejected seven times out of eight.
    assert!(refused < 80, "{refused} were refused");
    let health = &rewards.reports()[0].health;
    assert_eq!(health.errors["rate_limited"], refused as u64);
    let concurrency = health.concurrency.as_ref().unwrap();
    assert!(concurrency.limit < 8 && concurrency.max == 16, "{concurrency:?}");
    assert_eq!(health.breaker.as_ref().unwrap().opened, 0, "an answer among refusals: it is there");
}

#[tokio::test]
async fn a_service_that_is_down_gets_no_requests_and_then_one_test_request() {
    let service = Service::start(|_, _| text(500, "down")).await;
    let pace = Pace::new(0.01).unwrap();
    // The breaker is open for 0.3 s, 0.6 s, 1.2 s: two test requests within the two seconds.
    let changes = json!({"max_batch_samples": 2, "max_concurrency": 8, "max_outage_s": 2});
    let rewards = rewards(&[plan("r", &service.url(), changes)], &client().with_pace(pace));
    let mut notices = rewards.notices().unwrap();
    let failure = score(&rewards, 1, &samples(32, 2)).await.unwrap_err();
    assert_eq!(failure.pause_reason(), Some("reward_outage"), "{failure}");
    assert!(failure.to_string().contains("for 2 s"), "{failure}");
    let tries = service.seen.lock().unwrap().len();
    // Eight concurrent requests before the overload is known, then one at a time.
    assert!((5..=14).contains(&tries), "{tries} tries");
    let report = rewards.reports().remove(0).health;
    let breaker = report.breaker.unwrap();
    assert_eq!(breaker.state, BreakerState::Open);
    assert!(breaker.opened >= 3 && breaker.retry_at_ms.is_some(), "{breaker:?}");
    let mut told = Vec::new();
    while let Ok(notice) = notices.try_recv() {
        if let Event::Reward { change, message, .. } = notice {
            assert!(message.contains("'r'") && message.contains("500"), "{message}");
            told.push(change.event());
        }
    }
    assert_eq!(told.iter().filter(|kind| **kind == "reward.breaker_opened").count() as u64, breaker.opened);
    assert_eq!(told.iter().filter(|kind| **kind == "reward.degraded").count(), 1);
}

#[tokio::test]
async fn two_rewards_of_one_address_share_its_breaker() {
    let service = Service::start(|_, _| text(503, "down")).await;
    let away = |name: &str| plan(name, &service.url(), json!({"max_outage_s": 1, "required": false}));
    // The breaker is open for 0.6 s, then for 1.2 s.
    let client = client().with_pace(Pace::new(0.02).unwrap());
    let rewards = rewards(&[away("one"), away("two")], &client);
    score(&rewards, 1, &samples(2, 2)).await.unwrap();
    let before = service.seen.lock().unwrap().len();
    assert!((6..=8).contains(&before), "five failures of both, and a probe: {before}");
    let health: Vec<_> = rewards.reports().into_iter().map(|report| report.health).collect();
    assert!(health.iter().all(|health| health.breaker.as_ref().unwrap().state == BreakerState::Open), "{health:?}");
    assert_eq!(health.iter().map(|health| health.requests).sum::<u64>(), before as u64);
    // The service is known to be down, so the next rollout sends no request and waits for none.
    let begun = std::time::Instant::now();
    let scored = score(&rewards, 2, &samples(2, 2)).await.unwrap();
    assert!(scored.scores.iter().all(|score| score.values == [RewardValue::Missing; 2]));
    assert_eq!(service.seen.lock().unwrap().len(), before);
    assert!(begun.elapsed() < Duration::from_millis(200), "{:?}", begun.elapsed());
}

/// Returns two groups of four with duplicates: c0 c1 c0 c1, c2 c3 c2 c3, as seen at another step.
fn repeating(first: usize) -> Vec<RewardSample> {
    let mut samples = samples(8, 4);
    for (index, sample) in samples.iter_mut().enumerate() {
        sample.completion = format!("c{}", first + index % 2 + 2 * (index / 4));
        sample.columns.insert("reference".to_owned(), json!(index / 4));
    }
    samples
}

#[tokio::test]
async fn cached_values_need_no_request_and_are_identical() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let ledger = asked.clone();
    let service = Service::start(move |_, request| {
        let mut answer = truth(request);
        for (sample, result) in
            request["samples"].as_array().unwrap().iter().zip(answer["results"].as_array_mut().unwrap())
        {
            ledger.lock().unwrap().push(sample["completion"].as_str().unwrap().to_owned());
            result["reward"] = json!(result["reward"].as_f64().unwrap() / 3.0);
        }
        ok(&answer)
    })
    .await;
    let client = client();
    let cached = |url: &str, params: Value| plan("r", url, json!({"cache": true, "params": params}));
    let first = rewards(&[cached(&service.url(), json!({}))], &client);
    let expected = [0.0, 1.0 / 3.0, 0.0, 1.0 / 3.0, 2.0 / 3.0, 1.0, 2.0 / 3.0, 1.0];
    assert_eq!(numbers(&score(&first, 1, &repeating(0)).await.unwrap()), expected);
    assert_eq!(*asked.lock().unwrap(), ["c0", "c1", "c2", "c3"], "twins are asked about once");
    assert_eq!(numbers(&score(&first, 2, &repeating(0)).await.unwrap()), expected);
    assert_eq!(asked.lock().unwrap().len(), 4, "nothing is asked again");
    let health = &first.reports()[0].health;
    assert_eq!((health.samples, health.cached, health.requests), (16, 12, 1));

    // The next job of the same worker uses the cache. Other parameters, or a reward without cache, do not.
    let next = rewards(&[cached(&service.url(), json!({}))], &client);
    assert_eq!(numbers(&score(&next, 1, &repeating(0)).await.unwrap()), expected);
    assert_eq!(asked.lock().unwrap().len(), 4);
    let other = rewards(&[cached(&service.url(), json!({"k": 1}))], &client);
    score(&other, 1, &repeating(0)).await.unwrap();
    assert_eq!(asked.lock().unwrap().len(), 8);
    let without = rewards(&[plan("r", &service.url(), json!({}))], &client);
    score(&without, 1, &repeating(0)).await.unwrap();
    assert_eq!(asked.lock().unwrap().len(), 16);
}

#[tokio::test]
async fn errors_and_their_replacement_values_are_not_cached() {
    let service = Service::start(|count, request| {
        let mut answer = truth(request);
        if count == 0 {
            answer["results"][0] = json!({"sample_id": "s_0", "reward": null, "error": {"code": "refused"}});
        }
        ok(&answer)
    })
    .await;
    let rewards = rewards(&[plan("r", &service.url(), json!({"cache": true}))], &client());
    let missing = score(&rewards, 1, &samples(2, 2)).await.unwrap();
    assert_eq!(missing.scores[0].values, [RewardValue::Missing]);
    assert_eq!(numbers(&score(&rewards, 2, &samples(2, 2)).await.unwrap()), [0.0, 1.0]);
    let seen: Vec<Value> =
        service.seen.lock().unwrap().iter().map(|(_, body)| serde_json::from_slice(body).unwrap()).collect();
    assert_eq!(seen[1]["samples"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_process_lost_at_any_entry_leaves_out_what_the_first_one_left_out() {
    let start = || {
        Service::start(|_, request| {
            if request["samples"].as_array().unwrap().len() > 2 { text(413, "") } else { ok(&truth(request)) }
        })
    };
    let plans = |service: &Service| {
        [plan("r", &service.url(), json!({"cache": true, "max_batch_samples": 4, "max_concurrency": 1}))]
    };
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(4), probe: false };
    let within = |plans: &[RewardPlan], client: &RewardClient, book: Book| {
        let deps = RewardDeps { journal: Some(Arc::new(book)), ..deps(client) };
        Rewards::with_deps(plans, &BTreeMap::new(), deps).unwrap()
    };
    let all: Vec<RewardSample> = samples(10, 2);
    for lost in 1..30 {
        let service = start().await;
        let client = client();
        // Some values are cached before.
        let before = rewards(&plans(&service), &client);
        score(&before, 1, &samples(2, 2)).await.unwrap();
        let entries: Arc<Mutex<Vec<JournalEntry>>> = Arc::default();
        let book = Book { entries: entries.clone(), lost_at: Some((lost, lost % 2 == 0)), ..Book::default() };
        let first = within(&plans(&service), &client, book).score(&job, &all).await;
        let answered = |entries: &[JournalEntry]| -> Vec<String> {
            let answers = entries.iter().filter_map(|entry| match entry {
                JournalEntry::Answer { id, .. } => Some(id.clone()),
                _ => None,
            });
            answers.collect()
        };
        let (settled, asked) = (answered(&entries.lock().unwrap()), service.seen.lock().unwrap().len());
        // Another process has an empty cache, or more values than before. In both cases the journal decides.
        let client = if lost % 3 == 0 { self::client() } else { client };
        let second = within(&plans(&service), &client, Book { entries: entries.clone(), ..Book::default() });
        let scored = second.score(&job, &all).await.unwrap();
        assert_eq!(numbers(&scored), (0..10).map(f64::from).collect::<Vec<_>>(), "lost at {lost}");
        let seen = service.seen.lock().unwrap();
        let mut ids: BTreeMap<String, String> = BTreeMap::new();
        for (number, (headers, body)) in seen.iter().enumerate().skip(1) {
            let request: Value = serde_json::from_slice(body).unwrap();
            let id = headers["webhook-id"].to_str().unwrap().to_owned();
            assert!(number < asked || !settled.contains(&id), "lost at {lost}: {id} was answered");
            let content = request["samples"].to_string();
            let first_id = ids.entry(content).or_insert_with(|| id.clone());
            assert_eq!(first_id, &id, "lost at {lost}: the same samples under two ids");
        }
        if first.is_ok() {
            // The cached values, two batches and four halves have a request and an answer each.
            assert_eq!(lost, 15);
            break;
        }
    }
}

#[tokio::test]
async fn what_is_kept_of_a_failure_has_no_secret_in_it() {
    let service = Service::start(|count, request| match count {
        0 => Response::builder()
            .status(500)
            .header("set-cookie", "session=hidden-cookie")
            .body(Body::from("Bearer hidden-token is wrong, {\"token\": \"hidden-callback\"}"))
            .unwrap(),
        _ => ok(&truth(request)),
    })
    .await;
    let headers = BTreeMap::from([("authorization".to_owned(), "Bearer hidden-token".to_owned())]);
    let secrets: RewardSecrets = serde_json::from_value(json!({"secret": null, "headers": headers})).unwrap();
    let url = format!("{}?key=hidden-query", service.url());
    let plans = [plan("r", &url, json!({}))];
    let rewards = Rewards::with_deps(&plans, &BTreeMap::from([("r".to_owned(), secrets)]), deps(&client())).unwrap();
    score(&rewards, 7, &samples(2, 2)).await.unwrap();
    let report = rewards.reports().remove(0);
    let text = serde_json::to_string(&report).unwrap();
    assert!(!text.contains("hidden"), "{text}");
    let failure = &report.health.failures[0];
    assert_eq!((failure.class.as_str(), failure.step), ("server_error", 7));
    assert_eq!(failure.samples, ["row_0/s_0", "row_0/s_1"]);
    assert_eq!(failure.response.as_ref().unwrap().status, Some(500));
    assert!(failure.request.body.contains("reward.score.request"), "{failure:?}");
    assert_eq!(report.health.retries, 1);
    // A resumed attempt continues the counts.
    let previous = RewardDeps { previous_reports: vec![report], ..deps(&client()) };
    let next = Rewards::with_deps(&plans, &BTreeMap::new(), previous).unwrap();
    score(&next, 8, &samples(2, 2)).await.unwrap();
    let health = next.reports().remove(0).health;
    assert_eq!((health.requests, health.samples, health.errors["server_error"]), (3, 4, 1));
}
