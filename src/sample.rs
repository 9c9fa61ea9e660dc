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

    /// Whether its completions are trained.
    pub fn is_trained(self) -> bool {
        self.phase == SamplePhase::Train && self.part == RolloutPart::Sampled
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generated {
    /// Token ids, up to and including the first end-of-sequence token.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Log-probs of its tokens in nats, of logits / temperature over the full vocabulary, as the sampler saw them; `None`
    /// where they were not recorded, or say nothing because the sampler filtered.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "exact_f32s")]
    pub logps: Option<Vec<f32>>,
}

impl Generated {
    /// Bytes of its JSON, about.
    pub fn json_bytes(&self) -> usize {
        48 + 6 * self.ids.len() + self.logps.as_ref().map_or(0, |logps| 12 + logps.len() * 16 / 3)
    }
}

/// `f32`s in base64, 4 little-endian bytes each: short, and the same bits come back, those that are not finite included.
pub(crate) mod exact_f32s {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(values: &Option<Vec<f32>>, serializer: S) -> Result<S::Ok, S::Error> {
        let encode = |values: &Vec<f32>| {
            STANDARD.encode(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
        };
        values.as_ref().map(encode).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<f32>>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let bytes = STANDARD.decode(text).map_err(D::Error::custom)?;
        let (values, rest) = bytes.as_chunks::<4>();
        match rest {
            [] => Ok(Some(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())),
            rest => Err(D::Error::custom(format!("{} bytes too many for numbers of 4", rest.len()))),
        }
    }
}

/// The completions of one prompt, sampled and not scored yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probs_survive_json_bit_for_bit_and_may_be_absent() {
        // Among them one whose shortest decimal form is no f32 once it was an f64, and those that JSON has no number for.
        let logps = [-0.0, -1.1754944e-38, -7.038531e-26, 1e-45, -0.1, f32::NAN, f32::NEG_INFINITY, -16_777_217.0];
        let generated = Generated { ids: vec![1; 8], finish_reason: FinishReason::Stop, logps: Some(logps.to_vec()) };
        let text = serde_json::to_string(&generated).unwrap();
        assert!(text.len() <= generated.json_bytes() + 48, "{text}");
        let back: Generated = serde_json::from_str(&text).unwrap();
        let bits = |logps: &[f32]| logps.iter().map(|logp| logp.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back.logps.unwrap()), bits(&logps));

        let old: Generated = serde_json::from_str(r#"{"ids":[5],"finish_reason":"stop"}"#).unwrap();
        assert_eq!(old, Generated { ids: vec![5], finish_reason: FinishReason::Stop, logps: None });
        assert_eq!(serde_json::to_string(&old).unwrap(), r#"{"ids":[5],"finish_reason":"stop"}"#);
        for damaged in ["AAAA", "!"] {
            let text = format!(r#"{{"ids":[5],"finish_reason":"stop","logps":"{damaged}"}}"#);
            assert!(serde_json::from_str::<Generated>(&text).is_err(), "{damaged}");
        }
    }
}
