//! What a reward sees and says: the words between the engine and the rewards.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::event::FinishReason;

/// One completion, as a reward sees it.
#[derive(Debug, Clone)]
pub struct RewardSample {
    /// Unique in the request: `s_0`, `s_1`, …
    pub sample_id: String,
    /// `g_N`: N counts the groups of the request.
    pub group_id: String,
    /// `row_N`.
    pub prompt_id: String,
    /// The prompt as text.
    pub prompt: String,
    /// The prompt as chat messages, if it came as such.
    pub messages: Option<Value>,
    /// The completion as text, without special tokens.
    pub completion: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Completion tokens.
    pub num_tokens: u32,
    /// The other columns of the row.
    pub columns: Map<String, Value>,
}

/// What each reward said of one sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// In the plan's order.
    pub values: Vec<RewardValue>,
}

/// One reward's verdict on one sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardValue {
    /// A finite number.
    Number(f64),
    /// Null without an error: the reward does not apply to this row.
    NotApplicable,
    /// Error, invalid, timed out: never 0.
    Missing,
}

impl RewardValue {
    /// The number, if it is one.
    pub fn number(self) -> Option<f64> {
        match self {
            RewardValue::Number(value) => Some(value),
            RewardValue::NotApplicable | RewardValue::Missing => None,
        }
    }
}
