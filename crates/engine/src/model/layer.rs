//! One decoder layer: forward pass and vector-Jacobian product. The backward pass needs values that the forward pass
//! saved; if these would take too much memory, it recomputes them from the layer's input.

use std::ops::Range;

use super::batch::{Batch, Norm, Places};
use super::linear::{Linear, Residual};
use super::mixer::{Cached, Mixer, SavedMixer};
use super::pass::Pass;
use crate::backend::{Activation, Compute, Decode};
use crate::error::Result;
use crate::load::Weights;
use crate::modelcard::{self, LayerNorms, ModelDescription};

/// The weights of one decoder layer.
#[derive(Clone, Debug)]
pub struct Layer<B: Compute> {
    /// Attention, or a Gated DeltaNet.
    pub mixer: Mixer<B>,
    activation: Activation,
    /// Factor on the outputs of attention and MLP before they are added to the residual stream.
    residual_multiplier: f32,
    eps: f32,
    /// Value added to the stored weights of the norms, such as 1 in Gemma.
    norm_offset: f32,
    before_attention: Option<Norm<B>>,
    /// The projections that read the layer's input: queries, keys and values, or those of a Gated DeltaNet.
    qkv: Linear<B>,
    /// The projection of the mixer's output.
    o: Linear<B>,
    after_attention: Option<Norm<B>>,
    before_mlp: Option<Norm<B>>,
    gate_up: Linear<B>,
    down: Linear<B>,
    after_mlp: Option<Norm<B>>,
    /// The names of the layer's norms in the checkpoint.
    names: LayerNorms,
}

/// The values of the forward pass that a layer's backward pass reads, besides the layer's input.
#[derive(Debug)]
pub struct Saved<B: Compute> {
    mixer: SavedMixer<B>,
    /// The input of the norm after attention; only if the layer has one.
    attention_out: Option<B::Tensor>,
    middle: B::Tensor,
    gate_up: B::Tensor,
    /// The input of the norm after the MLP; only if the layer has one.
    mlp_out: Option<B::Tensor>,
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
        let mixer = Mixer::load(backend, weights, config, index)?;
        let mut linear = |paths: &[&str], bias| Linear::load(backend, weights, &prefix, paths, bias);
        let paths = config.projections_of(index);
        let qkv = linear(paths.qkv, paths.qkv.iter().any(|path| config.has_bias(path)))?;
        let o = linear(&[paths.o], config.has_bias(paths.o))?;
        let gate_up = linear(paths.gate_up, config.mlp_bias)?;
        let down = linear(&[paths.down], config.mlp_bias)?;
        let eps = config.rms_norm_eps as f32;
        let residual_multiplier = config.residual_multiplier as f32;
        Ok(Layer {
            mixer,
            activation: match config.activation {
                modelcard::Activation::Silu => Activation::Silu,
                modelcard::Activation::GeluTanh => Activation::GeluTanh,
            },
            residual_multiplier,
            eps,
            norm_offset,
            before_attention,
            qkv,
            o,
            after_attention,
            before_mlp,
            gate_up,
            down,
            after_mlp,
            names,
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
        self.mixer.set_norms(norm)
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

    /// Computes what the mixer reads from the residual stream, `[q | k | v]` in attention.
    fn read(&self, backend: &B, x: &B::Tensor, pass: Pass<'_>) -> Result<B::Tensor> {
        let normed = self.before(backend, self.before_attention.as_ref(), x)?;
        self.qkv.forward(backend, normed.as_ref().unwrap_or(x), Residual::None, pass)
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

    /// Computes the rest of the layer after the mixer: output projection, residual, MLP, residual.
    fn finish(&self, backend: &B, x: Residual<'_, B>, attended: B::Tensor, pass: Pass<'_>) -> Result<B::Tensor> {
        let middle = self.add(backend, self.of_attention(), &self.added(backend, attended)?, x, pass)?.0;
        let activated = self.activated(backend, &self.widen(backend, &middle, pass)?)?;
        Ok(self.add(backend, self.of_mlp(), &activated, Residual::Consumed(middle), pass)?.0)
    }

    /// Runs a packed batch through the layer; also returns what later tokens read of its prompts.
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        batch: &Batch<'_, B>,
        pass: Pass<'_>,
    ) -> Result<(B::Tensor, Cached<B>)> {
        let (mixed, cached) = self.mixer.forward(backend, self.read(backend, x, pass)?, batch)?;
        Ok((self.finish(backend, Residual::Kept(x), mixed, pass)?, cached))
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
        let mixer = self.mixer.forward_saving(backend, self.read(backend, x, pass)?, batch)?;
        let (plain, gated) = mixer.output(backend)?;
        let mixed = gated.as_ref().unwrap_or(plain);
        let scaled = self.scaled(backend, mixed)?;
        let input = scaled.as_ref().unwrap_or(mixed);
        let (middle, attention_out) = self.add(backend, self.of_attention(), input, Residual::Kept(x), pass)?;
        drop((scaled, gated));
        let gate_up = self.widen(backend, &middle, pass)?;
        let (y, mlp_out) = match output || self.after_mlp.is_some() {
            true => {
                let activated = self.activated(backend, &gate_up)?;
                let (y, out) = self.add(backend, self.of_mlp(), &activated, Residual::Kept(&middle), pass)?;
                (Some(y).filter(|_| output), out)
            }
            false => (None, None),
        };
        Ok((y, Saved { mixer, attention_out, middle, gate_up, mlp_out }))
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
        let Saved { mixer, attention_out, middle, gate_up, mlp_out } = saved;
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
        let (plain, gated) = mixer.output(backend)?;
        let mixed = gated.as_ref().unwrap_or(plain);
        let scaled = self.scaled(backend, mixed)?;
        let input = (scaled.as_ref().unwrap_or(mixed), attention_out);
        let d_input = self.add_vjp(backend, self.of_attention(), input, &d_middle, pass, gradient)?;
        drop((scaled, gated));
        let d_qkv = self.mixer.vjp(backend, mixer, batch, self.added(backend, d_input)?, gradient)?;
        let before_attention = self.before_attention.as_ref();
        let read = self.before(backend, before_attention, x)?;
        let d_read = self.qkv.vjp(backend, read.as_ref().unwrap_or(x), &d_qkv, pass, gradient)?;
        drop((read, d_qkv));
        self.before_vjp(backend, before_attention, x, &d_read, &d_middle, gradient)
    }
}

impl<B: Decode> Layer<B> {
    /// Appends one token to each sequence of the cache in this layer, the one with this index.
    pub fn step(
        &self,
        backend: &B,
        (cache, index): (&mut B::Cache, usize),
        x: B::Tensor,
        places: Places<'_, B>,
        pass: Pass<'_>,
    ) -> Result<B::Tensor> {
        let mixed = self.mixer.step(backend, cache, index, self.read(backend, &x, pass)?, places)?;
        self.finish(backend, Residual::Consumed(x), mixed, pass)
    }

    /// Appends the remaining tokens of prompts, given as (index, number of tokens), in this layer, the one with this index.
    pub fn extend(
        &self,
        backend: &B,
        cache: &mut B::Cache,
        prompts: (&[(usize, usize)], usize),
        x: B::Tensor,
        (places, pass): (Places<'_, B>, Pass<'_>),
    ) -> Result<B::Tensor> {
        let mixed = self.mixer.extend(backend, cache, prompts, self.read(backend, &x, pass)?, places)?;
        self.finish(backend, Residual::Consumed(x), mixed, pass)
    }
}
