//! Keys and values of growing sequences, in pages of 64 positions: a prompt's pages are shared by its rows. Each step
//! appends a token to every row and attends, with the same bits as [`super::attention`].

use super::driver::Device;
use super::rows::{Dtype, Result, Rows};
use crate::engine::kernels::attention::Heads;

/// Keys and values of all layers.
#[derive(Debug)]
pub struct Cache {
    device: Device,
}

impl Cache {
    /// An empty one, for `qkv` of this type.
    pub fn new(device: &Device, heads: &Heads, num_layers: usize, dtype: Dtype) -> Result<Cache> {
        todo!()
    }

    /// Live rows.
    pub fn rows(&self) -> usize {
        todo!()
    }

    /// Bytes of its pages, used or free.
    pub fn bytes(&self) -> usize {
        todo!()
    }

    /// Announce prompts of these lengths; returns the first one's number.
    pub fn announce(&mut self, lengths: &[usize]) -> Result<usize> {
        todo!()
    }

    /// Keep a layer's keys and values of the prompts from `first` on: qkv holds their tokens, one after the other.
    pub fn fill(&mut self, first: usize, layer: usize, qkv: Rows<'_>) -> Result<()> {
        todo!()
    }

    /// Append rows that continue a prompt.
    pub fn add_rows(&mut self, prompt: usize, copies: usize, max_new_tokens: usize) -> Result<()> {
        todo!()
    }

    /// No more rows will continue the prompts announced so far: each lives as long as its rows.
    pub fn close(&mut self) {
        todo!()
    }

    /// Keep the rows marked true.
    pub fn retain(&mut self, keep: &[bool]) {
        todo!()
    }

    /// Before a token is appended in all layers: pages for it, and the tables that the step's kernels read, uploaded. To
    /// be called outside a captured body; [`Cache::attend`] of layer 0 does it where nobody did.
    /// Its result changes when buffers moved: then a graph captured before is of no use.
    pub fn begin_step(&mut self) -> Result<()> {
        todo!()
    }

    /// Append one token a row in a layer (layers in order, each once a step) and attend: out `[rows, q_width]` of the type
    /// of qkv `[rows, width]`. Both may have more rows than are live, so that a graph serves a bucket of batch sizes;
    /// the rest of `out` becomes zeros. Captured launches depend on the bucket alone: lengths and tables lie in memory.
    pub fn attend(&mut self, layer: usize, window: Option<usize>, qkv: Rows<'_>, out: Rows<'_>) -> Result<()> {
        todo!()
    }
}
