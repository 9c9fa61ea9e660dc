//! Shared by the parts of a decoder layer: the weight of a norm, a packed batch with its rotary angles, the sizes of heads.

use std::ops::Range;

use super::packing::Packing;
use super::rope::Angles;
use crate::backend::{Buffers, Compute};
use crate::error::Result;
use crate::modelcard::ModelDescription;
use crate::ops::slices::Heads;

/// The weight of a norm, and the offset of its gradient if the norm is trained.
#[derive(Clone, Debug)]
pub struct Norm<B: Buffers> {
    /// The norm's weight, `[width]`.
    pub weight: B::Vector,
    /// Offset of the norm's weight in the flat gradient.
    pub slot: Option<usize>,
}

impl<B: Buffers> Norm<B> {
    /// Creates a norm that is not trained; `offset` is added to its weights.
    pub fn new(backend: &B, mut values: Vec<f32>, offset: f32) -> Result<Self> {
        values.iter_mut().for_each(|value| *value += offset);
        Ok(Norm { weight: backend.upload_vector(values)?, slot: None })
    }

    /// Creates a trained norm from the flat parameters.
    pub fn trained(backend: &B, parameters: &B::FlatBuffer, place: Range<usize>, offset: f32) -> Result<Self> {
        Ok(Norm { slot: Some(place.start), weight: backend.vector_from(parameters, place, offset)? })
    }
}

impl<B: Compute> Norm<B> {
    /// Adds the gradient of the norm's weight, if it is trained.
    pub fn add_gradient(
        &self,
        backend: &B,
        x: &B::Tensor,
        eps: f32,
        dy: &B::Tensor,
        gradient: &mut B::FlatBuffer,
    ) -> Result<()> {
        self.slot.map_or(Ok(()), |at| backend.rms_norm_weight_vjp(x, eps, dy, gradient, at))
    }
}

/// A packed batch and its rotary angles.
#[derive(Debug)]
pub struct Batch<'p, B: Compute> {
    /// Token ids, groups and targets.
    pub packing: &'p Packing,
    /// Rotary angles of each token.
    pub angles: Angles<B>,
}

impl<B: Compute> Batch<'_, B> {
    /// The positions of the batch's tokens.
    pub fn places(&self) -> Places<'_, B> {
        Places { positions: &self.packing.positions, angles: &self.angles }
    }
}

/// The positions of tokens in their sequences, with their rotary angles.
#[derive(Debug)]
pub struct Places<'a, B: Compute> {
    /// The position of each token, from 0.
    pub positions: &'a [usize],
    /// The rotary angles of the tokens.
    pub angles: &'a Angles<B>,
}

/// The sizes of a model's attention heads.
pub fn heads(config: &ModelDescription) -> Heads {
    let heads = Heads::new(config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let softcap = config.attention_softcap.map(|softcap| softcap as f32);
    Heads { scale: config.attention_scale as f32, softcap, ..heads }
}
