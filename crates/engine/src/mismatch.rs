//! Completions that rollout servers sampled: how far the servers' log-probs are from those of the trained model, and the importance
//! weights that correct for it.
//!
//! d_t = old log-prob of the trained model − log-prob that the server recorded, per model token. A server that computes exactly what
//! the trained model computes has d = 0, weights of exactly 1, and no effect on the gradient.

use super::error::EngineError;
use crate::event::Metrics;
use crate::spec::{CorrectionMode, CorrectionPlan};

/// Mismatch in nats per token at which a job without a correction fails.
const MAX_UNCORRECTED: f64 = 1e-3;
/// Mismatch in nats per token at which any job fails.
const MAX_CORRECTED: f64 = 0.1;

/// The importance weight of a completion's loss terms, constant for the gradient.
#[derive(Debug, Clone, PartialEq)]
pub enum ImportanceWeight {
    /// The same weight for all tokens of the completion.
    Sequence(f64),
    /// One weight per token of the completion.
    Tokens(Vec<f64>),
}

impl ImportanceWeight {
    /// The weight of completions that the trained model sampled itself.
    pub const ONE: ImportanceWeight = ImportanceWeight::Sequence(1.0);

    /// Computes the weight of a completion from the log-probs of its tokens under the trained model and under the server, in nats.
    /// TRL's `vllm_importance_sampling_mode` (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    /// training", for truncation): the ratio of the whole sequence, or of each token; outside of the limits it is cut, or 0.
    pub fn of(correction: &CorrectionPlan, old_logps: &[f32], sampled_logps: &[f32]) -> Self {
        use CorrectionMode::{None, SequenceMask, SequenceTruncate, TokenMask, TokenTruncate};
        let differences = differences(old_logps, sampled_logps);
        match correction.mode {
            None => Self::ONE,
            SequenceMask | SequenceTruncate => Self::Sequence(limited(correction, differences.sum::<f64>().exp())),
            TokenMask | TokenTruncate => {
                Self::Tokens(differences.map(|difference| limited(correction, difference.exp())).collect())
            }
        }
    }

    /// The weight of one token of the completion.
    pub fn of_token(&self, token: usize) -> f64 {
        match self {
            Self::Sequence(weight) => *weight,
            Self::Tokens(weights) => weights.get(token).copied().unwrap_or(1.0),
        }
    }

    /// The mean weight of the completion's tokens.
    pub fn mean(&self) -> f64 {
        match self {
            Self::Sequence(weight) => *weight,
            Self::Tokens(weights) => super::advantage::mean(weights).unwrap_or(1.0),
        }
    }
}

/// Cuts a weight to the limits of the correction, or replaces it by 0 outside of them.
fn limited(correction: &CorrectionPlan, weight: f64) -> f64 {
    let CorrectionPlan { mode, max, min } = *correction;
    let min = min.unwrap_or(0.0);
    match mode {
        CorrectionMode::SequenceMask | CorrectionMode::TokenMask if weight < min || weight > max => 0.0,
        CorrectionMode::SequenceTruncate | CorrectionMode::TokenTruncate => weight.clamp(min, max),
        _ => weight,
    }
}

/// Iterates over d_t of a completion's tokens. A server's log-prob that is NaN counts as equal, as in TRL.
fn differences<'a>(old_logps: &'a [f32], sampled_logps: &'a [f32]) -> impl Iterator<Item = f64> + 'a {
    old_logps.iter().zip(sampled_logps).map(|(&old, &sampled)| {
        let difference = f64::from(old) - f64::from(sampled);
        if difference.is_nan() { 0.0 } else { difference }
    })
}

/// The difference between servers and trained model over one block.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// Mean of |d_t| over all tokens.
    pub logp_difference_mean: f64,
    /// Maximum of |d_t| over all tokens.
    pub logp_difference_max: f64,
    /// Smallest importance ratio before the limits: of a token in the token modes, else of a completion.
    pub ratio_min: f64,
    /// Mean importance ratio before the limits.
    pub ratio_mean: f64,
    /// Largest importance ratio before the limits.
    pub ratio_max: f64,
    /// Mean over all tokens of exp(d) − 1 − d, an estimate of KL(server ‖ trained model) that is never negative (k3).
    pub kl: f64,
    /// Effective share of the completions: 1 / mean((w / mean w)²) of their ratios, from above 0 to 1.
    pub ess: f64,
    /// Share of the completions (in the token modes: of the tokens) whose weight is 0.
    pub masked_fraction: f64,
}

impl Mismatch {
    /// Measures pairs of (log-probs of the trained model, log-probs of the server), one per completion.
    pub fn of<'a>(correction: &CorrectionPlan, rows: impl Iterator<Item = (&'a [f32], &'a [f32])>) -> Self {
        let by_token = matches!(correction.mode, CorrectionMode::TokenMask | CorrectionMode::TokenTruncate);
        let (mut sum, mut largest, mut kl, mut tokens, mut masked) = (0.0, 0.0f64, 0.0, 0u64, 0u64);
        let (mut of_rows, mut of_tokens) = (Vec::new(), Vec::new());
        for (old_logps, sampled_logps) in rows {
            let mut sequence = 0.0;
            for difference in differences(old_logps, sampled_logps) {
                sequence += difference;
                sum += difference.abs();
                largest = largest.max(difference.abs());
                // exp_m1 keeps the digits of small differences, of which exp(d) − 1 − d is the square.
                kl += (difference.exp_m1() - difference).max(0.0);
                of_tokens.push(difference.exp());
                tokens += 1;
            }
            of_rows.push(sequence.exp());
            masked += match ImportanceWeight::of(correction, old_logps, sampled_logps) {
                ImportanceWeight::Sequence(weight) => u64::from(weight == 0.0),
                ImportanceWeight::Tokens(weights) => weights.iter().filter(|weight| **weight == 0.0).count() as u64,
            };
        }
        let ratios = if by_token { &of_tokens } else { &of_rows };
        let mean = |values: &[f64]| super::advantage::mean(values).unwrap_or(1.0);
        let mean_of_rows = mean(&of_rows);
        let squares: Vec<f64> = of_rows.iter().map(|ratio| (ratio / mean_of_rows).powi(2)).collect();
        Self {
            logp_difference_mean: sum / tokens.max(1) as f64,
            logp_difference_max: largest,
            ratio_min: ratios.iter().copied().reduce(f64::min).unwrap_or(1.0),
            ratio_mean: mean(ratios),
            ratio_max: ratios.iter().copied().reduce(f64::max).unwrap_or(1.0),
            kl: kl / tokens.max(1) as f64,
            ess: 1.0 / mean(&squares),
            masked_fraction: masked as f64 / ratios.len().max(1) as f64,
        }
    }

    /// The metrics of a step that trains a new block.
    pub fn metrics(&self) -> Metrics {
        let named = [
            ("sampling/logp_difference/mean", self.logp_difference_mean),
            ("sampling/logp_difference/max", self.logp_difference_max),
            ("sampling/importance_ratio/min", self.ratio_min),
            ("sampling/importance_ratio/mean", self.ratio_mean),
            ("sampling/importance_ratio/max", self.ratio_max),
            ("sampling/mismatch_kl", self.kl),
            ("sampling/ess", self.ess),
            ("sampling/masked_fraction", self.masked_fraction),
        ];
        let finite = |value: f64| Some(value).filter(|value| value.is_finite());
        named.into_iter().map(|(name, value)| (name.to_owned(), finite(value))).collect()
    }

    /// Checks the mismatch of the block that a step trained.
    ///
    /// # Errors
    /// Fails if the mismatch is too large for the job's correction.
    pub(super) fn check(&self, correction: &CorrectionPlan, step: u64) -> Result<(), EngineError> {
        let limit = match correction.mode {
            CorrectionMode::None => MAX_UNCORRECTED,
            _ => MAX_CORRECTED,
        };
        // A mismatch that has overflowed is above every limit.
        let is_small = if correction.mode == CorrectionMode::None { self.kl < limit } else { self.kl <= limit };
        if is_small { Ok(()) } else { Err(EngineError::RolloutMismatch { step, kl: self.kl, limit }) }
    }
}
