//! Attention of a decoder layer between its projections: qk-norm, rotary embedding, attention, output gate.

use std::ops::Range;

use super::batch::{Batch, Norm, Places, heads};
use super::packing::Packing;
use super::rope::Angles;
use crate::backend::{Attention, AttentionBackward, Compute, Rotation};
use crate::error::{EngineError, Result};
use crate::load::Weights;
use crate::modelcard::{ModelDescription, QkNorm, QueryGrowth};
use crate::ops::slices::Heads;

/// Attention of one decoder layer.
#[derive(Clone, Debug)]
pub struct SelfAttention<B: Compute> {
    /// Sizes of the attention heads.
    pub heads: Heads,
    /// Attention window: the number of positions that a token attends to; None means all earlier ones.
    pub window: Option<usize>,
    /// Whether rotary embedding is applied to queries and keys.
    rotates: bool,
    /// Whether to use the rotary angles of layers with an attention window, which some models define separately.
    is_local: bool,
    eps: f32,
    qk_norm: Option<(Norm<B>, Norm<B>)>,
    /// Whether qk-norm spans all heads together instead of each head.
    has_wide_qk_norm: bool,
    query_growth: Option<QueryGrowth>,
    /// Whether the query projection also gives each head a gate, which follows the head's query.
    has_gate: bool,
}

/// Queries, keys and values of tokens, and the gate on attention's output if the layer has one.
#[derive(Debug)]
pub struct Projected<B: Compute> {
    /// Rows `[q | k | v]`, after qk-norm and rotary embedding.
    pub rotated: B::Tensor,
    /// The gate on attention's output before its sigmoid, `[tokens, q_width]`.
    pub gate: Option<B::Tensor>,
    /// Rows `[q | k | v]` before qk-norm and rotary embedding; only if they were kept.
    unrotated: Option<B::Tensor>,
}

/// The values of the forward pass that the backward pass of attention reads.
#[derive(Debug)]
pub struct SavedAttention<B: Compute> {
    projected: Projected<B>,
    attended: B::Tensor,
    softmax: B::Softmax,
}

impl<B: Compute> SelfAttention<B> {
    /// Loads the norms of the decoder layer `index`; `norm` reads a norm by its name inside the layer.
    pub fn load(
        backend: &B,
        weights: &mut Weights,
        config: &ModelDescription,
        index: usize,
    ) -> Result<SelfAttention<B>> {
        let mut norm = |name: &str| {
            let values = weights.values(&format!("model.layers.{index}.{name}.weight"))?.0;
            Norm::new(backend, values, config.norm_offset as f32)
        };
        let qk_norm = match config.qk_norm {
            QkNorm::None => None,
            QkNorm::Head | QkNorm::Width => Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?)),
        };
        let window = config.windows[index];
        Ok(SelfAttention {
            heads: heads(config),
            window,
            rotates: config.rotates[index],
            is_local: window.is_some() && config.local_rope.is_some(),
            eps: config.rms_norm_eps as f32,
            qk_norm,
            has_wide_qk_norm: config.qk_norm == QkNorm::Width,
            query_growth: config.query_growth,
            has_gate: config.has_output_gate,
        })
    }

    /// Replaces the weights of qk-norm; `norm` returns the trained norm with this name inside the layer.
    pub fn set_norms(&mut self, norm: impl Fn(&str) -> Result<Norm<B>>) -> Result<()> {
        if self.qk_norm.is_some() {
            self.qk_norm = Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?));
        }
        Ok(())
    }

    /// The columns of each query head, then those of keys and values, and those of each head's gate, in a row with gates.
    fn gated_columns(&self) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        let Heads { num_heads, head_dim, .. } = self.heads;
        let start = |head: usize| 2 * head * head_dim;
        let mut queries: Vec<Range<usize>> = (0..num_heads).map(|head| start(head)..start(head) + head_dim).collect();
        queries.push(start(num_heads)..start(num_heads) + 2 * self.heads.kv_width());
        let gates = (0..num_heads).map(|head| start(head) + head_dim..start(head + 1)).collect();
        (queries, gates)
    }

    /// Divides a projection into `[q | k | v]` and the gate.
    fn split(&self, backend: &B, projection: B::Tensor) -> Result<(B::Tensor, Option<B::Tensor>)> {
        if !self.has_gate {
            return Ok((projection, None));
        }
        let (queries, gates) = self.gated_columns();
        let gate = backend.gather_columns(&projection, &gates)?;
        Ok((backend.gather_columns(&projection, &queries)?, Some(gate)))
    }

    /// Returns dL/dprojection of [`SelfAttention::split`].
    fn split_vjp(&self, backend: &B, d_qkv: B::Tensor, d_gate: Option<B::Tensor>) -> Result<B::Tensor> {
        let Some(d_gate) = d_gate else { return Ok(d_qkv) };
        let Heads { num_heads, head_dim, .. } = self.heads;
        let all = backend.concat_columns(&[&d_qkv, &d_gate])?;
        let (q_width, width) = (self.heads.q_width(), self.heads.width());
        let head = |head: usize| {
            let at = head * head_dim;
            [at..at + head_dim, width + at..width + at + head_dim]
        };
        let ranges: Vec<Range<usize>> = (0..num_heads).flat_map(head).chain(std::iter::once(q_width..width)).collect();
        backend.gather_columns(&all, &ranges)
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

    /// Returns dL/dqkv of [`SelfAttention::rotate`]; `qkv` is its input, present with qk-norm.
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

    /// Computes queries, keys and values with qk-norm and rotary embedding, and the gate, from the layer's projection. With
    /// `keep`, the values that the backward pass of qk-norm reads are kept.
    pub fn project(
        &self,
        backend: &B,
        projection: B::Tensor,
        places: Places<'_, B>,
        keep: bool,
    ) -> Result<Projected<B>> {
        let (qkv, gate) = self.split(backend, projection)?;
        Ok(match self.rotate(backend, &qkv, places)? {
            Some(rotated) => {
                let unrotated = (keep && self.qk_norm.is_some()).then_some(qkv);
                Projected { rotated, gate, unrotated }
            }
            None => Projected { rotated: qkv, gate, unrotated: None },
        })
    }

    /// Applies the gate to attention's output, if the layer has one.
    pub fn gated(&self, backend: &B, attended: B::Tensor, gate: Option<&B::Tensor>) -> Result<B::Tensor> {
        match gate {
            Some(gate) => backend.sigmoid_gated(&attended, gate),
            None => Ok(attended),
        }
    }

    fn attention<'a>(&'a self, batch: &Batch<'a, B>) -> Attention<'a> {
        let Packing { groups, .. } = batch.packing;
        let visible = batch.packing.visible(self.window);
        Attention { heads: &self.heads, groups, visible, window: self.window }
    }

    /// Computes attention in a packed batch, gate included; also returns `[q | k | v]` for a KV cache.
    pub fn forward(&self, backend: &B, projection: B::Tensor, batch: &Batch<'_, B>) -> Result<(B::Tensor, B::Tensor)> {
        let Projected { rotated, gate, .. } = self.project(backend, projection, batch.places(), false)?;
        let attended = backend.attend(&self.attention(batch), &rotated)?.0;
        Ok((self.gated(backend, attended, gate.as_ref())?, rotated))
    }

    /// Computes the values that the backward pass reads.
    pub fn forward_saving(
        &self,
        backend: &B,
        projection: B::Tensor,
        batch: &Batch<'_, B>,
    ) -> Result<SavedAttention<B>> {
        let projected = self.project(backend, projection, batch.places(), true)?;
        let (attended, softmax) = backend.attend(&self.attention(batch), &projected.rotated)?;
        Ok(SavedAttention { projected, attended, softmax })
    }

    /// Returns dL/dprojection from dL/dout.
    pub fn vjp(
        &self,
        backend: &B,
        saved: SavedAttention<B>,
        batch: &Batch<'_, B>,
        d_out: B::Tensor,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        let SavedAttention { projected: Projected { rotated, gate, unrotated }, attended, softmax } = saved;
        let (d_attended, d_gate) = match gate {
            Some(gate) => {
                let (d_attended, d_gate) = backend.sigmoid_gated_vjp(&attended, &gate, &d_out)?;
                (d_attended, Some(d_gate))
            }
            None => (d_out, None),
        };
        let d_rotated = backend.attend_vjp(&AttentionBackward {
            attention: self.attention(batch),
            qkv: &rotated,
            out: &attended,
            softmax: &softmax,
            dy: &d_attended,
        })?;
        drop((rotated, attended, softmax, d_attended));
        let d_qkv = self.rotate_vjp(backend, unrotated.as_ref(), d_rotated, batch.places(), gradient)?;
        drop(unrotated);
        self.split_vjp(backend, d_qkv, d_gate)
    }
}

impl<B: Compute> SavedAttention<B> {
    /// Attention's output before the gate, and the output if the layer has a gate.
    pub fn output(&self, backend: &B) -> Result<(&B::Tensor, Option<B::Tensor>)> {
        let gate = self.projected.gate.as_ref();
        Ok((&self.attended, gate.map(|gate| backend.sigmoid_gated(&self.attended, gate)).transpose()?))
    }
}

/// The error for a layer that is asked for what only the other kind has.
pub fn wrong_kind() -> EngineError {
    EngineError::Input("a decoder layer has another kind than its saved values".to_owned())
}
