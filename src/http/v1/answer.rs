//! Answers of a serving process: started, put together, and their errors.

use super::Facts;
use super::names::Chosen;
use crate::event::FinishReason;
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::error::{Code, Problem};
use crate::modelcard::text::TextError;
use crate::serving::{ServedFinish, ServedPiece, ServedRequest, ServingError, TokenLogprobs};
use crate::supervisor::serving::{Answers, Asker, Serving, StartError};

/// `Retry-After` of a request for which there is no room, in seconds.
const RETRY_S: u64 = 1;

/// An answer put together from its pieces.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Whole {
    pub text: String,
    pub ids: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    pub finish: Option<ServedFinish>,
}

impl Whole {
    /// The text as samples of jobs have it: that of all tokens, also what follows a stop string within the last one.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot decode the tokens.
    pub fn sample_text(&self, facts: &Facts) -> Result<String, TextError> {
        facts.text.decode(&self.ids, true)
    }

    /// Why the answer ended, as samples of jobs say it.
    pub fn finish_reason(&self) -> FinishReason {
        match self.finish {
            Some(ServedFinish::Eos(_) | ServedFinish::Stop(_)) => FinishReason::Stop,
            Some(ServedFinish::Length) | None => FinishReason::Length,
        }
    }
}

/// All answers to a prompt.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Collected {
    /// The log-probs of the prompt, if they were requested.
    pub prompt: Vec<Option<TokenLogprobs>>,
    /// The answers in order.
    pub answers: Vec<Whole>,
}

/// Starts a request.
///
/// # Errors
/// Fails if this server serves no models, or has no room.
pub(in super::super) fn start(
    state: &AppState,
    caller: &Caller,
    chosen: &Chosen,
    request: ServedRequest,
) -> Result<Answers, Problem> {
    let asker = Asker::Owner(caller.owner());
    serving(state)?.start(asker, chosen.served.clone(), request).map_err(|error| match error {
        StartError::Full(detail) => Problem::new(Code::TooManyRequests, detail).retry_after(RETRY_S),
        StartError::Stopping => stopping(),
        StartError::Failed(cause) => {
            let detail = "the process that serves models could not be started; see the server's log";
            Problem::new(Code::GenerationFailed, detail).retry_after(5).because(cause)
        }
    })
}

fn stopping() -> Problem {
    Problem::new(Code::NotReady, "the server is shutting down; try again after the restart").retry_after(5)
}

fn serving(state: &AppState) -> Result<&Serving, Problem> {
    let detail = "this server serves no models (--serve-devices none): download the adapter instead";
    let serving = state.serving.as_ref().filter(|serving| serving.is_on());
    serving.ok_or_else(|| Problem::new(Code::NotImplemented, detail))
}

/// The problem for an error of a serving process.
pub(in super::super) fn problem(error: ServingError) -> Problem {
    match error {
        ServingError::Refused(item) => {
            let detail = item.detail.clone();
            Problem::new(Code::InvalidBody, detail).items(vec![item])
        }
        ServingError::Unusable(why) => {
            Problem::new(Code::InvalidModel, format!("the model or the checkpoint cannot be used: {why}"))
        }
        ServingError::OutOfMemory(why) => Problem::new(Code::InvalidModel, why),
        ServingError::Failed(cause) => {
            let detail = "the process that generates ended or failed; try again, and see the server's log";
            Problem::new(Code::GenerationFailed, detail).retry_after(5).because(cause)
        }
        ServingError::Killed(cause) => {
            let detail = "the process that generates was killed, most likely because it ran out of memory; ask for fewer or shorter answers, or try again when no job runs";
            Problem::new(Code::GenerationFailed, detail).retry_after(5).because(cause)
        }
        ServingError::Stopping => stopping(),
    }
}

/// The error of a process that ended without an answer.
pub(in super::super) fn ended() -> ServingError {
    ServingError::Failed("the serving process ended without an answer".to_owned())
}

/// Waits for all answers to a prompt.
///
/// # Errors
/// Fails if the process cannot answer.
pub(in super::super) async fn collect(
    mut answers: Answers,
    request: &ServedRequest,
) -> Result<Collected, ServingError> {
    let mut collected = Collected { prompt: Vec::new(), answers: vec![Whole::default(); request.num_choices as usize] };
    let mut left = if request.max_tokens == 0 { 0 } else { request.num_choices };
    let mut waits_for_prompt = request.echo;
    while left > 0 || waits_for_prompt {
        let piece = answers.next().await.ok_or_else(ended)??;
        let ServedPiece { index, prompt, text, ids, logprobs, finish, .. } = piece;
        if let Some(prompt) = prompt {
            collected.prompt = prompt;
            waits_for_prompt = false;
            continue;
        }
        let Some(whole) = collected.answers.get_mut(index as usize) else { continue };
        whole.text.push_str(&text);
        whole.ids.extend(ids);
        whole.logprobs.extend(logprobs);
        if finish.is_some() {
            whole.finish = finish;
            left -= 1;
        }
    }
    Ok(collected)
}

/// OpenAI's reason for the end of an answer.
pub(super) fn finish_reason(finish: Option<&ServedFinish>) -> &'static str {
    match finish {
        Some(ServedFinish::Eos(_) | ServedFinish::Stop(_)) => "stop",
        Some(ServedFinish::Length) | None => "length",
    }
}

/// The stop string that ended an answer.
pub(super) fn stop_reason(finish: Option<&ServedFinish>) -> Option<String> {
    match finish {
        Some(ServedFinish::Stop(stop)) => Some(stop.clone()),
        Some(ServedFinish::Eos(_) | ServedFinish::Length) | None => None,
    }
}

/// The version of the server, for `system_fingerprint`.
pub(super) fn fingerprint() -> String {
    format!("rlood-{}", env!("CARGO_PKG_VERSION"))
}

/// A new id with OpenAI's prefix.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}-{}", ulid::Ulid::generate().to_string().to_lowercase())
}
