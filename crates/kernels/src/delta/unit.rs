//! Queries and keys divided by their length.

use super::super::isa::Isa;
use super::super::rows::{on_every_isa, over_rows};
use super::super::simd::{Simd, load_some, store_some};
use super::super::threads::{Shared, Threads};
use super::{DeltaHeads, dot};

/// Added to the squared length of a head.
const EPS: f32 = 1e-6;

/// Divides the query and key heads of rows `qkv` `[rows][width]` by their lengths, y = x / √(Σx² + 10⁻⁶), and multiplies
/// the queries by 1 / √k_dim. Writes the rows, with unchanged value heads, to `out` `[rows][width]`.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn unit_heads(threads: &Threads, isa: Isa, heads: &DeltaHeads, qkv: &[f32], out: &mut [f32]) {
    let (rows, width) = (heads.rows_of(qkv), heads.width());
    assert_eq!(qkv.len(), out.len(), "the rows qkv and the normalized rows differ in length");
    let out = Shared::new(out);
    over_rows(threads, rows, width, |range| {
        for row in range {
            let span = row * width..(row + 1) * width;
            // Safety: each thread writes other rows, and all rows are inside the buffer.
            let out = unsafe { out.part(span.clone()) };
            out.copy_from_slice(&qkv[span]);
            // Safety: the row has the width of the heads.
            unsafe { unit_row(isa, heads, out) };
        }
    });
}

/// Like [`unit_heads`], but writes the result over the input.
///
/// # Panics
/// Panics if the length of `qkv` is not a multiple of a row's width.
pub fn unit_heads_in_place(threads: &Threads, isa: Isa, heads: &DeltaHeads, qkv: &mut [f32]) {
    let (rows, width) = (heads.rows_of(qkv), heads.width());
    let qkv = Shared::new(qkv);
    over_rows(threads, rows, 2 * heads.k_width(), |range| {
        for row in range {
            // Safety: each thread writes other rows, and all rows are inside the buffer.
            unsafe { unit_row(isa, heads, qkv.part(row * width..(row + 1) * width)) };
        }
    });
}

/// Computes the gradient of [`unit_heads`]: dx `[rows][width]` from its input `qkv` `[rows][width]` and
/// dL/dout = `dy` `[rows][width]`. The gradients of the value heads are copied.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn unit_heads_vjp(threads: &Threads, isa: Isa, heads: &DeltaHeads, qkv: &[f32], dy: &[f32], dx: &mut [f32]) {
    let (rows, width) = (heads.rows_of(qkv), heads.width());
    assert!(
        qkv.len() == dy.len() && qkv.len() == dx.len(),
        "the rows qkv and the gradients dy and dx differ in length"
    );
    let dx = Shared::new(dx);
    over_rows(threads, rows, width, |range| {
        for row in range {
            let span = row * width..(row + 1) * width;
            // Safety: each thread writes other rows, and all rows are inside the buffer.
            unsafe { vjp_row(isa, heads, &qkv[span.clone()], &dy[span.clone()], dx.part(span)) };
        }
    });
}

on_every_isa! {
    unsafe fn unit_row(heads: &DeltaHeads, row: &mut [f32]) = unit_with
}
on_every_isa! {
    unsafe fn vjp_row(heads: &DeltaHeads, row: &[f32], dy: &[f32], dx: &mut [f32]) = vjp_with
}

/// The factor of a head: 1 / its length, for queries also 1 / √k_dim.
#[inline(always)]
fn factor(heads: &DeltaHeads, head: usize, squared: f32) -> f32 {
    let length = (squared + EPS).sqrt();
    if head < heads.num_k_heads { 1.0 / (length * (heads.k_dim as f32).sqrt()) } else { 1.0 / length }
}

#[inline(always)]
unsafe fn unit_with<S: Simd>(heads: &DeltaHeads, row: &mut [f32]) {
    unsafe {
        let dim = heads.k_dim;
        for head in 0..2 * heads.num_k_heads {
            let x = row.as_mut_ptr().add(head * dim);
            let r = S::splat(factor(heads, head, dot::<S>(x, x, dim)));
            for at in (0..dim).step_by(S::LANES) {
                let rest = dim - at;
                store_some::<S>(x.add(at), S::mul(load_some::<S>(x.add(at), rest), r), rest);
            }
        }
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(heads: &DeltaHeads, row: &[f32], dy: &[f32], dx: &mut [f32]) {
    unsafe {
        let dim = heads.k_dim;
        for head in 0..2 * heads.num_k_heads {
            let (x, dy) = (row.as_ptr().add(head * dim), dy.as_ptr().add(head * dim));
            let squared = dot::<S>(x, x, dim);
            let r = factor(heads, head, squared);
            // The gradient of x·r: dx = r·(dy − x·Σ(x·dy) / (Σx² + eps)).
            let c = S::splat(-(r * (dot::<S>(x, dy, dim) / (squared + EPS))));
            let r = S::splat(r);
            for at in (0..dim).step_by(S::LANES) {
                let rest = dim - at;
                let scaled = S::mul(load_some::<S>(dy.add(at), rest), r);
                let value = S::fma(c, load_some::<S>(x.add(at), rest), scaled);
                store_some::<S>(dx.as_mut_ptr().add(head * dim + at), value, rest);
            }
        }
        let first = 2 * heads.k_width();
        dx[first..].copy_from_slice(&dy[first..]);
    }
}
