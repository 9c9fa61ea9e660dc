//! Forward and backward passes: each operation allocates its result on the device and queues the kernel that fills it.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use super::{Angles, Cuda, Flat, Tensor, Vector, Weight};
use crate::backend::{
    Activation, AdapterBackward, AdapterPass, AdapterShape, Attention, AttentionBackward, Compute, FullSlot, Head,
    HeadBackward, LinearBackward, Mask, Rotation,
};
use crate::error::{EngineError, Result};
use crate::kernels::cuda::driver::Buffer;
use crate::kernels::cuda::head::{self, Normalizers};
use crate::kernels::cuda::lora::{self, Factors, Linear, Trained};
use crate::kernels::cuda::norm::{self, NormBackward};
use crate::kernels::cuda::rope::{self, QkNorm, Rope};
use crate::kernels::cuda::rows::{self, Dropout, Dtype};
use crate::kernels::cuda::{attention, mlp};
use crate::ops::RopeTable;
use crate::ops::slices::{Heads, TokenScore};

impl Cuda {
    /// Uploads the random keys of each module's LoRA dropout.
    fn masks(&self, masks: &[Mask<'_>]) -> Result<Vec<(Buffer, u64, f32)>> {
        let upload = |mask: &Mask<'_>| {
            let (threshold, scale) = mask.threshold_and_scale();
            Ok((self.device.upload(&mask.words())?, threshold, scale))
        };
        masks.iter().map(upload).collect()
    }

    /// Computes [`Compute::linear`] into `out`, which may be the residual.
    fn linear_into(
        &self,
        x: &Tensor,
        weight: &Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let masks = self.masks(adapter.as_ref().map_or(&[], |pass| pass.masks))?;
        let adapter = adapter.as_ref().map(|pass| &**pass.adapter);
        let linear = Linear { weight: weight.rows(), bias: weight.bias(), adapter, dropout: &dropouts(&masks) };
        Ok(lora::linear(&self.device, self.gemm, &linear, x.rows(), residual.map(Tensor::rows), out.rows())?)
    }
}

fn dropouts(masks: &[(Buffer, u64, f32)]) -> Vec<Dropout<'_>> {
    masks.iter().map(|(keys, threshold, scale)| Dropout { keys, threshold: *threshold, scale: *scale }).collect()
}

fn rope<'a>(rotation: &'a Rotation<'a, Cuda>) -> Rope<'a> {
    let Angles { table, positions } = rotation.angles;
    let qk_norm = rotation.qk_norm.map(|(q, k, eps)| QkNorm { q: q.rows(), k: k.rows(), eps });
    Rope { heads: rotation.heads, qk_norm, cos: table.cos(), sin: table.sin(), positions }
}

pub(super) fn no_kernel(what: &str) -> EngineError {
    EngineError::Input(format!("there is no GPU kernel for {what}"))
}

fn check_silu(activation: Activation) -> Result<()> {
    match activation {
        Activation::Silu => Ok(()),
        Activation::GeluTanh => Err(no_kernel("gelu")),
    }
}

impl Compute for Cuda {
    type Adapter = Arc<lora::Adapter>;
    type Angles = Angles;
    type Softmax = Tensor;
    type ScoredRows = Normalizers;
    type DeltaNet = Infallible;
    type DeltaStates = Infallible;

    fn adapter_from(&self, parameters: &Flat, shape: &AdapterShape) -> Result<Arc<lora::Adapter>> {
        let AdapterShape { inputs, outputs, blocks } = shape;
        let (r, scaling) = blocks.first().map_or((0, 1.0), |block| (block.r, block.scaling));
        if blocks.iter().any(|block| (block.r, block.scaling) != (r, scaling)) {
            return Err(no_kernel("rank_pattern and alpha_pattern that differ between q, k and v, or gate and up"));
        }
        let blocks = blocks.iter().map(|block| (block.outputs.clone(), block.a, block.b)).collect();
        let values = parameters.buffer();
        let factors = Factors { values, inputs: *inputs, outputs: *outputs, r, scaling, blocks };
        Ok(Arc::new(lora::Adapter::new(&self.device, self.compute(), &factors)?))
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Result<Tensor> {
        let out = Tensor::new(&self.device, ids.len(), table.rows().width, Dtype::F32)?;
        rows::select(&self.device, table.rows(), ids, out.rows())?;
        Ok(out)
    }

    fn embed_vjp(&self, ids: &[u32], dy: &Tensor, gradient: &mut Flat, at: usize) -> Result<()> {
        let rows = ids.iter().max().map_or(0, |id| *id as usize + 1);
        Ok(rows::scatter_add(&self.device, dy.rows(), ids, gradient.matrix(at, rows, dy.width()))?)
    }

    fn select_rows(&self, x: &Tensor, rows: &[u32]) -> Result<Tensor> {
        let out = Tensor::new(&self.device, rows.len(), x.width(), x.dtype())?;
        rows::select(&self.device, x.rows(), rows, out.rows())?;
        Ok(out)
    }

    fn scatter_rows(&self, x: &Tensor, rows: &[u32], count: usize) -> Result<Tensor> {
        let out = Tensor::zeros(&self.device, count, x.width(), Dtype::F32)?;
        rows::scatter_add(&self.device, x.rows(), rows, out.rows())?;
        Ok(out)
    }

    fn concat_rows(&self, parts: &[&Tensor]) -> Result<Tensor> {
        let Some(first) = parts.first() else {
            return Err(EngineError::Input("there are no tensors to stack".to_owned()));
        };
        let count = parts.iter().map(|part| part.count()).sum();
        let out = Tensor::new(&self.device, count, first.width(), first.dtype())?;
        let mut begin = 0;
        for part in parts {
            let end = begin + part.count();
            rows::copy(&self.device, part.rows(), out.rows().part(begin..end))?;
            begin = end;
        }
        Ok(out)
    }

    // These operations have no kernel; the loader rejects models that need them.
    fn scaled(&self, _: &Tensor, _: f32) -> Result<Tensor> {
        Err(no_kernel("the product of a tensor and a number"))
    }

    fn rows_scaled(&self, _: &Tensor, _: Range<usize>, _: &[f32]) -> Result<Tensor> {
        Err(no_kernel("the product of each row of a tensor and its factor"))
    }

    fn sum(&self, _: &Tensor, _: &Tensor) -> Result<Tensor> {
        Err(no_kernel("the sum of two tensors"))
    }

    fn columns(&self, _: &Tensor, _: Range<usize>) -> Result<Tensor> {
        Err(no_kernel("a copy of some columns of a tensor"))
    }

    fn concat_columns(&self, _: &[&Tensor]) -> Result<Tensor> {
        Err(no_kernel("joining tensors side by side"))
    }

    fn rms_norm(&self, x: &Tensor, weight: &Vector, eps: f32) -> Result<Tensor> {
        let out = Tensor::new(&self.device, x.count(), x.width(), self.compute())?;
        norm::rms_norm(&self.device, x.rows(), weight.rows(), eps, out.rows())?;
        Ok(out)
    }

    fn rms_norm_vjp(
        &self,
        x: &Tensor,
        weight: &Vector,
        eps: f32,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dx = Tensor::new(&self.device, x.count(), x.width(), Dtype::F32)?;
        let residual = residual.map(Tensor::rows);
        let backward = NormBackward { x: x.rows(), weight: weight.rows(), eps, dy: dy.rows(), residual };
        norm::rms_norm_vjp(&self.device, backward, dx.rows())?;
        Ok(dx)
    }

    fn rms_norm_weight_vjp(&self, x: &Tensor, eps: f32, dy: &Tensor, gradient: &mut Flat, at: usize) -> Result<()> {
        Ok(norm::rms_norm_weight_vjp(&self.device, x.rows(), eps, dy.rows(), gradient.vector(at, x.width()))?)
    }

    fn linear(
        &self,
        x: &Tensor,
        weight: &Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dtype = if residual.is_some() { Dtype::F32 } else { self.compute() };
        let out = Tensor::new(&self.device, x.count(), weight.outputs(), dtype)?;
        self.linear_into(x, weight, adapter, residual, &out)?;
        Ok(out)
    }

    fn linear_onto(
        &self,
        x: &Tensor,
        weight: &Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Tensor,
    ) -> Result<Tensor> {
        self.linear_into(x, weight, adapter, Some(&residual), &residual)?;
        Ok(residual)
    }

    fn linear_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut Flat) -> Result<Tensor> {
        let LinearBackward { x, dy, weight, adapter, full } = linear;
        let dx = Tensor::new(&self.device, x.count(), x.width(), self.compute())?;
        let (pass, slots) = match adapter {
            Some(AdapterBackward { pass, slots }) => (Some(pass), *slots),
            None => (None, &[][..]),
        };
        let masks = self.masks(pass.map_or(&[], |pass| pass.masks))?;
        let trained = |slot: &FullSlot| {
            let FullSlot { outputs, weight, bias } = slot;
            Trained { outputs: outputs.clone(), weight: *weight, bias: *bias }
        };
        let backward = lora::LinearBackward {
            linear: Linear {
                weight: weight.rows(),
                bias: weight.bias(),
                adapter: pass.map(|pass| &**pass.adapter),
                dropout: &dropouts(&masks),
            },
            x: x.rows(),
            dy: dy.rows(),
            slots,
            full: &full.iter().map(trained).collect::<Vec<Trained>>(),
            gradient: gradient.buffer(),
        };
        lora::linear_vjp(&self.device, self.gemm, &backward, dx.rows())?;
        Ok(dx)
    }

    fn angles(&self, table: &Arc<RopeTable>, positions: &[usize]) -> Result<Angles> {
        let positions: Vec<u32> = positions.iter().map(|position| *position as u32).collect();
        Ok(Angles { table: self.table(table)?, positions: self.device.upload(&positions)? })
    }

    fn rotate(&self, rotation: &Rotation<'_, Self>, qkv: &Tensor) -> Result<Tensor> {
        let out = Tensor::new(&self.device, qkv.count(), qkv.width(), qkv.dtype())?;
        rope::rotate(&self.device, &rope(rotation), qkv.rows(), out.rows())?;
        Ok(out)
    }

    fn rotate_vjp(&self, rotation: &Rotation<'_, Self>, qkv: Option<&Tensor>, dy: &Tensor) -> Result<Tensor> {
        let dx = Tensor::new(&self.device, dy.count(), dy.width(), dy.dtype())?;
        rope::rotate_vjp(&self.device, &rope(rotation), qkv.map(Tensor::rows), dy.rows(), dx.rows())?;
        Ok(dx)
    }

    fn rotate_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Tensor,
        dy: &Tensor,
        gradient: &mut Flat,
        at: (usize, usize),
    ) -> Result<()> {
        let width = rotation.heads.head_dim;
        let slots = (gradient.vector(at.0, width), gradient.vector(at.1, width));
        Ok(rope::rotate_weight_vjp(&self.device, &rope(rotation), qkv.rows(), dy.rows(), slots)?)
    }

    fn check_trainable(&self, heads: &Heads) -> Result<()> {
        Ok(attention::check_trainable(&self.device, heads, self.compute())?)
    }

    fn attend(&self, attention: &Attention<'_>, qkv: &Tensor) -> Result<(Tensor, Tensor)> {
        let layout = self.layout(attention)?;
        let heads = attention.heads;
        let out = Tensor::new(&self.device, qkv.count(), heads.q_width(), qkv.dtype())?;
        let softmax = Tensor::new(&self.device, qkv.count(), heads.num_heads, Dtype::F32)?;
        attention::attend(&self.device, &layout, qkv.rows(), out.rows(), softmax.rows())?;
        Ok((out, softmax))
    }

    fn attend_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Result<Tensor> {
        let AttentionBackward { attention, qkv, out, softmax, dy } = backward;
        let layout = self.layout(attention)?;
        let d_qkv = Tensor::new(&self.device, qkv.count(), qkv.width(), qkv.dtype())?;
        let backward = attention::Backward {
            layout: &layout,
            qkv: qkv.rows(),
            out: out.rows(),
            softmax: softmax.rows(),
            dy: dy.rows(),
        };
        attention::attend_vjp(&self.device, &backward, d_qkv.rows())?;
        Ok(d_qkv)
    }

    fn gated(&self, activation: Activation, gate_up: &Tensor) -> Result<Tensor> {
        check_silu(activation)?;
        let out = Tensor::new(&self.device, gate_up.count(), gate_up.width() / 2, gate_up.dtype())?;
        mlp::silu_mul(&self.device, gate_up.rows(), out.rows())?;
        Ok(out)
    }

    fn gated_vjp(&self, activation: Activation, gate_up: &Tensor, dy: &Tensor) -> Result<Tensor> {
        check_silu(activation)?;
        let out = Tensor::new(&self.device, gate_up.count(), gate_up.width(), gate_up.dtype())?;
        mlp::silu_mul_vjp(&self.device, gate_up.rows(), dy.rows(), out.rows())?;
        Ok(out)
    }

    fn score(
        &self,
        x: &Tensor,
        head: &Head<Self>,
        targets: &[u32],
        temperature: f64,
        _trained: &[bool],
    ) -> Result<(Vec<TokenScore>, Normalizers)> {
        Ok(head::score(&self.device, &self.head(&head.weight), x.rows(), targets, temperature)?)
    }

    fn score_vjp(&self, backward: HeadBackward<'_, Self>, gradient: &mut Flat) -> Result<Tensor> {
        let HeadBackward { x, head, targets, temperature, scored, g, at } = backward;
        let dx = Tensor::new(&self.device, x.count(), x.width(), x.dtype())?;
        let d_weight = at.map(|at| gradient.matrix(at, head.weight.outputs(), x.width()));
        let backward = head::Backward { x: x.rows(), targets, temperature, normalizers: &scored, g, d_weight };
        head::score_vjp(&self.device, &self.head(&head.weight), &backward, dx.rows())?;
        Ok(dx)
    }

    fn logits(&self, x: &Tensor, head: &Head<Self>) -> Result<Tensor> {
        let out = Tensor::new(&self.device, x.count(), head.weight.outputs(), Dtype::F32)?;
        head::logits(&self.device, &self.head(&head.weight), x.rows(), out.rows())?;
        Ok(out)
    }
}
