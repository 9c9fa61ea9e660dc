//! The gates of the delta rule: how much a head writes, and how much it forgets.

use super::super::isa::Isa;
use super::super::rows::{on_every_isa, over_rows};
use super::super::simd::{Simd, exp, load_some, logistic, store_some};
use super::super::threads::{Shared, Threads};

/// The frozen parameters of the gates, one value per value head:
/// beta = σ(b) and g = −exp(a_log)·softplus(a + dt_bias).
#[derive(Clone, Copy, Debug)]
pub struct Gates<'a> {
    /// Logarithms of the decay rates, `[num_v_heads]`.
    pub a_log: &'a [f32],
    /// Biases of the step sizes, `[num_v_heads]`.
    pub dt_bias: &'a [f32],
}

/// The operands of [`Gates::vjp`], each `[rows][num_v_heads]`.
#[derive(Debug)]
pub struct GatesGradient<'a> {
    /// The input a of [`Gates::run`].
    pub a: &'a [f32],
    /// The output beta of [`Gates::run`].
    pub beta: &'a [f32],
    /// The gradient of beta.
    pub d_beta: &'a [f32],
    /// The gradient of g.
    pub d_g: &'a [f32],
    /// Receives the gradient of a.
    pub d_a: &'a mut [f32],
    /// Receives the gradient of b.
    pub d_b: &'a mut [f32],
}

impl Gates<'_> {
    /// Computes `beta` = σ(b) in [0, 1] and `g` = −exp(a_log)·softplus(a + dt_bias) ≤ 0, the logarithm of the decay. All
    /// slices are `[rows][num_v_heads]`.
    ///
    /// # Panics
    /// Panics if the lengths do not match.
    pub fn run(&self, threads: &Threads, isa: Isa, a: &[f32], b: &[f32], beta: &mut [f32], g: &mut [f32]) {
        let (rows, heads) = (self.rows(a), self.a_log.len());
        assert!(a.len() == b.len() && a.len() == beta.len() && a.len() == g.len(), "the gates differ in length");
        let (beta, g) = (Shared::new(beta), Shared::new(g));
        over_rows(threads, rows, 32 * heads, |range| {
            for row in range {
                let span = row * heads..(row + 1) * heads;
                // Safety: each thread writes other rows, and all rows are inside both buffers.
                let (beta, g) = unsafe { (beta.part(span.clone()), g.part(span.clone())) };
                // Safety: all slices have one value for each head.
                unsafe { gates_row(isa, self, &a[span.clone()], &b[span], beta, g) };
            }
        });
    }

    /// Computes the gradients of a and b from those of beta and g.
    ///
    /// # Panics
    /// Panics if the lengths do not match.
    pub fn vjp(&self, threads: &Threads, isa: Isa, gradient: GatesGradient<'_>) {
        let GatesGradient { a, beta, d_beta, d_g, d_a, d_b } = gradient;
        let (rows, heads, len) = (self.rows(a), self.a_log.len(), a.len());
        let lengths = [beta.len(), d_beta.len(), d_g.len(), d_a.len(), d_b.len()];
        assert!(lengths.iter().all(|other| *other == len), "the gates and their gradients differ in length");
        let (d_a, d_b) = (Shared::new(d_a), Shared::new(d_b));
        over_rows(threads, rows, 32 * heads, |range| {
            for row in range {
                let span = row * heads..(row + 1) * heads;
                // Safety: each thread writes other rows, and all rows are inside both buffers.
                let (d_a, d_b) = unsafe { (d_a.part(span.clone()), d_b.part(span.clone())) };
                let (a, beta) = (&a[span.clone()], &beta[span.clone()]);
                // Safety: all slices have one value for each head.
                unsafe { vjp_row(isa, self, a, beta, &d_beta[span.clone()], &d_g[span], d_a, d_b) };
            }
        });
    }

    fn rows(&self, a: &[f32]) -> usize {
        let heads = self.a_log.len();
        assert_eq!(heads, self.dt_bias.len(), "a_log and dt_bias differ in length");
        let rows = a.len().checked_div(heads).unwrap_or(0);
        assert_eq!(a.len(), rows * heads, "the length of the gates' input is not a multiple of {heads} heads");
        rows
    }
}

on_every_isa! {
    unsafe fn gates_row(gates: &Gates<'_>, a: &[f32], b: &[f32], beta: &mut [f32], g: &mut [f32]) = gates_with
}
on_every_isa! {
    unsafe fn vjp_row(
        gates: &Gates<'_>,
        a: &[f32],
        beta: &[f32],
        d_beta: &[f32],
        d_g: &[f32],
        d_a: &mut [f32],
        d_b: &mut [f32],
    ) = vjp_with
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
unsafe fn gates_with<S: Simd>(gates: &Gates<'_>, a: &[f32], b: &[f32], beta: &mut [f32], g: &mut [f32]) {
    unsafe {
        for at in (0..a.len()).step_by(S::LANES) {
            let rest = a.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            store_some::<S>(beta.as_mut_ptr().add(at), logistic::<S>(load(b)), rest);
            let step = softplus::<S>(S::add(load(a), load(gates.dt_bias)));
            let decay = S::mul(S::sub(S::zero(), exp::<S>(load(gates.a_log))), step);
            store_some::<S>(g.as_mut_ptr().add(at), decay, rest);
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "every argument is an operand of one operation")]
#[inline(always)]
unsafe fn vjp_with<S: Simd>(
    gates: &Gates<'_>,
    a: &[f32],
    beta: &[f32],
    d_beta: &[f32],
    d_g: &[f32],
    d_a: &mut [f32],
    d_b: &mut [f32],
) {
    unsafe {
        for at in (0..a.len()).step_by(S::LANES) {
            let rest = a.len() - at;
            let load = |from: &[f32]| load_some::<S>(from.as_ptr().add(at), rest);
            let rate = S::sub(S::zero(), exp::<S>(load(gates.a_log)));
            let slope = logistic::<S>(S::add(load(a), load(gates.dt_bias)));
            store_some::<S>(d_a.as_mut_ptr().add(at), S::mul(load(d_g), S::mul(rate, slope)), rest);
            let beta = load(beta);
            let slope = S::mul(beta, S::sub(S::splat(1.0), beta));
            store_some::<S>(d_b.as_mut_ptr().add(at), S::mul(load(d_beta), slope), rest);
        }
    }
}
