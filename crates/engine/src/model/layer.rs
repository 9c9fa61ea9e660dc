//! One decoder layer, forward and vector-Jacobian product. The backward pass needs what the forward saved; where that
//! would take too much memory it is computed again from the layer's input.

use std::ops::Range;

use super::linear::Linear;
use super::packing::Packing;
use super::pass::Pass;
use crate::backend::{Attention, AttentionBackward, Buffers, Compute, Module, Rotation};
use crate::error::Result;
use crate::load::Weights;
use crate::modelcard::ModelDescription;
use crate::ops::slices::Heads;

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct Layer<B: Compute> {
    /// Sizes of attention.
    pub heads: Heads,
    /// How many positions a token sees; None = all.
    pub window: Option<usize>,
    /// Positions turn queries and keys.
    rotates: bool,
    /// What the layer adds to the residual stream is multiplied by this.
    residual_multiplier: f32,
    eps: f32,
    input_norm: Norm<B>,
    qk_norm: Option<(Norm<B>, Norm<B>)>,
    qkv: Linear<B>,
    o: Linear<B>,
    post_norm: Norm<B>,
    gate_up: Linear<B>,
    down: Linear<B>,
}

/// A norm's weight, and where its gradient begins where it is trained.
#[derive(Clone, Debug)]
pub struct Norm<B: Buffers> {
    /// `[width]`
    pub weight: B::Vector,
    /// In the flat gradient.
    pub slot: Option<usize>,
}

/// What a layer's backward reads besides its input.
#[derive(Debug)]
pub struct Saved<B: Compute> {
    /// Before qk-norm and rope; only with qk-norm.
    qkv: Option<B::Tensor>,
    rotated: B::Tensor,
    attended: B::Tensor,
    softmax: B::Softmax,
    middle: B::Tensor,
    gate_up: B::Tensor,
}

impl<B: Buffers> Norm<B> {
    /// A frozen one.
    pub fn new(backend: &B, values: Vec<f32>) -> Result<Self> {
        Ok(Norm { weight: backend.upload_vector(values)?, slot: None })
    }

    /// One of the flat parameters.
    pub fn trained(backend: &B, parameters: &B::FlatBuffer, place: Range<usize>) -> Result<Self> {
        Ok(Norm { slot: Some(place.start), weight: backend.vector_from(parameters, place)? })
    }
}

impl<B: Compute> Norm<B> {
    fn add_gradient(
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

impl<B: Compute> Layer<B> {
    /// Load layer `index`.
    pub fn load(backend: &B, weights: &mut Weights, config: &ModelDescription, index: usize) -> Result<Self> {
        let prefix = format!("model.layers.{index}");
        let mut norm = |name: &str| Norm::new(backend, weights.values(&format!("{prefix}.{name}.weight"))?.0);
        let input_norm = norm("input_layernorm")?;
        let post_norm = norm("post_attention_layernorm")?;
        let qk_norm = match config.qk_norm {
            true => Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?)),
            false => None,
        };
        let mut linear = |modules: &[Module], bias| Linear::load(backend, weights, &prefix, modules, bias);
        let qkv = linear(&[Module::Q, Module::K, Module::V], config.qkv_bias)?;
        let o = linear(&[Module::O], config.o_bias)?;
        let gate_up = linear(&[Module::Gate, Module::Up], config.mlp_bias)?;
        let down = linear(&[Module::Down], config.mlp_bias)?;
        let (heads, window, rotates) = (heads(config), config.windows[index], config.rotates[index]);
        let eps = config.rms_norm_eps as f32;
        let residual_multiplier = config.residual_multiplier as f32;
        Ok(Layer {
            heads,
            window,
            rotates,
            residual_multiplier,
            eps,
            input_norm,
            qk_norm,
            qkv,
            o,
            post_norm,
            gate_up,
            down,
        })
    }

    /// The fused linear layers: qkv, o, gate-up, down.
    pub fn linears_mut(&mut self) -> [&mut Linear<B>; 4] {
        [&mut self.qkv, &mut self.o, &mut self.gate_up, &mut self.down]
    }

    /// Replace the norms' weights: `place` says where they lie in the flat parameters, by their names inside the layer.
    pub fn set_norms(
        &mut self,
        backend: &B,
        parameters: &B::FlatBuffer,
        place: impl Fn(&str) -> Result<Range<usize>>,
    ) -> Result<()> {
        let norm = |name: &str| Norm::trained(backend, parameters, place(name)?);
        self.input_norm = norm("input_layernorm.weight")?;
        self.post_norm = norm("post_attention_layernorm.weight")?;
        if self.qk_norm.is_some() {
            self.qk_norm = Some((norm("self_attn.q_norm.weight")?, norm("self_attn.k_norm.weight")?));
        }
        Ok(())
    }

    fn rotation<'a>(&'a self, angles: &'a B::Angles) -> Rotation<'a, B> {
        let qk_norm = self.qk_norm.as_ref().map(|(q, k)| (&q.weight, &k.weight, self.eps));
        Rotation { heads: &self.heads, qk_norm, angles }
    }

    /// qk-norm and rope of `[q | k | v]`, where the layer has them.
    fn rotate(&self, backend: &B, qkv: &B::Tensor, angles: &B::Angles) -> Result<Option<B::Tensor>> {
        self.rotates.then(|| backend.rotate(&self.rotation(angles), qkv)).transpose()
    }

    fn attention<'a>(&'a self, batch: &Batch<'a, B>) -> Attention<'a> {
        let Packing { groups, .. } = batch.packing;
        let visible = batch.packing.visible(self.window);
        Attention { heads: &self.heads, groups, visible, window: self.window }
    }

    /// The residual stream → `[q | k | v]` after qk-norm and rope.
    pub fn project(&self, backend: &B, x: &B::Tensor, angles: &B::Angles, pass: Pass<'_>) -> Result<B::Tensor> {
        let normed = backend.rms_norm(x, &self.input_norm.weight, self.eps)?;
        let qkv = self.qkv.forward(backend, &normed, None, pass)?;
        Ok(self.rotate(backend, &qkv, angles)?.unwrap_or(qkv))
    }

    /// The input of a product that is added to the residual stream: times the multiplier, which is the same as its output times that.
    fn added(&self, backend: &B, x: B::Tensor) -> Result<B::Tensor> {
        Ok(self.scaled(backend, &x)?.unwrap_or(x))
    }

    /// The same of what is needed as it is too; None where the multiplier is 1.
    fn scaled(&self, backend: &B, x: &B::Tensor) -> Result<Option<B::Tensor>> {
        (self.residual_multiplier != 1.0).then(|| backend.scaled(x, self.residual_multiplier)).transpose()
    }

    /// What follows attention: output projection, residual, MLP, residual.
    pub fn finish(&self, backend: &B, x: &B::Tensor, attended: B::Tensor, pass: Pass<'_>) -> Result<B::Tensor> {
        let middle = self.o.forward(backend, &self.added(backend, attended)?, Some(x), pass)?;
        let normed = backend.rms_norm(&middle, &self.post_norm.weight, self.eps)?;
        let gate_up = self.gate_up.forward(backend, &normed, None, pass)?;
        drop(normed);
        let activated = self.added(backend, backend.silu_mul(&gate_up)?)?;
        drop(gate_up);
        self.down.forward(backend, &activated, Some(&middle), pass)
    }

    /// A packed batch through the layer; also returns `[q | k | v]` after qk-norm and rope, for a KV cache.
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        batch: &Batch<'_, B>,
        pass: Pass<'_>,
    ) -> Result<(B::Tensor, B::Tensor)> {
        let qkv = self.project(backend, x, &batch.angles, pass)?;
        let attended = backend.attend(&self.attention(batch), &qkv)?.0;
        Ok((self.finish(backend, x, attended, pass)?, qkv))
    }

    /// The same, keeping what the backward reads; without `output` only that, for a layer whose output is known.
    pub fn forward_saving(
        &self,
        backend: &B,
        x: &B::Tensor,
        batch: &Batch<'_, B>,
        pass: Pass<'_>,
        output: bool,
    ) -> Result<(Option<B::Tensor>, Saved<B>)> {
        let normed = backend.rms_norm(x, &self.input_norm.weight, self.eps)?;
        let qkv = self.qkv.forward(backend, &normed, None, pass)?;
        drop(normed);
        let (rotated, qkv) = match self.rotate(backend, &qkv, &batch.angles)? {
            Some(rotated) => (rotated, self.qk_norm.is_some().then_some(qkv)),
            None => (qkv, None),
        };
        let (attended, softmax) = backend.attend(&self.attention(batch), &rotated)?;
        let scaled = self.scaled(backend, &attended)?;
        let middle = self.o.forward(backend, scaled.as_ref().unwrap_or(&attended), Some(x), pass)?;
        drop(scaled);
        let normed = backend.rms_norm(&middle, &self.post_norm.weight, self.eps)?;
        let gate_up = self.gate_up.forward(backend, &normed, None, pass)?;
        drop(normed);
        let y = match output {
            true => {
                let activated = self.added(backend, backend.silu_mul(&gate_up)?)?;
                Some(self.down.forward(backend, &activated, Some(&middle), pass)?)
            }
            false => None,
        };
        Ok((y, Saved { qkv, rotated, attended, softmax, middle, gate_up }))
    }

    /// dL/dx from dL/dy, and the gradients of what is trained, of the layer's input and what was saved.
    pub fn vjp(
        &self,
        backend: &B,
        (x, saved): (&B::Tensor, Saved<B>),
        batch: &Batch<'_, B>,
        dy: &B::Tensor,
        pass: Pass<'_>,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        let rotation = self.rotation(&batch.angles);
        let Saved { qkv, rotated, attended, softmax, middle, gate_up } = saved;
        let activated = self.added(backend, backend.silu_mul(&gate_up)?)?;
        let d_activated = self.added(backend, self.down.vjp(backend, &activated, dy, pass, gradient)?)?;
        drop(activated);
        let d_gate_up = backend.silu_mul_vjp(&gate_up, &d_activated)?;
        drop((gate_up, d_activated));
        let post_normed = backend.rms_norm(&middle, &self.post_norm.weight, self.eps)?;
        let d_post_normed = self.gate_up.vjp(backend, &post_normed, &d_gate_up, pass, gradient)?;
        drop((post_normed, d_gate_up));
        let d_middle = backend.rms_norm_vjp(&middle, &self.post_norm.weight, self.eps, &d_post_normed, Some(dy))?;
        self.post_norm.add_gradient(backend, &middle, self.eps, &d_post_normed, gradient)?;
        drop((middle, d_post_normed));
        let scaled = self.scaled(backend, &attended)?;
        let d_scaled = self.o.vjp(backend, scaled.as_ref().unwrap_or(&attended), &d_middle, pass, gradient)?;
        drop(scaled);
        let d_attended = self.added(backend, d_scaled)?;
        let d_rotated = backend.attend_vjp(&AttentionBackward {
            attention: self.attention(batch),
            qkv: &rotated,
            out: &attended,
            softmax: &softmax,
            dy: &d_attended,
        })?;
        drop((rotated, attended, softmax, d_attended));
        let d_qkv = match self.rotates {
            false => d_rotated,
            true => {
                let d_qkv = backend.rotate_vjp(&rotation, qkv.as_ref(), &d_rotated)?;
                if let (Some(qkv), Some((q, k))) = (&qkv, &self.qk_norm)
                    && let (Some(q), Some(k)) = (q.slot, k.slot)
                {
                    backend.rotate_weight_vjp(&rotation, qkv, &d_rotated, gradient, (q, k))?;
                }
                d_qkv
            }
        };
        drop(qkv);
        let normed = backend.rms_norm(x, &self.input_norm.weight, self.eps)?;
        let d_normed = self.qkv.vjp(backend, &normed, &d_qkv, pass, gradient)?;
        drop((normed, d_qkv));
        let dx = backend.rms_norm_vjp(x, &self.input_norm.weight, self.eps, &d_normed, Some(&d_middle))?;
        self.input_norm.add_gradient(backend, x, self.eps, &d_normed, gradient)?;
        Ok(dx)
    }
}

/// A packed batch and its angles.
#[derive(Debug)]
pub struct Batch<'p, B: Compute> {
    /// Ids, groups and targets.
    pub packing: &'p Packing,
    /// Of each token.
    pub angles: B::Angles,
}

/// Sizes of attention.
pub fn heads(config: &ModelDescription) -> Heads {
    let heads = Heads::new(config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    Heads { scale: config.attention_scale as f32, ..heads }
}
