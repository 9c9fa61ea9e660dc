//! What other people's endpoints need to be asked, besides their address and limits.
//!
//! A `template` is Jinja: its variables are `prompt`, `completion`, `question` (the last user message, or the prompt),
//! `messages` (the chat with the completion as its last message), `columns`, `finish_reason` and `num_tokens`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::ServicePlan;

/// OpenRLHF's `{query, prompts, labels}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OpenrlhfPlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Text of a `query`; default: the prompt and the completion as the policy saw them.
    pub template: Option<String>,
    /// The dataset column that goes along as `labels`.
    pub label_column: Option<String>,
}

/// slime's `{prompt, response, label}`, one sample a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlimePlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The dataset column that goes along as `label`.
    pub label_column: Option<String>,
    /// Where the reward stands when the answer is an object; without it the answer is a number.
    pub reward_key: Option<String>,
}

/// A server that gives one score a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TextPlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The model's name, as the server knows it.
    pub model: Option<String>,
    /// The text; default: the prompt and the completion as the policy saw them.
    pub template: Option<String>,
    /// Further fields of the body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A server that gives one score a label.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LabelPlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The model's name, as the server knows it.
    pub model: Option<String>,
    /// The text; default: the prompt and the completion as the policy saw them.
    pub template: Option<String>,
    /// Whose score is the reward, by name or by number from 0; may be left out where the model has one label.
    pub label: Option<String>,
    /// Further fields of the body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A server that says how well a text answers a query.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PairPlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The model's name, as the server knows it.
    pub model: Option<String>,
    /// Template of the query; default: the last user message, or the prompt.
    pub query: Option<String>,
    /// Template of the text; default: the completion.
    pub text: Option<String>,
    /// Further fields of the body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// vLLM's `/pooling`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VllmPoolingPlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The model's name, as the server knows it.
    pub model: Option<String>,
    /// The text; default: the prompt and the completion as the policy saw them.
    pub template: Option<String>,
    /// `classify`, or `token_classify` for models that score each token: the last number is the reward.
    pub task: String,
    /// Further fields of the body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A language model that marks by a rubric, one sample a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OpenaiJudgePlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The model's name, as the server knows it.
    pub model: String,
    /// What to mark and how: a template. The completion follows it in a block of its own.
    pub rubric: String,
    /// The lowest mark.
    pub min_score: f64,
    /// The highest mark; the reward is (mark − min_score) / (max_score − min_score).
    pub max_score: f64,
    /// Answers asked for (`n`); the reward is the mean of the marks that can be read.
    pub votes: u32,
    /// 0 = greedy.
    pub temperature: f64,
    /// Longest answer, tokens.
    pub max_completion_tokens: u32,
    /// Further fields of the body.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// Any JSON over HTTP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HttpTemplatePlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// The body: its strings are templates; one that is a single `{{ expression }}` becomes the expression's value.
    #[schema(value_type = Object)]
    pub body: Value,
    /// JSON pointer to the reward; with `batch` it has one `*` in the place of the sample's number.
    pub pointer: String,
    /// Many samples a request: the templates then see a list `samples` of what they otherwise see of one.
    pub batch: bool,
}
