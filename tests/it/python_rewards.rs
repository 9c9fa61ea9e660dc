//! Rewards that are Python functions: the serving command, jobs that use them, and permissions.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rlood::id::WorkerId;
use rlood::protocol::PROTOCOL;
use rlood::scopes::Scope;
use serde_json::{Value, json};

use crate::access::{call, key};
use crate::processes::{self, binary, is_alive, model_copy, register, spec};
use crate::server::{self, SECRET, job, pointers, with};

const REWARDS: &str = r#"import os
import helper

def tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def known_tokens(completion_ids, trainer_state, **kwargs):
    return [float(sum(isinstance(i, int) for i in ids)) for ids in completion_ids]

async def only_a(completions, kind, **kwargs):
    return [helper.characters(c) if k == "a" else None for c, k in zip(completions, kind)]

def environment(completions, **kwargs):
    return [float(sum(name.startswith("RLOOD_") for name in os.environ))] * len(completions)

def process(completions, **kwargs):
    return [float(os.getpid())] * len(completions)

def fails(completions, **kwargs):
    raise ValueError("no reward today")

def answer(completions, ground_truth, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if str(truth) in content else 0.0 for content, truth in zip(contents, ground_truth)]
"#;

/// Returns a folder with `rewards.py`; `None`, with a message, if Python is not installed.
fn folder(dir: &Path) -> Option<String> {
    match Command::new("python3").arg("--version").stdout(Stdio::null()).status() {
        Ok(_) => {}
        Err(_) => {
            println!("skipped: there is no python3 on this machine");
            return None;
        }
    }
    let folder = dir.join("functions");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("rewards.py"), REWARDS).unwrap();
    std::fs::write(folder.join("helper.py"), "def characters(text):\n    return float(len(text))\n").unwrap();
    Some(folder.to_str().unwrap().to_owned())
}

fn python(function: &str) -> Value {
    json!({"type": "python", "file": "rewards.py", "function": function})
}

fn program() -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RLOOD_")) {
        command.env_remove(name);
    }
    command
}

/// `rlood reward serve`; killed when dropped.
struct Serving {
    child: Child,
    url: String,
    stanza: Value,
}

impl Serving {
    fn start(folder: &str, arguments: &[&str]) -> Self {
        let mut command = program();
        command.args(["reward", "serve"]).args(arguments).args(["--listen", "127.0.0.1:0"]).current_dir(folder);
        let mut child = command.env("RLOOD_REWARD_SECRET", SECRET).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let first = lines.next().unwrap();
        let url = first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}")).to_owned();
        let mut stanza = String::new();
        for line in lines.by_ref() {
            stanza.push_str(&line);
            if line == "]" {
                break;
            }
        }
        Self { child, url, stanza: serde_json::from_str(&format!("{{{stanza}}}")).unwrap() }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn check(url: &str, arguments: &[&str]) -> Output {
    let mut command = program();
    command.args(["reward", "check", url, "--json", "--strict"]).args(arguments);
    command.env("RLOOD_REWARD_SECRET", SECRET).output().unwrap()
}

fn children_of(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[tokio::test]
async fn served_functions_pass_the_check_and_end_with_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let Some(folder) = folder(dir.path()) else { return };
    let mut serving = Serving::start(&folder, &["rewards.py:answer,tokens", "--processes", "2"]);
    let of_job = &serving.stanza["rewards"];
    assert_eq!(of_job[0]["url"], json!(format!("{}/answer", serving.url)));
    assert_eq!((&of_job[1]["type"], &of_job[1]["completion_ids"]), (&json!("webhook"), &json!(true)));
    let url = serving.url.clone();
    let checked = tokio::task::spawn_blocking(move || {
        let answer = check(&format!("{url}/answer"), &["--column", "ground_truth=4"]);
        (answer, check(&format!("{url}/tokens"), &[]), check(&format!("{url}/nothing"), &[]))
    });
    let (answer, tokens, nothing) = checked.await.unwrap();
    for output in [answer, tokens] {
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(output.status.success() && report["ok"] == true, "{report:#}");
    }
    let text = String::from_utf8(nothing.stdout).unwrap();
    assert!(!nothing.status.success() && text.contains("the endpoints are: /answer, /tokens"), "{text}");
    let server = children_of(serving.child.id());
    let workers: Vec<u32> = server.iter().flat_map(|&pid| children_of(pid)).collect();
    processes::signal("TERM", serving.child.id());
    let begun = Instant::now();
    assert_eq!(serving.child.wait().unwrap().code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(server.iter().chain(&workers).all(|&pid| !is_alive(pid)), "{server:?} {workers:?}");
    let mut rest = String::new();
    assert!(serving.child.stderr.as_mut().is_none_or(|stderr| stderr.read_to_string(&mut rest).is_ok()));
}

#[test]
fn what_cannot_be_served_is_said_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let Some(folder) = folder(dir.path()) else { return };
    for (arguments, code, part) in [
        (&["nowhere.py:f"][..], 2, "nowhere.py: No such file"),
        (&["rewards.py"], 2, "must be FILE:FUNCTION"),
        (
            &["rewards.py:nothing"],
            1,
            "rewards.py has no function 'nothing'; its functions are: tokens, known_tokens, only_a",
        ),
        (&["not.a.module:f"], 1, "not.a.module cannot be loaded: ModuleNotFoundError"),
        (&["rewards.py:answer", "--python", "/nowhere/python"], 1, "/nowhere/python"),
        (&["rewards.py:answer", "--secret", "abc"], 2, "--secret"),
        (&["rewards.py:answer", "--timeout", "0"], 2, "above 0"),
    ] {
        let mut command = program();
        command.args(["reward", "serve"]).args(arguments).args(["--listen", "127.0.0.1:0"]).current_dir(&folder);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains(part) && !text.contains("panicked"), "{arguments:?}: {text}");
    }
}

#[tokio::test]
async fn a_job_trains_with_functions_of_the_operator_s_folder() {
    let dir = tempfile::tempdir().unwrap();
    let Some(folder) = folder(dir.path()) else { return };
    let server = processes::Server::start_with(&dir.path().join("data"), "cpu", &["--python-rewards", &folder]);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut job = spec("tiny", 2);
    let kind = |n: usize| if n.is_multiple_of(2) { "a" } else { "b" };
    let records: Vec<Value> = (0..6).map(|n| json!({"prompt": format!("Number {n}"), "kind": kind(n)})).collect();
    job["dataset"] = json!({"records": records});
    job["rewards"] = json!([
        python("tokens"),
        python("only_a"),
        with(python("environment"), "weight", json!(0)),
        with(python("process"), "weight", json!(0)),
        with(python("known_tokens"), "weight", json!(0))
    ]);
    let id = server.submit(&job).await;
    let view = server.job_in_state(&id, "succeeded").await;
    let planned = &view["plan"]["rewards"][0];
    assert!(planned["file"].as_str().unwrap().ends_with("/functions/rewards.py") && planned["name"] == "tokens");
    assert_eq!(planned["sha256"].as_str().unwrap().len(), 64);
    let samples = server.get(&format!("/jobs/{id}/samples?limit=100")).await;
    let samples = samples["data"].as_array().unwrap();
    assert_eq!(samples.len(), 2 * 2 * 2);
    for sample in samples {
        let characters = sample["completion"].as_str().unwrap().chars().count() as f64;
        let row: usize = sample["prompt_id"].as_str().unwrap().strip_prefix("row_").unwrap().parse().unwrap();
        let expected = if kind(row) == "a" { json!(characters) } else { Value::Null };
        assert_eq!(sample["rewards"]["only_a"], expected, "{sample}");
        assert_eq!(sample["rewards"]["tokens"].as_f64(), sample["num_tokens"].as_f64(), "{sample}");
        assert_eq!(sample["rewards"]["known_tokens"], sample["rewards"]["tokens"], "{sample}");
        assert_eq!(sample["rewards"]["environment"], 0.0, "the worker's token is not theirs");
    }
    let pids: Vec<u32> = samples.iter().map(|s| s["rewards"]["process"].as_f64().unwrap() as u32).collect();
    assert!(pids.iter().all(|&pid| pid == pids[0]), "one process of one file: {pids:?}");
    let until = Instant::now() + Duration::from_secs(20);
    while is_alive(pids[0]) {
        assert!(Instant::now() < until, "the process of the functions outlives the attempt");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let tested = server
        .post(
            "/rewards/test",
            &json!({"reward": python("only_a"), "samples": [
        {"prompt": "p", "completion": "four", "kind": "a"}, {"prompt": "p", "completion": "four", "kind": "b"}]}),
        )
        .await;
    assert_eq!((&tested["results"][0]["reward"], &tested["results"][1]["not_applicable"]), (&json!(4.0), &json!(true)));
    let failed =
        server.post("/rewards/test", &json!({"reward": python("fails"), "samples": [{"completion": "x"}]})).await;
    let message = failed["results"][0]["error"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("ValueError: no reward today (rewards.py, line ") && failed["ok"] == false,
        "{message}"
    );
    let again = json!({"reward": python("tokens"), "replaces": "only_a"});
    let rescored = server.post(&format!("/jobs/{id}/rescore"), &again).await;
    assert_eq!((&rescored["missing"], &rescored["complete"]), (&json!(0), &json!(true)), "{rescored}");
    let probed = server.post("/jobs/validate?probe=true", &job).await;
    assert!(probed["probe"]["error"].is_null() && probed["probe"]["rewards"].get("tokens").is_some(), "{probed:#}");

    // A job runs exactly the file version that it was submitted with.
    let pausing =
        server.submit(&with(job.clone(), "training", json!({"prompts_per_step": 2, "max_steps": 100_000}))).await;
    server.job_in_state(&pausing, "running").await;
    server.post(&format!("/jobs/{pausing}/pause"), &json!({})).await;
    server.job_in_state(&pausing, "paused").await;
    std::fs::write(Path::new(&folder).join("rewards.py"), format!("{REWARDS}\n# changed\n")).unwrap();
    server.post(&format!("/jobs/{pausing}/resume"), &json!({})).await;
    let failed = server.job_in_state(&pausing, "failed").await;
    let message = failed["failure"]["message"].as_str().unwrap();
    assert_eq!(failed["failure"]["code"], "reward_not_usable", "{failed}");
    assert!(message.contains("rewards.py has changed since the job was submitted"), "{message}");
}

#[tokio::test]
async fn only_whom_the_operator_names_may_run_functions() {
    let dir = tempfile::tempdir().unwrap();
    let Some(folder) = folder(dir.path()) else { return };
    let folder = Path::new(&folder).canonicalize().unwrap();
    let with_python = || with(job(), "rewards", json!([python("tokens")]));
    let test = json!({"reward": python("tokens"), "samples": [{"prompt": "p", "completion": "c"}]});

    let closed = server::Server::start().await;
    let refused = closed.post("/jobs/validate", with_python()).await;
    assert_eq!(pointers(&refused), ["/rewards/0/type python_rewards_off"], "{}", refused.text);
    assert!(
        refused.text.contains("--python-rewards DIR") && refused.text.contains("rlood reward serve"),
        "{}",
        refused.text
    );
    assert_eq!(closed.post("/jobs", with_python()).await.status, 422);
    assert_eq!(closed.post("/rewards/test", test.clone()).await.status, 422);
    let of_eval =
        with(job(), "eval", json!({"dataset": {"records": [{"prompt": "p"}]}, "rewards": [python("tokens")]}));
    let refused = closed.post("/jobs/validate", of_eval).await;
    assert!(pointers(&refused).contains(&"/eval/rewards/0/type python_rewards_off".to_owned()), "{}", refused.text);

    let open = server::Server::start_with(|config| {
        config.python_rewards.folders = vec![folder.clone()];
        config.python_rewards.keys = vec!["key of alice".to_owned()];
    })
    .await;
    assert_eq!(open.post("/jobs/validate", with_python()).await.body["valid"], true);
    let elsewhere = with(job(), "rewards", json!([{"type": "python", "file": "/etc/passwd.py", "function": "f"}]));
    assert_eq!(pointers(&open.post("/jobs/validate", elsewhere).await), ["/rewards/0/file unknown_file"]);
    let accepted = open.create(with_python()).await;

    let alice = key(&open, "alice", &[Scope::Admin]).await.text;
    let mallory = key(&open, "mallory", &[Scope::Submit, Scope::Read]).await.text;
    let post = async |path: &str, who: &str, body: Value| call(&open, "POST", path, who, Some(&body)).await;
    assert_eq!(post("/jobs/validate", &alice, with_python()).await.body["valid"], true);
    let refused = post("/jobs/validate", &mallory, with_python()).await;
    assert_eq!(pointers(&refused), ["/rewards/0/type python_rewards_off"], "{}", refused.text);
    assert!(
        refused.text.contains("the key 'key of mallory' may not run Python functions")
            && refused.text.contains("--python-rewards-keys key_"),
        "{}",
        refused.text
    );
    let tested = post("/rewards/test", &mallory, test).await;
    assert!(tested.status == 422 && tested.text.contains("--python-rewards-keys"), "{}", tested.text);

    // A job that was submitted before the first key existed does not run any more.
    assert_eq!(claim_next(&open).await, None);
    let failed = call(&open, "GET", &format!("/jobs/{accepted}"), &alice, None).await.body;
    assert_eq!((&failed["state"], &failed["failure"]["code"]), (&json!("failed"), &json!("python_rewards_off")));
    let message = failed["failure"]["message"].as_str().unwrap();
    assert!(message.contains("'tokens' of rewards.py") && message.contains("without a key"), "{message}");
    let retried = post(&format!("/jobs/{accepted}/retry"), &alice, json!({})).await;
    assert!(retried.status == 403 && retried.text.contains("without a key"), "{}", retried.text);

    // Running a job again requires the same permission as submitting it.
    let bob = key(&open, "bob", &[Scope::Admin]).await.text;
    let evaluated = with(with_python(), "eval", json!({"dataset": {"records": [{"prompt": "p"}]}}));
    let submitted = post("/jobs", &alice, evaluated).await;
    assert_eq!(submitted.status, 201, "{}", submitted.text);
    let job = format!("/jobs/{}", submitted.body["id"].as_str().unwrap());
    let change = async |change: &str, who: &str| post(&format!("{job}/{change}"), who, json!({})).await;
    let refused = async |action: &str| {
        let answer = change(action, &bob).await;
        assert!(answer.status == 403 && answer.text.contains("--python-rewards-keys"), "{action}: {}", answer.text);
    };
    assert!(change("pause", &bob).await.status.is_success());
    refused("resume").await;
    assert_eq!(change("resume", &alice).await.body["state"], "queued");
    refused("verdict").await;
    assert_eq!(change("verdict", &alice).await.status, 404, "there is no checkpoint yet");
    assert!(change("cancel", &bob).await.status.is_success());
    refused("retry").await;
    let retried = change("retry", &alice).await;
    assert_eq!(retried.status, 201, "{}", retried.text);
    assert_eq!(claim_next(&open).await, Some(retried.body["id"].clone()));
}

/// Registers a worker that asks for a job, and returns the id of the one that it gets.
async fn claim_next(server: &server::Server) -> Option<Value> {
    let (worker, token) = (WorkerId::new(), server.state.config.worker_token.clone());
    let register = json!({"worker": worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0", "child": false,
                          "protocol": PROTOCOL});
    assert_eq!(call(server, "POST", "/worker/register", &token, Some(&register)).await.status, 200);
    let ask = json!({"worker": worker, "wait_ms": 0, "protocol": PROTOCOL});
    let answer = call(server, "POST", "/worker/claim", &token, Some(&ask)).await;
    (answer.status == 200).then(|| answer.body["job"].clone())
}

#[tokio::test]
async fn the_operator_s_name_permits_the_jobs_from_before_the_first_key() {
    let dir = tempfile::tempdir().unwrap();
    let Some(folder) = folder(dir.path()) else { return };
    let server = server::Server::start_with(|config| {
        config.python_rewards.folders = vec![Path::new(&folder).canonicalize().unwrap()];
        config.python_rewards.keys = vec!["operator".to_owned()];
    })
    .await;
    let job = server.create(with(job(), "rewards", json!([python("tokens")]))).await;
    key(&server, "alice", &[Scope::Admin]).await;
    assert_eq!(claim_next(&server).await, Some(json!(job)));
}
