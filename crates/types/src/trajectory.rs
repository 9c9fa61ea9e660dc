//! One sequence that a model is trained on: a prompt, then segments of tokens. The model sampled those of a model segment;
//! the job's surroundings (a tool, a user) put those of a context segment between them.
//!
//! Log-probs, losses, advantages and lengths of completions count model tokens only, in order. Context tokens condition what
//! follows them, as the prompt does. Today's sampler makes one model segment: [`Segments::of_completion`].

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Tokens in a row that have one origin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Segment {
    /// The model sampled these tokens: they are trained.
    Model {
        /// Token ids.
        ids: Vec<u32>,
        /// Log-probs of the tokens in nats, of logits / temperature over the full vocabulary, as the sampler saw them; `None`
        /// where they were not recorded, or say nothing because the sampler filtered.
        #[serde(default, skip_serializing_if = "Option::is_none", with = "exact_f32s")]
        logps: Option<Vec<f32>>,
    },
    /// The surroundings gave these tokens: they are read, never trained.
    Context {
        /// Token ids.
        ids: Vec<u32>,
    },
}

impl Segment {
    /// Token ids, whatever their origin.
    pub fn ids(&self) -> &[u32] {
        match self {
            Segment::Model { ids, .. } | Segment::Context { ids } => ids,
        }
    }

    /// Whether the model sampled it.
    pub fn is_model(&self) -> bool {
        match self {
            Segment::Model { .. } => true,
            Segment::Context { .. } => false,
        }
    }
}

/// What follows a prompt, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Segments(pub Vec<Segment>);

/// A sequence was asked for its one completion, and is not one model segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a trajectory of {segments} segments ({context_tokens} context tokens) has no single completion, which is required here"
)]
pub struct NotOneCompletion {
    /// How many segments there are.
    pub segments: usize,
    /// How many of its tokens the model did not sample.
    pub context_tokens: usize,
}

impl Segments {
    /// One model segment: a completion.
    pub fn of_completion(ids: Vec<u32>, logps: Option<Vec<f32>>) -> Self {
        Self(vec![Segment::Model { ids, logps }])
    }

    /// The token ids of the one completion.
    ///
    /// # Errors
    /// When there is another number of segments than one, or the model did not sample it.
    pub fn completion(&self) -> Result<&[u32], NotOneCompletion> {
        match self.0.as_slice() {
            [Segment::Model { ids, .. }] => Ok(ids),
            segments => Err(NotOneCompletion {
                segments: segments.len(),
                context_tokens: self.num_tokens() - self.num_model_tokens(),
            }),
        }
    }

    /// Every token, and whether the model sampled it.
    pub fn tokens(&self) -> impl Iterator<Item = (u32, bool)> + '_ {
        self.0.iter().flat_map(|segment| segment.ids().iter().map(|id| (*id, segment.is_model())))
    }

    /// Every token id, context included.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens().map(|(id, _)| id).collect()
    }

    /// Tokens, context included: what the model reads behind the prompt.
    pub fn num_tokens(&self) -> usize {
        self.0.iter().map(|segment| segment.ids().len()).sum()
    }

    /// Tokens that the model sampled: what is scored and trained. The length of a completion.
    pub fn num_model_tokens(&self) -> usize {
        self.0.iter().filter(|segment| segment.is_model()).map(|segment| segment.ids().len()).sum()
    }

    /// The place of the last token that the model sampled among all tokens, from 0; `None` where it sampled none.
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

    /// Log-probs of the model tokens as the sampler saw them, in order; `None` unless they are known of every one.
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

    /// Drops the recorded log-probs.
    pub fn forget_logps(&mut self) {
        for segment in &mut self.0 {
            match segment {
                Segment::Model { logps, .. } => *logps = None,
                Segment::Context { .. } => {}
            }
        }
    }

    /// Bytes of its JSON, about.
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

/// A whole sequence: a prompt and what follows it. Sequences of a group share their prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Trajectory<'a> {
    /// Token ids that condition all others; at least one.
    pub prompt: &'a [u32],
    /// What follows; may hold no token.
    pub segments: Cow<'a, Segments>,
}

impl<'a> Trajectory<'a> {
    /// A prompt and what followed it.
    pub fn new(prompt: &'a [u32], segments: &'a Segments) -> Self {
        Self { prompt, segments: Cow::Borrowed(segments) }
    }

    /// A prompt and one completion, without log-probs.
    pub fn of_completion(prompt: &'a [u32], completion: &[u32]) -> Self {
        Self { prompt, segments: Cow::Owned(Segments::of_completion(completion.to_vec(), None)) }
    }

    /// Tokens of prompt, model and context.
    pub fn num_tokens(&self) -> usize {
        self.prompt.len() + self.segments.num_tokens()
    }

    /// Tokens that are scored and trained.
    pub fn num_model_tokens(&self) -> usize {
        self.segments.num_model_tokens()
    }
}

/// `f32`s in base64, 4 little-endian bytes each: short, and the same bits come back, those that are not finite included.
pub mod exact_f32s {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// For `serialize_with`.
    pub fn serialize<S: Serializer, V: AsRef<[f32]>>(values: &Option<V>, serializer: S) -> Result<S::Ok, S::Error> {
        let encode = |values: &V| {
            STANDARD.encode(values.as_ref().iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
        };
        values.as_ref().map(encode).serialize(serializer)
    }

    /// For `deserialize_with`.
    pub fn deserialize<'de, D: Deserializer<'de>, V: From<Vec<f32>>>(deserializer: D) -> Result<Option<V>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let bytes = STANDARD.decode(text).map_err(D::Error::custom)?;
        let (values, rest) = bytes.as_chunks::<4>();
        match rest {
            [] => Ok(Some(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>().into())),
            rest => Err(D::Error::custom(format!("{} bytes too many for numbers of 4", rest.len()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Model 5 6, context 7, model 8, context 9.
    fn turns() -> Segments {
        Segments(vec![
            Segment::Model { ids: vec![5, 6], logps: Some(vec![-0.5, -1.5]) },
            Segment::Context { ids: vec![7] },
            Segment::Model { ids: vec![8], logps: Some(vec![-2.5]) },
            Segment::Context { ids: vec![9] },
        ])
    }

    #[test]
    fn context_tokens_are_read_and_never_counted_as_the_models() {
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
