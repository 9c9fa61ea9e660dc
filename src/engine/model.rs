//! The decoder: one description, per-layer recomputation, log-probs by chunks.

use std::path::Path;

use candle_core::Device;

use super::error::Result;
use super::lora::LoraConfig;
pub use super::lora::ParameterInfo;
use crate::modelcard::ModelCard;

/// One sequence: a prompt and its completion, both as token ids.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// What conditions; at least one token.
    pub prompt: &'a [u32],
    /// What is scored; may be empty.
    pub completion: &'a [u32],
}

/// What the model says of one completion; one entry a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowScore {
    /// Log-probabilities in nats, of logits / temperature.
    pub logps: Vec<f32>,
    /// Entropies of the same distributions, in nats.
    pub entropies: Vec<f32>,
}

/// Whether the LoRA adapter takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adapter {
    /// The policy.
    On,
    /// The same weights without the adapter: the reference.
    Off,
}

/// Next-token logits on the host, one row a sequence.
#[derive(Clone, Debug, Default)]
pub struct Logits {
    /// Row-major, `[rows][vocab_size]`.
    pub values: Vec<f32>,
    /// The length of a row.
    pub vocab_size: usize,
}

impl Logits {
    /// How many rows.
    pub fn len(&self) -> usize {
        self.values.len().checked_div(self.vocab_size).unwrap_or(0)
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// One row's logits.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocab_size..(row + 1) * self.vocab_size]
    }

    /// One row's logits, to change in place.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.vocab_size..(row + 1) * self.vocab_size]
    }
}

/// Sequences in the middle of generation: their KV cache and lengths.
#[derive(Debug)]
pub struct DecodeState {}

impl DecodeState {
    /// How many rows are live.
    pub fn len(&self) -> usize {
        todo!()
    }

    /// Whether no row is live.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A language model with an optional LoRA adapter.
#[derive(Debug)]
pub struct Policy {}

impl Policy {
    /// Load a model directory; f32 compute.
    pub fn load(_dir: &Path, _device: &Device) -> Result<Policy> {
        todo!()
    }

    /// What is known of the model without its tensors.
    pub fn card(&self) -> &ModelCard {
        todo!()
    }

    /// Add a fresh adapter: A Kaiming-uniform with a = √5, B zero; the same values from the same seed.
    pub fn add_lora(&mut self, _config: &LoraConfig, _seed: u64) -> Result<()> {
        todo!()
    }

    /// Load a PEFT adapter directory.
    pub fn load_lora(&mut self, _dir: &Path) -> Result<()> {
        todo!()
    }

    /// Load the tensors of a PEFT adapter file, whose config is known.
    pub fn load_lora_tensors(&mut self, _config: &LoraConfig, _file: &Path) -> Result<()> {
        todo!()
    }

    /// Write `adapter_config.json` and `adapter_model.safetensors` into a directory, as PEFT does.
    pub fn save_lora(&self, _dir: &Path, _base_model_name_or_path: &str) -> Result<()> {
        todo!()
    }

    /// The adapter's config, if there is one.
    pub fn lora_config(&self) -> Option<&LoraConfig> {
        todo!()
    }

    /// The trainable tensors, in the order of the flat buffer.
    pub fn parameters(&self) -> Vec<ParameterInfo> {
        todo!()
    }

    /// The flat LoRA buffer.
    pub fn parameter_values(&self) -> Result<Vec<f32>> {
        todo!()
    }

    /// Replace the flat LoRA buffer.
    pub fn set_parameter_values(&mut self, _values: &[f32]) -> Result<()> {
        todo!()
    }

    /// Log-probs and entropies of the completions; no gradient.
    pub fn score(&self, _rows: &[Row], _temperature: f64, _adapter: Adapter) -> Result<Vec<RowScore>> {
        todo!()
    }

    /// One forward over the rows, then `loss` gets the new scores and returns dL/dlogp per row and
    /// token; the backward pass adds dL/dparameter to `gradient`, which is flat, in the order of
    /// [`Policy::parameters`].
    pub fn forward_backward(
        &self,
        _rows: &[Row],
        _temperature: f64,
        _loss: &mut dyn FnMut(&[RowScore]) -> Result<Vec<Vec<f32>>>,
        _gradient: &mut [f32],
    ) -> Result<Vec<RowScore>> {
        todo!()
    }

    /// The full logits at some positions of one sequence.
    pub fn logits(&self, _ids: &[u32], _positions: &[usize], _adapter: Adapter) -> Result<Vec<Vec<f32>>> {
        todo!()
    }

    /// Compute every distinct prompt once and share its KV among `num_copies` rows each, prompt-major
    /// (row p·G + g). Returns the logits after the prompts, one row a copy.
    pub fn prefill(
        &self,
        _prompts: &[&[u32]],
        _num_copies: usize,
        _max_new_tokens: usize,
        _adapter: Adapter,
    ) -> Result<(DecodeState, Logits)> {
        todo!()
    }

    /// Append one token to every live row; returns the next logits.
    pub fn decode(&self, _state: &mut DecodeState, _tokens: &[u32]) -> Result<Logits> {
        todo!()
    }

    /// Keep the rows marked true; the others leave the batch.
    pub fn retain(&self, _state: &mut DecodeState, _keep: &[bool]) -> Result<()> {
        todo!()
    }
}
