//! The arithmetic of an AdamW update on flat f32 buffers (Loshchilov & Hutter 2019, arXiv 1711.05101), for the host
//! and for a GPU.

/// Number of 8-bit AdamW moments that share a scale.
pub const BLOCK: usize = 256;

/// The constants of one AdamW update, in the precision of the computation.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// Step size lr / (1 − β₁ᵗ).
    pub step_size: f32,
    /// Factor of weight decay, 1 − lr · weight decay.
    pub keep: f32,
    /// Decay rate β₂ of the second moment.
    pub beta2: f32,
    /// The weight 1 − β₁ of the gradient in the first moment.
    pub one_minus_beta1: f32,
    /// The weight 1 − β₂ of the squared gradient in the second moment.
    pub one_minus_beta2: f32,
    /// Bias correction √(1 − β₂ᵗ) of the second moment.
    pub correction: f32,
    /// The constant ε that is added to the denominator.
    pub epsilon: f32,
}

impl Update {
    /// Updates parameters and moments with AdamW; weight decay applies to the first `decayed` parameters.
    pub fn apply(
        &self,
        decayed: usize,
        parameters: &mut [f32],
        gradient: &[f32],
        (first, second): (&mut [f32], &mut [f32]),
    ) {
        let at = decayed.min(parameters.len());
        let (parameters, gradient) = (parameters.split_at_mut(at), gradient.split_at(at));
        let (first, second) = (first.split_at_mut(at), second.split_at_mut(at));
        self.apply_with(self.keep, parameters.0, gradient.0, (first.0, second.0));
        self.apply_with(1.0, parameters.1, gradient.1, (first.1, second.1));
    }

    fn apply_with(
        &self,
        keep: f32,
        parameters: &mut [f32],
        gradient: &[f32],
        (first, second): (&mut [f32], &mut [f32]),
    ) {
        let moments = first.iter_mut().zip(second);
        for ((parameter, &gradient), (first, second)) in parameters.iter_mut().zip(gradient).zip(moments) {
            *first += (gradient - *first) * self.one_minus_beta1;
            *second = *second * self.beta2 + gradient * gradient * self.one_minus_beta2;
            *parameter =
                *parameter * keep - self.step_size * (*first / (second.sqrt() / self.correction + self.epsilon));
        }
    }
}
