//! AdamW on flat f32 buffers, as `engine::optim::AdamW` on the host, bit for bit, and the gradient's norm.

use super::driver::{Buffer, Device};
use super::rows::{Result, Rows};

/// The numbers of one update, as `engine::optim` computes them.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// lr / (1 − β₁ᵗ)
    pub step_size: f32,
    /// 1 − lr · weight decay
    pub keep: f32,
    /// β₂
    pub beta2: f32,
    /// 1 − β₁
    pub one_minus_beta1: f32,
    /// 1 − β₂
    pub one_minus_beta2: f32,
    /// √(1 − β₂ᵗ)
    pub correction: f32,
    /// ε
    pub epsilon: f32,
}

/// Flat buffers of one length, one row of f32 each.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// Changed in place.
    pub parameters: Rows<'a>,
    /// dL/dparameters.
    pub gradient: Rows<'a>,
    /// m, changed in place.
    pub first: Rows<'a>,
    /// v, changed in place.
    pub second: Rows<'a>,
}

/// One update.
pub fn adamw(device: &Device, update: &Update, state: State<'_>) -> Result<()> {
    todo!()
}

/// The L2 norm of a flat gradient, summed in f64 in a fixed order; waits for it.
pub fn norm(device: &Device, gradient: Rows<'_>) -> Result<f64> {
    todo!()
}

/// gradient ·= factor
pub fn scale(device: &Device, gradient: Rows<'_>, factor: f32) -> Result<()> {
    todo!()
}
