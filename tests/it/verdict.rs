//! Verdicts over HTTP and with real processes: the compared rows, results, restarts, cancellation, refusals.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use rlood::digest::Sha256Digest;
use rlood::event::{Event, Metrics};
use rlood::job::{Failure, FailureClass};
use rlood::protocol::{FileEntry, Outcome};
use rlood::store::{PublishCheckpoint, clock_ms};
use rlood_client::VerdictRequest;
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, signal, spec};
use crate::server;

const PATIENCE: Duration = Duration::from_secs(180);

fn records(count: u64) -> Vec<Value> {
    (0..count).map(|n| json!({"prompt": format!("Say the number {n} in a few words."), "n": n})).collect()
}

/// A job that changes its completions; about half of the random completions contain a letter of the first half of the alphabet.
fn job(eval: Value, rows: u64) -> Value {
    let mut job = spec("small", 4);
    job["dataset"] = json!({"records": records(rows)});
    job["eval"] = eval;
    job["rewards"] = json!([{"type": "regex", "pattern": "[a-m]"}]);
    job["rloo"]["num_generations"] = json!(4);
    job["optimizer"]["learning_rate"] = json!(0.05);
    job
}

async fn server(dir: &Path, auto: bool) -> Server {
    // Verdicts need no served models.
    let (auto, serving) = if auto { ("true", "auto") } else { ("false", "none") };
    let settings = [("RLOOD_AUTO_VERDICT", auto), ("RLOOD_SERVE_DEVICES", serving)];
    let server = Server::start_in(&dir.join("data"), "cpu", &settings);
    register(&server, "small", &model_copy(&dir.join("small"))).await;
    server
}

/// Returns the verdict as soon as it has ended.
async fn ended(server: &Server, path: &str) -> Value {
    let begun = Instant::now();
    loop {
        let verdict = server.get(path).await;
        if !matches!(verdict["state"].as_str(), Some("queued" | "running")) {
            return verdict;
        }
        assert!(begun.elapsed() < PATIENCE, "{verdict}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn rows_of(server: &Server, verdict: &Value) -> Vec<Value> {
    let (mut rows, mut after) = (Vec::new(), String::new());
    loop {
        let id = verdict["id"].as_str().unwrap();
        let page = server.get(&format!("/verdicts/{id}/rows?limit=100{after}")).await;
        rows.extend(page["data"].as_array().unwrap().iter().cloned());
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => return rows,
        }
    }
}

#[tokio::test]
async fn a_job_is_judged_by_itself_on_rows_that_nothing_else_reads() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), true).await;
    let guard = json!({"dataset": {"records": records(24)}, "margin": 1.5});
    let job = server.submit(&job(json!({"fraction": 0.02, "every_steps": 2, "guard": guard}), 520)).await;
    let view = server.job_in_state(&job, "succeeded").await;
    let plan = &view["plan"]["eval"];
    assert_eq!(
        (&plan["held_out_rows"], &plan["test_rows"], &plan["test_fraction"]),
        (&json!(10), &json!(52), &json!(0.1))
    );
    let verdict = ended(&server, &format!("/jobs/{job}/verdict")).await;
    assert_eq!(verdict["state"], "succeeded", "{verdict}");
    let result = &verdict["result"];
    assert_eq!(
        (&result["rows_from"], &result["rows"], &result["optimistic"]),
        (&json!("test_fraction"), &json!(52), &json!(false))
    );
    assert_eq!(verdict["progress"]["done"], verdict["progress"]["total"]);
    // The best checkpoint was compared.
    let checkpoints = server.get(&format!("/jobs/{job}/checkpoints")).await;
    let best = checkpoints["data"].as_array().unwrap().iter().find(|one| one["best"] == true).unwrap().clone();
    assert_eq!(verdict["checkpoint_id"], best["id"]);

    // The result agrees with the rows.
    let rows = rows_of(&server, &verdict).await;
    let (test, guarded): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["set"] == "test");
    assert_eq!((test.len(), guarded.len()), (52, 24));
    let mean = |of: &str| test.iter().map(|row| row[of]["reward"].as_f64().unwrap()).sum::<f64>() / 52.0;
    assert!((result["base"]["mean"].as_f64().unwrap() - mean("base")).abs() < 1e-12);
    assert!((result["difference"].as_f64().unwrap() - (mean("trained") - mean("base"))).abs() < 1e-12);
    let count = |outcome: &str| test.iter().filter(|row| row["outcome"] == outcome).count();
    for outcome in ["won", "lost", "tied"] {
        assert_eq!(result[outcome], count(outcome), "{outcome}");
    }
    let judged =
        |text: &Value| f64::from(u8::from(text["completion"].as_str().unwrap().contains(|c| matches!(c, 'a'..='m'))));
    for row in &rows {
        for model in ["base", "trained"] {
            assert_eq!(row[model]["reward"], judged(&row[model]["completions"][0]), "{row}");
        }
    }
    assert_eq!(
        (&result["guard"]["rows"], &result["guard"]["margin"], &result["guard"]["fell"]),
        (&json!(24), &json!(1.5), &json!(false))
    );

    // Both models were sampled in the process of the served models.
    let measures = String::from_utf8(server.bytes("/metrics").await).unwrap();
    assert!(measures.contains(&format!("rlood_serving_requests_total {}", 2 * (52 + 24))), "{measures}");

    // No test row was used in training or evaluation; the texts of both models are those of the playground.
    let numbers: BTreeSet<String> = test.iter().map(|row| format!("row_{}", row["row"])).collect();
    let samples = server.get(&format!("/jobs/{job}/samples?limit=100")).await;
    let samples = samples["data"].as_array().unwrap();
    assert!(
        !samples.is_empty() && samples.iter().all(|sample| !numbers.contains(sample["prompt_id"].as_str().unwrap()))
    );
    let number = test[0]["row"].as_u64().unwrap();
    let question = json!({"prompt": format!("Say the number {number} in a few words."), "checkpoint": best["step"], "sampling": {"temperature": 0}});
    let said = server.post(&format!("/jobs/{job}/generate"), &question).await;
    assert_eq!(said["base"][0]["completion"], test[0]["base"]["completions"][0]["completion"]);
    assert_eq!(said["trained"][0]["completion"], test[0]["trained"]["completions"][0]["completion"]);

    // The verdict is in the summary and in the events of the job.
    let summary = server.get(&format!("/jobs/{job}/summary")).await;
    assert_eq!((&summary["verdict"]["id"], &summary["verdict"]["verdict"]), (&verdict["id"], &result["verdict"]));
    let first: Vec<&String> = summary.as_object().unwrap().keys().take(2).collect();
    assert_eq!(first, ["id", "verdict"]);
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
    let kinds: Vec<&str> =
        events["data"].as_array().unwrap().iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[kinds.len() - 2..], ["verdict.queued", "verdict.succeeded"], "{kinds:?}");
}

#[tokio::test]
async fn a_verdict_that_is_asked_for_samples_as_asked_and_says_that_the_evaluation_chose() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), false).await;
    let job = server.submit(&job(json!({"dataset": {"records": records(30)}, "every_steps": 2}), 12)).await;
    server.job_in_state(&job, "succeeded").await;
    let id = job.parse().unwrap();
    assert_eq!(server.client.get_job_verdict(id).await.unwrap_err().code(), "no_verdict");
    let request =
        VerdictRequest { num_generations: Some(4), checkpoint: Some(json!("last")), ..VerdictRequest::default() };
    let verdict = server.client.create_verdict(id, &request).await.unwrap();
    assert_eq!(verdict.step, 4);
    let verdict = ended(&server, &format!("/verdicts/{}", verdict.id)).await;
    let result = &verdict["result"];
    assert_eq!(
        (&result["rows"], &result["rows_from"], &result["optimistic"]),
        (&json!(30), &json!("eval"), &json!(true))
    );
    assert!(result["note"].as_str().unwrap().contains("these rows also chose this checkpoint: optimistic"));
    assert_eq!((&result["method"], &result["sampling"]["num_generations"]), (&json!("exact"), &json!(4)));
    let pass_at = result["trained"]["pass_at"].as_array().unwrap_or_else(|| panic!("{verdict}"));
    assert_eq!(pass_at.iter().map(|one| one["k"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 4]);
    let rows = rows_of(&server, &verdict).await;
    assert!(rows.iter().all(|row| row["base"]["completions"].as_array().unwrap().len() == 4));
    // The same request returns the same verdict.
    let again = server.client.create_verdict(id, &request).await.unwrap();
    let again = ended(&server, &format!("/verdicts/{}", again.id)).await;
    assert_ne!(again["id"], verdict["id"]);
    assert_eq!(again["result"], verdict["result"]);
}

#[tokio::test]
async fn a_verdict_survives_the_death_of_its_server_and_ends_when_it_is_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = server(dir.path(), false).await;
    let mut long = job(json!({"dataset": {"records": records(40)}, "every_steps": 4}), 12);
    long["sampling"]["max_completion_length"] = json!(64);
    let id = first.submit(&long).await;
    first.job_in_state(&id, "succeeded").await;
    let request = json!({"num_generations": 64, "temperature": 1.0});
    let verdict = first.post(&format!("/jobs/{id}/verdict"), &request).await;
    // While the verdict is running, the same request returns it.
    assert_eq!(first.post(&format!("/jobs/{id}/verdict"), &request).await["id"], verdict["id"]);
    let path = format!("/verdicts/{}", verdict["id"].as_str().unwrap());
    let begun = Instant::now();
    while first.get(&path).await["state"] != "running" {
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    signal("KILL", first.child.id());
    first.child.wait().unwrap();
    let second = Server::start_in(&dir.path().join("data"), "cpu", &[("RLOOD_AUTO_VERDICT", "false")]);
    let known = second.get(&path).await;
    assert!(matches!(known["state"].as_str(), Some("queued" | "running" | "succeeded")), "{known}");
    let cancelled = second.post(&format!("{path}/cancel"), &json!({})).await;
    assert!(matches!(cancelled["state"].as_str(), Some("cancelled" | "succeeded")), "{cancelled}");
    assert_eq!(second.post(&format!("{path}/cancel"), &json!({})).await["state"], cancelled["state"]);
    // The next verdict is not delayed by it.
    let next = second.post(&format!("/jobs/{id}/verdict"), &json!({})).await;
    let next = ended(&second, &format!("/verdicts/{}", next["id"].as_str().unwrap())).await;
    assert_eq!(next["state"], "succeeded", "{next}");
}

#[tokio::test]
async fn what_cannot_be_judged_is_refused_or_fails_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), false).await;
    let plain = server.submit(&spec("small", 2)).await;
    server.job_in_state(&plain, "succeeded").await;
    let refused = server.client.create_verdict(plain.parse().unwrap(), &VerdictRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), "no_evaluation");

    let id = server.submit(&job(json!({"dataset": {"records": records(20)}}), 12)).await;
    server.job_in_state(&id, "succeeded").await;
    let job = id.parse().unwrap();
    for (request, pointer) in [
        (json!({"num_generations": 0}), "/num_generations"),
        (json!({"num_generations": 4, "temperature": 0}), "/temperature"),
        (json!({"checkpoint": 3}), "/checkpoint"),
        (json!({"checkpoint": "ckpt_01jd0000000000000000000000"}), "/checkpoint"),
        (json!({"samples": 3}), "/samples"),
    ] {
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let answer = http.post(format!("{}/jobs/{id}/verdict", server.url)).json(&request).send().await.unwrap();
        assert_eq!(answer.status(), 422, "{request}");
        let body: Value = answer.json().await.unwrap();
        assert_eq!(body["errors"][0]["pointer"], pointer, "{body}");
    }
    // The rows were deleted.
    let plan = server.get(&format!("/jobs/{id}")).await["plan"]["eval"]["dataset"]["id"].as_str().unwrap().to_owned();
    server.client.delete_dataset(plan.parse().unwrap()).await.unwrap();
    let verdict = server.client.create_verdict(job, &VerdictRequest::default()).await.unwrap();
    let verdict = ended(&server, &format!("/verdicts/{}", verdict.id)).await;
    assert_eq!(
        (&verdict["state"], &verdict["error"]["code"]),
        (&json!("failed"), &json!("dataset_missing")),
        "{verdict}"
    );
}

#[tokio::test]
async fn without_a_checkpoint_the_result_of_a_job_that_diverged_is_judged() {
    let server = server::Server::start().await;
    let eval = json!({"dataset": {"records": [{"prompt": "p", "answer": 1}]}});
    let job = server::with(server::with(server::job(), "eval", eval), "checkpoints", json!({"keep_last": 9}));
    let id = server.create(job).await;
    let (_, attempt) = server.claim().await;
    let store = &server.state.store;
    let files = [FileEntry { name: "manifest.json".to_owned(), size_bytes: 2, sha256: Sha256Digest::of("{}") }];
    for (step, reward) in [(1, 0.2), (2, 0.1), (3, 0.9)] {
        let metrics = &Metrics::from([("eval_reward".to_owned(), Some(reward))]);
        let checkpoint = PublishCheckpoint { job: id, attempt, step, files: &files, metrics, temporary: false };
        store.checkpoint_publish(checkpoint, clock_ms()).await.unwrap();
    }
    // The weights of step 3 gave the first loss that is not finite.
    server.report(id, attempt, 0, vec![Event::Diverged { first_step: 4, step: 6 }]).await;
    let failure = Failure {
        class: FailureClass::User,
        code: "diverged".to_owned(),
        message: "three updates were skipped".to_owned(),
        phase: None,
        step: Some(6),
        suggestion: None,
    };
    store.job_finish(id, attempt, Outcome::Failed { failure }, clock_ms()).await.unwrap();
    let path = format!("/jobs/{id}/verdict");
    for (request, step) in [(json!({}), 2), (json!({"checkpoint": "best"}), 3), (json!({"checkpoint": "last"}), 3)] {
        let answer = server.post(&path, request.clone()).await;
        assert!(answer.status.is_success(), "{}", answer.text);
        assert_eq!(answer.body["step"], step, "{request}");
    }
}
