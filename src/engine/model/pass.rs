//! What a forward pass is for: with or without the adapter, with dropout.

use super::packing::Packing;
use super::{Adapter, Row};
use crate::engine::lora::Module;
use crate::engine::random::Key;

/// A pass through the decoder.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// The adapter takes part.
    pub adapter: bool,
    /// What the adapter's inputs lose.
    pub dropout: Option<&'a TokenDropout>,
    /// The decoder layer, from 0: part of what is drawn for.
    pub layer: usize,
}

impl<'a> Pass<'a> {
    /// Sampling, old and reference log-probs: nothing is dropped.
    pub fn inference(adapter: Adapter) -> Self {
        Self { adapter: adapter == Adapter::On, dropout: None, layer: 0 }
    }

    /// The same pass in a layer.
    pub fn in_layer(self, layer: usize) -> Self {
        Self { layer, ..self }
    }

    /// The mask of a module's input in this layer.
    pub fn mask(&self, module: Module) -> Option<Mask<'a>> {
        self.dropout.map(|dropout| Mask { dropout, layer: self.layer as u64, module: module as u64 })
    }
}

/// Where the randomness of a training step's dropout comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowDropout {
    /// Of the optimizer step.
    pub key: Key,
    /// The place of the first row among the step's rows.
    pub first_row: usize,
}

/// LoRA dropout of a packed batch: inputs of A are zeroed with probability p, the others divided by 1 − p (PEFT), each
/// module with a mask of its own.
///
/// Whether a value is dropped depends on the step, the token's place in its own sequence, the layer and the module, never
/// on how the step's rows are cut into micro-batches: a completion's tokens are counted by its place among the step's
/// rows, and a prompt's by what it says, so that it is the same prompt wherever it is computed.
#[derive(Debug, Clone)]
pub struct TokenDropout {
    keys: Vec<Key>,
    /// Draws of 32 bits below it are dropped.
    threshold: u64,
    scale: f32,
}

impl TokenDropout {
    /// For the packing of these rows.
    pub fn new(p: f64, dropout: RowDropout, rows: &[Row<'_>], packing: &Packing) -> Self {
        let RowDropout { key, first_row } = dropout;
        let mut keys = Vec::with_capacity(packing.ids.len());
        // As the packing lays them out: a prompt, then the inputs of each completion that is not empty.
        let mut rows = rows.iter().enumerate().filter(|(_, row)| !row.completion.is_empty());
        for group in &packing.groups {
            let mut prompt_done = false;
            for length in &group.completion_lens {
                let Some((index, row)) = rows.next() else { break };
                if !prompt_done {
                    let said = row.prompt.iter().fold(key.with(0), |key, id| key.with(u64::from(*id)));
                    keys.extend((0..group.prompt_len as u64).map(|position| said.with(position)));
                    prompt_done = true;
                }
                let row_key = key.with(1).with((first_row + index) as u64);
                keys.extend((0..*length as u64).map(|position| row_key.with(position)));
            }
        }
        let threshold = (p * 2f64.powi(32)).round();
        Self { keys, threshold: threshold as u64, scale: (1.0 / (1.0 - threshold / 2f64.powi(32))) as f32 }
    }
}

/// What one module's input loses in one layer.
#[derive(Debug, Clone, Copy)]
pub struct Mask<'a> {
    dropout: &'a TokenDropout,
    layer: u64,
    module: u64,
}

impl Mask<'_> {
    /// What each token's draws are keyed by, for a device that applies the mask itself.
    pub fn words(&self) -> Vec<u64> {
        self.dropout.keys.iter().map(|key| key.with(self.layer).with(self.module).word()).collect()
    }

    /// Draws of 32 bits below the first are dropped, the values of others multiplied by the second.
    pub fn law(&self) -> (u64, f32) {
        (self.dropout.threshold, self.dropout.scale)
    }

    /// Apply it to the values of a token; tokens beyond the batch (padding) are left alone.
    pub fn apply(&self, token: usize, values: &mut [f32]) {
        let Some(key) = self.dropout.keys.get(token) else { return };
        let key = key.with(self.layer).with(self.module);
        let TokenDropout { threshold, scale, .. } = *self.dropout;
        for (index, pair) in values.chunks_mut(2).enumerate() {
            let bits = key.with(index as u64).bits();
            for (value, draw) in pair.iter_mut().zip([bits & 0xffff_ffff, bits >> 32]) {
                *value = if draw < threshold { 0.0 } else { *value * scale };
            }
        }
    }
}
