//! Products with frozen or trained weights and their adapters: y = residual + x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ, and its
//! vector-Jacobian product.

use std::ops::Range;

use super::driver::{Buffer, Device};
use super::gemm::Gemm;
use super::rows::{Dropout, Dtype, Result, Rows};

/// LoRA factors of a fused weight on the device: A stacked, B block-diagonal and scaled by s.
#[derive(Debug)]
pub struct Adapter {
    /// `[blocks · r, in]`
    a: Buffer,
    /// `[out, blocks · r]`
    b: Buffer,
    dtype: Dtype,
    inputs: usize,
    outputs: usize,
    r: usize,
    scaling: f32,
    /// Each module's outputs.
    parts: Vec<Range<usize>>,
}

/// The factors as the host has them, f32; see `engine::backend::AdapterValues`.
#[derive(Clone, Debug)]
pub struct Factors<'a> {
    /// Inputs of A.
    pub inputs: usize,
    /// Outputs of the fused weight.
    pub outputs: usize,
    /// The rank.
    pub r: usize,
    /// `s` in s·B·A.
    pub scaling: f64,
    /// By module: its outputs, A `[r, in]`, B `[out, r]`.
    pub blocks: Vec<(Range<usize>, &'a [f32], &'a [f32])>,
}

impl Adapter {
    /// Upload the factors as products of this type read them.
    pub fn new(device: &Device, dtype: Dtype, factors: &Factors<'_>) -> Result<Adapter> {
        todo!()
    }
}

/// A product and what takes part in it.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[out, in]`, of the compute type.
    pub weight: Rows<'a>,
    /// f32, one row.
    pub bias: Option<Rows<'a>>,
    /// The adapter.
    pub adapter: Option<&'a Adapter>,
    /// What each module's input loses; empty without dropout.
    pub dropout: &'a [Dropout<'a>],
}

/// out = residual + x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ. x has the compute type; the residual is f32; out is f32 or of the compute type.
pub fn linear(
    device: &Device,
    gemm: Gemm,
    linear: &Linear<'_>,
    x: Rows<'_>,
    residual: Option<Rows<'_>>,
    out: Rows<'_>,
) -> Result<()> {
    todo!()
}

/// A module of a weight that is trained in full: its outputs, and where the gradients of its W and b begin.
#[derive(Clone, Debug)]
pub struct Trained {
    /// In the fused weight.
    pub outputs: Range<usize>,
    /// Of W, row-major.
    pub weight: usize,
    /// Of b.
    pub bias: Option<usize>,
}

/// What the backward of [`linear`] reads, and where it adds gradients.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackward<'a> {
    /// As in the forward.
    pub linear: Linear<'a>,
    /// The input, of the compute type.
    pub x: Rows<'a>,
    /// dL/dout, f32 or of the compute type.
    pub dy: Rows<'a>,
    /// Where the gradients of each module's A and B begin; empty where no adapter is trained.
    pub slots: &'a [(usize, usize)],
    /// In full fine-tuning, module by module.
    pub full: &'a [Trained],
    /// Flat, f32: gradients are added.
    pub gradient: &'a Buffer,
}

/// dx (f32 or of the compute type) = dL/dx of [`linear`] without the residual's part.
pub fn linear_vjp(device: &Device, gemm: Gemm, backward: &LinearBackward<'_>, dx: Rows<'_>) -> Result<()> {
    todo!()
}
