//! The rewards of a plan, with their settings and weights.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ComputeDtype;

mod adapters;
mod builtins;

pub use adapters::*;
pub use builtins::*;

/// One reward of a plan: its type and settings, and its weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardPlan {
    /// Name of the reward, unique in the job. It is part of metric names: `rewards/{name}/…`.
    pub name: String,
    /// Weight in the sum of rewards; 0 = logged as a metric only.
    pub weight: f64,
    /// Whether a sample without this reward is unscorable. If false, a missing value counts as not applicable.
    /// Always false at weight 0.
    pub required: bool,
    /// Maximum absolute value. A value further from 0 is invalid. Absent in jobs created before this setting
    /// existed, which have no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_abs_reward: Option<f64>,
    /// Meaning of a row with a blank reference. Absent for rewards without a reference, and in jobs created before this
    /// setting existed, which compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_reference: Option<BlankReference>,
    /// Names of the dataset sources whose rows this reward judges; absent = all. The reward is not applicable to other rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applies_to: Option<Vec<String>>,
    /// The reward's type and its settings.
    #[serde(flatten)]
    pub kind: RewardKind,
}

impl RewardPlan {
    /// Whether the reward judges the rows of this source.
    pub fn judges(&self, source: &str) -> bool {
        self.applies_to.as_ref().is_none_or(|sources| sources.iter().any(|known| known == source))
    }
}

/// Default value of the setting `max_abs_reward`.
pub const MAX_ABS_REWARD: f64 = 1e6;

/// Meaning of a row to a built-in reward if its reference is blank: null, missing, empty or only whitespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BlankReference {
    /// The reward does not apply to the row.
    NotApplicable,
    /// A blank text is compared like any other (every completion contains the empty text), null is not applicable, and a row
    /// without the column is an error.
    Compare,
}

/// All types of rewards. Secrets and header values are stored separately ([`RewardSecrets`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RewardKind {
    /// A reward service over HTTP that implements rlood's own request format (reward contract v1).
    Webhook(WebhookPlan),
    /// OpenRLHF's remote reward model (`/get_reward`).
    Openrlhf(OpenrlhfPlan),
    /// Remote reward model as in slime and miles.
    Slime(SlimePlan),
    /// The reward API of LLaMA-Factory.
    Llamafactory(TextPlan),
    /// The `/predict` endpoint of text-embeddings-inference.
    TeiPredict(LabelPlan),
    /// The `/rerank` endpoint of text-embeddings-inference.
    TeiRerank(PairPlan),
    /// The `/classify` endpoint of vLLM.
    VllmClassify(LabelPlan),
    /// The `/score` endpoint of vLLM.
    VllmScore(PairPlan),
    /// The `/pooling` endpoint of vLLM.
    VllmPooling(VllmPoolingPlan),
    /// SGLang's native `/classify` endpoint.
    SglangClassify(LabelPlan),
    /// Text classification as served by Hugging Face's inference endpoints.
    HfTextClassification(LabelPlan),
    /// A language model behind chat/completions that scores by a rubric.
    OpenaiJudge(OpenaiJudgePlan),
    /// Any JSON API over HTTP: a request body with templates, and a pointer to the reward in the response.
    HttpTemplate(HttpTemplatePlan),
    /// Length in words or tokens within limits, with a bonus for ending a sentence.
    Length(LengthPlan),
    /// 1 if the trimmed completion equals the trimmed column, otherwise 0.
    ExactMatch(MatchPlan),
    /// 1 if the completion contains the given text or the column's text, otherwise 0.
    Contains(ContainsPlan),
    /// 1 if the last number of the completion equals the column's number, otherwise 0.
    NumberMatch(NumberMatchPlan),
    /// 1 if the pattern is found in the completion, otherwise 0.
    Regex(RegexPlan),
    /// The raw logit of a registered sequence-classification model that runs on the worker's device.
    RewardModel(RewardModelPlan),
    /// A Python function that runs on the worker's machine, with the signature of TRL's reward functions.
    Python(PythonPlan),
    /// OpenAI's `string_check` grader: 1 if two rendered texts are equal (or one contains the other), otherwise 0.
    StringCheck(StringCheckPlan),
    /// OpenAI's `text_similarity` grader: how similar two rendered texts are, 0 to 1.
    TextSimilarity(TextSimilarityPlan),
    /// 1 if the final answer is mathematically equal to the column's, otherwise 0.
    MathEqual(MathEqualPlan),
    /// 1 if the completion is JSON that conforms to a schema, otherwise 0.
    JsonSchema(JsonSchemaPlan),
    /// Penalty for repeated n-grams: 0 without repetition, down to `max_penalty` (negative).
    Repetition(RepetitionPlan),
    /// DAPO's soft overlong punishment: 0, then linearly down to −1 at `max_tokens`.
    SoftOverlong(SoftOverlongPlan),
    /// 1 if the completion consists of the given tags, otherwise 0 (or the share of tags that are correct).
    Format(FormatPlan),
    /// OpenAI's `multi` grader: a formula over other built-in rewards.
    Multi(MultiPlan),
    /// The reward of the episode, which the job's environment gave.
    Environment,
}

/// The service settings of a reward type, as `&` or `&mut`.
macro_rules! service_of {
    ($kind:expr, $($reference:tt)+) => {
        match $kind {
            RewardKind::Webhook(plan) => Some($($reference)+ plan.service),
            RewardKind::Openrlhf(plan) => Some($($reference)+ plan.service),
            RewardKind::Slime(plan) => Some($($reference)+ plan.service),
            RewardKind::Llamafactory(plan) => Some($($reference)+ plan.service),
            RewardKind::TeiPredict(plan)
            | RewardKind::VllmClassify(plan)
            | RewardKind::SglangClassify(plan)
            | RewardKind::HfTextClassification(plan) => Some($($reference)+ plan.service),
            RewardKind::TeiRerank(plan) | RewardKind::VllmScore(plan) => Some($($reference)+ plan.service),
            RewardKind::VllmPooling(plan) => Some($($reference)+ plan.service),
            RewardKind::OpenaiJudge(plan) => Some($($reference)+ plan.service),
            RewardKind::HttpTemplate(plan) => Some($($reference)+ plan.service),
            RewardKind::Python(plan) => Some($($reference)+ plan.service),
            RewardKind::Length(_)
            | RewardKind::ExactMatch(_)
            | RewardKind::Contains(_)
            | RewardKind::NumberMatch(_)
            | RewardKind::Regex(_)
            | RewardKind::StringCheck(_)
            | RewardKind::TextSimilarity(_)
            | RewardKind::MathEqual(_)
            | RewardKind::JsonSchema(_)
            | RewardKind::Repetition(_)
            | RewardKind::SoftOverlong(_)
            | RewardKind::Format(_)
            | RewardKind::Multi(_)
            | RewardKind::Environment
            | RewardKind::RewardModel(_) => None,
        }
    };
}

impl RewardKind {
    /// Returns the service that this reward calls; `None` for built-in rewards. The service of a Python function has no address
    /// before the worker starts it.
    pub fn service(&self) -> Option<&ServicePlan> {
        service_of!(self, &)
    }

    /// Whether this is a built-in reward that compares with a reference text, which a row may lack.
    pub fn has_reference(&self) -> bool {
        match self {
            RewardKind::StringCheck(_) | RewardKind::TextSimilarity(_) => true,
            RewardKind::Multi(plan) => plan.graders.values().any(RewardKind::has_reference),
            other => other.service().is_none() && !other.columns().is_empty(),
        }
    }

    /// Returns the same reward type with changed service settings.
    #[must_use]
    pub fn with_service(&self, change: impl FnOnce(&mut ServicePlan)) -> Self {
        let mut kind = self.clone();
        if let Some(service) = service_of!(&mut kind, &mut) {
            change(service);
        }
        kind
    }

    /// Returns the dataset columns that the reward requires, each with the name of the setting that names the column.
    pub fn columns(&self) -> Vec<(String, &str)> {
        let (field, column) = match self {
            RewardKind::ExactMatch(plan) => ("column", Some(&plan.column)),
            RewardKind::NumberMatch(plan) => ("column", Some(&plan.column)),
            RewardKind::MathEqual(plan) => ("column", Some(&plan.column)),
            RewardKind::Contains(plan) => ("column", plan.column.as_ref()),
            RewardKind::JsonSchema(plan) => ("column", plan.column.as_ref()),
            RewardKind::Openrlhf(plan) => ("label_column", plan.label_column.as_ref()),
            RewardKind::Slime(plan) => ("label_column", plan.label_column.as_ref()),
            RewardKind::Multi(plan) => {
                let mut columns = Vec::new();
                for (name, kind) in &plan.graders {
                    let inside = |(field, column)| (format!("graders/{name}/{field}"), column);
                    columns.extend(kind.columns().into_iter().map(inside));
                }
                return columns;
            }
            RewardKind::Webhook(_)
            | RewardKind::Llamafactory(_)
            | RewardKind::TeiPredict(_)
            | RewardKind::TeiRerank(_)
            | RewardKind::VllmClassify(_)
            | RewardKind::VllmScore(_)
            | RewardKind::VllmPooling(_)
            | RewardKind::SglangClassify(_)
            | RewardKind::HfTextClassification(_)
            | RewardKind::OpenaiJudge(_)
            | RewardKind::HttpTemplate(_)
            | RewardKind::Length(_)
            | RewardKind::Regex(_)
            | RewardKind::StringCheck(_)
            | RewardKind::TextSimilarity(_)
            | RewardKind::Repetition(_)
            | RewardKind::SoftOverlong(_)
            | RewardKind::Format(_)
            | RewardKind::RewardModel(_)
            | RewardKind::Environment
            | RewardKind::Python(_) => return Vec::new(),
        };
        column.map(|column| (field.to_owned(), column.as_str())).into_iter().collect()
    }

    /// Returns the lowest and highest possible value; `None` if the type does not limit it, as for most services.
    pub fn bounds(&self) -> Option<(f64, f64)> {
        match self {
            RewardKind::Webhook(_)
            | RewardKind::Openrlhf(_)
            | RewardKind::Slime(_)
            | RewardKind::Llamafactory(_)
            | RewardKind::TeiPredict(_)
            | RewardKind::TeiRerank(_)
            | RewardKind::VllmClassify(_)
            | RewardKind::VllmScore(_)
            | RewardKind::VllmPooling(_)
            | RewardKind::SglangClassify(_)
            | RewardKind::HfTextClassification(_)
            | RewardKind::HttpTemplate(_)
            | RewardKind::Multi(_)
            | RewardKind::RewardModel(_)
            | RewardKind::Environment
            | RewardKind::Python(_) => None,
            RewardKind::Length(plan) => Some(plan.bounds()),
            RewardKind::Repetition(plan) => Some((plan.max_penalty.min(0.0), 0.0)),
            RewardKind::SoftOverlong(_) => Some((-1.0, 0.0)),
            RewardKind::OpenaiJudge(_)
            | RewardKind::ExactMatch(_)
            | RewardKind::Contains(_)
            | RewardKind::NumberMatch(_)
            | RewardKind::Regex(_)
            | RewardKind::StringCheck(_)
            | RewardKind::TextSimilarity(_)
            | RewardKind::MathEqual(_)
            | RewardKind::JsonSchema(_)
            | RewardKind::Format(_) => Some((0.0, 1.0)),
        }
    }
}

/// A reward service that implements rlood's own request format (reward contract v1).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookPlan {
    /// Address and limits of the service.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Parameters that are sent to the service unchanged.
    #[serde(default)]
    pub params: serde_json::Map<String, serde_json::Value>,
    /// Whether samples include the token ids of their completion (`completion_ids`), as functions with TRL's signature may need.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub completion_ids: bool,
}

/// A Python function that the worker runs in a separate process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PythonPlan {
    /// Path of the Python file: absolute, or relative to a folder given with --python-rewards. In a plan it is always absolute.
    pub file: String,
    /// Name of the function in the file: `accuracy`, or `Judge.score`.
    pub function: String,
    /// SHA-256 of the file when the job was accepted. The worker refuses a file with another hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Number of processes that run the file's functions.
    pub processes: u32,
    /// Concurrency, batch sizes and time limits of the calls.
    #[serde(flatten)]
    pub service: ServicePlan,
}

/// Address and limits of a service, the same for every reward over HTTP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ServicePlan {
    /// Address of the service, http or https; absent for a Python function.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(required = true)]
    pub url: String,
    /// Maximum number of concurrent requests.
    pub max_concurrency: u32,
    /// Maximum number of samples per request. A larger group is split.
    pub max_batch_samples: u32,
    /// Maximum size of a request body, in bytes.
    pub max_batch_bytes: u64,
    /// Time limit of one try, in milliseconds.
    pub timeout_ms: u64,
    /// Time limit of a request including all its tries, in milliseconds. Requests of reward contract v1 carry it in their body.
    pub deadline_ms: u64,
    /// Maximum number of tries in a row for transport errors and the statuses 408, 425, 429 and 5xx.
    pub max_tries: u32,
    /// Maximum number of tries when the response is not valid.
    pub max_invalid_tries: u32,
    /// Treatment of samples whose response is invalid.
    pub on_invalid: OnInvalid,
    /// How long the service may be unavailable before the job pauses, in seconds.
    pub max_outage_s: u64,
    /// Whether values are cached: the same prompt, completion and columns are sent to the service only once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cache: bool,
    /// Minimum number of values per group. A group of a training rollout with fewer values is left out.
    /// Leave-one-out needs at least 2.
    #[serde(default = "min_valid_per_group")]
    pub min_valid_per_group: u32,
    /// The job pauses when at least this fraction of the samples of the last 5 rollouts has no value.
    #[serde(default = "max_invalid_fraction")]
    pub max_invalid_fraction: f64,
}

/// Returns the default of `min_valid_per_group`.
fn min_valid_per_group() -> u32 {
    2
}

/// Returns the default of `max_invalid_fraction`.
fn max_invalid_fraction() -> f64 {
    0.5
}

/// Treatment of samples whose response is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnInvalid {
    /// A sample with an invalid response has no value.
    Mask,
    /// A sample with an invalid response has the value 0. The client must choose this explicitly.
    Zero,
    /// An invalid response fails the job.
    Fail,
}

/// A registered sequence-classification model that the worker runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardModelPlan {
    /// Id of the registered model (`POST /models`).
    pub model: String,
    /// Name or number of the model's score that is the reward; null if the model has only one.
    pub label: Option<String>,
    /// How prompt and completion become the reward model's input text.
    pub format: RewardTextFormat,
    /// Maximum length of the input, in tokens; null = as much as the model accepts. Longer texts lose their beginning, and the
    /// metric `truncated` is set.
    pub max_length: Option<u32>,
    /// Precision of a decoder model's matrix products; encoders compute in f32.
    pub dtype: ComputeDtype,
}

/// How prompt and completion become a reward model's input text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardTextFormat {
    /// `chat` if the prompt is a list of messages and the reward model has a chat template; otherwise `pair` for encoders
    /// and `text` for decoders.
    Auto,
    /// The conversation, rendered with the reward model's own chat template. A string prompt becomes one user message.
    Chat,
    /// Prompt and completion as one text, without special tokens (for encoders, with the tokenizer's special tokens).
    Text,
    /// Prompt and completion as a pair of texts, with the tokenizer's special tokens.
    Pair,
}

/// Secrets of a reward. They are stored separately from the plan and sent only to the worker that holds the claim.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardSecrets {
    /// Signing secret, `whsec_…`; null = requests are not signed.
    pub secret: Option<String>,
    /// Previous signing secret, while the service still accepts it; requests are signed with both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_secret: Option<String>,
    /// Headers that are sent with every request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

impl RewardSecrets {
    /// Returns the secrets after a user's change. A new secret replaces both secrets; new headers replace all headers.
    #[must_use]
    pub fn changed(self, change: RewardSecrets) -> RewardSecrets {
        let (secret, previous_secret) = match change.secret {
            Some(secret) => (Some(secret), change.previous_secret),
            None => (self.secret, self.previous_secret),
        };
        let headers = if change.headers.is_empty() { self.headers } else { change.headers };
        RewardSecrets { secret, previous_secret, headers }
    }
}

impl std::fmt::Debug for RewardSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RewardSecrets(redacted)")
    }
}
