//! `POST /v1/completions`, with `echo` and log-probs of prompts.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde_json::{Map, Value, json};

use super::answer::{Collected, Whole, collect, fingerprint, finish_reason, new_id, start, stop_reason};
use super::chat::finish;
use super::error::in_stream;
use super::fields::{Fields, MAX_TOP, fit, invalid, request};
use super::names::resolve;
use super::tokens::Tokens;
use super::{Facts, answer};
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::error::Problem;
use crate::http::event_stream::{KEEP_ALIVE, ServerSentEvent};
use crate::http::extract::{Json, Path};
use crate::openai::{
    CompletionFields, CompletionRequest, OpenAiError, Prompts, TextChoice, TextCompletion, TextLogprobs, Usage,
};
use crate::serving::{ServedPiece, ServedRequest, TokenLogprobs};
use crate::store::background::spawn_blocking;
use crate::store::clock_ms;
use crate::supervisor::serving::Answers;

/// Number of tokens of an answer if the request does not say.
const DEFAULT_TOKENS: u64 = 16;
/// Maximum number of prompts of a request.
const MAX_PROMPTS: usize = 128;

/// Complete prompts.
///
/// The API of OpenAI and vLLM. A prompt may be token ids, to which nothing is added. With `echo` and `logprobs` the answer has
/// the log-probs of the prompt too, which is what evaluation harnesses ask for; they are those before temperature, filters and
/// penalties. With `stream` the response is a stream that ends with `[DONE]`.
#[utoipa::path(post, path = "/v1/completions", tag = "Serving", request_body = CompletionRequest,
    responses(
        (status = 200, description = "The answers", content((TextCompletion = "application/json"), (ServerSentEvent = "text/event-stream"))),
        (status = 400, description = "The request is not valid; `param` names the field", body = OpenAiError),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError),
        (status = 429, description = "All places are taken; see `Retry-After`", body = OpenAiError),
        (status = 501, description = "This server serves no models", body = OpenAiError),
        (status = 503, description = "The serving process failed", body = OpenAiError)))]
pub(super) async fn create_completion(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<Map<String, Value>>,
) -> Result<Response, Problem> {
    complete(state, caller, body).await
}

/// Complete prompts with the model of the path.
#[utoipa::path(post, path = "/serve/{model}/v1/completions", tag = "Serving",
    params(("model" = String, Path, description = "The model; a slash in it is written %2F")), request_body = CompletionRequest,
    responses((status = 200, description = "The answers", content((TextCompletion = "application/json"), (ServerSentEvent = "text/event-stream"))),
        (status = 400, description = "The request is not valid; `param` names the field", body = OpenAiError),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError),
        (status = 429, description = "All places are taken; see `Retry-After`", body = OpenAiError)))]
pub(super) async fn create_completion_of(
    State(state): State<AppState>,
    caller: Caller,
    Path(model): Path<String>,
    Json(mut body): Json<Map<String, Value>>,
) -> Result<Response, Problem> {
    body.insert("model".to_owned(), json!(model));
    complete(state, caller, body).await
}

async fn complete(state: AppState, caller: Caller, body: Map<String, Value>) -> Result<Response, Problem> {
    let fields: Fields<CompletionFields> = Fields::read(&body, CompletionFields::NAMES)?;
    let chosen = resolve(&state, &caller, &fields.own.model).await?;
    let mut settings = request(&fields.sampling, &chosen.facts)?;
    if let Some(top) = fields.own.logprobs.filter(|top| *top > MAX_TOP) {
        return Err(invalid("logprobs", "out_of_range", format!("logprobs is {top}: must be at most {MAX_TOP}")));
    }
    let echo = fields.own.echo.unwrap_or(false);
    if fields.own.max_tokens == Some(0) && !echo {
        let detail = "max_tokens is 0: must be at least 1, or 0 with echo";
        return Err(invalid("max_tokens", "out_of_range", detail));
    }
    settings.logprobs = fields.own.logprobs;
    settings.echo = echo && settings.logprobs.is_some();
    let prompts = encode(&chosen.facts, &fields.own).await?;
    let wanted = fields.own.max_tokens;
    let mut requests = Vec::with_capacity(prompts.len());
    for ids in prompts {
        let max_tokens = fit(&ids, ("max_tokens", wanted), DEFAULT_TOKENS, &chosen.facts)?;
        requests.push(ServedRequest { ids, max_tokens, ..settings.clone() });
    }
    let completion = Completion {
        id: new_id("cmpl"),
        created: clock_ms() / 1000,
        model: chosen.id.clone(),
        facts: chosen.facts.clone(),
        as_ids: fields.sampling.return_tokens_as_token_ids.unwrap_or(false),
        returns_ids: fields.sampling.return_token_ids.unwrap_or(false),
        with_usage: fields.sampling.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true)),
        echo,
    };
    // Without tokens to compute, an echoed prompt needs no process.
    let is_free = |request: &ServedRequest| request.max_tokens == 0 && !request.echo;
    let mut answers = Vec::with_capacity(requests.len());
    for request in &requests {
        let started = match is_free(request) {
            true => None,
            false => Some(start(&state, &caller, &chosen, request.clone())?),
        };
        answers.push(started);
    }
    let mut response = if settings.stream {
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("keep-alive");
        Sse::new(completion.stream(requests, answers)).keep_alive(keep_alive).into_response()
    } else {
        let mut collected = Vec::with_capacity(requests.len());
        for (request, answers) in requests.iter().zip(answers) {
            let none =
                || Collected { answers: vec![Whole::default(); request.num_choices as usize], prompt: Vec::new() };
            collected.push(match answers {
                Some(answers) => collect(answers, request).await.map_err(answer::problem)?,
                None => none(),
            });
        }
        Json(completion.whole(&requests, collected)).into_response()
    };
    finish(&mut response, &fields, &chosen);
    Ok(response)
}

/// The token ids of each prompt. Takes long for long texts, so it runs on a thread for blocking work.
async fn encode(facts: &Arc<Facts>, fields: &CompletionFields) -> Result<Vec<Vec<u32>>, Problem> {
    let texts = match fields.prompt.clone() {
        Prompts::Ids(ids) => return Ok(vec![ids]),
        Prompts::IdLists(lists) => return checked(lists),
        Prompts::Text(text) => vec![text],
        Prompts::Texts(texts) => checked(texts)?,
    };
    let (facts, special) = (facts.clone(), fields.add_special_tokens.unwrap_or(true));
    let encode = move || {
        let one = |text: &String| facts.text.encode(text, special);
        texts.iter().map(one).collect::<Result<_, _>>().map_err(|error| error.to_string())
    };
    let encoded = spawn_blocking(encode).await.map_err(Problem::internal)?;
    encoded.map_err(|why| invalid("prompt", "prompt_not_encodable", why))
}

fn checked<T>(prompts: Vec<T>) -> Result<Vec<T>, Problem> {
    match prompts.len() {
        1..=MAX_PROMPTS => Ok(prompts),
        count => {
            let detail = format!("prompt has {count} prompts: must be from 1 to {MAX_PROMPTS}");
            Err(invalid("prompt", "out_of_range", detail))
        }
    }
}

/// A completion that is being answered.
struct Completion {
    id: String,
    created: i64,
    model: String,
    facts: Arc<Facts>,
    as_ids: bool,
    returns_ids: bool,
    with_usage: bool,
    echo: bool,
}

impl Completion {
    fn tokens(&self) -> Tokens<'_> {
        Tokens { text: &self.facts.text, as_ids: self.as_ids }
    }

    /// The text of an echoed prompt; empty without echo.
    fn prompt_text(&self, request: &ServedRequest) -> String {
        match self.echo {
            true => self.facts.text.decode(&request.ids, !request.shows_special).unwrap_or_default(),
            false => String::new(),
        }
    }

    /// The log-probs of an echoed prompt, and the number of its characters.
    fn prompt_logprobs(
        &self,
        request: &ServedRequest,
        prompt: &[Option<TokenLogprobs>],
    ) -> (Option<TextLogprobs>, u64) {
        let mut offset = 0;
        if request.logprobs.is_none() {
            return (None, offset);
        }
        let mut logprobs = TextLogprobs::default();
        if self.echo {
            self.tokens().append(&mut logprobs, &request.ids, prompt.iter().map(Option::as_ref), &mut offset);
        }
        (Some(logprobs), offset)
    }

    /// The answers as one object.
    fn whole(&self, requests: &[ServedRequest], collected: Vec<Collected>) -> TextCompletion {
        let (mut choices, mut usage) = (Vec::new(), Usage::default());
        for (request, Collected { prompt, answers }) in requests.iter().zip(collected) {
            usage.prompt_tokens += request.ids.len() as u64;
            let prompt_text = self.prompt_text(request);
            for whole in answers {
                usage.completion_tokens += whole.ids.len() as u64;
                let (mut logprobs, mut offset) = self.prompt_logprobs(request, &prompt);
                if let Some(logprobs) = &mut logprobs {
                    self.tokens().append(logprobs, &whole.ids, whole.logprobs.iter().map(Some), &mut offset);
                }
                choices.push(TextChoice {
                    index: choices.len() as u32,
                    text: format!("{prompt_text}{}", whole.text),
                    logprobs,
                    finish_reason: Some(finish_reason(whole.finish.as_ref())),
                    stop_reason: stop_reason(whole.finish.as_ref()),
                    token_ids: self.returns_ids.then_some(whole.ids),
                    prompt_token_ids: self.returns_ids.then(|| request.ids.clone()),
                });
            }
        }
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
        self.object(choices, Some(Some(usage)))
    }

    fn object(&self, choices: Vec<TextChoice>, usage: Option<Option<Usage>>) -> TextCompletion {
        TextCompletion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: fingerprint(),
            choices,
            usage,
        }
    }

    fn chunk(&self, choices: Vec<TextChoice>, usage: Option<Usage>) -> Event {
        Event::default().data(json!(self.object(choices, self.with_usage.then_some(usage))).to_string())
    }

    /// The answers as a stream of chunks.
    fn stream(
        self,
        requests: Vec<ServedRequest>,
        answers: Vec<Option<Answers>>,
    ) -> impl Stream<Item = Result<Event, Infallible>> {
        let streams = answers.into_iter().enumerate().map(|(prompt, answers)| {
            let pieces = futures::stream::unfold(answers, |answers| async move {
                let mut answers = answers?;
                let piece = answers.next().await;
                let goes_on = matches!(piece, Some(Ok(_)));
                Some((piece.unwrap_or_else(|| Err(answer::ended())), goes_on.then_some(answers)))
            });
            pieces.map(move |piece| (prompt, piece)).boxed()
        });
        let left = requests.iter().map(|request| request.num_choices as usize).sum();
        let mut events = Events {
            pieces: Some(futures::stream::select_all(streams).boxed()),
            offsets: vec![Vec::new(); requests.len()],
            completion: self,
            requests,
            left,
            tokens: 0,
            ready: VecDeque::new(),
        };
        events.echo_plainly();
        futures::stream::unfold(events, |mut events| async move {
            let event = events.next().await?;
            Some((Ok(event), events))
        })
    }
}

/// A piece of an answer to the prompt with this index.
type PromptPiece = (usize, Result<ServedPiece, crate::serving::ServingError>);

/// The state of a stream.
struct Events {
    completion: Completion,
    requests: Vec<ServedRequest>,
    /// None once the stream has ended; dropping the answers frees their places.
    pieces: Option<futures::stream::BoxStream<'static, PromptPiece>>,
    /// Number of characters so far of each prompt's answers.
    offsets: Vec<Vec<u64>>,
    left: usize,
    tokens: u64,
    ready: VecDeque<Event>,
}

impl Events {
    /// Sends the prompts of an echo without log-probs, which the process does not send.
    fn echo_plainly(&mut self) {
        for prompt in 0..self.requests.len() {
            let request = self.requests[prompt].clone();
            self.offsets[prompt] = vec![0; request.num_choices as usize];
            if self.completion.echo && !request.echo {
                self.send_prompt(prompt, &[]);
                if request.max_tokens == 0 {
                    self.end_all(prompt);
                }
            }
        }
        self.end_stream();
    }

    fn index(&self, prompt: usize, choice: u32) -> u32 {
        let before: u32 = self.requests[..prompt].iter().map(|request| request.num_choices).sum();
        before + choice
    }

    fn send_prompt(&mut self, prompt: usize, known: &[Option<TokenLogprobs>]) {
        let request = &self.requests[prompt];
        let text = self.completion.prompt_text(request);
        for choice in 0..request.num_choices {
            let (logprobs, offset) = self.completion.prompt_logprobs(request, known);
            self.offsets[prompt][choice as usize] = offset;
            let choice = TextChoice {
                index: self.index(prompt, choice),
                text: text.clone(),
                logprobs,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
                prompt_token_ids: self.completion.returns_ids.then(|| request.ids.clone()),
            };
            self.ready.push_back(self.completion.chunk(vec![choice], None));
        }
    }

    /// Ends the answers to a prompt that have no tokens.
    fn end_all(&mut self, prompt: usize) {
        for choice in 0..self.requests[prompt].num_choices {
            self.send(prompt, ServedPiece { index: choice, ..ServedPiece::default() }, Some("length"));
            self.left -= 1;
        }
    }

    fn send(&mut self, prompt: usize, piece: ServedPiece, finish_reason: Option<&'static str>) {
        let ServedPiece { index, text, ids, logprobs, finish, .. } = piece;
        let asks = self.requests[prompt].logprobs.is_some();
        let offset = &mut self.offsets[prompt][index as usize];
        let logprobs = asks.then(|| {
            let mut of_piece = TextLogprobs::default();
            self.completion.tokens().append(&mut of_piece, &ids, logprobs.iter().map(Some), offset);
            of_piece
        });
        let choice = TextChoice {
            index: self.index(prompt, index),
            text,
            logprobs,
            finish_reason,
            stop_reason: stop_reason(finish.as_ref()),
            token_ids: self.completion.returns_ids.then_some(ids),
            prompt_token_ids: None,
        };
        self.ready.push_back(self.completion.chunk(vec![choice], None));
    }

    fn end_stream(&mut self) {
        if self.left > 0 || self.pieces.is_none() {
            return;
        }
        if self.completion.with_usage {
            let prompt_tokens = self.requests.iter().map(|request| request.ids.len() as u64).sum();
            let total_tokens = prompt_tokens + self.tokens;
            let usage = Usage { prompt_tokens, completion_tokens: self.tokens, total_tokens };
            self.ready.push_back(self.completion.chunk(Vec::new(), Some(usage)));
        }
        self.ready.push_back(Event::default().data("[DONE]"));
        self.pieces = None;
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let (prompt, piece) = self.pieces.as_mut()?.next().await?;
            match piece {
                Ok(piece) => {
                    self.tokens += piece.ids.len() as u64;
                    if let Some(known) = &piece.prompt {
                        self.send_prompt(prompt, known);
                        if self.requests[prompt].max_tokens == 0 {
                            self.end_all(prompt);
                        }
                    } else if piece.finish.is_some() {
                        let reason = finish_reason(piece.finish.as_ref());
                        self.send(prompt, piece, Some(reason));
                        self.left -= 1;
                    } else {
                        self.send(prompt, piece, None);
                    }
                    self.end_stream();
                }
                Err(error) => {
                    let problem = answer::problem(error);
                    tracing::warn!(cause = problem.cause(), "a streamed answer failed");
                    self.pieces = None;
                    self.ready.clear();
                    return Some(Event::default().data(json!(in_stream(problem.detail())).to_string()));
                }
            }
        }
    }
}
