//! Secrets of an evaluation's own rewards, next to those of a job's reward with the same name: copied by fork and retry, renewed by
//! PATCH, and lent to a re-score.

use rlood::event::{Event, SamplePhase};
use rlood::id::JobId;
use rlood::reward::signature::Key;
use rlood::spec::RewardSecrets;
use serde_json::{Value, json};

use crate::fork::{fork, parent};
use crate::server::{SECRET, Server, job, pointers, records, sample, with};
use crate::service::{Service, ok};

const JOB_URL: &str = "http://127.0.0.1:9/job";
const EVAL_URL: &str = "http://127.0.0.1:9/eval";

fn webhook(name: &str, url: &str, secret: &str) -> Value {
    json!({"type": "webhook", "name": name, "url": url, "secret": secret, "headers": {"x-key": format!("of-{name}")}})
}

/// A job whose evaluation has the rewards `judge`, like the job, and `only_eval`.
fn document(eval_secret: &str) -> Value {
    let mut document = with(job(), "rewards", json!([webhook("judge", JOB_URL, SECRET), {"type": "length"}]));
    document["dataset"] = json!({ "records": records(20) });
    let own = json!([webhook("judge", EVAL_URL, eval_secret), webhook("only_eval", EVAL_URL, eval_secret)]);
    document["eval"] = json!({"fraction": 0.25, "every_steps": 5, "rewards": own});
    document
}

async fn secret_of(server: &Server, id: JobId, name: &str) -> Option<RewardSecrets> {
    server.state.store.job_secrets(id).await.unwrap().remove(name)
}

fn id_of(body: &Value) -> JobId {
    body["id"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_fork_and_a_retry_keep_the_secrets_of_the_evaluations_own_rewards() {
    let (server, own) = (Server::start().await, Key::generate().unwrap());
    let id = parent(&server, document(&own)).await;
    let (status, body) = fork(&server, id, 5, json!({"optimizer": {"learning_rate": 3e-5}})).await;
    assert_eq!(status, 201, "{body}");
    let retried = server.post(&format!("/jobs/{id}/retry"), json!({})).await;
    for new in [id_of(&body), id_of(&retried.body)] {
        for (name, secret, header) in
            [("judge", SECRET, "of-judge"), ("eval:judge", &own, "of-judge"), ("eval:only_eval", &own, "of-only_eval")]
        {
            let kept = secret_of(&server, new, name).await.unwrap_or_else(|| panic!("{name} has no secrets"));
            assert_eq!((kept.secret.as_deref(), kept.headers["x-key"].as_str()), (Some(secret), header), "{name}");
        }
    }
}

#[tokio::test]
async fn a_secret_does_not_follow_an_evaluations_reward_to_another_address_or_list() {
    let (server, own) = (Server::start().await, Key::generate().unwrap());
    let id = parent(&server, document(&own)).await;
    // The job's reward now has the former address of the evaluation's, and the evaluation's has a new one.
    let moved = json!({
        "rewards": [{"type": "webhook", "name": "judge", "url": EVAL_URL}],
        "eval": {"rewards": [{"type": "webhook", "name": "judge", "url": JOB_URL},
                             {"type": "webhook", "name": "only_eval", "url": EVAL_URL}]},
    });
    let (status, body) = fork(&server, id, 5, moved).await;
    assert_eq!(status, 201, "{body}");
    let child = id_of(&body);
    assert_eq!(secret_of(&server, child, "judge").await, None);
    assert_eq!(secret_of(&server, child, "eval:judge").await, None);
    assert_eq!(secret_of(&server, child, "eval:only_eval").await.unwrap().secret, Some(own));
}

#[tokio::test]
async fn patch_renews_the_secrets_of_either_list_by_name() {
    let (server, old) = (Server::start().await, Key::generate().unwrap());
    let id = server.create(document(&old)).await;
    let patch = async |secrets: Value| {
        server.call("PATCH", &format!("/jobs/{id}"), Some(json!({"reward_secrets": secrets})), None).await
    };
    let secret = async |name: &str| secret_of(&server, id, name).await.unwrap().secret.unwrap();
    let new: Vec<String> = (0..4).map(|_| Key::generate().unwrap()).collect();

    // A name that both have means the job's reward; the evaluation's is `eval:NAME`.
    assert_eq!(patch(json!({"judge": {"secret": new[0]}})).await.status, 200);
    assert_eq!((secret("judge").await, secret("eval:judge").await), (new[0].clone(), old.clone()));
    assert_eq!(patch(json!({"eval:judge": {"secret": new[1], "previous_secret": old}})).await.status, 200);
    assert_eq!((secret("judge").await, secret("eval:judge").await), (new[0].clone(), new[1].clone()));
    // A reward of the evaluation alone needs no prefix, but may have it.
    for (name, new) in [("only_eval", &new[2]), ("eval:only_eval", &new[3])] {
        assert_eq!(patch(json!({name: {"secret": new}})).await.status, 200);
        assert_eq!(&secret("eval:only_eval").await, new);
    }
    // Headers stay unchanged if only the secret is renewed.
    let kept = secret_of(&server, id, "eval:only_eval").await.unwrap();
    assert_eq!(kept.headers["x-key"], "of-only_eval");

    for (secrets, pointer, words) in [
        (
            json!({"eval:length": {"secret": old}}),
            "/reward_secrets/eval:length unknown_reward",
            "judge, length, eval:judge, eval:only_eval",
        ),
        (json!({"length": {"secret": old}}), "/reward_secrets/length conflict", "only webhooks sign"),
        (
            json!({"only_eval": {"secret": old}, "eval:only_eval": {"secret": old}}),
            "/reward_secrets/only_eval conflict",
            "the same reward",
        ),
    ] {
        let answer = patch(secrets).await;
        assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec![pointer.to_owned()]), "{}", answer.text);
        assert!(answer.text.contains(words) && !answer.text.contains(&old), "{}", answer.text);
    }
    assert_eq!(secret("eval:only_eval").await, new[3], "nothing of a refused patch is kept");
    // The next claim contains the new secrets.
    assert_eq!(server.claimed().await.secrets["eval:judge"].secret.as_ref(), Some(&new[1]));
}

#[tokio::test]
async fn headers_of_tools_are_renewed_and_a_fork_keeps_them_while_their_address_stays() {
    let (server, old) = (Server::start().await, Key::generate().unwrap());
    let mut tools = document(&old);
    let tool = |name: &str| json!({"type": "http", "name": name, "server_url": JOB_URL, "headers": {"x-key": "old"}});
    tools["tools"] = json!([tool("add"), tool("sub")]);
    tools["environment"] = json!({"max_episode_tokens": 40, "max_turns": 2});
    tools["sampling"]["max_completion_length"] = json!(8);
    let id = parent(&server, tools).await;
    let patch = async |secrets: Value| {
        server.call("PATCH", &format!("/jobs/{id}"), Some(json!({"reward_secrets": secrets})), None).await
    };
    assert_eq!(patch(json!({"tool:add": {"headers": {"x-key": "new"}}})).await.status, 200);
    for refused in [json!({"tool:mul": {"headers": {}}}), json!({"tool:add": {"secret": old}})] {
        assert_eq!(patch(refused).await.status, 422);
    }
    let mut moved = json!([tool("add"), tool("sub")]);
    moved[1]["server_url"] = json!(EVAL_URL);
    moved.as_array_mut().unwrap().iter_mut().for_each(|tool| drop(tool.as_object_mut().unwrap().remove("headers")));
    let (status, body) = fork(&server, id, 5, json!({"tools": moved})).await;
    assert_eq!(status, 201, "{body}");
    let child = id_of(&body);
    assert_eq!(secret_of(&server, child, "tool:add").await.unwrap().headers["x-key"], "new");
    assert_eq!(secret_of(&server, child, "tool:sub").await, None);
}

#[tokio::test]
async fn a_rescore_of_evaluated_samples_uses_the_secret_of_the_evaluations_reward() {
    let server = Server::start().await;
    let rewards =
        |_: usize, request: &Value| ok(&json!({"rewards": vec![0.5; request["samples"].as_array().unwrap().len()]}));
    let service = Service::start(rewards).await;
    let at = service.url();
    let mut document = document(SECRET);
    for place in ["/rewards/0/url", "/eval/rewards/0/url", "/eval/rewards/1/url"] {
        *document.pointer_mut(place).unwrap() = json!(at);
    }
    document["rewards"][0]["headers"]["x-key"] = json!("of-the-job");
    document["eval"]["rewards"][0]["headers"]["x-key"] = json!("of-the-evaluation");
    let id = server.create(document).await;
    let (_, attempt) = server.claim().await;
    for (batch, phase) in [(1, SamplePhase::Train), (2, SamplePhase::Eval)] {
        let samples = (0..2).map(|_| rlood::event::Sample { phase, ..sample(1, "4", Some(1.0)) }).collect();
        server.report(id, attempt, batch, vec![Event::Samples { samples }]).await;
    }
    for (name, phase, expected) in [
        ("judge", "train", "of-the-job"),
        ("judge", "eval", "of-the-evaluation"),
        ("new", "train", "of-the-job"),
        ("new", "eval", "of-the-evaluation"),
        // Only the evaluation has this reward.
        ("only_eval", "train", "of-only_eval"),
    ] {
        let reward = json!({"type": "webhook", "name": name, "url": at});
        let answer = server.post(&format!("/jobs/{id}/rescore"), json!({"reward": reward, "phase": phase})).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let (headers, _) = service.seen.lock().unwrap().pop().unwrap();
        assert_eq!(headers["x-key"], expected, "{name} {phase}");
        assert!(headers.contains_key("webhook-signature"), "{name} {phase}");
    }
}
