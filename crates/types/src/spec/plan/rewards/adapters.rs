//! Settings of rewards that other systems' endpoints compute, in addition to address and limits.
//!
//! A `template` is a Jinja template with the variables `prompt`, `completion`, `question` (the last user message, or the prompt),
//! `messages` (the chat with the completion as its last message), `columns`, `finish_reason` and `num_tokens`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::ServicePlan;

/// Request format of OpenRLHF: `{query, prompts, labels}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OpenrlhfPlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Template of `query`; default: the prompt and completion as the policy saw them.
    pub template: Option<String>,
    /// Dataset column that is sent as `labels`; null = none.
    pub label_column: Option<String>,
}

/// Request format of slime: `{prompt, response, label}`, one sample per request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlimePlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Dataset column that is sent as `label`; null = none.
    pub label_column: Option<String>,
    /// Key of the reward if the response is an object; null = the response is a number.
    pub reward_key: Option<String>,
}

/// A server that returns one score per text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TextPlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Name of the model on the server.
    pub model: Option<String>,
    /// Template of the text; default: the prompt and completion as the policy saw them.
    pub template: Option<String>,
    /// Additional fields of the request body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A server that returns one score per label.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LabelPlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Name of the model on the server.
    pub model: Option<String>,
    /// Template of the text; default: the prompt and completion as the policy saw them.
    pub template: Option<String>,
    /// Label whose score is the reward, by name or by number from 0. Optional if the model has only one label.
    pub label: Option<String>,
    /// Additional fields of the request body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A server that scores how well a text answers a query.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PairPlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Name of the model on the server.
    pub model: Option<String>,
    /// Template of the query; default: the last user message, or the prompt.
    pub query: Option<String>,
    /// Template of the text; default: the completion.
    pub text: Option<String>,
    /// Additional fields of the request body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// Request format of vLLM's `/pooling` endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VllmPoolingPlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Name of the model on the server.
    pub model: Option<String>,
    /// Template of the text; default: the prompt and completion as the policy saw them.
    pub template: Option<String>,
    /// `classify`, or `token_classify` for models that score each token; the last number is the reward.
    pub task: String,
    /// Additional fields of the request body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A language model that scores by a rubric, one sample per request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OpenaiJudgePlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Name of the model on the server.
    pub model: String,
    /// Template of the rubric: what to judge, and what each score means. The completion follows in a separate block.
    pub rubric: String,
    /// Lowest score of the rubric.
    pub min_score: f64,
    /// Highest score of the rubric. The reward is (score − min_score) / (max_score − min_score).
    pub max_score: f64,
    /// Number of answers per sample (`n`). The reward is the mean of the scores that can be parsed.
    pub votes: u32,
    /// Sampling temperature of the judge; 0 = greedy.
    pub temperature: f64,
    /// Maximum length of the judge's answer, in tokens.
    pub max_completion_tokens: u32,
    /// Additional fields of the request body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A reward from any JSON API over HTTP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HttpTemplatePlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The request body. Its strings are templates; a string that is a single `{{ expression }}` becomes
    /// the value of the expression.
    #[schema(value_type = Object)]
    pub body: Value,
    /// JSON pointer to the reward in the response. With `batch`, it has one `*` in place of the sample's index.
    pub pointer: String,
    /// Whether a request has many samples. Templates then see a list `samples`, each with the variables of one sample.
    pub batch: bool,
}
