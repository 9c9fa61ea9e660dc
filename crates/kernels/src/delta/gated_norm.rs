//! The norm of each value head's output, multiplied by SiLU of a gate.

use super::super::isa::Isa;
use super::super::mlp::silu;
use super::super::rows::{on_every_isa, over_rows};
use super::super::simd::{Simd, load_some, store_some};
use super::super::threads::{Shared, Threads};
use super::dot;

/// A gated RMSNorm, out = x / √(mean(x²) + eps) ∘ weight ∘ silu(z), for rows as wide as the weight (one value head).
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm<'a> {
    /// The weight of the norm, `[v_dim]`.
    pub weight: &'a [f32],
    /// Added to the mean of the squares.
    pub eps: f32,
}

impl GatedNorm<'_> {
    fn rows(&self, x: &[f32], others: &[usize]) -> usize {
        let width = self.weight.len();
        let rows = x.len().checked_div(width).unwrap_or(0);
        assert_eq!(x.len(), rows * width, "the length of the gated norm's input x is not a multiple of {width}");
        assert!(
            others.iter().all(|len| *len == x.len()),
            "the gated norm's input x and its other operands differ in length"
        );
        rows
    }
}

/// Computes out from x and the gate z, all `[rows][v_dim]`; a row is one value head of one token.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn gated_norm(threads: &Threads, isa: Isa, norm: GatedNorm<'_>, x: &[f32], z: &[f32], out: &mut [f32]) {
    let (rows, width) = (norm.rows(x, &[z.len(), out.len()]), norm.weight.len());
    let out = Shared::new(out);
    over_rows(threads, rows, 4 * width, |range| {
        for row in range {
            let span = row * width..(row + 1) * width;
            // Safety: each thread writes other rows, and all rows are inside the buffer.
            unsafe { norm_row(isa, norm, &x[span.clone()], &z[span.clone()], out.part(span)) };
        }
    });
}

/// Computes the gradients `dx` and `dz` of [`gated_norm`] from its inputs and dL/dout = `dy`, all `[rows][v_dim]`.
///
/// # Panics
/// Panics if the lengths do not match.
#[expect(clippy::too_many_arguments, reason = "every argument is an operand of one operation")]
pub fn gated_norm_vjp(
    threads: &Threads,
    isa: Isa,
    norm: GatedNorm<'_>,
    x: &[f32],
    z: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    dz: &mut [f32],
) {
    let (rows, width) = (norm.rows(x, &[z.len(), dy.len(), dx.len(), dz.len()]), norm.weight.len());
    let (dx, dz) = (Shared::new(dx), Shared::new(dz));
    over_rows(threads, rows, 4 * width, |range| {
        for row in range {
            let span = row * width..(row + 1) * width;
            // Safety: each thread writes other rows, and all rows are inside both buffers.
            let (dx, dz) = unsafe { (dx.part(span.clone()), dz.part(span.clone())) };
            // Safety: all slices are as wide as the weight.
            unsafe { vjp_row(isa, norm, &x[span.clone()], &z[span.clone()], &dy[span], dx, dz) };
        }
    });
}

on_every_isa! {
    unsafe fn norm_row(norm: GatedNorm<'_>, x: &[f32], z: &[f32], out: &mut [f32]) = norm_with
}
on_every_isa! {
    unsafe fn vjp_row(norm: GatedNorm<'_>, x: &[f32], z: &[f32], dy: &[f32], dx: &mut [f32], dz: &mut [f32]) = vjp_with
}

/// The factor r = 1 / √(mean(x²) + eps) of a row.
#[inline(always)]
unsafe fn scale_of<S: Simd>(x: &[f32], eps: f32) -> f32 {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { 1.0 / (dot::<S>(x.as_ptr(), x.as_ptr(), x.len()) / x.len() as f32 + eps).sqrt() }
}

#[inline(always)]
unsafe fn norm_with<S: Simd>(norm: GatedNorm<'_>, x: &[f32], z: &[f32], out: &mut [f32]) {
    unsafe {
        let r = S::splat(scale_of::<S>(x, norm.eps));
        for at in (0..x.len()).step_by(S::LANES) {
            let rest = x.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            let value = S::mul(S::mul(load(x), r), load(norm.weight));
            store_some::<S>(out.as_mut_ptr().add(at), S::mul(value, silu::<S>(load(z)).0), rest);
        }
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(norm: GatedNorm<'_>, x: &[f32], z: &[f32], dy: &[f32], dx: &mut [f32], dz: &mut [f32]) {
    unsafe {
        let r = scale_of::<S>(x, norm.eps);
        // First pass: the gradient of the norm before its factor, w·silu(z)·dy, goes to dx.
        for at in (0..x.len()).step_by(S::LANES) {
            let rest = x.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            let (value, slope) = silu::<S>(load(z));
            let weighted = S::mul(load(norm.weight), load(dy));
            store_some::<S>(dx.as_mut_ptr().add(at), S::mul(weighted, value), rest);
            let normed = S::mul(load(x), S::splat(r));
            store_some::<S>(dz.as_mut_ptr().add(at), S::mul(S::mul(weighted, normed), slope), rest);
        }
        let inner = dot::<S>(x.as_ptr(), dx.as_ptr(), x.len());
        // The gradient of RMSNorm: dx = r·h − (inner·r³/n)·x, with h = w·silu(z)·dy and inner = Σ x·h.
        let c = S::splat(-(inner * r * r / x.len() as f32) * r);
        for at in (0..x.len()).step_by(S::LANES) {
            let rest = x.len() - at;
            let h = load_some::<S>(dx.as_ptr().add(at), rest);
            let value = S::fma(c, load_some::<S>(x.as_ptr().add(at), rest), S::mul(h, S::splat(r)));
            store_some::<S>(dx.as_mut_ptr().add(at), value, rest);
        }
    }
}
