//! The lifecycle messages in the document's `webhooks` match the sent ones: every message is valid by its schema, field by field.

use std::collections::BTreeSet;

use boon::{Compiler, Schemas};
use rlood::event::{Event, RewardChange, SamplePhase};
use rlood::id::JobId;
use rlood::job::{Ending, EndingCode, Failure, FailureClass};
use rlood::protocol::{FileEntry, Outcome};
use rlood::store::{PublishCheckpoint, clock_ms};
use rlood::webhooks::{MessageType, TEST_TYPE};
use serde_json::{Value, json};

use crate::lifecycle::{Endpoint, start_sender, subscribe};
use crate::server::{Server, job, step, with};

/// The document, with schemas that allow no additional fields.
fn closed_document() -> Value {
    let mut document = serde_json::to_value(rlood::http::openapi()).unwrap();
    for schema in document["components"]["schemas"].as_object_mut().unwrap().values_mut() {
        if schema["properties"].is_object() && schema["additionalProperties"].is_null() {
            schema["additionalProperties"] = json!(false);
        }
    }
    document
}

/// Returns why a message does not match the document's schema of its type; `None` if it matches.
fn complaint(document: &Value, message: &Value) -> Option<String> {
    let kind = message["type"].as_str().unwrap();
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.enable_format_assertions();
    compiler.add_resource("urn:rlood", document.clone()).unwrap();
    let at = format!("urn:rlood#/webhooks/{kind}/post/requestBody/content/application~1json/schema");
    let index = compiler.compile(&at, &mut schemas).unwrap_or_else(|error| panic!("{kind}: {error:#}"));
    schemas.validate(message, index).err().map(|error| format!("{error:#}"))
}

#[test]
fn every_message_is_in_the_document_and_no_other() {
    let document = closed_document();
    let told: BTreeSet<&str> = document["webhooks"].as_object().unwrap().keys().map(String::as_str).collect();
    let mut sent: BTreeSet<&str> = MessageType::ALL.iter().map(|kind| kind.as_str()).collect();
    sent.extend([TEST_TYPE, "reward.score.request", "reward.ping"]);
    sent.extend(["env.ping", "env.reset.request", "env.step.request", "env.close.request"]);
    assert_eq!(told, sent);
}

#[test]
fn a_message_of_another_shape_does_not_fit() {
    let document = closed_document();
    let good = json!({"type": "webhook.test", "timestamp": "2026-01-02T03:04:05.678Z",
        "data": {"webhook_id": "whk_01jd0000000000000000000000"}});
    assert_eq!(complaint(&document, &good), None);
    for (pointer, wrong) in [("/timestamp", json!("yesterday")), ("/data", json!({})), ("/data/webhook_id", json!(1))] {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = wrong;
        assert!(complaint(&document, &bad).is_some(), "{bad}");
    }
    assert!(complaint(&document, &with(good, "more", json!(1))).is_some());
}

async fn reward(server: &Server, id: JobId, attempt: u64, batch: u64, change: RewardChange) {
    let (reward, message) = ("length".to_owned(), "reward 'length'".to_owned());
    let data = json!({"tries": 20, "failed": 5, "cause": "answered 500"});
    server.report(id, attempt, batch, vec![Event::Reward { reward, change, message, data }]).await;
}

async fn publish(server: &Server, job: JobId, attempt: u64) {
    let files = vec![FileEntry {
        name: "adapter_model.safetensors".to_owned(),
        size_bytes: 1,
        sha256: rlood::digest::Sha256Digest::of(""),
    }];
    let metrics = Default::default();
    let checkpoint = PublishCheckpoint { job, attempt, step: 1, files: &files, metrics: &metrics, temporary: false };
    server.state.store.checkpoint_publish(checkpoint, clock_ms()).await.unwrap();
}

#[tokio::test]
async fn every_message_that_is_sent_fits_the_document() {
    let server = Server::start().await;
    let store = &server.state.store;
    let endpoint = Endpoint::start(&[]).await;
    let hook = subscribe(&server, &endpoint.url, None).await;
    let _sender = start_sender(&server);
    let now = clock_ms;

    // A job that is paused by its user, by a full disk and by an outage, requeued, and finally failed.
    let labelled = with(with(job(), "name", json!("named")), "metadata", json!({"team": "x"}));
    let id = server.create(labelled).await;
    let (_, attempt) = server.claim().await;
    server.report(id, attempt, 0, vec![step(1, SamplePhase::Train, &[("reward", Some(0.5))])]).await;
    publish(&server, id, attempt).await;
    reward(&server, id, attempt, 1, RewardChange::Degraded).await;
    reward(&server, id, attempt, 2, RewardChange::Recovered).await;
    store.job_pause(id, now()).await.unwrap();
    store.job_finish(id, attempt, Outcome::Paused { reason: None }, now()).await.unwrap();
    store.job_resume(id, now()).await.unwrap();
    assert_eq!(store.jobs_pause_disk_full(now()).await.unwrap(), [id]);
    store.job_pause(id, now()).await.unwrap();
    store.job_resume(id, now()).await.unwrap();
    store.jobs_pause_disk_full(now()).await.unwrap();
    assert!(store.job_resume_from_disk(id, now()).await.unwrap());
    let (_, attempt) = server.claim().await;
    let outage = Outcome::Paused { reason: Some("reward_outage".to_owned()) };
    store.job_finish(id, attempt, outage, now()).await.unwrap();
    assert!(store.job_resume_after_outage(id, now()).await.unwrap());
    let (_, attempt) = server.claim().await;
    store.job_finish(id, attempt, Outcome::Requeued, now()).await.unwrap();
    let (_, attempt) = server.claim().await;
    let failure = Failure {
        class: FailureClass::User,
        code: "bad_template".to_owned(),
        message: "the chat template does not render".to_owned(),
        phase: None,
        step: None,
        suggestion: Some("look at it".to_owned()),
    };
    store.job_finish(id, attempt, Outcome::Failed { failure }, now()).await.unwrap();

    // Its child succeeds, another job is cancelled, and a test is sent.
    assert_eq!(server.call("POST", &format!("/jobs/{id}/retry"), None, None).await.status, 201);
    let (child, attempt) = server.claim().await;
    store.job_finish(child, attempt, Outcome::Succeeded, now()).await.unwrap();
    let other = server.create(job()).await;
    store.job_cancel(other, now()).await.unwrap();
    assert_eq!(server.call("POST", &format!("/webhooks/{hook}/test"), None, None).await.status, 200);

    let document = closed_document();
    endpoint.wait_for(25).await;
    let got: Vec<Value> = endpoint.got.lock().unwrap().iter().map(|(_, body)| body.clone()).collect();
    for message in &got {
        assert_eq!(complaint(&document, message), None, "{message:#}");
    }
    let kinds: BTreeSet<&str> = got.iter().map(|message| message["type"].as_str().unwrap()).collect();
    let all: BTreeSet<&str> = MessageType::ALL.iter().map(|kind| kind.as_str()).chain([TEST_TYPE]).collect();
    assert_eq!(kinds, all);
    let details = |kind: &str| -> Vec<&Value> {
        got.iter().filter(|message| message["type"] == kind).map(|message| &message["data"]["detail"]).collect()
    };
    assert_eq!(details("job.queued")[0], &json!({"model": "chat"}));
    let paused: Vec<&Value> = details("job.paused").iter().map(|detail| &detail["reason"]).collect();
    let (user, disk) = (Value::Null, json!("disk_full"));
    assert_eq!(paused, [&user, &disk, &user, &disk, &json!("reward_outage")]);
    assert_eq!(details("job.failed")[0]["failure"]["code"], "bad_template");
    assert_eq!(details("checkpoint.created")[0]["step"], 1);
}

#[test]
fn an_early_end_fits_too() {
    use rlood::webhooks::message::{LifecycleData, Message, SucceededDetail};
    let ending = Ending {
        code: EndingCode::EarlyStopping,
        message: "no better".to_owned(),
        step: 7,
        rule: None,
        metric: Some("eval_reward".to_owned()),
        best: Some(0.5),
        best_step: Some(4),
        good_before_step: None,
    };
    let data = LifecycleData {
        job_id: JobId::new().to_string(),
        job_name: None,
        job_state: "succeeded".to_owned(),
        model: "org/name".to_owned(),
        step: 7,
        total_steps: 20,
        metadata: json!({}),
        event: "job.succeeded".to_owned(),
        seq: 9,
        attempt: 1,
        detail: SucceededDetail { step: 7, ending: Some(ending) },
    };
    let message = Message { kind: "job.succeeded", timestamp: "2026-01-02T03:04:05.678Z".to_owned(), data };
    assert_eq!(complaint(&closed_document(), &serde_json::to_value(message).unwrap()), None);
}
