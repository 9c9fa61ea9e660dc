//! `rlood reward check` against services that follow the contract, and against one service for each way to violate it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Response};
use rlood::commands::reward_check::{Outcome, Report, examine};
use rlood::config::RewardCheckArgs;
use rlood::demo::reward_service::ExampleService;
use rlood::reward::signature::Key;
use serde_json::{Value, json};

use crate::server::SECRET;
use crate::service::{ok, text};

type Behave = dyn Fn(&HeaderMap, &Value) -> Response<Body> + Send + Sync;

/// A service that refuses invalid requests, answers `ping` to a ping, and otherwise behaves as specified. Returns its URL.
async fn service(ping: Value, behave: impl Fn(&HeaderMap, &Value) -> Response<Body> + Send + Sync + 'static) -> String {
    let behave: Arc<Behave> = Arc::new(behave);
    let answer = move |headers: HeaderMap, body: Bytes| {
        let (behave, ping) = (behave.clone(), ping.clone());
        async move {
            let Ok(request) = serde_json::from_slice::<Value>(&body) else { return text(400, "not JSON") };
            match request["type"].as_str() {
                Some("reward.ping") => ok(&ping),
                Some("reward.score.request") if request["samples"].is_array() => behave(&headers, &request),
                _ => text(422, "no such request"),
            }
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await.unwrap() });
    url
}

/// A valid answer: the length of each completion.
fn good(request: &Value) -> Value {
    let result = |sample: &Value| {
        let length = sample["completion"].as_str().unwrap().chars().count();
        json!({"sample_id": sample["sample_id"], "reward": length})
    };
    let results: Vec<Value> = request["samples"].as_array().unwrap().iter().map(result).collect();
    json!({"version": "1", "id": request["id"], "results": results})
}

fn args(url: &str) -> RewardCheckArgs {
    RewardCheckArgs {
        url: url.to_owned(),
        secret: None,
        headers: Vec::new(),
        samples: None,
        columns: Vec::new(),
        params: None,
        timeout_ms: 5_000,
        max_batch_samples: 32,
        callback_listen: "127.0.0.1:0".to_owned(),
        callback_url: None,
        json: true,
        strict: false,
    }
}

/// Names of the checks with this outcome, in order.
fn named(report: &Report, outcome: Outcome) -> Vec<&'static str> {
    let of = report.findings.iter().filter(|finding| finding.outcome == outcome);
    of.map(|finding| finding.check).collect()
}

fn detail(report: &Report, check: &str) -> String {
    report.findings.iter().find(|finding| finding.check == check).map(|f| f.detail.clone()).unwrap_or_default()
}

fn json_answer(value: &Value) -> Response<Body> {
    Response::builder().header("content-type", "application/json").body(value.to_string().into()).unwrap()
}

#[tokio::test]
async fn a_service_that_keeps_the_contract_passes_everything() {
    let secret = Key::generate().unwrap();
    let service = ExampleService::start(&secret).await.unwrap();
    let report =
        examine(&RewardCheckArgs { secret: Some(secret.clone()), ..args(&service.url()) }, false).await.unwrap();
    assert!(report.ok, "{:#?}", report.findings);
    // Its serde ignores an unknown version of a request; there is no other finding.
    assert_eq!(named(&report, Outcome::Warning), Vec::<&str>::new(), "{:#?}", report.findings);
    assert_eq!(named(&report, Outcome::Skipped), Vec::<&str>::new());
    for check in ["unsigned", "wrong_signature", "tampered_body", "stale_timestamp", "future_timestamp", "rotation"] {
        assert!(named(&report, Outcome::Ok).contains(&check), "{check}");
    }
    assert!(report.latency_ms.unwrap().p95 >= report.latency_ms.unwrap().p50);
    assert!(!serde_json::to_string(&report).unwrap().contains(&secret));
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a table: one service for each rule it breaks")]
async fn every_broken_rule_is_named() {
    type Rule = (&'static [&'static str], Value, Box<Behave>);
    let count = Arc::new(AtomicU64::new(0));
    let each = |change: fn(usize, &mut Value)| -> Box<Behave> {
        Box::new(move |_, request| {
            let mut answer = good(request);
            let results = answer["results"].as_array_mut().unwrap();
            results.iter_mut().enumerate().for_each(|(at, result)| change(at, result));
            json_answer(&answer)
        })
    };
    let whole = |answer: fn(&Value) -> Response<Body>| -> Box<Behave> { Box::new(move |_, request| answer(request)) };
    let rules: Vec<Rule> = vec![
        (&["single_sample"], json!({}), each(|_, result| result["reward"] = json!("0.5"))),
        (&["single_sample"], json!({}), whole(|_| text(500, "boom"))),
        (&["single_sample"], json!({}), whole(|_| text(202, "{}"))),
        (&["single_sample"], json!({}), whole(|_| text(200, "<html>"))),
        // Not a finite number, as Python's json module writes it.
        (
            &["groups", "batch", "concurrency"],
            json!({}),
            whole(|request| {
                let text = good(request).to_string();
                let text = if request["samples"].as_array().unwrap().len() > 1 {
                    text.replacen("\"reward\":1", "\"reward\":NaN", 1)
                } else {
                    text
                };
                json_answer(&Value::Null).map(|_| Body::from(text))
            }),
        ),
        // The last of several samples gets no result.
        (
            &["groups", "batch", "concurrency"],
            json!({}),
            whole(|request| {
                let mut answer = good(request);
                let results = answer["results"].as_array_mut().unwrap();
                if results.len() > 1 {
                    results.pop();
                }
                json_answer(&answer)
            }),
        ),
        // Rewards depend on the position, not on the sample.
        (&["order"], json!({}), each(|at, result| result["reward"] = json!(at))),
        (&["values"], json!({"range": [0, 1]}), each(|_, _| ())),
        (&["values"], json!({}), each(|_, result| *result = json!({"sample_id": result["sample_id"], "reward": null}))),
        (
            &["empty_completion"],
            json!({}),
            whole(|request| {
                let empty = request["samples"].as_array().unwrap().iter().any(|sample| sample["completion"] == "");
                if empty { text(500, "ZeroDivisionError") } else { json_answer(&good(request)) }
            }),
        ),
        (
            &["no_columns"],
            json!({}),
            whole(|request| match request["samples"][0]["columns"]["answer"].is_null() {
                true => text(400, "KeyError: 'answer'"),
                false => json_answer(&good(request)),
            }),
        ),
        // The service announces more samples than it accepts.
        (
            &["batch", "over_the_limit"],
            json!({"max_batch_samples": 20}),
            whole(|request| match request["samples"].as_array().unwrap().len() {
                0..=12 => json_answer(&good(request)),
                _ => text(400, "too many"),
            }),
        ),
        (
            &["unknown_fields"],
            json!({}),
            whole(|request| match request.get("from_the_future") {
                Some(_) => text(422, "extra fields not permitted"),
                None => json_answer(&good(request)),
            }),
        ),
        (
            &["unknown_version"],
            json!({}),
            whole(
                |request| if request["version"] == "1" { json_answer(&good(request)) } else { text(500, "KeyError") },
            ),
        ),
        (
            &["idempotency"],
            json!({}),
            Box::new(move |_, request| {
                let mut answer = good(request);
                answer["results"][0]["reward"] = json!(1e6 + count.fetch_add(1, Ordering::SeqCst) as f64);
                json_answer(&answer)
            }),
        ),
    ];
    for (at, (expected, ping, behave)) in rules.into_iter().enumerate() {
        let report =
            examine(&args(&service(ping, move |headers, request| behave(headers, request)).await), false).await;
        let report = report.unwrap();
        assert!(!report.ok, "rule {at}");
        assert_eq!(named(&report, Outcome::Failed), expected, "rule {at}: {:#?}", report.findings);
        let failed = report.findings.iter().filter(|finding| finding.outcome == Outcome::Failed);
        assert!(failed.into_iter().all(|finding| finding.fix.is_some()), "rule {at}: what to do is said");
    }
}

#[tokio::test]
async fn what_works_but_should_not_stay_is_a_warning() {
    // A service that ignores signatures, returns a bare list with a plain content type and a constant, with odd ids, and answers
    // 200 to invalid requests.
    let url = service(json!({"max_batch_samples": 8, "modes": ["sync"]}), |_, request| {
        let count = request["samples"].as_array().unwrap().len();
        if count > 8 { text(413, "") } else { text(200, json!(vec![0.5; count]).to_string()) }
    })
    .await;
    let samples = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        samples.path(),
        "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"a\", \"completion\": \"c\"}\n",
    )
    .unwrap();
    let args =
        RewardCheckArgs { secret: Some(SECRET.to_owned()), samples: Some(samples.path().to_owned()), ..args(&url) };
    let report = examine(&args, false).await.unwrap();
    assert!(report.ok, "{:#?}", report.findings);
    let expected = [
        "content_type",
        "envelope",
        "values",
        "announced_batch",
        "unsigned",
        "wrong_signature",
        "tampered_body",
        "stale_timestamp",
        "future_timestamp",
    ];
    assert_eq!(named(&report, Outcome::Warning), expected, "{:#?}", report.findings);
    assert!(detail(&report, "values").contains("all 2 rewards are 0.5"));
}

#[tokio::test]
async fn nobody_there_a_wrong_secret_and_a_redirect_are_told_apart() {
    let nobody = examine(&args("http://127.0.0.1:9/"), false).await.unwrap();
    assert!(detail(&nobody, "ping").contains("cannot connect"), "{:?}", nobody.findings);
    let service = ExampleService::start(&Key::generate().unwrap()).await.unwrap();
    for (secret, said) in
        [(None, "requires authentication"), (Some(SECRET.to_owned()), "is --secret the service's own")]
    {
        let report = examine(&RewardCheckArgs { secret, ..args(&service.url()) }, false).await.unwrap();
        let last = report.findings.last().unwrap();
        assert!(last.check == "ping" && last.fix.as_ref().unwrap().contains(said), "{last:?}");
    }
    let elsewhere =
        axum::Router::new().fallback(|| async { axum::response::Redirect::permanent("http://127.0.0.1:9/x") });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/?key=hidden", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, elsewhere).await.unwrap() });
    let report = examine(&args(&url), false).await.unwrap();
    let last = report.findings.last().unwrap();
    assert!(last.fix.as_ref().unwrap().contains("use http://127.0.0.1:9/x"), "{last:?}");
    assert!(!serde_json::to_string(&report).unwrap().contains("hidden"), "a query may hold a key");
}

#[tokio::test]
async fn crashes_on_malformed_bodies_and_requests_mixed_up_are_found() {
    let app = Router::new().fallback(|body: Bytes| async move {
        // A service without any validation, like many first versions.
        match serde_json::from_slice::<Value>(&body) {
            Ok(request) if request["type"] == "reward.ping" => ok(&json!({})),
            Ok(request) if request["samples"].is_array() => json_answer(&good(&request)),
            _ => text(500, "Traceback (most recent call last)"),
        }
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let report = examine(&args(&url), false).await.unwrap();
    assert_eq!(named(&report, Outcome::Failed), ["malformed"], "{:#?}", report.findings);
    assert!(detail(&report, "malformed").contains("an empty body (500)"));
    assert_eq!(named(&report, Outcome::Warning), ["malformed"], "an unknown type was answered");
}

/// A service that answers 202 and runs `then` with the request.
async fn later<F: Future<Output = ()> + Send + 'static>(
    then: impl Fn(Value) -> F + Clone + Send + Sync + 'static,
) -> String {
    service(json!({"modes": ["async", "sync"]}), move |_, request| {
        if request["reply"]["modes"] == json!(["sync"]) {
            return json_answer(&good(request));
        }
        tokio::spawn(then(request.clone()));
        Response::builder().status(202).body(json!({"id": request["id"]}).to_string().into()).unwrap()
    })
    .await
}

async fn post_back(request: &Value, token: &str, body: &Value) -> u16 {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = request["reply"]["callback_url"].as_str().unwrap();
    client.post(url).bearer_auth(token).json(body).send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn later_answers_are_taken_in_parts_and_looked_at() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let url = later(|request| async move {
        let token = request["reply"]["token"].as_str().unwrap();
        let results = good(&request)["results"].as_array().unwrap().clone();
        let (first, second) = results.split_at(5);
        assert_eq!(post_back(&request, token, &json!({"results": first})).await, 200);
        assert_eq!(post_back(&request, token, &json!({"results": second, "done": true})).await, 200);
    })
    .await;
    let report = examine(&args(&url), false).await.unwrap();
    assert!(report.ok && named(&report, Outcome::Ok).contains(&"async"), "{:#?}", report.findings);
    assert!(detail(&report, "async").contains("2 callbacks"), "{}", detail(&report, "async"));

    let stranger = later(|request| async move {
        post_back(&request, "another", &json!({"results": [], "done": true})).await;
    })
    .await;
    let report = examine(&args(&stranger), false).await.unwrap();
    assert_eq!(named(&report, Outcome::Failed), ["async"]);
    assert!(detail(&report, "async").contains("reply.token"), "{}", detail(&report, "async"));

    let never = later(|_| async {}).await;
    let report = examine(&RewardCheckArgs { timeout_ms: 2_500, ..args(&never) }, false).await.unwrap();
    assert_eq!(named(&report, Outcome::Failed), ["async"], "{:#?}", report.findings);
    assert!(detail(&report, "async").contains("0 of 12 results within 2500 ms"));
}

#[tokio::test]
async fn a_flag_that_cannot_be_used_says_which_and_no_secret_is_repeated() {
    let refused = |change: fn(&mut RewardCheckArgs)| {
        let mut args = args("http://127.0.0.1:9/");
        change(&mut args);
        async move { examine(&args, false).await.unwrap_err().to_string() }
    };
    assert!(
        refused(|args| args.secret = Some("hunter2".to_owned())).await.contains("secret: a secret must be 'whsec_'")
    );
    assert!(!refused(|args| args.secret = Some("hunter2".to_owned())).await.contains("hunter2"));
    assert!(refused(|args| args.headers = vec!["authorization hunter2".to_owned()]).await.contains("no colon"));
    assert!(!refused(|args| args.headers = vec!["authorization hunter2".to_owned()]).await.contains("hunter2"));
    assert!(refused(|args| args.url = "127.0.0.1:8090".to_owned()).await.contains("url"));
    assert!(refused(|args| args.params = Some("{".to_owned())).await.contains("--params"));
    assert!(refused(|args| args.columns = vec!["answer".to_owned()]).await.contains("NAME=VALUE"));
}

/// The check signs like a job: the contract's own key accepts its signatures.
#[tokio::test]
async fn requests_of_a_check_are_signed_as_a_jobs() {
    let key = Key::parse(SECRET).unwrap();
    let url = service(json!({}), move |headers, request| {
        let header = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default();
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        let signature = header("webhook-signature");
        assert_eq!(header("webhook-id"), header("idempotency-key"));
        match key.verify(
            &header("webhook-id"),
            &header("webhook-timestamp"),
            &signature,
            request.to_string().as_bytes(),
            now_s,
        ) {
            Ok(()) => json_answer(&good(request)),
            Err(why) => text(401, why.to_string()),
        }
    })
    .await;
    let report = examine(&RewardCheckArgs { secret: Some(SECRET.to_owned()), ..args(&url) }, false).await.unwrap();
    assert!(report.ok, "{:#?}", report.findings);
}
