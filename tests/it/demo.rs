//! `rlood demo` as a new user runs it, with few steps: its output, its files, its exit. Reaching its goal takes two minutes and is
//! tested separately (`rlood demo --exit`).

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

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
use serde_json::{Map, json};
use sha2::{Digest, Sha256};

use crate::service::{plan, samples};

/// A demo process that is killed when the test ends.
struct Demo {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Demo {
    fn start(data_dir: &Path, extra: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rlood"))
            .args(["demo", "--listen", "127.0.0.1:0", "--steps", "2", "--seed", "1", "--data-dir"])
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
