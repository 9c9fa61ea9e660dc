//! The part of a decoder layer that mixes tokens, between its projections: attention, or a Gated DeltaNet.

use super::attention::{SavedAttention, SelfAttention, wrong_kind};
use super::batch::{Batch, Norm, Places};
use crate::backend::{CachedLayer, Compute, Decode};
use crate::error::Result;
use crate::load::Weights;
use crate::modelcard::{DeltaNet, ModelDescription};
use crate::ops::delta;

/// The part of a decoder layer that mixes tokens.
#[derive(Clone, Debug)]
pub enum Mixer<B: Compute> {
    /// Attention to keys and values.
    Attention(Box<SelfAttention<B>>),
    /// A Gated DeltaNet, which has a state of constant size.
    Delta(B::DeltaNet),
}

/// The values of prompts that later tokens read.
#[derive(Debug)]
pub enum Cached<B: Compute> {
    /// Rows `[q | k | v]` of all tokens.
    Keys(B::Tensor),
    /// The states after the prompts.
    States(B::DeltaStates),
}

/// The values of the forward pass that the backward pass reads.
#[derive(Debug)]
pub enum SavedMixer<B: Compute> {
    /// The values that attention has saved.
    Attention(SavedAttention<B>),
    /// Values of a Gated DeltaNet.
    Delta {
        /// The rows after the input projections.
        x: B::Tensor,
        /// The output of the layer, before its projection.
        mixed: B::Tensor,
    },
}

impl<B: Compute> Mixer<B> {
    /// Loads the decoder layer `index`.
    pub fn load(backend: &B, weights: &mut Weights, config: &ModelDescription, index: usize) -> Result<Self> {
        match config.delta_net.as_ref().filter(|_| config.is_delta_net(index)) {
            None => Ok(Mixer::Attention(Box::new(SelfAttention::load(backend, weights, config, index)?))),
            Some(net) => {
                let mut values = |name: &str| -> Result<Vec<f32>> {
                    Ok(weights.values(&format!("model.layers.{index}.linear_attn.{name}"))?.0)
                };
                let weights = delta::Weights {
                    shape: shape(net),
                    conv: values("conv1d.weight")?,
                    a_log: values("A_log")?,
                    dt_bias: values("dt_bias")?,
                    norm: values("norm.weight")?,
                    eps: config.rms_norm_eps as f32,
                };
                Ok(Mixer::Delta(backend.upload_delta_net(weights)?))
            }
        }
    }

    /// The values that the layer keeps of a sequence during generation.
    pub fn cached_layer(&self) -> CachedLayer {
        match self {
            Mixer::Attention(attention) => CachedLayer::Keys(attention.window),
            Mixer::Delta(_) => CachedLayer::State,
        }
    }

    /// Replaces the weights of norms; `norm` returns the trained norm with this name inside the layer.
    pub fn set_norms(&mut self, norm: impl Fn(&str) -> Result<Norm<B>>) -> Result<()> {
        match self {
            Mixer::Attention(attention) => attention.set_norms(norm),
            Mixer::Delta(_) => Ok(()),
        }
    }

    /// Computes a packed batch; also returns what later tokens read of the batch's prompts.
    pub fn forward(&self, backend: &B, projection: B::Tensor, batch: &Batch<'_, B>) -> Result<(B::Tensor, Cached<B>)> {
        match self {
            Mixer::Attention(attention) => {
                let (out, qkv) = attention.forward(backend, projection, batch)?;
                Ok((out, Cached::Keys(qkv)))
            }
            Mixer::Delta(net) => {
                let (out, states) = backend.delta_net(net, &batch.packing.groups, &projection)?;
                Ok((out, Cached::States(states)))
            }
        }
    }

    /// Computes a packed batch and keeps the values that the backward pass reads, the output among them.
    pub fn forward_saving(&self, backend: &B, projection: B::Tensor, batch: &Batch<'_, B>) -> Result<SavedMixer<B>> {
        match self {
            Mixer::Attention(attention) => {
                Ok(SavedMixer::Attention(attention.forward_saving(backend, projection, batch)?))
            }
            Mixer::Delta(net) => {
                let mixed = backend.delta_net(net, &batch.packing.groups, &projection)?.0;
                Ok(SavedMixer::Delta { x: projection, mixed })
            }
        }
    }

    /// Returns dL/dprojection from dL/dout, and adds the gradients of trained parameters.
    pub fn vjp(
        &self,
        backend: &B,
        saved: SavedMixer<B>,
        batch: &Batch<'_, B>,
        d_out: B::Tensor,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        match (self, saved) {
            (Mixer::Attention(attention), SavedMixer::Attention(saved)) => {
                attention.vjp(backend, saved, batch, d_out, gradient)
            }
            (Mixer::Delta(net), SavedMixer::Delta { x, mixed }) => {
                drop(mixed);
                backend.delta_net_vjp(net, &batch.packing.groups, &x, &d_out)
            }
            (Mixer::Attention(_) | Mixer::Delta(_), _) => Err(wrong_kind()),
        }
    }
}

impl<B: Compute> SavedMixer<B> {
    /// The mixer's output, without the gate on attention; the second value is the output with the gate, if there is one.
    pub fn output(&self, backend: &B) -> Result<(&B::Tensor, Option<B::Tensor>)> {
        match self {
            SavedMixer::Attention(saved) => saved.output(backend),
            SavedMixer::Delta { mixed, .. } => Ok((mixed, None)),
        }
    }
}

impl<B: Decode> Mixer<B> {
    /// Appends one token to each sequence of the cache in layer `index`, and computes the layer's output.
    pub fn step(
        &self,
        backend: &B,
        cache: &mut B::Cache,
        index: usize,
        projection: B::Tensor,
        places: Places<'_, B>,
    ) -> Result<B::Tensor> {
        match self {
            Mixer::Attention(attention) => {
                let projected = attention.project(backend, projection, places, false)?;
                let attended = backend.attend_cached(&attention.heads, cache, index, &projected.rotated)?;
                attention.gated(backend, attended, projected.gate.as_ref())
            }
            Mixer::Delta(net) => backend.delta_net_cached(net, cache, index, &projection),
        }
    }

    /// Appends the remaining tokens of prompts, given as (index, number of tokens), and computes the layer's output.
    pub fn extend(
        &self,
        backend: &B,
        cache: &mut B::Cache,
        (prompts, index): (&[(usize, usize)], usize),
        projection: B::Tensor,
        places: Places<'_, B>,
    ) -> Result<B::Tensor> {
        match self {
            Mixer::Attention(attention) => {
                let projected = attention.project(backend, projection, places, false)?;
                let attended = backend.extend_prompts(cache, prompts, index, &projected.rotated)?;
                attention.gated(backend, attended, projected.gate.as_ref())
            }
            Mixer::Delta(net) => backend.extend_states(net, cache, prompts, index, &projection),
        }
    }

    /// Stores what later tokens read of the prompts from index `first` on.
    pub fn fill(backend: &B, cache: &mut B::Cache, (first, index): (usize, usize), cached: Cached<B>) -> Result<()> {
        match cached {
            Cached::Keys(qkv) => backend.fill_prompts(cache, first, index, &qkv),
            Cached::States(states) => backend.fill_states(cache, first, index, states),
        }
    }
}

/// The sizes of a model's Gated DeltaNet layers.
fn shape(net: &DeltaNet) -> delta::Shape {
    let DeltaNet { layers: _, num_key_heads, num_value_heads, key_dim, value_dim, kernel } = net.clone();
    delta::Shape { num_key_heads, num_value_heads, key_dim, value_dim, kernel }
}
