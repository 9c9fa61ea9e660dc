//! One decoder layer: forward pass and vector-Jacobian product. The backward pass needs values that the forward pass
//! saved; if these would take too much memory, it recomputes them from the layer's input.

use std::ops::Range;

use super::linear::{Linear, Residual};
use super::packing::Packing;
use super::pass::Pass;
use super::rope::Angles;
use crate::backend::{Activation, Attention, AttentionBackward, Buffers, Compute, Rotation};
use crate::error::Result;
use crate::load::Weights;
use crate::modelcard::{self, LayerNorms, ModelDescription, QkNorm, QueryGrowth};
use crate::ops::slices::Heads;

/// The weights of one decoder layer.
#[derive(Clone, Debug)]
pub struct Layer<B: Compute> {
    /// Sizes of the attention heads.
    pub heads: Heads,
    /// Attention window: the number of positions that a token attends to; None means all earlier ones.
    pub window: Option<usize>,
    /// Whether rotary embedding is applied to queries and keys.
    rotates: bool,
    /// Whether to use the rotary angles of layers with an attention window, which some models define separately.
    is_local: bool,
    activation: Activation,
    /// Factor on the outputs of attention and MLP before they are added to the residual stream.
    residual_multiplier: f32,
    eps: f32,
    /// Value added to the stored weights of the norms, such as 1 in Gemma.
    norm_offset: f32,
    before_attention: Option<Norm<B>>,
    qk_norm: Option<(Norm<B>, Norm<B>)>,
    /// Whether qk-norm spans all heads together instead of each head.
    has_wide_qk_norm: bool,
    qkv: Linear<B>,
    o: Linear<B>,
    after_attention: Option<Norm<B>>,
    before_mlp: Option<Norm<B>>,
    gate_up: Linear<B>,
    down: Linear<B>,
    after_mlp: Option<Norm<B>>,
    /// The names of the layer's norms in the checkpoint.
    names: LayerNorms,
    query_growth: Option<QueryGrowth>,
}

/// The weight of a norm, and the offset of its gradient if the norm is trained.
#[derive(Clone, Debug)]
pub struct Norm<B: Buffers> {
    /// The norm's weight, `[width]`.
    pub weight: B::Vector,
    /// Offset of the norm's weight in the flat gradient.
    pub slot: Option<usize>,
}

/// The values of the forward pass that a layer's backward pass reads, besides the layer's input.
#[derive(Debug)]
pub struct Saved<B: Compute> {
    /// Queries, keys and values before qk-norm and rotary embedding; kept only with qk-norm.
    qkv: Option<B::Tensor>,
    rotated: B::Tensor,
    attended: B::Tensor,
    softmax: B::Softmax,
    /// The input of the norm after attention; only if the layer has one.
    attention_out: Option<B::Tensor>,
    middle: B::Tensor,
    gate_up: B::Tensor,
    /// The input of the norm after the MLP; only if the layer has one.
    mlp_out: Option<B::Tensor>,
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
    /// Loads the weights of the decoder layer `index`.
    pub fn load(backend: &B, weights: &mut Weights, config: &ModelDescription, index: usize) -> Result<Self> {
        let prefix = format!("model.layers.{index}");
        let norm_offset = config.norm_offset as f32;
        let mut norm =
            |name: &str| Norm::new(backend, weights.values(&format!("{prefix}.{name}.weight"))?.0, norm_offset);
        let names = config.norms;
        let mut layer_norm = |name: Option<&str>| name.map(&mut norm).transpose();
        let before_attention = layer_norm(names.before_attention)?;
        let after_attention = layer_norm(names.after_attention)?;
        let before_mlp = layer_norm(names.before_mlp)?;
        let after_mlp = layer_norm(names.after_mlp)?;
        let qk_norm = match config.qk_norm {
            QkNorm::None => None,
            QkNorm::Head | QkNorm::Width => Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?)),
        };
        let mut linear = |paths: &[&str], bias| Linear::load(backend, weights, &prefix, paths, bias);
        let paths = config.projections;
        let qkv = linear(paths.qkv, config.qkv_bias)?;
        let o = linear(&[paths.o], config.o_bias)?;
        let gate_up = linear(paths.gate_up, config.mlp_bias)?;
        let down = linear(&[paths.down], config.mlp_bias)?;
        let (heads, window, rotates) = (heads(config), config.windows[index], config.rotates[index]);
        let eps = config.rms_norm_eps as f32;
        let residual_multiplier = config.residual_multiplier as f32;
        let has_wide_qk_norm = config.qk_norm == QkNorm::Width;
        Ok(Layer {
            heads,
            window,
            rotates,
            is_local: window.is_some() && config.local_rope.is_some(),
            activation: match config.activation {
                modelcard::Activation::Silu => Activation::Silu,
                modelcard::Activation::GeluTanh => Activation::GeluTanh,
            },
            residual_multiplier,
            eps,
            norm_offset,
            before_attention,
            qk_norm,
            has_wide_qk_norm,
            qkv,
            o,
            after_attention,
            before_mlp,
            gate_up,
            down,
            after_mlp,
            names,
            query_growth: config.query_growth,
        })
    }

    /// The fused linear layers of the decoder layer: qkv, o, gate-up, down.
    pub fn linears_mut(&mut self) -> [&mut Linear<B>; 4] {
        [&mut self.qkv, &mut self.o, &mut self.gate_up, &mut self.down]
    }

    /// Replaces the weights of the layer's norms. `place` returns the range of each in the flat parameters, given its
    /// name inside the layer.
    pub fn set_norms(
        &mut self,
        backend: &B,
        parameters: &B::FlatBuffer,
        place: impl Fn(&str) -> Result<Range<usize>>,
    ) -> Result<()> {
        let norm = |name: &str| Norm::trained(backend, parameters, place(&format!("{name}.weight"))?, self.norm_offset);
        let layer_norm = |name: Option<&str>| name.map(norm).transpose();
        self.before_attention = layer_norm(self.names.before_attention)?;
        self.after_attention = layer_norm(self.names.after_attention)?;
        self.before_mlp = layer_norm(self.names.before_mlp)?;
        self.after_mlp = layer_norm(self.names.after_mlp)?;
        if self.qk_norm.is_some() {
            self.qk_norm = Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?));
        }
        Ok(())
    }

    fn rotation<'a>(&'a self, angles: &'a Angles<B>) -> Rotation<'a, B> {
        let angles = angles.of(self.is_local);
        let of_heads = self.qk_norm.as_ref().filter(|_| !self.has_wide_qk_norm);
        let qk_norm = of_heads.map(|(q, k)| (&q.weight, &k.weight, self.eps));
        Rotation { heads: &self.heads, qk_norm, angles }
    }

    /// The columns of queries, keys and values in a row of `qkv`.
    fn parts(&self) -> [Range<usize>; 3] {
        let (q, kv) = (self.heads.q_width(), self.heads.kv_width());
        [0..q, q..q + kv, q + kv..q + 2 * kv]
    }

    /// Multiplies queries by the factors of their positions, if the model scales them. The operation
    /// is its own transpose.
    fn scale_queries(&self, backend: &B, qkv: &B::Tensor, positions: &[usize]) -> Result<Option<B::Tensor>> {
        let Some(growth) = self.query_growth else { return Ok(None) };
        let factors: Vec<f32> = positions.iter().map(|position| growth.factor(*position)).collect();
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(None);
        }
        backend.rows_scaled(qkv, 0..self.heads.q_width(), &factors).map(Some)
    }

    /// Applies qk-norm, rotary embedding and query scaling to `[q | k | v]`, as far as the layer has them.
    fn rotate(&self, backend: &B, qkv: &B::Tensor, places: Places<'_, B>) -> Result<Option<B::Tensor>> {
        let mut rotated = None;
        if let (Some((q_norm, k_norm)), true) = (&self.qk_norm, self.has_wide_qk_norm) {
            let [q, k, v] = self.parts();
            let q = backend.rms_norm(&backend.columns(qkv, q)?, &q_norm.weight, self.eps)?;
            let k = backend.rms_norm(&backend.columns(qkv, k)?, &k_norm.weight, self.eps)?;
            rotated = Some(backend.concat_columns(&[&q, &k, &backend.columns(qkv, v)?])?);
        }
        if self.rotates {
            rotated = Some(backend.rotate(&self.rotation(places.angles), rotated.as_ref().unwrap_or(qkv))?);
        }
        Ok(self.scale_queries(backend, rotated.as_ref().unwrap_or(qkv), places.positions)?.or(rotated))
    }

    /// Returns dL/dqkv of [`Layer::rotate`]; `qkv` is its input, present with qk-norm.
    fn rotate_vjp(
        &self,
        backend: &B,
        qkv: Option<&B::Tensor>,
        d_rotated: B::Tensor,
        places: Places<'_, B>,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        let d_rotated = self.scale_queries(backend, &d_rotated, places.positions)?.unwrap_or(d_rotated);
        let rotation = self.rotation(places.angles);
        let of_heads = qkv.filter(|_| !self.has_wide_qk_norm);
        let d_qkv = match self.rotates {
            false => d_rotated,
            true => {
                let d_qkv = backend.rotate_vjp(&rotation, of_heads, &d_rotated)?;
                if let (Some(qkv), Some((q, k))) = (of_heads, &self.qk_norm)
                    && let (Some(q), Some(k)) = (q.slot, k.slot)
                {
                    backend.rotate_weight_vjp(&rotation, qkv, &d_rotated, gradient, (q, k))?;
                }
                d_qkv
            }
        };
        let (Some(qkv), Some((q_norm, k_norm)), true) = (qkv, &self.qk_norm, self.has_wide_qk_norm) else {
            return Ok(d_qkv);
        };
        let [q, k, v] = self.parts();
        let mut part = |norm: &Norm<B>, columns: Range<usize>| {
            let (x, dy) = (backend.columns(qkv, columns.clone())?, backend.columns(&d_qkv, columns)?);
            norm.add_gradient(backend, &x, self.eps, &dy, gradient)?;
            backend.rms_norm_vjp(&x, &norm.weight, self.eps, &dy, None)
        };
        let (dq, dk) = (part(q_norm, q)?, part(k_norm, k)?);
        backend.concat_columns(&[&dq, &dk, &backend.columns(&d_qkv, v)?])
    }

    /// Returns the memory of the linear layers' matrices in bytes; None if the backend does not know it.
    pub fn matrix_bytes(&self, backend: &B) -> Option<usize> {
        [&self.qkv, &self.o, &self.gate_up, &self.down].into_iter().map(|linear| linear.matrix_bytes(backend)).sum()
    }

    /// Computes the normed input of attention or MLP; None if the model has no norm there.
    fn before(&self, backend: &B, norm: Option<&Norm<B>>, x: &B::Tensor) -> Result<Option<B::Tensor>> {
        norm.map(|norm| backend.rms_norm(x, &norm.weight, self.eps)).transpose()
    }

    /// Returns dL/dx of [`Layer::before`], plus the gradient of the residual connection.
    fn before_vjp(
        &self,
        backend: &B,
        norm: Option<&Norm<B>>,
        x: &B::Tensor,
        d_read: &B::Tensor,
        around: &B::Tensor,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        let Some(norm) = norm else { return backend.sum(d_read, around) };
        let dx = backend.rms_norm_vjp(x, &norm.weight, self.eps, d_read, Some(around))?;
        norm.add_gradient(backend, x, self.eps, d_read, gradient)?;
        Ok(dx)
    }

    /// Adds the output of attention or MLP to the residual stream, after a norm if the layer has one; also returns the
    /// input of that norm.
    fn add(
        &self,
        backend: &B,
        (linear, norm): (&Linear<B>, Option<&Norm<B>>),
        input: &B::Tensor,
        x: Residual<'_, B>,
        pass: Pass<'_>,
    ) -> Result<(B::Tensor, Option<B::Tensor>)> {
        let Some(norm) = norm else { return Ok((linear.forward(backend, input, x, pass)?, None)) };
        let out = linear.forward(backend, input, Residual::None, pass)?;
        let normed = backend.rms_norm(&out, &norm.weight, self.eps)?;
        let sum = match x {
            Residual::None => return Ok((normed, Some(out))),
            Residual::Kept(x) => backend.sum(x, &normed)?,
            Residual::Consumed(x) => backend.sum(&x, &normed)?,
        };
        Ok((sum, Some(out)))
    }

    /// Returns dL/d(attention or MLP output) of [`Layer::add`]; dL/dx is `dy` itself.
    fn add_vjp(
        &self,
        backend: &B,
        (linear, norm): (&Linear<B>, Option<&Norm<B>>),
        (input, out): (&B::Tensor, Option<B::Tensor>),
        dy: &B::Tensor,
        pass: Pass<'_>,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        let (Some(norm), Some(out)) = (norm, out) else { return linear.vjp(backend, input, dy, pass, gradient) };
        norm.add_gradient(backend, &out, self.eps, dy, gradient)?;
        let d_out = backend.rms_norm_vjp(&out, &norm.weight, self.eps, dy, None)?;
        linear.vjp(backend, input, &d_out, pass, gradient)
    }

    fn of_attention(&self) -> (&Linear<B>, Option<&Norm<B>>) {
        (&self.o, self.after_attention.as_ref())
    }

    fn of_mlp(&self) -> (&Linear<B>, Option<&Norm<B>>) {
        (&self.down, self.after_mlp.as_ref())
    }

    fn attention<'a>(&'a self, batch: &Batch<'a, B>) -> Attention<'a> {
        let Packing { groups, .. } = batch.packing;
        let visible = batch.packing.visible(self.window);
        Attention { heads: &self.heads, groups, visible, window: self.window }
    }

    /// Computes `[q | k | v]` from the residual stream.
    fn read(&self, backend: &B, x: &B::Tensor, pass: Pass<'_>) -> Result<B::Tensor> {
        let normed = self.before(backend, self.before_attention.as_ref(), x)?;
        self.qkv.forward(backend, normed.as_ref().unwrap_or(x), Residual::None, pass)
    }

    /// Computes `[q | k | v]` after qk-norm and rotary embedding from the residual stream.
    pub fn project(&self, backend: &B, x: &B::Tensor, places: Places<'_, B>, pass: Pass<'_>) -> Result<B::Tensor> {
        let qkv = self.read(backend, x, pass)?;
        Ok(self.rotate(backend, &qkv, places)?.unwrap_or(qkv))
    }

    /// Scales the input of a product whose output is added to the residual stream by the residual multiplier. This
    /// equals scaling the output.
    fn added(&self, backend: &B, x: B::Tensor) -> Result<B::Tensor> {
        Ok(self.scaled(backend, &x)?.unwrap_or(x))
    }

    /// Scales by the residual multiplier like [`Layer::added`], but keeps the unscaled input; None if
    /// the multiplier is 1.
    fn scaled(&self, backend: &B, x: &B::Tensor) -> Result<Option<B::Tensor>> {
        (self.residual_multiplier != 1.0).then(|| backend.scaled(x, self.residual_multiplier)).transpose()
    }

    /// Computes the MLP's `[gate | up]` from the residual stream after attention.
    fn widen(&self, backend: &B, middle: &B::Tensor, pass: Pass<'_>) -> Result<B::Tensor> {
        let normed = self.before(backend, self.before_mlp.as_ref(), middle)?;
        self.gate_up.forward(backend, normed.as_ref().unwrap_or(middle), Residual::None, pass)
    }

    fn activated(&self, backend: &B, gate_up: &B::Tensor) -> Result<B::Tensor> {
        self.added(backend, backend.gated(self.activation, gate_up)?)
    }

    /// Computes the rest of the layer after attention: output projection, residual, MLP, residual.
    pub fn finish(&self, backend: &B, x: Residual<'_, B>, attended: B::Tensor, pass: Pass<'_>) -> Result<B::Tensor> {
        let middle = self.add(backend, self.of_attention(), &self.added(backend, attended)?, x, pass)?.0;
        let activated = self.activated(backend, &self.widen(backend, &middle, pass)?)?;
        Ok(self.add(backend, self.of_mlp(), &activated, Residual::Consumed(middle), pass)?.0)
    }

    /// Runs a packed batch through the layer; also returns `[q | k | v]` after qk-norm and rotary embedding,
    /// for a KV cache.
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        batch: &Batch<'_, B>,
        pass: Pass<'_>,
    ) -> Result<(B::Tensor, B::Tensor)> {
        let qkv = self.project(backend, x, batch.places(), pass)?;
        let attended = backend.attend(&self.attention(batch), &qkv)?.0;
        Ok((self.finish(backend, Residual::Kept(x), attended, pass)?, qkv))
    }

    /// Runs the layer and saves the values that the backward pass reads. Without `output` it computes only these, for a
    /// layer whose output is already known.
    pub fn forward_saving(
        &self,
        backend: &B,
        x: &B::Tensor,
        batch: &Batch<'_, B>,
        pass: Pass<'_>,
        output: bool,
    ) -> Result<(Option<B::Tensor>, Saved<B>)> {
        let qkv = self.read(backend, x, pass)?;
        let (rotated, qkv) = match self.rotate(backend, &qkv, batch.places())? {
            Some(rotated) => (rotated, self.qk_norm.is_some().then_some(qkv)),
            None => (qkv, None),
        };
        let (attended, softmax) = backend.attend(&self.attention(batch), &rotated)?;
        let scaled = self.scaled(backend, &attended)?;
        let input = scaled.as_ref().unwrap_or(&attended);
        let (middle, attention_out) = self.add(backend, self.of_attention(), input, Residual::Kept(x), pass)?;
        drop(scaled);
        let gate_up = self.widen(backend, &middle, pass)?;
        let (y, mlp_out) = match output || self.after_mlp.is_some() {
            true => {
                let activated = self.activated(backend, &gate_up)?;
                let (y, out) = self.add(backend, self.of_mlp(), &activated, Residual::Kept(&middle), pass)?;
                (Some(y).filter(|_| output), out)
            }
            false => (None, None),
        };
        Ok((y, Saved { qkv, rotated, attended, softmax, attention_out, middle, gate_up, mlp_out }))
    }

    /// Returns dL/dx of the layer from dL/dy, and adds the gradients of trained parameters, given the layer's input
    /// and its saved values.
    pub fn vjp(
        &self,
        backend: &B,
        (x, saved): (&B::Tensor, Saved<B>),
        batch: &Batch<'_, B>,
        dy: &B::Tensor,
        pass: Pass<'_>,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        let Saved { qkv, rotated, attended, softmax, attention_out, middle, gate_up, mlp_out } = saved;
        let activated = self.activated(backend, &gate_up)?;
        let d_activated = self.add_vjp(backend, self.of_mlp(), (&activated, mlp_out), dy, pass, gradient)?;
        drop(activated);
        let d_gate_up = backend.gated_vjp(self.activation, &gate_up, &self.added(backend, d_activated)?)?;
        drop(gate_up);
        let before_mlp = self.before_mlp.as_ref();
        let read = self.before(backend, before_mlp, &middle)?;
        let d_read = self.gate_up.vjp(backend, read.as_ref().unwrap_or(&middle), &d_gate_up, pass, gradient)?;
        drop((read, d_gate_up));
        let d_middle = self.before_vjp(backend, before_mlp, &middle, &d_read, dy, gradient)?;
        drop((middle, d_read));
        let scaled = self.scaled(backend, &attended)?;
        let input = (scaled.as_ref().unwrap_or(&attended), attention_out);
        let d_input = self.add_vjp(backend, self.of_attention(), input, &d_middle, pass, gradient)?;
        drop(scaled);
        let d_attended = self.added(backend, d_input)?;
        let d_rotated = backend.attend_vjp(&AttentionBackward {
            attention: self.attention(batch),
            qkv: &rotated,
            out: &attended,
            softmax: &softmax,
            dy: &d_attended,
        })?;
        drop((rotated, attended, softmax, d_attended));
        let d_qkv = self.rotate_vjp(backend, qkv.as_ref(), d_rotated, batch.places(), gradient)?;
        drop(qkv);
        let before_attention = self.before_attention.as_ref();
        let read = self.before(backend, before_attention, x)?;
        let d_read = self.qkv.vjp(backend, read.as_ref().unwrap_or(x), &d_qkv, pass, gradient)?;
        drop((read, d_qkv));
        self.before_vjp(backend, before_attention, x, &d_read, &d_middle, gradient)
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
    fn places(&self) -> Places<'_, B> {
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
