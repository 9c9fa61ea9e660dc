//! Samples, rewards and rollout ids: the types between the engine and the rewards.

use std::borrow::Cow;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::environment::Episode;
use crate::event::{FinishReason, SamplePhase};
pub use crate::trajectory::{Segment, Segments, exact_f32s};

/// Id of a rollout within a run. It is the same in every attempt, so that its journal entries are found again.
///
/// Every generate-and-score call within a run has a different id. Further rounds of a step (refills of dynamic sampling) increment
/// `round`, and completions that are sampled in addition to the trained ones have another `part`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RolloutId {
    /// Whether the rollout belongs to training or to evaluation.
    pub phase: SamplePhase,
    /// Optimizer step of the rollout, from 1 (the first step that uses the block). For an evaluation, the step that it follows.
    pub step: u64,
    /// Number of the rollout within the step, from 0.
    pub round: u32,
    /// Which of the round's completions the rollout has.
    pub part: RolloutPart,
}

/// Which of a round's completions a rollout has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutPart {
    /// The completions that are trained on or evaluated.
    Sampled,
    /// One greedy completion per prompt: a baseline that is never trained on (remax).
    Greedy,
}

impl RolloutId {
    /// Returns the id of the first (usually the only) round of a training block that begins with this step.
    pub fn train(step: u64) -> Self {
        Self { phase: SamplePhase::Train, step, round: 0, part: RolloutPart::Sampled }
    }

    /// Returns the id of the evaluation that follows this step.
    pub fn eval(step: u64) -> Self {
        Self { phase: SamplePhase::Eval, ..Self::train(step) }
    }

    /// Whether the completions are trained on.
    pub fn is_trained(self) -> bool {
        self.phase == SamplePhase::Train && self.part == RolloutPart::Sampled
    }

    /// Returns the id of another round of the same step.
    #[must_use]
    pub fn round(self, round: u32) -> Self {
        Self { round, ..self }
    }

    /// Returns the id of the greedy completions of the same round.
    #[must_use]
    pub fn greedy(self) -> Self {
        Self { part: RolloutPart::Greedy, ..self }
    }
}

/// A completion before scoring.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The tokens after the prompt, up to and including the first end-of-sequence token.
    pub segments: Segments,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// The record of the episode, in a job with an environment.
    pub episode: Option<Box<Episode>>,
}

/// A completion with its rewards.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutCompletion {
    /// The tokens after the prompt, up to and including the first end-of-sequence token.
    pub segments: Segments,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// Value of each reward, in the plan's order.
    pub score: Score,
    /// The record of the episode, in a job with an environment.
    pub episode: Option<Box<Episode>>,
}

/// The JSON form of a completion. A single model segment has the keys `ids` and `logps`. Any other trajectory has the key
/// `segments`, which older versions reject because `ids` is missing.
#[derive(Serialize, Deserialize)]
struct CompletionJson<'a> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ids: Option<Cow<'a, [u32]>>,
    finish_reason: FinishReason,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    score: Option<Cow<'a, Score>>,
    #[serde(default, skip_serializing_if = "Option::is_none", with = "exact_f32s")]
    logps: Option<Cow<'a, [f32]>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    segments: Option<Cow<'a, [Segment]>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    episode: Option<Cow<'a, Episode>>,
}

impl<'a> CompletionJson<'a> {
    fn new(
        segments: &'a Segments,
        finish_reason: FinishReason,
        score: Option<&'a Score>,
        episode: Option<&'a Episode>,
    ) -> Self {
        let (score, episode) = (score.map(Cow::Borrowed), episode.map(Cow::Borrowed));
        match segments.0.as_slice() {
            [Segment::Model { ids, logps }] => {
                let logps = logps.as_deref().map(Cow::Borrowed);
                Self { ids: Some(Cow::Borrowed(ids)), finish_reason, score, logps, segments: None, episode }
            }
            several => {
                let segments = Some(Cow::Borrowed(several));
                Self { ids: None, finish_reason, score, logps: None, segments, episode }
            }
        }
    }

    fn take_episode(&mut self) -> Option<Box<Episode>> {
        self.episode.take().map(|episode| Box::new(episode.into_owned()))
    }

    fn into_segments<E: serde::de::Error>(self) -> Result<Segments, E> {
        match (self.ids, self.segments) {
            (Some(ids), None) => Ok(Segments::of_completion(ids.into_owned(), self.logps.map(Cow::into_owned))),
            (None, Some(segments)) => Ok(Segments(segments.into_owned())),
            (None, None) => Err(E::missing_field("ids")),
            (Some(_), Some(_)) => Err(E::custom("a completion has `ids` or `segments`, not both")),
        }
    }
}

impl Serialize for Generated {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { segments, finish_reason, episode } = self;
        CompletionJson::new(segments, *finish_reason, None, episode.as_deref()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Generated {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut json = CompletionJson::deserialize(deserializer)?;
        let episode = json.take_episode();
        Ok(Self { finish_reason: json.finish_reason, episode, segments: json.into_segments()? })
    }
}

impl Serialize for RolloutCompletion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { segments, finish_reason, score, episode } = self;
        CompletionJson::new(segments, *finish_reason, Some(score), episode.as_deref()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RolloutCompletion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut json = CompletionJson::deserialize(deserializer)?;
        let score = json.score.take().ok_or_else(|| D::Error::missing_field("score"))?.into_owned();
        let episode = json.take_episode();
        Ok(Self { finish_reason: json.finish_reason, score, episode, segments: json.into_segments()? })
    }
}

/// The completions of one prompt before scoring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampledGroup {
    /// Dataset row of the prompt, from 0.
    pub row: u64,
    /// The G completions of the prompt; a single one for [`RolloutPart::Greedy`].
    pub completions: Vec<Generated>,
    /// Token ids of the prompt, if an environment has added to the row's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_ids: Option<Vec<u32>>,
}

/// One completion, as passed to a reward.
#[derive(Debug, Clone)]
pub struct RewardSample {
    /// Id that is unique in the request: `s_0`, `s_1`, ….
    pub sample_id: String,
    /// Id of the group, `g_N`, where N counts the groups of the request.
    pub group_id: String,
    /// Dataset row of the prompt, `row_N`.
    pub prompt_id: String,
    /// Name of the dataset source that the row comes from, if the dataset has several.
    pub source: Option<String>,
    /// The prompt as text.
    pub prompt: String,
    /// The prompt as chat messages, if the dataset has it in this form.
    pub messages: Option<Value>,
    /// The completion as text, without special tokens.
    pub completion: String,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// Length of the completion, in tokens.
    pub num_tokens: u32,
    /// Token ids of the completion, if they are known.
    pub completion_ids: Option<Vec<u32>>,
    /// The columns of the dataset row other than the prompt.
    pub columns: Map<String, Value>,
    /// The record of the episode, in a job with an environment.
    pub episode: Option<Box<Episode>>,
}

/// Value of each reward for one sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Values of the rewards, in the plan's order.
    pub values: Vec<RewardValue>,
}

/// One reward's value for one sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardValue {
    /// The reward is a finite number.
    Number(f64),
    /// Null without an error: the reward does not apply to this row.
    NotApplicable,
    /// An error, an invalid value or a timeout; never treated as 0.
    Missing,
}

impl RewardValue {
    /// Returns the number; `None` if the reward does not apply or is missing.
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

    fn completion(ids: &[u32], logps: Option<Vec<f32>>) -> Generated {
        Generated {
            segments: Segments::of_completion(ids.to_vec(), logps),
            finish_reason: FinishReason::Stop,
            episode: None,
        }
    }

    #[test]
    fn log_probs_survive_json_bit_for_bit_and_may_be_absent() {
        // The values include one whose shortest decimal form changes when it is converted through f64, and values that JSON numbers
        // cannot represent.
        let logps = [-0.0, -1.1754944e-38, -7.038531e-26, 1e-45, -0.1, f32::NAN, f32::NEG_INFINITY, -16_777_217.0];
        let generated = completion(&[1; 8], Some(logps.to_vec()));
        let text = serde_json::to_string(&generated).unwrap();
        assert!(text.len() <= generated.segments.json_bytes() + 48, "{text}");
        let back: Generated = serde_json::from_str(&text).unwrap();
        let bits = |logps: &[f32]| logps.iter().map(|logp| logp.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back.segments.logps().unwrap()), bits(&logps));

        let old: Generated = serde_json::from_str(r#"{"ids":[5],"finish_reason":"stop"}"#).unwrap();
        assert_eq!(old, completion(&[5], None));
        assert_eq!(serde_json::to_string(&old).unwrap(), r#"{"ids":[5],"finish_reason":"stop"}"#);
        for damaged in ["AAAA", "!"] {
            let text = format!(r#"{{"ids":[5],"finish_reason":"stop","logps":"{damaged}"}}"#);
            assert!(serde_json::from_str::<Generated>(&text).is_err(), "{damaged}");
        }
    }

    #[test]
    fn completions_without_segments_are_read_and_written_byte_for_byte() {
        let entries = [
            r#"{"row":3,"completions":[{"ids":[5,6],"finish_reason":"length","logps":"AAAAvwAAwL8="},{"ids":[],"finish_reason":"stop"}]}"#,
            r#"{"row":0,"completions":[]}"#,
        ];
        for entry in entries {
            let group: SampledGroup = serde_json::from_str(entry).unwrap();
            assert_eq!(serde_json::to_string(&group).unwrap(), entry);
        }
        let scored = [
            r#"{"ids":[5,6],"finish_reason":"stop","score":{"values":[{"number":0.5},"missing"]},"logps":"AAAAvwAAwL8="}"#,
            r#"{"ids":[5],"finish_reason":"length","score":{"values":["not_applicable"]}}"#,
        ];
        for text in scored {
            let completion: RolloutCompletion = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&completion).unwrap(), text);
        }
        let group: SampledGroup = serde_json::from_str(entries[0]).unwrap();
        assert_eq!(group.completions[0].segments, Segments::of_completion(vec![5, 6], Some(vec![-0.5, -1.5])));
    }

    #[test]
    fn several_segments_survive_json_under_a_key_of_their_own() {
        let segments = Segments(vec![
            Segment::Model { ids: vec![5, 6], logps: Some(vec![-0.5, -1.5]) },
            Segment::Context { ids: vec![7] },
            Segment::Model { ids: vec![8], logps: None },
        ]);
        let score = Score { values: vec![RewardValue::Number(1.0)] };
        let scored =
            RolloutCompletion { segments: segments.clone(), finish_reason: FinishReason::Stop, score, episode: None };
        let text = serde_json::to_string(&scored).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"finish_reason":"stop","score":{"values":[{"number":1.0}]},"segments":["#,
                r#"{"kind":"model","ids":[5,6],"logps":"AAAAvwAAwL8="},{"kind":"context","ids":[7]},"#,
                r#"{"kind":"model","ids":[8]}]}"#,
            )
        );
        assert_eq!(serde_json::from_str::<RolloutCompletion>(&text).unwrap(), scored);
        let only_context = Segments(vec![Segment::Context { ids: vec![7] }]);
        for segments in [segments, Segments::default(), only_context] {
            let generated = Generated { segments, finish_reason: FinishReason::Length, episode: None };
            let text = serde_json::to_string(&generated).unwrap();
            assert_eq!(serde_json::from_str::<Generated>(&text).unwrap(), generated, "{text}");
        }
        for neither in [r#"{"finish_reason":"stop"}"#, r#"{"ids":[5],"segments":[],"finish_reason":"stop"}"#] {
            assert!(serde_json::from_str::<Generated>(neither).is_err(), "{neither}");
        }
        assert!(serde_json::from_str::<RolloutCompletion>(r#"{"ids":[5],"finish_reason":"stop"}"#).is_err());
    }
}
