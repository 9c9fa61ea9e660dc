//! The base model compared with a checkpoint, over HTTP and with real processes: completions, refusals, interruptions.

use std::num::NonZeroUsize;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rlood::engine::backend::BackendKind;
use rlood::engine::generate::{GeneratePrompt, GenerateRequest, generate};
use rlood::engine::model::{Adapter, Policy};
use rlood::engine::random::{Key, Stream};
use rlood::engine::sampling::Sampler;
use rlood::engine::text::Text;
use rlood::spec::ComputeDtype;
use serde_json::{Value, json};

use crate::processes::{Server, is_alive, model_copy, register, signal, spec, trained};

const PROMPT: &str = "Say the number 7 in a few words.";

/// Returns the status and the body.
async fn ask(server: &Server, job: &str, question: &Value) -> (u16, Value) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let answer = http.post(format!("{}/jobs/{job}/generate", server.url)).json(question).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

async fn asked(server: &Server, job: &str, question: Value) -> Value {
    let (status, answer) = ask(server, job, &question).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

fn texts(answer: &Value, of: &str) -> Vec<String> {
    answer[of].as_array().unwrap().iter().map(|one| one["completion"].as_str().unwrap().to_owned()).collect()
}

/// Returns the completions that the engine itself produces for the prompt.
fn engine_says(policy: &Policy, text: &Text, sampler: Sampler, key: Key, length: usize) -> Vec<(String, usize)> {
    engine_says_until(policy, text, (sampler, key), length, &[])
}

fn engine_says_until(
    policy: &Policy,
    text: &Text,
    (sampler, key): (Sampler, Key),
    length: usize,
    stop: &[String],
) -> Vec<(String, usize)> {
    let ids = text.encode(PROMPT, true).unwrap();
    let request = GenerateRequest {
        prompts: &[GeneratePrompt { row: 0, ids: &ids, given: &[] }],
        num_generations: NonZeroUsize::new(2).unwrap(),
        sampler,
        max_completion_length: length,
        stop,
        key,
        eos_token_ids: text.eos_token_ids(),
        adapter: Adapter::On,
        max_rows: 2,
    };
    let groups = generate(policy, text, &request, &|| false).unwrap().unwrap();
    let shown = |ids: &[u32]| (text.decode(ids, true).unwrap(), ids.len());
    groups.concat().iter().map(|completion| shown(completion.segments.completion().unwrap())).collect()
}

fn said(answer: &Value, of: &str) -> Vec<(String, usize)> {
    let one = |one: &Value| {
        (one["completion"].as_str().unwrap().to_owned(), one["num_tokens"].as_u64().unwrap().try_into().unwrap())
    };
    answer[of].as_array().unwrap().iter().map(one).collect()
}

/// Downloads a checkpoint from the server to a folder.
async fn checkpoint_of(server: &Server, job: &str, step: u64, to: &Path) {
    let list = server.client.list_checkpoints(job.parse().unwrap()).collect().await.unwrap();
    let found = list.iter().find(|one| one.step == step).unwrap();
    server.client.download_files(found, to).await.unwrap();
}

#[tokio::test]
async fn both_models_say_what_the_engine_says_and_training_shows() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), true).await;
    let small = dir.path().join("small");
    let text = Text::load(&small).unwrap();
    let mut policy = Policy::load_dtype(&small, BackendKind::Cpu, ComputeDtype::F32).unwrap();

    let greedy =
        json!({"prompt": PROMPT, "num_generations": 2, "sampling": {"temperature": 0, "max_completion_length": 12}});
    let answer = asked(&server, &job, greedy.clone()).await;
    let sampler = Sampler { temperature: 0.0, ..Sampler::PLAIN };
    let key = Key::new(7, Stream::Generate);
    assert_eq!(said(&answer, "base"), engine_says(&policy, &text, sampler, key, 12));
    // A stop string ends the completion after the token that completes it, as in samples of the job.
    let mut cut = 0;
    for seed in 0..4 {
        let mut hot = json!({"prompt": PROMPT, "num_generations": 2, "seed": seed});
        hot["sampling"] = json!({"temperature": 2, "max_completion_length": 12});
        let sampled = (Sampler { temperature: 2.0, ..Sampler::PLAIN }, Key::new(seed, Stream::Generate));
        let whole = texts(&asked(&server, &job, hot.clone()).await, "base").swap_remove(0);
        // Half of a character is no text that could stop it.
        let readable = whole.split(char::REPLACEMENT_CHARACTER).next().unwrap();
        for end in readable.char_indices().map(|(at, _)| at).skip(1) {
            let stop = vec![whole[..end].to_owned()];
            hot["sampling"]["stop"] = json!(stop);
            let stopped = said(&asked(&server, &job, hot.clone()).await, "base");
            assert_eq!(stopped, engine_says_until(&policy, &text, sampled, 12, &stop), "{stop:?}");
            cut += usize::from(stopped[0].0.len() > end);
        }
    }
    assert!(cut > 0, "no stop string ended within a token");
    let drawn = json!({"prompt": PROMPT, "num_generations": 2, "seed": 11});
    let sampled = asked(&server, &job, drawn.clone()).await;
    let (warm, other_key) = (Sampler { temperature: 0.8, ..Sampler::PLAIN }, Key::new(11, Stream::Generate));
    assert_eq!(said(&sampled, "base"), engine_says(&policy, &text, warm, other_key, 6));

    checkpoint_of(&server, &job, 4, &dir.path().join("last")).await;
    policy.load_lora(&dir.path().join("last")).unwrap();
    assert_eq!(said(&answer, "trained"), engine_says(&policy, &text, sampler, key, 12));
    assert_eq!(said(&sampled, "trained"), engine_says(&policy, &text, warm, other_key, 6));
    assert_ne!(texts(&answer, "trained"), texts(&answer, "base"), "{answer}");

    // Greedy: both completions of a model are equal. Settings that the request omits are the job's.
    assert_eq!(texts(&answer, "base")[0], texts(&answer, "base")[1]);
    assert_eq!((&answer["weights"], &answer["step"], &answer["seed"]), (&json!("adapter"), &json!(4), &json!(7)));
    assert_eq!((&answer["model"], &answer["job_id"]), (&json!("small"), &json!(job)));
    assert_eq!(
        (&sampled["sampling"]["temperature"], &sampled["sampling"]["max_completion_length"]),
        (&json!(0.8), &json!(6))
    );
    assert_eq!(answer["prompt"]["text"], PROMPT);
    assert_eq!(answer["prompt"]["num_tokens"], text.encode(PROMPT, true).unwrap().len());
    for one in answer["base"].as_array().unwrap().iter().chain(answer["trained"].as_array().unwrap()) {
        let whole = one["num_tokens"] == 12;
        assert!(one["finish_reason"] == "stop" || (whole && one["finish_reason"] == "length"), "{one}");
    }
    // The same request gives the same answer; another seed gives another one.
    assert_eq!(texts(&asked(&server, &job, drawn).await, "trained"), texts(&sampled, "trained"));
    let other = asked(&server, &job, json!({"prompt": PROMPT, "num_generations": 2, "seed": 12})).await;
    assert_ne!(texts(&other, "base"), texts(&sampled, "base"));

    // An earlier step, and the keywords for steps.
    let step = |choice: Value| {
        let mut question = greedy.clone();
        question["checkpoint"] = choice;
        question
    };
    assert_eq!(asked(&server, &job, step(json!(2))).await["step"], 2);
    assert_eq!(asked(&server, &job, step(json!("last"))).await["step"], 4);
    let best = asked(&server, &job, step(json!("best"))).await;
    let list = server.get(&format!("/jobs/{job}/checkpoints")).await;
    let marked = list["data"].as_array().unwrap().iter().find(|one| one["best"] == true).unwrap();
    assert_eq!(best["checkpoint_id"], marked["id"]);
    // Nothing is recorded.
    assert_eq!(server.get(&format!("/jobs/{job}/samples?phase=eval")).await["data"], json!([]));
}

#[tokio::test]
async fn a_job_that_trains_all_weights_is_asked_too() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), false).await;
    let answer =
        asked(&server, &job, json!({"prompt": PROMPT, "num_generations": 2, "sampling": {"temperature": 0}})).await;
    let small = dir.path().join("small");
    let text = Text::load(&small).unwrap();
    let (sampler, key) = (Sampler { temperature: 0.0, ..Sampler::PLAIN }, Key::new(7, Stream::Generate));
    let mut policy = Policy::load_dtype(&small, BackendKind::Cpu, ComputeDtype::F32).unwrap();
    assert_eq!(said(&answer, "base"), engine_says(&policy, &text, sampler, key, 6));
    checkpoint_of(&server, &job, 4, &dir.path().join("last")).await;
    policy.load_full(&dir.path().join("last")).unwrap();
    assert_eq!(said(&answer, "trained"), engine_says(&policy, &text, sampler, key, 6));
    assert_ne!(texts(&answer, "trained"), texts(&answer, "base"), "{answer}");
    assert_eq!(answer["weights"], "model");
}

#[tokio::test]
async fn a_chat_is_shown_as_the_template_makes_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    register(&server, "tiny", &assets).await;
    let mut job = spec("tiny", 2);
    job["dataset"] = json!({"records": [{"prompt": [{"role": "user", "content": "What is 1 + 1?"}]}, {"prompt": [{"role": "user", "content": "What is 2 + 1?"}]}]});
    let job = server.submit(&job).await;
    server.job_in_state(&job, "succeeded").await;
    let chat = json!([{"role": "user", "content": "What is 29 + 13?"}]);
    let answer =
        asked(&server, &job, json!({"prompt": chat, "sampling": {"temperature": 0, "max_completion_length": 40}}))
            .await;
    assert_eq!(answer["prompt"]["text"], "<|user|>What is 29 + 13?<|end|><|assistant|>");
    assert_eq!((answer["base"].as_array().unwrap().len(), answer["trained"].as_array().unwrap().len()), (1, 1));
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused_at_its_field() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), true).await;
    let long = "word ".repeat(400);
    let wrong = [
        (json!({}), "/prompt", "required"),
        (json!({"prompt": " "}), "/prompt", "empty_prompt"),
        (json!({"prompt": 7}), "/prompt", "invalid_prompt"),
        (json!({"prompt": [{"role": "user"}]}), "/prompt", "invalid_message"),
        (json!({"prompt": long}), "/prompt", "prompt_too_long"),
        (json!({"prompt": "x", "num_generations": 9}), "/num_generations", "out_of_range"),
        (json!({"prompt": "x", "seed": -1}), "/seed", "out_of_range"),
        (json!({"prompt": "x", "sampling": {"temperature": -1}}), "/sampling/temperature", "out_of_range"),
        (json!({"prompt": "x", "sampling": {"top_p": 0}}), "/sampling/top_p", "out_of_range"),
        (json!({"prompt": "x", "sampling": 3}), "/sampling", "invalid_type"),
        (json!({"prompt": "x", "checkpoint": "newest"}), "/checkpoint", "invalid_value"),
        (json!({"prompt": "x", "checkpoint": true}), "/checkpoint", "invalid_type"),
        (json!({"prompt": "x", "checkpoint": 3}), "/checkpoint", "unknown_checkpoint"),
        (json!({"prompt": "x", "max_tokens": 3}), "/max_tokens", "foreign_key"),
        (json!({"prompt": "x", "promt": "y"}), "/promt", "unknown_field"),
    ];
    for (question, pointer, code) in wrong {
        let (status, answer) = ask(&server, &job, &question).await;
        let first = &answer["errors"][0];
        assert_eq!(
            (status, &first["pointer"], &first["code"]),
            (422, &json!(pointer), &json!(code)),
            "{question}: {answer}"
        );
    }
    let (_, answer) = ask(&server, &job, &json!({"prompt": "x", "checkpoint": 3})).await;
    assert!(answer["errors"][0]["detail"].as_str().unwrap().contains("2, 4"), "{answer}");
    let (_, answer) = ask(&server, &job, &json!({"prompt": "x", "seed": -1, "sampling": {"top_k": 0.5}})).await;
    assert_eq!(answer["errors"].as_array().unwrap().len(), 2, "{answer}");
    assert_eq!(ask(&server, "job_00000000000000000000000000", &json!({"prompt": "x"})).await.0, 404);

    // Files that differ from those of the training, and missing files.
    let weights = dir.path().join("small/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let (status, answer) = ask(&server, &job, &json!({"prompt": "x"})).await;
    assert_eq!((status, &answer["code"]), (422, &json!("invalid_model")), "{answer}");
    assert!(answer["detail"].as_str().unwrap().contains("have changed since the job was trained"), "{answer}");
    std::fs::rename(dir.path().join("small"), dir.path().join("away")).unwrap();
    let (status, answer) = ask(&server, &job, &json!({"prompt": "x"})).await;
    assert_eq!((status, &answer["code"]), (422, &json!("invalid_model")), "{answer}");
    assert!(!answer["detail"].as_str().unwrap().contains(dir.path().to_str().unwrap()), "{answer}");
}

#[tokio::test]
async fn a_job_without_a_checkpoint_and_a_question_beyond_the_memory_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "none");
    let small = model_copy(&dir.path().join("small"));
    make_spacious(&small);
    register(&server, "small", &small).await;
    let job = server.submit(&spec("small", 4)).await;
    let (status, answer) = ask(&server, &job, &json!({"prompt": PROMPT})).await;
    assert_eq!((status, &answer["code"]), (404, &json!("no_checkpoint")), "{answer}");
    drop(server);
    let server = Server::start_with(&dir.path().join("data"), "cpu", &["--memory-limit", "200MiB"]);
    server.job_in_state(&job, "succeeded").await;
    // 2 KiB of keys and values per token.
    let wide = json!({"prompt": PROMPT, "num_generations": 8, "sampling": {"max_completion_length": 100_000}});
    let (status, answer) = ask(&server, &job, &wide).await;
    let first = &answer["errors"][0];
    assert_eq!((status, &first["code"]), (422, &json!("not_enough_memory")), "{answer}");
    assert_eq!(first["pointer"], "/sampling/max_completion_length");
    assert!(first["detail"].as_str().unwrap().contains("200 MiB"), "{answer}");
    asked(&server, &job, json!({"prompt": PROMPT})).await;
}

/// Extends the context of the model in a directory, so that a request takes long.
fn make_spacious(dir: &Path) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(200_000);
    std::fs::write(&path, config.to_string()).unwrap();
}

/// Returns the serving processes of a server.
fn serving_processes(server: &Server) -> Vec<u32> {
    let out = Command::new("sh").args(["-c", "cat /proc/[0-9]*/stat 2>/dev/null; true"]).output().unwrap();
    let parent = server.child.id().to_string();
    let children = String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter_map(|line| {
            let (pid, rest) = (line.split(' ').next()?, line.rsplit_once(") ")?.1);
            (rest.split(' ').nth(1)? == parent).then(|| pid.parse::<u32>().ok()).flatten()
        })
        .collect::<Vec<_>>();
    let serves = |pid: &u32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.split(|byte| *byte == 0).nth(1) == Some(b"serving")
    };
    children.into_iter().filter(|pid| is_alive(*pid) && serves(pid)).collect()
}

/// Waits until the serving process generates this number of answers; returns the id of the process.
async fn when_running(server: &Server, answers: u64) -> u32 {
    let begun = Instant::now();
    loop {
        let metrics = String::from_utf8(server.bytes("/metrics").await).unwrap();
        let line =
            metrics.lines().find(|line| line.starts_with("rlood_serving_answers{device=\"cpu\",state=\"running\"}"));
        let running = line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
        if running == Some(answers) {
            let found = serving_processes(server);
            assert_eq!(found.len(), 1, "{found:?}");
            return found[0];
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{running:?} answers run: wanted {answers}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn questions_run_side_by_side_and_end_with_their_client_their_process_or_their_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    let small = model_copy(&dir.path().join("small"));
    make_spacious(&small);
    register(&server, "small", &small).await;
    let job = server.submit(&spec("small", 2)).await;
    server.job_in_state(&job, "succeeded").await;
    let endless = json!({"prompt": PROMPT, "sampling": {"temperature": 0, "max_completion_length": 100_000}});
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{}/jobs/{job}/generate", server.url);
    let begin = || tokio::spawn(http.post(&url).json(&endless).send());

    let first = begin();
    when_running(&server, 2).await;
    // Another question is answered meanwhile, as if it were alone.
    let meanwhile = asked(&server, &job, json!({"prompt": PROMPT})).await;
    // The client disconnects: its answers end.
    first.abort();
    when_running(&server, 0).await;
    assert_eq!(texts(&asked(&server, &job, json!({"prompt": PROMPT})).await, "trained"), texts(&meanwhile, "trained"));

    // The process is killed: the error is clear, and the next request succeeds.
    let third = begin();
    signal("KILL", when_running(&server, 2).await);
    let answer = third.await.unwrap().unwrap();
    assert_eq!(answer.status(), 503);
    assert!(answer.headers().contains_key("retry-after"));
    let answer: Value = answer.json().await.unwrap();
    assert_eq!((&answer["code"], &answer["retryable"]), (&json!("generation_failed"), &json!(true)), "{answer}");
    assert!(answer["detail"].as_str().unwrap().contains("was killed"), "{answer}");
    asked(&server, &job, json!({"prompt": PROMPT})).await;

    // The server stops: the request is refused immediately, and no process remains.
    let fourth = begin();
    let pid = when_running(&server, 2).await;
    let (status, took) = server.terminate();
    assert!(status.success() && took < Duration::from_secs(20), "{status} after {took:?}");
    assert!(!is_alive(pid));
    let answer = fourth.await.unwrap().unwrap();
    assert_eq!(
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap()["code"].clone()),
        (503, json!("not_ready"))
    );
}
