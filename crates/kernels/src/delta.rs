//! Layers of the gated delta rule (Gated DeltaNet), as in Qwen3-Next and Qwen3.5: linear attention whose memory is one
//! matrix for each head, instead of the keys and values of all earlier tokens.
//!
//! A layer applies, in this order: a causal [convolution](Conv) of each channel of `[q | k | v]` with SiLU, the division
//! of queries and keys by their lengths, the gates beta = σ(b) and g = −exp(a_log)·softplus(a + dt_bias), the delta
//! rule, and a gated norm. The delta rule of a value head with the memory S `[key_dim][value_dim]`, for each token:
//! S ← exp(g)·S; δ = beta·(v − Sᵀk); S ← S + k⊗δ; o = Sᵀq. The gated norm: out = o / √(mean(o²) + eps) ∘ norm ∘ silu(z).
//!
//! **Bits.** A token's results depend only on the tokens of its own sequence: not on the number of threads, on the other
//! rows of a call, or on how a sequence is divided into calls. One call with T tokens gives the same bits as T calls
//! with one token, so that sampling and training agree. Gradients do not depend on the number of threads either. The
//! instruction sets AVX2 and AVX-512 (and those above it) give the same bits as each other. The portable one gives
//! these bits on aarch64, which has fused multiply-adds; on x86-64 it rounds products and sums separately, so its bits
//! are its own.

mod backward;
mod conv;
mod gated_norm;
mod gates;
mod layer;
#[cfg(test)]
mod naive;
mod product;
mod rule;
#[cfg(test)]
mod tests;
mod training;
mod unit;

use std::ops::Range;

pub use conv::Conv;
pub use layer::{forward, step};
pub use training::backward;

use super::floats::Floats;
use super::simd::{Simd, load_some};

/// Number of tokens between two states that the gradients need.
const KEPT_EVERY: usize = 64;

/// The sizes of a layer of the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of query heads, which is also the number of key heads.
    pub num_key_heads: usize,
    /// Number of value heads, a multiple of `num_key_heads`: value head h uses query and key head
    /// h / (num_value_heads / num_key_heads).
    pub num_value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Number of taps of the convolution.
    pub kernel: usize,
}

impl Shape {
    /// Width of all key heads together; the query heads have the same width.
    pub fn key_width(&self) -> usize {
        self.num_key_heads * self.key_dim
    }

    /// Width of all value heads together, which is also the width of a row of the output.
    pub fn value_width(&self) -> usize {
        self.num_value_heads * self.value_dim
    }

    /// Width of `[q heads | k heads | v heads]`: the number of channels of the convolution.
    pub fn conv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Width of a row of the input, `[q heads | k heads | v heads | z | b | a]`; b and a have one value per value head.
    pub fn width(&self) -> usize {
        self.conv_width() + self.value_width() + 2 * self.num_value_heads
    }

    /// Number of value heads that share a key head.
    fn heads_per_key(&self) -> usize {
        self.num_value_heads / self.num_key_heads
    }

    /// Number of values in the memory of one head.
    fn head_len(&self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Number of values in the memory of all heads, `[num_value_heads][key_dim][value_dim]`.
    fn memory_len(&self) -> usize {
        self.num_value_heads * self.head_len()
    }

    /// Number of values in the kept states of `tokens` tokens, `[⌈tokens / 64⌉][num_value_heads][key_dim][value_dim]`.
    fn kept_len(&self, tokens: usize) -> usize {
        tokens.div_ceil(KEPT_EVERY) * self.memory_len()
    }

    /// Number of rows of `[q heads | k heads | v heads]`.
    fn rows_of(&self, qkv: &[f32]) -> usize {
        let rows = qkv.len() / self.conv_width();
        assert_eq!(qkv.len(), rows * self.conv_width(), "the length of qkv is not a multiple of its row's width");
        rows
    }

    /// Columns of z in a row of the input.
    fn z(&self) -> Range<usize> {
        self.conv_width()..self.conv_width() + self.value_width()
    }

    /// Columns of b in a row of the input; those of a follow.
    fn b(&self) -> Range<usize> {
        let first = self.conv_width() + self.value_width();
        first..first + self.num_value_heads
    }
}

/// The frozen weights of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// The sizes of the layer.
    pub shape: Shape,
    /// The convolution over the channels of `[q | k | v]`.
    pub conv: &'a Conv,
    /// Logarithms of the decay rates, `[num_value_heads]`.
    pub a_log: &'a [f32],
    /// Biases of the step sizes, `[num_value_heads]`.
    pub dt_bias: &'a [f32],
    /// The weight of the gated norm, `[value_dim]`.
    pub norm: &'a [f32],
    /// Added to the mean of the squares in the gated norm.
    pub eps: f32,
}

impl Weights<'_> {
    /// Panics if the lengths of the weights do not match the shape.
    fn check(&self) {
        let Shape { num_key_heads, num_value_heads, key_dim, value_dim, kernel } = self.shape;
        assert!(num_key_heads > 0 && key_dim > 0 && value_dim > 0 && kernel > 0, "a size of a delta layer is 0");
        assert!(
            num_value_heads > 0 && num_value_heads.is_multiple_of(num_key_heads),
            "the number of value heads {num_value_heads} is not a multiple of the number of key heads {num_key_heads}"
        );
        let conv = (self.conv.channels(), self.conv.width());
        assert_eq!(conv, (self.shape.conv_width(), kernel), "the convolution has the wrong size");
        let gates = [self.a_log.len(), self.dt_bias.len()];
        assert_eq!(gates, [num_value_heads; 2], "a_log and dt_bias need one value for each value head");
        assert_eq!(self.norm.len(), value_dim, "the weight of the gated norm has the wrong length");
    }
}

/// The state of one sequence in one layer: the memory of the delta rule, and the convolution's last inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// The convolution's last inputs, `[kernel − 1][conv_width]`, the oldest first.
    conv: Vec<f32>,
    /// The memory, `[num_value_heads][key_dim][value_dim]`, aligned to cache lines.
    heads: Floats,
}

impl State {
    /// Creates the state at the beginning of a sequence: zeros.
    pub fn new(shape: &Shape) -> State {
        let mut heads = Floats::default();
        heads.zeros(shape.memory_len());
        State { conv: vec![0.0; shape.kernel.saturating_sub(1) * shape.conv_width()], heads }
    }

    /// Copies another state of the same shape into this one, without allocating.
    ///
    /// # Panics
    /// Panics if the shapes differ.
    pub fn copy_from(&mut self, other: &State) {
        self.conv.copy_from_slice(&other.conv);
        self.heads.copy_from_slice(&other.heads);
    }

    /// Size of the state in bytes.
    pub fn bytes(&self) -> usize {
        (self.conv.len() + self.heads.len()) * size_of::<f32>()
    }

    fn has(&self, shape: &Shape) -> bool {
        self.heads.len() == shape.memory_len().next_multiple_of(16)
            && self.conv.len() == (shape.kernel - 1) * shape.conv_width()
    }
}

/// A sequence: consecutive rows of the input of a call. It begins with the state that another sequence ends with, or
/// with its own state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The rows of the sequence's tokens; may be empty. No row belongs to two sequences.
    pub rows: Range<usize>,
    /// The sequence that this one continues, an earlier one of the list.
    pub after: Option<usize>,
}

/// Number of partial sums of a dot product, the same on every instruction set.
const PARTIAL_SUMS: usize = 16;

/// Dot product Σ a·b with 16 partial sums on every instruction set: element i belongs to partial sum i mod 16.
///
/// # Safety
/// The same requirements as for the methods of [`Simd`]; both pointers are valid for `count` elements.
#[inline(always)]
unsafe fn dot<S: Simd>(a: *const f32, b: *const f32, count: usize) -> f32 {
    unsafe {
        // Two vectors of 8 lanes, or one of 16 lanes.
        let mut sums = [S::zero(); 2];
        let vectors = PARTIAL_SUMS / S::LANES;
        for at in (0..count).step_by(PARTIAL_SUMS) {
            for (i, sum) in sums.iter_mut().take(vectors).enumerate() {
                let at = at + i * S::LANES;
                if at < count {
                    *sum = S::fma(load_some::<S>(a.add(at), count - at), load_some::<S>(b.add(at), count - at), *sum);
                }
            }
        }
        // A vector of 16 lanes adds its halves first, too.
        if vectors == 1 { S::sum(sums[0]) } else { S::sum(S::add(sums[0], sums[1])) }
    }
}
