//! What a reward sees and says: the words between the engine and the rewards, and the name of a rollout.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::event::{FinishReason, SamplePhase};

/// Which sampling of a run: the same in every attempt at it, so that what was journalled of it is found again.
///
/// Every call of generate-and-score within a run has another one: further rounds of a step (refills of dynamic sampling)
/// count up `round`, and completions that are sampled beside the ones that are trained have another `part`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RolloutId {
    /// Training or evaluation.
    pub phase: SamplePhase,
    /// Optimizer step that it is for (1-based; the first one that uses the block); an evaluation carries the step it follows.
    pub step: u64,
    /// Counts the samplings within the step from 0.
    pub round: u32,
    /// Which of the completions of that round.
    pub part: RolloutPart,
}

/// Which completions of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutPart {
    /// Those that are trained or evaluated.
    Sampled,
    /// One greedy completion a prompt: a baseline, never trained (remax).
    Greedy,
}

impl RolloutId {
    /// The first (usually the only) round of a training block that begins with this step.
    pub fn train(step: u64) -> Self {
        Self { phase: SamplePhase::Train, step, round: 0, part: RolloutPart::Sampled }
    }

    /// The evaluation that follows this step.
    pub fn eval(step: u64) -> Self {
        Self { phase: SamplePhase::Eval, ..Self::train(step) }
    }

    /// The same step, another round.
    #[must_use]
    pub fn round(self, round: u32) -> Self {
        Self { round, ..self }
    }

    /// The greedy completions of the same round.
    #[must_use]
    pub fn greedy(self) -> Self {
        Self { part: RolloutPart::Greedy, ..self }
    }
}

/// One completion as it was sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generated {
    /// Token ids, up to and including the first end-of-sequence token.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// The completions of one prompt, sampled and not scored yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampledGroup {
    /// Dataset row, from 0.
    pub row: u64,
    /// G of them; one where [`RolloutPart::Greedy`].
    pub completions: Vec<Generated>,
}

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
