//! Linear layers: products with packed weights and their LoRA adapters.

use std::ops::Range;
use std::sync::Arc;

use super::{AdapterPass, AdapterShape, Cpu, Matrix, Weight, rows};
use crate::backend::{AdapterBackward, AdapterBlock, FullSlot, LinearBackward, Mask};
use crate::kernels::gemm::{self, Factors, Linear, Lora, LoraBackward, Output, Rows, Term};
use crate::kernels::pack::{PackDtype, PackedMatrix};

/// LoRA factors of a fused weight: A stacked, B block-diagonal.
#[derive(Debug)]
pub struct Adapter {
    /// The factors A of all modules, stacked: `[blocks · r, in]`.
    a: PackedMatrix,
    /// The factors B of all modules on a block diagonal, scaled by s: `[out, blocks · r]`.
    b: PackedMatrix,
    /// The transposed factor B of each module, `[r, out]`, scaled by s.
    b_transposed: Vec<PackedMatrix>,
    /// The scaling s of each module's product B·A.
    scalings: Vec<f32>,
    /// The outputs of each adapted module, and its ranks among those of all modules.
    parts: Vec<(Range<usize>, Range<usize>)>,
}

impl Adapter {
    pub(super) fn new(parameters: &[f32], shape: &AdapterShape, cpu: &Cpu) -> Adapter {
        let AdapterShape { inputs, outputs, blocks } = shape;
        let rank = blocks.iter().map(|block| block.r).sum();
        let (mut a, mut b) = (Vec::with_capacity(rank * inputs), vec![0f32; outputs * rank]);
        for (block, ranks) in blocks.iter().zip(shape.ranks()) {
            a.extend_from_slice(shape.a(parameters, block));
            for (row, values) in block.outputs.clone().zip(shape.b(parameters, block).chunks_exact(block.r)) {
                for (out, value) in b[row * rank..][ranks.clone()].iter_mut().zip(values) {
                    *out = value * block.scaling as f32;
                }
            }
        }
        // AMX and AVX512-BF16, which round inputs, multiply bf16 only with bf16.
        let dtype = if cpu.isa.rounds_inputs() { cpu.dtype } else { PackDtype::F32 };
        let pack = |values: &[f32], inputs| PackedMatrix::new_on(&cpu.threads, values, inputs, dtype);
        let transposed = |block: &AdapterBlock| {
            let (outputs, r, b) = (block.outputs.len(), block.r, shape.b(parameters, block));
            let scaled = |at: usize| b[at % outputs * r + at / outputs] * block.scaling as f32;
            let values: Vec<f32> = (0..r * outputs).map(scaled).collect();
            pack(&values, outputs)
        };
        Adapter {
            a: pack(&a, *inputs),
            b: pack(&b, rank),
            b_transposed: blocks.iter().map(transposed).collect(),
            scalings: blocks.iter().map(|block| block.scaling as f32).collect(),
            parts: blocks.iter().zip(shape.ranks()).map(|(block, ranks)| (block.outputs.clone(), ranks)).collect(),
        }
    }

    fn rank(&self) -> usize {
        self.parts.last().map_or(0, |(_, ranks)| ranks.end)
    }
}

fn term<'a>(x: &'a Matrix, weight: &'a PackedMatrix) -> Term<'a> {
    Term { x: x.values(), stride: x.width(), weight }
}

/// Selects a range of columns of a matrix.
fn columns(x: &Matrix, columns: Range<usize>) -> Rows<'_> {
    Rows { values: &x.values()[columns.start..], width: columns.len(), stride: x.width() }
}

impl Cpu {
    pub(super) fn product(
        &self,
        x: &Matrix,
        weight: &Weight,
        adapter: Option<&AdapterPass<'_, Self>>,
        residual: Option<&Matrix>,
    ) -> Matrix {
        let mut y = self.pool.matrix(x.rows(), weight.matrix.n());
        let mut bias = weight.bias.as_ref().map(|bias| bias.as_slice());
        let mut residual = residual.map(Matrix::values);
        let masked = adapter.is_some_and(|pass| !pass.masks.is_empty());
        let add = residual.is_some() && (bias.is_some() || masked);
        if let Some(residual) = residual.take_if(|_| add) {
            y.values_mut().copy_from_slice(residual);
            if let Some(bias) = bias.take() {
                y.values_mut().chunks_exact_mut(bias.len()).for_each(|y| rows::add(y, 0, bias));
            }
        }
        let (rows, stride) = (x.rows(), y.width());
        let out = Output { y: y.values_mut(), stride, rows, add };
        match adapter {
            Some(pass) if masked => {
                let hidden = self.hidden(pass, x);
                let terms = [term(x, &weight.matrix), term(&hidden, &pass.adapter.b)];
                gemm::forward(&self.threads, self.isa, &terms, bias, out);
            }
            Some(_) | None => {
                let lora = adapter.map(|pass| {
                    let Adapter { a, b, parts, .. } = &**pass.adapter;
                    Lora { a, b, parts, hidden: None }
                });
                let linear = Linear { x: x.values(), stride: x.width(), weight: &weight.matrix, bias, residual, lora };
                gemm::linear(&self.threads, self.isa, linear, out);
            }
        }
        y
    }

    /// Computes a product in which some rows have an adapter of their own. The weight is read once for all rows. Every output
    /// is one chain of sums, which the adapter's product continues, so a row has the bits of a batch with one adapter.
    pub(super) fn product_mixed(
        &self,
        x: &Matrix,
        weight: &Weight,
        adapters: &[(&Arc<Adapter>, &[u32])],
        residual: Option<&Matrix>,
    ) -> Matrix {
        let mut y = self.product(x, weight, None, residual);
        for (adapter, rows) in adapters {
            let pass = AdapterPass { adapter: *adapter, masks: &[] };
            let hidden = self.hidden(&pass, &self.gather(x, rows));
            let mut sums = self.gather(&y, rows);
            let (stride, count) = (sums.width(), sums.rows());
            let out = Output { y: sums.values_mut(), stride, rows: count, add: true };
            gemm::forward(&self.threads, self.isa, &[term(&hidden, &adapter.b)], None, out);
            for (index, row) in rows.iter().enumerate() {
                let row = *row as usize;
                y.rows_mut(row..row + 1).copy_from_slice(sums.row(index));
            }
        }
        y
    }

    /// Computes x·Aᵀ `[rows, blocks · r]`, each block with x after its module's dropout.
    fn hidden(&self, pass: &AdapterPass<'_, Self>, x: &Matrix) -> Matrix {
        let AdapterPass { adapter, masks } = pass;
        let mut hidden = self.pool.matrix(x.rows(), adapter.rank());
        let (rows, stride) = (x.rows(), adapter.rank());
        let whole = |x: &Matrix, out: &mut Matrix| {
            let out = Output { y: out.values_mut(), stride, rows, add: false };
            gemm::forward(&self.threads, self.isa, &[term(x, &adapter.a)], None, out);
        };
        if masks.is_empty() {
            whole(x, &mut hidden);
            return hidden;
        }
        let mut of_block = self.pool.matrix(rows, stride);
        for (mask, (_, columns)) in masks.iter().zip(&adapter.parts) {
            whole(&self.dropped(x, mask), &mut of_block);
            for row in 0..rows {
                hidden.rows_mut(row..row + 1)[columns.clone()].copy_from_slice(&of_block.row(row)[columns.clone()]);
            }
        }
        hidden
    }

    /// Applies a LoRA dropout mask to x.
    fn dropped(&self, x: &Matrix, mask: &Mask<'_>) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), x.width());
        out.values_mut().copy_from_slice(x.values());
        for row in 0..x.rows() {
            mask.apply(row, out.rows_mut(row..row + 1));
        }
        out
    }

    pub(super) fn product_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut [f32]) -> Matrix {
        let LinearBackward { x, dy, weight, adapter, full } = linear;
        let (rows, inputs) = (x.rows(), x.width());
        for FullSlot { outputs, weight: weight_at, bias: bias_at } in *full {
            let slot = &mut gradient[*weight_at..weight_at + outputs.len() * inputs];
            gemm::outer(&self.threads, self.isa, rows, columns(dy, outputs.clone()), columns(x, 0..inputs), slot);
            if let Some(at) = bias_at {
                for row in 0..rows {
                    rows::add(gradient, *at, &dy.row(row)[outputs.clone()]);
                }
            }
        }
        let mut dx = self.pool.matrix(rows, inputs);
        let (dy_values, stride, matrix) = (dy.values(), dy.width(), &*weight.matrix);
        let Some(AdapterBackward { pass, slots }) = adapter else {
            let back = gemm::LinearBackward { dy: dy_values, stride, weight: matrix, lora: None };
            let out = Output { y: dx.values_mut(), stride: inputs, rows, add: false };
            gemm::linear_backward(&self.threads, self.isa, back, out);
            return dx;
        };
        let (adapter, masks) = (pass.adapter, pass.masks);
        let rank = adapter.rank();
        let mut dh = self.pool.matrix(rows, rank);
        let Adapter { a, b_transposed, parts, .. } = &**adapter;
        let lora = Some(LoraBackward { a, b_transposed, parts, dh: dh.values_mut(), adds: masks.is_empty() });
        let back = gemm::LinearBackward { dy: dy_values, stride, weight: matrix, lora };
        let out = Output { y: dx.values_mut(), stride: inputs, rows, add: false };
        gemm::linear_backward(&self.threads, self.isa, back, out);
        // The loss L depends on B through s·B, so dB = s·dyᵀ·h with h = x·Aᵀ.
        let mut h = self.hidden(pass, x);
        for (scaling, (_, ranks)) in adapter.scalings.iter().zip(&adapter.parts) {
            self.scale_columns(&mut h, ranks.clone(), *scaling);
        }
        let masked: Vec<Matrix> = masks.iter().map(|mask| self.dropped(x, mask)).collect();
        self.factor_gradients(linear, (&h, &dh), &masked, slots, gradient);
        for (mask, (_, of_block)) in masks.iter().zip(&adapter.parts) {
            let mut alone = self.pool.zeros(rows, rank);
            for row in 0..rows {
                alone.rows_mut(row..row + 1)[of_block.clone()].copy_from_slice(&dh.row(row)[of_block.clone()]);
            }
            let mut through = self.pool.matrix(rows, inputs);
            let out = Output { y: through.values_mut(), stride: inputs, rows, add: false };
            gemm::backward(&self.threads, self.isa, &[term(&alone, &adapter.a)], out);
            for row in 0..rows {
                mask.apply(row, through.rows_mut(row..row + 1));
            }
            rows::add(dx.values_mut(), 0, through.values());
        }
        dx
    }

    /// Adds the gradients dA += dhᵀ·x and dB += dyᵀ·h for each module; `masked` holds x after each module's dropout.
    fn factor_gradients(
        &self,
        linear: &LinearBackward<'_, Self>,
        (h, dh): (&Matrix, &Matrix),
        masked: &[Matrix],
        slots: &[(usize, usize)],
        gradient: &mut [f32],
    ) {
        let LinearBackward { x, dy, adapter, .. } = linear;
        let Some(AdapterBackward { pass, .. }) = adapter else { return };
        let parts = &pass.adapter.parts;
        let whole = |x| columns(x, 0..x.width());
        let of_b = parts.iter().zip(slots).map(|((outputs, of_block), (_, at))| {
            let thin = vec![(columns(h, of_block.clone()), *at)];
            Factors { wide: columns(dy, outputs.clone()), thin, transposed: true }
        });
        let thin = |((_, of_block), (at, _)): (&(_, Range<usize>), &(usize, _))| (columns(dh, of_block.clone()), *at);
        let a = parts.iter().zip(slots).map(thin);
        let mut all: Vec<Factors<'_>> = of_b.collect();
        match masked.is_empty() {
            true => all.push(Factors { wide: whole(x), thin: a.collect(), transposed: false }),
            false => all.extend(a.zip(masked).map(|(thin, x)| Factors {
                wide: whole(x),
                thin: vec![thin],
                transposed: false,
            })),
        }
        if parts.iter().all(|(_, ranks)| ranks.len() <= gemm::WIDEST_FACTOR) {
            return gemm::outer_factors(&self.threads, self.isa, x.rows(), &all, gradient);
        }
        for Factors { wide, thin, transposed } in all {
            for (thin, at) in thin {
                let (a, b) = if transposed { (wide, thin) } else { (thin, wide) };
                gemm::outer(&self.threads, self.isa, x.rows(), a, b, &mut gradient[at..at + a.width * b.width]);
            }
        }
    }
}
