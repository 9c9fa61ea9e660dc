//! The decoder: one description, per-layer recomputation, log-probs by chunks.

pub mod decode;
pub mod full;
pub mod head;
pub mod layer;
pub mod linear;
pub mod packing;
pub mod pass;
pub mod rope;

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::error::{EngineError, Result};
use super::load::Weights;
use super::lora::LoraConfig;
pub use super::lora::ParameterInfo;
use super::lora::{self, Lora};
use super::ops::{self, slices::Heads};
use crate::modelcard::{self, ModelCard};
use crate::spec::ComputeDtype;

pub use decode::DecodeState;
use full::Full;
use head::{Head, HeadSlots, Scored};
use layer::{Layer, LayerGradient};
use linear::LinearGradient;
use packing::Packing;
use pass::{Pass, RowDropout, TokenDropout};
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

/// A language model on the CPU. Trained is a LoRA adapter over frozen weights ([`Policy::add_lora`]), or everything
/// ([`Policy::train_all`]), or nothing.
#[derive(Debug)]
pub struct Policy {
    card: ModelCard,
    device: Device,
    /// `[vocab, hidden]`
    embedding: Tensor,
    layers: Vec<Layer>,
    windows: Vec<Option<usize>>,
    head: Head,
    rope: Arc<RopeTables>,
    lora: Option<Lora>,
    full: Option<Full>,
}

impl Policy {
    /// Load a model directory; f32 compute.
    pub fn load(dir: &Path, device: &Device) -> Result<Policy> {
        Policy::load_card(dir, modelcard::read(dir)?, device)
    }

    /// As [`Policy::load`], with matrices and the inputs of matrix products in this precision; sums are f32.
    pub fn load_dtype(dir: &Path, device: &Device, dtype: ComputeDtype) -> Result<Policy> {
        Policy::load_weights(dir, modelcard::read(dir)?, device, dtype)
    }

    /// As [`Policy::load`], with a card that was read before.
    pub fn load_card(dir: &Path, card: ModelCard, device: &Device) -> Result<Policy> {
        Policy::load_weights(dir, card, device, ComputeDtype::F32)
    }

    fn load_weights(dir: &Path, card: ModelCard, device: &Device, dtype: ComputeDtype) -> Result<Policy> {
        if !device.is_cpu() {
            return Err(EngineError::Input(format!("device {device:?} is not supported by this build; use cpu")));
        }
        let config = card.config.clone();
        let mut weights = Weights::open(dir, &card).with_dtype(dtype);
        let embedding = weights.tensor(EMBEDDING, device)?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| Layer::load(&mut weights, &config, index, device))
            .collect::<Result<Vec<Layer>>>()?;
        let head = Head {
            norm: weights.values(NORM)?.0,
            eps: config.rms_norm_eps as f32,
            weight: match config.tie_word_embeddings {
                true => embedding.clone(),
                false => weights.tensor(HEAD, device)?,
            },
            bf16: weights.bf16(),
        };
        let rope = Arc::new(RopeTables::new(&config));
        let windows = config.windows;
        Ok(Policy { card, device: device.clone(), embedding, layers, windows, head, rope, lora: None, full: None })
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

    /// Change the dropout of the adapter, which is no part of its weights.
    pub fn set_lora_dropout(&mut self, dropout: f64) {
        if let Some(lora) = &mut self.lora {
            lora.config.dropout = dropout;
        }
    }

    /// Train every weight, beginning with the model's own; `dir` is the directory it was loaded from.
    pub fn train_all(&mut self, dir: &Path) -> Result<()> {
        self.set_full(Full::of_model(dir, &self.card)?)
    }

    /// Train every weight, beginning with those of a checkpoint that [`Policy::save_full`] made.
    pub fn load_full(&mut self, dir: &Path) -> Result<()> {
        self.set_full(Full::read(dir, &self.card)?)
    }

    /// Write `model.safetensors` into a directory: all weights in f32, under transformers' names.
    pub fn save_full(&self, dir: &Path) -> Result<()> {
        let full = self.full.as_ref().ok_or_else(|| EngineError::Input("not every weight is trained".to_owned()))?;
        full.write(dir)
    }

    /// Whether every weight is trained.
    pub fn trains_all(&self) -> bool {
        self.full.is_some()
    }

    /// The policy as it computes now, to keep as a reference: score it with [`Adapter::On`]. Frozen weights are shared,
    /// not copied.
    pub fn frozen_copy(&self) -> Policy {
        Policy {
            card: self.card.clone(),
            device: self.device.clone(),
            embedding: self.embedding.clone(),
            layers: self.layers.clone(),
            windows: self.windows.clone(),
            head: self.head.clone(),
            rope: self.rope.clone(),
            lora: None,
            full: None,
        }
    }

    /// The trainable tensors, in the order of the flat buffer.
    pub fn parameters(&self) -> Vec<ParameterInfo> {
        match (&self.lora, &self.full) {
            (_, Some(full)) => full.parameters.clone(),
            (Some(lora), None) => lora.parameters.iter().map(|p| p.info.clone()).collect(),
            (None, None) => Vec::new(),
        }
    }

    /// The flat buffer of what is trained.
    pub fn flat(&self) -> &[f32] {
        match (&self.lora, &self.full) {
            (_, Some(full)) => &full.values,
            (Some(lora), None) => &lora.values,
            (None, None) => &[],
        }
    }

    /// A copy of [`Policy::flat`].
    pub fn parameter_values(&self) -> Result<Vec<f32>> {
        Ok(self.flat().to_vec())
    }

    /// Replace the flat buffer.
    pub fn set_parameter_values(&mut self, values: &[f32]) -> Result<()> {
        self.update_parameters(|flat| {
            if values.len() != flat.len() {
                let detail = format!("{} values for {} trainable parameters", values.len(), flat.len());
                return Err(EngineError::Input(detail));
            }
            flat.copy_from_slice(values);
            Ok(())
        })
    }

    /// Change the flat buffer in place, and with it what computes.
    pub fn update_parameters(&mut self, change: impl FnOnce(&mut [f32]) -> Result<()>) -> Result<()> {
        match (self.lora.take(), self.full.take()) {
            (_, Some(mut full)) => {
                let changed = change(&mut full.values);
                changed.and(self.set_full(full))
            }
            (Some(mut lora), None) => {
                let changed = change(&mut lora.values);
                changed.and(self.set_lora(lora))
            }
            (None, None) => Err(no_adapter()),
        }
    }

    /// Compute with these weights.
    fn set_full(&mut self, full: Full) -> Result<()> {
        let config = &self.card.config;
        // One matrix at a time, so that no second copy of the model is alive.
        let matrix = |name: &str, device: &Device| -> Result<Tensor> {
            let mut values = full.get(name)?.to_vec();
            if self.head.bf16 {
                ops::slices::round_bf16(&mut values);
            }
            Ok(Tensor::from_vec(values, (config.vocab_size, config.hidden_size), device)?)
        };
        let embedding = matrix(EMBEDDING, &self.device)?;
        let head_weight = if config.tie_word_embeddings { embedding.clone() } else { matrix(HEAD, &self.device)? };
        self.embedding = embedding;
        self.head.weight = head_weight;
        self.head.norm.copy_from_slice(full.get(NORM)?);
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let name = |inside: &str| format!("model.layers.{index}.{inside}");
            layer.set_norms(|inside| full.get(&name(inside)))?;
            for linear in layer.linears_mut() {
                linear.set_weights(|module| {
                    let weight = full.get(&name(&format!("{}.weight", module.path())))?;
                    Ok((weight, full.get(&name(&format!("{}.bias", module.path()))).ok()))
                })?;
                linear.clear_lora();
            }
        }
        self.lora = None;
        self.full = Some(full);
        Ok(())
    }

    fn set_lora(&mut self, lora: Lora) -> Result<()> {
        let (r, scaling) = (lora.config.r, lora.config.scaling());
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for linear in layer.linears_mut() {
                linear.set_lora(r, scaling, |module| lora.pair(index, module))?;
            }
        }
        self.lora = Some(lora);
        self.full = None;
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
            x = layer.forward(&x, &packing, Pass::inference(adapter))?.0;
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
        self.forward_backward_dropped(rows, temperature, None, loss, gradient)
    }

    /// As [`Policy::forward_backward`], with the adapter's dropout drawn from `dropout`: the scores are those of what is
    /// left.
    pub fn forward_backward_dropped(
        &self,
        rows: &[Row],
        temperature: f64,
        dropout: Option<RowDropout>,
        loss: &mut LossGradient<'_>,
        gradient: &mut [f32],
    ) -> Result<Vec<RowScore>> {
        if self.flat().is_empty() {
            return Err(no_adapter());
        }
        if gradient.len() != self.flat().len() {
            let detail = format!("a gradient of {} for {} trainable parameters", gradient.len(), self.flat().len());
            return Err(EngineError::Input(detail));
        }
        let packing = self.pack(rows)?;
        if packing.targets.is_empty() {
            let scores = vec![RowScore::default(); rows.len()];
            loss(&scores)?;
            return Ok(scores);
        }
        let p = self.lora_config().map_or(0.0, |lora| lora.dropout);
        let dropout = dropout.filter(|_| p > 0.0).map(|dropout| TokenDropout::new(p, dropout, rows, &packing));
        let pass = Pass { adapter: true, full: self.full.is_some(), dropout: dropout.as_ref(), layer: 0 };
        // Forward, keeping each layer's input only.
        let mut inputs = Vec::with_capacity(self.layers.len());
        let mut x = self.embed(&packing.ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let y = layer.forward(&x, &packing, pass.in_layer(index))?.0;
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
        let mut dx = self.head_vjp(&scored, &packing, temperature, &g, gradient)?;
        drop((scored, x));
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let Some(input) = inputs.pop() else { break };
            let (below, gradients) = layer.vjp(&input, &packing, &dx, pass.in_layer(index))?;
            dx = below;
            self.add_gradients(index, gradients, gradient)?;
        }
        if let Some(full) = &self.full {
            let (slot, width) = (full.slot(EMBEDDING, gradient)?, self.card.config.hidden_size);
            ops::with_values(&dx, |dx| {
                for (id, dx) in packing.ids.iter().zip(dx.chunks_exact(width)) {
                    ops::slices::add_scaled(&mut slot[*id as usize * width..][..width], 1.0, dx);
                }
            })?;
        }
        Ok(scores)
    }

    fn head_vjp(
        &self,
        scored: &Scored,
        packing: &Packing,
        temperature: f64,
        g: &[f32],
        gradient: &mut [f32],
    ) -> Result<Tensor> {
        let Some(full) = &self.full else { return self.head.vjp(scored, packing, temperature, g, None) };
        let name = if self.card.config.tie_word_embeddings { EMBEDDING } else { HEAD };
        let mut norm = vec![0f32; self.head.norm.len()];
        let slots = HeadSlots { norm: &mut norm, weight: full.slot(name, gradient)? };
        let dx = self.head.vjp(scored, packing, temperature, g, Some(slots))?;
        ops::slices::add_scaled(full.slot(NORM, gradient)?, 1.0, &norm);
        Ok(dx)
    }

    /// Add a layer's gradients to the flat one.
    fn add_gradients(&self, index: usize, gradients: LayerGradient, flat: &mut [f32]) -> Result<()> {
        let LayerGradient { linears, norms } = gradients;
        let name = |inside: &str| format!("model.layers.{index}.{inside}");
        for (linear, gradient) in self.layers[index].linears().into_iter().zip(linears) {
            match (gradient, &self.lora, &self.full) {
                (LinearGradient::Lora(gradient), Some(lora), _) => {
                    for block in linear.blocks() {
                        if let Some((a, b)) = lora.pair_mut(index, block.part.module, flat) {
                            linear.add_gradient(block, &gradient, a, b);
                        }
                    }
                }
                (LinearGradient::Full { weight, bias }, _, Some(full)) => {
                    for part in &linear.parts {
                        let module = part.module.path();
                        let slot = full.slot(&name(&format!("{module}.weight")), flat)?;
                        let rows = weight.narrow(0, part.begin, part.out)?;
                        ops::with_values(&rows, |values| ops::slices::add_scaled(slot, 1.0, values))?;
                        if let Some(bias) = &bias {
                            let slot = full.slot(&name(&format!("{module}.bias")), flat)?;
                            ops::slices::add_scaled(slot, 1.0, &bias[part.begin..part.begin + part.out]);
                        }
                    }
                }
                (LinearGradient::None | LinearGradient::Lora(_) | LinearGradient::Full { .. }, _, _) => {}
            }
        }
        if let (Some(norms), Some(full)) = (norms, &self.full) {
            let mut add = |inside: &str, values: &[f32]| -> Result<()> {
                ops::slices::add_scaled(full.slot(&name(inside), flat)?, 1.0, values);
                Ok(())
            };
            add("input_layernorm.weight", &norms.input)?;
            add("post_attention_layernorm.weight", &norms.post)?;
            if let Some((q, k)) = &norms.qk {
                add("self_attn.q_norm.weight", q)?;
                add("self_attn.k_norm.weight", k)?;
            }
        }
        Ok(())
    }

    /// The full logits at some positions of one sequence.
    pub fn logits(&self, ids: &[u32], positions: &[usize], adapter: Adapter) -> Result<Vec<Vec<f32>>> {
        if ids.is_empty() || positions.iter().any(|p| *p >= ids.len()) {
            return Err(EngineError::Input(format!("positions {positions:?} of a sequence of {} tokens", ids.len())));
        }
        let packing = Packing::sequences(&[ids], &self.windows, |n| self.rope.table(n));
        let mut x = self.embed(&packing.ids)?;
        for layer in &self.layers {
            x = layer.forward(&x, &packing, Pass::inference(adapter))?.0;
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

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";

fn no_adapter() -> EngineError {
    EngineError::Adapter("the model has no adapter, and its weights are frozen".to_owned())
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
