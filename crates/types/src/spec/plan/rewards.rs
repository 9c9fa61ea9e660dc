//! The rewards of a plan: what to call and how each weighs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ComputeDtype;

mod adapters;
mod builtins;

pub use adapters::*;
pub use builtins::*;

/// One reward: what to call and how it weighs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardPlan {
    /// Unique in the job; metrics are `rewards/{name}/…`.
    pub name: String,
    /// 0 = metric only.
    pub weight: f64,
    /// A missing value makes the sample unscorable (`true`), or counts as not applicable. Never true at weight 0.
    pub required: bool,
    /// A value that is further from 0 than this is invalid. Absent in jobs of before there was a limit: they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_abs_reward: Option<f64>,
    /// What a row means whose reference is blank. Absent in jobs of before there was a choice, which compare, and where there
    /// is no reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_reference: Option<BlankReference>,
    /// The sources of the dataset whose rows it judges; absent = all. To any other row it does not apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applies_to: Option<Vec<String>>,
    /// What it is.
    #[serde(flatten)]
    pub kind: RewardKind,
}

impl RewardPlan {
    /// Whether it judges the rows of a source.
    pub fn judges(&self, source: &str) -> bool {
        self.applies_to.as_ref().is_none_or(|sources| sources.iter().any(|known| known == source))
    }
}

/// The limit of values that are not given another one.
pub const MAX_ABS_REWARD: f64 = 1e6;

/// What a row means to a built-in reward if the reference that it compares with is blank: null, missing, empty or nothing
/// but whitespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BlankReference {
    /// The reward does not apply to the row.
    NotApplicable,
    /// A blank text is compared like any other (an empty text is in every completion), null does not apply, and a row
    /// without the column is an error.
    Compare,
}

/// The rewards there are. Secrets and header values travel apart ([`RewardSecrets`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RewardKind {
    /// Contract v1 over HTTP.
    Webhook(WebhookPlan),
    /// OpenRLHF's remote reward model (`/get_reward`).
    Openrlhf(OpenrlhfPlan),
    /// slime's and miles' remote reward model.
    Slime(SlimePlan),
    /// LLaMA-Factory's reward API.
    Llamafactory(TextPlan),
    /// text-embeddings-inference, `/predict`.
    TeiPredict(LabelPlan),
    /// text-embeddings-inference, `/rerank`.
    TeiRerank(PairPlan),
    /// vLLM, `/classify`.
    VllmClassify(LabelPlan),
    /// vLLM, `/score`.
    VllmScore(PairPlan),
    /// vLLM, `/pooling`.
    VllmPooling(VllmPoolingPlan),
    /// SGLang's native `/classify`.
    SglangClassify(LabelPlan),
    /// Text classification as Hugging Face's endpoints speak it.
    HfTextClassification(LabelPlan),
    /// A language model behind chat/completions that marks by a rubric.
    OpenaiJudge(OpenaiJudgePlan),
    /// Any JSON over HTTP: a body with templates, and where the reward stands in the answer.
    HttpTemplate(HttpTemplatePlan),
    /// A band of words or tokens, and sentence ends.
    Length(LengthPlan),
    /// 1 if the trimmed completion equals the trimmed column, else 0.
    ExactMatch(MatchPlan),
    /// 1 if the completion contains the column's (or the given) text, else 0.
    Contains(ContainsPlan),
    /// 1 if the last number of the completion equals the column's, else 0.
    NumberMatch(NumberMatchPlan),
    /// 1 if the pattern is found in the completion, else 0.
    Regex(RegexPlan),
    /// A registered sequence-classification model on the worker's device: its raw logit.
    RewardModel(RewardModelPlan),
    /// A Python function on the worker's machine, with TRL's signature of reward functions.
    Python(PythonPlan),
    /// OpenAI's grader: 1 if two templated texts are equal (or one is in the other), else 0.
    StringCheck(StringCheckPlan),
    /// OpenAI's grader: how alike two templated texts are, 0 to 1.
    TextSimilarity(TextSimilarityPlan),
    /// 1 if the final answer is mathematically the column's, else 0.
    MathEqual(MathEqualPlan),
    /// 1 if the completion is JSON that a schema accepts, else 0.
    JsonSchema(JsonSchemaPlan),
    /// 0 without repetition, down to `max_penalty` (negative) the more n-grams repeat.
    Repetition(RepetitionPlan),
    /// DAPO's soft overlong punishment: 0, then linearly down to −1 at `max_tokens`.
    SoftOverlong(SoftOverlongPlan),
    /// 1 if the completion is laid out in the given tags, else 0 (or the share of what is right).
    Format(FormatPlan),
    /// OpenAI's grader: a formula over other built-ins.
    Multi(MultiPlan),
}

/// The service of a kind, as `&` or `&mut`.
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
            | RewardKind::RewardModel(_) => None,
        }
    };
}

impl RewardKind {
    /// The service it asks; `None` for what is computed here. That of a Python function is started by the worker: it has no
    /// address before.
    pub fn service(&self) -> Option<&ServicePlan> {
        service_of!(self, &)
    }

    /// Whether it is computed here by comparing with a text that a row may lack.
    pub fn has_reference(&self) -> bool {
        match self {
            RewardKind::StringCheck(_) | RewardKind::TextSimilarity(_) => true,
            RewardKind::Multi(plan) => plan.graders.values().any(RewardKind::has_reference),
            other => other.service().is_none() && !other.columns().is_empty(),
        }
    }

    /// The same reward with its service's settings changed.
    #[must_use]
    pub fn with_service(&self, change: impl FnOnce(&mut ServicePlan)) -> Self {
        let mut kind = self.clone();
        if let Some(service) = service_of!(&mut kind, &mut) {
            change(service);
        }
        kind
    }

    /// The dataset columns that it cannot do without, each with the field that names it.
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
            | RewardKind::Python(_) => return Vec::new(),
        };
        column.map(|column| (field.to_owned(), column.as_str())).into_iter().collect()
    }

    /// Lowest and highest value, where the type says so; `None` for most services.
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

/// A reward service that speaks contract v1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookPlan {
    /// Where it is, and how it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
    /// Given to the service as it is.
    #[serde(default)]
    pub params: serde_json::Map<String, serde_json::Value>,
    /// Samples carry the token ids of their completion (`completion_ids`), as functions with TRL's signature may ask for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub completion_ids: bool,
}

/// A Python function that the worker runs in a process of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PythonPlan {
    /// The file that defines it: absolute, or relative to a folder of the server's --python-rewards. A plan has the absolute path.
    pub file: String,
    /// Its name in the file: `accuracy`, or `Judge.score`.
    pub function: String,
    /// Of the file, when the job was accepted: the function is not run from another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Processes that run the file's functions.
    pub processes: u32,
    /// How it is asked.
    #[serde(flatten)]
    pub service: ServicePlan,
}

/// Where a service is, and how it is asked: the same for every reward over HTTP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ServicePlan {
    /// http or https. Absent of a Python function.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(required = true)]
    pub url: String,
    /// Requests in flight at once.
    pub max_concurrency: u32,
    /// Samples in one request; a larger group is split.
    pub max_batch_samples: u32,
    /// Bytes of one request's body.
    pub max_batch_bytes: u64,
    /// Of one try, ms.
    pub timeout_ms: u64,
    /// Of one request with all its tries, ms; contract v1 sends it in the body.
    pub deadline_ms: u64,
    /// Tries in a row for transport errors, 408, 425, 429 and 5xx.
    pub max_tries: u32,
    /// Tries for answers that are not valid.
    pub max_invalid_tries: u32,
    /// What an invalid answer means for its samples.
    pub on_invalid: OnInvalid,
    /// How long a service may be down before the job pauses, s.
    pub max_outage_s: u64,
    /// The same prompt, completion and columns always have the same value: it is asked for once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cache: bool,
    /// A group of a training rollout with fewer values than this is left out as a whole. 2 is what leave-one-out needs anyway.
    #[serde(default = "min_valid_per_group")]
    pub min_valid_per_group: u32,
    /// Part of the samples of the last 5 rollouts without a value at which the job pauses.
    #[serde(default = "max_invalid_fraction")]
    pub max_invalid_fraction: f64,
}

/// Unless the client says otherwise.
fn min_valid_per_group() -> u32 {
    2
}

/// Unless the client says otherwise.
fn max_invalid_fraction() -> f64 {
    0.5
}

/// What becomes of samples whose answer is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnInvalid {
    /// Missing.
    Mask,
    /// 0, by the client's explicit choice.
    Zero,
    /// The job fails.
    Fail,
}

/// A registered sequence-classification model, run by the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardModelPlan {
    /// As registered (`POST /models`).
    pub model: String,
    /// Which of its scores is the reward, by name or number; null where there is one.
    pub label: Option<String>,
    /// What the model reads.
    pub format: RewardTextFormat,
    /// Tokens; longer texts lose their beginning, and `truncated` is among the metrics. Null = as long as the model takes.
    pub max_length: Option<u32>,
    /// Precision of a decoder's matrices; encoders compute in f32.
    pub dtype: ComputeDtype,
}

/// What a reward model reads of a prompt and its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardTextFormat {
    /// `chat` for prompts of messages where the reward model has a chat template; else `pair` for encoders, `text` for decoders.
    Auto,
    /// The conversation through the reward model's own chat template; a string prompt is one message of a user.
    Chat,
    /// Prompt and completion as one text, without special tokens (with the tokenizer's for encoders).
    Text,
    /// Prompt and completion as a pair of texts, with the tokenizer's special tokens.
    Pair,
}

/// What must not be shown: kept apart from the plan, sent only to the worker that holds the claim.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardSecrets {
    /// `whsec_…`; absent = unsigned.
    pub secret: Option<String>,
    /// The one before, while the service still checks with it: requests are signed with both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_secret: Option<String>,
    /// Sent with every request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

impl RewardSecrets {
    /// As changed by a user: both secrets if one is given, the headers if some are.
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
