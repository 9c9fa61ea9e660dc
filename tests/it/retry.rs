//! `POST /jobs/{id}/retry`: the step where the new job starts, the data that it reuses, and that a resumed job ends with the bytes
//! of an uninterrupted run without requesting an answered sample again.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Response;
use rlood::event::FinishReason;
use rlood::id::JobId;
use rlood::job::{Failure, FailureClass};
use rlood::protocol::{JournalEntry, Outcome, RewardAnswer};
use rlood::rollout::{Generated, RolloutId, SampledGroup, Segments};
use rlood::store::clock_ms;
use rlood_client::Which;
use serde_json::{Value, json};

use crate::fork::{ADAPTER, publish};
use crate::kills::adapter;
use crate::processes;
use crate::server::{Answer, Server, job, pointers};
use crate::service::{Service, ok};

fn failed(class: FailureClass) -> Outcome {
    let failure = Failure {
        class,
        code: "broken".to_owned(),
        message: "it broke".to_owned(),
        phase: None,
        step: None,
        suggestion: None,
    };
    Outcome::Failed { failure }
}

fn completions(step: u64) -> JournalEntry {
    let completions = vec![Generated {
        segments: Segments::of_completion(vec![5, 6, 7], None),
        finish_reason: FinishReason::Stop,
        episode: None,
    }];
    JournalEntry::Rollout {
        rollout: RolloutId::train(step),
        groups: vec![SampledGroup { row: 2, completions, prompt_ids: None }],
        samplers: Vec::new(),
    }
}

fn request(step: u64, key: &str) -> JournalEntry {
    let (rollout, id) = (RolloutId::train(step), format!("rwr_{key}"));
    JournalEntry::Request { rollout, reward: "r".into(), key: key.into(), id, body: "{}".into(), later: None }
}

fn answer(step: u64, key: &str) -> JournalEntry {
    let answer = RewardAnswer::Body { body: "[1, 2]".into() };
    JournalEntry::Answer { rollout: RolloutId::train(step), key: key.into(), id: format!("rwr_{key}"), answer }
}

/// A job with these checkpoints that then sampled a rollout, sent two requests, got one answer, and ended.
async fn parent(server: &Server, steps: &[u64], outcome: Outcome) -> JobId {
    let id = server.create(job()).await;
    let (claimed, attempt) = server.claim().await;
    assert_eq!(claimed, id);
    for step in steps {
        publish(server, id, attempt, *step, &ADAPTER).await;
    }
    let next = steps.last().copied().unwrap_or(0) + 1;
    let entries = [completions(next), request(next, "answered"), request(next, "open"), answer(next, "answered")];
    let store = &server.state.store;
    store.journal_append(id, attempt, &entries, clock_ms()).await.unwrap();
    store.job_finish(id, attempt, outcome, clock_ms()).await.unwrap();
    id
}

async fn retry(server: &Server, id: JobId, body: Value) -> Answer {
    server.post(&format!("/jobs/{id}/retry"), body).await
}

/// Returns the new job's id.
#[track_caller]
fn made(answer: &Answer) -> JobId {
    assert_eq!(answer.status, 201, "{}", answer.text);
    answer.body["id"].as_str().unwrap().parse().unwrap()
}

async fn events(server: &Server, job: JobId) -> Vec<(String, Value)> {
    let page = server.state.store.event_page(job, 0, 100).await.unwrap();
    page.into_iter().map(|event| (event.kind.clone(), serde_json::to_value(&event.data).unwrap())).collect()
}

/// Returns the journal that the new job's first worker receives.
async fn journal(server: &Server, job: JobId) -> Vec<JournalEntry> {
    server.state.store.journal_page(job, 1, 0, clock_ms()).await.unwrap().entries
}

#[tokio::test]
async fn a_retry_resumes_after_infra_and_reward_failures_and_begins_anew_after_all_other_ends() {
    let server = Server::start().await;
    for (outcome, default) in [
        (failed(FailureClass::Infra), 10),
        (failed(FailureClass::Reward), 10),
        (failed(FailureClass::User), 0),
        (Outcome::Cancelled, 0),
        (Outcome::Succeeded, 0),
    ] {
        let what = format!("{outcome:?}");
        let id = parent(&server, &[5, 10], outcome).await;
        let bodies = [
            (None, default),
            (Some(json!({})), default),
            (Some(json!({"from": "latest"})), 10),
            (Some(json!({"from": "start"})), 0),
        ];
        for (body, from_step) in bodies {
            let answer = server.call("POST", &format!("/jobs/{id}/retry"), body.clone(), None).await;
            let child = made(&answer);
            let view = &answer.body;
            assert_eq!((&view["parent"], &view["state"]), (&json!(id), &json!("queued")), "{what} {body:?}");
            assert_eq!((&view["step"], &view["total_steps"]), (&json!(from_step), &json!(20)), "{what} {body:?}");
            let resumes = from_step > 0;
            let events = events(&server, child).await;
            let told = if resumes { json!(from_step) } else { Value::Null };
            assert_eq!((events[0].0.as_str(), &events[0].1["from_step"]), ("job.created", &told), "{what} {body:?}");
            assert_eq!(events.len(), 1, "{what} {body:?}");
            let claimed = server.claimed().await;
            assert_eq!(claimed.job, child);
            let resume = claimed.resume.map(|checkpoint| (checkpoint.step, checkpoint.attempt));
            assert_eq!(resume, resumes.then_some((10, 0)), "{what} {body:?}");
            server.state.store.job_finish(child, 1, Outcome::Cancelled, clock_ms()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_resumed_job_has_the_checkpoints_and_the_answers_of_its_parent_and_none_of_its_open_requests() {
    let server = Server::start().await;
    let id = parent(&server, &[5, 10], failed(FailureClass::Infra)).await;
    let child = made(&retry(&server, id, json!({})).await);
    // The plan is identical, byte for byte, because a checkpoint contains its hash.
    let store = &server.state.store;
    let plan = async |job| store.job_get(job).await.unwrap().plan_json.get().to_owned();
    assert_eq!(plan(child).await, plan(id).await);
    // The copy also survives the deletion of the parent.
    assert_eq!(server.call("DELETE", &format!("/jobs/{id}"), None, None).await.status, 204);
    let claimed = server.claimed().await;
    assert_eq!(claimed.job, child);
    let checkpoints = store.checkpoint_list(child).await.unwrap();
    assert_eq!(checkpoints.iter().map(|row| (row.step, row.attempt)).collect::<Vec<_>>(), [(10, 0), (5, 0)]);
    for row in &checkpoints {
        server.state.files.checkpoint_verify(child, row.step, 0, &row.files).unwrap();
    }
    assert_eq!(journal(&server, child).await, [completions(11), answer(11, "answered")]);
    // The retry fails before its first own checkpoint, and is retried again.
    store.job_finish(child, 1, failed(FailureClass::Infra), clock_ms()).await.unwrap();
    let grandchild = made(&retry(&server, child, json!({"from": "latest"})).await);
    assert_eq!(server.claimed().await.resume.unwrap().step, 10);
    assert_eq!(journal(&server, grandchild).await, [completions(11), answer(11, "answered")]);
}

#[tokio::test]
async fn without_a_checkpoint_a_retry_begins_at_the_start_with_the_answers() {
    let server = Server::start().await;
    let id = parent(&server, &[], failed(FailureClass::Infra)).await;
    let answer_of = retry(&server, id, json!({})).await;
    let child = made(&answer_of);
    assert_eq!(answer_of.body["step"], 0);
    assert_eq!(events(&server, child).await[0].1["from_step"], 0);
    assert!(server.claimed().await.resume.is_none());
    assert_eq!(journal(&server, child).await, [completions(1), answer(1, "answered")]);
    store_cancel(&server, child).await;
    // Started from the beginning, the job knows nothing of the first one.
    let child = made(&retry(&server, id, json!({"from": "start"})).await);
    assert_eq!(server.claimed().await.job, child);
    assert_eq!(journal(&server, child).await, []);
}

async fn store_cancel(server: &Server, job: JobId) {
    server.state.store.job_finish(job, 1, Outcome::Cancelled, clock_ms()).await.unwrap();
}

#[tokio::test]
async fn a_damaged_checkpoint_is_passed_over_and_its_completions_with_it() {
    let server = Server::start().await;
    let files = &server.state.files;
    let damage = |id: JobId, step: u64, how: u8| {
        let path = files.checkpoint_file(id, step, 1, ADAPTER[1]).unwrap();
        match how {
            0 => std::fs::write(path, "other bytes").unwrap(),
            1 => std::fs::remove_file(path).unwrap(),
            _ => std::fs::remove_dir_all(files.checkpoint_dir(id, step, 1)).unwrap(),
        }
    };
    for how in 0..3 {
        let id = parent(&server, &[5, 10], failed(FailureClass::Infra)).await;
        damage(id, 10, how);
        let answered = retry(&server, id, json!({})).await;
        let child = made(&answered);
        assert_eq!(answered.body["step"], 5, "{}", answered.text);
        let told = events(&server, child).await;
        assert_eq!((&told[0].1["from_step"], told[1].0.as_str()), (&json!(5), "warning"));
        assert_eq!((&told[1].1["code"], &told[1].1["data"]["step"]), (&json!("checkpoint_damaged"), &json!(10)));
        assert_eq!(server.claimed().await.resume.unwrap().step, 5);
        // Answers are found by their request, so they may stay; the completions are sampled again.
        assert_eq!(journal(&server, child).await, [answer(11, "answered")]);
        store_cancel(&server, child).await;

        damage(id, 5, how);
        let answered = retry(&server, id, json!({})).await;
        let child = made(&answered);
        assert_eq!(answered.body["step"], 0, "{}", answered.text);
        assert!(server.claimed().await.resume.is_none());
        assert!(!files.checkpoint_dir(child, 5, 0).exists() && !files.checkpoint_dir(child, 10, 0).exists());
        store_cancel(&server, child).await;
    }
}

#[tokio::test]
async fn what_a_retry_cannot_mean_is_refused_with_the_field() {
    let server = Server::start().await;
    let id = parent(&server, &[5], failed(FailureClass::Infra)).await;
    for (body, pointer, words) in [
        (json!({"from": "newest"}), "/from invalid", "must be \"latest\" or \"start\""),
        (json!({"from": 3}), "/from invalid", "must be \"latest\" or \"start\""),
        (json!({"from": ["latest"]}), "/from invalid", "must be \"latest\" or \"start\""),
        (json!({"form": "latest"}), "/form invalid", "unknown field `form`"),
        (json!({"from": "latest", "step": 5}), "/step invalid", "unknown field `step`"),
    ] {
        let answer = retry(&server, id, body.clone()).await;
        assert_eq!(answer.status, 422, "{body}: {}", answer.text);
        assert_eq!(pointers(&answer), [pointer], "{body}: {}", answer.text);
        assert!(answer.body["detail"].as_str().unwrap().contains(words), "{body}: {}", answer.text);
    }
    assert_eq!(retry(&server, id, json!(["latest"])).await.status, 422);
    let running = server.create(job()).await;
    let answer = retry(&server, running, json!({"from": "latest"})).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (409, &json!("illegal_move")));
    assert_eq!(retry(&server, JobId::new(), json!({"from": "latest"})).await.status, 404);
    // A failed retry leaves nothing behind.
    let jobs = server.get("/jobs").await.body["data"].as_array().unwrap().len();
    assert_eq!(jobs, 2);
}

#[tokio::test]
async fn a_repeated_retry_is_one_retry_unless_it_begins_elsewhere() {
    let server = Server::start().await;
    let id = parent(&server, &[5], failed(FailureClass::Infra)).await;
    let path = format!("/jobs/{id}/retry");
    let send = async |body: Option<Value>, key: &str| server.call("POST", &path, body, Some(key)).await;
    let first = send(None, "one").await;
    made(&first);
    assert_eq!(send(Some(json!({})), "one").await.text, first.text, "no body and an empty one ask for the same");
    let other = send(Some(json!({"from": "start"})), "one").await;
    assert_eq!((other.status.as_u16(), &other.body["code"]), (422, &json!("idempotency_mismatch")), "{}", other.text);
    let latest = send(Some(json!({"from": "latest"})), "two").await;
    assert_ne!(made(&latest), made(&first));
    assert_eq!(send(Some(json!({"from": "latest"})), "two").await.text, latest.text);
}

#[tokio::test]
async fn the_end_of_a_job_closes_its_open_requests() {
    let server = Server::start().await;
    let store = &server.state.store;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let later = |key: &str| {
        let later = Some(rlood::callback::Later { left_ms: 60_000, sample_ids: vec!["s_0".into()], accepted: None });
        let (rollout, id) = (RolloutId::train(1), format!("rwr_{key}"));
        JournalEntry::Request { rollout, reward: "r".into(), key: key.into(), id, body: "{}".into(), later }
    };
    let entries = [later("open"), later("answered"), answer(1, "answered")];
    store.journal_append(id, attempt, &entries, clock_ms()).await.unwrap();
    assert!(store.callback_parts("rwr_open").await.unwrap().is_some());
    store.job_finish(id, attempt, failed(FailureClass::Infra), clock_ms()).await.unwrap();
    for request in ["rwr_open", "rwr_answered"] {
        assert!(store.callback_parts(request).await.unwrap().is_none(), "{request}");
    }
    made(&retry(&server, id, json!({})).await);
    let child = server.claimed().await.job;
    assert_eq!(journal(&server, child).await, [answer(1, "answered")]);
}

/// Token of the test, which acts as a worker that reports a machine failure.
const TOKEN: &str = "the-token-of-a-machine-that-breaks";
/// Number of steps of a run.
const STEPS: u64 = 6;

/// A sample as the service sees it: phase, step, name and text.
type Asked = BTreeSet<(String, u64, String, String)>;

/// Returns the samples that a job requested, and the request ids.
fn asked(service: &Service, job: &str) -> (Asked, BTreeSet<String>) {
    let (mut samples, mut ids) = (Asked::new(), BTreeSet::new());
    for (_, body) in service.seen.lock().unwrap().iter() {
        let request: Value = serde_json::from_slice(body).unwrap();
        if request["job"]["id"] != job {
            continue;
        }
        ids.insert(request["id"].as_str().unwrap().to_owned());
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        for sample in request["samples"].as_array().unwrap() {
            let (phase, step) = (text(&request["job"]["phase"]), request["job"]["step"].as_u64().unwrap());
            samples.insert((phase, step, text(&sample["sample_id"]), text(&sample["completion"])));
        }
    }
    (samples, ids)
}

/// Whether this is the second request of this step's training samples.
fn is_second(request: &Value, step: u64) -> bool {
    request["job"]["step"] == step && request["job"]["phase"] == "train" && request["samples"][0]["sample_id"] == "s_2"
}

/// A service that scores by the text, and never answers the second request of one step; returned with that step.
async fn judge() -> (Service, Arc<AtomicU64>) {
    let silent = Arc::new(AtomicU64::new(u64::MAX));
    let at = silent.clone();
    let service = Service::start(move |_, request| {
        if is_second(request, at.load(Ordering::SeqCst)) {
            return Response::builder().header("x-hang", "1").body(Body::empty()).unwrap();
        }
        let result = |sample: &Value| {
            let text = sample["completion"].as_str().unwrap();
            let reward = text.bytes().map(f64::from).sum::<f64>() % 17.0;
            json!({"sample_id": sample["sample_id"], "reward": reward})
        };
        let results: Vec<Value> = request["samples"].as_array().unwrap().iter().map(result).collect();
        ok(&json!({"version": "1", "id": request["id"], "results": results}))
    })
    .await;
    (service, silent)
}

/// Two requests per rollout. With checkpoints every second step, evaluations have the same interval.
fn spec(url: &str, every_steps: u64) -> Value {
    let mut spec = processes::spec("tiny", STEPS);
    spec["rewards"] = json!([{"name": "judge", "type": "webhook", "url": url, "max_batch_samples": 2}]);
    spec["checkpoints"] = json!({"every_steps": every_steps, "keep_last": 3});
    if every_steps == 2 {
        // A new best checkpoint would be saved immediately.
        spec["eval"] = json!({"dataset": spec["dataset"], "every_steps": 2});
    }
    spec
}

/// Counts the answers for this step's training samples in a running job's journal.
async fn answers(data: &Path, job: &str, step: u64) -> i64 {
    use sqlx::Connection;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(data.join("rlood.db")).read_only(true);
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::query_scalar(
        "SELECT COUNT(*) FROM journal WHERE job_id = ? AND step = ? AND phase = 'train' AND answer IS NOT NULL",
    )
    .bind(job)
    .bind(i64::try_from(step).unwrap())
    .fetch_one(&mut connection)
    .await
    .unwrap()
}

/// A job whose machine fails while the second request of the rollout after `step` steps is unanswered.
async fn broken(server: &processes::Server, data: &Path, service: &Service, spec: &Value, step: u64) -> String {
    let job = server.submit(spec).await;
    let begun = Instant::now();
    let hangs = || {
        let seen = service.seen.lock().unwrap();
        seen.iter().any(|(_, body)| {
            let request: Value = serde_json::from_slice(body).unwrap();
            request["job"]["id"] == job.as_str() && is_second(&request, step)
        })
    };
    while !(hangs() && answers(data, &job, step).await == 1) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", server.get(&format!("/jobs/{job}")).await);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let finish = json!({"attempt": 1, "outcome": failed(FailureClass::Infra)});
    let sent = reqwest::Client::builder().no_proxy().build().unwrap();
    let sent = sent.post(format!("{}/worker/jobs/{job}/finish", server.url)).bearer_auth(TOKEN).json(&finish);
    assert_eq!(sent.send().await.unwrap().status(), 204);
    processes::signal("KILL", server.worker_pids(1).await[0]);
    server.job_in_state(&job, "failed").await;
    job
}

#[tokio::test]
async fn a_retried_job_ends_with_the_bytes_of_an_undisturbed_one_and_asks_for_nothing_that_was_answered() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let (service, silent) = judge().await;
    let server = processes::Server::start_in(&data, "cpu", &[("RLOOD_WORKER_TOKEN", TOKEN)]);
    processes::register(&server, "tiny", &processes::model_copy(&dir.path().join("model"))).await;
    let calm = server.submit(&spec(&service.url(), 2)).await;
    server.job_in_state(&calm, "succeeded").await;
    let expected = adapter(&server, &calm).await;
    let best = server.adapter(&calm, Some(Which::Best)).await;
    let (all, _) = asked(&service, &calm);
    let first = all.iter().filter(|(phase, ..)| phase == "train").map(|(_, step, ..)| *step).min().unwrap();

    // Steps between checkpoints, rollouts before the unanswered one, a damaged checkpoint, and the step where the retry starts.
    for (every, done, damaged, from_step) in [(2, 3, None, 2), (100, 3, None, 0), (2, 5, Some(4), 2)] {
        let what = format!("a checkpoint every {every} steps, {done} steps done, {damaged:?} damaged");
        let at = first + done;
        silent.store(at, Ordering::SeqCst);
        let parent = broken(&server, &data, &service, &spec(&service.url(), every), at).await;
        silent.store(u64::MAX, Ordering::SeqCst);
        if let Some(step) = damaged {
            let file = data.join("checkpoints").join(&parent).join(format!("{step}-1/optimizer.safetensors"));
            let mut bytes = std::fs::read(&file).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(&file, bytes).unwrap();
        }
        let retried = server.post(&format!("/jobs/{parent}/retry"), &json!({})).await;
        assert_eq!((&retried["parent"], &retried["step"]), (&json!(parent), &json!(from_step)), "{what}");
        let child = retried["id"].as_str().unwrap().to_owned();
        let view = server.job_in_state(&child, "succeeded").await;
        assert_eq!((&view["attempt"], &view["step"]), (&json!(1), &json!(STEPS)), "{what}");

        assert!(adapter(&server, &child).await == expected, "{what}: another adapter");
        if every == 2 {
            assert!(server.adapter(&child, Some(Which::Best)).await == best, "{what}: another best");
        }
        let (of_parent, parent_ids) = asked(&service, &parent);
        let (of_child, child_ids) = asked(&service, &child);
        assert!(parent_ids.is_disjoint(&child_ids), "{what}");
        // The older checkpoint's steps are trained again: the journal was removed when the newer one was published.
        let again = |phase: &str, step: u64| match (damaged, phase) {
            (Some(newest), "train") => (first + from_step..first + newest).contains(&step),
            (Some(newest), _) => (from_step + 1..newest).contains(&step),
            (None, _) => false,
        };
        let open =
            |phase: &str, step: u64, sample: &str| phase == "train" && step == at && ["s_2", "s_3"].contains(&sample);
        let expected: Asked = all
            .iter()
            .filter(|asked| {
                let (phase, step, sample, _) = asked;
                if every != 2 && phase != "train" {
                    return false;
                }
                !of_parent.contains(asked) || open(phase, *step, sample) || again(phase, *step)
            })
            .cloned()
            .collect();
        assert!(expected.iter().any(|(phase, step, sample, _)| open(phase, *step, sample)), "{what}");
        let difference: Vec<_> = of_child.symmetric_difference(&expected).collect();
        assert!(difference.is_empty(), "{what}: {difference:?}");
    }
}
