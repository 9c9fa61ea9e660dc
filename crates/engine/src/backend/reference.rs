//! The oracle: every operation as loops over rows ([`ops::slices`]) and candle's matrix products, in f32. It is slow;
//! tests compare it with autograd over plain tensor operations ([`ops::plain`]).

mod decode;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::types::gathered;
use super::{
    Activation, AdapterBackward, AdapterBlock, AdapterPass, AdapterShape, Attention, AttentionBackward, Buffers,
    Compute, Flat, FullSlot, Head, HeadBackward, LinearBackward, Mask, Rotation,
};
use crate::error::Result;
use crate::ops::slices::{self, Group, TokenScore, add_scaled};
use crate::ops::{self, RopeTable, delta};
use crate::spec::ComputeDtype;
use crate::spec::footprint::{MAX_LOGITS, MIN_LOGIT_ROWS};

pub use decode::Cache;

/// Plain candle tensors on the CPU.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Whether matrices, and the inputs they are multiplied with, are rounded to bf16.
    bf16: bool,
}

/// A matrix `[out, in]` and its bias.
#[derive(Clone, Debug)]
pub struct Weight {
    matrix: Tensor,
    bias: Option<Tensor>,
}

/// LoRA factors of a fused weight: A stacked, B block-diagonal.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The factors A of all modules, stacked: `[blocks · r, in]`.
    a: Tensor,
    /// The factors B of all modules on a block diagonal, scaled by s: `[out, blocks · r]`.
    b: Tensor,
    /// The outputs of each adapted module, its ranks among those of all modules, and its scaling.
    parts: Vec<(Range<usize>, Range<usize>, f64)>,
}

/// Rotary angles by position.
#[derive(Debug)]
pub struct Angles {
    table: Arc<RopeTable>,
    positions: Vec<usize>,
}

impl Reference {
    /// Creates the oracle with this precision.
    pub fn new(dtype: ComputeDtype) -> Self {
        Self { bf16: dtype == ComputeDtype::Bf16 }
    }

    /// Creates a tensor from row-major values with rows of `width`.
    fn tensor(&self, values: Vec<f32>, width: usize) -> Result<Tensor> {
        let rows = values.len() / width.max(1);
        Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?)
    }

    fn rounded(&self, x: &Tensor) -> Result<Tensor> {
        if self.bf16 { Ok(ops::round_bf16(x)?) } else { Ok(x.clone()) }
    }

    /// Computes x·Aᵀ `[T, blocks · r]`, each block with x after its module's dropout.
    fn hidden(&self, pass: &AdapterPass<'_, Self>, x: &Tensor) -> Result<Tensor> {
        let AdapterPass { adapter, masks } = pass;
        if masks.is_empty() {
            return Ok(x.matmul(&adapter.a.t()?)?);
        }
        let blocks = masks.iter().zip(&adapter.parts).map(|(mask, (_, ranks, _))| {
            let a = adapter.a.narrow(0, ranks.start, ranks.len())?;
            Ok(dropped(x, mask)?.matmul(&a.t()?)?)
        });
        Ok(Tensor::cat(&blocks.collect::<Result<Vec<Tensor>>>()?, 1)?)
    }

    /// Returns dL/dx and dL/dA of the adapter's A, through each module's dropout mask.
    fn dropped_vjp(
        &self,
        pass: &AdapterPass<'_, Self>,
        x: &Tensor,
        dh: &Tensor,
        mut dx: Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let AdapterPass { adapter, masks } = pass;
        let mut da = Vec::with_capacity(masks.len());
        for (mask, (_, ranks, _)) in masks.iter().zip(&adapter.parts) {
            let a = adapter.a.narrow(0, ranks.start, ranks.len())?;
            let dh = dh.narrow(1, ranks.start, ranks.len())?.contiguous()?;
            dx = (dx + dropped(&dh.matmul(&a)?, mask)?)?;
            da.push(dh.t()?.matmul(&dropped(x, mask)?)?);
        }
        Ok((dx, Tensor::cat(&da, 0)?))
    }

    fn chunks<'t>(head: &Head<Self>, targets: &'t [u32]) -> Result<impl Iterator<Item = (usize, &'t [u32])>> {
        let rows = (MAX_LOGITS as usize / head.weight.matrix.dim(0)?).max(MIN_LOGIT_ROWS as usize);
        Ok(targets.chunks(rows).enumerate().map(move |(index, chunk)| (index * rows, chunk)))
    }

    fn rotation<'a>(rotation: &'a Rotation<'a, Self>) -> ops::Rotation<'a> {
        ops::Rotation {
            heads: rotation.heads,
            qk_norm: rotation.qk_norm.map(|(q, k, eps)| (q.as_slice(), k.as_slice(), eps)),
            table: &rotation.angles.table,
            positions: &rotation.angles.positions,
        }
    }
}

/// Applies a LoRA dropout mask to x.
fn dropped(x: &Tensor, mask: &Mask<'_>) -> Result<Tensor> {
    Ok(ops::change_rows(x, |token, values| mask.apply(token, values))?)
}

/// Adds values to a range of the flat gradient: gradient[at..] += values.
fn add(gradient: &mut [f32], at: usize, values: &[f32]) {
    add_scaled(&mut gradient[at..at + values.len()], 1.0, values);
}

/// Adds all values of a tensor to a range of the flat gradient.
fn add_tensor(gradient: &mut [f32], at: usize, values: &Tensor) -> Result<()> {
    Ok(ops::with_values(values, |values| add(gradient, at, values))?)
}

impl Buffers for Reference {
    type Tensor = Tensor;
    type Vector = Arc<Vec<f32>>;
    type Weight = Weight;
    type FlatBuffer = Vec<f32>;

    fn release_cached(&self) {}

    fn upload_vector(&self, values: Vec<f32>) -> Result<Arc<Vec<f32>>> {
        Ok(Arc::new(values))
    }

    fn upload_weight(&self, mut values: Vec<f32>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Weight> {
        if self.bf16 {
            slices::round_bf16(&mut values);
        }
        let bias = bias.map(|bias| Tensor::from_vec(bias.clone(), bias.len(), &Device::Cpu)).transpose()?;
        Ok(Weight { matrix: self.tensor(values, inputs)?, bias })
    }

    fn vector_from(&self, parameters: &Vec<f32>, place: Range<usize>, offset: f32) -> Result<Arc<Vec<f32>>> {
        self.upload_vector(parameters[place].iter().map(|value| value + offset).collect())
    }

    fn weight_from(&self, parameters: &Vec<f32>, modules: &[FullSlot], inputs: usize) -> Result<Weight> {
        let (weight, bias) = gathered(parameters, modules, inputs);
        self.upload_weight(weight, inputs, bias)
    }

    fn alloc_zeroed(&self, len: usize) -> Result<Flat> {
        Ok(Flat::Host(vec![0.0; len]))
    }

    fn upload(&self, values: Flat) -> Result<Flat> {
        values.on_host()
    }

    fn device_buffer<'f>(&self, flat: &'f Flat) -> Result<&'f Vec<f32>> {
        flat.host()
    }

    fn device_buffer_mut<'f>(&self, flat: &'f mut Flat) -> Result<&'f mut Vec<f32>> {
        flat.host_mut()
    }

    fn download(&self, x: &Tensor) -> Result<Vec<f32>> {
        Ok(x.flatten_all()?.to_vec1()?)
    }
}

impl Compute for Reference {
    type Adapter = Adapter;
    type Angles = Angles;
    type Softmax = ();
    type ScoredRows = ();
    type DeltaNet = Arc<delta::Weights>;
    type DeltaStates = Vec<delta::State>;

    fn adapter_from(&self, parameters: &Vec<f32>, shape: &AdapterShape) -> Result<Adapter> {
        let AdapterShape { inputs, outputs, blocks } = shape;
        let rank = blocks.iter().map(|block| block.r).sum();
        let (mut a, mut b) = (Vec::with_capacity(rank * inputs), vec![0f32; outputs * rank]);
        for (block, ranks) in blocks.iter().zip(shape.ranks()) {
            a.extend_from_slice(shape.a(parameters, block));
            for (row, values) in block.outputs.clone().zip(shape.b(parameters, block).chunks_exact(block.r)) {
                add_scaled(&mut b[row * rank..][ranks.clone()], block.scaling as f32, values);
            }
        }
        let part = |(block, ranks): (&AdapterBlock, Range<usize>)| (block.outputs.clone(), ranks, block.scaling);
        let parts = blocks.iter().zip(shape.ranks()).map(part).collect();
        Ok(Adapter { a: self.tensor(a, *inputs)?, b: self.tensor(b, rank)?, parts })
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Result<Tensor> {
        self.select_rows(&table.matrix, ids)
    }

    fn embed_vjp(&self, ids: &[u32], dy: &Tensor, gradient: &mut Vec<f32>, at: usize) -> Result<()> {
        let width = dy.dim(1)?;
        Ok(ops::with_values(dy, |dy| {
            for (id, dy) in ids.iter().zip(dy.chunks_exact(width)) {
                add(gradient, at + *id as usize * width, dy);
            }
        })?)
    }

    fn select_rows(&self, x: &Tensor, rows: &[u32]) -> Result<Tensor> {
        Ok(x.index_select(&Tensor::from_vec(rows.to_vec(), rows.len(), &Device::Cpu)?, 0)?)
    }

    fn scatter_rows(&self, x: &Tensor, rows: &[u32], count: usize) -> Result<Tensor> {
        let width = x.dim(1)?;
        let mut values = vec![0f32; count * width];
        ops::with_values(x, |x| {
            for (row, x) in rows.iter().zip(x.chunks_exact(width)) {
                add(&mut values, *row as usize * width, x);
            }
        })?;
        self.tensor(values, width)
    }

    fn concat_rows(&self, parts: &[&Tensor]) -> Result<Tensor> {
        Ok(Tensor::cat(parts, 0)?)
    }

    fn scaled(&self, x: &Tensor, factor: f32) -> Result<Tensor> {
        Ok((x * f64::from(factor))?)
    }

    fn rows_scaled(&self, x: &Tensor, columns: Range<usize>, factors: &[f32]) -> Result<Tensor> {
        let width = x.dim(1)?;
        let mut values: Vec<f32> = x.flatten_all()?.to_vec1()?;
        for (row, factor) in values.chunks_exact_mut(width).zip(factors) {
            row[columns.clone()].iter_mut().for_each(|value| *value *= factor);
        }
        self.tensor(values, width)
    }

    fn sum(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        Ok((x + y)?)
    }

    fn columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        Ok(x.narrow(1, columns.start, columns.len())?.contiguous()?)
    }

    fn concat_columns(&self, parts: &[&Tensor]) -> Result<Tensor> {
        Ok(Tensor::cat(parts, 1)?.contiguous()?)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Arc<Vec<f32>>, eps: f32) -> Result<Tensor> {
        Ok(ops::rms_norm(x, weight, eps)?)
    }

    fn rms_norm_vjp(
        &self,
        x: &Tensor,
        weight: &Arc<Vec<f32>>,
        eps: f32,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dx = ops::rms_norm_vjp(x, weight, eps, dy)?;
        Ok(match residual {
            Some(residual) => (residual + dx)?,
            None => dx,
        })
    }

    fn rms_norm_weight_vjp(&self, x: &Tensor, eps: f32, dy: &Tensor, gradient: &mut Vec<f32>, at: usize) -> Result<()> {
        add(gradient, at, &ops::rms_norm_weight_vjp(x, eps, dy)?);
        Ok(())
    }

    fn linear(
        &self,
        x: &Tensor,
        weight: &Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let y = ops::padded(x, |x| -> Result<Tensor> {
            let x = self.rounded(x)?;
            let y = ops::linear(&x, &weight.matrix, weight.bias.as_ref())?;
            match &adapter {
                Some(pass) => Ok((y + self.hidden(pass, &x)?.matmul(&pass.adapter.b.t()?)?)?),
                None => Ok(y),
            }
        })?;
        Ok(match residual {
            Some(residual) => (residual + y)?,
            None => y,
        })
    }

    fn linear_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut Vec<f32>) -> Result<Tensor> {
        let (x, dy) = (self.rounded(linear.x)?, self.rounded(linear.dy)?);
        let dx = dy.matmul(&linear.weight.matrix)?;
        for FullSlot { outputs, weight: weight_at, bias: bias_at } in linear.full {
            let dy = dy.narrow(1, outputs.start, outputs.len())?.contiguous()?;
            add_tensor(gradient, *weight_at, &dy.t()?.matmul(&x)?)?;
            if let Some(at) = bias_at {
                let dy = linear.dy.narrow(1, outputs.start, outputs.len())?;
                add(gradient, *at, &ops::column_sums(&dy.contiguous()?)?);
            }
        }
        let Some(AdapterBackward { pass, slots }) = &linear.adapter else { return Ok(dx) };
        let Adapter { a, b, parts } = pass.adapter;
        let h = self.hidden(pass, &x)?;
        let dh = dy.matmul(b)?;
        let (dx, da) = match pass.masks.is_empty() {
            true => ((dx + dh.matmul(a)?)?, dh.t()?.matmul(&x)?),
            false => self.dropped_vjp(pass, &x, &dh, dx)?,
        };
        for ((outputs, ranks, scaling), (a_at, b_at)) in parts.iter().zip(*slots) {
            add_tensor(gradient, *a_at, &da.narrow(0, ranks.start, ranks.len())?)?;
            // The loss L depends on B through s·B, and the field `b` of the adapter holds s·B.
            let dy = dy.narrow(1, outputs.start, outputs.len())?;
            let db = dy.t()?.contiguous()?.matmul(&h.narrow(1, ranks.start, ranks.len())?.contiguous()?)?;
            add_tensor(gradient, *b_at, &(db * *scaling)?)?;
        }
        Ok(dx)
    }

    fn angles(&self, table: &Arc<RopeTable>, positions: &[usize]) -> Result<Angles> {
        Ok(Angles { table: table.clone(), positions: positions.to_vec() })
    }

    fn rotate(&self, rotation: &Rotation<'_, Self>, qkv: &Tensor) -> Result<Tensor> {
        Ok(ops::rotate(&Self::rotation(rotation), qkv)?)
    }

    fn rotate_vjp(&self, rotation: &Rotation<'_, Self>, qkv: Option<&Tensor>, dy: &Tensor) -> Result<Tensor> {
        // Without qk-norm the gradient does not depend on `qkv`, so any tensor will do.
        Ok(ops::rotate_vjp(&Self::rotation(rotation), qkv.unwrap_or(dy), dy)?)
    }

    fn rotate_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Tensor,
        dy: &Tensor,
        gradient: &mut Vec<f32>,
        at: (usize, usize),
    ) -> Result<()> {
        if let Some((q, k)) = ops::rotate_weight_vjp(&Self::rotation(rotation), qkv, dy)? {
            add(gradient, at.0, &q);
            add(gradient, at.1, &k);
        }
        Ok(())
    }

    fn attend(&self, attention: &Attention<'_>, qkv: &Tensor) -> Result<(Tensor, ())> {
        let Attention { heads, groups, visible, window: _ } = *attention;
        Ok((ops::attention(heads, groups, visible, qkv)?, ()))
    }

    fn attend_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Result<Tensor> {
        let Attention { heads, groups, visible, window: _ } = backward.attention;
        Ok(ops::attention_vjp(heads, groups, visible, backward.qkv, backward.dy)?)
    }

    fn gated(&self, activation: Activation, gate_up: &Tensor) -> Result<Tensor> {
        Ok(ops::gated(activation, gate_up)?)
    }

    fn gated_vjp(&self, activation: Activation, gate_up: &Tensor, dy: &Tensor) -> Result<Tensor> {
        Ok(ops::gated_vjp(activation, gate_up, dy)?)
    }

    fn sigmoid_gated(&self, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
        Ok(ops::sigmoid_gated(x, gate)?)
    }

    fn sigmoid_gated_vjp(&self, x: &Tensor, gate: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok(ops::sigmoid_gated_vjp(x, gate, dy)?)
    }

    fn upload_delta_net(&self, weights: delta::Weights) -> Result<Arc<delta::Weights>> {
        Ok(Arc::new(weights))
    }

    fn delta_net(
        &self,
        net: &Arc<delta::Weights>,
        groups: &[Group],
        x: &Tensor,
    ) -> Result<(Tensor, Vec<delta::State>)> {
        let width = net.shape.value_width();
        let mut out = vec![0f32; x.dim(0)? * width];
        let states = ops::with_values(x, |x| net.forward_groups(groups, x, &mut out))?;
        Ok((self.tensor(out, width)?, states))
    }

    fn delta_net_vjp(&self, net: &Arc<delta::Weights>, groups: &[Group], x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let mut dx = vec![0f32; x.elem_count()];
        ops::with_values(x, |x| ops::with_values(dy, |dy| net.backward_groups(groups, x, dy, &mut dx)))??;
        self.tensor(dx, net.shape.width())
    }

    fn score(
        &self,
        x: &Tensor,
        head: &Head<Self>,
        targets: &[u32],
        temperature: f64,
        _trained: &[bool],
    ) -> Result<(Vec<TokenScore>, ())> {
        let mut scores = Vec::with_capacity(targets.len());
        for (begin, ids) in Self::chunks(head, targets)? {
            let logits = self.logits(&x.narrow(0, begin, ids.len())?, head)?;
            scores.extend(ops::token_scores(&logits, ids, temperature)?);
        }
        Ok((scores, ()))
    }

    fn score_vjp(&self, backward: HeadBackward<'_, Self>, gradient: &mut Vec<f32>) -> Result<Tensor> {
        let HeadBackward { x, head, targets, temperature, scored: (), g, at } = backward;
        let mut parts = Vec::new();
        for (begin, ids) in Self::chunks(head, targets)? {
            let x = x.narrow(0, begin, ids.len())?;
            let logits = self.logits(&x, head)?;
            let d_logits = ops::token_scores_vjp(&logits, ids, temperature, &g[begin..begin + ids.len()])?;
            let d_logits = match head.softcap {
                Some(softcap) => ops::softcap_vjp(&logits, softcap, &d_logits)?,
                None => d_logits,
            };
            let d_logits = self.rounded(&d_logits)?;
            parts.push(d_logits.matmul(&head.weight.matrix)?);
            if let Some(at) = at {
                add_tensor(gradient, at, &d_logits.t()?.matmul(&self.rounded(&x)?)?)?;
            }
        }
        Ok(Tensor::cat(&parts, 0)?)
    }

    fn logits(&self, x: &Tensor, head: &Head<Self>) -> Result<Tensor> {
        let logits =
            ops::padded(&self.rounded(x)?, |x| -> Result<Tensor> { Ok(ops::linear(x, &head.weight.matrix, None)?) })?;
        Ok(match head.softcap {
            Some(softcap) => ops::softcap(&logits, softcap)?,
            None => logits,
        })
    }
}
