//! The environment's section of a plan.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{Plan, ServicePlan};

/// The environment that a job's episodes are played with: a server, or the job's tools.
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
    /// Maximum number of episodes that are open at a time; absent = all episodes of a rollout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_open_episodes: Option<u32>,
    /// The tools of type `tools`; empty for the other types, whose servers give the tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ToolPlan>,
    /// Address and limits of the server. The address is empty for the type `tools`.
    #[serde(flatten)]
    pub service: ServicePlan,
}

/// The protocol of an environment's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EnvironmentKind {
    /// rlood's own contract over HTTP, version 1.
    Http,
    /// No server: the job's `tools` answer the calls of the model, and the job's rewards score the episode.
    Tools,
    /// An OpenEnv server, over its WebSocket.
    Openenv,
}

/// Tools of a job that the model may call without an environment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToolPlan {
    /// Tools of an MCP server, over streamable HTTP.
    Mcp(McpToolsPlan),
    /// One tool behind one address, in the form of OpenAI's and Azure's agent fine-tuning.
    Http(HttpToolPlan),
}

/// Tools of an MCP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct McpToolsPlan {
    /// Name of the server in messages, and of its secrets; unique in the job.
    pub name: String,
    /// Address of the server's streamable HTTP endpoint.
    pub url: String,
    /// Names of the tools that the model may call, in the order in which the model reads them.
    pub allow: Vec<String>,
}

/// A tool behind one address.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HttpToolPlan {
    /// Name of the tool, which the model calls.
    pub name: String,
    /// Address that receives the calls.
    pub server_url: String,
    /// Description of the tool, which the model reads.
    pub description: String,
    /// JSON Schema of the tool's arguments.
    #[schema(value_type = Object)]
    pub parameters: Map<String, Value>,
}

impl ToolPlan {
    /// Returns the name of the entry: that of the tool, or of the MCP server.
    pub fn name(&self) -> &str {
        match self {
            ToolPlan::Mcp(McpToolsPlan { name, .. }) | ToolPlan::Http(HttpToolPlan { name, .. }) => name,
        }
    }

    /// Returns the address that the calls go to.
    pub fn url(&self) -> &str {
        match self {
            ToolPlan::Mcp(McpToolsPlan { url, .. }) | ToolPlan::Http(HttpToolPlan { server_url: url, .. }) => url,
        }
    }

    /// Returns the name under which the headers of the entry are stored.
    pub fn secret_name(&self) -> String {
        format!("tool:{}", self.name())
    }
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
    /// Iterates over the job's tools; empty unless its episodes are played with tools alone.
    pub fn tools(&self) -> impl Iterator<Item = &ToolPlan> {
        self.environment.iter().flat_map(|environment| &environment.tools)
    }

    /// Returns the maximum number of tokens after a prompt: of a completion, or of an episode.
    pub fn max_tokens_after_prompt(&self) -> u32 {
        self.environment
            .as_ref()
            .map_or(self.sampling.max_completion_length, |environment| environment.max_episode_tokens)
    }
}
