//! Layers of the gated delta rule (Gated DeltaNet), as in Qwen3-Next and Qwen3.5: linear attention whose memory is one
//! matrix for each head, instead of keys and values of all earlier tokens.
//!
//! A layer applies, in this order: a causal [convolution](Conv) over each channel of `[q | k | v]`, the
//! [normalization](unit_heads) of queries and keys, the [gates](Gates) of writing and forgetting, the
//! [delta rule](run_sequences), and a [gated norm](gated_norm).
//!
//! **Bits.** A token's results depend only on the tokens of its own sequence: not on the number of threads, on the other
//! rows of a call, or on how a sequence is divided into calls. One call with T tokens gives the same bits as T calls
//! with one token, so that sampling and training agree. The instruction sets AVX2 and AVX-512 (and those above it)
//! give the same bits as each other. The portable one gives the same bits as these where it has fused
//! multiply-adds (aarch64); on x86-64 it rounds products and sums separately, so its bits are its own.

mod backward;
mod conv;
mod gated_norm;
mod gates;
mod naive;
mod rule;
#[cfg(test)]
mod tests;
mod unit;

pub use backward::{DeltaBackward, run_sequences_backward};
pub use conv::Conv;
pub use gated_norm::{GatedNorm, gated_norm, gated_norm_vjp};
pub use gates::{Gates, GatesGradient};
pub use rule::{DeltaRows, DeltaSequence, run_rows, run_sequences};
pub use unit::{unit_heads, unit_heads_in_place, unit_heads_vjp};

use super::floats::Floats;
use super::simd::{Simd, load_some};

/// Number of tokens between two kept states, see [`DeltaSequence::kept`].
pub const KEPT_EVERY: usize = 64;

/// The sizes of a layer of the gated delta rule. A row of `qkv` is `[q heads | k heads | v heads]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Number of query heads, which is also the number of key heads.
    pub num_k_heads: usize,
    /// Number of value heads, a multiple of `num_k_heads`: value head h uses query and key head
    /// h / (num_v_heads / num_k_heads).
    pub num_v_heads: usize,
    /// Width of a query or key head.
    pub k_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
}

impl DeltaHeads {
    /// Creates the sizes.
    ///
    /// # Panics
    /// Panics if a size is 0 or `num_v_heads` is not a multiple of `num_k_heads`.
    pub fn new(num_k_heads: usize, num_v_heads: usize, k_dim: usize, v_dim: usize) -> Self {
        assert!(num_k_heads > 0 && num_v_heads > 0 && k_dim > 0 && v_dim > 0, "a size of a delta layer is 0");
        assert!(
            num_v_heads.is_multiple_of(num_k_heads),
            "the number of value heads {num_v_heads} is not a multiple of the number of key heads {num_k_heads}"
        );
        Self { num_k_heads, num_v_heads, k_dim, v_dim }
    }

    /// Width of all key heads together; the query heads have the same width.
    pub fn k_width(&self) -> usize {
        self.num_k_heads * self.k_dim
    }

    /// Width of all value heads together, which is also the width of a row of the output.
    pub fn v_width(&self) -> usize {
        self.num_v_heads * self.v_dim
    }

    /// Width of a row of `qkv`: the number of channels of the convolution.
    pub fn width(&self) -> usize {
        2 * self.k_width() + self.v_width()
    }

    /// Number of value heads that share a key head.
    pub fn group_size(&self) -> usize {
        self.num_v_heads / self.num_k_heads
    }

    /// Number of values in the memory of all heads, `[num_v_heads][k_dim][v_dim]`.
    pub fn memory_len(&self) -> usize {
        self.num_v_heads * self.head_len()
    }

    /// Number of values in the kept states of `tokens` tokens, `[⌈tokens / 64⌉][num_v_heads][k_dim][v_dim]`.
    pub fn kept_len(&self, tokens: usize) -> usize {
        tokens.div_ceil(KEPT_EVERY) * self.memory_len()
    }

    /// Number of values in the memory of one head.
    fn head_len(&self) -> usize {
        self.k_dim * self.v_dim
    }

    /// Number of rows of `qkv`.
    fn rows_of(&self, qkv: &[f32]) -> usize {
        let rows = qkv.len() / self.width();
        assert_eq!(qkv.len(), rows * self.width(), "the length of qkv is not a multiple of its row's width");
        rows
    }
}

/// The state of one sequence in one layer: the memory of the delta rule, and the convolution's last inputs. The memory
/// is aligned to cache lines. A new state is zero, as at the beginning of a sequence.
#[derive(Clone, Debug, Default)]
pub struct DeltaState {
    memory: Floats,
    memory_len: usize,
    conv: Vec<f32>,
}

impl DeltaState {
    /// Creates the state at the beginning of a sequence, for a convolution of `conv_width` taps.
    pub fn new(heads: &DeltaHeads, conv_width: usize) -> Self {
        let mut memory = Floats::default();
        memory.zeros(heads.memory_len());
        let conv = vec![0.0; conv_width.saturating_sub(1) * heads.width()];
        Self { memory, memory_len: heads.memory_len(), conv }
    }

    /// Resets the state to the beginning of a sequence.
    pub fn clear(&mut self) {
        self.memory.fill(0.0);
        self.conv.fill(0.0);
    }

    /// Copies another state of the same sizes into this one, without allocating.
    ///
    /// # Panics
    /// Panics if the sizes differ.
    pub fn copy_from(&mut self, other: &DeltaState) {
        self.memory.copy_from_slice(&other.memory);
        self.conv.copy_from_slice(&other.conv);
    }

    /// The memory of the delta rule, `[num_v_heads][k_dim][v_dim]`.
    pub fn memory(&self) -> &[f32] {
        &self.memory[..self.memory_len]
    }

    /// The memory of the delta rule, `[num_v_heads][k_dim][v_dim]`, for writing.
    pub fn memory_mut(&mut self) -> &mut [f32] {
        &mut self.memory[..self.memory_len]
    }

    /// The convolution's last inputs, `[conv_width − 1][channels]`, the oldest first.
    pub fn conv(&self) -> &[f32] {
        &self.conv
    }

    /// The convolution's last inputs, `[conv_width − 1][channels]`, the oldest first, for writing.
    pub fn conv_mut(&mut self) -> &mut [f32] {
        &mut self.conv
    }

    /// The memory and the convolution's last inputs together, for writing both.
    pub fn parts_mut(&mut self) -> (&mut [f32], &mut [f32]) {
        (&mut self.memory[..self.memory_len], &mut self.conv)
    }

    /// Size of the state in bytes.
    pub fn bytes(&self) -> usize {
        (self.memory.len() + self.conv.len()) * size_of::<f32>()
    }
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
