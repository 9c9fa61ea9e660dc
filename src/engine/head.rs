//! From logits to log-probs and entropies: temperature, full-vocabulary log-softmax, one gather (rloo.md,
//! "Log-probabilities"). Top-k, top-p, min-p and the repetition penalty are no part of it.

use candle_core::{D, Result, Tensor};

/// Log-prob of each row's token and entropy of each row's distribution, in nats, f32.
///
/// `logits` (N, V), `ids` (N) u32; returns (N), (N). Differentiable in `logits`; the entropy is cut from the graph, since
/// nothing trains on it.
pub fn log_probs(logits: &Tensor, ids: &Tensor, temperature: f64) -> Result<(Tensor, Tensor)> {
    let scaled = if temperature == 1.0 { logits.clone() } else { (logits / temperature)? };
    let max = scaled.detach().max_keepdim(D::Minus1)?; // (N, 1)
    let shifted = scaled.broadcast_sub(&max)?; // (N, V)
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?; // (N, 1)
    let chosen = shifted.gather(&ids.unsqueeze(D::Minus1)?, D::Minus1)?; // (N, 1)
    let log_probs = (chosen - &log_sum)?.squeeze(D::Minus1)?;
    let (shifted, log_sum) = (shifted.detach(), log_sum.detach());
    let probabilities = shifted.broadcast_sub(&log_sum)?.exp()?; // (N, V)
    // H = log Σ e^s − Σ p s
    let entropy = (log_sum.squeeze(D::Minus1)? - (probabilities * shifted)?.sum(D::Minus1)?)?;
    Ok((log_probs, entropy))
}
