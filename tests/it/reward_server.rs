//! Reward models in use: as a job's reward inside a worker, and behind `rlood reward-server`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rlood::engine::backend::BackendKind;
use rlood::id::{DatasetId, JobId};
use rlood::outgoing::OutgoingPolicy;
use rlood::reward::signature::Key;
use rlood::reward::{JobContext, RewardFailure, Rewards};
use rlood::reward_model::{Conversation, LocalRewardModels, Scored, Scorer, ScorerOptions};
use rlood::rollout::{RewardSample, RewardValue, RolloutId};
use rlood::spec::{ComputeDtype, RewardPlan, RewardTextFormat};
use serde_json::{Map, Value, json};

use crate::processes::{Server, model_copy, register, spec};
use crate::service::{plan, samples};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reward_models").join(name)
}

fn options(name: &str) -> ScorerOptions {
    ScorerOptions {
        dir: fixture(name),
        backend: BackendKind::Cpu,
        dtype: ComputeDtype::F32,
        label: None,
        format: RewardTextFormat::Auto,
        max_length: None,
        chat_template_kwargs: Map::new(),
    }
}

fn score(options: &ScorerOptions, messages: Option<&[Value]>, prompt: &str, completion: &str) -> Scored {
    let scorer = Scorer::load(options).unwrap();
    scorer.score(&[Conversation { messages, prompt, completion }]).unwrap().remove(0).unwrap()
}

#[test]
fn a_template_has_the_variables_of_the_job() {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("qwen3")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let template = "{{ tag }}{% for message in messages %}{{ message.content }}{% endfor %}";
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let kwargs = json!({"tag": "Say nothing but numbers. "}).as_object().unwrap().clone();
    let chat = ScorerOptions {
        dir: dir.path().to_owned(),
        format: RewardTextFormat::Chat,
        chat_template_kwargs: kwargs,
        ..options("qwen3")
    };
    let text = ScorerOptions { format: RewardTextFormat::Text, ..options("qwen3") };
    let messages = [json!({"role": "user", "content": "Say 3. "})];
    let by_template = score(&chat, Some(&messages), "ignored", "three");
    assert_eq!(by_template, score(&text, None, "Say nothing but numbers. Say 3. ", "three"));
    let without = ScorerOptions { chat_template_kwargs: Map::new(), ..chat };
    assert_ne!(by_template.reward, score(&without, Some(&messages), "ignored", "three").reward);
}

#[test]
fn a_conversation_is_read_through_the_models_own_template_and_cut_at_its_beginning() {
    let messages = [json!({"role": "user", "content": "Say the number 3."})];
    let chat = score(&options("qwen3"), Some(&messages), "ignored", "three");
    let same = "<|im_start|>user\nSay the number 3.<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>\n";
    let text = score(&options("qwen3"), None, same, "");
    assert_eq!(chat, text, "with messages the template writes what is read");
    assert!(!chat.truncated && chat.scores.is_empty());

    let plain = score(&options("qwen3"), None, "Say the number 3.", "three");
    assert_ne!(plain.reward, chat.reward);
    let forced = ScorerOptions { format: RewardTextFormat::Chat, ..options("qwen3") };
    assert_eq!(score(&forced, None, "Say the number 3.", "three"), chat);

    let short = ScorerOptions { max_length: Some(4), ..options("qwen3") };
    let cut = score(&short, None, "Say the number 3.", "three");
    assert_eq!((cut.num_tokens, cut.truncated), (4, true));
    assert_eq!(cut.metrics()["truncated"], json!(true));
    assert!(Scorer::load(&ScorerOptions { max_length: Some(257), ..options("qwen3") }).is_err());
}

#[test]
fn of_several_scores_the_named_one_is_the_reward_and_all_are_told() {
    let error = Scorer::load(&options("llama")).unwrap_err().to_string();
    assert!(error.contains("2 scores (LABEL_0, LABEL_1)"), "{error}");
    let named = |label: &str| {
        score(&ScorerOptions { label: Some(label.to_owned()), ..options("llama") }, None, "Say the number 3.", "three")
    };
    let (first, second) = (named("LABEL_0"), named("1"));
    assert_ne!(first.reward, second.reward);
    assert_eq!(first.scores, [("LABEL_0".to_owned(), first.reward), ("LABEL_1".to_owned(), second.reward)]);
}

fn reward_model(name: &str, changes: Value) -> RewardPlan {
    let mut plan = json!({
        "name": "rm", "weight": 1.0, "required": true, "type": "reward_model", "model": name, "label": null,
        "format": "auto", "max_length": null, "dtype": "f32"
    });
    for (key, value) in changes.as_object().unwrap() {
        plan[key] = value.clone();
    }
    serde_json::from_value(plan).unwrap()
}

fn local(plan: RewardPlan, fingerprints: &[(&str, &str)]) -> Rewards {
    let paths = ["qwen3", "modernbert"].map(|name| (name.to_owned(), fixture(name).to_string_lossy().into_owned()));
    let mut job = crate::setting::plan(DatasetId::new());
    job.reward_models = fingerprints.iter().map(|(id, sha256)| ((*id).to_owned(), (*sha256).to_owned())).collect();
    let models = LocalRewardModels::new("cpu", BTreeMap::from(paths), &job);
    let policy = OutgoingPolicy::parse(&["loopback"]).unwrap();
    Rewards::with_models(&[plan], &BTreeMap::new(), &policy, None, Some(Arc::new(models))).unwrap()
}

fn context() -> JobContext {
    JobContext { job: JobId::new(), rollout: RolloutId::train(1), probe: false }
}

/// Returns the scorer's own scores of samples.
fn direct(name: &str, samples: &[RewardSample]) -> Vec<f64> {
    let scorer = Scorer::load(&options(name)).unwrap();
    let of = |sample: &RewardSample| {
        let messages = sample.messages.as_ref().and_then(Value::as_array).map(Vec::as_slice);
        let asked = Conversation { messages, prompt: &sample.prompt, completion: &sample.completion };
        scorer.score(&[asked]).unwrap().remove(0).unwrap().reward
    };
    samples.iter().map(of).collect()
}

#[tokio::test]
async fn a_reward_model_in_the_worker_scores_every_sample_in_order() {
    let samples = samples(20, 4);
    for name in ["qwen3", "modernbert"] {
        let rewards = local(reward_model(name, json!({})), &[]);
        rewards.prepare().await.unwrap();
        let scored = rewards.score(&context(), &samples).await.unwrap();
        for (score, expected) in scored.scores.iter().zip(direct(name, &samples)) {
            let RewardValue::Number(value) = score.values[0] else { panic!("{score:?}") };
            assert!((value - expected).abs() < 1e-5, "{value} {expected}");
        }
    }
}

#[tokio::test]
async fn a_reward_model_that_cannot_be_used_fails_the_job_in_words() {
    for (plan, fingerprints, said) in [
        (reward_model("gone", json!({})), vec![], "'gone' is no longer registered"),
        (reward_model("qwen3", json!({"label": "good"})), vec![], "no label 'good'"),
        (reward_model("qwen3", json!({})), vec![("qwen3", "another")], "have changed since the job was submitted"),
    ] {
        let failure = local(plan, &fingerprints).prepare().await.unwrap_err();
        assert!(matches!(failure, RewardFailure::Unusable { .. }));
        assert!(failure.to_string().contains(said), "{failure}");
        assert_eq!(failure.to_failure(0).code, "reward_not_usable");
    }
}

#[tokio::test]
async fn a_job_trains_with_a_registered_reward_model_and_its_rewards_are_the_models_scores() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let card = server.post("/models", &json!({"id": "rm", "source": fixture("qwen3")})).await;
    assert_eq!(card["card"]["task"], "sequence_classification", "{card}");
    assert_eq!(card["card"]["labels"], json!(["LABEL_0"]));

    let mut job = spec("tiny", 2);
    job["rewards"] = json!([{"type": "reward_model", "model": "rm"}]);
    let validated = server.post("/jobs/validate", &job).await;
    assert_eq!(validated["plan"]["reward_models"]["rm"], card["sha256"], "{validated}");
    let bytes = validated["estimate"]["reward_models_bytes"].as_u64().unwrap();
    assert_eq!(bytes, 4 * card["card"]["num_parameters"].as_u64().unwrap());
    let wrong = json!([{"type": "reward_model", "model": "other"}, {"type": "reward_model", "name": "b", "model": "rm", "label": "x"}]);
    let mut refused = job.clone();
    refused["rewards"] = wrong;
    let refused = server.post("/jobs/validate", &refused).await;
    let pointers: Vec<&str> =
        refused["errors"].as_array().unwrap().iter().map(|e| e["pointer"].as_str().unwrap()).collect();
    assert_eq!(pointers, ["/rewards/0/model", "/rewards/1/label"], "{refused}");

    let id = server.submit(&job).await;
    server.job_in_state(&id, "succeeded").await;
    let page = server.get(&format!("/jobs/{id}/samples?limit=100")).await;
    let seen = page["data"].as_array().unwrap();
    assert!(!seen.is_empty(), "{page}");
    let scorer = Scorer::load(&options("qwen3")).unwrap();
    for sample in seen {
        let text = |key: &str| sample[key].as_str().unwrap();
        let asked = Conversation { messages: None, prompt: text("prompt"), completion: text("completion") };
        let expected = scorer.score(&[asked]).unwrap().remove(0).unwrap().reward;
        let found = sample["reward"].as_f64().unwrap();
        assert!((found - expected).abs() < 1e-5, "{found} {expected} {sample}");
    }
}

/// `rlood reward-server`; killed when dropped.
pub struct RewardServer {
    pub child: Child,
    pub url: String,
    pub http: reqwest::Client,
}

impl Drop for RewardServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RewardServer {
    pub fn start(model: &str, more: &[&str]) -> RewardServer {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
        command.args(["reward-server", "--listen", "127.0.0.1:0", "--threads", "1", "--model"]).arg(fixture(model));
        let mut child = command.args(more).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url =
            line.strip_prefix("listening on ").unwrap_or_else(|| panic!("first line: {line:?}")).trim().to_owned();
        RewardServer { child, url, http: reqwest::Client::builder().no_proxy().build().unwrap() }
    }

    pub async fn post(&self, body: &Value) -> (u16, Value) {
        let answer = self.http.post(format!("{}/score", self.url)).json(body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }
}

#[tokio::test]
async fn the_reward_server_speaks_the_contract_and_openrlhfs_form() {
    let server = RewardServer::start("qwen3", &[]);
    let (status, pong) = server.post(&json!({"type": "reward.ping", "version": "1", "id": "x"})).await;
    assert_eq!((status, &pong["modes"]), (200, &json!(["sync"])));

    // Requests of a job's webhook reward.
    let samples = samples(6, 3);
    let webhook = plan("r", &format!("{}/score", server.url), json!({}));
    let rewards = Rewards::build(&[webhook], &BTreeMap::new(), &OutgoingPolicy::parse(&["loopback"]).unwrap()).unwrap();
    let scored = rewards.score(&context(), &samples).await.unwrap();
    for (score, expected) in scored.scores.iter().zip(direct("qwen3", &samples)) {
        let RewardValue::Number(value) = score.values[0] else { panic!("{score:?}") };
        assert!((value - expected).abs() < 1e-5, "{value} {expected}");
    }

    // Requests of OpenRLHF.
    let (status, answer) =
        server.post(&json!({"query": ["What? A", "B"], "prompts": ["What? ", "other"], "labels": ["", ""]})).await;
    assert_eq!(status, 200, "{answer}");
    let expected = [("What? ", "A"), ("", "B")].map(|(p, c)| score(&options("qwen3"), None, p, c).reward);
    for (found, expected) in answer["rewards"].as_array().unwrap().iter().zip(expected) {
        assert!((found.as_f64().unwrap() - expected).abs() < 1e-5, "{answer}");
    }

    for (body, status, code) in [
        (json!({"type": "reward.other"}), 422, "unknown_type"),
        (json!({"texts": []}), 422, "unknown_form"),
        (json!({"type": "reward.score.request", "version": "2", "samples": []}), 422, "unknown_version"),
        (json!({"type": "reward.score.request", "version": "1", "samples": [{"sample_id": "a"}]}), 422, "invalid_body"),
        (json!({"query": ["a"], "prompts": ["a", "b"]}), 422, "invalid_body"),
        (json!({"query": vec!["a"; 2000]}), 413, "too_many_samples"),
    ] {
        let (found, answer) = server.post(&body).await;
        assert_eq!((found, answer["error"]["code"].as_str()), (status, Some(code)), "{answer}");
    }
    // A sample without text does not affect the others.
    let two = json!([{"sample_id": "a", "prompt": "", "completion": ""}, {"sample_id": "b", "prompt": "x", "completion": "y"}]);
    let (_, answer) =
        server.post(&json!({"type": "reward.score.request", "version": "1", "id": "i", "samples": two})).await;
    assert_eq!(answer["results"][0]["error"], json!({"code": "not_scorable", "retryable": false}));
    assert!(answer["results"][1]["reward"].is_f64(), "{answer}");
}

#[tokio::test]
async fn a_reward_server_with_a_secret_answers_signed_requests_only() {
    let secret = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let server = RewardServer::start("modernbert", &["--secret", secret]);
    let body = json!({"type": "reward.ping", "version": "1", "id": "x"}).to_string();
    let (status, answer) = server.post(&json!({"query": ["a"]})).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (401, Some("not_signed")));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let signature = Key::parse(secret).unwrap().sign("x", now, body.as_bytes());
    let request = server.http.post(&server.url).header("webhook-id", "x").header("webhook-timestamp", now);
    let answer = request.header("webhook-signature", signature).body(body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
}

#[test]
fn a_model_that_is_none_is_refused_before_anything_listens() {
    for (model, label, said) in [
        ("parity/qwen3", None, "…ForSequenceClassification"),
        ("reward_models/llama", None, "LABEL_1"),
        ("reward_models/qwen2", Some("x"), "no label 'x'"),
    ] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
        let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
        command.args(["reward-server", "--listen", "127.0.0.1:0", "--model"]).arg(dir);
        if let Some(label) = label {
            command.args(["--label", label]);
        }
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(said), "{error}");
    }
}
