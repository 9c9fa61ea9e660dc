//! AdamW, global-norm clipping and learning-rate schedules, on flat f32 buffers.

pub mod blockwise;

use rayon::prelude::*;

use self::blockwise::{BLOCK, Map, Quantized, dequantize, quantize};
use super::error::{EngineError, Result};
use super::kernels::adamw::Update;
use crate::spec::{LrSchedulerType, OptimizerKind, OptimizerPlan};

/// State of AdamW: first and second moment of each parameter, and the number of updates made.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    /// The moments, in parameter order.
    pub moments: Moments,
    /// Number of updates made; skipped steps do not count.
    pub updates: u64,
    /// Number of parameters with weight decay; they come first.
    pub decayed: usize,
}

/// First and second moments, in parameter order.
#[derive(Debug, Clone, PartialEq)]
pub enum Moments {
    /// Moments in f32: 8 bytes per parameter.
    F32 {
        /// First moment m of each parameter.
        first: Vec<f32>,
        /// Second moment v of each parameter.
        second: Vec<f32>,
    },
    /// Moments in 8 bits: 2 bytes per parameter and 8 per block.
    Blockwise {
        /// First moment m of each parameter.
        first: Quantized,
        /// Second moment v of each parameter.
        second: Quantized,
    },
}

impl Moments {
    /// Creates moments that are all zero.
    pub fn zeros(kind: OptimizerKind, num_parameters: usize) -> Self {
        match kind {
            OptimizerKind::Adamw => {
                Moments::F32 { first: vec![0.0; num_parameters], second: vec![0.0; num_parameters] }
            }
            OptimizerKind::Adamw8bit => Moments::Blockwise {
                first: Quantized::zeros(Map::Signed, num_parameters),
                second: Quantized::zeros(Map::Unsigned, num_parameters),
            },
        }
    }

    /// Number of parameters that have moments.
    pub fn len(&self) -> usize {
        match self {
            Moments::F32 { first, .. } => first.len(),
            Moments::Blockwise { first, .. } => first.codes.len(),
        }
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory of the moments in bytes.
    pub fn size_bytes(&self) -> usize {
        match self {
            Moments::F32 { first, second } => (first.len() + second.len()) * size_of::<f32>(),
            Moments::Blockwise { first, second } => first.size_bytes() + second.size_bytes(),
        }
    }
}

/// The constants of the t-th AdamW update, counted from 1.
pub fn update_number(t: u64, learning_rate: f64, plan: &OptimizerPlan) -> Update {
    let t = i32::try_from(t).unwrap_or(i32::MAX);
    let first_correction = 1.0 - plan.adam_beta1.powi(t);
    Update {
        step_size: (learning_rate / first_correction) as f32,
        keep: (1.0 - learning_rate * plan.weight_decay) as f32,
        beta2: plan.adam_beta2 as f32,
        one_minus_beta1: (1.0 - plan.adam_beta1) as f32,
        one_minus_beta2: (1.0 - plan.adam_beta2) as f32,
        correction: (1.0 - plan.adam_beta2.powi(t)).sqrt() as f32,
        epsilon: plan.adam_epsilon as f32,
    }
}

/// Number of parameters that one thread updates at a time.
const CHUNK: usize = 64 * BLOCK;

impl AdamW {
    /// Creates AdamW without updates, with moments in 32 bits.
    pub fn new(num_parameters: usize) -> Self {
        Self::of_kind(OptimizerKind::Adamw, num_parameters)
    }

    /// Creates AdamW without updates, with moments of this precision.
    pub fn of_kind(kind: OptimizerKind, num_parameters: usize) -> Self {
        Self { moments: Moments::zeros(kind, num_parameters), updates: 0, decayed: num_parameters }
    }

    /// Updates `parameters` in place: decoupled weight decay of the first `decayed`, bias correction, as
    /// torch.optim.AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101). Moments in 8 bits are widened block by block,
    /// updated in 32 bits, and rounded again after the parameters are updated (Dettmers et al. 2022).
    pub fn update(
        &mut self,
        parameters: &mut [f32],
        gradient: &[f32],
        learning_rate: f64,
        plan: &OptimizerPlan,
    ) -> Result<()> {
        check_lengths(self.moments.len(), parameters.len(), gradient.len())?;
        self.updates += 1;
        let update = update_number(self.updates, learning_rate, plan);
        let decayed = self.decayed;
        let left = |chunk: usize| decayed.saturating_sub(chunk * CHUNK);
        let chunks = parameters.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).enumerate();
        match &mut self.moments {
            Moments::F32 { first, second } => chunks
                .zip(first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK)))
                .for_each(|((chunk, (parameters, gradient)), (first, second))| {
                    update.apply(left(chunk), parameters, gradient, (first, second));
                }),
            Moments::Blockwise { first, second } => {
                let maps = (first.map, second.map);
                let first = first.codes.par_chunks_mut(CHUNK).zip(first.absmax.par_chunks_mut(CHUNK / BLOCK));
                let second = second.codes.par_chunks_mut(CHUNK).zip(second.absmax.par_chunks_mut(CHUNK / BLOCK));
                chunks.zip(first.zip(second)).for_each(|((chunk, (parameters, gradient)), (first, second))| {
                    let blocks = parameters.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
                    let first = first.0.chunks_mut(BLOCK).zip(first.1);
                    let second = second.0.chunks_mut(BLOCK).zip(second.1);
                    for (block, ((parameters, gradient), ((m_codes, m_scale), (v_codes, v_scale)))) in
                        blocks.zip(first.zip(second)).enumerate()
                    {
                        let (mut m, mut v) = ([0f32; BLOCK], [0f32; BLOCK]);
                        let (m, v) = (&mut m[..m_codes.len()], &mut v[..v_codes.len()]);
                        dequantize(maps.0, m_codes, *m_scale, m);
                        dequantize(maps.1, v_codes, *v_scale, v);
                        update.apply(
                            left(chunk).saturating_sub(block * BLOCK),
                            parameters,
                            gradient,
                            (&mut *m, &mut *v),
                        );
                        *m_scale = quantize(maps.0, m, m_codes);
                        *v_scale = quantize(maps.1, v, v_codes);
                    }
                });
            }
        }
        Ok(())
    }
}

/// Checks that moments, parameters and gradient have the same length.
pub fn check_lengths(moments: usize, parameters: usize, gradient: usize) -> Result<()> {
    if moments == parameters && gradient == parameters {
        return Ok(());
    }
    Err(EngineError::Input(format!(
        "the optimizer has {moments} moments, {parameters} parameters and {gradient} entries of the gradient; the checkpoint belongs to another adapter"
    )))
}

/// The factor that clips the gradient, if its norm exceeds the limit; see [`clip_gradient_norm`].
pub fn clip_coefficient(norm: f64, max_norm: f64) -> Option<f32> {
    let coefficient = max_norm / (norm + 1e-6);
    (max_norm > 0.0 && norm.is_finite() && coefficient < 1.0).then_some(coefficient as f32)
}

/// Scales the gradient so that its L2 norm is at most `max_norm` (0 = off), like torch's `clip_grad_norm_`: the
/// coefficient is max_norm/(norm + 1e-6), at most 1. Returns the norm before clipping; if it is not finite, the
/// gradient is not scaled.
pub fn clip_gradient_norm(gradient: &mut [f32], max_norm: f64) -> f64 {
    let norm = gradient.iter().map(|&entry| f64::from(entry).powi(2)).sum::<f64>().sqrt();
    if let Some(coefficient) = clip_coefficient(norm, max_norm) {
        gradient.iter_mut().for_each(|entry| *entry *= coefficient);
    }
    norm
}

/// The learning rate of an update, as in transformers' schedules; `steps_done` is 0 for the first update.
///
/// Warm-up is lr·t/warmup_steps, so the first update of a warm-up has rate 0.
pub fn learning_rate(plan: &OptimizerPlan, steps_done: u64, max_steps: u64) -> f64 {
    let warmup = plan.warmup_steps;
    if steps_done < warmup {
        return plan.learning_rate * steps_done as f64 / warmup.max(1) as f64;
    }
    let span = max_steps.saturating_sub(warmup).max(1) as f64;
    let progress = ((steps_done - warmup) as f64 / span).min(1.0);
    let factor = match plan.lr_scheduler_type {
        LrSchedulerType::Constant => 1.0,
        LrSchedulerType::Linear => max_steps.saturating_sub(steps_done) as f64 / span,
        LrSchedulerType::Cosine => (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0),
    };
    plan.learning_rate * factor
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Key, Stream};

    fn plan() -> OptimizerPlan {
        OptimizerPlan {
            kind: OptimizerKind::Adamw,
            learning_rate: 0.1,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            lr_scheduler_type: LrSchedulerType::Linear,
            warmup_steps: 2,
        }
    }

    #[test]
    fn schedules_warm_up_and_decay_as_in_transformers() {
        let rates = |kind| -> Vec<f64> {
            let plan = OptimizerPlan { lr_scheduler_type: kind, learning_rate: 1.0, ..plan() };
            (0..7).map(|step| learning_rate(&plan, step, 6)).collect()
        };
        assert_eq!(rates(LrSchedulerType::Constant), [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(LrSchedulerType::Linear), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
        let cosine = rates(LrSchedulerType::Cosine);
        assert_eq!(cosine[2], 1.0);
        assert!((cosine[4] - 0.5).abs() < 1e-15 && cosine[6] < 1e-15);
    }

    #[test]
    fn the_first_update_moves_each_parameter_by_the_learning_rate() {
        // AdamW's first update is lr · m̂/√v̂ = lr · sign(g).
        let mut parameters = [1.0f32, -2.0, 3.0];
        let mut adam = AdamW::new(3);
        let plan = OptimizerPlan { weight_decay: 0.5, ..plan() };
        adam.update(&mut parameters, &[0.25, -4.0, 0.0], 0.1, &plan).expect("lengths agree");
        let expected = [0.95 - 0.1, -1.9 + 0.1, 2.85];
        for (value, expected) in parameters.iter().zip(expected) {
            assert!((value - expected).abs() < 1e-6, "{parameters:?}");
        }
    }

    #[test]
    fn parameters_after_the_decayed_ones_have_no_weight_decay() {
        let plan = OptimizerPlan { weight_decay: 0.5, ..plan() };
        // These lengths cross the borders of 8-bit blocks and of the pieces that threads update.
        let (len, decayed) = (2 * CHUNK + 300, CHUNK + 2 * BLOCK + 7);
        for kind in [OptimizerKind::Adamw, OptimizerKind::Adamw8bit] {
            let mut parameters = vec![1.0f32; len];
            let mut adam = AdamW { decayed, ..AdamW::of_kind(kind, len) };
            adam.update(&mut parameters, &vec![0.0; len], 0.1, &plan).expect("lengths agree");
            let kept = parameters.iter().position(|value| *value == 1.0);
            assert_eq!(kept, Some(decayed), "{kind:?}");
            assert!(parameters[..decayed].iter().all(|value| (value - 0.95).abs() < 1e-6));
            assert!(parameters[decayed..].iter().all(|value| *value == 1.0));
        }
    }

    #[test]
    fn moments_in_8_bits_take_a_quarter_and_follow_those_in_32() {
        // The loss is a noisy quadratic bowl with many scales: L = Σ cᵢ·xᵢ²/2, gradient cᵢ·xᵢ + noise.
        let n = 10_000;
        let key = Key::new(3, Stream::Probe);
        let noise = |step: u64, i: usize| (key.with(step).with(i as u64).uniform() - 0.5) as f32 * 0.1;
        let curvature = |i: usize| 10f32.powi((i / 500 % 5) as i32 - 2);
        let run = |kind| {
            let mut adam = AdamW::of_kind(kind, n);
            let mut x = vec![1f32; n];
            let mut losses = Vec::new();
            for step in 0..200 {
                let loss: f64 = (0..n).map(|i| f64::from(curvature(i) * x[i] * x[i]) / 2.0).sum();
                losses.push(loss);
                let gradient: Vec<f32> = (0..n).map(|i| curvature(i) * (x[i] + noise(step, i))).collect();
                adam.update(&mut x, &gradient, 0.01, &plan()).expect("lengths agree");
            }
            (adam, losses)
        };
        let (full, expected) = run(OptimizerKind::Adamw);
        let (small, losses) = run(OptimizerKind::Adamw8bit);
        assert_eq!(full.moments.size_bytes(), 8 * n);
        assert_eq!(small.moments.size_bytes(), 2 * (n + 4 * n.div_ceil(BLOCK)));
        assert!(expected[199] < 0.02 * expected[0]);
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            let close = 0.03 * expected + 0.005 * losses[0];
            assert!((loss - expected).abs() < close, "step {step}: {loss} in 8 bits, {expected} in 32");
        }
    }

    #[test]
    fn the_norm_is_reported_before_clipping_and_a_small_gradient_is_left_alone() {
        let mut gradient = [3.0, 4.0];
        assert_eq!(clip_gradient_norm(&mut gradient, 1.0), 5.0);
        assert!((gradient[0] - 0.6).abs() < 1e-6 && (gradient[1] - 0.8).abs() < 1e-6);
        let mut gradient = [0.3, 0.4];
        clip_gradient_norm(&mut gradient, 1.0);
        assert_eq!(gradient, [0.3, 0.4]);
        assert!(clip_gradient_norm(&mut [f32::NAN, 1.0], 1.0).is_nan());
    }
}
