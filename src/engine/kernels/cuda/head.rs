//! The language-model head `[vocab, hidden]`, streamed: the logits of some rows lie in a bounded buffer, `[rows, vocab]` is
//! never held.
//!
//! Of each row and 512 tokens the largest logit, Σ eᶻ and Σ eᶻ·z are kept and combined in a fixed order, so that with
//! [`Gemm::Exact`] what [`choose`] reports is what [`score`] gives, to the bit.

use super::driver::{Buffer, Device};
use super::gemm::Gemm;
use super::rows::{Result, Rows};
use crate::engine::kernels::head::{Chosen, Pick, TokenScore};

/// The head, and how it is multiplied with.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// `[vocab, hidden]`, of the type of the rows that it meets.
    pub weight: Rows<'a>,
    /// Who multiplies.
    pub gemm: Gemm,
    /// f32 logits held at a time; at least 16 rows' are.
    pub max_logits: usize,
}

/// What makes the probabilities of each row sum to 1, on the device.
#[derive(Debug)]
pub struct Normalizers {
    buffer: Buffer,
    rows: usize,
}

/// log-softmax(x · weightᵀ / temperature) at each row's target, and the entropy. x `[rows, hidden]` is normed already.
pub fn score(
    device: &Device,
    head: &Head<'_>,
    x: Rows<'_>,
    targets: &[u32],
    temperature: f64,
) -> Result<(Vec<TokenScore>, Normalizers)> {
    todo!()
}

/// What [`score_vjp`] goes by.
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// As in [`score`].
    pub x: Rows<'a>,
    /// As in [`score`].
    pub targets: &'a [u32],
    /// As in [`score`].
    pub temperature: f64,
    /// From [`score`].
    pub normalizers: &'a Normalizers,
    /// dL/dlogp, one a row.
    pub g: &'a [f32],
    /// `[vocab, hidden]` of f32, to which dL/dweight is added where it is asked for.
    pub d_weight: Option<Rows<'a>>,
}

/// dx `[rows, hidden]` (f32, or bf16 where x is) = dL/dx of the log-probs.
pub fn score_vjp(device: &Device, head: &Head<'_>, backward: &Backward<'_>, dx: Rows<'_>) -> Result<()> {
    todo!()
}

/// One token a row: at temperature 0 the first of the largest logits, else the first token whose probability and those of
/// all lower ids sum to more than `uniform`. `logp` is, with [`Gemm::Exact`] to the bit, what [`score`] gives.
pub fn choose(device: &Device, head: &Head<'_>, x: Rows<'_>, picks: &[Pick]) -> Result<Vec<Chosen>> {
    todo!()
}

/// The kernels of [`choose`] alone, for graphs: `picks` holds `[temperature, uniform]` in f64 a row of x; `chosen` gets
/// a token (u32) and its log-prob (f32) a row.
pub fn choose_into(device: &Device, head: &Head<'_>, x: Rows<'_>, picks: &Buffer, chosen: &Buffer) -> Result<()> {
    todo!()
}

/// out `[rows, vocab]` (f32) = x · weightᵀ.
pub fn logits(device: &Device, head: &Head<'_>, x: Rows<'_>, out: Rows<'_>) -> Result<()> {
    todo!()
}
