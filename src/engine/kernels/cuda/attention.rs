//! Causal attention of a packed batch: groups of a prompt and the completions that continue it.
//!
//! A query goes through the keys that it sees in blocks of 64 positions, those of the prompt counted from the prompt's
//! start, then those of its completion counted from the completion's. A block gives its largest score, Σ p and Σ p·v; they
//! are folded from the left, block by block. Decode does the same to the bit ([`super::cache`]), however its blocks are
//! spread over the device.

use super::driver::Device;
use super::rows::{Result, Rows};
use crate::engine::kernels::attention::{Group, Heads};

/// Positions of a block of keys.
pub const BLOCK: usize = 64;
/// The widest head.
pub const MAX_HEAD_DIM: usize = 256;

/// Where the prompts and completions of a packed batch lie, on the device; one for all layers of a window.
#[derive(Debug)]
pub struct Layout {
    heads: Heads,
    groups: Vec<Group>,
    window: Option<usize>,
}

impl Layout {
    /// Groups side by side; `window`: positions a token sees, its own included. Refuses heads wider than
    /// [`MAX_HEAD_DIM`], and more than 64 query heads a key head.
    pub fn new(device: &Device, heads: &Heads, groups: &[Group], window: Option<usize>) -> Result<Layout> {
        todo!()
    }

    /// Whether it was made for these.
    pub fn is_for(&self, heads: &Heads, groups: &[Group], window: Option<usize>) -> bool {
        self.heads == *heads && self.window == window && self.groups == groups
    }

    /// Rows of the batch.
    pub fn tokens(&self) -> usize {
        self.groups.iter().map(Group::len).sum()
    }
}

/// out `[tokens, q_width]` (the type of qkv) from qkv `[tokens, width]` after qk-norm and rope; softmax
/// `[tokens, num_heads]` (f32) is what [`attend_vjp`] wants: log₂ Σ 2^score.
pub fn attend(device: &Device, layout: &Layout, qkv: Rows<'_>, out: Rows<'_>, softmax: Rows<'_>) -> Result<()> {
    todo!()
}

/// What [`attend_vjp`] reads.
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// As in the forward.
    pub layout: &'a Layout,
    /// The forward's input.
    pub qkv: Rows<'a>,
    /// The forward's output.
    pub out: Rows<'a>,
    /// From [`attend`].
    pub softmax: Rows<'a>,
    /// dL/dout, of the type of qkv.
    pub dy: Rows<'a>,
}

/// d_qkv `[tokens, width]` (the type of qkv) = dL/dqkv of [`attend`]; every element is written. Deterministic.
pub fn attend_vjp(device: &Device, backward: &Backward<'_>, d_qkv: Rows<'_>) -> Result<()> {
    todo!()
}
