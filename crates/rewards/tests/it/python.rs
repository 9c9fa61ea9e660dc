//! Tests of Python functions as rewards: functions from TRL's documentation, unchanged, and every kind of failure.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rlood_rewards::http_client::restricted_client_builder;
use rlood_rewards::python::{PythonError, PythonServer, Settings, Target};
use rlood_rewards::webhook::Webhook;
use rlood_rewards::{Judgement, Reward, RewardFailure, Rewards};
use rlood_types::event::FinishReason;
use rlood_types::rollout::{RewardSample, RewardValue};
use rlood_types::spec::{RewardKind, RewardPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::adapters::{job, loopback};
use crate::service;

const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn fixture(name: &str) -> PathBuf {
    rlood_test_support::fixture("python_rewards").join(name)
}

/// Starts a server; `None`, with a message, if there is no Python.
fn started(settings: &Settings) -> Option<PythonServer> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    match PythonServer::start(&listener, settings) {
        Ok(server) => Some(server),
        Err(PythonError::NoPython { tried }) => {
            println!("skipped: there is no Python on this machine ({tried})");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn refused(settings: &Settings) -> Option<(String, String)> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    match PythonServer::start(&listener, settings) {
        Err(PythonError::NoPython { .. }) => None,
        Err(PythonError::Failed { code, message }) => Some((code, message)),
        other => panic!("{other:?}"),
    }
}

fn settings(file: &str, functions: &[&str]) -> Settings {
    let functions = functions.iter().map(|&name| name.to_owned()).collect();
    Settings {
        secrets: vec![SECRET.to_owned()],
        ..Settings::new(vec![Target::of_file(&fixture(file), functions, None)])
    }
}

fn sample(prompt: &str, completion: &str, columns: Value) -> RewardSample {
    let Value::Object(columns) = columns else { panic!("columns are an object") };
    RewardSample {
        sample_id: String::new(),
        group_id: "g_0".into(),
        prompt_id: "row_0".into(),
        source: None,
        prompt: prompt.into(),
        messages: None,
        completion: completion.into(),
        finish_reason: FinishReason::Stop,
        num_tokens: completion.split_whitespace().count() as u32,
        completion_ids: None,
        columns,
        episode: None,
    }
}

fn chat(completion: &str) -> RewardSample {
    let messages = Some(json!([{"role": "user", "content": "Why?"}]));
    RewardSample { messages, ..sample("<user>Why?", completion, json!({})) }
}

/// Returns the judgements of one function of a running server.
async fn judge(server: &PythonServer, function: &str, samples: &[RewardSample], changes: Value) -> Vec<Judgement> {
    let url = format!("http://{}/{function}", server.address);
    let plan = service::plan(function, &url, changes);
    let RewardKind::Webhook(plan) = plan.kind else { panic!("a webhook") };
    let secrets = RewardSecrets { secret: Some(SECRET.to_owned()), ..RewardSecrets::default() };
    let webhook = Webhook::new(function, &plan, &secrets, &loopback()).unwrap();
    let mut samples = samples.to_vec();
    for (index, sample) in samples.iter_mut().enumerate() {
        sample.sample_id = format!("s_{index}");
    }
    webhook.judge(&job(), &samples).await.unwrap().judgements
}

async fn values(server: &PythonServer, function: &str, samples: &[RewardSample]) -> Vec<RewardValue> {
    let judged = judge(server, function, samples, json!({"completion_ids": true})).await;
    judged
        .iter()
        .map(|judgement| {
            assert_eq!(judgement.error, None, "{function}");
            judgement.value
        })
        .collect()
}

fn numbers(numbers: &[f64]) -> Vec<RewardValue> {
    numbers.iter().map(|&number| RewardValue::Number(number)).collect()
}

#[tokio::test]
async fn functions_in_the_shapes_of_trl_s_documentation_run_unchanged() {
    let functions = [
        "longer_is_better",
        "characters",
        "format_reward",
        "boxed_answer",
        "math_reward",
        "code_reward",
        "judged_later",
        "judge",
        "logging_reward",
        "curriculum",
        "everything",
    ];
    let Some(server) = started(&settings("trl_functions.py", &functions)) else { return };
    assert_eq!(server.functions, functions);
    let words = [sample("p", "one two three", json!({})), sample("p", "one", json!({}))];
    // Without token ids, the number of tokens is still correct.
    assert_eq!(values(&server, "longer_is_better", &words).await, numbers(&[3.0, 1.0]));
    assert_eq!(values(&server, "characters", &words).await, numbers(&[13.0, 3.0]));
    assert_eq!(values(&server, "judged_later", &words).await, numbers(&[13.0, 3.0]));
    assert_eq!(values(&server, "judge", &words).await, numbers(&[0.5, 0.5]));
    // The context's step is 3, so two steps are completed.
    assert_eq!(values(&server, "curriculum", &words).await, numbers(&[1.0, 1.0]));
    let chats = [chat("<think>so</think><answer>4</answer>"), chat("4")];
    assert_eq!(values(&server, "format_reward", &chats).await, numbers(&[1.0, 0.0]));
    let boxed = [
        sample("p", r"It is \boxed{42}.", json!({"ground_truth": "42"})),
        sample("p", "42", json!({"ground_truth": "42"})),
    ];
    assert_eq!(values(&server, "boxed_answer", &boxed).await, numbers(&[1.0, 0.0]));
    let tasks = [
        sample("2 + 2", "It is 4", json!({"task": "math"})),
        sample("2 + 3", "It is 4", json!({"task": "math"})),
        sample("a function", "def f(): pass", json!({"task": "code"})),
    ];
    let none = RewardValue::NotApplicable;
    let math = [RewardValue::Number(1.0), RewardValue::Number(-1.0), none];
    assert_eq!(values(&server, "math_reward", &tasks).await, math);
    assert_eq!(values(&server, "code_reward", &tasks).await, [none, none, RewardValue::Number(1.0)]);
    let answers = [sample("p", " a ", json!({"answer": "a"})), sample("p", "x", json!({"answer": "a"}))];
    let logged = judge(&server, "logging_reward", &answers, json!({})).await;
    let metrics: Vec<Value> = logged.iter().map(|judgement| json!(judgement.metrics)).collect();
    assert_eq!(metrics[0], json!({"accuracy": 0.5, "golden_answer": "a", "found": "a"}));
    assert_eq!(metrics[1]["found"], "x");
    let with_ids = |completion: &str, ids: &[u32]| RewardSample {
        completion_ids: Some(ids.to_vec()),
        ..sample("p", completion, json!({"answer": "a", "task": "t"}))
    };
    let ids = [with_ids("a", &[5, 6, 7]), with_ids("b", &[100_000])];
    assert_eq!(values(&server, "everything", &ids).await, numbers(&[18.0, 100_000.0]));
}

#[tokio::test]
async fn functions_see_the_turns_of_episodes() {
    let Some(server) = started(&settings("turn_functions.py", &["count_turns", "has_turns"])) else { return };
    let turn = json!({"text": "4", "num_tokens": 1});
    let episode = json!({"turns": [turn, turn], "return": null, "stop": "no_call"});
    let messages = json!([{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]);
    let played =
        RewardSample { messages: Some(messages), episode: Some(serde_json::from_value(episode).unwrap()), ..chat("4") };
    assert_eq!(values(&server, "count_turns", &[played.clone(), played.clone()]).await, numbers(&[2.2, 2.2]));
    assert_eq!(values(&server, "has_turns", &[played]).await, numbers(&[1.0]));
    assert_eq!(values(&server, "has_turns", &[chat("4")]).await, numbers(&[0.0]));
}

#[tokio::test]
async fn what_goes_wrong_is_the_error_of_its_samples_and_never_a_zero() {
    let functions = [
        "one_fails",
        "one_fails_together",
        "too_few",
        "no_list",
        "odd_values",
        "prints",
        "reads_input",
        "dies",
        "exits",
        "hangs",
        "wants_a_column",
        "strict",
        "secrets",
    ];
    let faulty = settings("faulty_functions.py", &functions);
    let Some(server) =
        started(&Settings { call_timeout: Duration::from_secs(2), log_as: Some("faulty".into()), ..faulty })
    else {
        return;
    };
    let texts = |texts: &[&str]| -> Vec<RewardSample> {
        texts.iter().map(|text| sample("p", text, json!({"answer": "a"}))).collect()
    };
    let error = |judgement: &Judgement| {
        assert_eq!(judgement.value, RewardValue::Missing);
        let error = judgement.error.clone().unwrap();
        (error.code, error.message)
    };
    let judged = judge(&server, "one_fails", &texts(&["ab", "", "abcd"]), json!({})).await;
    assert_eq!((judged[0].value, judged[2].value), (RewardValue::Number(0.5), RewardValue::Number(0.25)));
    let (code, message) = error(&judged[1]);
    assert_eq!(code, "exception");
    assert!(message.starts_with("ZeroDivisionError") && message.contains("faulty_functions.py, line 9"), "{message}");
    assert!(message.contains("Traceback") && !message.contains("rlood reward serve"), "{message}");
    let together = judge(&server, "one_fails_together", &texts(&["ab", ""]), json!({})).await;
    assert!(together.iter().all(|judgement| error(judgement).0 == "exception"));
    for (function, code, part) in [
        ("too_few", "wrong_count", "function 'too_few' returned 1 values for 2 completions"),
        ("no_list", "wrong_result", "function 'no_list' returned 1.0 (float)"),
        ("dies", "process_died", "function 'dies' died (exit code 9)"),
        ("exits", "exception", "SystemExit: enough"),
        ("hangs", "timeout", "function 'hangs' did not return within 2 s"),
        (
            "wants_a_column",
            "missing_column",
            "requires 'ground_truth', which is not a column of these rows; their columns: answer",
        ),
    ] {
        for judgement in &judge(&server, function, &texts(&["a", "b"]), json!({})).await {
            let (found, message) = error(judgement);
            assert_eq!(found, code, "{function}: {message}");
            assert!(message.contains(part), "{function}: {message}");
        }
    }
    let odd = judge(&server, "odd_values", &texts(&["x"; 8]), json!({})).await;
    for (index, part) in [(0, "'0.5' (str)"), (3, "inf (float)"), (5, "(int)"), (6, "[1.0] (list)")] {
        let (code, message) = error(&odd[index]);
        assert!(code == "invalid_value" && message.contains("'odd_values'") && message.contains(part), "{message}");
    }
    let rest: Vec<RewardValue> = [1, 2, 4, 7].map(|index| odd[index].value).to_vec();
    let none = RewardValue::NotApplicable;
    assert_eq!(rest, [none, none, RewardValue::Number(1.0), RewardValue::Number(0.0)]);
    // The process was replaced, output of functions does no harm, and functions do not see this process's secrets.
    assert_eq!(values(&server, "prints", &texts(&["a", "b"])).await, numbers(&[1.0, 1.0]));
    assert_eq!(values(&server, "reads_input", &texts(&["a"])).await, numbers(&[0.0]));
    assert_eq!(values(&server, "strict", &texts(&["a"])).await, numbers(&[2.0]));
    assert_eq!(values(&server, "secrets", &texts(&["a"])).await, numbers(&[0.0]));
}

#[tokio::test]
async fn calls_are_divided_by_groups_and_run_in_several_processes() {
    let functions = settings("faulty_functions.py", &["batch", "pid"]);
    let Some(server) = started(&Settings { batch_size: Some(4), processes: 3, ..functions }) else { return };
    // A group of 3 is kept together in a call of 4. The last call has the rest.
    let mut samples = service::samples(8, 3);
    let sizes: Vec<_> = judge(&server, "batch", &samples, json!({})).await.iter().map(|j| j.value).collect();
    assert_eq!(sizes, numbers(&[3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.0]));
    // A group that is larger than a call is divided.
    samples.iter_mut().for_each(|sample| sample.group_id = "g_0".into());
    let sizes: Vec<_> = judge(&server, "batch", &samples[..6], json!({})).await.iter().map(|j| j.value).collect();
    assert_eq!(sizes, numbers(&[4.0, 4.0, 4.0, 4.0, 2.0, 2.0]));
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let pids = judge(&server, "pid", &service::samples(64, 1), json!({"max_batch_samples": 64})).await;
        let pids: std::collections::BTreeSet<u64> = pids.iter().map(|j| j.value.number().unwrap() as u64).collect();
        if pids.len() == 3 {
            break;
        }
        // The second and third process may still be loading.
        assert!(Instant::now() < until, "{pids:?}");
    }
}

#[tokio::test]
async fn a_slow_call_is_answered_later_and_a_repeated_request_is_computed_once() {
    let Some(server) = started(&settings("faulty_functions.py", &["slow", "calls"])) else { return };
    let samples = [sample("p", "a", json!({}))];
    // An attempt may take 10.5 s and the call takes 11 s, so its results are fetched at the status address.
    let judged = judge(&server, "slow", &samples, json!({"timeout_ms": 10_500, "max_tries": 1})).await;
    assert_eq!(judged[0].value, RewardValue::Number(3.0), "{judged:?}");
    let body = json!({"type": "reward.score.request", "version": "1", "id": "rwr_1", "deadline_ms": 60_000,
        "samples": [{"sample_id": "s_0", "prompt": "p", "completion": "c"}]});
    let key = rlood_rewards::signature::Key::parse(SECRET).unwrap();
    let now_s = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let client = restricted_client_builder(&loopback()).build().unwrap();
    let ask = |body: String| {
        let signature = key.sign("rwr_1", now_s, body.as_bytes());
        let post = client.post(format!("http://{}/calls", server.address));
        let post = post.header("webhook-id", "rwr_1").header("webhook-timestamp", now_s.to_string());
        let sent = post.header("webhook-signature", signature).body(body).send();
        async move { serde_json::from_slice::<Value>(&sent.await.unwrap().bytes().await.unwrap()).unwrap() }
    };
    let first = ask(body.to_string()).await;
    assert_eq!(first["results"][0]["reward"], 1.0);
    assert_eq!(ask(body.to_string()).await, first, "the same request has the same answer");
    let mut other = body;
    other["samples"][0]["completion"] = json!("d");
    assert_eq!(ask(other.to_string()).await["results"][0]["reward"], 2.0, "another body is another request");
}

#[tokio::test]
async fn a_changed_file_is_reloaded_and_a_broken_one_keeps_the_previous_version() {
    let dir = tempfile::tempdir().unwrap();
    let (file, beside) = (dir.path().join("rewards.py"), dir.path().join("beside.py"));
    std::fs::write(&beside, "VALUE = 1.0\n").unwrap();
    let rewards = "import beside\ndef f(completions, **kwargs):\n    return [beside.VALUE] * len(completions)\n";
    std::fs::write(&file, rewards).unwrap();
    let target = Target::of_file(&file, vec!["f".into()], None);
    let watched = Settings { reload: true, secrets: vec![SECRET.into()], ..Settings::new(vec![target]) };
    let Some(server) = started(&watched) else { return };
    let samples = [sample("p", "a", json!({}))];
    let becomes = async |expected: f64| {
        let until = Instant::now() + Duration::from_secs(30);
        while values(&server, "f", &samples).await != numbers(&[expected]) {
            assert!(Instant::now() < until, "never {expected}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    becomes(1.0).await;
    std::fs::write(&beside, "VALUE = 22.0\n").unwrap();
    becomes(22.0).await;
    std::fs::write(&file, "def f(:\n").unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(values(&server, "f", &samples).await, numbers(&[22.0]));
    std::fs::write(&file, "def f(completions, **kwargs):\n    return [333.0] * len(completions)\n").unwrap();
    becomes(333.0).await;
}

#[test]
fn functions_that_cannot_be_served_are_reported_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let serving = |path: &Path, sha256: Option<&str>| {
        let target = Target::of_file(path, vec!["f".into()], sha256.map(str::to_owned));
        refused(&Settings { log_as: Some("t".into()), ..Settings::new(vec![target]) })
    };
    let good = write("good.py", "def g(): pass\nf = 3\n");
    for (path, sha256, code, part) in [
        (write("broken.py", "def f(:\n"), None, "load_failed", "SyntaxError: invalid syntax (broken.py, line 1)"),
        (write("imports.py", "import not_there_at_all\n"), None, "load_failed", "ModuleNotFoundError"),
        (write("none.py", "def g(): pass\n"), None, "function_not_found", "has no function 'f'; its functions are: g"),
        (good.clone(), None, "function_not_found", "is no function, but int"),
        (write("leaves.py", "import os\nos._exit(4)\n"), None, "load_failed", "ended (exit code 4)"),
        (good, Some("00ff"), "file_changed", "good.py has changed since the job was submitted"),
        (dir.path().join("missing.py"), None, "file_not_found", "missing.py cannot be read"),
    ] {
        let Some((found, message)) = serving(&path, sha256) else {
            println!("skipped: there is no Python on this machine");
            return;
        };
        assert_eq!(found, code, "{message}");
        assert!(message.contains(part), "{message}");
    }
    let nowhere = Settings { python: Some("/nowhere/python3".into()), ..settings("trl_functions.py", &["judge"]) };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = PythonServer::start(&listener, &nowhere).unwrap_err().to_string();
    assert!(error.contains("/nowhere/python3") && error.contains("--python PATH"), "{error}");
    // Python before 3.8 reports its version itself; here a program that is not Python reports nothing.
    let silent = Settings { python: Some("/bin/false".into()), ..nowhere };
    let error = PythonServer::start(&listener, &silent).unwrap_err().to_string();
    assert!(error.contains("ended before it was ready") && error.contains("exit status: 1"), "{error}");
}

fn python_plan(function: &str, changes: Value) -> RewardPlan {
    let mut plan = serde_json::to_value(service::plan(function, "", json!({}))).unwrap();
    plan["type"] = json!("python");
    plan["function"] = json!(function);
    plan["processes"] = json!(1);
    for (key, value) in changes.as_object().unwrap() {
        plan[key] = value.clone();
    }
    serde_json::from_value(plan).unwrap()
}

#[tokio::test]
async fn rewards_of_one_file_share_a_process_that_ends_with_them() {
    let file = fixture("faulty_functions.py");
    let plans = [
        python_plan("pid", json!({"file": file})),
        python_plan("strict", json!({"file": file})),
        RewardPlan { name: "again".into(), ..python_plan("pid", json!({"file": file})) },
    ];
    // The policy permits no address, but the process is reached anyway, because the policy applies to addresses from users.
    let nothing = rlood_types::outgoing::OutgoingPolicy::parse::<&str>(&[]).unwrap();
    let rewards = Rewards::build(&plans, &Default::default(), &nothing).unwrap();
    if let Err(RewardFailure::Unusable { detail, .. }) = rewards.prepare().await {
        assert!(detail.contains("no Python found"), "{detail}");
        println!("skipped: there is no Python on this machine");
        return;
    }
    let scored = rewards.score(&job(), &service::samples(4, 2)).await.unwrap();
    let of = |reward: usize| scored.scores.iter().map(|score| score.values[reward]).collect::<Vec<_>>();
    assert_eq!(of(1), numbers(&[2.0; 4]));
    assert_eq!(of(0), of(2), "one process");
    let pid = of(0)[0].number().unwrap() as u32;
    let runs = || Path::new(&format!("/proc/{pid}")).exists();
    assert!(!Path::new("/proc/self").exists() || runs());
    drop(rewards);
    let until = Instant::now() + Duration::from_secs(20);
    while runs() {
        assert!(Instant::now() < until, "the process {pid} outlives its rewards");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_missing_or_changed_file_is_reported_by_name() {
    let missing = python_plan("f", json!({"file": "/nowhere/rewards.py"}));
    let changed = python_plan("judge", json!({"file": fixture("trl_functions.py"), "sha256": "ab".repeat(32)}));
    for (plan, part) in
        [(missing, "/nowhere/rewards.py does not exist on this worker's machine"), (changed, "has changed since")]
    {
        let rewards = Rewards::build(&[plan], &Default::default(), &loopback()).unwrap();
        let failure = rewards.prepare().await.unwrap_err();
        let RewardFailure::Unusable { detail, .. } = &failure else { panic!("{failure:?}") };
        assert!(detail.contains(part) || detail.contains("no Python found"), "{detail}");
        assert_eq!(failure.to_failure(1).code, "reward_not_usable");
    }
}

#[test]
fn a_plan_has_no_address_and_a_webhook_of_before_is_written_as_it_was() {
    let plan = python_plan("f", json!({"file": "/x/rewards.py", "sha256": "00"}));
    let written = serde_json::to_value(&plan).unwrap();
    assert!(written.get("url").is_none() && written["sha256"] == "00", "{written}");
    assert_eq!(serde_json::from_value::<RewardPlan>(written).unwrap(), plan);
    // A webhook from before token ids existed.
    let webhook = serde_json::to_value(service::plan("w", "http://a.example/", json!({}))).unwrap();
    assert!(webhook.get("completion_ids").is_none(), "{webhook}");
    assert_eq!(webhook["url"], "http://a.example/");
}
