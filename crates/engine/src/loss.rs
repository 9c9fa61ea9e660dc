//! The losses and their gradients with respect to log-probs, in f64 (rloo.md, "Loss").
//!
//! Every loss is Σ_i loss_i / denominator_i. The denominators are those of the whole optimizer step, known before its
//! micro-batches ([`Denominators`]), so that any split of the step gives the same gradient. The terms of a completion
//! are in [`surrogate`], those of the KL penalty in [`kl`].

pub mod kl;
pub mod surrogate;

use self::kl::KlPenalty;
use super::mismatch::ImportanceWeight;
use crate::spec::{KlIn, Loss, Plan};

/// One trajectory (prompt and completion) in the training forward. Only model tokens have entries: context tokens are
/// neither scored nor trained.
#[derive(Debug, Clone, Copy)]
pub struct LossRow<'a> {
    /// Log-probs of the model tokens under the trained policy.
    pub new_logps: &'a [f32],
    /// Log-probs of the model tokens under the sampling policy.
    pub old_logps: &'a [f32],
    /// Log-probs of the model tokens under the reference; needed only for a KL penalty in the loss.
    pub ref_logps: &'a [f32],
    /// False for a truncated completion that is masked: it has ratio 1 and no gradient, but still
    /// counts as a completion.
    pub included: bool,
    /// The advantage of the completion or of its tokens.
    pub advantage: RowAdvantage<'a>,
    /// The importance weight of a completion from a rollout server; `None` = 1. It multiplies the terms of the policy loss, not those
    /// of the KL penalty.
    pub weight: Option<&'a ImportanceWeight>,
}

impl LossRow<'_> {
    fn token_weight(&self, token: usize) -> f64 {
        self.weight.map_or(1.0, |weight| weight.of_token(token))
    }
}

/// One advantage for all tokens of the completion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RowAdvantage<'a> {
    /// The same advantage for every token.
    Sequence(f64),
    /// One advantage for each token; at submission, losses of whole sequences are rejected in combination with this.
    Tokens(&'a [f64]),
}

impl RowAdvantage<'_> {
    /// Whether the advantage of every token is 0.
    fn is_zero(&self) -> bool {
        match self {
            RowAdvantage::Sequence(advantage) => *advantage == 0.0,
            RowAdvantage::Tokens(advantages) => advantages.iter().all(|advantage| *advantage == 0.0),
        }
    }

    fn of_token(&self, token: usize) -> f64 {
        match self {
            RowAdvantage::Sequence(advantage) => *advantage,
            RowAdvantage::Tokens(advantages) => advantages.get(token).copied().unwrap_or(0.0),
        }
    }

    fn of_sequence(&self) -> f64 {
        match self {
            RowAdvantage::Sequence(advantage) => *advantage,
            RowAdvantage::Tokens(advantages) => super::advantage::mean(advantages).unwrap_or(0.0),
        }
    }
}

/// The settings of the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossConfig {
    /// The loss function: the kind of ratio, and the denominator of the sum.
    pub loss: Loss,
    /// Lower clip bound: 1 − epsilon.
    pub epsilon: f64,
    /// Upper clip bound: 1 + epsilon_high.
    pub epsilon_high: f64,
    /// The KL penalty, if it is part of the loss.
    pub kl: Option<KlPenalty>,
}

impl LossConfig {
    /// The loss settings of a job's plan.
    pub fn of_plan(plan: &Plan) -> Self {
        let rloo = &plan.rloo;
        let kl = KlPenalty { beta: rloo.beta, estimator: rloo.kl_estimator };
        Self {
            loss: rloo.loss,
            epsilon: rloo.epsilon,
            epsilon_high: rloo.epsilon_high,
            kl: (rloo.kl_in == KlIn::Loss && rloo.needs_reference()).then_some(kl),
        }
    }

    /// Whether a completion has no gradient, whatever its new log-probs are; false while its advantage is unknown.
    pub fn is_idle(&self, included: bool, advantage: Option<RowAdvantage<'_>>) -> bool {
        !included || (self.kl.is_none() && advantage.is_some_and(|advantage| advantage.is_zero()))
    }
}

/// The denominators of one optimizer step's sums, independent of its micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Denominators {
    /// Number of completions (B), without those of dropped groups.
    pub completions: usize,
    /// Number of trained tokens, without those of masked and dropped completions.
    pub tokens: usize,
    /// Maximum number of tokens of a completion.
    pub max_completion_length: usize,
}

impl Denominators {
    /// The denominator of a completion with `num_tokens` model tokens; never 0.
    ///
    /// | loss | denominator | source |
    /// |---|---|---|
    /// | `sequence`, `gspo` | B | Ahmadian et al. 2024 (arXiv 2402.14740); Zheng et al. 2025 (arXiv 2507.18071) |
    /// | `token_mean` | tokens of the step | Yu et al. 2025, DAPO (arXiv 2503.14476) |
    /// | `seq_mean_token_mean` | B · tokens of the completion | Shao et al. 2024, GRPO (arXiv 2402.03300) |
    /// | `dr_grpo` | B · max_completion_length | Liu et al. 2025 (arXiv 2503.20783), as TRL's constant |
    pub fn of_row(&self, loss: Loss, num_tokens: usize) -> f64 {
        let divisor = match loss {
            Loss::Sequence | Loss::Gspo => self.completions,
            Loss::TokenMean => self.tokens,
            Loss::SeqMeanTokenMean => self.completions * num_tokens,
            Loss::DrGrpo => self.completions * self.max_completion_length,
        };
        divisor.max(1) as f64
    }
}

/// The loss of one completion, with its gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct RowLoss {
    /// Sum of the old log-probs, Σ_t old.
    pub old_logp: f64,
    /// Sum of the new log-probs, Σ_t new.
    pub new_logp: f64,
    /// Ratio ρ of the whole sequence (normalized by its length for `gspo`).
    pub ratio: f64,
    /// Sum of the completion's loss terms, before it is divided by the denominator.
    pub loss: f64,
    /// The denominator of this completion's loss.
    pub denominator: f64,
    /// Number of ratios that can be clipped: one per completion, or one per token.
    pub num_ratios: usize,
    /// Number of ratios ρ < 1 − ε with A < 0; these no longer train.
    pub clipped_low: usize,
    /// Number of ratios ρ > 1 + ε_high with A > 0; these no longer train.
    pub clipped_high: usize,
    /// Gradient dL/dnew_logp of each token, after the division by the denominator.
    pub gradient: Vec<f64>,
}

impl RowLoss {
    /// The gradient dL/dnew_logp of each of the row's tokens, as input to the model's backward pass.
    pub fn token_gradient(&self) -> Vec<f32> {
        self.gradient.iter().map(|entry| *entry as f32).collect()
    }
}

/// Computes the loss of one completion and its gradient.
pub fn row_loss(row: &LossRow<'_>, config: &LossConfig, denominators: &Denominators) -> RowLoss {
    let mut loss = match config.loss {
        Loss::Sequence => surrogate::sequence(row, config),
        Loss::Gspo => surrogate::gspo(row, config),
        Loss::TokenMean | Loss::SeqMeanTokenMean | Loss::DrGrpo => surrogate::tokens(row, config),
    };
    if let Some(penalty) = config.kl.filter(|_| row.included) {
        // GSPO divides the log-ratio by the completion's length, so the KL penalty is divided by it too.
        let scale = if config.loss == Loss::Gspo { 1.0 / row.new_logps.len().max(1) as f64 } else { 1.0 };
        for (token, (&new, &reference)) in row.new_logps.iter().zip(row.ref_logps).enumerate() {
            let (value, slope) = penalty.of_token(f64::from(new), f64::from(reference));
            loss.loss += scale * value;
            loss.gradient[token] += scale * slope;
        }
    }
    loss.denominator = denominators.of_row(config.loss, row.new_logps.len());
    loss.gradient.iter_mut().for_each(|entry| *entry /= loss.denominator);
    loss
}

/// Cross-entropy of one answer: Σ_t −log p, divided by the answer tokens of the whole step. It equals the policy
/// gradient for an advantage of 1, a ratio of 1 and no clipping.
pub fn cross_entropy(logps: &[f32], tokens_of_step: usize) -> RowLoss {
    let denominator = tokens_of_step.max(1) as f64;
    let logp: f64 = logps.iter().map(|logp| f64::from(*logp)).sum();
    RowLoss {
        old_logp: logp,
        new_logp: logp,
        ratio: 1.0,
        loss: -logp,
        denominator,
        num_ratios: 0,
        clipped_low: 0,
        clipped_high: 0,
        gradient: vec![-1.0 / denominator; logps.len()],
    }
}

/// Sum of the rows' losses, each over its denominator.
pub fn total_loss(rows: &[RowLoss]) -> f64 {
    rows.iter().map(|row| row.loss / row.denominator).sum()
}

#[cfg(test)]
mod tests;
