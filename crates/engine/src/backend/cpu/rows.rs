//! Row-wise operations: lookups, norms, rotary embedding, activation.

use std::ops::Range;

use super::{Cpu, Matrix, Rotation};
use crate::kernels::mlp::{self, Activation, GateUp};
use crate::kernels::pack::PackedMatrix;
use crate::kernels::rope::{self, QkNorm, Rope};
use crate::kernels::{self, norm};
use crate::ops::slices;

/// Adds a row to a range of values: values[at..] += row.
pub fn add(values: &mut [f32], at: usize, row: &[f32]) {
    for (value, more) in values[at..at + row.len()].iter_mut().zip(row) {
        *value += more;
    }
}

fn rope<'a>(rotation: &'a Rotation<'a, Cpu>) -> Rope<'a> {
    let qk_norm = rotation.qk_norm.map(|(q, k, eps)| QkNorm { q, k, eps });
    let table = &rotation.angles.table;
    Rope { heads: rotation.heads, half: table.half, qk_norm, cos: &table.cos, sin: &table.sin }
}

impl Cpu {
    /// Looks up rows of a packed table.
    pub(super) fn lookup(&self, table: &PackedMatrix, ids: &[u32]) -> Matrix {
        let mut out = self.pool.matrix(ids.len(), table.k());
        self.each_row(&mut out, |at, row| table.row(ids[at] as usize, row));
        out
    }

    /// Selects rows, in the given order.
    pub(super) fn gather(&self, x: &Matrix, rows: &[u32]) -> Matrix {
        let mut out = self.pool.matrix(rows.len(), x.width());
        self.each_row(&mut out, |at, row| row.copy_from_slice(x.row(rows[at] as usize)));
        out
    }

    /// Multiplies some columns of x by a factor, in place.
    pub(super) fn scale_columns(&self, x: &mut Matrix, columns: Range<usize>, factor: f32) {
        self.each_row(x, |_, row| row[columns.clone()].iter_mut().for_each(|value| *value *= factor));
    }

    /// Multiplies all values of x by a factor.
    pub(super) fn times(&self, x: &Matrix, factor: f32) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), x.width());
        self.each_row(&mut out, |at, row| row.iter_mut().zip(x.row(at)).for_each(|(out, x)| *out = x * factor));
        out
    }

    /// Multiplies some columns of each row of x by that row's factor.
    pub(super) fn columns_times(&self, x: &Matrix, columns: Range<usize>, factors: &[f32]) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), x.width());
        self.each_row(&mut out, |at, row| {
            row.copy_from_slice(x.row(at));
            row[columns.clone()].iter_mut().for_each(|value| *value *= factors[at]);
        });
        out
    }

    /// Elementwise sum of x and y.
    pub(super) fn plus(&self, x: &Matrix, y: &Matrix) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), x.width());
        self.each_row(&mut out, |at, row| {
            row.iter_mut().zip(x.row(at).iter().zip(y.row(at))).for_each(|(out, (x, y))| *out = x + y);
        });
        out
    }

    pub(super) fn some_columns(&self, x: &Matrix, columns: Range<usize>) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), columns.len());
        self.each_row(&mut out, |at, row| row.copy_from_slice(&x.row(at)[columns.clone()]));
        out
    }

    pub(super) fn ranges_of_columns(&self, x: &Matrix, ranges: &[Range<usize>]) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), ranges.iter().map(Range::len).sum());
        self.each_row(&mut out, |at, row| {
            let (mut rest, x) = (row, x.row(at));
            for range in ranges {
                let (here, after) = rest.split_at_mut(range.len());
                here.copy_from_slice(&x[range.clone()]);
                rest = after;
            }
        });
        out
    }

    /// Multiplies x elementwise by the sigmoid of a gate.
    pub(super) fn gate(&self, x: &Matrix, gate: &Matrix) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), x.width());
        self.each_row(&mut out, |at, row| slices::sigmoid_gated(x.row(at), gate.row(at), row));
        out
    }

    /// Returns dL/dx and dL/dgate of [`Cpu::gate`].
    pub(super) fn gate_vjp(&self, x: &Matrix, gate: &Matrix, dy: &Matrix) -> (Matrix, Matrix) {
        let dx = self.gate(dy, gate);
        let mut d_gate = self.pool.matrix(x.rows(), x.width());
        self.each_row(&mut d_gate, |at, row| {
            slices::sigmoid_gate_slope(x.row(at), gate.row(at), row);
            row.iter_mut().zip(dy.row(at)).for_each(|(d, dy)| *d *= dy);
        });
        (dx, d_gate)
    }

    pub(super) fn side_by_side(&self, parts: &[&Matrix]) -> Matrix {
        let rows = parts.first().map_or(0, |part| part.rows());
        let mut out = self.pool.matrix(rows, parts.iter().map(|part| part.width()).sum());
        self.each_row(&mut out, |at, row| {
            let mut rest = row;
            for part in parts {
                let (here, after) = rest.split_at_mut(part.width());
                here.copy_from_slice(part.row(at));
                rest = after;
            }
        });
        out
    }

    /// Writes all rows of a matrix in parallel; `f` receives each row's index.
    fn each_row(&self, out: &mut Matrix, f: impl Fn(usize, &mut [f32]) + Sync) {
        let width = out.width();
        kernels::rows::each_row(&self.threads, out.values_mut(), width, f);
    }

    pub(super) fn norm(&self, x: &Matrix, weight: &[f32], eps: f32) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), x.width());
        norm::rms_norm(&self.threads, self.isa, x.values(), weight, eps, out.values_mut());
        out
    }

    pub(super) fn norm_vjp(
        &self,
        x: &Matrix,
        weight: &[f32],
        eps: f32,
        dy: &Matrix,
        residual: Option<&Matrix>,
    ) -> Matrix {
        let mut dx = self.pool.matrix(x.rows(), x.width());
        let residual = residual.map(Matrix::values);
        let (x, dy) = (x.values(), dy.values());
        norm::rms_norm_vjp(&self.threads, self.isa, x, weight, eps, dy, residual, dx.values_mut());
        dx
    }

    pub(super) fn norm_weight_vjp(&self, x: &Matrix, eps: f32, dy: &Matrix, dw: &mut [f32]) {
        norm::rms_norm_weight_vjp(&self.threads, self.isa, x.values(), eps, dy.values(), dw);
    }

    pub(super) fn rotate_rows(&self, rotation: &Rotation<'_, Self>, qkv: &Matrix) -> Matrix {
        let mut out = self.pool.matrix(qkv.rows(), qkv.width());
        let positions = &rotation.angles.positions;
        rope::rotate(&self.threads, self.isa, &rope(rotation), positions, qkv.values(), out.values_mut());
        out
    }

    pub(super) fn rotate_rows_vjp(&self, rotation: &Rotation<'_, Self>, qkv: Option<&Matrix>, dy: &Matrix) -> Matrix {
        let mut out = self.pool.matrix(dy.rows(), dy.width());
        let (positions, before) = (&rotation.angles.positions, qkv.map_or(&[][..], Matrix::values));
        let (rope, dy) = (rope(rotation), dy.values());
        rope::rotate_vjp(&self.threads, self.isa, &rope, positions, before, dy, out.values_mut());
        out
    }

    pub(super) fn rotate_rows_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Matrix,
        dy: &Matrix,
        gradient: &mut [f32],
        at: (usize, usize),
    ) {
        let (mut dq, mut dk) = (vec![0f32; rotation.heads.head_dim], vec![0f32; rotation.heads.head_dim]);
        let rope = rope(rotation);
        let positions = &rotation.angles.positions;
        let (qkv, dy) = (qkv.values(), dy.values());
        rope::rotate_weight_vjp(&self.threads, self.isa, &rope, positions, qkv, dy, &mut dq, &mut dk);
        add(gradient, at.0, &dq);
        add(gradient, at.1, &dk);
    }

    pub(super) fn activate(&self, activation: Activation, gate_up: &Matrix) -> Matrix {
        let width = gate_up.width() / 2;
        let mut out = self.pool.matrix(gate_up.rows(), width);
        let given = GateUp { activation, values: gate_up.values(), width };
        mlp::gated(&self.threads, self.isa, given, out.values_mut());
        out
    }

    pub(super) fn activate_vjp(&self, activation: Activation, gate_up: &Matrix, dy: &Matrix) -> Matrix {
        let mut d_gate_up = self.pool.matrix(gate_up.rows(), gate_up.width());
        let given = GateUp { activation, values: gate_up.values(), width: gate_up.width() / 2 };
        mlp::gated_vjp(&self.threads, self.isa, given, dy.values(), d_gate_up.values_mut());
        d_gate_up
    }
}
