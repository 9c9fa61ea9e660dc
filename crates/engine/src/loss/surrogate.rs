//! The clipped terms of one completion: −min(ρ A, clip(ρ, 1−ε, 1+ε_high) A), where ρ is the ratio of the sequence, its
//! geometric mean over the tokens, or the ratio of each token. The clip is PPO's (Schulman et al. 2017, arXiv
//! 1707.06347), its two bounds are DAPO's (Yu et al. 2025, arXiv 2503.14476).

use super::{ImportanceWeight, LossConfig, LossRow, RowLoss};

/// Sequence ratio ρ = exp(Σ_t (new − old)), not divided by the length: the whole completion is one action. Ahmadian et
/// al. 2024 (arXiv 2402.14740); TRL's RLOOTrainer.
pub fn sequence(row: &LossRow<'_>, config: &LossConfig) -> RowLoss {
    whole(row, config, 1.0)
}

/// GSPO ratio ρ = exp((1/|o|) Σ_t (new − old)): the geometric mean of the tokens' ratios. Zheng et al. 2025, "Group
/// Sequence Policy Optimization" (arXiv 2507.18071).
pub fn gspo(row: &LossRow<'_>, config: &LossConfig) -> RowLoss {
    whole(row, config, 1.0 / row.new_logps.len().max(1) as f64)
}

/// Token ratios ρ_t = exp(new_t − old_t), each clipped separately: PPO's ratio, for losses that sum over
/// tokens. A masked completion contributes no token. Schulman et al. 2017 (arXiv 1707.06347); Shao et
/// al. 2024 (arXiv 2402.03300).
pub fn tokens(row: &LossRow<'_>, config: &LossConfig) -> RowLoss {
    let mut loss = empty(row);
    if !row.included {
        return loss;
    }
    for (token, (&new, &old)) in row.new_logps.iter().zip(row.old_logps).enumerate() {
        let ratio = (f64::from(new) - f64::from(old)).exp();
        let term = clipped(ratio, row.advantage.of_token(token), config);
        let weight = row.token_weight(token);
        loss.loss += weighted(weight, term.loss);
        loss.gradient[token] = weighted(weight, term.slope);
        loss.num_ratios += 1;
        loss.clipped_low += usize::from(term.clipped_low);
        loss.clipped_high += usize::from(term.clipped_high);
    }
    loss
}

/// Computes one ratio for the completion, exp(scale · Σ_t (new − old)). A masked completion keeps its loss, with ratio
/// 1 and no gradient.
fn whole(row: &LossRow<'_>, config: &LossConfig, scale: f64) -> RowLoss {
    let mut loss = empty(row);
    loss.ratio = (scale * (loss.new_logp - loss.old_logp)).exp();
    let term = clipped(loss.ratio, row.advantage.of_sequence(), config);
    loss.loss = weighted(row.weight.map_or(1.0, ImportanceWeight::mean), term.loss);
    loss.num_ratios = 1;
    loss.clipped_low = usize::from(term.clipped_low);
    loss.clipped_high = usize::from(term.clipped_high);
    if row.included {
        for (token, entry) in loss.gradient.iter_mut().enumerate() {
            *entry = weighted(row.token_weight(token), scale * term.slope);
        }
    }
    loss
}

/// Computes the sums of log-probs and the ratio of the sequence, with a loss of 0.
fn empty(row: &LossRow<'_>) -> RowLoss {
    let (mut old_logp, mut new_logp) = (0.0, 0.0);
    if row.included {
        for (&new, &old) in row.new_logps.iter().zip(row.old_logps) {
            old_logp += f64::from(old);
            new_logp += f64::from(new);
        }
    }
    RowLoss {
        old_logp,
        new_logp,
        ratio: (new_logp - old_logp).exp(),
        loss: 0.0,
        denominator: 1.0,
        num_ratios: 0,
        clipped_low: 0,
        clipped_high: 0,
        gradient: vec![0.0; row.new_logps.len()],
    }
}

/// The clipped loss term of one ratio.
struct Term {
    loss: f64,
    /// The derivative dloss/dlog ρ.
    slope: f64,
    clipped_low: bool,
    clipped_high: bool,
}

/// Computes −min(ρ A, clip(ρ) A) and its slope: −ρ A if the minimum is the unclipped term, else 0.
fn clipped(ratio: f64, advantage: f64, config: &LossConfig) -> Term {
    let clip = ratio.max(1.0 - config.epsilon).min(1.0 + config.epsilon_high);
    let clipped_low = ratio < 1.0 - config.epsilon && advantage < 0.0;
    let clipped_high = ratio > 1.0 + config.epsilon_high && advantage > 0.0;
    // An advantage of 0 contributes 0 even if the ratio has overflowed (0·∞ would be NaN).
    let loss = if advantage == 0.0 && !ratio.is_nan() { 0.0 } else { -smaller(ratio * advantage, clip * advantage) };
    let slope = if advantage != 0.0 && !clipped_low && !clipped_high { -advantage * ratio } else { 0.0 };
    Term { loss, slope, clipped_low, clipped_high }
}

/// Multiplies a term by its importance weight. A masked term is 0, also if it has overflowed.
fn weighted(weight: f64, term: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { weight * term }
}

/// The smaller of two numbers, or NaN if either is NaN (like torch.min; `f64::min` drops NaN).
fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) }
}
