//! The clipped sequence-level loss and its gradient with respect to log-probs, in f64 (rloo.md, "Loss").
//!
//! L = (1/B) Σ_i −min(ρ_i A_i, clip(ρ_i, 1−ε, 1+ε_high) A_i) with ρ_i = exp(Σ_t (new_it − old_it)).
//! B is the number of completions of the optimizer step, whatever the micro-batches: one denominator a step.

/// One completion in the training forward.
#[derive(Debug, Clone, Copy)]
pub struct LossRow<'a> {
    /// Per-token log-probs of the policy that trains.
    pub new_logps: &'a [f32],
    /// Per-token log-probs of the policy that sampled.
    pub old_logps: &'a [f32],
    /// False for a truncated completion that is masked: ratio 1, no gradient, still in the denominator.
    pub included: bool,
    /// Its advantage.
    pub advantage: f64,
}

/// The clip.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossConfig {
    /// Lower: 1 − epsilon.
    pub epsilon: f64,
    /// Upper: 1 + epsilon_high.
    pub epsilon_high: f64,
}

/// The loss of one completion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowLoss {
    /// Σ_t old.
    pub old_logp: f64,
    /// Σ_t new.
    pub new_logp: f64,
    /// ρ.
    pub ratio: f64,
    /// −min(ρ A, clip(ρ) A), not yet divided.
    pub loss: f64,
    /// ρ < 1 − ε and A < 0: the row trains no more.
    pub clipped_low: bool,
    /// ρ > 1 + ε_high and A > 0.
    pub clipped_high: bool,
    /// dL/dnew_logp, the same for every token of the row, divided by the step's denominator.
    pub gradient: f64,
}

impl RowLoss {
    /// dL/dnew_logp for each of the row's tokens.
    pub fn token_gradient(&self, num_tokens: usize) -> Vec<f32> {
        vec![self.gradient as f32; num_tokens]
    }
}

/// The loss of one completion; `denominator` is the number of completions of the optimizer step.
pub fn row_loss(row: &LossRow<'_>, config: &LossConfig, denominator: usize) -> RowLoss {
    let LossRow { new_logps, old_logps, included, advantage } = *row;
    let (mut old_logp, mut new_logp) = (0.0, 0.0);
    if included {
        for (&new, &old) in new_logps.iter().zip(old_logps) {
            old_logp += f64::from(old);
            new_logp += f64::from(new);
        }
    }
    let ratio = (new_logp - old_logp).exp();
    let clipped = ratio.max(1.0 - config.epsilon).min(1.0 + config.epsilon_high);
    let clipped_low = ratio < 1.0 - config.epsilon && advantage < 0.0;
    let clipped_high = ratio > 1.0 + config.epsilon_high && advantage > 0.0;
    // An advantage of 0 takes no part, even where the ratio has overflowed (0·∞ is NaN).
    let loss = if advantage == 0.0 && !ratio.is_nan() { 0.0 } else { -smaller(ratio * advantage, clipped * advantage) };
    let trains = included && advantage != 0.0 && !clipped_low && !clipped_high;
    let gradient = if trains { -advantage * ratio / denominator as f64 } else { 0.0 };
    RowLoss { old_logp, new_logp, ratio, loss, clipped_low, clipped_high, gradient }
}

/// The minimum, NaN if either is (as torch.min; `f64::min` drops NaN).
fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) }
}

/// Σ of the rows' losses over the step's denominator.
pub fn total_loss(rows: &[RowLoss], denominator: usize) -> f64 {
    rows.iter().map(|row| row.loss).sum::<f64>() / denominator as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: LossConfig = LossConfig { epsilon: 0.2, epsilon_high: 0.28 };

    fn loss(new: f32, advantage: f64) -> RowLoss {
        row_loss(&LossRow { new_logps: &[new], old_logps: &[-1.0], included: true, advantage }, &CONFIG, 4)
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss_on_every_branch() {
        for advantage in [1.5, -0.75, 0.0] {
            for new in [-1.5f32, -1.1, -1.0, -0.9, -0.5] {
                let h = 1.0f32 / 1024.0;
                let (above, below) = (loss(new + h, advantage), loss(new - h, advantage));
                let slope = (above.loss - below.loss) / (2.0 * f64::from(h)) / 4.0;
                let gradient = loss(new, advantage).gradient;
                assert!((gradient - slope).abs() < 1e-6, "new {new} advantage {advantage}: {gradient} {slope}");
            }
        }
    }

    #[test]
    fn a_masked_row_keeps_its_loss_and_has_no_gradient() {
        let row = LossRow { new_logps: &[-5.0], old_logps: &[-1.0], included: false, advantage: 2.0 };
        let result = row_loss(&row, &CONFIG, 4);
        assert_eq!((result.ratio, result.loss, result.gradient), (1.0, -2.0, 0.0));
    }

    #[test]
    fn a_nan_log_prob_reaches_the_loss() {
        assert!(loss(f32::NAN, 1.0).loss.is_nan());
        assert!(loss(f32::NAN, 0.0).loss.is_nan());
        assert!(loss(f32::NAN, 1.0).gradient.is_nan());
    }
}
