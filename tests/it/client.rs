//! The client of `crates/client` against the real server: each resource once, with a job of two steps.

use std::path::Path;
use std::time::Duration;

use rlood::id::{CheckpointId, JobId};
use rlood::job::{RetryFrom, State};
use rlood::scopes::Scope;
use rlood::spec::format::Format;
use rlood::webhooks::MessageType;
use rlood_client::{
    AuditFilter, Checked, Client, Content, DatasetUpload, Document, ExportForm, Fork, GenerationRequest, JobChange,
    JobFilter, JobUpdate, KeyState, MetricsQuery, NewKey, NewWebhook, Preflight, SampleQuery, WebhookPatch, Which,
};
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, spec};

const KEY: &str = "operator-key-0123456789";
const ROWS: &str = "{\"prompt\":\"Say one.\"}\n{\"prompt\":\"Say two.\"}\n{\"prompt\":\"Say three.\"}\n";

/// A server with a worker and a model, and a client with its key.
async fn start(dir: &Path, devices: &str) -> (Server, Client) {
    let root = dir.to_str().unwrap();
    let settings = [("RLOOD_API_KEY", KEY), ("RLOOD_MODEL_ROOT", root), ("RLOOD_ALLOW_OUTGOING", "loopback")];
    let server = Server::start_in(&dir.join("data"), devices, &settings);
    let client = Client::builder(&server.url).no_proxy().api_key(KEY).build().unwrap();
    client.create_model("org/tiny", model_copy(&dir.join("model")).to_str().unwrap()).await.unwrap();
    (server, client)
}

/// A job without its rows.
fn job(max_steps: u64) -> Value {
    let mut job = spec("org/tiny", max_steps);
    job.as_object_mut().unwrap().remove("dataset");
    job
}

fn rows() -> Content {
    Content::from(ROWS.to_owned())
}

#[tokio::test]
async fn a_job_from_its_rows_to_its_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, client) = start(dir.path(), "cpu").await;
    let checked = client.validate_job(&Document::from(&spec("org/tiny", 2)), None).await.unwrap();
    assert!(checked.valid && checked.estimate.unwrap().num_parameters > 1000 && checked.plan.is_some());
    let mut wrong = spec("org/tiny", 2);
    wrong["rloo"]["beta"] = json!(-1);
    let refused = client.create_job(&Document::from(&wrong)).await.unwrap_err();
    assert_eq!((refused.code(), refused.problem().unwrap().errors[0].pointer.as_str()), ("invalid_spec", "/rloo/beta"));
    let checked = client.validate_job(&Document::from(&wrong), Some(Preflight::default())).await.unwrap();
    assert!(!checked.valid && checked.errors[0].pointer == "/rloo/beta" && checked.probe.is_none());

    let text = Format::Yaml.write(&job(2)).unwrap();
    let document = Document::text(Format::Yaml, text);
    let keyed = client.with_idempotency_key("once");
    let id = keyed.create_job_with_rows(&document, "application/x-ndjson", rows()).await.unwrap().id;
    let again = keyed.create_job_with_rows(&document, "application/x-ndjson", rows()).await.unwrap();
    assert_eq!(again.id, id, "one key, one job");

    let (mut updates, mut seqs, mut kinds, mut end) = (client.follow_job(id, 0), Vec::new(), Vec::new(), None);
    while let Some(update) = updates.next().await.unwrap() {
        match update {
            JobUpdate::Event(event) => {
                seqs.push(event.seq);
                kinds.push(event.kind);
            }
            JobUpdate::Removed { .. } => panic!("nothing was removed"),
            JobUpdate::End { state } => end = Some(state),
        }
    }
    let done = client.wait_for_job(id).await.unwrap();
    assert_eq!((end, done.state, done.step), (Some(State::Succeeded), State::Succeeded, 2));
    assert_eq!(seqs, (1..=done.last_seq).collect::<Vec<_>>());
    assert_eq!((kinds[0].as_str(), kinds.last().unwrap().as_str()), ("job.created", "job.succeeded"));
    let listed = client.list_events(id, 3).collect().await.unwrap();
    assert_eq!(listed.iter().map(|event| event.seq).collect::<Vec<_>>(), seqs[3..]);

    let checkpoint = client.list_checkpoints(id).collect().await.unwrap().remove(0);
    assert_eq!((checkpoint.job_id, checkpoint.step), (id, 2));
    assert_eq!(client.get_checkpoint(checkpoint.id).await.unwrap(), checkpoint);
    assert!(client.get_manifest(checkpoint.id).await.unwrap()["files"].is_array());
    let files = client.download_files(&checkpoint, &dir.path().join("files")).await.unwrap();
    assert_eq!(files.len(), checkpoint.files.len());
    assert!(files.iter().all(|file| file.checked == Checked::Sha256));
    let tar = client.download_adapter(id, Some(Which::Last), &dir.path().join("adapter.tar")).await.unwrap();
    assert_eq!(tar.checked, Checked::Sha256);
    tar::Archive::new(std::fs::File::open(&tar.path).unwrap()).unpack(dir.path().join("adapter")).unwrap();
    let weights = |folder: &str| std::fs::read(dir.path().join(folder).join("adapter_model.safetensors")).unwrap();
    assert_eq!(weights("adapter"), weights("files"));
    assert!(client.download_archive(checkpoint.id, &dir.path().join("all.tar")).await.unwrap().size_bytes > 0);
    assert!(client.pin_checkpoint(checkpoint.id).await.unwrap().pinned);
    assert!(!client.unpin_checkpoint(checkpoint.id).await.unwrap().pinned);
    let missing = client.get_checkpoint(CheckpointId::new()).await.unwrap_err();
    assert_eq!(missing.code(), "not_found");

    look_at_records(&client, id, dir.path()).await;
    let answer = client.generate(id, &GenerationRequest::new("Say one.")).await.unwrap();
    assert_eq!((answer.job_id, answer.step, answer.base.len(), answer.trained.len()), (id, 2, 1, 1));
    let fork = Fork { from_step: 2, overrides: Some(json!({"training": {"max_steps": 3}})) };
    let forked = client.fork_job(id, &fork).await.unwrap();
    assert_eq!((forked.parent, client.wait_for_job(forked.id).await.unwrap().step), (Some(id), 3));
    let compared = client.compare_jobs(&[id, forked.id], &MetricsQuery::default()).await.unwrap();
    assert!(compared.jobs.len() == 2 && compared.config.iter().any(|one| one.pointer == "/training/max_steps"));
    let courses = client.list_courses(&[id, forked.id], Some(4)).await.unwrap();
    assert_eq!((courses[0].id, courses[0].points.len()), (id, 2));
}

/// Reads metrics, samples, logs, rewards, the summary and the settings of a job of two steps.
async fn look_at_records(client: &Client, id: JobId, dir: &Path) {
    let query = MetricsQuery { keys: vec!["reward".to_owned(), "kl".to_owned()], ..MetricsQuery::default() };
    let steps = client.get_metrics(id, &query).collect().await.unwrap();
    assert_eq!(steps.iter().map(|row| row.step).collect::<Vec<_>>(), [1, 2]);
    assert!(steps.iter().all(|row| row.get("reward").is_some() && !row.metrics.contains_key("loss")));
    let csv = client.export_metrics(id, &query, ExportForm::Csv, &dir.join("metrics.csv")).await.unwrap();
    assert_eq!(std::fs::read_to_string(csv.path).unwrap().lines().next(), Some("step,kl,reward"));
    let query = SampleQuery { step: Some(1), limit: Some(3), ..SampleQuery::default() };
    let samples = client.list_samples(id, &query).collect().await.unwrap();
    assert_eq!(samples.len(), 4, "two prompts, two completions each, in two pages");
    let query = SampleQuery { step: Some(1), ..SampleQuery::default() };
    let ndjson = client.export_samples(id, &query, ExportForm::Ndjson, &dir.join("samples.ndjson")).await.unwrap();
    assert_eq!(std::fs::read_to_string(ndjson.path).unwrap().lines().count(), 4);
    client.list_logs(id).collect().await.unwrap();
    assert!(client.list_alerts(id, false).await.is_ok());
    let summary = client.get_summary(id).await.unwrap();
    assert_eq!((summary.state, summary.checkpoints.last.unwrap().step), (State::Succeeded, 2));
    let rewards = client.list_job_rewards(id).await.unwrap();
    assert_eq!((rewards[0].name.as_str(), rewards[0].samples), ("length", 8));
    let reward = json!({"type": "length", "min_words": 2, "max_words": 9});
    let rescored = client.rescore_job(id, &json!({"reward": reward})).await.unwrap();
    assert!(rescored.complete && rescored.results.len() == 8 && rescored.figures["old"]["count"] == 8);
    for format in [Format::Json, Format::Yaml, Format::Toml] {
        let settings = client.get_config(id, format).await.unwrap();
        assert!(client.validate_job(&settings, None).await.unwrap().valid, "{format:?}");
    }
}

#[tokio::test]
async fn jobs_are_moved_changed_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, client) = start(dir.path(), "none").await;
    let mut changes = client.follow_jobs();
    assert!(matches!(changes.next().await.unwrap(), JobChange::Reload));
    let mut document = spec("org/tiny", 2);
    document["metadata"] = json!({"team": "a & b"});
    let id = client.create_job(&Document::from(&document)).await.unwrap().id;
    let told = tokio::time::timeout(Duration::from_secs(10), changes.next()).await.unwrap().unwrap();
    assert!(matches!(&told, JobChange::Changed(job) if job.id == id), "{told:?}");
    let waited = client.get_job_within(id, Duration::from_secs(1)).await.unwrap();
    assert_eq!((waited.state, waited.queue_position), (State::Queued, Some(1)));

    assert_eq!(client.pause_job(id).await.unwrap().state, State::Paused);
    assert_eq!(client.wait_for_job(id).await.unwrap().state, State::Paused);
    assert_eq!(client.resume_job(id).await.unwrap().state, State::Queued);
    let refused = client.resume_job(id).await.unwrap_err();
    assert_eq!((refused.code(), refused.status()), ("illegal_move", Some(409)));
    assert_eq!(client.delete_job(id).await.unwrap_err().code(), "illegal_move");
    let waiting = client.download_adapter(id, None, &dir.path().join("adapter.tar")).await.unwrap_err();
    assert!(waiting.code() == "no_checkpoint" && waiting.is_retryable());
    let renamed = client.patch_job(id, &json!({"name": "mine", "priority": 3})).await.unwrap();
    assert_eq!(renamed.name.as_deref(), Some("mine"));
    assert_eq!(client.cancel_job(id).await.unwrap().state, State::Cancelled);

    let retried = client.retry_job(id, Some(RetryFrom::Start)).await.unwrap();
    assert_eq!((retried.parent, retried.state), (Some(id), State::Queued));
    let metadata = [("team".to_owned(), "a & b".to_owned())].into();
    let filter = JobFilter { state: Some(State::Cancelled), metadata, ..JobFilter::default() };
    let cancelled = client.list_jobs(&filter).collect().await.unwrap();
    assert_eq!(cancelled.iter().map(|job| job.id).collect::<Vec<_>>(), [id]);
    client.delete_job(id).await.unwrap();
    assert_eq!(client.get_job(id).await.unwrap_err().code(), "not_found");
    let demo = client.create_demo().await.unwrap();
    assert_eq!(demo.name.as_deref(), Some("demo: sums"));
    let jobs = client.list_jobs(&JobFilter { limit: Some(1), ..JobFilter::default() }).collect().await.unwrap();
    assert_eq!(jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [demo.id, retried.id]);
}

#[tokio::test]
async fn datasets_and_models_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, client) = start(dir.path(), "none").await;
    let file = dir.path().join("rows.ndjson");
    std::fs::write(&file, ROWS).unwrap();
    let upload = DatasetUpload::ndjson(file.as_path()).named("three & more");
    let dataset = client.create_dataset(&upload).await.unwrap();
    assert_eq!((dataset.num_rows, dataset.name.as_deref()), (3, Some("three & more")));
    assert_eq!(client.create_dataset(&DatasetUpload::ndjson(rows())).await.unwrap().id, dataset.id, "the same rows");
    assert_eq!(client.get_dataset(dataset.id).await.unwrap(), dataset);
    assert_eq!(client.list_datasets().collect().await.unwrap(), std::slice::from_ref(&dataset));
    let second = &client.list_rows(dataset.id).collect().await.unwrap()[1];
    assert_eq!((second.row, &second.record["prompt"]), (1, &json!("Say two.")));
    let copy = client.download_dataset(dataset.id, &dir.path().join("copy.ndjson")).await.unwrap();
    assert_eq!((copy.sha256, copy.size_bytes, copy.checked), (dataset.sha256, dataset.size_bytes, Checked::Sha256));
    let csv = DatasetUpload {
        name: None,
        media_type: "text/csv".to_owned(),
        rows: Content::from("answer\n4\n".to_owned()),
        mapping: None,
    };
    let refused = client.create_dataset(&csv).await.unwrap_err();
    assert_eq!(refused.code(), "invalid_dataset");
    let look = client.preview_dataset(&csv, None).await.unwrap();
    assert_eq!((look.columns[0].name.as_str(), look.rows.len(), look.errors.len()), ("answer", 0, 1));
    let mapping = serde_json::from_value(json!({"map": {"prompt": "Is it {{ answer }}?"}})).unwrap();
    let mapped = csv.mapped(mapping);
    let look = client.preview_dataset(&mapped, Some("org/tiny")).await.unwrap();
    assert!(look.errors.is_empty() && look.rows[0].num_tokens.is_some_and(|tokens| tokens > 0), "{look:?}");
    let made = client.create_dataset(&mapped).await.unwrap();
    assert_eq!((made.num_rows, made.columns), (1, vec!["prompt".to_owned(), "answer".to_owned()]));
    client.delete_dataset(made.id).await.unwrap();
    let unknown = serde_json::from_value(json!({"hub": "nobody/nothing"})).unwrap();
    assert_eq!(client.create_hub_dataset(Some("x"), &unknown).await.unwrap_err().code(), "invalid_dataset");
    assert_eq!(
        client.create_hub_model(None, "nobody/nothing", Some("main")).await.unwrap_err().code(),
        "invalid_model"
    );
    client.delete_dataset(dataset.id).await.unwrap();
    assert_eq!(client.delete_dataset(dataset.id).await.unwrap_err().code(), "not_found");

    let model = client.get_model("org/tiny").await.unwrap();
    assert_eq!(model.card.as_ref().unwrap().architecture, "qwen3");
    assert_eq!(client.list_models().collect().await.unwrap(), [model]);
    assert_eq!(client.create_model("bad", "/no/such/place").await.unwrap_err().code(), "invalid_model");
    client.delete_model("org/tiny").await.unwrap();
    assert_eq!(client.get_model("org/tiny").await.unwrap_err().status(), Some(404));
    let test = client
        .test_reward(
            &json!({"type": "exact_match", "column": "answer"}),
            &json!([{"prompt": "2 + 2?", "completion": "4", "columns": {"answer": "4"}}]),
        )
        .await
        .unwrap();
    assert!(test.ok && test.results[0].reward == Some(1.0), "{test:?}");
}

#[tokio::test]
async fn the_server_its_keys_and_its_webhooks() {
    let dir = tempfile::tempdir().unwrap();
    let (server, client) = start(dir.path(), "cpu").await;
    assert_eq!(client.version().await.unwrap(), env!("CARGO_PKG_VERSION"));
    client.livez().await.unwrap();
    client.readyz().await.unwrap();
    assert!(client.metrics().await.unwrap().contains("rlood_build_info"));
    assert!(client.get_openapi().await.unwrap()["paths"].is_object());
    while client.list_workers().await.unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(client.get_session().await.unwrap().keys_required);
    let stranger = Client::builder(&server.url).no_proxy().build().unwrap();
    assert_eq!(stranger.get_session().await.unwrap_err().code(), "unauthorized");
    stranger.livez().await.unwrap();

    let new = NewKey { name: "ci".to_owned(), scopes: vec![Scope::Read], owner: None, expires_in_s: Some(60) };
    let made = client.create_key(&new).await.unwrap();
    let reader = Client::builder(&server.url).no_proxy().api_key(made.key.unwrap()).build().unwrap();
    assert_eq!(reader.get_session().await.unwrap().key_id, Some(made.view.id));
    let refused = reader.create_job(&Document::from(&spec("org/tiny", 2))).await.unwrap_err();
    assert_eq!(refused.code(), "forbidden");
    assert_eq!(client.list_keys().collect().await.unwrap().len(), 1);
    assert_eq!(client.get_key(made.view.id).await.unwrap().scopes, [Scope::Read]);
    let revoked = client.revoke_key(made.view.id).await.unwrap();
    assert_eq!((revoked.view.state, revoked.webhooks.len()), (KeyState::Revoked, 0));
    let target = Some(format!("/keys/{}", made.view.id));
    let changes = client.list_changes(&AuditFilter { actor: None, target }).collect().await.unwrap();
    let actions: Vec<&str> = changes.iter().map(|change| change.action.as_str()).collect();
    assert_eq!(actions, ["DELETE /keys/{id}", "POST /keys"]);

    let endpoint = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", endpoint.local_addr().unwrap());
    let app = axum::Router::new().fallback(|| async { axum::http::StatusCode::NO_CONTENT });
    tokio::spawn(async move { axum::serve(endpoint, app).await.unwrap() });
    let events = Some(vec![MessageType::JobSucceeded]);
    let hook = client.create_webhook(&NewWebhook { url, events, ..NewWebhook::default() }).await.unwrap();
    assert!(hook.secret.unwrap().starts_with("whsec_"));
    let id = hook.webhook.id;
    let patch = WebhookPatch { description: Some(Some("mine".to_owned())), ..WebhookPatch::default() };
    assert_eq!(client.patch_webhook(id, &patch).await.unwrap().description.as_deref(), Some("mine"));
    let rotated = client.rotate_secret(id, None, Some(0)).await.unwrap();
    assert!(rotated.secret.is_some() && rotated.webhook.description.as_deref() == Some("mine"));
    let tested = client.test_webhook(id).await.unwrap();
    assert_eq!((tested.kind.as_str(), tested.tries.len()), ("webhook.test", 1), "{tested:?}");
    let again = client.redeliver(id, &tested.id).await.unwrap();
    assert_eq!(client.list_deliveries(id, None).collect().await.unwrap()[0].id, again.id);
    assert_eq!(client.list_webhooks().collect().await.unwrap().len(), 1);
    client.delete_webhook(id).await.unwrap();
    assert_eq!(client.get_webhook(id).await.unwrap_err().code(), "not_found");
}
