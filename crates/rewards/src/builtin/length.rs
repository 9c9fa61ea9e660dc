//! Rewards for the length of a completion and for its repetition.

use std::collections::HashSet;

use crate::rollout::RewardSample;
use crate::spec::{LengthPlan, LengthUnit, RepetitionPlan, SoftOverlongPlan};

/// Returns the reward for a length: 1 inside the configured band, `below` or `above` outside of it, interpolated linearly over the
/// soft margin. Adds the bonus if the completion ends a sentence.
pub(super) fn length(sample: &RewardSample, plan: &LengthPlan) -> f64 {
    let count = match plan.unit {
        LengthUnit::Words => sample.completion.split_whitespace().count() as u64,
        LengthUnit::Tokens => u64::from(sample.num_tokens),
    };
    let (min, max) = (u64::from(plan.min_words), u64::from(plan.max_words));
    let toward = |outside: f64, distance: u64| {
        let part = if plan.soft_margin == 0 { 1.0 } else { (distance as f64 / f64::from(plan.soft_margin)).min(1.0) };
        1.0 + (outside - 1.0) * part
    };
    let band = if count < min {
        toward(plan.below, min - count)
    } else if count > max {
        toward(plan.above, count - max)
    } else {
        1.0
    };
    let is_sentence = sample.completion.trim_end().ends_with(['.', '!', '?']);
    band + if is_sentence { plan.sentence_bonus } else { 0.0 }
}

/// Returns the penalty for repetition: `max_penalty` times the share of n-grams that occurred earlier in the text; 0 if the text is
/// shorter than one n-gram.
pub(super) fn repetition(completion: &str, plan: &RepetitionPlan) -> f64 {
    let lower = completion.to_lowercase();
    let words: Vec<&str> = lower.split_whitespace().collect();
    let ngrams: Vec<&[&str]> = words.windows(plan.ngram_size.max(1) as usize).collect();
    if ngrams.is_empty() {
        return 0.0;
    }
    let different = ngrams.iter().collect::<HashSet<_>>().len();
    plan.max_penalty * (1.0 - different as f64 / ngrams.len() as f64)
}

/// Soft overlong punishment: Yu et al. 2025 (arXiv 2503.14476), equation 13.
pub(super) fn soft_overlong(num_tokens: u32, plan: &SoftOverlongPlan) -> f64 {
    let (tokens, max, cache) = (f64::from(num_tokens), f64::from(plan.max_tokens), f64::from(plan.cache_tokens.max(1)));
    ((max - cache - tokens) / cache).clamp(-1.0, 0.0) + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::tests::sample;

    #[test]
    fn a_soft_band_falls_on_both_sides_over_its_margin() {
        let plan = LengthPlan {
            min_words: 4,
            max_words: 6,
            sentence_bonus: 0.0,
            unit: LengthUnit::Tokens,
            soft_margin: 4,
            below: -1.0,
            above: 0.0,
        };
        let score = |num_tokens| length(&RewardSample { num_tokens, ..sample("x") }, &plan);
        let table =
            [(0, -1.0), (1, -0.5), (2, 0.0), (3, 0.5), (4, 1.0), (6, 1.0), (7, 0.75), (9, 0.25), (10, 0.0), (99, 0.0)];
        for (tokens, expected) in table {
            assert_eq!(score(tokens), expected, "{tokens}");
        }
        assert_eq!(plan.bounds(), (-1.0, 1.0));
    }

    #[test]
    fn repetition_is_the_share_of_ngrams_that_stood_before() {
        let plan = RepetitionPlan { ngram_size: 2, max_penalty: -1.0 };
        for (text, expected) in [
            ("", 0.0),
            ("one", 0.0),
            ("one two three", 0.0),
            // The 2-grams of "a b A b" are "a b", "b a", "a b"; one of the three occurred before.
            ("a b A b", -1.0 / 3.0),
            ("no no no no no", -0.75),
        ] {
            assert!((repetition(text, &plan) - expected).abs() < 1e-12, "{text}: {}", repetition(text, &plan));
        }
    }

    #[test]
    fn overlong_completions_are_punished_softly_then_in_full() {
        let plan = SoftOverlongPlan { max_tokens: 20, cache_tokens: 4 };
        for (tokens, expected) in [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (500, -1.0)] {
            assert_eq!(soft_overlong(tokens, &plan), expected, "{tokens}");
        }
    }
}
