//! Reward models: sequence-classification checkpoints that score token ids. Scores are raw logits, without activation.
//!
//! Decoders run on our own [`Policy`], on any backend; the head scores the last token that is not padding, as
//! transformers does. Encoders ([`mod@encoder`]) run on candle. Scores equal those of transformers within
//! 1e-4 in f32: `tests/it/reward_model.rs`.

pub mod encoder;

use std::path::Path;

use super::backend::BackendKind;
use super::error::{EngineError, Result};
use super::load::Weights;
use super::model::Policy;
use crate::modelcard::classifier::SCORE;
use crate::modelcard::{Backbone, ClassifierCard, ModelCard, ModelDescription};
use crate::spec::ComputeDtype;
use crate::spec::footprint::PREFILL_TOKENS;
use encoder::Encoder;

/// A loaded sequence-classification model.
#[derive(Debug)]
pub struct RewardModel {
    card: ClassifierCard,
    network: Network,
}

#[derive(Debug)]
enum Network {
    /// A decoder and its head `[labels][hidden_size]`.
    Decoder(Box<Policy>, Vec<f32>),
    Encoder(Box<Encoder>),
}

impl RewardModel {
    /// Loads a model directory. Decoders compute in `dtype` (sums are f32), encoders always in f32.
    ///
    /// # Errors
    /// Fails if the directory is not a supported classification checkpoint, or holds values that are not finite.
    pub fn load(dir: &Path, kind: BackendKind, dtype: ComputeDtype) -> Result<RewardModel> {
        RewardModel::load_card(dir, ClassifierCard::read(dir)?, kind, dtype)
    }

    /// Loads a model directory like [`RewardModel::load`], with a card that was already read.
    ///
    /// # Errors
    /// Fails in the same cases as [`RewardModel::load`].
    pub fn load_card(dir: &Path, card: ClassifierCard, kind: BackendKind, dtype: ComputeDtype) -> Result<RewardModel> {
        let mut weights = Weights::of(dir, &card.tensors);
        let network = match &card.backbone {
            Backbone::Decoder(config) => {
                let (head, _) = weights.values(SCORE)?;
                let policy = Policy::load_card(dir, decoder_card(&card, config), kind, dtype)?;
                Network::Decoder(Box::new(policy), head)
            }
            Backbone::Encoder(config) => {
                Network::Encoder(Box::new(Encoder::load(&mut weights, config, card.labels.len())?))
            }
        };
        Ok(RewardModel { card, network })
    }

    /// Facts about the reward model that do not need its tensors.
    pub fn card(&self) -> &ClassifierCard {
        &self.card
    }

    /// Computes the scores of each token sequence, one per label, in the order of [`ClassifierCard::labels`].
    /// All scores are finite.
    ///
    /// # Errors
    /// Fails for empty or too long sequences, unknown tokens, and scores that are not finite.
    pub fn scores(&self, sequences: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        for (index, sequence) in sequences.iter().enumerate() {
            if sequence.is_empty() || sequence.len() > self.card.max_tokens {
                let detail = format!(
                    "sequence {index} has {} tokens; the reward model takes 1 to {}",
                    sequence.len(),
                    self.card.max_tokens
                );
                return Err(EngineError::Input(detail));
            }
        }
        let scores = match &self.network {
            Network::Decoder(policy, head) => self.decoder_scores(policy, head, sequences)?,
            Network::Encoder(encoder) => encoder.scores(sequences)?,
        };
        if !scores.iter().flatten().all(|score| score.is_finite()) {
            return Err(EngineError::ModelNotFinite { what: "a score that the reward model computed".to_owned() });
        }
        Ok(scores)
    }

    fn decoder_scores(&self, policy: &Policy, head: &[f32], sequences: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let scored: Vec<&[u32]> =
            sequences.iter().map(|sequence| up_to_last_token(sequence, self.card.pad_token_id)).collect();
        let hidden_size = policy.card().config.hidden_size;
        let mut scores = Vec::with_capacity(sequences.len());
        let mut rest = scored.as_slice();
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|sequence| {
                tokens += sequence.len();
                tokens <= PREFILL_TOKENS as usize
            });
            let (chunk, after) = rest.split_at(fits.count().max(1));
            let hidden = policy.last_hidden(chunk)?;
            scores.extend(hidden.chunks_exact(hidden_size).map(|hidden| {
                let label = |row: &[f32]| dot(row, hidden);
                head.chunks_exact(hidden_size).map(label).collect::<Vec<f32>>()
            }));
            rest = after;
        }
        Ok(scores)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
}

/// Cuts a sequence after its last token that is not padding, because transformers scores that token. This holds even if
/// the padding token is also the EOS token that ends a text. Later tokens do not change the score. Without a padding
/// token, the last token counts.
fn up_to_last_token(ids: &[u32], pad_token_id: Option<u32>) -> &[u32] {
    let last = ids.iter().rposition(|id| Some(*id) != pad_token_id).unwrap_or(0);
    ids.get(..=last).unwrap_or(ids)
}

/// The decoder's own part of the card.
fn decoder_card(card: &ClassifierCard, config: &ModelDescription) -> ModelCard {
    ModelCard {
        config: config.clone(),
        tensors: card.tensors.clone(),
        files: card.files.clone(),
        eos_token_ids: Vec::new(),
        max_position_embeddings: card.max_tokens,
        num_parameters: card.num_parameters,
        chat_template: card.chat_template.clone(),
        skipped: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_is_the_rightmost_that_is_not_padding() {
        assert_eq!(up_to_last_token(&[5, 6, 3, 3], Some(3)), [5, 6]);
        assert_eq!(up_to_last_token(&[3, 5, 3, 6], Some(3)), [3, 5, 3, 6]);
        assert_eq!(up_to_last_token(&[3, 3], Some(3)), [3], "only padding: transformers takes the first");
        assert_eq!(up_to_last_token(&[5, 3], None), [5, 3]);
    }
}
