//! The environment's section of a plan.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{Plan, ServicePlan};

/// The environment that a job's episodes are played with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EnvironmentPlan {
    /// Name of the environment, which its requests carry.
    pub name: String,
    /// The protocol of the server.
    #[serde(rename = "type")]
    pub kind: EnvironmentKind,
    /// Settings that every request carries.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub params: Map<String, Value>,
    /// Maximum number of turns of the model.
    pub max_turns: u32,
    /// Maximum number of tokens of an episode after its first prompt, of the model and of the environment.
    pub max_episode_tokens: u32,
    /// Maximum number of tokens of one observation. Longer ones are cut.
    pub max_observation_tokens: u32,
    /// How the rewards of the turns make the reward of the episode.
    #[serde(rename = "return")]
    pub total: EpisodeReturn,
    /// The form in which the model writes tool calls; `auto` = the one that its chat template shows.
    pub tool_parser: String,
    /// What follows a turn whose calls are not valid.
    pub on_parse_error: OnParseError,
    /// Number of such turns in a row after which the episode ends.
    pub max_parse_errors: u32,
    /// Number of times that an episode is begun again when the server has forgotten it.
    pub max_restarts: u32,
    /// Address and limits of the server.
    #[serde(flatten)]
    pub service: ServicePlan,
}

/// The protocol of an environment's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EnvironmentKind {
    /// rlood's own contract over HTTP, version 1.
    Http,
}

/// How the rewards of the turns make the reward of the episode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EpisodeReturn {
    /// The sum of all rewards.
    #[default]
    Sum,
    /// The last reward of the episode.
    Last,
}

/// The consequence of a turn whose calls are not valid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnParseError {
    /// The model reads what is wrong and may try again.
    #[default]
    Reply,
    /// The episode ends with that turn.
    End,
}

impl Plan {
    /// Returns the maximum number of tokens after a prompt: of a completion, or of an episode.
    pub fn max_tokens_after_prompt(&self) -> u32 {
        self.environment
            .as_ref()
            .map_or(self.sampling.max_completion_length, |environment| environment.max_episode_tokens)
    }
}
