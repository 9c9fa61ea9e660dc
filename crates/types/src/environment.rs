//! Environments: what the engine asks of an environment's server, its answers, and the record of an episode.
//!
//! An episode is one conversation with the environment. A request to the server is made for each beginning and for each turn of an
//! episode (contract version 1, `env.reset.request` and `env.step.request`); the server answers a repeated request as it did before.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::finish_reason::FinishReason;

/// An episode within a rollout. It is the same in every attempt at the job, so that answers are found again in the journal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EpisodeId {
    /// Dataset row of the first prompt, from 0.
    pub row: u64,
    /// Index of the episode in its group, from 0.
    pub index: u32,
    /// Number of times that the episode was begun again because its environment had forgotten it.
    pub attempt: u32,
}

/// The limits that an environment is told at the beginning of an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EpisodeLimits {
    /// Maximum number of turns of the model.
    pub max_turns: u32,
    /// Maximum number of tokens of the episode after its first prompt, of the model and of the environment.
    pub max_tokens: u32,
}

/// The beginning of an episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reset {
    /// Seed of the environment's randomness: a function of the job's seed, the row and the rollout. All episodes of a group have
    /// the same one.
    pub seed: u64,
    /// The row's prompt as chat messages.
    pub messages: Vec<Value>,
    /// The row's columns other than the prompt.
    pub columns: Map<String, Value>,
    /// The limits of the episode.
    pub limits: EpisodeLimits,
}

/// A turn of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Number of the turn, from 0.
    pub turn: u32,
    /// What the server's answer to the beginning or to the turn before called the session, if it did.
    pub session: Option<String>,
    /// The turn as a message `{role: "assistant", content, reasoning_content?, tool_calls?}`.
    pub message: Value,
    /// The turn as it was sampled, without the token that ended it.
    pub text: String,
    /// Why the turn ended.
    pub finish_reason: FinishReason,
    /// Number of tokens of the turn.
    pub num_tokens: u32,
    /// Number of turns that the episode may still have.
    pub turns_left: u32,
    /// Number of tokens that the episode may still have.
    pub tokens_left: u32,
    /// Whether the model will not have another turn, whatever the answer: the reward is due now.
    #[serde(rename = "final")]
    pub is_final: bool,
}

/// The reason why an episode ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EpisodeStop {
    /// The environment ended it.
    EnvDone,
    /// The turn called no tool, and the environment had nothing to say.
    NoCall,
    /// The limit of turns.
    MaxTurns,
    /// The limit of tokens: no room was left for another turn.
    MaxTokens,
    /// A turn reached its maximum length.
    Length,
    /// Too many turns in a row had calls that are not valid.
    ParseError,
    /// The environment's server failed, or it forgot the episode too often. The episode has no reward.
    Failed,
}

impl EpisodeStop {
    /// All reasons, in the order of the metrics.
    pub const ALL: [EpisodeStop; 7] = [
        EpisodeStop::EnvDone,
        EpisodeStop::NoCall,
        EpisodeStop::MaxTurns,
        EpisodeStop::MaxTokens,
        EpisodeStop::Length,
        EpisodeStop::ParseError,
        EpisodeStop::Failed,
    ];

    /// Whether the episode ended before it was finished.
    pub fn is_limit(self) -> bool {
        matches!(self, EpisodeStop::MaxTurns | EpisodeStop::MaxTokens | EpisodeStop::Length)
    }

    /// The name in metrics and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            EpisodeStop::EnvDone => "env_done",
            EpisodeStop::NoCall => "no_call",
            EpisodeStop::MaxTurns => "max_turns",
            EpisodeStop::MaxTokens => "max_tokens",
            EpisodeStop::Length => "length",
            EpisodeStop::ParseError => "parse_error",
            EpisodeStop::Failed => "failed",
        }
    }
}

/// A question to an environment.
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    /// The beginning of an episode.
    Reset(Box<Reset>),
    /// Answer a turn of the model.
    Step(Box<Step>),
    /// The episode is over. The answer changes nothing.
    Close(EpisodeStop),
}

/// A question about one episode.
#[derive(Debug, Clone, PartialEq)]
pub struct EpisodeCall {
    /// The episode that the question is about.
    pub episode: EpisodeId,
    /// The question to the environment.
    pub ask: Ask,
}

/// An environment's answer to the beginning of an episode.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResetAnswer {
    /// Name of the session, which every later request of the episode repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Messages of role `system` or `user` that follow those of the row.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Value>,
    /// The tools that the model may call, as OpenAI function schemas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub tools: Vec<Value>,
}

/// An environment's answer to a turn.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StepAnswer {
    /// One message of role `tool` for each call, in the order of the calls, then messages of role `user`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Value>,
    /// The reward of the turn; null = none.
    #[serde(default)]
    pub reward: Option<f64>,
    /// Whether the episode is over.
    #[serde(default)]
    pub done: bool,
    /// Numbers of the environment's own, by name. Their means over the turns become metrics of the job.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// A new name of the session, if it changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Milliseconds until the answer was there, with all tries; `None` if it was found in the journal.
    #[serde(skip)]
    pub latency_ms: Option<u32>,
}

impl StepAnswer {
    /// Maximum number of numbers of the environment's own in an answer.
    pub const MAX_METRICS: usize = 32;

    /// Checks the names of the environment's own numbers, which become names of metrics.
    ///
    /// # Errors
    /// Returns which name cannot be used, and why.
    pub fn check_metrics(&self) -> Result<(), String> {
        if self.metrics.len() > Self::MAX_METRICS {
            return Err(format!("metrics may have at most {} numbers, not {}", Self::MAX_METRICS, self.metrics.len()));
        }
        let is_usable = |name: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
            (1..=64).contains(&name.len()) && name.chars().all(allowed)
        };
        match self.metrics.iter().find(|(name, value)| !is_usable(name) || !value.is_finite()) {
            Some((name, _)) => Err(format!(
                "metrics/{name} must be a finite number, with a name of 1 to 64 letters, digits and the characters _ - . /"
            )),
            None => Ok(()),
        }
    }
}

/// An environment's answer, or what took its place.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// The episode has begun.
    Reset(ResetAnswer),
    /// The turn was answered.
    Step(StepAnswer),
    /// The episode was closed.
    Closed,
    /// The server has forgotten the episode. It may be begun again.
    Lost,
    /// There is no valid answer, and there will be none: the episode has no reward.
    Failed {
        /// Stable code of the reason.
        code: String,
        /// The reason, in words.
        message: String,
    },
}

/// The record of an episode, kept with its tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Episode {
    /// The turns of the model with what followed each.
    pub turns: Vec<EpisodeTurn>,
    /// The episode's reward: the sum of the turns' rewards or the last one; null = no turn had one, so it is missing.
    #[serde(rename = "return")]
    pub total: Option<f64>,
    /// Why the episode ended.
    pub stop: EpisodeStop,
    /// Number of times that the episode was begun again.
    #[serde(default)]
    pub restarts: u32,
    /// Number of texts of special tokens in observations that were encoded as ordinary text.
    #[serde(default)]
    pub special_tokens_escaped: u32,
    /// Messages of the environment before the first turn, after those of the row.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub opening: Vec<Value>,
    /// Number of tools that the episode offers to the model.
    #[serde(default)]
    pub num_tools: u32,
}

/// A turn of the model in an episode, and what followed it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EpisodeTurn {
    /// The turn as it was sampled, without the token that ended it.
    pub text: String,
    /// Number of tokens of the turn.
    pub num_tokens: u32,
    /// The calls of the turn, as in OpenAI's API.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub tool_calls: Vec<Value>,
    /// Kind of the error in the turn's calls (`malformed`, `unknown_tool`, `invalid_arguments`, `too_many_calls`), if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parse_error: Option<String>,
    /// The messages that the model read next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub observations: Vec<Value>,
    /// Number of tokens of these messages, with the opening of the next turn.
    #[serde(default)]
    pub observation_tokens: u32,
    /// Number of these messages that were cut at the limit.
    #[serde(default)]
    pub observations_cut: u32,
    /// The reward of the turn; null = none.
    #[serde(default)]
    pub reward: Option<f64>,
    /// Numbers of the environment's own, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Milliseconds that the environment took for its answer; `None` if the answer was found in the journal. It is not stored with
    /// the rollout, because it differs between runs that are equal otherwise.
    #[serde(skip)]
    pub latency_ms: Option<u32>,
}

/// An episode in a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SampleEpisode {
    /// Messages of the environment before the first turn, after those of the row.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub opening: Vec<Value>,
    /// The turns of the model with what followed each.
    pub turns: Vec<SampleTurn>,
    /// The episode's reward; null = none.
    #[serde(rename = "return")]
    pub total: Option<f64>,
    /// Why the episode ended.
    pub stop: EpisodeStop,
    /// Number of times that the episode was begun again.
    #[serde(default)]
    pub restarts: u32,
}

/// A turn of an episode in a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SampleTurn {
    /// The turn.
    #[serde(flatten)]
    pub turn: EpisodeTurn,
    /// Milliseconds that the environment took for its answer; null if the run found the answer in its journal.
    #[serde(default)]
    pub latency_ms: Option<u32>,
}

impl SampleEpisode {
    /// Copies an episode. Messages keep the fields that the model reads: role, content, name and `tool_call_id`.
    pub fn of(episode: &Episode) -> Self {
        let known = |message: &Value| -> Value {
            let kept = ["role", "content", "name", "tool_call_id"]
                .into_iter()
                .filter_map(|name| message.get(name).map(|value| (name.to_owned(), value.clone())));
            Value::Object(kept.collect())
        };
        let turn = |turn: &EpisodeTurn| SampleTurn {
            latency_ms: turn.latency_ms,
            turn: EpisodeTurn { observations: turn.observations.iter().map(known).collect(), ..turn.clone() },
        };
        Self {
            opening: episode.opening.iter().map(known).collect(),
            turns: episode.turns.iter().map(turn).collect(),
            total: episode.total,
            stop: episode.stop,
            restarts: episode.restarts,
        }
    }
}

impl Episode {
    /// Returns the number of turns whose calls are not valid.
    pub fn parse_errors(&self) -> usize {
        self.turns.iter().filter(|turn| turn.parse_error.is_some()).count()
    }
}
