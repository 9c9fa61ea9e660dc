//! The decoder: one description, per-layer recomputation, log-probs by chunks.

pub mod decode;
pub mod head;
pub mod layer;
pub mod linear;
pub mod packing;
pub mod rope;

use std::path::Path;

use candle_core::{Device, Tensor};

use super::error::{EngineError, Result};
use super::load::Weights;
use super::lora::LoraConfig;
pub use super::lora::ParameterInfo;
use super::lora::{self, Lora};
use super::ops::slices::Heads;
use crate::modelcard::{self, ModelCard};

pub use decode::DecodeState;
use head::{Head, Scored};
use layer::Layer;
use packing::Packing;
use rope::RopeTables;

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

/// From the new scores to dL/dlogp, `[row][token]`.
pub type LossGradient<'l> = dyn FnMut(&[RowScore]) -> Result<Vec<Vec<f32>>> + 'l;

/// A language model with an optional LoRA adapter. Weights are frozen, in f32, on the CPU.
#[derive(Debug)]
pub struct Policy {
    card: ModelCard,
    device: Device,
    /// `[vocab, hidden]`
    embedding: Tensor,
    layers: Vec<Layer>,
    windows: Vec<Option<usize>>,
    head: Head,
    rope: RopeTables,
    lora: Option<Lora>,
}

impl Policy {
    /// Load a model directory; f32 compute.
    pub fn load(dir: &Path, device: &Device) -> Result<Policy> {
        Policy::load_card(dir, modelcard::read(dir)?, device)
    }

    /// As [`Policy::load`], with a card that was read before.
    pub fn load_card(dir: &Path, card: ModelCard, device: &Device) -> Result<Policy> {
        if !device.is_cpu() {
            return Err(EngineError::Input(format!("device {device:?} is not supported by this build; use cpu")));
        }
        let config = card.config.clone();
        let mut weights = Weights::open(dir, &card);
        let embedding = weights.tensor("model.embed_tokens.weight", device)?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| Layer::load(&mut weights, &config, index, device))
            .collect::<Result<Vec<Layer>>>()?;
        let head = Head {
            norm: weights.values("model.norm.weight")?.0,
            eps: config.rms_norm_eps as f32,
            weight: match config.tie_word_embeddings {
                true => embedding.clone(),
                false => weights.tensor("lm_head.weight", device)?,
            },
        };
        let rope = RopeTables::new(&config);
        let windows = config.windows;
        Ok(Policy { card, device: device.clone(), embedding, layers, windows, head, rope, lora: None })
    }

    /// What is known of the model without its tensors.
    pub fn card(&self) -> &ModelCard {
        &self.card
    }

    /// Add a fresh adapter: A Kaiming-uniform with a = √5, B zero; the same values from the same seed.
    pub fn add_lora(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        self.set_lora(Lora::fresh(config, &self.card.config, seed)?)
    }

    /// Load a PEFT adapter directory.
    pub fn load_lora(&mut self, dir: &Path) -> Result<()> {
        let config = lora::read_config(dir)?;
        self.set_lora(Lora::read(&config, &self.card.config, &dir.join(lora::WEIGHTS))?)
    }

    /// Load the tensors of a PEFT adapter file, whose config is known.
    pub fn load_lora_tensors(&mut self, config: &LoraConfig, file: &Path) -> Result<()> {
        self.set_lora(Lora::read(config, &self.card.config, file)?)
    }

    /// Write `adapter_config.json` and `adapter_model.safetensors` into a directory, as PEFT does.
    pub fn save_lora(&self, dir: &Path, base_model_name_or_path: &str) -> Result<()> {
        let lora = self.lora.as_ref().ok_or_else(no_adapter)?;
        lora.write(dir, base_model_name_or_path)
    }

    /// The adapter's config, if there is one.
    pub fn lora_config(&self) -> Option<&LoraConfig> {
        self.lora.as_ref().map(|lora| &lora.config)
    }

    /// The trainable tensors, in the order of the flat buffer.
    pub fn parameters(&self) -> Vec<ParameterInfo> {
        self.lora.as_ref().map_or_else(Vec::new, |lora| lora.parameters.iter().map(|p| p.info.clone()).collect())
    }

    /// The flat LoRA buffer.
    pub fn parameter_values(&self) -> Result<Vec<f32>> {
        Ok(self.lora.as_ref().map_or_else(Vec::new, |lora| lora.values.clone()))
    }

    /// Replace the flat LoRA buffer.
    pub fn set_parameter_values(&mut self, values: &[f32]) -> Result<()> {
        let mut lora = self.lora.take().ok_or_else(no_adapter)?;
        if values.len() != lora.values.len() {
            let detail = format!("{} values for {} LoRA parameters", values.len(), lora.values.len());
            self.lora = Some(lora);
            return Err(EngineError::Input(detail));
        }
        lora.values.copy_from_slice(values);
        self.set_lora(lora)
    }

    fn set_lora(&mut self, lora: Lora) -> Result<()> {
        let (r, scaling) = (lora.config.r, lora.config.scaling());
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for linear in layer.linears_mut() {
                linear.set_lora(r, scaling, |module| lora.pair(index, module))?;
            }
        }
        self.lora = Some(lora);
        Ok(())
    }

    /// Log-probs and entropies of the completions; no gradient.
    pub fn score(&self, rows: &[Row], temperature: f64, adapter: Adapter) -> Result<Vec<RowScore>> {
        let packing = self.pack(rows)?;
        if packing.targets.is_empty() {
            return Ok(vec![RowScore::default(); rows.len()]);
        }
        let mut x = self.embed(&packing.ids)?;
        for layer in &self.layers {
            x = layer.forward(&x, &packing, adapter == Adapter::On)?.0;
        }
        Ok(by_row(rows, &self.head.score(&x, &packing.targets, temperature)?))
    }

    /// One forward over the rows, then `loss` gets the new scores and returns dL/dlogp per row and
    /// token; the backward pass adds dL/dparameter to `gradient`, which is flat, in the order of
    /// [`Policy::parameters`].
    pub fn forward_backward(
        &self,
        rows: &[Row],
        temperature: f64,
        loss: &mut LossGradient<'_>,
        gradient: &mut [f32],
    ) -> Result<Vec<RowScore>> {
        let lora = self.lora.as_ref().ok_or_else(no_adapter)?;
        if gradient.len() != lora.values.len() {
            let detail = format!("a gradient of {} for {} LoRA parameters", gradient.len(), lora.values.len());
            return Err(EngineError::Input(detail));
        }
        let packing = self.pack(rows)?;
        if packing.targets.is_empty() {
            let scores = vec![RowScore::default(); rows.len()];
            loss(&scores)?;
            return Ok(scores);
        }
        // Forward, keeping each layer's input only.
        let mut inputs = Vec::with_capacity(self.layers.len());
        let mut x = self.embed(&packing.ids)?;
        for layer in &self.layers {
            let y = layer.forward(&x, &packing, true)?.0;
            inputs.push(std::mem::replace(&mut x, y));
        }
        let scored = self.head.score(&x, &packing.targets, temperature)?;
        let scores = by_row(rows, &scored);
        let g = loss(&scores)?;
        if g.len() != rows.len() || g.iter().zip(rows).any(|(g, row)| g.len() != row.completion.len()) {
            return Err(EngineError::Input("the loss gave gradients of the wrong shape".to_owned()));
        }
        let g = g.concat();
        if g.iter().all(|g| *g == 0.0) {
            return Ok(scores);
        }
        // Backward from the top, one layer's activations at a time.
        let mut dx = self.head.vjp(&scored, &packing.targets, temperature, &g, packing.ids.len())?;
        drop((scored, x));
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let Some(input) = inputs.pop() else { break };
            let (below, gradients) = layer.vjp(&input, &packing, &dx)?;
            dx = below;
            for (linear, layer_gradient) in layer.linears().into_iter().zip(&gradients) {
                let Some(layer_gradient) = layer_gradient else { continue };
                for block in linear.blocks() {
                    if let Some((a, b)) = lora.pair_mut(index, block.part.module, gradient) {
                        linear.add_gradient(block, layer_gradient, a, b);
                    }
                }
            }
        }
        Ok(scores)
    }

    /// The full logits at some positions of one sequence.
    pub fn logits(&self, ids: &[u32], positions: &[usize], adapter: Adapter) -> Result<Vec<Vec<f32>>> {
        if ids.is_empty() || positions.iter().any(|p| *p >= ids.len()) {
            return Err(EngineError::Input(format!("positions {positions:?} of a sequence of {} tokens", ids.len())));
        }
        let packing = Packing::sequences(&[ids], &self.windows, |n| self.rope.table(n));
        let mut x = self.embed(&packing.ids)?;
        for layer in &self.layers {
            x = layer.forward(&x, &packing, adapter == Adapter::On)?.0;
        }
        let at = positions.iter().map(|p| *p as u32).collect::<Vec<u32>>();
        let x = x.index_select(&Tensor::from_vec(at, positions.len(), &self.device)?, 0)?;
        Ok(self.head.logits(&x)?.to_vec2()?)
    }

    fn pack(&self, rows: &[Row]) -> Result<Packing> {
        let vocab_size = self.head.vocab_size() as u32;
        for row in rows {
            if let Some(id) = row.completion.iter().find(|id| **id >= vocab_size) {
                return Err(EngineError::Input(unknown_token(*id, vocab_size)));
            }
        }
        Packing::rows(rows, &self.windows, |n| self.rope.table(n))
    }

    /// `[T]` ids → `[T, hidden]`.
    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let vocab_size = self.head.vocab_size() as u32;
        if let Some(id) = ids.iter().find(|id| **id >= vocab_size) {
            return Err(EngineError::Input(unknown_token(*id, vocab_size)));
        }
        let ids = Tensor::from_vec(ids.to_vec(), ids.len(), &self.device)?;
        Ok(self.embedding.index_select(&ids, 0)?)
    }

    fn heads(&self) -> Heads {
        layer::heads(&self.card.config)
    }
}

fn no_adapter() -> EngineError {
    EngineError::Adapter("the model has no adapter".to_owned())
}

fn unknown_token(id: u32, vocab_size: u32) -> String {
    format!("token id {id} is not below vocab_size {vocab_size}; the tokenizer does not belong to this model")
}

fn by_row(rows: &[Row], scored: &Scored) -> Vec<RowScore> {
    let mut scores = scored.scores.iter();
    let rows = rows.iter().map(|row| {
        let (logps, entropies) = scores.by_ref().take(row.completion.len()).map(|s| (s.logp, s.entropy)).unzip();
        RowScore { logps, entropies }
    });
    rows.collect()
}
