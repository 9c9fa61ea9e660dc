//! One decoder layer, forward and vector-Jacobian product. The backward pass gets the layer's input and computes
//! everything else again, so that activations of one layer at a time are alive.

use candle_core::{Device, Tensor};

use super::linear::{Linear, LinearGradient};
use super::packing::Packing;
use super::pass::Pass;
use crate::engine::error::Result;
use crate::engine::load::Weights;
use crate::engine::lora::Module;
use crate::engine::ops::slices::Heads;
use crate::engine::ops::{self, RopeTable, Rotation};
use crate::modelcard::ModelConfig;

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Sizes of attention.
    pub heads: Heads,
    /// How many positions a token sees; None = all.
    pub window: Option<usize>,
    eps: f32,
    input_norm: Vec<f32>,
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    qkv: Linear,
    o: Linear,
    post_norm: Vec<f32>,
    gate_up: Linear,
    down: Linear,
}

/// The gradients of a layer.
#[derive(Debug)]
pub struct LayerGradient {
    /// In the order of [`Layer::linears`].
    pub linears: [LinearGradient; 4],
    /// In full fine-tuning.
    pub norms: Option<NormGradient>,
}

/// The gradients of a layer's norm weights.
#[derive(Debug)]
pub struct NormGradient {
    /// Before attention.
    pub input: Vec<f32>,
    /// Of query and key heads.
    pub qk: Option<(Vec<f32>, Vec<f32>)>,
    /// Before the MLP.
    pub post: Vec<f32>,
}

impl Layer {
    /// Load layer `index`.
    pub fn load(weights: &mut Weights, config: &ModelConfig, index: usize, device: &Device) -> Result<Layer> {
        let prefix = format!("model.layers.{index}");
        let qk_norm = match config.qk_norm {
            true => Some((
                weights.values(&format!("{prefix}.self_attn.q_norm.weight"))?.0,
                weights.values(&format!("{prefix}.self_attn.k_norm.weight"))?.0,
            )),
            false => None,
        };
        let mut linear = |modules: &[Module], bias| Linear::load(weights, &prefix, modules, bias, device);
        let qkv = linear(&[Module::Q, Module::K, Module::V], config.qkv_bias)?;
        let o = linear(&[Module::O], config.o_bias)?;
        let gate_up = linear(&[Module::Gate, Module::Up], config.mlp_bias)?;
        let down = linear(&[Module::Down], config.mlp_bias)?;
        Ok(Layer {
            heads: heads(config),
            window: config.windows[index],
            eps: config.rms_norm_eps as f32,
            input_norm: weights.values(&format!("{prefix}.input_layernorm.weight"))?.0,
            qk_norm,
            qkv,
            o,
            post_norm: weights.values(&format!("{prefix}.post_attention_layernorm.weight"))?.0,
            gate_up,
            down,
        })
    }

    /// The fused linear layers: qkv, o, gate-up, down.
    pub fn linears(&self) -> [&Linear; 4] {
        [&self.qkv, &self.o, &self.gate_up, &self.down]
    }

    /// The same, to set adapters.
    pub fn linears_mut(&mut self) -> [&mut Linear; 4] {
        [&mut self.qkv, &mut self.o, &mut self.gate_up, &mut self.down]
    }

    /// Replace the norms' weights: `values` gives them by their names inside the layer.
    pub fn set_norms<'v>(&mut self, values: impl Fn(&str) -> Result<&'v [f32]>) -> Result<()> {
        self.input_norm.copy_from_slice(values("input_layernorm.weight")?);
        self.post_norm.copy_from_slice(values("post_attention_layernorm.weight")?);
        if let Some((q, k)) = &mut self.qk_norm {
            q.copy_from_slice(values("self_attn.q_norm.weight")?);
            k.copy_from_slice(values("self_attn.k_norm.weight")?);
        }
        Ok(())
    }

    /// qk-norm and rope at these positions.
    pub fn rotation<'a>(&'a self, table: &'a RopeTable, positions: &'a [usize]) -> Rotation<'a> {
        let qk_norm = self.qk_norm.as_ref().map(|(q, k)| (q.as_slice(), k.as_slice(), self.eps));
        Rotation { heads: &self.heads, qk_norm, table, positions }
    }

    /// The residual stream → `[q | k | v]` after qk-norm and rope.
    pub fn project(&self, x: &Tensor, table: &RopeTable, positions: &[usize], pass: Pass<'_>) -> Result<Tensor> {
        let normed = ops::rms_norm(x, &self.input_norm, self.eps)?;
        let qkv = self.qkv.forward(&normed, pass)?;
        Ok(ops::rotate(&self.rotation(table, positions), &qkv)?)
    }

    /// What follows attention: output projection, residual, MLP, residual.
    pub fn finish(&self, x: &Tensor, attended: &Tensor, pass: Pass<'_>) -> Result<Tensor> {
        let x = (x + self.o.forward(attended, pass)?)?;
        let normed = ops::rms_norm(&x, &self.post_norm, self.eps)?;
        let gate_up = self.gate_up.forward(&normed, pass)?;
        Ok((x + self.down.forward(&ops::silu_mul(&gate_up)?, pass)?)?)
    }

    /// A packed batch through the layer; also returns `[q | k | v]` after qk-norm and rope, for a KV cache.
    pub fn forward(&self, x: &Tensor, packing: &Packing, pass: Pass<'_>) -> Result<(Tensor, Tensor)> {
        let qkv = self.project(x, &packing.table, &packing.positions, pass)?;
        let attended = ops::attention(&self.heads, &packing.groups, packing.visible(self.window), &qkv)?;
        Ok((self.finish(x, &attended, pass)?, qkv))
    }

    /// dL/dx and the gradients of what is trained from dL/dy; `x` is the layer's input.
    pub fn vjp(&self, x: &Tensor, packing: &Packing, dy: &Tensor, pass: Pass<'_>) -> Result<(Tensor, LayerGradient)> {
        let (rotation, visible) = (self.rotation(&packing.table, &packing.positions), packing.visible(self.window));
        // Forward again, keeping what the products below need.
        let normed = ops::rms_norm(x, &self.input_norm, self.eps)?;
        let qkv_before = self.qkv.forward(&normed, pass)?;
        let rotated = ops::rotate(&rotation, &qkv_before)?;
        let attended = ops::attention(&self.heads, &packing.groups, visible, &rotated)?;
        let middle = (x + self.o.forward(&attended, pass)?)?;
        let post_normed = ops::rms_norm(&middle, &self.post_norm, self.eps)?;
        let gate_up = self.gate_up.forward(&post_normed, pass)?;
        let activated = ops::silu_mul(&gate_up)?;

        let (d_activated, down) = self.down.vjp(&activated, dy, pass)?;
        let d_gate_up = ops::silu_mul_vjp(&gate_up, &d_activated)?;
        let (d_post_normed, gate_up) = self.gate_up.vjp(&post_normed, &d_gate_up, pass)?;
        let d_middle = (dy + ops::rms_norm_vjp(&middle, &self.post_norm, self.eps, &d_post_normed)?)?;
        let (d_attended, o) = self.o.vjp(&attended, &d_middle, pass)?;
        let d_rotated = ops::attention_vjp(&self.heads, &packing.groups, visible, &rotated, &d_attended)?;
        let d_qkv = ops::rotate_vjp(&rotation, &qkv_before, &d_rotated)?;
        let (d_normed, qkv) = self.qkv.vjp(&normed, &d_qkv, pass)?;
        let dx = (d_middle + ops::rms_norm_vjp(x, &self.input_norm, self.eps, &d_normed)?)?;
        let norms = match pass.full {
            false => None,
            true => Some(NormGradient {
                input: ops::rms_norm_weight_vjp(x, self.eps, &d_normed)?,
                qk: ops::rotate_weight_vjp(&rotation, &qkv_before, &d_rotated)?,
                post: ops::rms_norm_weight_vjp(&middle, self.eps, &d_post_normed)?,
            }),
        };
        Ok((dx, LayerGradient { linears: [qkv, o, gate_up, down], norms }))
    }
}

/// Sizes of attention.
pub fn heads(config: &ModelConfig) -> Heads {
    Heads { num_heads: config.num_attention_heads, num_kv_heads: config.num_key_value_heads, head_dim: config.head_dim }
}
