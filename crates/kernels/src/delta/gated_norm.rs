//! The norm of each value head's output, multiplied by SiLU of a gate.

use super::super::mlp::silu;
use super::super::rows::on_every_isa;
use super::super::simd::{Simd, load_some, store_some};
use super::{Weights, dot};

on_every_isa! {
    /// Computes out = x / √(mean(x²) + eps) ∘ norm ∘ silu(z) for all value heads of a token.
    ///
    /// # Safety
    /// All slices have the width of all value heads.
    pub(super) unsafe fn norm_row(weights: &Weights<'_>, x: &[f32], z: &[f32], out: &mut [f32]) = norm_heads
}
on_every_isa! {
    /// Computes the gradients `dx` and `dz` of [`norm_row`] from its inputs and dL/dout = `dy`. `dx` may contain anything.
    ///
    /// # Safety
    /// All slices have the width of all value heads.
    pub(super) unsafe fn norm_vjp_row(
        weights: &Weights<'_>,
        x: &[f32],
        z: &[f32],
        dy: &[f32],
        dx: &mut [f32],
        dz: &mut [f32],
    ) = vjp_heads
}

#[inline(always)]
unsafe fn norm_heads<S: Simd>(weights: &Weights<'_>, x: &[f32], z: &[f32], out: &mut [f32]) {
    let dim = weights.norm.len();
    for ((x, z), out) in x.chunks_exact(dim).zip(z.chunks_exact(dim)).zip(out.chunks_exact_mut(dim)) {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { norm_with::<S>(weights, x, z, out) };
    }
}

#[inline(always)]
unsafe fn vjp_heads<S: Simd>(weights: &Weights<'_>, x: &[f32], z: &[f32], dy: &[f32], dx: &mut [f32], dz: &mut [f32]) {
    for head in 0..weights.shape.num_value_heads {
        let dim = weights.norm.len();
        let span = head * dim..(head + 1) * dim;
        let (dx, dz) = (&mut dx[span.clone()], &mut dz[span.clone()]);
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { vjp_with::<S>(weights, &x[span.clone()], &z[span.clone()], &dy[span], dx, dz) };
    }
}

/// The factor r = 1 / √(mean(x²) + eps) of a row.
#[inline(always)]
unsafe fn scale_of<S: Simd>(x: &[f32], eps: f32) -> f32 {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { 1.0 / (dot::<S>(x.as_ptr(), x.as_ptr(), x.len()) / x.len() as f32 + eps).sqrt() }
}

#[inline(always)]
unsafe fn norm_with<S: Simd>(weights: &Weights<'_>, x: &[f32], z: &[f32], out: &mut [f32]) {
    unsafe {
        let r = S::splat(scale_of::<S>(x, weights.eps));
        for at in (0..x.len()).step_by(S::LANES) {
            let rest = x.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            let value = S::mul(S::mul(load(x), r), load(weights.norm));
            store_some::<S>(out.as_mut_ptr().add(at), S::mul(value, silu::<S>(load(z)).0), rest);
        }
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(weights: &Weights<'_>, x: &[f32], z: &[f32], dy: &[f32], dx: &mut [f32], dz: &mut [f32]) {
    unsafe {
        let r = scale_of::<S>(x, weights.eps);
        // First pass: the gradient of the norm before its factor, w·silu(z)·dy, goes to dx.
        for at in (0..x.len()).step_by(S::LANES) {
            let rest = x.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            let (value, slope) = silu::<S>(load(z));
            let weighted = S::mul(load(weights.norm), load(dy));
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
