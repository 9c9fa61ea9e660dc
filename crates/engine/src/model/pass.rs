//! The options of a forward pass: adapter on or off, dropout.

use super::packing::Packing;
use super::{Adapter, Trajectory};
use crate::backend::{Mask, Module, TokenDropout};
use crate::random::Key;

/// The LoRA adapters that a pass applies.
#[derive(Debug, Clone, Copy)]
pub enum Applied<'a> {
    /// No adapter: the base model.
    Nothing,
    /// The trained adapter, if the model has one.
    Trained,
    /// One served adapter, to all rows.
    Served(u32),
    /// Served adapters, each to its own rows.
    Mixed(&'a MixedRows),
}

/// The served adapters of a batch and the rows that each of them is applied to. The other rows have no adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MixedRows {
    /// The slot of each adapter, with its rows in ascending order.
    pub groups: Vec<(u32, Vec<u32>)>,
    /// The rows without adapter, in ascending order.
    pub plain: Vec<u32>,
}

impl MixedRows {
    /// Sorts rows by their adapters; `slots` has one entry per row.
    pub fn new(slots: &[Option<u32>]) -> Self {
        let mut mixed = MixedRows::default();
        for (row, slot) in slots.iter().enumerate() {
            let rows = match slot {
                None => &mut mixed.plain,
                Some(slot) => match mixed.groups.iter().position(|(other, _)| other == slot) {
                    Some(index) => &mut mixed.groups[index].1,
                    None => {
                        mixed.groups.push((*slot, Vec::new()));
                        let last = mixed.groups.len() - 1;
                        &mut mixed.groups[last].1
                    }
                },
            };
            rows.push(row as u32);
        }
        mixed
    }

    /// The adapters to apply; a batch with one adapter for all rows needs no selection of rows.
    pub fn applied(&self) -> Applied<'_> {
        match (self.groups.as_slice(), self.plain.is_empty()) {
            ([], _) => Applied::Nothing,
            ([(slot, _)], true) => Applied::Served(*slot),
            _ => Applied::Mixed(self),
        }
    }
}

/// The options of one pass through the decoder.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// The LoRA adapters that are applied.
    pub adapter: Applied<'a>,
    /// Dropout of the adapter's inputs.
    pub dropout: Option<&'a TokenDropout>,
    /// Index of the decoder layer, from 0; part of the dropout's random key.
    pub layer: usize,
}

impl<'a> Pass<'a> {
    /// A pass for sampling, and for old and reference log-probs: without dropout.
    pub fn inference(adapter: Adapter) -> Self {
        Self::applying(match adapter {
            Adapter::On => Applied::Trained,
            Adapter::Off => Applied::Nothing,
        })
    }

    /// A pass for inference with these adapters.
    pub fn applying(adapter: Applied<'a>) -> Self {
        Self { adapter, dropout: None, layer: 0 }
    }

    /// The same options for another layer.
    pub fn in_layer(self, layer: usize) -> Self {
        Self { layer, ..self }
    }

    /// The dropout mask of a module's input in this layer.
    pub fn mask(&self, module: Module) -> Option<Mask<'a>> {
        self.dropout.map(|dropout| dropout.mask(self.layer, module))
    }
}

/// The random key of a training step's dropout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowDropout {
    /// The random key of the optimizer step.
    pub key: Key,
    /// Index of the batch's first row among all rows of the step.
    pub first_row: usize,
}

/// The options of a training pass over some rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrainedRows<'a> {
    /// The random key of the adapter's dropout; `None` = no dropout.
    pub dropout: Option<RowDropout>,
    /// The rows that the head only scores at first. A gradient of theirs takes a second pass over the vocabulary, whose last
    /// bits differ; without one they cost less. May be shorter than the rows.
    pub second_pass: &'a [bool],
}

impl TrainedRows<'_> {
    /// Whether the head sums up the gradient of each model token of the rows as it scores them.
    pub fn targets(&self, rows: &[Trajectory<'_>]) -> Vec<bool> {
        let is_summed = |row: usize| !self.second_pass.get(row).copied().unwrap_or(false);
        let of_row = |(index, row): (usize, &Trajectory<'_>)| vec![is_summed(index); row.num_model_tokens()];
        rows.iter().enumerate().flat_map(of_row).collect()
    }
}

impl TokenDropout {
    /// Creates the dropout of a packed batch of these rows.
    pub fn of_rows(p: f64, dropout: RowDropout, rows: &[Trajectory<'_>], packing: &Packing) -> Self {
        let RowDropout { key, first_row } = dropout;
        let mut keys = Vec::with_capacity(packing.ids.len());
        // Same order as in the packing: a prompt, then the inputs of each trajectory that has a model token.
        let mut rows = rows.iter().enumerate().filter(|(_, row)| row.num_model_tokens() > 0);
        for group in &packing.groups {
            let mut prompt_done = false;
            for length in &group.completion_lens {
                let Some((index, row)) = rows.next() else { break };
                if !prompt_done {
                    let prompt_key = row.prompt.iter().fold(key.with(0), |key, id| key.with(u64::from(*id)));
                    keys.extend((0..group.prompt_len as u64).map(|position| prompt_key.with(position)));
                    prompt_done = true;
                }
                let row_key = key.with(1).with((first_row + index) as u64);
                keys.extend((0..*length as u64).map(|position| row_key.with(position)));
            }
        }
        TokenDropout::new(p, keys)
    }
}
