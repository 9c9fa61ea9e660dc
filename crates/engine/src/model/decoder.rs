//! The decoder over any backend: packed forward pass, and backward pass layer by layer. The submodule `generate`
//! holds prefill and decode.

mod generate;
mod serving;

use std::sync::Arc;

use super::batch::{Batch, Norm};
use super::layer::{Layer, Saved};
use super::packing::{Packing, Target};
use super::pass::{Applied, Pass};
use super::rope::{Angles, Ropes};
use super::{Adapter, EMBEDDING, HEAD, NORM, Trajectory, unknown_token};
use crate::backend::{Compute, Flat, FullSlot, Head, HeadBackward};
use crate::error::{EngineError, Result};
use crate::load::Weights;
use crate::lora::Lora;
use crate::model::full::Full;
use crate::modelcard::ModelDescription;
use crate::ops::slices::TokenScore;

/// The weights of a model on a backend.
#[derive(Clone, Debug)]
pub struct Decoder<B: Compute> {
    backend: B,
    config: Arc<ModelDescription>,
    embedding: B::Weight,
    layers: Vec<Layer<B>>,
    norm: Norm<B>,
    /// The language-model head; its weight is the embedding itself if the two are tied.
    head: Head<B>,
    /// Offsets of embedding and head in the flat gradient, if they are trained.
    slots: Option<(usize, usize)>,
    ropes: Arc<Ropes>,
    gradient_checkpointing: bool,
}

/// A loss over the scored tokens of a batch.
pub struct TargetLoss<'l> {
    /// Whether the head sums up a target's gradient as it scores it, one entry per target.
    pub trained: &'l [bool],
    /// Maps the new log-probs to dL/dlogp, one value per target.
    pub gradient: &'l mut dyn FnMut(&[TokenScore]) -> Result<Vec<f32>>,
}

impl<B: Compute> Decoder<B> {
    /// Loads the weights of a checkpoint.
    pub fn load(backend: B, weights: &mut Weights, config: &ModelDescription) -> Result<Self> {
        let mut matrix = |name: &str| -> Result<B::Weight> {
            backend.upload_weight(weights.values(name)?.0, config.hidden_size, None)
        };
        let embedding = matrix(EMBEDDING)?;
        let weight = if config.tie_word_embeddings { embedding.clone() } else { matrix(HEAD)? };
        let head = Head { weight, softcap: config.logits_softcap.map(|softcap| softcap as f32) };
        let layers = (0..config.num_hidden_layers)
            .map(|index| Layer::load(&backend, weights, config, index))
            .collect::<Result<Vec<Layer<B>>>>()?;
        let norm = Norm::new(&backend, weights.values(NORM)?.0, config.norm_offset as f32)?;
        let ropes = Arc::new(Ropes::new(config));
        Ok(Decoder {
            backend,
            config: Arc::new(config.clone()),
            embedding,
            layers,
            norm,
            head,
            slots: None,
            ropes,
            gradient_checkpointing: false,
        })
    }

    /// The backend that the decoder runs on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Frees buffers that the backend caches. Call it between sampling and training, or if memory is short.
    pub fn release(&self) {
        self.backend.release_cached();
    }

    /// Sets whether the backward pass recomputes a layer's activations instead of storing them; the
    /// results do not change.
    pub fn set_gradient_checkpointing(&mut self, gradient_checkpointing: bool) {
        self.gradient_checkpointing = gradient_checkpointing;
    }

    /// Starts training a LoRA adapter with these values.
    pub fn set_lora(&mut self, lora: &Lora) -> Result<()> {
        let parameters = self.backend.device_buffer(&lora.values)?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for linear in layer.linears_mut() {
                linear.set_lora(&self.backend, parameters, |module| lora.slot(index, module))?;
            }
        }
        Ok(())
    }

    /// Starts training all weights, with these initial values.
    pub fn set_full(&mut self, full: &Full) -> Result<()> {
        let backend = self.backend.clone();
        let parameters = backend.device_buffer(&full.values)?;
        // Old and new weights exist at the same time: free the buffers of the last training pass first.
        backend.release_cached();
        // Replace one matrix at a time, so that there is never a second copy of the model.
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden_size);
        let matrix = |name: &str| -> Result<B::Weight> {
            let slot = FullSlot { outputs: 0..vocab, weight: full.place(name)?.start, bias: None };
            backend.weight_from(parameters, &[slot], hidden)
        };
        let at = |name: &str| full.place(name).map(|place| place.start);
        self.embedding = matrix(EMBEDDING)?;
        let tied = self.config.tie_word_embeddings;
        self.head.weight = if tied { self.embedding.clone() } else { matrix(HEAD)? };
        self.slots = Some((at(EMBEDDING)?, at(if tied { EMBEDDING } else { HEAD })?));
        self.norm = Norm::trained(&backend, parameters, full.place(NORM)?, self.config.norm_offset as f32)?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let name = |inside: &str| format!("model.layers.{index}.{inside}");
            layer.set_norms(&backend, parameters, |inside| full.place(&name(inside)))?;
            for linear in layer.linears_mut() {
                linear.set_weights(&backend, parameters, |module| {
                    let path = module.path();
                    Ok((at(&name(&format!("{path}.weight")))?, at(&name(&format!("{path}.bias"))).ok()))
                })?;
            }
        }
        Ok(())
    }

    /// Number of tokens in the vocabulary.
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn windows(&self) -> &[Option<usize>] {
        &self.config.windows
    }

    /// Packs rows to be scored into one batch without padding.
    pub fn pack(&self, rows: &[Trajectory<'_>]) -> Result<Packing> {
        for row in rows {
            row.segments.0.iter().try_for_each(|segment| self.check_ids(segment.ids()))?;
        }
        Packing::rows(rows, self.windows(), &self.ropes)
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|id| **id as usize >= self.vocab_size()) {
            Some(id) => Err(EngineError::Input(unknown_token(*id, self.vocab_size() as u32))),
            None => Ok(()),
        }
    }

    fn embed(&self, ids: &[u32]) -> Result<B::Tensor> {
        self.check_ids(ids)?;
        self.scaled_embeddings(self.backend.embed(&self.embedding, ids)?)
    }

    /// Multiplies embeddings by the embedding multiplier of models that have one. The backward pass applies it to the
    /// gradients of the embeddings.
    fn scaled_embeddings(&self, x: B::Tensor) -> Result<B::Tensor> {
        match self.config.embedding_multiplier as f32 {
            1.0 => Ok(x),
            multiplier => self.backend.scaled(&x, multiplier),
        }
    }

    /// Returns the memory of the matrices in bytes: of the linear layers, and of embedding and head; None if the backend does
    /// not know it.
    pub fn matrix_bytes(&self) -> Option<(usize, usize)> {
        let linear = self.layers.iter().map(|layer| layer.matrix_bytes(&self.backend)).sum::<Option<usize>>()?;
        let embedding = self.backend.matrix_bytes(&self.embedding)?;
        let head = match self.config.tie_word_embeddings {
            true => 0,
            false => self.backend.matrix_bytes(&self.head.weight)?,
        };
        Some((linear, embedding + head))
    }

    fn batch<'p>(&self, packing: &'p Packing) -> Result<Batch<'p, B>> {
        Ok(Batch { packing, angles: Angles::new(&self.backend, &packing.token_tables, &packing.positions)? })
    }

    /// Computes the residual stream of a batch after the last layer.
    fn hidden(&self, packing: &Packing, adapter: Adapter) -> Result<B::Tensor> {
        self.hidden_with(packing, Pass::inference(adapter).adapter)
    }

    fn hidden_with(&self, packing: &Packing, applied: Applied<'_>) -> Result<B::Tensor> {
        let batch = self.batch(packing)?;
        let mut x = self.embed(&packing.ids)?;
        for layer in &self.layers {
            x = layer.forward(&self.backend, &x, &batch, Pass::applying(applied))?.0;
        }
        Ok(x)
    }

    fn normed(&self, x: &B::Tensor) -> Result<B::Tensor> {
        self.over_divisor(self.backend.rms_norm(x, &self.norm.weight, self.eps())?)
    }

    /// Divides the head's input by the divisor of the logits. The operation is its own transpose.
    fn over_divisor(&self, x: B::Tensor) -> Result<B::Tensor> {
        match self.config.logits_divisor as f32 {
            1.0 => Ok(x),
            divisor => self.backend.scaled(&x, 1.0 / divisor),
        }
    }

    fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    /// Computes log-probs and entropies of the packing's targets, without gradient.
    pub fn score(&self, packing: &Packing, temperature: f64, adapter: Adapter) -> Result<Vec<TokenScore>> {
        let x = self.hidden(packing, adapter)?;
        let (from, ids) = split(&packing.targets);
        let normed = self.normed(&self.backend.select_rows(&x, &from)?)?;
        drop(x);
        let (scores, _) = self.backend.score(&normed, &self.head, &ids, temperature, &vec![false; ids.len()])?;
        Ok(scores)
    }

    /// Runs forward pass, loss and backward pass. The gradient may be complete only after a later wait.
    pub fn forward_backward(
        &self,
        packing: &Packing,
        temperature: f64,
        pass: Pass<'_>,
        loss: TargetLoss<'_>,
        gradient: &mut Flat,
    ) -> Result<()> {
        let backend = &self.backend;
        let gradient = backend.device_buffer_mut(gradient)?;
        let batch = self.batch(packing)?;
        // The forward pass keeps each layer's input, and the values that its backward pass reads
        // unless these are recomputed.
        let mut inputs: Vec<(B::Tensor, Option<Saved<B>>)> = Vec::with_capacity(self.layers.len());
        let mut x = self.embed(&packing.ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let pass = pass.in_layer(index);
            let (y, saved) = if self.gradient_checkpointing {
                (layer.forward(backend, &x, &batch, pass)?.0, None)
            } else {
                match layer.forward_saving(backend, &x, &batch, pass, true)? {
                    (Some(y), saved) => (y, Some(saved)),
                    (None, _) => return Err(EngineError::Input("a decoder layer returned no output".to_owned())),
                }
            };
            inputs.push((std::mem::replace(&mut x, y), saved));
        }
        let (from, ids) = split(&packing.targets);
        let hidden = backend.select_rows(&x, &from)?;
        drop(x);
        let normed = self.normed(&hidden)?;
        let (scores, scored) = backend.score(&normed, &self.head, &ids, temperature, loss.trained)?;
        let g = (loss.gradient)(&scores)?;
        if g.iter().all(|g| *g == 0.0) {
            return Ok(());
        }
        // The backward pass starts at the top and holds one layer's activations at a time.
        let head = HeadBackward {
            x: &normed,
            head: &self.head,
            targets: &ids,
            temperature,
            scored,
            g: &g,
            at: self.slots.map(|(_, head)| head),
        };
        let d_normed = self.over_divisor(backend.score_vjp(head, gradient)?)?;
        drop(normed);
        let d_hidden = backend.rms_norm_vjp(&hidden, &self.norm.weight, self.eps(), &d_normed, None)?;
        if let Some(at) = self.norm.slot {
            backend.rms_norm_weight_vjp(&hidden, self.eps(), &d_normed, gradient, at)?;
        }
        drop((hidden, d_normed));
        let mut dx = backend.scatter_rows(&d_hidden, &from, packing.ids.len())?;
        drop(d_hidden);
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let Some((input, saved)) = inputs.pop() else { break };
            let pass = pass.in_layer(index);
            let saved = match saved {
                Some(saved) => saved,
                None => layer.forward_saving(backend, &input, &batch, pass, false)?.1,
            };
            dx = layer.vjp(backend, (&input, saved), &batch, &dx, pass, gradient)?;
        }
        match self.slots {
            Some((at, _)) => backend.embed_vjp(&packing.ids, &self.scaled_embeddings(dx)?, gradient, at),
            None => Ok(()),
        }
    }

    /// Computes the full logits at some positions of one sequence.
    pub fn logits(&self, ids: &[u32], positions: &[usize], adapter: Adapter) -> Result<Vec<f32>> {
        let packing = Packing::sequences(&[(ids, ids.len())], self.windows(), &self.ropes);
        let x = self.hidden(&packing, adapter)?;
        let at: Vec<u32> = positions.iter().map(|p| *p as u32).collect();
        let normed = self.normed(&self.backend.select_rows(&x, &at)?)?;
        self.backend.download(&self.backend.logits(&normed, &self.head)?)
    }

    /// Computes the normed hidden state of each sequence's last token, `[sequences][hidden_size]`: the input
    /// of a score head.
    pub fn last_hidden(&self, sequences: &[&[u32]]) -> Result<Vec<f32>> {
        let sequences_and_lengths: Vec<(&[u32], usize)> = sequences.iter().map(|ids| (*ids, ids.len())).collect();
        let packing = Packing::sequences(&sequences_and_lengths, self.windows(), &self.ropes);
        let x = self.hidden(&packing, Adapter::Off)?;
        let mut end = 0;
        let last: Vec<u32> = sequences
            .iter()
            .map(|sequence| {
                end += sequence.len() as u32;
                end - 1
            })
            .collect();
        let last = self.backend.select_rows(&x, &last)?;
        self.backend.download(&self.backend.rms_norm(&last, &self.norm.weight, self.eps())?)
    }
}

fn split(targets: &[Target]) -> (Vec<u32>, Vec<u32>) {
    targets.iter().map(|target| (target.from as u32, target.id)).unzip()
}
