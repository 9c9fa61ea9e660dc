//! qk-norm and rotary embedding of rows `[q heads | k heads | v heads]`, and their vector-Jacobian products. A row's
//! result depends on the row alone.

use super::super::attention::Heads;
use super::driver::{Buffer, Device};
use super::rows::{Result, Rows};

/// What happens to query and key heads before attention.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// Sizes; `head_dim` is even.
    pub heads: &'a Heads,
    /// RMSNorm of each query and key head before it is rotated.
    pub qk_norm: Option<QkNorm<'a>>,
    /// Cosines, f32 `[positions, head_dim / 2]`.
    pub cos: Rows<'a>,
    /// Sines, f32 `[positions, head_dim / 2]`.
    pub sin: Rows<'a>,
    /// u32, one a row; a position beyond the table gives NaN.
    pub positions: &'a Buffer,
}

/// Weights of the norms of query and key heads, f32, one row of `head_dim` each.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a> {
    /// Of query heads.
    pub q: Rows<'a>,
    /// Of key heads.
    pub k: Rows<'a>,
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// out = qk-norm and rope of every row of `qkv`; both of the same type; they may be the same rows.
pub fn rotate(device: &Device, rope: &Rope<'_>, qkv: Rows<'_>, out: Rows<'_>) -> Result<()> {
    todo!()
}

/// dx = dL/dqkv of [`rotate`] from dL/dout = `dy`; `qkv` is its input, read with qk-norm only. All of one type; dx may be
/// dy.
pub fn rotate_vjp(
    device: &Device,
    rope: &Rope<'_>,
    qkv: Option<Rows<'_>>,
    dy: Rows<'_>,
    dx: Rows<'_>,
) -> Result<()> {
    todo!()
}

/// dq and dk (f32, one row of `head_dim` each) += dL/dweight of the qk-norms, summed in a fixed order; nothing without
/// qk-norm.
pub fn rotate_weight_vjp(
    device: &Device,
    rope: &Rope<'_>,
    qkv: Rows<'_>,
    dy: Rows<'_>,
    (dq, dk): (Rows<'_>, Rows<'_>),
) -> Result<()> {
    todo!()
}
