//! The choice of a token from its logits, with the settings of a served request, and the log-probs that are reported.

use std::collections::{BTreeMap, HashSet};

use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::answer::Answer;
use super::{Sampler, Selected};
use crate::model::Logits;
use rlood_types::serving::{ServedRequest, TokenLogprobs};

/// The settings of a request that concern the choice of tokens.
#[derive(Debug)]
pub struct Settings {
    sampler: Sampler,
    presence_penalty: f32,
    frequency_penalty: f32,
    logit_bias: Vec<(u32, f32)>,
    logprobs: Option<usize>,
}

impl Settings {
    /// The settings of a request.
    pub fn of(request: &ServedRequest) -> Settings {
        Settings {
            sampler: Sampler {
                temperature: request.temperature,
                top_p: request.top_p,
                top_k: request.top_k,
                min_p: request.min_p,
                repetition_penalty: request.repetition_penalty,
            },
            presence_penalty: request.presence_penalty as f32,
            frequency_penalty: request.frequency_penalty as f32,
            logit_bias: request.logit_bias.clone(),
            logprobs: request.logprobs.map(|count| count as usize),
        }
    }

    /// Whether tokens are chosen from the unchanged distribution at a temperature, and no log-probs are reported.
    pub fn is_plain(&self) -> bool {
        self.sampler.is_unfiltered() && self.logprobs.is_none() && !self.changes_logits()
    }

    /// Whether logits are changed before a token is chosen.
    fn changes_logits(&self) -> bool {
        !self.sampler.is_memoryless()
            || !self.logit_bias.is_empty()
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Chooses a token from logits (V), which are changed. The order is vLLM's: bias, repetition penalty, frequency and presence
    /// penalty, temperature, filters. The log-probs are those before all of these.
    pub fn choose(&self, logits: &mut [f32], prompt: &[u32], answer: &Answer, uniform: f64) -> Selected {
        let reported = self.logprobs.map(|top| {
            let logprobs = Logprobs::new(logits);
            (logprobs, logprobs.top(logits, top), self.changes_logits().then(|| logits.to_vec()))
        });
        for (token, bias) in &self.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        let seen: HashSet<u32> = match self.sampler.is_memoryless() {
            true => HashSet::new(),
            false => prompt.iter().chain(answer.ids()).copied().collect(),
        };
        self.sampler.penalize(logits, &seen);
        if self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 {
            let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
            answer.ids().iter().for_each(|token| *counts.entry(*token).or_default() += 1);
            for (token, count) in counts {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit -= self.frequency_penalty * count as f32 + self.presence_penalty;
                }
            }
        }
        let token = self.sampler.choose_penalized(logits, uniform);
        let logprobs = reported.map(|(logprobs, top, raw)| {
            let raw = raw.as_deref().unwrap_or(logits);
            let logit = raw.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
            TokenLogprobs { logprob: logprobs.of(logit), top }
        });
        Selected { token, logprobs }
    }
}

/// The normalizer of a distribution, computed as in `ops::slices::token_score`.
#[derive(Debug, Clone, Copy)]
pub struct Logprobs {
    max: f32,
    log_sum: f64,
}

impl Logprobs {
    /// Sums the softmax of logits (V).
    pub fn new(logits: &[f32]) -> Logprobs {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
        Logprobs { max, log_sum: sum.ln() }
    }

    /// The log-prob of a token with this logit, in nats.
    pub fn of(&self, logit: f32) -> f32 {
        (f64::from(logit - self.max) - self.log_sum) as f32
    }

    /// The tokens with the largest logits and their log-probs, in descending order; of equal ones the lowest ids.
    pub fn top(&self, logits: &[f32], count: usize) -> Vec<(u32, f32)> {
        let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
        for (token, logit) in logits.iter().enumerate() {
            if top.len() == count && top.last().is_none_or(|(_, least)| logit <= least) {
                continue;
            }
            let place = top.partition_point(|(_, other)| other >= logit);
            top.insert(place, (token as u32, *logit));
            top.truncate(count);
        }
        top.into_iter().map(|(token, logit)| (token, self.of(logit))).collect()
    }
}

/// The log-probs of a prompt's tokens; each of the rows of logits is of the position before the token.
pub fn prompt_logprobs<'l>(rows: impl Iterator<Item = &'l [f32]>, tokens: &[u32], top: usize) -> Vec<TokenLogprobs> {
    let of_token = |(logits, token): (&[f32], &u32)| {
        let logprobs = Logprobs::new(logits);
        let logprob = logprobs.of(logits.get(*token as usize).copied().unwrap_or(f32::NEG_INFINITY));
        TokenLogprobs { logprob, top: logprobs.top(logits, top) }
    };
    rows.zip(tokens).map(of_token).collect()
}

/// Runs `f(row, logits)` for each row, with several threads.
pub fn in_parallel<T: Send>(logits: &mut Logits, f: impl Fn(usize, &mut [f32]) -> T + Sync + Send) -> Vec<T> {
    let vocab_size = logits.vocab_size.max(1);
    logits.values.par_chunks_exact_mut(vocab_size).enumerate().map(|(row, logits)| f(row, logits)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::slices::token_score;

    #[test]
    fn reported_log_probs_are_those_of_training() {
        let logits: Vec<f32> = (0..50).map(|i| ((i * 37 % 50) as f32).sin() * 4.0).collect();
        let logprobs = Logprobs::new(&logits);
        for token in 0..50 {
            assert_eq!(logprobs.of(logits[token]), token_score(&logits, token, 1.0).logp);
        }
        let top = logprobs.top(&logits, 50);
        assert_eq!(top.len(), 50);
        assert!(top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        assert_eq!(logprobs.top(&logits, 3), top[..3]);
        assert_eq!(logprobs.top(&logits, 0), []);
    }

    #[test]
    fn of_equal_logits_the_lowest_ids_are_reported() {
        let logits = [1.0, 2.0, 2.0, 2.0];
        let ids: Vec<u32> = Logprobs::new(&logits).top(&logits, 2).iter().map(|(token, _)| *token).collect();
        assert_eq!(ids, [1, 2]);
    }
}
