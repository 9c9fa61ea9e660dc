//! `POST /v1/chat/completions`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde_json::{Map, Value, json};

use super::answer::{Collected, Whole, collect, fingerprint, finish_reason, new_id, start, stop_reason};
use super::error::in_stream;
use super::fields::{Fields, MAX_TOP, fit, invalid, request};
use super::names::{Chosen, resolve};
use super::tokens::Tokens;
use super::tools::{ToolUse, parser_of};
use super::{Facts, answer};
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::error::Problem;
use crate::http::event_stream::{KEEP_ALIVE, ServerSentEvent};
use crate::http::extract::{Json, Path};
use crate::openai::{
    ChatChoice, ChatCompletion, ChatFields, ChatLogprobs, ChatMessage, ChatRequest, OpenAiError, Usage,
};
use crate::serving::{ServedPiece, ServedRequest};
use crate::store::background::spawn_blocking;
use crate::store::clock_ms;
use crate::supervisor::serving::Answers;

/// The reason for the end of an answer that calls tools.
const TOOL_CALLS: &str = "tool_calls";

/// Answer a chat.
///
/// The API of OpenAI and vLLM. Log-probs are those before temperature, filters and penalties. With `stream` the response is a
/// stream of `chat.completion.chunk` objects that ends with `[DONE]`. Fields that are ignored because rlood does not know them are
/// named in the header `x-rlood-ignored`. The request stops when the client disconnects.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "Serving", request_body = ChatRequest,
    responses(
        (status = 200, description = "The answers", content((ChatCompletion = "application/json"), (ServerSentEvent = "text/event-stream"))),
        (status = 400, description = "The request is not valid; `param` names the field", body = OpenAiError),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError),
        (status = 429, description = "All places are taken; see `Retry-After`", body = OpenAiError),
        (status = 501, description = "This server serves no models", body = OpenAiError),
        (status = 503, description = "The serving process failed", body = OpenAiError)))]
pub(super) async fn create_chat_completion(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<Map<String, Value>>,
) -> Result<Response, Problem> {
    answer_chat(state, caller, body).await
}

/// Answer a chat with the model of the path.
#[utoipa::path(post, path = "/serve/{model}/v1/chat/completions", tag = "Serving",
    params(("model" = String, Path, description = "The model; a slash in it is written %2F")), request_body = ChatRequest,
    responses((status = 200, description = "The answers", content((ChatCompletion = "application/json"), (ServerSentEvent = "text/event-stream"))),
        (status = 400, description = "The request is not valid; `param` names the field", body = OpenAiError),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError),
        (status = 429, description = "All places are taken; see `Retry-After`", body = OpenAiError)))]
pub(super) async fn create_chat_completion_of(
    State(state): State<AppState>,
    caller: Caller,
    Path(model): Path<String>,
    Json(mut body): Json<Map<String, Value>>,
) -> Result<Response, Problem> {
    body.insert("model".to_owned(), json!(model));
    answer_chat(state, caller, body).await
}

async fn answer_chat(state: AppState, caller: Caller, body: Map<String, Value>) -> Result<Response, Problem> {
    let fields: Fields<ChatFields> = Fields::read(&body, ChatFields::NAMES)?;
    let chosen = resolve(&state, &caller, &fields.own.model).await?;
    let mut request = request(&fields.sampling, &chosen.facts)?;
    request.logprobs = logprobs(&fields.own)?;
    let mut tools = ToolUse::of(&fields.own, &chosen.facts)?;
    request.ids = render(&chosen.facts, fields.own.clone(), &mut tools).await?;
    let ChatFields { max_completion_tokens, max_tokens, .. } = fields.own;
    let (name, wanted) = match max_completion_tokens {
        Some(most) => ("max_completion_tokens", Some(most)),
        None => ("max_tokens", max_tokens),
    };
    if wanted == Some(0) {
        return Err(invalid(name, "out_of_range", format!("{name} is 0: must be at least 1")));
    }
    request.to_context_end = wanted.is_none();
    request.max_tokens = fit(&request.ids, (name, wanted), u64::MAX, &chosen.facts)?;
    let answers = start(&state, &caller, &chosen, request.clone())?;
    let chat = Chat {
        id: new_id("chatcmpl"),
        created: clock_ms() / 1000,
        model: chosen.id.clone(),
        facts: chosen.facts.clone(),
        as_ids: fields.sampling.return_tokens_as_token_ids.unwrap_or(false),
        returns_ids: fields.sampling.return_token_ids.unwrap_or(false),
        tools,
        with_usage: fields.sampling.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true)),
        request,
    };
    let mut response = respond(chat, answers).await?;
    finish(&mut response, &fields, &chosen);
    Ok(response)
}

async fn respond(chat: Chat, answers: Answers) -> Result<Response, Problem> {
    if chat.request.stream {
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("keep-alive");
        return Ok(Sse::new(chat.stream(answers)).keep_alive(keep_alive).into_response());
    }
    let collected = collect(answers, &chat.request).await.map_err(answer::problem)?;
    Ok(Json(chat.whole(collected)).into_response())
}

/// Adds the headers of an answer.
pub(super) fn finish<T>(response: &mut Response, fields: &Fields<T>, chosen: &Chosen) {
    if let Some(row) = &chosen.checkpoint {
        crate::http::artifacts::name_checkpoint(response, row.id);
    }
    fields.mark(response);
}

/// How many log-probs to report with each token; None = none.
fn logprobs(fields: &ChatFields) -> Result<Option<u32>, Problem> {
    match (fields.logprobs.unwrap_or(false), fields.top_logprobs) {
        (_, Some(top)) if top > MAX_TOP => {
            Err(invalid("top_logprobs", "out_of_range", format!("top_logprobs is {top}: must be at most {MAX_TOP}")))
        }
        (false, Some(top)) if top > 0 => {
            Err(invalid("top_logprobs", "invalid", "top_logprobs needs logprobs: set logprobs to true"))
        }
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}

/// Renders a chat and returns its token ids. Takes long for long chats, so it runs on a thread for blocking work.
async fn render(facts: &Arc<Facts>, fields: ChatFields, tools: &mut Option<ToolUse>) -> Result<Vec<u32>, Problem> {
    let (facts, schemas) = (facts.clone(), tools.as_ref().map(|tools| tools.schemas().to_vec()));
    let encode = move || {
        let text = rendered(&facts, &fields, schemas.as_deref().unwrap_or_default())?;
        let ids = facts.text.encode(&text, false);
        let ids = ids.map_err(|error| invalid("messages", "prompt_not_encodable", error.to_string()))?;
        Ok::<_, Problem>((ids, text.trim_end().ends_with("<think>")))
    };
    let (ids, opens_reasoning) = spawn_blocking(encode).await.map_err(Problem::internal)??;
    if let Some(tools) = tools {
        tools.opens_reasoning = opens_reasoning;
    }
    Ok(ids)
}

/// Renders messages and tools with the model's chat template.
pub(super) fn rendered(facts: &Facts, fields: &ChatFields, tools: &[Value]) -> Result<String, Problem> {
    let continues = fields.continue_final_message.unwrap_or(false);
    let opens = fields.add_generation_prompt.unwrap_or(!continues);
    if continues && opens {
        let detail = "add_generation_prompt and continue_final_message exclude each other: set one of them to false";
        return Err(invalid("continue_final_message", "invalid", detail));
    }
    let messages = crate::chat::for_template(&messages(&fields.messages)?, parser_of(facts))
        .map_err(|error| invalid(&format!("messages{}", error.pointer), "invalid", error.detail))?;
    let kwargs = fields.chat_template_kwargs.clone().unwrap_or_default();
    if kwargs.contains_key("tools") {
        let detail = "tools are not a variable of the chat template: use the field 'tools'";
        return Err(invalid("chat_template_kwargs/tools", "invalid", detail));
    }
    let text = facts
        .text
        .render_chat_with_tools(&messages, tools, opens, &kwargs)
        .map_err(|error| invalid("messages", "invalid_messages", crate::error_text::with_causes(&error)))?;
    if !continues {
        return Ok(text);
    }
    // The text that the template puts after the last message is cut off, as transformers does.
    let last = messages.last().and_then(|message| message.get("content")).and_then(Value::as_str).unwrap_or("").trim();
    match text.rfind(last).filter(|_| !last.is_empty()) {
        Some(place) => Ok(text[..place + last.len()].to_owned()),
        None => Err(invalid(
            "messages",
            "invalid_messages",
            "the chat template does not show the last message, so it cannot be continued",
        )),
    }
}

/// Checks messages, and joins their text parts.
fn messages(given: &[Map<String, Value>]) -> Result<Vec<Value>, Problem> {
    if given.is_empty() {
        return Err(invalid("messages", "empty", "messages is empty: give at least one message"));
    }
    let one = |(index, message): (usize, &Map<String, Value>)| {
        let mut message = message.clone();
        let role = match message.get("role").and_then(Value::as_str) {
            Some("developer") => "system",
            Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
            _ => {
                let detail = "the role must be system, developer, user, assistant or tool";
                return Err(invalid(&format!("messages/{index}/role"), "invalid", detail));
            }
        };
        message.insert("role".to_owned(), json!(role));
        let field = format!("messages/{index}/content");
        let content = match message.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => {
                let text = |part: &Value| match part.get("type").and_then(Value::as_str) {
                    Some("text" | "input_text") => part.get("text").and_then(Value::as_str).map(str::to_owned),
                    _ => None,
                };
                let texts: Option<Vec<String>> = parts.iter().map(text).collect();
                texts.map(|texts| texts.concat()).ok_or_else(|| {
                    let detail = "only text parts are supported, {\"type\": \"text\", \"text\": …}: leave out images, audio and files";
                    invalid(&field, "unsupported_value", detail)
                })?
            }
            None | Some(Value::Null) if message.contains_key("tool_calls") => String::new(),
            _ => return Err(invalid(&field, "invalid", "the content must be a text or a list of text parts")),
        };
        message.insert("content".to_owned(), json!(content));
        Ok(Value::Object(message))
    };
    given.iter().enumerate().map(one).collect()
}

/// A chat that is being answered.
struct Chat {
    id: String,
    created: i64,
    model: String,
    facts: Arc<Facts>,
    as_ids: bool,
    returns_ids: bool,
    tools: Option<ToolUse>,
    with_usage: bool,
    request: ServedRequest,
}

impl Chat {
    /// The message of an answer that calls tools.
    fn calls(&self, whole: &Whole) -> Option<ChatMessage> {
        self.tools.as_ref()?.message(whole, &self.facts)
    }

    fn logprobs(&self, ids: &[u32], logprobs: &[crate::serving::TokenLogprobs]) -> Option<ChatLogprobs> {
        self.request.logprobs?;
        let tokens = Tokens { text: &self.facts.text, as_ids: self.as_ids };
        Some(ChatLogprobs { content: tokens.of_chat(ids, logprobs), refusal: None })
    }

    fn usage(&self, completion_tokens: u64) -> Usage {
        let prompt_tokens = self.request.ids.len() as u64;
        Usage { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }

    /// The answer as one object.
    fn whole(&self, collected: Collected) -> ChatCompletion {
        let tokens = collected.answers.iter().map(|whole| whole.ids.len() as u64).sum();
        let choice = |(index, whole): (usize, Whole)| {
            let calls = self.calls(&whole);
            ChatChoice {
                index: index as u32,
                logprobs: self.logprobs(&whole.ids, &whole.logprobs),
                finish_reason: if calls.is_some() { TOOL_CALLS } else { finish_reason(whole.finish.as_ref()) },
                stop_reason: stop_reason(whole.finish.as_ref()),
                token_ids: self.returns_ids.then_some(whole.ids),
                message: calls.unwrap_or(ChatMessage {
                    role: "assistant",
                    content: Some(whole.text),
                    reasoning_content: None,
                    tool_calls: Vec::new(),
                    refusal: None,
                }),
            }
        };
        ChatCompletion {
            id: self.id.clone(),
            object: "chat.completion",
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: fingerprint(),
            choices: collected.answers.into_iter().enumerate().map(choice).collect(),
            usage: self.usage(tokens),
            prompt_token_ids: self.returns_ids.then(|| self.request.ids.clone()),
        }
    }

    fn chunk(&self, choices: &Value, usage: Option<Usage>) -> Event {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        });
        // Only clients that asked for it get usage, since others do not expect the field.
        if self.with_usage {
            chunk["usage"] = json!(usage);
        }
        Event::default().data(chunk.to_string())
    }

    fn first(&self, index: u32) -> Event {
        let delta = json!({"role": "assistant", "content": ""});
        self.chunk(&json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]), None)
    }

    fn piece(&self, piece: &ServedPiece, calls: Option<&ChatMessage>) -> Event {
        let logprobs = self.logprobs(&piece.ids, &piece.logprobs);
        let mut choice = json!({
            "index": piece.index,
            "delta": calls.map_or_else(|| json!({"content": piece.text}), delta_of_calls),
            "logprobs": logprobs,
            "finish_reason": null,
        });
        if self.returns_ids {
            choice["token_ids"] = json!(piece.ids);
        }
        self.chunk(&json!([choice]), None)
    }

    fn last(&self, piece: &ServedPiece, calls: Option<&ChatMessage>) -> Event {
        let mut choice = json!({
            "index": piece.index,
            "delta": {},
            "logprobs": null,
            "finish_reason": calls.map_or_else(|| finish_reason(piece.finish.as_ref()), |_| TOOL_CALLS),
        });
        if let Some(stop) = stop_reason(piece.finish.as_ref()) {
            choice["stop_reason"] = json!(stop);
        }
        self.chunk(&json!([choice]), None)
    }

    /// The answer as a stream of chunks.
    fn stream(self, answers: Answers) -> impl Stream<Item = Result<Event, Infallible>> {
        let first = (0..self.request.num_choices).map(|index| self.first(index)).collect::<Vec<Event>>();
        let left = self.request.num_choices;
        let held = if self.tools.is_some() { vec![Whole::default(); left as usize] } else { Vec::new() };
        let pieces = Pieces { chat: self, answers: Some(answers), held, left, tokens: 0, ready: first.into() };
        futures::stream::unfold(pieces, |mut pieces| async move {
            let event = pieces.next().await?;
            Some((Ok(event), pieces))
        })
    }
}

/// The state of a stream.
struct Pieces {
    chat: Chat,
    /// None once the stream has ended; dropping the answers frees their places.
    answers: Option<Answers>,
    /// The beginnings of the answers, if they may call tools: whether a text is a call is known at its end.
    held: Vec<Whole>,
    left: u32,
    tokens: u64,
    /// Events that are sent next.
    ready: std::collections::VecDeque<Event>,
}

impl Pieces {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let piece = match self.answers.as_mut()?.next().await {
                Some(Ok(piece)) => piece,
                failed => {
                    let problem = answer::problem(failed.and_then(Result::err).unwrap_or_else(answer::ended));
                    tracing::warn!(cause = problem.cause(), "a streamed answer failed");
                    self.answers = None;
                    return Some(Event::default().data(json!(in_stream(problem.detail())).to_string()));
                }
            };
            self.tokens += piece.ids.len() as u64;
            let Some((piece, calls)) = self.joined(piece) else { continue };
            if calls.is_some() || !piece.text.is_empty() || !piece.logprobs.is_empty() {
                self.ready.push_back(self.chat.piece(&piece, calls.as_ref()));
            }
            if piece.finish.is_some() {
                self.ready.push_back(self.chat.last(&piece, calls.as_ref()));
                self.left -= 1;
            }
            if self.left == 0 {
                if self.chat.with_usage {
                    let usage = self.chat.usage(self.tokens);
                    self.ready.push_back(self.chat.chunk(&json!([]), Some(usage)));
                }
                self.ready.push_back(Event::default().data("[DONE]"));
                self.answers = None;
            }
        }
    }

    /// Returns a piece at once if the answer cannot call tools; otherwise holds it back, and returns the whole answer at its end.
    fn joined(&mut self, piece: ServedPiece) -> Option<(ServedPiece, Option<ChatMessage>)> {
        let Some(whole) = self.held.get_mut(piece.index as usize) else { return Some((piece, None)) };
        whole.text.push_str(&piece.text);
        whole.ids.extend(&piece.ids);
        whole.logprobs.extend(piece.logprobs.iter().cloned());
        piece.finish.as_ref()?;
        let whole = std::mem::take(whole);
        let whole = Whole { finish: piece.finish.clone(), ..whole };
        let calls = self.chat.calls(&whole);
        let Whole { text, ids, logprobs, finish } = whole;
        Some((ServedPiece { text, ids, logprobs, finish, ..piece }, calls))
    }
}

/// A message with calls as a chunk's delta.
fn delta_of_calls(message: &ChatMessage) -> Value {
    let mut delta = json!({"tool_calls": []});
    let numbered = message.tool_calls.iter().enumerate().map(|(index, call)| {
        let mut call = json!(call);
        call["index"] = json!(index);
        call
    });
    delta["tool_calls"] = numbered.collect();
    if let Some(content) = &message.content {
        delta["content"] = json!(content);
    }
    if let Some(reasoning) = &message.reasoning_content {
        delta["reasoning_content"] = json!(reasoning);
    }
    delta
}
