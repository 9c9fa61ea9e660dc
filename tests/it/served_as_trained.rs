//! Episodes over `/v1`: a client that plays an episode with the trained adapter gets the tokens that training sampled.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::processes::{Server, register};

const STEPS: u64 = 30;
const MAX_TURN_TOKENS: u64 = 24;

/// A calculator that asks for a second sum after the first answer. So an episode has up to four turns, two of them calls. It pays 1 for
/// a turn that has a call, and 1 for one that repeats the result.
#[derive(Clone, Default)]
struct Sums(Arc<Mutex<BTreeMap<String, Play>>>);

#[derive(Default)]
struct Play {
    /// The last result of the calculator.
    result: Option<u64>,
    num_answers: u32,
    /// The last request's id, and its answer.
    last: Option<(Value, Value)>,
}

impl Sums {
    async fn start() -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/play", listener.local_addr().unwrap());
        let app = Router::new().fallback(play).with_state(Self::default());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        url
    }
}

/// The sum of the numbers of `a+b+c`.
fn sum(expression: &str) -> Option<u64> {
    expression.split('+').map(|number| number.trim().parse::<u64>().ok()).sum()
}

async fn play(State(sums): State<Sums>, Json(body): Json<Value>) -> Response {
    let mut plays = sums.0.lock().unwrap();
    let play = plays.entry(format!("{} {}", body["episode"]["id"], body["episode"]["attempt"])).or_default();
    let answer = match body["type"].as_str().unwrap() {
        "env.reset.request" => {
            let parameters =
                json!({"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]});
            let calculator = json!({"name": "calculator", "description": "Adds numbers.", "parameters": parameters});
            json!({"version": "1", "id": body["id"], "tools": [{"type": "function", "function": calculator}]})
        }
        "env.step.request" => match &play.last {
            Some((id, answer)) if *id == body["id"] => answer.clone(),
            _ => {
                let answer = turn(play, &body);
                play.last = Some((body["id"].clone(), answer.clone()));
                answer
            }
        },
        "env.close.request" => return StatusCode::NO_CONTENT.into_response(),
        _ => json!({"version": "1"}),
    };
    Json(answer).into_response()
}

fn turn(play: &mut Play, body: &Value) -> Value {
    let calls = body["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let mut messages = Vec::new();
    for call in &calls {
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        play.result = arguments["expression"].as_str().and_then(sum);
        let content = play.result.map_or("error".to_owned(), |result| result.to_string());
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": content}));
    }
    let said = body["message"]["content"].as_str().unwrap_or_default().trim().to_owned();
    let is_right = calls.is_empty() && play.result.is_some_and(|result| said == result.to_string());
    if calls.is_empty() {
        play.num_answers += 1;
        messages.push(json!({"role": "user", "content": "What is 2718+3141+1414?"}));
    }
    let reward = if is_right || !calls.is_empty() { 1.0 } else { 0.0 };
    json!({"version": "1", "id": body["id"], "messages": messages, "reward": reward, "done": play.num_answers == 2})
}

fn job(url: &str) -> Value {
    let rows = |count: u64, seed: u64| -> Vec<Value> {
        let number = |n: u64| 1000 + (n * 7919 + seed) % 9000;
        let sum = |n: u64| format!("What is {}+{}+{}?", number(3 * n), number(3 * n + 1), number(3 * n + 2));
        (0..count).map(|n| json!({"prompt": [{"role": "user", "content": sum(n)}]})).collect()
    };
    json!({
        "model": "agent",
        "dataset": {"records": rows(64, 1)},
        "eval": {"dataset": {"records": rows(8, 5000)}, "every_steps": STEPS, "num_generations": 1, "temperature": 0},
        "environment": {"url": url, "max_turns": 4, "max_episode_tokens": 150, "max_observation_tokens": 30},
        "rloo": {"num_generations": 8, "beta": 0.0},
        "sampling": {"max_completion_length": MAX_TURN_TOKENS, "temperature": 1.0},
        "lora": {"r": 8, "alpha": 16, "target_modules": "all-linear"},
        "optimizer": {"learning_rate": 3e-3},
        "training": {"prompts_per_step": 8, "max_steps": STEPS, "seed": 11},
    })
}

#[tokio::test]
async fn a_client_that_plays_with_the_adapter_gets_the_turns_of_training() {
    let url = Sums::start().await;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "agent", &Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/agent")).await;
    let document = job(&url);
    let job = server.submit(&document).await;
    server.job_in_state(&job, "succeeded").await;
    let samples = server.get(&format!("/jobs/{job}/samples?phase=eval&step={STEPS}&limit=100")).await;
    let samples = samples["data"].as_array().unwrap();
    assert_eq!(samples.len(), 8);
    let (mut num_calls, mut num_turns) = (0, Vec::new());
    for sample in samples {
        let turns = sample["episode"]["turns"].as_array().unwrap();
        num_turns.push(turns.len());
        num_calls += turns.iter().filter(|turn| !turn["tool_calls"].is_null()).count();
        let row: usize = sample["prompt_id"].as_str().unwrap().strip_prefix("row_").unwrap().parse().unwrap();
        play_over_v1(&server, &job, document["eval"]["dataset"]["records"][row]["prompt"].clone(), turns).await;
    }
    assert!(num_turns.iter().any(|&turns| turns >= 3), "{num_turns:?}");
    assert!(num_calls > 0, "no turn has a call");
}

/// Plays an episode over `/v1`, greedily: each turn must be that of training, and its tokens must be followed by the next prompt's.
async fn play_over_v1(server: &Server, job: &str, messages: Value, turns: &[Value]) {
    let Value::Array(mut messages) = messages else { panic!("{messages}") };
    let parameters =
        json!({"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]});
    let calculator = json!({"name": "calculator", "description": "Adds numbers.", "parameters": parameters});
    let mut so_far: Vec<u64> = Vec::new();
    for turn in turns {
        let body = json!({
            "model": format!("{job}@last"), "messages": messages, "tools": [{"type": "function", "function": calculator}],
            "temperature": 0, "max_tokens": MAX_TURN_TOKENS, "return_token_ids": true,
        });
        let answer = server.post("/v1/chat/completions", &body).await;
        let ids = |value: &Value| -> Vec<u64> { serde_json::from_value(value.clone()).unwrap() };
        let (prompt, choice) = (ids(&answer["prompt_token_ids"]), &answer["choices"][0]);
        assert!(prompt.starts_with(&so_far), "the prompt continues with the sampled tokens");
        let sampled = ids(&choice["token_ids"]);
        assert_eq!(json!(sampled.len()), turn["num_tokens"], "{answer} {turn}");
        let (said, calls) = (&choice["message"]["content"], &choice["message"]["tool_calls"]);
        match turn["tool_calls"].as_array() {
            Some(trained) => {
                let functions = |calls: &[Value]| calls.iter().map(|call| call["function"].clone()).collect::<Vec<_>>();
                assert_eq!(functions(calls.as_array().unwrap()), functions(trained), "{answer}");
            }
            None => assert_eq!((said, calls), (&turn["text"], &Value::Null), "{answer}"),
        }
        messages.push(choice["message"].clone());
        for (place, observation) in turn["observations"].as_array().into_iter().flatten().enumerate() {
            let mut observation = observation.clone();
            if observation["role"] == "tool" {
                observation["tool_call_id"] = calls[place]["id"].clone();
            }
            messages.push(observation);
        }
        so_far = [prompt, sampled].concat();
    }
}
