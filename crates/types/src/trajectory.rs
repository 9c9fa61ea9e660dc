//! A sequence that a model is trained on: a prompt, followed by segments of tokens. The model sampled the tokens of a model
//! segment. The tokens of a context segment come from the environment (a tool or a user).
//!
//! Log-probabilities, losses, advantages and completion lengths count model tokens only, in order. Context tokens condition the
//! tokens after them, as the prompt does. The current sampler creates one model segment: [`Segments::of_completion`].

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Consecutive tokens with the same origin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Segment {
    /// The model sampled these tokens, and they are trained on.
    Model {
        /// Ids of the tokens.
        ids: Vec<u32>,
        /// Log-probabilities of the tokens in nats, of logits / temperature over the full vocabulary, as the sampler computed them.
        /// `None` if they were not recorded, or if the sampler filtered tokens and they are therefore not meaningful.
        #[serde(default, skip_serializing_if = "Option::is_none", with = "exact_f32s")]
        logps: Option<Vec<f32>>,
    },
    /// The environment supplied these tokens: they are read, but never trained on.
    Context {
        /// Ids of the tokens.
        ids: Vec<u32>,
    },
}

impl Segment {
    /// Returns the token ids, whatever their origin.
    pub fn ids(&self) -> &[u32] {
        match self {
            Segment::Model { ids, .. } | Segment::Context { ids } => ids,
        }
    }

    /// Whether the model sampled the segment.
    pub fn is_model(&self) -> bool {
        match self {
            Segment::Model { .. } => true,
            Segment::Context { .. } => false,
        }
    }
}

/// The segments after a prompt, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Segments(pub Vec<Segment>);

/// The error for a sequence that is not a single completion where one is required.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a trajectory of {segments} segments ({context_tokens} context tokens) has no single completion, which is required here"
)]
pub struct NotOneCompletion {
    /// Number of segments in the sequence.
    pub segments: usize,
    /// Number of tokens that the model did not sample.
    pub context_tokens: usize,
}

impl Segments {
    /// Creates one model segment from a completion.
    pub fn of_completion(ids: Vec<u32>, logps: Option<Vec<f32>>) -> Self {
        Self(vec![Segment::Model { ids, logps }])
    }

    /// Returns the token ids of the single completion.
    ///
    /// # Errors
    /// Fails unless there is exactly one segment and the model sampled it.
    pub fn completion(&self) -> Result<&[u32], NotOneCompletion> {
        match self.0.as_slice() {
            [Segment::Model { ids, .. }] => Ok(ids),
            segments => Err(NotOneCompletion {
                segments: segments.len(),
                context_tokens: self.num_tokens() - self.num_model_tokens(),
            }),
        }
    }

    /// Iterates over all tokens, each with whether the model sampled it.
    pub fn tokens(&self) -> impl Iterator<Item = (u32, bool)> + '_ {
        self.0.iter().flat_map(|segment| segment.ids().iter().map(|id| (*id, segment.is_model())))
    }

    /// Returns all token ids, including context.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens().map(|(id, _)| id).collect()
    }

    /// Returns the number of tokens including context, which is what the model reads after the prompt.
    pub fn num_tokens(&self) -> usize {
        self.0.iter().map(|segment| segment.ids().len()).sum()
    }

    /// Returns the number of tokens that the model sampled, which are scored and trained on. This is the length of a completion.
    pub fn num_model_tokens(&self) -> usize {
        self.0.iter().filter(|segment| segment.is_model()).map(|segment| segment.ids().len()).sum()
    }

    /// Returns the position, among all tokens, of the last token that the model sampled, from 0; `None` if the model sampled none.
    pub fn last_model_token(&self) -> Option<usize> {
        let mut end = 0;
        let mut last = None;
        for segment in &self.0 {
            end += segment.ids().len();
            if segment.is_model() && !segment.ids().is_empty() {
                last = Some(end - 1);
            }
        }
        last
    }

    /// Returns the log-probabilities of the model tokens as the sampler computed them, in order; `None` unless they are
    /// known for all of them.
    pub fn logps(&self) -> Option<Cow<'_, [f32]>> {
        let mut known: Option<Cow<'_, [f32]>> = None;
        for segment in &self.0 {
            let Segment::Model { ids, logps } = segment else { continue };
            let logps = logps.as_deref().filter(|logps| logps.len() == ids.len())?;
            known = Some(match known {
                None => Cow::Borrowed(logps),
                Some(before) => Cow::Owned([&*before, logps].concat()),
            });
        }
        Some(known.unwrap_or_default())
    }

    /// Drops the recorded log-probabilities.
    pub fn forget_logps(&mut self) {
        for segment in &mut self.0 {
            match segment {
                Segment::Model { logps, .. } => *logps = None,
                Segment::Context { .. } => {}
            }
        }
    }

    /// Returns the approximate size of the JSON form, in bytes.
    pub fn json_bytes(&self) -> usize {
        let of_segment = |segment: &Segment| match segment {
            Segment::Model { ids, logps } => {
                48 + 6 * ids.len() + logps.as_ref().map_or(0, |logps| 12 + logps.len() * 16 / 3)
            }
            Segment::Context { ids } => 48 + 6 * ids.len(),
        };
        self.0.iter().map(of_segment).sum()
    }
}

/// A whole sequence: a prompt and the segments after it. Sequences of a group share their prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Trajectory<'a> {
    /// Token ids of the prompt, which condition all others; at least one.
    pub prompt: &'a [u32],
    /// The segments after the prompt; may have no tokens.
    pub segments: Cow<'a, Segments>,
}

impl<'a> Trajectory<'a> {
    /// Creates a sequence from a prompt and its segments.
    pub fn new(prompt: &'a [u32], segments: &'a Segments) -> Self {
        Self { prompt, segments: Cow::Borrowed(segments) }
    }

    /// Creates a sequence from a prompt and one completion, without log-probabilities.
    pub fn of_completion(prompt: &'a [u32], completion: &[u32]) -> Self {
        Self { prompt, segments: Cow::Owned(Segments::of_completion(completion.to_vec(), None)) }
    }

    /// Returns the number of tokens in the prompt, model and context segments.
    pub fn num_tokens(&self) -> usize {
        self.prompt.len() + self.segments.num_tokens()
    }

    /// Returns the number of tokens that are scored and trained on.
    pub fn num_model_tokens(&self) -> usize {
        self.segments.num_model_tokens()
    }
}

/// Serializes `f32`s as base64 of 4 little-endian bytes each. The form is compact and preserves every bit,
/// including those of non-finite numbers.
pub mod exact_f32s {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Serializes values for serde's `with` attribute.
    pub fn serialize<S: Serializer, V: AsRef<[f32]>>(values: &Option<V>, serializer: S) -> Result<S::Ok, S::Error> {
        let encode = |values: &V| {
            STANDARD.encode(values.as_ref().iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
        };
        values.as_ref().map(encode).serialize(serializer)
    }

    /// Deserializes values for serde's `with` attribute.
    pub fn deserialize<'de, D: Deserializer<'de>, V: From<Vec<f32>>>(deserializer: D) -> Result<Option<V>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let bytes = STANDARD.decode(text).map_err(D::Error::custom)?;
        let (values, rest) = bytes.as_chunks::<4>();
        match rest {
            [] => Ok(Some(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>().into())),
            rest => Err(D::Error::custom(format!("the list of 4-byte numbers has {} bytes too many", rest.len()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Model tokens 5 6, context token 7, model token 8, context token 9.
    fn turns() -> Segments {
        Segments(vec![
            Segment::Model { ids: vec![5, 6], logps: Some(vec![-0.5, -1.5]) },
            Segment::Context { ids: vec![7] },
            Segment::Model { ids: vec![8], logps: Some(vec![-2.5]) },
            Segment::Context { ids: vec![9] },
        ])
    }

    #[test]
    fn context_tokens_never_count_as_model_tokens() {
        let turns = turns();
        assert_eq!(turns.ids(), [5, 6, 7, 8, 9]);
        assert_eq!(turns.tokens().map(|(_, is_model)| is_model).collect::<Vec<_>>(), [true, true, false, true, false]);
        assert_eq!((turns.num_tokens(), turns.num_model_tokens(), turns.last_model_token()), (5, 3, Some(3)));
        assert_eq!(turns.logps().unwrap(), [-0.5, -1.5, -2.5].as_slice());
        let trajectory = Trajectory::new(&[1, 2], &turns);
        assert_eq!((trajectory.num_tokens(), trajectory.num_model_tokens()), (7, 3));

        let only_context = Segments(vec![Segment::Context { ids: vec![7] }]);
        assert_eq!((only_context.num_model_tokens(), only_context.last_model_token()), (0, None));
    }

    #[test]
    fn a_completion_is_one_model_segment_and_nothing_else() {
        assert_eq!(Segments::of_completion(vec![5, 6], None).completion(), Ok([5, 6].as_slice()));
        assert_eq!(Segments::of_completion(Vec::new(), None).last_model_token(), None);
        assert_eq!(turns().completion(), Err(NotOneCompletion { segments: 4, context_tokens: 2 }));
        assert!(Segments::default().completion().is_err());
        let context = Segments(vec![Segment::Context { ids: vec![7] }]);
        assert!(context.completion().is_err(), "the model did not say it");
        let two =
            Segments(vec![Segment::Model { ids: vec![5], logps: None }, Segment::Model { ids: vec![6], logps: None }]);
        assert!(two.completion().is_err());
    }

    #[test]
    fn log_probs_are_known_of_every_model_token_or_not_at_all() {
        let mut turns = turns();
        turns.0[2] = Segment::Model { ids: vec![8], logps: None };
        assert_eq!(turns.logps(), None);
        let short = Segments::of_completion(vec![5, 6], Some(vec![-0.5]));
        assert_eq!(short.logps(), None);
        let mut all = self::turns();
        all.forget_logps();
        assert_eq!((all.logps(), all.ids()), (None, vec![5, 6, 7, 8, 9]));
        assert!(Segments::of_completion(Vec::new(), Some(Vec::new())).logps().unwrap().is_empty());
    }
}
