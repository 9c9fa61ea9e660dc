//! The decoder: one description, per-layer recomputation, log-probs by chunks.

pub mod decode;
pub mod full;
pub mod head;
pub mod layer;
pub mod linear;
pub mod packing;
pub mod pass;
pub mod rope;
mod trained;

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::error::{EngineError, Result};
use super::load::Weights;
use super::lora::Lora;
pub use super::lora::ParameterInfo;
use super::ops::{self, slices::Heads};
use crate::modelcard::{self, ModelCard};
use crate::spec::ComputeDtype;

pub use decode::{Chosen, DecodeState, Pick};
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
