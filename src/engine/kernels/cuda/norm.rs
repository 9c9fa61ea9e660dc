//! RMSNorm of rows of f32 and its vector-Jacobian products. A row's result depends on the row alone.

use super::driver::Device;
use super::rows::{Result, Rows};

/// out (f32 or bf16) = x / √(mean(x²) + eps) ∘ weight; x and weight (one row) are f32.
pub fn rms_norm(device: &Device, x: Rows<'_>, weight: Rows<'_>, eps: f32, out: Rows<'_>) -> Result<()> {
    todo!()
}

/// The operands of [`rms_norm_vjp`].
#[derive(Clone, Copy, Debug)]
pub struct NormBackward<'a> {
    /// The input, f32.
    pub x: Rows<'a>,
    /// One row, f32.
    pub weight: Rows<'a>,
    /// Added to the mean of the squares.
    pub eps: f32,
    /// dL/dout, f32 or bf16.
    pub dy: Rows<'a>,
    /// Added to the result; f32.
    pub residual: Option<Rows<'a>>,
}

/// dx (f32) = residual + dL/dx of [`rms_norm`].
pub fn rms_norm_vjp(device: &Device, backward: NormBackward<'_>, dx: Rows<'_>) -> Result<()> {
    todo!()
}

/// dw (one row of f32) += dL/dweight of [`rms_norm`], summed over the rows in a fixed order; dy is f32 or bf16.
pub fn rms_norm_weight_vjp(device: &Device, x: Rows<'_>, eps: f32, dy: Rows<'_>, dw: Rows<'_>) -> Result<()> {
    todo!()
}
