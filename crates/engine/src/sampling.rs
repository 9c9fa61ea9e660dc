//! Samples a token from the logits of one position.
//!
//! The order of operations is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, then one
//! sample by inversion of the cumulative distribution. Only the temperature affects log-probs (rloo.md).

use std::collections::HashSet;

pub use super::kernels::head::Filters;
use crate::spec::{EvalPlan, SamplingPlan};

/// The sampling settings for one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// Divisor of the logits; 0 = greedy.
    pub temperature: f64,
    /// Keep the most probable tokens whose total probability reaches this value; 1 = off.
    pub top_p: f64,
    /// Keep the K most probable tokens; 0 = off.
    pub top_k: u32,
    /// Drop tokens below min_p times the probability of the most probable one; 0 = off.
    pub min_p: f64,
    /// Repetition penalty: divides positive and multiplies negative logits of tokens seen in prompt or
    /// completion; 1 = off.
    pub repetition_penalty: f64,
}

impl Sampler {
    /// A sampler that uses the unmodified distribution of the model.
    pub const PLAIN: Self = Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 };

    /// The sampler of a job's plan, with another temperature.
    pub fn new(plan: &SamplingPlan, temperature: f64) -> Self {
        Self {
            temperature,
            top_p: plan.top_p,
            top_k: plan.top_k,
            min_p: plan.min_p,
            repetition_penalty: plan.repetition_penalty,
        }
    }

    /// The evaluation's sampler; settings it does not specify are those of training.
    pub fn for_evaluation(plan: &SamplingPlan, eval: &EvalPlan) -> Self {
        Self::new(&eval.sampling(plan), eval.temperature)
    }

    /// The filters top-k, top-p and min-p; off for greedy sampling, which takes the largest logit anyway.
    pub fn filters(&self) -> Filters {
        let Self { temperature, top_p, top_k, min_p, .. } = *self;
        if temperature == 0.0 { Filters::OFF } else { Filters { top_k, top_p, min_p } }
    }

    /// Whether the head can sample by itself ([`super::model::Pick`]), because earlier tokens do not change the logits.
    pub fn is_memoryless(&self) -> bool {
        self.repetition_penalty == 1.0
    }

    /// Whether tokens are sampled from the whole distribution, or greedily from unchanged logits. Then a token's
    /// log-prob is its true probability.
    pub fn is_unfiltered(&self) -> bool {
        self.is_memoryless() && self.filters().are_off()
    }

    /// Samples one token. `logits` (V) are changed in place; `uniform` is in [0, 1); `seen` holds the tokens of prompt
    /// and completion (only read if the repetition penalty is on). Ties go to the lowest id.
    pub fn choose(&self, logits: &mut [f32], seen: &HashSet<u32>, uniform: f64) -> u32 {
        self.penalize(logits, seen);
        self.choose_penalized(logits, uniform)
    }

    /// Samples one token like [`Sampler::choose`] from logits whose penalties were applied already.
    pub fn choose_penalized(&self, logits: &[f32], uniform: f64) -> u32 {
        sample_filtered(&self.filters(), logits, self.temperature, uniform)
    }

    /// Applies the repetition penalty to the logits (V) of the tokens in `seen`.
    pub fn penalize(&self, logits: &mut [f32], seen: &HashSet<u32>) {
        if self.repetition_penalty != 1.0 {
            for &token in seen {
                if let Some(logit) = logits.get_mut(token as usize) {
                    let penalty = self.repetition_penalty as f32;
                    *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                }
            }
        }
    }
}

/// Samples a token like [`sample_token`], among those that pass the filters.
pub fn sample_filtered(filters: &Filters, logits: &[f32], temperature: f64, uniform: f64) -> u32 {
    if temperature == 0.0 || filters.are_off() {
        return sample_token(logits, temperature, uniform);
    }
    let weight = weight(logits, temperature);
    // NaN has weight 0 and is never sampled.
    let weights: Vec<f64> = logits.iter().map(|&logit| weight(logit).max(0.0)).collect();
    let kept = kept_tokens(filters, &weights);
    let index = invert(kept.iter().map(|&token| weights[token as usize]), uniform);
    kept[index as usize]
}

/// The tokens that pass top-k, top-p and min-p, ascending; never empty.
fn kept_tokens(filters: &Filters, weights: &[f64]) -> Vec<u32> {
    let weight = |token: u32| weights[token as usize];
    let by_weight = |a: &u32, b: &u32| weight(*b).total_cmp(&weight(*a)).then(a.cmp(b));
    let mut kept: Vec<u32> = (0..weights.len() as u32).collect();
    if filters.top_k > 0 && (filters.top_k as usize) < kept.len() {
        // Keep all tokens that are as probable as the K-th one, as transformers does.
        let (_, last, _) = kept.select_nth_unstable_by(filters.top_k as usize - 1, by_weight);
        let last = weight(*last);
        kept.retain(|&token| weight(token).total_cmp(&last).is_ge());
    }
    if filters.top_p < 1.0 {
        kept.sort_unstable_by(by_weight);
        let total: f64 = kept.iter().map(|&token| weight(token)).sum();
        let mut mass = 0.0;
        let reached = kept.iter().position(|&token| {
            mass += weight(token);
            mass >= filters.top_p * total
        });
        kept.truncate(reached.map_or(kept.len(), |rank| rank + 1));
    }
    if filters.min_p > 0.0 {
        let floor = filters.min_p * kept.iter().map(|&token| weight(token)).fold(0.0, f64::max);
        kept.retain(|&token| weight(token) >= floor);
    }
    kept.sort_unstable();
    kept
}

/// Samples a token from the softmax of `logits` (V) / `temperature`, by inversion at `uniform` in [0, 1); the first of
/// the largest if `temperature` is 0.
pub fn sample_token(logits: &[f32], temperature: f64, uniform: f64) -> u32 {
    if temperature == 0.0 {
        return argmax(logits);
    }
    let weight = weight(logits, temperature);
    invert(logits.iter().map(|&logit| weight(logit)), uniform)
}

/// Returns a function that maps a logit to its unnormalized softmax probability.
fn weight(logits: &[f32], temperature: f64) -> impl Fn(f32) -> f64 + Copy + use<> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    move |logit| (f64::from(logit - max) / temperature).exp()
}

/// Index of the first of the largest logits; NaN never wins.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (token, logit);
        }
    }
    best.0 as u32
}

/// The first index whose cumulative weight exceeds `uniform` times the total; added in index order, in f64.
fn invert(weights: impl Iterator<Item = f64> + Clone, uniform: f64) -> u32 {
    let total: f64 = weights.clone().sum();
    let target = uniform * total;
    let mut sum = 0.0;
    let mut last = 0;
    for (index, weight) in weights.enumerate() {
        if weight > 0.0 {
            last = index;
        }
        sum += weight;
        if sum > target {
            return index as u32;
        }
    }
    last as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampler = Sampler::PLAIN;

    fn tokens(sampler: Sampler, logits: &[f32]) -> Vec<u32> {
        let mut seen: Vec<u32> =
            (0..1000).map(|i| sampler.choose(&mut logits.to_vec(), &HashSet::new(), f64::from(i) / 1000.0)).collect();
        seen.dedup();
        seen
    }

    #[test]
    fn frequencies_follow_the_softmax_at_the_temperature() {
        let logits = [1.0f32.ln(), 2.0f32.ln(), 5.0f32.ln()];
        for (temperature, expected) in [(1.0, [0.125, 0.25, 0.625]), (0.5, [1.0 / 30.0, 4.0 / 30.0, 25.0 / 30.0])] {
            let sampler = Sampler { temperature, ..PLAIN };
            let mut counts = [0.0f64; 3];
            for i in 0..10_000 {
                let token = sampler.choose(&mut logits.to_vec(), &HashSet::new(), f64::from(i) / 10_000.0);
                counts[token as usize] += 1e-4;
            }
            for (count, expected) in counts.iter().zip(expected) {
                assert!((count - expected).abs() < 1e-3, "{counts:?}");
            }
        }
    }

    #[test]
    fn top_k_keeps_all_that_are_as_probable_as_the_last() {
        let logits = [1.0, 0.5, 2.0, 0.5, 0.5, 0.1];
        assert_eq!(tokens(Sampler { top_k: 3, ..PLAIN }, &logits), [0, 1, 2, 3, 4]);
        assert_eq!(tokens(Sampler { top_k: 2, ..PLAIN }, &logits), [0, 2]);
        assert_eq!(tokens(Sampler { top_k: 1, ..PLAIN }, &[0.7; 5]), [0, 1, 2, 3, 4]);
        assert_eq!(tokens(Sampler { top_k: 9, ..PLAIN }, &[0.7; 5]), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let sampler = Sampler { temperature: 0.0, ..PLAIN };
        assert_eq!(sampler.choose(&mut [0.0, 3.0, 3.0, 1.0], &HashSet::new(), 0.9), 1);
    }

    #[test]
    fn filters_keep_what_they_name() {
        let logits: Vec<f32> = [0.1f32, 0.5, 0.15, 0.25].iter().map(|p| p.ln()).collect();
        assert_eq!(tokens(Sampler { top_k: 2, ..PLAIN }, &logits), [1, 3]);
        assert_eq!(tokens(Sampler { top_p: 0.7, ..PLAIN }, &logits), [1, 3]);
        assert_eq!(tokens(Sampler { top_p: 0.76, ..PLAIN }, &logits), [1, 2, 3]);
        assert_eq!(tokens(Sampler { min_p: 0.4, ..PLAIN }, &logits), [1, 3]);
        assert_eq!(tokens(Sampler { top_p: 1e-9, ..PLAIN }, &logits), [1]);
    }

    #[test]
    fn filters_leave_a_token_also_where_logits_are_no_numbers() {
        for top_k in [1, 3] {
            let sampler = Sampler { top_k, top_p: 0.9, min_p: 0.1, ..PLAIN };
            assert_eq!(tokens(sampler, &[f32::NAN, f32::NEG_INFINITY, 1.0, 1.0]), [2, 3]);
            assert_eq!(tokens(sampler, &[f32::NAN; 4]), [0]);
        }
    }

    #[test]
    fn the_repetition_penalty_divides_positive_and_multiplies_negative_logits() {
        let sampler = Sampler { temperature: 0.0, repetition_penalty: 2.0, ..PLAIN };
        let mut logits = [1.5, 2.0, -0.5];
        assert_eq!(sampler.choose(&mut logits, &HashSet::from([1, 2]), 0.0), 0);
        assert_eq!(logits, [1.5, 1.0, -1.0]);
    }
}
