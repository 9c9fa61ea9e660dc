//! Queries and keys divided by their lengths.

use std::cell::RefCell;

use super::super::mlp::silu;
use super::super::rows::on_every_isa;
use super::super::simd::{Simd, load_some, store_some};
use super::{Shape, dot};

/// Added to the squared length of a head.
const EPS: f32 = 1e-6;

thread_local! {
    /// A row after SiLU.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

on_every_isa! {
    /// Divides each query and key head of a row `[q heads | k heads | v heads]` by its length, y = x / √(Σx² + 10⁻⁶), and
    /// multiplies the queries by 1 / √key_dim.
    ///
    /// # Safety
    /// `row` has the shape's `conv_width`.
    pub(super) unsafe fn unit_row(shape: &Shape, row: &mut [f32]) = unit_with
}
on_every_isa! {
    /// Computes the gradient of SiLU followed by [`unit_row`] from the input of SiLU, over which it is written, and the
    /// gradient `dy` of the output.
    ///
    /// # Safety
    /// `row` and `dy` have the shape's `conv_width`.
    pub(super) unsafe fn unit_vjp_row(shape: &Shape, row: &mut [f32], dy: &[f32]) = vjp_with
}

/// The factor of a head: 1 / its length, for queries also 1 / √key_dim.
#[inline(always)]
fn factor(shape: &Shape, head: usize, squared: f32) -> f32 {
    let length = (squared + EPS).sqrt();
    if head < shape.num_key_heads { 1.0 / (length * (shape.key_dim as f32).sqrt()) } else { 1.0 / length }
}

#[inline(always)]
unsafe fn unit_with<S: Simd>(shape: &Shape, row: &mut [f32]) {
    unsafe {
        let dim = shape.key_dim;
        for head in 0..2 * shape.num_key_heads {
            let x = row.as_mut_ptr().add(head * dim);
            let r = S::splat(factor(shape, head, dot::<S>(x, x, dim)));
            for at in (0..dim).step_by(S::LANES) {
                let rest = dim - at;
                store_some::<S>(x.add(at), S::mul(load_some::<S>(x.add(at), rest), r), rest);
            }
        }
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(shape: &Shape, row: &mut [f32], dy: &[f32]) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    SCRATCH.with_borrow_mut(|values| unsafe {
        values.resize(row.len(), 0.0);
        // The row becomes the slope of SiLU.
        for at in (0..row.len()).step_by(S::LANES) {
            let (rest, x) = (row.len() - at, row.as_mut_ptr().add(at));
            let (value, slope) = silu::<S>(load_some::<S>(x, rest));
            store_some::<S>(values.as_mut_ptr().add(at), value, rest);
            store_some::<S>(x, slope, rest);
        }
        let dim = shape.key_dim;
        for head in 0..2 * shape.num_key_heads {
            let (x, dy) = (values.as_ptr().add(head * dim), dy.as_ptr().add(head * dim));
            let squared = dot::<S>(x, x, dim);
            let r = factor(shape, head, squared);
            // The gradient of x·r: dx = r·(dy − x·Σ(x·dy) / (Σx² + eps)).
            let c = S::splat(-(r * (dot::<S>(x, dy, dim) / (squared + EPS))));
            let r = S::splat(r);
            for at in (0..dim).step_by(S::LANES) {
                let (rest, out) = (dim - at, row.as_mut_ptr().add(head * dim + at));
                let scaled = S::mul(load_some::<S>(dy.add(at), rest), r);
                let value = S::fma(c, load_some::<S>(x.add(at), rest), scaled);
                store_some::<S>(out, S::mul(value, load_some::<S>(out, rest)), rest);
            }
        }
        for at in (2 * shape.key_width()..row.len()).step_by(S::LANES) {
            let (rest, out) = (row.len() - at, row.as_mut_ptr().add(at));
            let value = S::mul(load_some::<S>(dy.as_ptr().add(at), rest), load_some::<S>(out, rest));
            store_some::<S>(out, value, rest);
        }
    });
}
