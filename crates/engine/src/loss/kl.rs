//! The KL penalty as a term of the loss, token by token (rloo.md, "Loss": `kl_in: "loss"`).

use crate::spec::KlEstimator;

/// The KL penalty beta · KL(policy ‖ reference), estimated from the sampled tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlPenalty {
    /// Weight beta of the KL penalty.
    pub beta: f64,
    /// The estimator of the KL penalty: k3 or k2. (k1 is rejected at submission: its expected
    /// gradient is zero on-policy.)
    pub estimator: KlEstimator,
}

impl KlPenalty {
    /// The KL penalty of one token and its derivative with respect to the new log-prob.
    pub fn of_token(&self, new: f64, reference: f64) -> (f64, f64) {
        let (value, slope) = match self.estimator {
            KlEstimator::K1 => k1(new, reference),
            KlEstimator::K2 => k2(new, reference),
            KlEstimator::K3 => k3(new, reference),
        };
        (self.beta * value, self.beta * slope)
    }
}

/// The estimator k1 = new − ref: unbiased, may be negative. J. Schulman,
/// "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
fn k1(new: f64, reference: f64) -> (f64, f64) {
    (new - reference, 1.0)
}

/// The estimator k2 = (new − ref)²/2: never negative, low variance, biased. Same source. On-policy, its gradient is
/// that of the KL.
fn k2(new: f64, reference: f64) -> (f64, f64) {
    let difference = new - reference;
    (difference * difference / 2.0, difference)
}

/// The estimator k3 = exp(ref − new) − (ref − new) − 1: never negative, unbiased. Same source; used by GRPO
/// (arXiv 2402.03300, equation 4).
fn k3(new: f64, reference: f64) -> (f64, f64) {
    let difference = reference - new;
    (difference.exp_m1() - difference, -difference.exp_m1())
}
