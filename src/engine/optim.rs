//! AdamW, global-norm clipping, learning-rate schedules, on flat f32 buffers.

use super::error::{EngineError, Result};
use crate::spec::{LrSchedulerType, OptimizerPlan};

/// AdamW's state: one first and one second moment a parameter, and the number of updates made.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    /// First moments, in parameter order.
    pub first_moments: Vec<f32>,
    /// Second moments.
    pub second_moments: Vec<f32>,
    /// Updates made; skipped steps do not count.
    pub updates: u64,
}

impl AdamW {
    /// No update made yet.
    pub fn new(num_parameters: usize) -> Self {
        Self { first_moments: vec![0.0; num_parameters], second_moments: vec![0.0; num_parameters], updates: 0 }
    }

    /// One update of `parameters` in place: decoupled weight decay, bias correction, as torch.optim.AdamW
    /// (Loshchilov & Hutter 2019, arXiv 1711.05101).
    pub fn update(
        &mut self,
        parameters: &mut [f32],
        gradient: &[f32],
        learning_rate: f64,
        plan: &OptimizerPlan,
    ) -> Result<()> {
        if parameters.len() != self.first_moments.len() || gradient.len() != parameters.len() {
            return Err(EngineError::Input(format!(
                "the optimizer has {} moments, the adapter {} parameters and the gradient {} entries; the checkpoint belongs to another adapter",
                self.first_moments.len(),
                parameters.len(),
                gradient.len()
            )));
        }
        self.updates += 1;
        let updates = i32::try_from(self.updates).unwrap_or(i32::MAX);
        let first_correction = 1.0 - plan.adam_beta1.powi(updates);
        let second_correction_root = (1.0 - plan.adam_beta2.powi(updates)).sqrt();
        let step_size = (learning_rate / first_correction) as f32;
        let keep = (1.0 - learning_rate * plan.weight_decay) as f32;
        let (beta2, one_minus_beta1) = (plan.adam_beta2 as f32, (1.0 - plan.adam_beta1) as f32);
        let one_minus_beta2 = (1.0 - plan.adam_beta2) as f32;
        let (correction, epsilon) = (second_correction_root as f32, plan.adam_epsilon as f32);
        let moments = self.first_moments.iter_mut().zip(&mut self.second_moments);
        for ((parameter, &gradient), (first, second)) in parameters.iter_mut().zip(gradient).zip(moments) {
            *first += (gradient - *first) * one_minus_beta1;
            *second = *second * beta2 + gradient * gradient * one_minus_beta2;
            *parameter = *parameter * keep - step_size * (*first / (second.sqrt() / correction + epsilon));
        }
        Ok(())
    }
}

/// Scale the gradient so that its L2 norm is at most `max_norm` (0 = off), as torch's `clip_grad_norm_`: the coefficient
/// is max_norm/(norm + 1e-6), at most 1. Returns the norm before; a norm that is not finite scales nothing.
pub fn clip_gradient_norm(gradient: &mut [f32], max_norm: f64) -> f64 {
    let norm = gradient.iter().map(|&entry| f64::from(entry).powi(2)).sum::<f64>().sqrt();
    let coefficient = max_norm / (norm + 1e-6);
    if max_norm > 0.0 && norm.is_finite() && coefficient < 1.0 {
        let coefficient = coefficient as f32;
        gradient.iter_mut().for_each(|entry| *entry *= coefficient);
    }
    norm
}

/// The learning rate of an update, as transformers' schedules; `steps_done` is 0 for the first update.
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

    fn plan() -> OptimizerPlan {
        OptimizerPlan {
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
        // m̂/√v̂ = sign(g) at the first update.
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
