//! Compares the sampler's log-probs with those of the training forward pass over the same tokens; 0 if both compute identically.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use super::decode::policy;
use super::{BenchError, Setting};
use crate::engine::error::EngineError;
use crate::engine::generate::{GeneratePrompt, GenerateRequest, generate};
use crate::engine::model::{Adapter, Trajectory};
use crate::engine::random::{Key, Stream};
use crate::engine::sampling::Sampler;
use crate::engine::text::Text;

/// Differences over all completion tokens of one step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MismatchFigures {
    /// Whether the backend guarantees that sampling and training compute identical log-probs.
    pub samples_exactly: bool,
    /// Number of compared tokens.
    pub tokens: usize,
    /// Number of tokens whose log-probs differ in any bit.
    pub unequal_tokens: usize,
    /// Mean of |sampled − trained|, in nats.
    pub mean: f64,
    /// Largest |sampled − trained|, in nats.
    pub max: f64,
    /// Mean of exp(d) − 1 − d with d = sampled − trained: the k3 estimate of KL(trained ‖ sampled), nats a token
    /// (Schulman 2020, "Approximating KL Divergence").
    pub k3: f64,
}

/// Samples one step's completions and scores them.
///
/// # Errors
/// Fails when the engine fails, or records no log-probs.
pub fn measure(setting: &Setting<'_>) -> Result<MismatchFigures, BenchError> {
    let policy = policy(setting)?;
    let text = Text::load(&setting.model_dir).map_err(EngineError::from)?;
    let args = setting.args;
    let (prompts, generations) = (args.prompts as usize, args.generations as usize);
    let ids = setting.prompts(prompts);
    let of_request: Vec<GeneratePrompt<'_>> =
        ids.iter().zip(0..).map(|(ids, row)| GeneratePrompt { row, ids, given: &[] }).collect();
    let request = GenerateRequest {
        prompts: &of_request,
        num_generations: NonZeroUsize::new(generations).unwrap_or(NonZeroUsize::MIN),
        sampler: Sampler { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 },
        max_completion_length: args.completion as usize,
        stop: &[],
        key: Key::new(0, Stream::Train),
        eos_token_ids: &[],
        adapter: Adapter::On,
        max_rows: prompts * generations,
    };
    let sampled = generate(&policy, &text, &request, &|| false)?.unwrap_or_default();
    let mut differences = Differences::default();
    for (prompt, group) in ids.iter().zip(&sampled) {
        let rows: Vec<Trajectory<'_>> = group.iter().map(|row| Trajectory::new(prompt, &row.segments)).collect();
        for (row, score) in group.iter().zip(policy.score(&rows, 1.0, Adapter::On)?) {
            let recorded = row.segments.logps();
            let recorded = recorded.ok_or_else(|| {
                BenchError::Job("sampling did not record the log-probabilities of the sampled tokens".to_owned())
            })?;
            recorded.iter().zip(&score.logps).for_each(|(sampled, trained)| differences.add(*sampled, *trained));
        }
    }
    Ok(differences.figures(policy.samples_exactly()))
}

#[derive(Default)]
struct Differences {
    tokens: usize,
    unequal: usize,
    sum: f64,
    max: f64,
    k3: f64,
}

impl Differences {
    fn add(&mut self, sampled: f32, trained: f32) {
        let difference = f64::from(sampled) - f64::from(trained);
        self.tokens += 1;
        self.unequal += usize::from(sampled.to_bits() != trained.to_bits());
        self.sum += difference.abs();
        // NaN counts as the largest difference, so `max` must not drop it.
        self.max = if self.max.is_nan() || difference.abs() <= self.max { self.max } else { difference.abs() };
        self.k3 += difference.exp_m1() - difference;
    }

    fn figures(&self, samples_exactly: bool) -> MismatchFigures {
        let tokens = self.tokens.max(1) as f64;
        MismatchFigures {
            samples_exactly,
            tokens: self.tokens,
            unequal_tokens: self.unequal,
            mean: self.sum / tokens,
            max: self.max,
            k3: self.k3 / tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_bits_differ_by_nothing_and_others_by_their_distance() {
        let mut differences = Differences::default();
        differences.add(-1.5, -1.5);
        differences.add(-1.0, -1.25);
        let figures = differences.figures(true);
        assert_eq!((figures.tokens, figures.unequal_tokens), (2, 1));
        assert_eq!((figures.mean, figures.max), (0.125, 0.25));
        assert!((figures.k3 - (0.25_f64.exp() - 1.25) / 2.0).abs() < 1e-12, "{figures:?}");
    }

    #[test]
    fn a_nan_is_the_largest_difference() {
        let mut differences = Differences::default();
        differences.add(f32::NAN, -1.0);
        differences.add(-1.0, -1.0);
        assert!(differences.figures(false).max.is_nan());
    }
}
