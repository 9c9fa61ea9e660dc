//! The decoder's operations and their vector-Jacobian products on CPU tensors, without an autograd graph.
//!
//! Each operation is a loop over rows in [`slices`]. Threads share the rows or groups, so a result depends only on its
//! own row. [`plain`] implements the same operations with differentiable tensor operations, for tests.

pub mod delta;
pub mod plain;
pub mod slices;
#[cfg(test)]
mod tests;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::kernels::mlp::Activation;
use slices::{Group, Heads, Visible};

/// Minimum number of rows of a matrix product: with fewer rows the matrix library uses other code that
/// sums in another order.
const MIN_MATMUL_ROWS: usize = 8;

/// Runs `f` on x `[T, in]`, padded with zero rows to the minimum number of rows; removes the padding from the result.
pub fn padded<E: From<candle_core::Error>>(
    x: &Tensor,
    f: impl FnOnce(&Tensor) -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    let rows = x.dim(0)?;
    if rows >= MIN_MATMUL_ROWS {
        return f(x);
    }
    let y = f(&x.pad_with_zeros(0, 0, MIN_MATMUL_ROWS - rows)?)?;
    Ok(y.narrow(0, 0, rows)?)
}

/// Computes x `[T, in]` · weightᵀ `[out, in]` + bias.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = x.matmul(&weight.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// RMSNorm of each row.
pub fn rms_norm(x: &Tensor, weight: &[f32], eps: f32) -> Result<Tensor> {
    let width = weight.len();
    map1("rms_norm", x, width, |x, out| slices::rms_norm(x, weight, eps, out))
}

/// Returns dL/dx of [`rms_norm`].
pub fn rms_norm_vjp(x: &Tensor, weight: &[f32], eps: f32, dy: &Tensor) -> Result<Tensor> {
    map2("rms_norm_vjp", x, dy, weight.len(), |x, dy, dx| slices::rms_norm_vjp(x, weight, eps, dy, dx))
}

/// Returns dL/dweight of [`rms_norm`], summed over the rows in order.
pub fn rms_norm_weight_vjp(x: &Tensor, eps: f32, dy: &Tensor) -> Result<Vec<f32>> {
    let width = x.dim(1)?;
    let mut dw = vec![0f32; width];
    with_values(x, |x| {
        with_values(dy, |dy| {
            for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
                slices::rms_norm_weight_vjp(x, eps, dy, &mut dw);
            }
        })
    })??;
    Ok(dw)
}

/// Column sums over the rows, in order.
pub fn column_sums(x: &Tensor) -> Result<Vec<f32>> {
    let width = x.dim(1)?;
    let mut sums = vec![0f32; width];
    with_values(x, |x| x.chunks_exact(width).for_each(|row| slices::add_scaled(&mut sums, 1.0, row)))?;
    Ok(sums)
}

/// Rounds each value to the nearest bfloat16 (ties to even), still stored as f32.
pub fn round_bf16(x: &Tensor) -> Result<Tensor> {
    map1("round_bf16", x, x.dim(1)?, |x, out| {
        out.copy_from_slice(x);
        slices::round_bf16(out);
    })
}

/// Applies `f` (row index, values) to a copy of each row.
pub fn change_rows(x: &Tensor, f: impl Fn(usize, &mut [f32]) + Sync) -> Result<Tensor> {
    map1_indexed("change_rows", x, x.dim(1)?, |index, x, out| {
        out.copy_from_slice(x);
        f(index, out);
    })
}

/// Maps rows `[gate | up]` to activation(gate) ∘ up.
pub fn gated(activation: Activation, gate_up: &Tensor) -> Result<Tensor> {
    map1("gated", gate_up, gate_up.dim(1)? / 2, |x, out| slices::gated(activation, x, out))
}

/// Returns dL/d`[gate | up]` of [`gated`].
pub fn gated_vjp(activation: Activation, gate_up: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map2("gated_vjp", gate_up, dy, gate_up.dim(1)?, |x, dy, dx| slices::gated_vjp(activation, x, dy, dx))
}

/// Multiplies x elementwise by the sigmoid of a gate.
pub fn sigmoid_gated(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    map2("sigmoid_gated", x, gate, x.dim(1)?, slices::sigmoid_gated)
}

/// Returns dL/dx and dL/dgate of [`sigmoid_gated`].
pub fn sigmoid_gated_vjp(x: &Tensor, gate: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let dx = map2("sigmoid_gated_vjp", dy, gate, x.dim(1)?, slices::sigmoid_gated)?;
    let by_gate = map2("sigmoid_gate_vjp", x, gate, x.dim(1)?, slices::sigmoid_gate_slope)?;
    let d_gate = (by_gate * dy)?;
    Ok((dx, d_gate))
}

/// Computes the soft cap c·tanh(x / c).
pub fn softcap(x: &Tensor, softcap: f32) -> Result<Tensor> {
    map1("softcap", x, x.dim(1)?, |x, out| {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = softcap * (x / softcap).tanh());
    })
}

/// Returns dL/dx of [`softcap`] from its result `y` and dL/dy.
pub fn softcap_vjp(y: &Tensor, softcap: f32, dy: &Tensor) -> Result<Tensor> {
    map2("softcap_vjp", y, dy, y.dim(1)?, |y, dy, dx| {
        for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
            *dx = dy * slices::softcap_slope(*y, softcap);
        }
    })
}

/// Rotary tables `[position][half]`, including the attention factor of YaRN.
#[derive(Debug, Default)]
pub struct RopeTable {
    /// Cosines of the rotary angles, one row per position.
    pub cos: Vec<f32>,
    /// Sines of the rotary angles, one row per position.
    pub sin: Vec<f32>,
    /// Half the number of columns of a head that rotate.
    pub half: usize,
}

impl RopeTable {
    /// Number of positions that the tables cover.
    pub fn len(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }

    /// Whether the table covers no position.
    pub fn is_empty(&self) -> bool {
        self.cos.is_empty()
    }

    /// The cosines and sines of a position.
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let range = position * self.half..(position + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// The transformation of queries and keys before attention.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Sizes of the attention heads.
    pub heads: &'a Heads,
    /// Weights of the norms on query and key heads, and epsilon.
    pub qk_norm: Option<(&'a [f32], &'a [f32], f32)>,
    /// The rotary angles of all positions.
    pub table: &'a RopeTable,
    /// The position of each row in its sequence.
    pub positions: &'a [usize],
}

impl Rotation<'_> {
    fn norm_weight(&self, head: usize) -> Option<(&[f32], f32)> {
        self.qk_norm.map(|(q, k, eps)| (if head < self.heads.num_heads { q } else { k }, eps))
    }

    /// Applies qk-norm and rotary embedding to one row, in place.
    pub fn row(&self, position: usize, row: &mut [f32]) {
        let (cos, sin) = self.table.at(position);
        let rotated = self.heads.num_heads + self.heads.num_kv_heads;
        for (index, head) in row.chunks_exact_mut(self.heads.head_dim).take(rotated).enumerate() {
            if let Some((weight, eps)) = self.norm_weight(index) {
                slices::rms_norm_in_place(head, weight, eps);
            }
            slices::rotate(head, cos, sin);
        }
    }

    /// Returns dL/dqkv of one row; reads `before` only with qk-norm.
    pub fn row_vjp(&self, position: usize, before: &[f32], dy: &[f32], dx: &mut [f32]) {
        let (cos, sin) = self.table.at(position);
        let (dim, rotated) = (self.heads.head_dim, self.heads.num_heads + self.heads.num_kv_heads);
        let mut turned = vec![0f32; dim];
        for (index, ((before, dy), dx)) in
            before.chunks_exact(dim).zip(dy.chunks_exact(dim)).zip(dx.chunks_exact_mut(dim)).enumerate()
        {
            if index >= rotated {
                dx.copy_from_slice(dy);
                continue;
            }
            turned.copy_from_slice(dy);
            slices::rotate_back(&mut turned, cos, sin);
            match self.norm_weight(index) {
                Some((weight, eps)) => slices::rms_norm_vjp(before, weight, eps, &turned, dx),
                None => dx.copy_from_slice(&turned),
            }
        }
    }

    /// Returns dL/dweight of qk-norm (for query and key heads), summed over the rows in order; None without qk-norm.
    pub fn weight_vjp(&self, qkv: &[f32], dy: &[f32]) -> Option<(Vec<f32>, Vec<f32>)> {
        let (_, _, eps) = self.qk_norm?;
        let (width, dim) = (self.heads.width(), self.heads.head_dim);
        let (num_heads, rotated) = (self.heads.num_heads, self.heads.num_heads + self.heads.num_kv_heads);
        let (mut dq, mut dk) = (vec![0f32; dim], vec![0f32; dim]);
        let mut turned = vec![0f32; dim];
        for ((position, x), dy) in self.positions.iter().zip(qkv.chunks_exact(width)).zip(dy.chunks_exact(width)) {
            let (cos, sin) = self.table.at(*position);
            for (head, (x, dy)) in x.chunks_exact(dim).zip(dy.chunks_exact(dim)).take(rotated).enumerate() {
                turned.copy_from_slice(dy);
                slices::rotate_back(&mut turned, cos, sin);
                slices::rms_norm_weight_vjp(x, eps, &turned, if head < num_heads { &mut dq } else { &mut dk });
            }
        }
        Some((dq, dk))
    }
}

/// Applies qk-norm and rotary embedding to every row of `qkv`.
pub fn rotate(rotation: &Rotation, qkv: &Tensor) -> Result<Tensor> {
    let width = rotation.heads.width();
    map1_indexed("rotate", qkv, width, |index, x, out| {
        out.copy_from_slice(x);
        rotation.row(rotation.positions[index], out);
    })
}

/// Returns dL/dqkv of [`rotate`]; `qkv` is its input.
pub fn rotate_vjp(rotation: &Rotation, qkv: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let width = rotation.heads.width();
    map2_indexed("rotate_vjp", qkv, dy, width, |index, x, dy, dx| {
        rotation.row_vjp(rotation.positions[index], x, dy, dx);
    })
}

/// Returns dL/dweight of the norms on query and key heads in [`rotate`]; None without qk-norm. `qkv` is its input.
pub fn rotate_weight_vjp(rotation: &Rotation, qkv: &Tensor, dy: &Tensor) -> Result<Option<(Vec<f32>, Vec<f32>)>> {
    with_values(qkv, |qkv| with_values(dy, |dy| rotation.weight_vjp(qkv, dy)))?
}

/// Causal attention within each group of a packed batch; `visible` holds [`slices::visible`] of each group.
pub fn attention(heads: &Heads, groups: &[Group], visible: &[Vec<Visible>], qkv: &Tensor) -> Result<Tensor> {
    let op = Map1 {
        name: "attention",
        out_width: heads.q_width(),
        f: |x: &[f32], out: &mut [f32]| {
            let jobs = split(groups, x, heads.width());
            let outs = split_mut(groups, out, heads.q_width());
            jobs.into_par_iter()
                .zip(outs)
                .zip(visible)
                .for_each(|((qkv, out), visible)| slices::attention(heads, visible, qkv, out));
        },
    };
    qkv.apply_op1_no_bwd(&op)
}

/// Returns dL/dqkv of [`attention`].
pub fn attention_vjp(
    heads: &Heads,
    groups: &[Group],
    visible: &[Vec<Visible>],
    qkv: &Tensor,
    d_out: &Tensor,
) -> Result<Tensor> {
    let op = Map2 {
        name: "attention_vjp",
        out_width: heads.width(),
        f: |x: &[f32], d_out: &[f32], dx: &mut [f32]| {
            let jobs = split(groups, x, heads.width());
            let d_outs = split(groups, d_out, heads.q_width());
            let dxs = split_mut(groups, dx, heads.width());
            jobs.into_par_iter().zip(d_outs).zip(dxs).zip(visible).for_each(|(((qkv, d_out), dx), visible)| {
                slices::attention_vjp(heads, visible, qkv, d_out, dx);
            });
        },
    };
    qkv.apply_op2_no_bwd(d_out, &op)
}

/// Log-prob and entropy of one target per row of logits `[N, vocab]`.
pub fn token_scores(logits: &Tensor, targets: &[u32], temperature: f64) -> Result<Vec<slices::TokenScore>> {
    let vocab = logits.dim(1)?;
    with_values(logits, |values| {
        let rows = values.par_chunks_exact(vocab).zip(targets).with_min_len(min_rows(vocab));
        rows.map(|(row, target)| slices::token_score(row, *target as usize, temperature)).collect()
    })
}

/// Returns dL/dlogits `[N, vocab]` from dL/dlogp `[N]`.
pub fn token_scores_vjp(logits: &Tensor, targets: &[u32], temperature: f64, g: &[f32]) -> Result<Tensor> {
    map1_indexed("token_scores_vjp", logits, logits.dim(1)?, |index, row, out| {
        if g[index] != 0.0 {
            out.copy_from_slice(row);
            slices::token_score_vjp(out, targets[index] as usize, temperature, g[index]);
        }
    })
}

fn split<'a>(groups: &[Group], mut values: &'a [f32], width: usize) -> Vec<&'a [f32]> {
    let mut parts = Vec::with_capacity(groups.len());
    for group in groups {
        let (part, rest) = values.split_at(group.len() * width);
        parts.push(part);
        values = rest;
    }
    parts
}

fn split_mut<'a>(groups: &[Group], mut values: &'a mut [f32], width: usize) -> Vec<&'a mut [f32]> {
    let mut parts = Vec::with_capacity(groups.len());
    for group in groups {
        let (part, rest) = values.split_at_mut(group.len() * width);
        parts.push(part);
        values = rest;
    }
    parts
}

/// Runs `f` with the tensor's values; copies them only if they are not contiguous.
pub fn with_values<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        candle_core::Storage::Cpu(storage) => Ok(f(slice(storage, layout)?)),
        _ => candle_core::bail!("the tensor is not on the CPU"),
    }
}

fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((begin, end)) => Ok(&storage.as_slice::<f32>()?[begin..end]),
        None => candle_core::bail!("the tensor is not contiguous"),
    }
}

/// Minimum number of elements for which a further thread is worthwhile.
const MIN_ELEMENTS: usize = 1 << 14;

fn min_rows(width: usize) -> usize {
    (MIN_ELEMENTS / width.max(1)).max(1)
}

fn map1(name: &'static str, x: &Tensor, out_width: usize, f: impl Fn(&[f32], &mut [f32]) + Sync) -> Result<Tensor> {
    map1_indexed(name, x, out_width, |_, x, out| f(x, out))
}

fn map1_indexed(
    name: &'static str,
    x: &Tensor,
    out_width: usize,
    f: impl Fn(usize, &[f32], &mut [f32]) + Sync,
) -> Result<Tensor> {
    let width = x.dim(1)?;
    let f = |x: &[f32], out: &mut [f32]| {
        if x.len() < MIN_ELEMENTS {
            let rows = x.chunks_exact(width).zip(out.chunks_exact_mut(out_width));
            return rows.enumerate().for_each(|(index, (x, out))| f(index, x, out));
        }
        x.par_chunks_exact(width)
            .zip(out.par_chunks_exact_mut(out_width))
            .enumerate()
            .with_min_len(min_rows(width))
            .for_each(|(index, (x, out))| f(index, x, out));
    };
    x.contiguous()?.apply_op1_no_bwd(&Map1 { name, out_width, f })
}

fn map2(
    name: &'static str,
    x: &Tensor,
    dy: &Tensor,
    out_width: usize,
    f: impl Fn(&[f32], &[f32], &mut [f32]) + Sync,
) -> Result<Tensor> {
    map2_indexed(name, x, dy, out_width, |_, x, dy, dx| f(x, dy, dx))
}

fn map2_indexed(
    name: &'static str,
    x: &Tensor,
    dy: &Tensor,
    out_width: usize,
    f: impl Fn(usize, &[f32], &[f32], &mut [f32]) + Sync,
) -> Result<Tensor> {
    let (width, dy_width) = (x.dim(1)?, dy.dim(1)?);
    let f = |x: &[f32], dy: &[f32], dx: &mut [f32]| {
        if x.len() < MIN_ELEMENTS {
            let rows = x.chunks_exact(width).zip(dy.chunks_exact(dy_width)).zip(dx.chunks_exact_mut(out_width));
            return rows.enumerate().for_each(|(index, ((x, dy), dx))| f(index, x, dy, dx));
        }
        x.par_chunks_exact(width)
            .zip(dy.par_chunks_exact(dy_width))
            .zip(dx.par_chunks_exact_mut(out_width))
            .enumerate()
            .with_min_len(min_rows(width))
            .for_each(|(index, ((x, dy), dx))| f(index, x, dy, dx));
    };
    x.contiguous()?.apply_op2_no_bwd(&dy.contiguous()?, &Map2 { name, out_width, f })
}

struct Map1<F> {
    name: &'static str,
    out_width: usize,
    f: F,
}

impl<F: Fn(&[f32], &mut [f32])> CustomOp1 for Map1<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = layout.dims()[0];
        let mut out = vec![0f32; rows * self.out_width];
        (self.f)(slice(storage, layout)?, &mut out);
        Ok((CpuStorage::F32(out), (rows, self.out_width).into()))
    }
}

struct Map2<F> {
    name: &'static str,
    out_width: usize,
    f: F,
}

impl<F: Fn(&[f32], &[f32], &mut [f32])> CustomOp2 for Map2<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = l1.dims()[0];
        let mut out = vec![0f32; rows * self.out_width];
        (self.f)(slice(s1, l1)?, slice(s2, l2)?, &mut out);
        Ok((CpuStorage::F32(out), (rows, self.out_width).into()))
    }
}
