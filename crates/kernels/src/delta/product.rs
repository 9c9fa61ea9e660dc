//! Products of small matrices in scratch memory, and what surrounds them in a chunk of tokens.
//!
//! Widths are multiples of 16. An element of a product is one chain of fused multiply-adds over the depth, in order, so
//! that it does not depend on the size of the tiles.

use super::super::isa::Isa;
use super::super::rows::on_every_isa;
use super::super::simd::{Simd, exp};

/// Number of rows of a tile.
const TILE: usize = 4;

/// The part of the depth that a row of a triangular matrix needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// The whole matrix is used.
    All,
    /// Up to the row's own index: a lower triangle.
    UpTo,
    /// An upper triangle: each row from its own index on.
    From,
}

/// The operands of a product: A `[rows][depth]` with any strides, and B `[depth][width]` in contiguous rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product<'a> {
    pub a: &'a [f32],
    /// Distances between the rows and between the columns of A.
    pub strides: (usize, usize),
    pub b: &'a [f32],
    pub depth: usize,
    /// Where A may differ from zero.
    pub part: Depth,
}

/// Computes out `[rows][width]` = `scale`·out + A·B. Whole tiles of 4 rows are written.
pub(super) fn multiply(isa: Isa, out: &mut [f32], width: usize, rows: usize, scale: f32, product: Product<'_>) {
    let rows = rows.next_multiple_of(TILE);
    assert!(width.is_multiple_of(16) && out.len() >= rows * width && product.b.len() >= product.depth * width);
    let (row, column) = product.strides;
    assert!(product.depth == 0 || product.a.len() > (rows - 1) * row + (product.depth - 1) * column);
    // Safety: the bounds of all operands were checked.
    unsafe { multiply_on(isa, out, width, rows, scale, product) };
}

/// Solves x`[t]` = x`[t]` − Σ over s < t of l`[t][s]`·y`[s]` and y`[t]` = factors`[t]`·x`[t]`, from the first row to the last.
pub(super) fn solve_down(isa: Isa, l: &[f32], factors: &[f32], x: &mut [f32], y: &mut [f32], width: usize) {
    check_solve(l, factors, x, y, width);
    // Safety: the bounds of all operands were checked.
    unsafe { solve_down_on(isa, l, factors, x, y, width) };
}

/// Solves x`[t]` = x`[t]` + Σ over s > t of l`[s][t]`·y`[s]` and y`[t]` = −factors`[t]`·x`[t]`, from the last row to the first.
pub(super) fn solve_up(isa: Isa, l: &[f32], factors: &[f32], x: &mut [f32], y: &mut [f32], width: usize) {
    check_solve(l, factors, x, y, width);
    // Safety: the bounds of all operands were checked.
    unsafe { solve_up_on(isa, l, factors, x, y, width) };
}

fn check_solve(l: &[f32], factors: &[f32], x: &[f32], y: &[f32], width: usize) {
    let rows = factors.len();
    assert!(width.is_multiple_of(16) && rows <= CHUNK && l.len() >= rows * CHUNK);
    assert!(x.len() >= rows * width && y.len() >= rows * width);
}

/// Number of columns of matrices that have one row and one column for each token of a chunk.
pub(super) const CHUNK: usize = super::KEPT_EVERY;

/// Computes to`[row][..]` = factors`[row]`·from`[row][..]`.
pub(super) fn scale_rows(isa: Isa, from: &[f32], factors: &[f32], to: &mut [f32], width: usize) {
    assert!(width.is_multiple_of(16) && from.len() >= factors.len() * width && to.len() >= factors.len() * width);
    // Safety: the bounds of all operands were checked.
    unsafe { scale_on(isa, from, factors, to, width) };
}

/// Computes eˣ of every value; the length is a multiple of 16.
pub(super) fn exponentials(isa: Isa, values: &mut [f32]) {
    assert!(values.len().is_multiple_of(16));
    // Safety: the length was checked.
    unsafe { exp_on(isa, values) };
}

/// Computes a ∘= b; the length is a multiple of 16.
pub(super) fn weigh(isa: Isa, a: &mut [f32], b: &[f32]) {
    assert!(a.len().is_multiple_of(16) && a.len() == b.len());
    // Safety: the lengths were checked.
    unsafe { weigh_on(isa, a, b) };
}

/// Computes Σ a·b with 16 partial sums.
pub(super) fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // Safety: the lengths were checked.
    unsafe { dot_on(isa, a, b) }
}

on_every_isa! {
    unsafe fn multiply_on(out: &mut [f32], width: usize, rows: usize, scale: f32, product: Product<'_>) = multiply_with
}
on_every_isa! {
    unsafe fn solve_down_on(l: &[f32], factors: &[f32], x: &mut [f32], y: &mut [f32], width: usize) = solve_down_with
}
on_every_isa! {
    unsafe fn solve_up_on(l: &[f32], factors: &[f32], x: &mut [f32], y: &mut [f32], width: usize) = solve_up_with
}
on_every_isa! {
    unsafe fn scale_on(from: &[f32], factors: &[f32], to: &mut [f32], width: usize) = scale_with
}
on_every_isa! {
    unsafe fn exp_on(values: &mut [f32]) = exp_with
}
on_every_isa! {
    unsafe fn weigh_on(a: &mut [f32], b: &[f32]) = weigh_with
}
on_every_isa! {
    unsafe fn dot_on(a: &[f32], b: &[f32]) -> f32 = dot_with
}

#[inline(always)]
unsafe fn dot_with<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { super::dot::<S>(a.as_ptr(), b.as_ptr(), a.len()) }
}

#[inline(always)]
unsafe fn multiply_with<S: Simd>(out: &mut [f32], width: usize, rows: usize, scale: f32, product: Product<'_>) {
    unsafe {
        let mut column = 0;
        while column < width {
            let vectors = (width - column) / S::LANES;
            let step = if S::LANES == 16 && vectors >= 4 {
                columns::<S, 4>(out, width, rows, column, scale, &product)
            } else if vectors >= 2 {
                columns::<S, 2>(out, width, rows, column, scale, &product)
            } else {
                columns::<S, 1>(out, width, rows, column, scale, &product)
            };
            column += step;
        }
    }
}

/// Computes `N` vectors of columns of all rows; returns the number of columns.
#[inline(always)]
unsafe fn columns<S: Simd, const N: usize>(
    out: &mut [f32],
    width: usize,
    rows: usize,
    column: usize,
    scale: f32,
    product: &Product<'_>,
) -> usize {
    let Product { a, strides: (row_stride, column_stride), b, depth, part } = *product;
    for row in (0..rows).step_by(TILE) {
        let depth = match part {
            Depth::All => 0..depth,
            Depth::UpTo => 0..depth.min(row + TILE),
            Depth::From => row.min(depth)..depth,
        };
        unsafe {
            let to = out.as_mut_ptr().add(row * width + column);
            let mut sums = [[S::zero(); N]; TILE];
            if scale != 0.0 {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = S::mul(S::splat(scale), S::load(to.add(i * width + n * S::LANES)));
                    }
                }
            }
            let a = a.as_ptr().add(row * row_stride);
            let b = b.as_ptr().add(column);
            for k in depth {
                let mut of_b = [S::zero(); N];
                for (n, of_b) in of_b.iter_mut().enumerate() {
                    *of_b = S::load(b.add(k * width + n * S::LANES));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let of_a = S::splat(*a.add(i * row_stride + k * column_stride));
                    for (sum, of_b) in sums.iter_mut().zip(of_b) {
                        *sum = S::fma(of_a, of_b, *sum);
                    }
                }
            }
            for (i, sums) in sums.into_iter().enumerate() {
                for (n, sum) in sums.into_iter().enumerate() {
                    S::store(to.add(i * width + n * S::LANES), sum);
                }
            }
        }
    }
    N * S::LANES
}

/// Number of vectors of columns that a solver keeps in registers.
const SOLVED: usize = 8;

#[inline(always)]
unsafe fn solve_down_with<S: Simd>(l: &[f32], factors: &[f32], x: &mut [f32], y: &mut [f32], width: usize) {
    unsafe {
        for (row, factor) in factors.iter().enumerate() {
            let minus = |s: usize| -*l.as_ptr().add(row * CHUNK + s);
            combine::<S>(x, y, width, row, 0..row, *factor, minus);
        }
    }
}

#[inline(always)]
unsafe fn solve_up_with<S: Simd>(l: &[f32], factors: &[f32], x: &mut [f32], y: &mut [f32], width: usize) {
    unsafe {
        for (row, factor) in factors.iter().enumerate().rev() {
            let plus = |s: usize| *l.as_ptr().add(s * CHUNK + row);
            combine::<S>(x, y, width, row, row + 1..factors.len(), -factor, plus);
        }
    }
}

/// Adds rows of y with weights to a row of x; the row of y becomes `factor` times the sum.
#[inline(always)]
unsafe fn combine<S: Simd>(
    x: &mut [f32],
    y: &mut [f32],
    width: usize,
    row: usize,
    others: std::ops::Range<usize>,
    factor: f32,
    weight: impl Fn(usize) -> f32,
) {
    unsafe {
        for first in (0..width).step_by(SOLVED * S::LANES) {
            let count = ((width - first) / S::LANES).min(SOLVED);
            let (x, y) = (x.as_mut_ptr().add(row * width + first), y.as_mut_ptr().add(first));
            if count == SOLVED {
                combine_vectors::<S, SOLVED>(x, y, width, row, others.clone(), factor, &weight);
                continue;
            }
            for n in 0..count {
                let (x, y) = (x.add(n * S::LANES), y.add(n * S::LANES));
                combine_vectors::<S, 1>(x, y, width, row, others.clone(), factor, &weight);
            }
        }
    }
}

#[inline(always)]
unsafe fn combine_vectors<S: Simd, const N: usize>(
    x: *mut f32,
    y: *mut f32,
    width: usize,
    row: usize,
    others: std::ops::Range<usize>,
    factor: f32,
    weight: &impl Fn(usize) -> f32,
) {
    unsafe {
        let mut sums = [S::zero(); N];
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = S::load(x.add(n * S::LANES));
        }
        for other in others {
            let weight = S::splat(weight(other));
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = S::fma(weight, S::load(y.add(other * width + n * S::LANES)), *sum);
            }
        }
        for (n, sum) in sums.into_iter().enumerate() {
            S::store(x.add(n * S::LANES), sum);
            S::store(y.add(row * width + n * S::LANES), S::mul(S::splat(factor), sum));
        }
    }
}

#[inline(always)]
unsafe fn scale_with<S: Simd>(from: &[f32], factors: &[f32], to: &mut [f32], width: usize) {
    for (row, factor) in factors.iter().enumerate() {
        for at in (row * width..(row + 1) * width).step_by(S::LANES) {
            unsafe {
                S::store(to.as_mut_ptr().add(at), S::mul(S::splat(*factor), S::load(from.as_ptr().add(at))));
            }
        }
    }
}

#[inline(always)]
unsafe fn exp_with<S: Simd>(values: &mut [f32]) {
    for at in (0..values.len()).step_by(S::LANES) {
        unsafe {
            let at = values.as_mut_ptr().add(at);
            S::store(at, exp::<S>(S::load(at)));
        }
    }
}

#[inline(always)]
unsafe fn weigh_with<S: Simd>(a: &mut [f32], b: &[f32]) {
    for at in (0..a.len()).step_by(S::LANES) {
        unsafe {
            let to = a.as_mut_ptr().add(at);
            S::store(to, S::mul(S::load(to), S::load(b.as_ptr().add(at))));
        }
    }
}
