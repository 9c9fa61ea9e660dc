//! Operations of rows: lookups, norms, rotation, activation.

use std::ops::Range;

use super::{Cpu, Matrix, Rotation};
use crate::engine::kernels::pack::PackedMatrix;
use crate::engine::kernels::threads::Shared;
use crate::engine::ops::{self, slices};

/// values[at..] += row
pub fn add(values: &mut [f32], at: usize, row: &[f32]) {
    slices::add_scaled(&mut values[at..at + row.len()], 1.0, row);
}

impl Cpu {
    /// Rows of a packed table.
    pub(super) fn lookup(&self, table: &PackedMatrix, ids: &[u32]) -> Matrix {
        let mut out = self.pool.matrix(ids.len(), table.k());
        self.by_rows(&mut out, |row, out| table.row(ids[row] as usize, out));
        out
    }

    /// `f` fills each row.
    fn by_rows(&self, out: &mut Matrix, f: impl Fn(usize, &mut [f32]) + Sync) {
        let (rows, width) = (out.rows(), out.width());
        if rows * width < 1 << 15 {
            return out.values_mut().chunks_exact_mut(width.max(1)).enumerate().for_each(|(row, out)| f(row, out));
        }
        let shared = Shared::new(out.values_mut());
        self.threads.split(rows, |part: Range<usize>| {
            for row in part {
                shared.with(row * width..(row + 1) * width, |out| f(row, out));
            }
        });
    }

    pub(super) fn norm(&self, x: &Matrix, weight: &[f32], eps: f32) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), x.width());
        self.by_rows(&mut out, |row, out| slices::rms_norm(x.row(row), weight, eps, out));
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
        let mut out = self.pool.matrix(x.rows(), x.width());
        self.by_rows(&mut out, |row, out| {
            slices::rms_norm_vjp(x.row(row), weight, eps, dy.row(row), out);
            if let Some(residual) = residual {
                slices::add_scaled(out, 1.0, residual.row(row));
            }
        });
        out
    }

    pub(super) fn norm_weight_vjp(&self, x: &Matrix, eps: f32, dy: &Matrix, dw: &mut [f32]) {
        for row in 0..x.rows() {
            slices::rms_norm_weight_vjp(x.row(row), eps, dy.row(row), dw);
        }
    }

    fn rotation<'a>(rotation: &'a Rotation<'a, Self>) -> ops::Rotation<'a> {
        ops::Rotation {
            heads: rotation.heads,
            qk_norm: rotation.qk_norm.map(|(q, k, eps)| (q.as_slice(), k.as_slice(), eps)),
            table: &rotation.angles.table,
            positions: &rotation.angles.positions,
        }
    }

    pub(super) fn turn(&self, rotation: &Rotation<'_, Self>, qkv: &Matrix) -> Matrix {
        let rotation = Self::rotation(rotation);
        let mut out = self.pool.matrix(qkv.rows(), qkv.width());
        self.by_rows(&mut out, |row, out| {
            out.copy_from_slice(qkv.row(row));
            rotation.row(rotation.positions[row], out);
        });
        out
    }

    pub(super) fn turn_vjp(&self, rotation: &Rotation<'_, Self>, qkv: Option<&Matrix>, dy: &Matrix) -> Matrix {
        let rotation = Self::rotation(rotation);
        let before = qkv.unwrap_or(dy);
        let mut out = self.pool.matrix(dy.rows(), dy.width());
        self.by_rows(&mut out, |row, out| {
            rotation.row_vjp(rotation.positions[row], before.row(row), dy.row(row), out);
        });
        out
    }

    pub(super) fn turn_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Matrix,
        dy: &Matrix,
        gradient: &mut [f32],
        at: (usize, usize),
    ) {
        let Some((q, k)) = Self::rotation(rotation).weight_vjp(qkv.values(), dy.values()) else { return };
        add(gradient, at.0, &q);
        add(gradient, at.1, &k);
    }

    pub(super) fn activate(&self, gate_up: &Matrix) -> Matrix {
        let mut out = self.pool.matrix(gate_up.rows(), gate_up.width() / 2);
        self.by_rows(&mut out, |row, out| slices::silu_mul(gate_up.row(row), out));
        out
    }

    pub(super) fn activate_vjp(&self, gate_up: &Matrix, dy: &Matrix) -> Matrix {
        let mut out = self.pool.matrix(gate_up.rows(), gate_up.width());
        self.by_rows(&mut out, |row, out| slices::silu_mul_vjp(gate_up.row(row), dy.row(row), out));
        out
    }
}
