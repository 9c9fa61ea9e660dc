//! `rlood demo` as a new user runs it, with few steps: its output, its files, its exit. Reaching its goal takes two minutes and is
//! tested separately (`rlood demo --exit`). `rlood demo --agent` reaches its goal here; more seeds, noise and every instruction set are
//! in `.ci/full agent`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rlood::demo::calculator::Calculator;
use rlood::demo::reward_service::ExampleService;
use rlood_client::{Client, JobFilter, VerdictRequest};
use rlood_rewards::signature::Key;
use rlood_rewards::{JobContext, Rewards};
use rlood_types::event::Event;
use rlood_types::id::JobId;
use rlood_types::job::State;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::rollout::{RewardValue, RolloutId};
use rlood_types::spec::RewardSecrets;
use rlood_types::task::TaskState;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::service::{plan, samples};

/// A demo process that is killed when the test ends.
struct Demo {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Demo {
    /// Starts the demo with two steps.
    fn start(data_dir: &Path, extra: &[&str]) -> Self {
        Self::start_whole(data_dir, &[&["--steps", "2"], extra].concat())
    }

    fn start_whole(data_dir: &Path, extra: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rlood"))
            .args(["demo", "--listen", "127.0.0.1:0", "--seed", "1", "--data-dir"])
            .arg(data_dir)
            .args(extra)
            // As on a machine without CA certificates, which the demo does not need.
            .env("SSL_CERT_FILE", "/nonexistent")
            .env("SSL_CERT_DIR", "/nonexistent")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Returns all output up to the first line that contains `text`.
    fn read_until(&mut self, text: &str) -> String {
        let mut read = String::new();
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            read.push_str(&line);
            read.push('\n');
            if line.contains(text) {
                return read;
            }
        }
        panic!("the demo ended without saying '{text}':\n{read}");
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn it_serves_at_once_shows_what_it_did_and_leaves_on_ctrl_c() {
    let dir = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let mut demo = Demo::start(dir.path(), &[]);
    let first = demo.read_until("listening on ");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let base = first.strip_prefix("listening on ").unwrap().trim().to_owned();
    assert!(base.starts_with("http://127.0.0.1:"), "{first}");

    let said = demo.read_until("serving until Ctrl-C");
    assert!(said.contains("held-out exact match, greedy, 256 prompts"), "{said}");
    let answers = said.lines().filter(|line| line.contains('✓') || line.contains('✗')).count();
    assert_eq!(answers, 5, "five prompts before and after:\n{said}");
    assert!(said.contains(&format!("{base}/docs")), "{said}");
    let weights = std::fs::read(dir.path().join("adapter/adapter_model.safetensors")).unwrap();
    let sha256 = hex::encode(Sha256::digest(&weights));
    assert!(said.contains(&sha256), "{said}");
    assert!(dir.path().join("adapter/adapter_config.json").is_file());

    let client = Client::builder(&base).no_proxy().build().unwrap();
    client.livez().await.expect("it keeps serving");
    let jobs = client.list_jobs(&JobFilter::default()).collect().await.unwrap();
    assert_eq!(jobs.iter().map(|job| (job.state, job.step)).collect::<Vec<_>>(), [(State::Succeeded, 2)]);
    // The command that answers the last question is named, and the rewards that it needs are still served.
    assert!(said.contains(&format!("rlood verdict {} --server {base}", jobs[0].id)), "{said}");
    let mut verdict = client.create_verdict(jobs[0].id, &VerdictRequest::default()).await.unwrap();
    let begun = Instant::now();
    while matches!(verdict.state, TaskState::Queued | TaskState::Running) {
        assert!(begun.elapsed() < Duration::from_secs(120), "{verdict:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        verdict = client.get_verdict(verdict.id).await.unwrap();
    }
    assert_eq!(verdict.result.as_ref().map(|result| result.test.rows), Some(256), "{verdict:?}");
    let checkpoint = client.list_checkpoints(jobs[0].id).collect().await.unwrap().remove(0);
    let listed = checkpoint.files.iter().find(|file| file.name == "adapter_model.safetensors").unwrap();
    assert_eq!(listed.sha256.to_string(), sha256, "what was downloaded is what the server has");

    let interrupted = Command::new("kill").args(["-INT", &demo.child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    assert!(demo.child.wait().unwrap().success());
}

#[test]
fn with_exit_two_steps_are_not_enough_for_code_0() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = Demo::start(dir.path(), &["--exit"]);
    let said = demo.read_until("goal missed");
    assert!(said.contains("try more --steps"), "{said}");
    assert_eq!(demo.child.wait().unwrap().code(), Some(1));
}

#[test]
fn the_agent_demo_learns_to_call_the_calculator() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = Demo::start_whole(dir.path(), &["--agent", "--exit"]);
    let said = demo.read_until("goal ");
    assert!(said.contains("goal reached"), "{said}");
    let before = said.find("\n  before: reward 0\n").unwrap_or_else(|| panic!("{said}"));
    let after = said.find("\n  after: reward 1\n").unwrap_or_else(|| panic!("{said}"));
    assert!(!said[before..after].contains("<tool_call>"), "it guesses at first:\n{said}");
    let call = "<tool_call>{\"name\": \"calculator\", \"arguments\": {\"expression\": \"882+7436+244\"}}</tool_call>";
    assert!(said[after..].contains(call), "{said}");
    assert!(said[after..].contains("<tool_response>8562</tool_response>\n    assistant  8562\n"), "{said}");
    assert!(demo.child.wait().unwrap().success());
}

#[test]
fn with_noise_two_steps_leave_the_agent_at_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = Demo::start(dir.path(), &["--agent", "--noise", "--exit"]);
    let said = demo.read_until("goal ");
    assert!(said.contains("answers with random numbers"), "{said}");
    assert!(said.contains("goal reached: with noise, 0.0"), "{said}");
    assert!(demo.child.wait().unwrap().success());
}

/// Sends requests to the demo's calculator as the worker does.
struct Caller {
    http: reqwest::Client,
    key: Key,
    url: String,
}

impl Caller {
    async fn ask(&self, body: &Value) -> (u16, Value) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let (id, bytes) = (body["id"].as_str().unwrap_or("env_0"), body.to_string());
        let request = self.http.post(&self.url).header("webhook-id", id).header("webhook-timestamp", now.to_string());
        let signature = self.key.sign(id, now, bytes.as_bytes());
        let answer = request.header("webhook-signature", signature).body(bytes).send().await.unwrap();
        let status = answer.status().as_u16();
        (status, serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or(Value::Null))
    }
}

async fn caller(calculator: &Calculator, secret: &str) -> Caller {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    Caller { http, key: Key::parse(secret).unwrap(), url: calculator.url() }
}

#[tokio::test]
async fn the_calculator_keeps_the_contract_of_environments() {
    let secret = Key::generate().unwrap();
    let calculator = Calculator::start(&secret, false).await.unwrap();
    let caller = caller(&calculator, &secret).await;
    let episode = json!({"id": "ep_1", "attempt": 0, "seed": 5, "index": 0});
    let step = |id: &str, message: Value, is_final: bool| json!({"type": "env.step.request", "id": id, "episode": episode, "message": message, "final": is_final});
    let call = |expression: &str| {
        let arguments = json!({"expression": expression}).to_string();
        json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_0_0", "type": "function", "function": {"name": "calculator", "arguments": arguments}},
        ]})
    };

    assert_eq!(caller.ask(&json!({"type": "env.ping", "id": "env_p"})).await.0, 200);
    let early = caller.ask(&step("env_1", call("1+2"), false)).await;
    assert_eq!(early.0, 404, "an episode that has not begun is not known");
    let reset = json!({"type": "env.reset.request", "id": "env_0", "episode": episode, "columns": {"answer": "6"}});
    let begun = caller.ask(&reset).await;
    assert_eq!(begun.1["tools"][0]["function"]["name"], "calculator");
    assert_eq!(caller.ask(&reset).await, begun);

    let first = caller.ask(&step("env_1", call("1+2+3"), false)).await;
    let result = json!([{"role": "tool", "tool_call_id": "call_0_0", "content": "6"}]);
    assert_eq!((&first.1["messages"], &first.1["reward"], &first.1["done"]), (&result, &Value::Null, &json!(false)));
    // The same id is the same question, whatever the body says.
    assert_eq!(caller.ask(&step("env_1", call("7+7"), false)).await, first);
    let failed = caller.ask(&step("env_2", call("1+"), true)).await.1;
    assert_eq!(
        (&failed["messages"][0]["content"], &failed["reward"]),
        (&json!("error: a number is expected at the end"), &json!(0.0))
    );
    let answer = |text: &str| json!({"role": "assistant", "content": text});
    assert_eq!(caller.ask(&step("env_3", answer("7"), false)).await.1["reward"], 0.0);
    let right = caller.ask(&step("env_4", answer(" 6 "), false)).await.1;
    assert_eq!((&right["reward"], &right["done"]), (&json!(1.0), &json!(true)));
    let close = json!({"type": "env.close.request", "id": "env_5", "episode": episode, "reason": "env_done"});
    assert_eq!(caller.ask(&close).await.0, 204);
    assert_eq!(caller.ask(&step("env_6", answer("6"), false)).await.0, 404, "a closed episode is forgotten");

    let no_answer = json!({"type": "env.reset.request", "id": "env_7", "episode": episode, "columns": {}});
    assert_eq!(caller.ask(&no_answer).await.1["error"]["code"], "no_answer");
    let stranger = Caller {
        http: caller.http.clone(),
        key: Key::parse(&Key::generate().unwrap()).unwrap(),
        url: caller.url.clone(),
    };
    assert_eq!(stranger.ask(&reset).await.0, 401);
}

#[tokio::test]
async fn the_noisy_calculator_is_wrong_and_says_the_same_to_all_episodes_of_a_group() {
    let secret = Key::generate().unwrap();
    let calculator = Calculator::start(&secret, true).await.unwrap();
    let caller = caller(&calculator, &secret).await;
    let mut results = Vec::new();
    for (name, seed) in [("ep_1", 5), ("ep_2", 5), ("ep_3", 6)] {
        let episode = json!({"id": name, "attempt": 0, "seed": seed});
        caller
            .ask(&json!({"type": "env.reset.request", "id": "env_0", "episode": episode, "columns": {"answer": 9000}}))
            .await;
        let function = json!({"name": "calculator", "arguments": "{\"expression\": \"4000+3000+2000\"}"});
        let message = json!({"content": null, "tool_calls": [{"id": "c", "function": function}]});
        let step =
            json!({"type": "env.step.request", "id": "env_1", "episode": episode, "message": message, "final": false});
        results.push(caller.ask(&step).await.1["messages"][0]["content"].as_str().unwrap().parse::<u32>().unwrap());
    }
    assert!(results.iter().all(|result| (100..40_000).contains(result) && *result != 9000), "{results:?}");
    assert!(results[0] == results[1] && results[0] != results[2], "{results:?}");
}

#[tokio::test]
async fn the_example_service_marks_signed_requests_and_refuses_others() {
    let secret = Key::generate().unwrap();
    let service = ExampleService::start(&secret).await.unwrap();
    let mut samples = samples(3, 3);
    samples[0].columns = Map::from_iter([("answer".to_owned(), json!("c0"))]);
    samples[1].columns = Map::from_iter([("answer".to_owned(), json!(7))]);
    let plans = [plan("r", &service.url(), json!({}))];
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(12), probe: false };
    let loopback = OutgoingPolicy::parse(&["loopback"]).unwrap();
    let with = |secret: Option<String>| {
        let secrets = RewardSecrets { secret, ..RewardSecrets::default() };
        Rewards::build(&plans, &BTreeMap::from([("r".to_owned(), secrets)]), &loopback).unwrap()
    };
    let scored = with(Some(secret)).score(&job, &samples).await.unwrap();
    let values: Vec<RewardValue> = scored.scores.iter().map(|score| score.values[0]).collect();
    assert_eq!(values, [RewardValue::Number(1.0), RewardValue::Number(0.0), RewardValue::Missing]);
    let [Event::Warning { message, .. }, ..] = scored.warnings.as_slice() else { panic!("{:?}", scored.warnings) };
    assert!(message.contains("no column 'answer'"), "{message}");
    for wrong in [None, Some(Key::generate().unwrap())] {
        let failure = with(wrong).score(&job, &samples).await.unwrap_err();
        assert!(failure.to_string().contains("401"), "{failure}");
    }
}
