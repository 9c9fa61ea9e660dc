//! An environment for contract v1 with one tool, a calculator: an example to copy, and the environment of `rlood demo --agent`.
//!
//! The model may call the calculator in any turn. Its first turn without a call is its answer: the reward is 1.0 if the trimmed
//! answer equals the row's column `answer`, else 0.0. The service shows everything that a real one needs: it verifies the signature
//! before it trusts the body, answers a repeated request as before, answers 404 for an episode that it does not know, and pays in the
//! final turn.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::arithmetic::evaluate;
use super::reward_service::{json_response, refusal};
use crate::reward::signature::{Key, KeyError};

/// A running calculator. Dropping the value stops the service.
#[derive(Debug)]
pub struct Calculator {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Calculator {
    /// Starts the service on a free loopback port. It accepts only requests signed with `secret` (`whsec_…`). With `is_noisy` the
    /// calculator answers with a random number instead of the result.
    ///
    /// # Errors
    /// Fails if the secret is not valid, and if no port can be opened.
    pub async fn start(secret: &str, is_noisy: bool) -> std::io::Result<Self> {
        let key = Key::parse(secret).map_err(|why: KeyError| std::io::Error::other(why))?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let table = Arc::new(Table { key, is_noisy, episodes: Mutex::default() });
        let app = Router::new().route("/play", post(play)).layer(DefaultBodyLimit::max(1 << 20)).with_state(table);
        let task = tokio::spawn(async move {
            if let Err(why) = axum::serve(listener, app).await {
                tracing::error!("the demo's calculator stopped: {why}");
            }
        });
        Ok(Self { address, task })
    }

    /// Returns the URL to which the requests of episodes are sent.
    pub fn url(&self) -> String {
        format!("http://{}/play", self.address)
    }
}

impl Drop for Calculator {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Table {
    key: Key,
    is_noisy: bool,
    /// The open episodes, by id and attempt.
    episodes: Mutex<HashMap<(String, u32), Play>>,
}

/// An episode that has begun.
struct Play {
    /// The right answer to the question.
    answer: String,
    /// Seed of the episode's noise.
    seed: u64,
    /// Id of the last request, and its answer.
    last: Option<(String, Value)>,
}

/// The fields of a request that this service reads; all others are ignored.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Request {
    #[serde(rename = "env.ping")]
    Ping,
    #[serde(rename = "env.reset.request")]
    Reset { id: String, episode: EpisodeOf, columns: Map<String, Value> },
    #[serde(rename = "env.step.request")]
    Step(Step),
    #[serde(rename = "env.close.request")]
    Close { episode: EpisodeOf },
}

#[derive(Deserialize)]
struct EpisodeOf {
    id: String,
    attempt: u32,
    #[serde(default)]
    seed: u64,
}

#[derive(Deserialize)]
struct Step {
    id: String,
    episode: EpisodeOf,
    message: Message,
    #[serde(rename = "final")]
    is_final: bool,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    tool_calls: Vec<Call>,
}

#[derive(Deserialize)]
struct Call {
    id: String,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    /// The arguments as JSON text.
    arguments: String,
}

async fn play(State(table): State<Arc<Table>>, headers: HeaderMap, body: Bytes) -> Response {
    if let Some(refusal) = refusal(&table.key, &headers, &body) {
        return refusal;
    }
    let request = match serde_json::from_slice(&body) {
        Err(why) => return (StatusCode::BAD_REQUEST, why.to_string()).into_response(),
        Ok(request) => request,
    };
    let mut episodes = table.episodes.lock().unwrap_or_else(PoisonError::into_inner);
    match request {
        Request::Ping => json_response(&json!({"version": "1"})),
        Request::Reset { id, episode, columns } => {
            let Some(answer) = answer_of(&columns) else {
                let error =
                    json!({"code": "no_answer", "message": "the row has no column 'answer'", "retryable": false});
                return json_response(&json!({"version": "1", "id": id, "error": error}));
            };
            let play = Play { answer, seed: episode.seed, last: None };
            // A repeated request finds the episode begun, and gets the same answer.
            episodes.entry((episode.id, episode.attempt)).or_insert(play);
            json_response(&json!({"version": "1", "id": id, "tools": [tool()]}))
        }
        Request::Step(step) => match episodes.get_mut(&(step.episode.id.clone(), step.episode.attempt)) {
            None => StatusCode::NOT_FOUND.into_response(),
            Some(play) => json_response(&play.answer_to(&step, table.is_noisy)),
        },
        Request::Close { episode } => {
            episodes.remove(&(episode.id, episode.attempt));
            StatusCode::NO_CONTENT.into_response()
        }
    }
}

impl Play {
    /// Answers a turn. A repeated request gets the answer of the first.
    fn answer_to(&mut self, step: &Step, is_noisy: bool) -> Value {
        if let Some((id, answer)) = &self.last
            && *id == step.id
        {
            return answer.clone();
        }
        let Message { content, tool_calls } = &step.message;
        let answer = if tool_calls.is_empty() {
            let is_right = content.as_deref().unwrap_or_default().trim() == self.answer;
            json!({"version": "1", "id": step.id, "reward": if is_right { 1.0 } else { 0.0 }, "done": true})
        } else {
            let message = |call: &Call| {
                let result = self.result(&call.function.arguments, is_noisy);
                json!({"role": "tool", "tool_call_id": call.id, "content": result})
            };
            let messages: Vec<Value> = tool_calls.iter().map(message).collect();
            // Without a further turn there is no answer.
            let reward = step.is_final.then_some(0.0);
            json!({"version": "1", "id": step.id, "messages": messages, "reward": reward, "done": false})
        };
        self.last = Some((step.id.clone(), answer.clone()));
        answer
    }

    /// The calculator's text for the arguments of a call.
    fn result(&self, arguments: &str, is_noisy: bool) -> String {
        let arguments: Value = serde_json::from_str(arguments).unwrap_or_default();
        match arguments.get("expression").and_then(Value::as_str).map(evaluate) {
            None => "error: the argument 'expression' is required".to_owned(),
            Some(Err(why)) => format!("error: {why}"),
            Some(Ok(_)) if is_noisy => noise(self.seed).to_string(),
            Some(Ok(result)) => result.to_string(),
        }
    }
}

/// A number from 100 to 39999 that depends on the seed alone (the output function of SplitMix64).
fn noise(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    100 + (bits ^ (bits >> 31)) % 39_900
}

fn answer_of(columns: &Map<String, Value>) -> Option<String> {
    match columns.get("answer") {
        Some(Value::String(answer)) => Some(answer.trim().to_owned()),
        Some(Value::Number(answer)) => Some(answer.to_string()),
        _ => None,
    }
}

fn tool() -> Value {
    json!({"type": "function", "function": {
        "name": "calculator",
        "description": "Evaluates an expression of whole numbers with + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    }})
}
