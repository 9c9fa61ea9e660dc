//! Expensive requests are limited: however many arrive, workers keep their jobs and other clients get their responses.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rlood::event::Event;
use rlood::store::SampleQuery;
use serde_json::{Map, Value, json};

use crate::processes::{Server as Process, command};
use crate::server::{Server, job, pointers, sample, with};

/// Time limit for a response that would take years if the work were not limited.
const SOON: Duration = Duration::from_secs(20);

/// Definitions `a0` … `an`, each of which applies the previous one twice: 2ⁿ steps on any value.
fn doubling(count: usize) -> Value {
    let step = |number: usize| {
        let below = json!({"$ref": format!("#/$defs/a{}", number - 1)});
        (format!("a{number}"), json!({"allOf": [below, below]}))
    };
    let definitions: Map<String, Value> = (1..=count).map(step).chain([("a0".to_owned(), json!({}))]).collect();
    json!({"$defs": definitions, "$ref": format!("#/$defs/a{count}")})
}

/// A schema whose work doubles on each level of a value.
fn recursive() -> Value {
    json!({"allOf": [{"items": {"$ref": "#"}}, {"items": {"$ref": "#"}}]})
}

fn deep_array() -> String {
    format!("{}{}", "[".repeat(100), "]".repeat(100))
}

#[tokio::test]
async fn a_schema_whose_references_double_is_refused_wherever_a_reward_is_read() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let begun = Instant::now();
    for schema in [doubling(45), doubling(20)] {
        let reward = json!({"type": "json_schema", "schema": schema});
        let tested = json!({"reward": reward, "samples": [{"prompt": "p", "completion": "1"}]});
        let eval = json!({"fraction": 0.25, "every_steps": 5, "rewards": [reward]});
        let multi = json!({"type": "multi", "graders": {"a": reward}, "calculate_output": "a"});
        for (path, body, pointer) in [
            ("/rewards/test".to_owned(), tested, "/reward/schema"),
            ("/jobs".to_owned(), with(job(), "rewards", json!([reward])), "/rewards/0/schema"),
            ("/jobs".to_owned(), with(job(), "rewards", json!([multi])), "/rewards/0/graders/a/schema"),
            (
                "/jobs".to_owned(),
                with(with(job(), "eval", eval), "training", json!({"max_steps": 2, "prompts_per_step": 1})),
                "/eval/rewards/0/schema",
            ),
            (format!("/jobs/{id}/rescore"), json!({"reward": reward}), "/reward/schema"),
        ] {
            let answer = server.post(&path, body).await;
            assert_eq!(answer.status, 422, "{path}: {}", answer.text);
            assert_eq!(pointers(&answer), [format!("{pointer} invalid_value")], "{path}");
            assert!(answer.text.contains("reference each definition once"), "{}", answer.text);
        }
        let answer = server.post("/jobs/validate", with(job(), "rewards", json!([reward]))).await;
        assert_eq!((answer.status.as_u16(), &answer.body["valid"]), (200, &json!(false)));
        assert_eq!(pointers(&answer), ["/rewards/0/schema invalid_value"]);
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn what_a_value_or_a_row_makes_costly_is_an_error_of_the_sample() {
    let server = Server::start().await;
    let begun = Instant::now();
    let samples = json!([{"prompt": "p", "completion": deep_array()}, {"prompt": "p", "completion": "[[1]]"}]);
    let reward = json!({"type": "json_schema", "schema": recursive()});
    let answer = server.post("/rewards/test", json!({"reward": reward, "samples": samples})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.body["results"][0]["error"]["code"], "schema_too_costly");
    assert_eq!(
        (&answer.body["results"][0]["reward"], &answer.body["results"][1]["reward"]),
        (&Value::Null, &json!(1.0))
    );

    let reward = json!({"type": "json_schema", "column": "schema"});
    let samples = json!([
        {"prompt": "p", "completion": "1", "schema": doubling(45)},
        {"prompt": "p", "completion": "1", "schema": doubling(45).to_string()},
        {"prompt": "p", "completion": deep_array(), "schema": recursive()},
        {"prompt": "p", "completion": "1", "schema": {"type": "integer"}}
    ]);
    let answer = server.post("/rewards/test", json!({"reward": reward, "samples": samples})).await;
    let codes: Vec<&Value> = (0..4).map(|index| &answer.body["results"][index]["error"]["code"]).collect();
    assert_eq!(
        codes,
        ["column_not_a_schema", "column_not_a_schema", "schema_too_costly", ""]
            .map(|code| match code {
                "" => Value::Null,
                code => json!(code),
            })
            .iter()
            .collect::<Vec<_>>()
    );
    assert_eq!(answer.body["results"][3]["reward"], 1.0);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_rescore_ends_with_its_time_whatever_the_samples_cost() {
    let server = Server::start().await;
    let id = trained(&server, 40, 60_000).await;
    let reward = json!({"type": "text_similarity", "reference": "{{ prompt }}{{ completion }}", "evaluation_metric": "fuzzy_match"});
    let graders: Map<String, Value> = (0..32).map(|number| (format!("g{number}"), reward.clone())).collect();
    let reward = json!({"name": "slow", "type": "multi", "graders": graders, "calculate_output": "g0"});
    let begun = Instant::now();
    let answer = server.post(&format!("/jobs/{id}/rescore"), json!({"reward": reward, "max_wait_s": 1})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!((&answer.body["complete"], &answer.body["errors"][0]["code"]), (&json!(false), &json!("not_in_time")));
    assert!(answer.body["missing"].as_u64().unwrap() > 0);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

/// Creates a running job with this many samples of this size.
async fn trained(server: &Server, count: u64, bytes: usize) -> rlood::id::JobId {
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let filling: String = (0..bytes).map(|at| char::from(b'a' + (at * at % 7 + at % 5) as u8)).collect();
    let at_once = 200.min(count);
    for step in 1..=count / at_once {
        let samples = (0..at_once).map(|number| sample(step, &format!("{number} {filling}"), Some(0.5))).collect();
        server.report(id, attempt, step, vec![Event::Samples { samples }]).await;
    }
    id
}

#[tokio::test]
async fn a_search_that_runs_out_of_time_says_where_to_go_on() {
    let server = Server::start().await;
    let id = trained(&server, 600, 10).await;
    for (sort, step) in [("recent", 1), ("best", 1), ("worst", 3)] {
        let sort = serde_json::from_value::<String>(json!(sort)).unwrap();
        let query = |after| SampleQuery {
            min_step: Some(0),
            max_step: Some(1_000_000),
            contains: Some(if step == 1 { "7 A".to_owned() } else { "nothing".to_owned() }),
            sort: match sort.as_str() {
                "best" => rlood::store::SampleSort::Best,
                "worst" => rlood::store::SampleSort::Worst,
                _ => rlood::store::SampleSort::Recent,
            },
            after,
            limit: 100,
            until: Some(Instant::now()),
            ..SampleQuery::default()
        };
        let (mut found, mut pages, mut after) = (Vec::new(), 0, None);
        loop {
            let page = server.state.store.sample_page(id, &query(after)).await.unwrap();
            found.extend(page.data.into_iter().map(|row| row.id));
            pages += 1;
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        // All that an unhurried search finds, in its order.
        let whole = SampleQuery { until: None, limit: 1000, ..query(None) };
        let whole: Vec<i64> =
            server.state.store.sample_page(id, &whole).await.unwrap().data.into_iter().map(|row| row.id).collect();
        assert_eq!(found, whole, "{sort}");
        assert_eq!(whole.is_empty(), step == 3);
        assert!(pages > 100, "{pages}");
    }
}

#[tokio::test]
async fn prompts_of_more_than_16_mib_are_left_to_the_worker() {
    let server = Server::start().await;
    let prompt = "a ".repeat(450_000);
    let rows: String = (0..20).map(|row| format!("{}\n", json!({"prompt": prompt, "answer": row}))).collect();
    let request =
        axum::http::Request::post("/datasets").header("content-type", "application/x-ndjson").body(rows.into());
    let dataset = server.send(request.unwrap()).await;
    assert_eq!(dataset.status, 201, "{}", dataset.text);
    let document = with(job(), "dataset", json!({"id": dataset.body["id"]}));
    let answer = server.post("/jobs/validate", document).await;
    assert_eq!(answer.body["valid"], true, "{}", answer.text);
    let warning = &answer.body["warnings"][0];
    assert_eq!((&warning["pointer"], &warning["code"]), (&json!("/dataset"), &json!("prompts_not_counted")));
    assert!(warning["detail"].as_str().unwrap().contains("first 19 of 20 prompts"), "{warning}");
}

/// Counts of answered calls of one kind.
#[derive(Default)]
struct Calls {
    times: Vec<Duration>,
}

impl Calls {
    fn p99(&mut self) -> Duration {
        self.times.sort_unstable();
        self.times[self.times.len() * 99 / 100]
    }
}

const KEY: &str = "operator-key-of-the-bounds-test";
const TOKEN: &str = "worker-token-of-the-bounds-test";

/// Every kind of expensive request, with its possible status codes.
fn attacks(job: &str) -> Vec<(reqwest::Method, String, Option<Value>)> {
    let test = |reward: Value, samples: Vec<Value>| json!({"reward": reward, "samples": samples});
    let schema = |schema: Value| json!({"type": "json_schema", "schema": schema});
    let long: String = (0..20_000).map(|at: u32| char::from_u32(0x4e00 + at * at % 997).unwrap()).collect();
    let similar =
        json!({"type": "text_similarity", "reference": "{{ item.answer }}", "evaluation_metric": "fuzzy_match"});
    let pattern = json!({"type": "regex", "pattern": "a[ab]{5000}[cd]"});
    let letters: String = (0_u64..100_000).map(|at| if at * at % 1009 % 2 == 0 { 'a' } else { 'b' }).collect();
    let chats = |prompt: &Value| (0..2_000).map(|row| json!({"prompt": prompt, "answer": row})).collect::<Value>();
    let chat = json!([{"role": "user", "content": "Say the number and why it is so. ".repeat(30)}]);
    let post = |path: &str, body: Value| (reqwest::Method::POST, path.to_owned(), Some(body));
    let sample = json!({"prompt": "p", "completion": deep_array()});
    let answer = json!({"prompt": "p", "completion": long, "answer": format!("x{long}")});
    vec![
        post("/rewards/test", test(schema(doubling(45)), vec![json!({"prompt": "p", "completion": "1"})])),
        post("/rewards/test", test(schema(recursive()), vec![sample; 256])),
        post("/rewards/test", test(similar.clone(), vec![answer; 60])),
        post("/rewards/test", test(pattern, vec![json!({"prompt": "p", "completion": letters}); 20])),
        post("/jobs/validate", with(self::job(), "dataset", json!({"records": chats(&chat)}))),
        post(
            &format!("/jobs/{job}/rescore"),
            json!({"reward": {"name": "s", "type": "text_similarity",
            "reference": "{{ completion }}!", "evaluation_metric": "fuzzy_match"}, "max_wait_s": 20}),
        ),
        (reqwest::Method::GET, format!("/jobs/{job}/samples?q=there+is+no+such+text"), None),
        (reqwest::Method::GET, format!("/jobs/{job}/samples?format=csv&group_id=none"), None),
    ]
}

/// Sends every attack repeatedly, three times with one key and once with another, until the server stops. Counts
/// accepted and refused ones.
fn attack(
    http: &reqwest::Client,
    url: &str,
    keys: &[String],
    id: &str,
    (answered, refused): (&Arc<AtomicUsize>, &Arc<AtomicUsize>),
) -> Vec<tokio::task::JoinHandle<()>> {
    let mut attackers = Vec::new();
    for (method, path, body) in attacks(id) {
        for key in [&keys[0], &keys[0], &keys[0], &keys[1]] {
            let (http, key, url, method) = (http.clone(), key.clone(), format!("{url}{path}"), method.clone());
            let (body, answered, refused) = (body.as_ref().map(Value::to_string), answered.clone(), refused.clone());
            attackers.push(tokio::spawn(async move {
                loop {
                    let request = http.request(method.clone(), &url).bearer_auth(&key);
                    let request = match &body {
                        Some(body) => request.header("content-type", "application/json").body(body.clone()),
                        None => request,
                    };
                    let Ok(answer) = request.send().await else { return };
                    let status = answer.status().as_u16();
                    assert!(
                        [200, 422, 429, 503, 504].contains(&status),
                        "{url}: {status} {}",
                        answer.text().await.unwrap()
                    );
                    if answer.bytes().await.is_err() {
                        return;
                    }
                    answered.fetch_add(1, Ordering::Relaxed);
                    if status == 429 || status == 503 {
                        refused.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                }
            }));
        }
    }
    attackers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_heavy_work_at_once_costs_no_lease_no_quick_answer_and_no_quick_end() {
    let server = Server::start().await;
    let id = trained(&server, 8_000, 4_000).await.to_string();
    let Server { state, router, dir } = server;
    state.store.close().await;
    drop((state, router));
    let mut by = command(&dir.path().join("data"), "none");
    let process = Process::start_by(by.env("RLOOD_API_KEY", KEY).env("RLOOD_WORKER_TOKEN", TOKEN));
    let url = process.url.clone();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut keys = Vec::new();
    for name in ["one", "two"] {
        let body = json!({"name": name, "scopes": ["read", "submit", "admin"]});
        let answer = http.post(format!("{url}/keys")).bearer_auth(KEY).json(&body).send().await.unwrap();
        let body: Value = answer.json().await.unwrap();
        keys.push(body["key"].as_str().unwrap_or_else(|| panic!("{body}")).to_owned());
    }
    let answered = Arc::new(AtomicUsize::new(0));
    let refused = Arc::new(AtomicUsize::new(0));
    let attackers = attack(&http, &url, &keys, &id, (&answered, &refused));
    let mut figures = Vec::new();
    // Other test processes share the cores: one quiet round out of a few is proof enough.
    for _ in 0..4 {
        let (mut beats, mut polls) = (Calls::default(), Calls::default());
        let round = Instant::now();
        while round.elapsed() < Duration::from_secs(5) {
            let body = json!({"attempt": 1, "phase": "rollout", "status_reason": null, "step": 0, "eta_s": null});
            let begun = Instant::now();
            let beat = http.post(format!("{url}/worker/jobs/{id}/heartbeat")).bearer_auth(TOKEN).json(&body);
            let beat = beat.send().await.unwrap();
            assert_eq!(beat.status(), 200, "the lease is lost: {}", beat.text().await.unwrap());
            beats.times.push(begun.elapsed());
            for _ in 0..4 {
                let begun = Instant::now();
                let poll = http.get(format!("{url}/jobs/{id}")).bearer_auth(KEY).send().await.unwrap();
                let view: Value = poll.json().await.unwrap();
                polls.times.push(begun.elapsed());
                assert_eq!((&view["state"], &view["attempt"]), (&json!("running"), &json!(1)), "{view}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        figures.push((beats.p99(), polls.p99(), polls.times.len()));
        println!(
            "{:?}, {} attacks answered, {} refused",
            figures.last(),
            answered.load(Ordering::Relaxed),
            refused.load(Ordering::Relaxed)
        );
        if beats.p99() <= Duration::from_secs(1) && polls.p99() <= Duration::from_millis(250) {
            break;
        }
    }
    let (beat, poll, _) = *figures.last().unwrap();
    assert!(beat <= Duration::from_secs(1) && poll <= Duration::from_millis(250), "{figures:?}");
    assert!(answered.load(Ordering::Relaxed) > 0);
    // Shut down while the attacks continue.
    let (status, took) = process.terminate();
    assert!(status.success() && took < Duration::from_secs(5), "{status} after {took:?}");
    attackers.iter().for_each(|attacker| attacker.abort());
}
