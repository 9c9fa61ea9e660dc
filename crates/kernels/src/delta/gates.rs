//! The gates of the delta rule: how much a head writes, and how much it forgets.

use super::super::rows::on_every_isa;
use super::super::simd::{Simd, exp, load_some, logistic, store_some};
use super::Weights;

/// The gates of one token and their gradients, one value per value head.
#[derive(Debug)]
pub(super) struct GatesGradient<'a> {
    /// The inputs `[b | a]` of [`gates_row`].
    pub ba: &'a [f32],
    /// The gradient of beta.
    pub d_beta: &'a [f32],
    /// The gradient of g.
    pub d_g: &'a [f32],
    /// Receives the gradients of `[b | a]`.
    pub d_ba: &'a mut [f32],
}

on_every_isa! {
    /// Computes `beta` = σ(b) in [0, 1] and the logarithm of the decay, `g` = −exp(a_log)·softplus(a + dt_bias) ≤ 0,
    /// from `[b | a]`.
    ///
    /// # Safety
    /// `ba` has two values for each value head, the other slices one.
    pub(super) unsafe fn gates_row(weights: &Weights<'_>, ba: &[f32], beta: &mut [f32], g: &mut [f32]) = gates_with
}
on_every_isa! {
    /// Computes the gradients of b and a.
    ///
    /// # Safety
    /// `ba` and `d_ba` have two values for each value head, the other slices one.
    pub(super) unsafe fn gates_vjp_row(weights: &Weights<'_>, gradient: GatesGradient<'_>) = vjp_with
}

/// Computes ln(1 + eˣ) = max(x, 0) + ln(1 + u) with u = e^−|x|, within a few units in the last place. NaN stays NaN.
#[inline(always)]
unsafe fn softplus<S: Simd>(x: S::V) -> S::V {
    // The series ln(1 + u) = 2·(s + s³/3 + s⁵/5 + …) with s = u / (2 + u) ≤ 1/3; the first missing term is below 10⁻⁸.
    const TERMS: [f32; 7] = [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];
    unsafe {
        let positive = S::max(S::zero(), x);
        let magnitude = S::max(S::sub(S::zero(), x), x);
        let u = exp::<S>(S::sub(S::zero(), magnitude));
        let s = S::div(u, S::add(S::splat(2.0), u));
        let square = S::mul(s, s);
        let mut sum = S::splat(TERMS[0]);
        for term in &TERMS[1..] {
            sum = S::fma(sum, square, S::splat(*term));
        }
        S::fma(S::add(s, s), sum, positive)
    }
}

#[inline(always)]
unsafe fn gates_with<S: Simd>(weights: &Weights<'_>, ba: &[f32], beta: &mut [f32], g: &mut [f32]) {
    unsafe {
        let (b, a) = ba.split_at(beta.len());
        for at in (0..a.len()).step_by(S::LANES) {
            let rest = a.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            store_some::<S>(beta.as_mut_ptr().add(at), logistic::<S>(load(b)), rest);
            let step = softplus::<S>(S::add(load(a), load(weights.dt_bias)));
            let decay = S::mul(S::sub(S::zero(), exp::<S>(load(weights.a_log))), step);
            store_some::<S>(g.as_mut_ptr().add(at), decay, rest);
        }
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(weights: &Weights<'_>, gradient: GatesGradient<'_>) {
    let GatesGradient { ba, d_beta, d_g, d_ba } = gradient;
    let ((b, a), (d_b, d_a)) = (ba.split_at(d_g.len()), d_ba.split_at_mut(d_g.len()));
    unsafe {
        for at in (0..a.len()).step_by(S::LANES) {
            let rest = a.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            let rate = S::sub(S::zero(), exp::<S>(load(weights.a_log)));
            let slope = logistic::<S>(S::add(load(a), load(weights.dt_bias)));
            store_some::<S>(d_a.as_mut_ptr().add(at), S::mul(load(d_g), S::mul(rate, slope)), rest);
            let beta = logistic::<S>(load(b));
            let slope = S::mul(beta, S::sub(S::splat(1.0), beta));
            store_some::<S>(d_b.as_mut_ptr().add(at), S::mul(load(d_beta), slope), rest);
        }
    }
}
