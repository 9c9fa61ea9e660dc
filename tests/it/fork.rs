//! Forks and warm starts over HTTP: the resulting job, the files that it keeps, refusals; and jobs that exceed the memory.

use rlood::files::hash_file;
use rlood::id::JobId;
use rlood::protocol::{FileEntry, Outcome};
use rlood::store::{Damage, PublishCheckpoint, StoreError, clock_ms};
use serde_json::{Value, json};

use crate::server::{SECRET, Server, job, with};

/// Publishes a checkpoint of this step with files on disk.
pub async fn publish(server: &Server, job: JobId, attempt: u64, step: u64, names: &[&str]) -> String {
    let dir = server.state.files.checkpoint_dir(job, step, attempt);
    std::fs::create_dir_all(&dir).unwrap();
    let files: Vec<FileEntry> = names
        .iter()
        .chain(&["manifest.json"])
        .map(|name| {
            std::fs::write(dir.join(name), format!("{name} of step {step}")).unwrap();
            let (size_bytes, sha256) = hash_file(&dir.join(name)).unwrap();
            FileEntry { name: (*name).to_owned(), size_bytes, sha256 }
        })
        .collect();
    let checkpoint =
        PublishCheckpoint { job, attempt, step, files: &files, metrics: &Default::default(), temporary: false };
    server.state.store.checkpoint_publish(checkpoint, clock_ms()).await.unwrap().id.to_string()
}

pub const ADAPTER: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// A finished job with checkpoints of steps 5 and 10.
pub async fn parent(server: &Server, document: Value) -> JobId {
    let id = server.create(document).await;
    let (claimed, attempt) = server.claim().await;
    assert_eq!(claimed, id);
    for step in [5, 10] {
        publish(server, id, attempt, step, &ADAPTER).await;
    }
    server.state.store.job_finish(id, attempt, Outcome::Succeeded, clock_ms()).await.unwrap();
    id
}

fn document() -> Value {
    let webhook = json!({"type": "webhook", "name": "judge", "url": "http://127.0.0.1:9/score", "secret": SECRET});
    with(job(), "rewards", json!([webhook, {"type": "length"}]))
}

pub async fn fork(server: &Server, id: JobId, from_step: u64, overrides: Value) -> (u16, Value) {
    let answer =
        server.post(&format!("/jobs/{id}/fork"), json!({"from_step": from_step, "overrides": overrides})).await;
    (answer.status.as_u16(), answer.body)
}

#[tokio::test]
async fn a_fork_of_a_compatible_plan_goes_on_from_the_checkpoint() {
    let server = Server::start().await;
    let id = parent(&server, document()).await;
    let (status, body) = fork(&server, id, 5, json!({"optimizer": {"learning_rate": 3e-5}, "name": "lower"})).await;
    assert_eq!(status, 201, "{body}");
    assert_eq!((body["parent"].as_str(), body["name"].as_str()), (Some(id.to_string().as_str()), Some("lower")));
    assert_eq!((body["step"].as_u64(), body["total_steps"].as_u64()), (Some(5), Some(20)));
    assert_eq!(body["plan"]["optimizer"]["learning_rate"], 3e-5);
    assert!(body["plan"]["warm_start"].is_null());
    let child: JobId = body["id"].as_str().unwrap().parse().unwrap();
    // The secret was copied inside the server, and is not shown.
    let secrets = server.state.store.job_secrets(child).await.unwrap();
    assert_eq!(secrets["judge"].secret.as_deref(), Some(SECRET));
    assert!(!body.to_string().contains("whsec_"));
    // Its worker resumes from the parent's files, even after the parent was deleted.
    let answer = server.call("DELETE", &format!("/jobs/{id}"), None, None).await.status;
    assert_eq!(answer, 204);
    let claimed = server.claimed().await;
    assert_eq!(claimed.job, child);
    let resume = claimed.resume.unwrap();
    assert_eq!((resume.step, resume.attempt), (5, 0));
    server.state.files.checkpoint_verify(child, 5, 0, &resume.files).unwrap();
    let events = server.get(&format!("/jobs/{child}/events")).await.body.to_string();
    assert!(events.contains("job.forked") && !events.contains("\"rewind\""), "{events}");
}

#[tokio::test]
async fn a_fork_whose_checkpoints_are_all_damaged_fails_and_never_starts_at_step_0() {
    let server = Server::start().await;
    let store = &server.state.store;
    let id = parent(&server, document()).await;
    for has_its_own in [false, true] {
        let (status, body) = fork(&server, id, 5, json!({})).await;
        assert_eq!(status, 201, "{body}");
        let child: JobId = body["id"].as_str().unwrap().parse().unwrap();
        let claimed = server.claimed().await;
        let (attempt, mut damaged) = (claimed.attempt, claimed.resume.unwrap().id);
        if has_its_own {
            let newer = publish(&server, child, attempt, 8, &ADAPTER).await.parse().unwrap();
            let older = store
                .claim_discard_checkpoint(child, attempt, newer, Damage::Mismatch, clock_ms())
                .await
                .unwrap()
                .unwrap();
            assert_eq!((older.step, older.id), (5, damaged), "the one it began with is whole");
            damaged = older.id;
        }
        let lost = store.claim_discard_checkpoint(child, attempt, damaged, Damage::Mismatch, clock_ms()).await;
        assert!(matches!(lost, Err(StoreError::LeaseLost)), "{lost:?}");
        let job = server.get(&format!("/jobs/{child}")).await.body;
        assert_eq!((&job["state"], &job["failure"]["code"]), (&json!("failed"), &json!("checkpoint_damaged")), "{job}");
        assert_eq!(job["failure"]["class"], "infra");
        assert!(job["failure"]["suggestion"].as_str().unwrap().contains("fork again"), "{job}");
    }
    // A job that started at step 0 starts there again.
    let own = server.create(document()).await;
    let (_, attempt) = server.claim().await;
    let only = publish(&server, own, attempt, 5, &ADAPTER).await.parse().unwrap();
    assert_eq!(store.claim_discard_checkpoint(own, attempt, only, Damage::Mismatch, clock_ms()).await.unwrap(), None);
}

#[tokio::test]
async fn a_fork_of_another_batch_starts_warm() {
    let server = Server::start().await;
    let id = parent(&server, document()).await;
    let (status, body) = fork(&server, id, 10, json!({"training": {"prompts_per_step": 4}})).await;
    assert_eq!(status, 201, "{body}");
    assert_eq!(body["step"], 0);
    assert_eq!(body["plan"]["warm_start"]["reference"], "base");
    let child: JobId = body["id"].as_str().unwrap().parse().unwrap();
    let files = server.state.files.initial_files(child).unwrap().unwrap();
    assert_eq!(files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), ADAPTER);
    let claimed = server.claimed().await;
    assert!(claimed.job == child && claimed.resume.is_none());
    // If requested, the job starts warm even where it could resume.
    let (status, body) = fork(&server, id, 10, json!({"warm_start": {"reference": "initial"}})).await;
    assert_eq!((status, body["plan"]["warm_start"]["reference"].as_str()), (201, Some("initial")), "{body}");
    let grandchild: JobId = body["id"].as_str().unwrap().parse().unwrap();
    // A retry keeps the initial files too; deleting the job removes them.
    server.state.store.job_cancel(grandchild, clock_ms()).await.unwrap();
    let retried = server.post(&format!("/jobs/{grandchild}/retry"), json!({})).await;
    let retried: JobId = retried.body["id"].as_str().unwrap().parse().unwrap();
    assert!(server.state.files.initial_files(retried).unwrap().is_some());
    assert_eq!(server.call("DELETE", &format!("/jobs/{grandchild}"), None, None).await.status, 204);
    assert!(server.state.files.initial_files(grandchild).unwrap().is_none());
    // The cleanup at the next start keeps files that jobs refer to.
    let jobs = server.state.store.warm_start_jobs().await.unwrap();
    assert!(jobs.contains(&child) && jobs.contains(&retried));
    server.state.files.initial_sweep(&jobs).unwrap();
    assert!(server.state.files.initial_files(child).unwrap().is_some());
    server.state.files.initial_sweep(&[]).unwrap();
    assert!(server.state.files.initial_files(child).unwrap().is_none());
}

#[tokio::test]
async fn a_secret_does_not_follow_a_reward_to_another_address() {
    let server = Server::start().await;
    let id = parent(&server, document()).await;
    let moved = json!([{"type": "webhook", "name": "judge", "url": "http://127.0.0.1:10/score"}]);
    let (status, body) = fork(&server, id, 5, json!({"rewards": moved})).await;
    assert_eq!(status, 201, "{body}");
    let child: JobId = body["id"].as_str().unwrap().parse().unwrap();
    let secrets = server.state.store.job_secrets(child).await.unwrap();
    assert!(secrets.get("judge").is_none_or(|secrets| secrets.secret.is_none()));
}

#[tokio::test]
async fn forks_that_cannot_be_are_refused_with_what_to_do() {
    let server = Server::start().await;
    let id = parent(&server, document()).await;
    for (from_step, overrides, status, words) in [
        (7, json!({}), 404, &["available steps: 10, 5", "/from_step", "no_such_checkpoint"][..]),
        (11, json!({}), 404, &["available steps: 10, 5", "no_such_checkpoint"]),
        (10, json!({"training": {"max_steps": 10}}), 422, &["/overrides/training/max_steps", "above 10"]),
        (10, json!({"lora": {"r": 8}}), 422, &["/overrides/lora/r", "16"]),
        (10, json!({"lora": null}), 422, &["/overrides/lora", "adapter"]),
        (10, json!({"rloo": {"bita": 1}}), 422, &["/overrides/rloo/bita", "beta"]),
        (10, json!({"model": "plain", "dataset": {"records": [{"prompt": "a"}]}}), 422, &["prompts_per_step"]),
        (10, json!({"warm_start": {"checkpoint": "x"}}), 422, &["/overrides/warm_start"]),
        (10, json!([1]), 422, &["/overrides"]),
    ] {
        let (found, body) = fork(&server, id, from_step, overrides.clone()).await;
        assert_eq!(found, status, "{overrides}: {body}");
        for word in words {
            assert!(body.to_string().contains(word), "{overrides}: {word} is not in {body}");
        }
    }
    let none = server.create(job()).await;
    let (status, body) = fork(&server, none, 0, json!({})).await;
    assert_eq!((status, &body["code"], &body["retryable"]), (404, &json!("no_checkpoint"), &json!(true)));
    assert!(body["detail"].as_str().unwrap().contains("checkpoint.saved"), "{body}");
    // A finished job will have no further checkpoints.
    assert_eq!(server.post(&format!("/jobs/{none}/cancel"), json!({})).await.status, 200);
    let (status, body) = fork(&server, none, 0, json!({})).await;
    assert_eq!((status, &body["code"]), (404, &json!("no_such_checkpoint")));
    assert!(body["retryable"] == false && body["detail"].as_str().unwrap().contains("retry"), "{body}");
}

#[tokio::test]
async fn a_warm_start_takes_the_adapter_over_or_says_what_differs() {
    let server = Server::start().await;
    let id = parent(&server, with(document(), "lora", json!({"r": 4, "alpha": 4, "target_modules": ["q_proj"]}))).await;
    let list = server.get(&format!("/jobs/{id}/checkpoints")).await.body;
    let checkpoint = list["data"][0]["id"].as_str().unwrap().to_owned();
    let warm = |reference: &str| json!({"checkpoint": checkpoint, "reference": reference});
    let validate = async |document: Value| server.post("/jobs/validate", document).await.body;

    let body = validate(with(job(), "warm_start", warm("initial"))).await;
    assert_eq!(body["valid"], true, "{body}");
    assert_eq!((body["plan"]["lora"]["r"].as_u64(), body["plan"]["lora"]["alpha"].as_f64()), (Some(4), Some(4.0)));
    assert_eq!(body["plan"]["lora"]["target_modules"], json!(["q_proj"]));
    let own = with(with(job(), "warm_start", warm("base")), "lora", json!({"r": 8, "dropout": 0.1, "alpha": 4}));
    let body = validate(own).await;
    let errors = body["errors"].as_array().unwrap();
    assert_eq!(errors.len(), 1, "{body}");
    assert!(errors[0]["pointer"] == "/lora/r" && errors[0]["detail"].as_str().unwrap().contains("r 4, not 8"));

    for (document, pointer) in [
        (with(with(job(), "warm_start", warm("base")), "model", json!("plain")), "/warm_start/checkpoint"),
        (with(with(job(), "warm_start", warm("base")), "lora", Value::Null), "/lora"),
        (with(job(), "warm_start", warm("none")), "/warm_start/reference"),
        (with(job(), "warm_start", json!({"reference": "base"})), "/warm_start/checkpoint"),
        (with(job(), "warm_start", json!({"reference": "base", "checkpoint": "ckpt_1"})), "/warm_start/checkpoint"),
        (
            with(job(), "warm_start", json!({"reference": "base", "checkpoint": rlood::id::CheckpointId::new()})),
            "/warm_start/checkpoint",
        ),
    ] {
        let body = validate(document).await;
        let pointers: Vec<&str> =
            body["errors"].as_array().unwrap().iter().filter_map(|error| error["pointer"].as_str()).collect();
        assert_eq!(pointers, [pointer], "{body}");
    }
    // The configuration can be submitted again.
    let child = server.create(with(job(), "warm_start", warm("initial"))).await;
    let config = server.get(&format!("/jobs/{child}/config")).await.body;
    assert_eq!(config["warm_start"], warm("initial"));
    server.create(config).await;
}

#[tokio::test]
async fn a_job_of_full_fine_tuning_has_a_model_instead_of_an_adapter() {
    let server = Server::start().await;
    let id = server.create(with(job(), "lora", Value::Null)).await;
    let (_, attempt) = server.claim().await;
    let checkpoint = publish(&server, id, attempt, 5, &["config.json", "model.safetensors"]).await;
    let row = server.get(&format!("/jobs/{id}")).await.body;
    assert_eq!(row["plan"]["optimizer"]["learning_rate"], 1e-6);
    assert!(row["plan"]["lora"].is_null());
    let answer = server.get(&format!("/jobs/{id}/adapter")).await;
    assert_eq!((answer.status.as_u16(), answer.body["code"].as_str()), (409, Some("no_adapter")));
    let path = format!("/checkpoints/{checkpoint}/archive.tar");
    assert!(answer.body["detail"].as_str().unwrap().contains(&path), "{}", answer.text);
    assert_eq!(server.get(&path).await.status, 200);
    // The configuration, submitted again, is full fine-tuning too.
    let config = server.get(&format!("/jobs/{id}/config")).await.body;
    assert!(config.as_object().unwrap().contains_key("lora") && config["lora"].is_null());
    // A fork continues full fine-tuning; an adapter on top is refused.
    let (status, body) = fork(&server, id, 5, json!({})).await;
    assert!(status == 201 && body["plan"]["lora"].is_null() && body["step"] == 5, "{body}");
    let (status, body) = fork(&server, id, 5, json!({"lora": {"r": 4}})).await;
    assert_eq!(status, 422, "{body}");
}

#[tokio::test]
async fn a_job_that_cannot_fit_is_refused_with_the_numbers_and_the_knobs() {
    let server = Server::start_with(|config| config.memory_limit_bytes = Some(64 << 20)).await;
    let body = server.post("/jobs/validate", job()).await.body;
    assert_eq!(body["valid"], true, "{body}");
    assert_eq!(body["estimate"]["memory_limit_bytes"], 64 << 20);
    let parts =
        ["weights", "adapter", "gradient", "optimizer", "kv_cache", "logits", "activation", "allocator", "total"];
    for part in parts {
        assert!(body["estimate"][format!("{part}_bytes")].is_u64(), "{part}: {body}");
    }
    let large = json!({"training": {"prompts_per_step": 8, "max_steps": 2}, "rloo": {"num_generations": 64},
                       "sampling": {"max_completion_length": 200}});
    let mut document = job();
    for (key, value) in large.as_object().unwrap() {
        document[key] = value.clone();
    }
    let body = server.post("/jobs/validate", document.clone()).await.body;
    let error = &body["errors"][0];
    assert_eq!((error["code"].as_str(), body["valid"].as_bool()), (Some("not_enough_memory"), Some(false)), "{body}");
    assert_eq!(error["pointer"], "/sampling/max_completion_length");
    for word in ["64 MiB", "KV cache", "max_completion_length 200 →", "num_generations"] {
        assert!(error["detail"].as_str().unwrap().contains(word), "{word}: {error}");
    }
    assert_eq!(server.post("/jobs", document).await.status, 422);
    // With less memory the plan has smaller micro-batches.
    let short = with(job(), "sampling", json!({"max_completion_length": 16}));
    let roomy = server.post("/jobs/validate", short.clone()).await.body;
    let total = roomy["estimate"]["total_bytes"].as_u64().unwrap();
    let tight = Server::start_with(move |config| config.memory_limit_bytes = Some(total - 1)).await;
    let body = tight.post("/jobs/validate", short).await.body;
    let tokens =
        |body: &Value| body["plan"]["training"]["micro_batch_tokens"].as_u64().unwrap_or_else(|| panic!("{body}"));
    assert!(tokens(&body) < tokens(&roomy), "{body}");
    assert!(body["estimate"]["total_bytes"].as_u64().unwrap() < total);
}
