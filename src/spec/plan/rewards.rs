//! The rewards of a plan: what to call and how each weighs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ComputeDtype;

/// One reward: what to call and how it weighs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardPlan {
    /// Unique in the job; metrics are `rewards/{name}/…`.
    pub name: String,
    /// 0 = metric only.
    pub weight: f64,
    /// A missing value makes the sample unscorable (`true`), or counts as not applicable. Never true at weight 0.
    pub required: bool,
    /// What it is.
    #[serde(flatten)]
    pub kind: RewardKind,
}

/// The rewards there are. Secrets and header values travel apart ([`RewardSecrets`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RewardKind {
    /// Contract v1 over HTTP.
    Webhook(WebhookPlan),
    /// The seeds' word band and sentence end.
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
}

/// A reward service that speaks contract v1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookPlan {
    /// http or https.
    pub url: String,
    /// Given to the service as it is.
    #[serde(default)]
    pub params: serde_json::Map<String, serde_json::Value>,
    /// Requests in flight at once.
    pub max_concurrency: u32,
    /// Samples in one request; a larger group is split.
    pub max_batch_samples: u32,
    /// Bytes of one request's body.
    pub max_batch_bytes: u64,
    /// Of one try, ms.
    pub timeout_ms: u64,
    /// Of one request with all its tries, ms; sent in the body.
    pub deadline_ms: u64,
    /// Tries in a row for transport errors, 408, 425, 429 and 5xx.
    pub max_tries: u32,
    /// Tries for answers that are not valid.
    pub max_invalid_tries: u32,
    /// What an invalid answer means for its samples.
    pub on_invalid: OnInvalid,
    /// How long a service may be down before the job pauses, s.
    pub max_outage_s: u64,
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

/// Band of lengths, after the seeds: 1 inside, −0.5 below, 0 above; +0.5 for a sentence's end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LengthPlan {
    /// Words (whitespace-separated), inclusive.
    pub min_words: u32,
    /// Words, inclusive.
    pub max_words: u32,
    /// Added when the completion ends with `.`, `!` or `?`.
    pub sentence_bonus: f64,
}

/// Compare with a column.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MatchPlan {
    /// The dataset column that holds the reference.
    pub column: String,
    /// Compare without regard to case.
    pub ignore_case: bool,
}

/// Search for text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ContainsPlan {
    /// The dataset column that holds the text; exclusive with `text`.
    pub column: Option<String>,
    /// The text itself.
    pub text: Option<String>,
    /// Compare without regard to case.
    pub ignore_case: bool,
}

/// Compare the last number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NumberMatchPlan {
    /// The dataset column that holds the reference.
    pub column: String,
    /// Largest absolute difference that still counts.
    pub tolerance: f64,
}

/// Search for a pattern (Rust's regex syntax: linear time).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RegexPlan {
    /// The pattern.
    pub pattern: String,
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
    /// Sent with every request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

impl std::fmt::Debug for RewardSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RewardSecrets(redacted)")
    }
}
