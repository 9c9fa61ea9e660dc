//! The gradient of a thin weight, such as a LoRA factor: both operands are read in place, and the sums
//! stay in the cache.

use std::ops::Range;

use super::super::rows::on_every_isa;
use super::super::simd::{Simd, load_some, store_some};
use super::Rows;
use super::tile::{LINE, prefetch};

/// Maximum number of columns of the thin operand; beyond that, packing both operands is faster.
pub(super) const WIDEST: usize = 64;
/// Number of columns of the wide operand whose sums stay in the first-level cache.
const COLUMNS: usize = 256;
/// Number of rows of the operands that a tile adds in one iteration.
const ROWS: usize = 32;

/// The operands and sums `[thin, stride]` += thinᵀ · wide for a range of wide's columns, the rows in order: column 0 of
/// the sums is the first of the range.
pub(super) struct Sums<'a> {
    pub rows: usize,
    pub thin: &'a Rows<'a>,
    pub wide: &'a Rows<'a>,
    pub columns: Range<usize>,
    pub sums: &'a mut [f32],
    pub stride: usize,
}

/// Splits columns of the wide operand into pieces of at most `most`, whose sums fit into [`scratch_len`] elements.
pub(super) fn pieces(columns: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    super::product::pieces(columns, most.min(COLUMNS))
}

/// Number of sums of a piece, for `thin` columns of the thin operand.
pub(super) fn scratch_len(thin: usize) -> usize {
    thin * COLUMNS
}

on_every_isa! {
    /// Adds the products of the operands' rows to the sums.
    ///
    /// # Safety
    /// Both operands have this many rows with the stated widths, and the sums are `[thin, stride]`.
    pub(super) unsafe fn add(sums: &mut Sums<'_>) = add_all
}

#[inline(always)]
unsafe fn add_all<S: Simd>(sums: &mut Sums<'_>) {
    let thin = sums.thin.width;
    let at_once = 2 * S::LANES;
    for begin in (0..sums.rows).step_by(ROWS) {
        let rows = begin..(begin + ROWS).min(sums.rows);
        for column in (0..sums.columns.len()).step_by(at_once) {
            let valid = (sums.columns.len() - column).min(at_once);
            let mut m = 0;
            while m < thin {
                // Safety: the caller guarantees what this `unsafe fn` requires.
                unsafe {
                    m += match thin - m {
                        8.. if S::LANES == 16 => tile::<S, 8>(sums, &rows, m, column, valid),
                        4.. => tile::<S, 4>(sums, &rows, m, column, valid),
                        2.. => tile::<S, 2>(sums, &rows, m, column, valid),
                        _ => tile::<S, 1>(sums, &rows, m, column, valid),
                    };
                }
            }
        }
    }
}

/// Adds the products of MR columns of the thin operand and two vectors of the wide one; returns the
/// number of columns done.
#[inline(always)]
unsafe fn tile<S: Simd, const MR: usize>(
    sums: &mut Sums<'_>,
    rows: &Range<usize>,
    m: usize,
    column: usize,
    valid: usize,
) -> usize {
    let counts = [valid.min(S::LANES), valid - valid.min(S::LANES)];
    let whole = valid == 2 * S::LANES;
    // Safety: guaranteed by the caller; loads and stores at the edge access only valid elements.
    unsafe {
        let mut acc = [[S::zero(); 2]; MR];
        for (number, acc) in acc.iter_mut().enumerate() {
            let from = sums.sums.as_ptr().add((m + number) * sums.stride + column);
            *acc = two::<S>(from, whole, counts);
        }
        let mut x = sums.thin.values.as_ptr().add(rows.start * sums.thin.stride + m);
        let mut w = sums.wide.values.as_ptr().add(rows.start * sums.wide.stride + sums.columns.start + column);
        for row in rows.clone() {
            if m == 0 {
                // Prefetch the next rows of the wide operand, which are far apart in memory.
                let next = w.wrapping_add(ROWS * sums.wide.stride);
                prefetch(next);
                prefetch(next.wrapping_add(LINE));
            }
            let wide = two::<S>(w, whole, counts);
            for (number, acc) in acc.iter_mut().enumerate() {
                let x = S::splat(*x.add(number));
                *acc = [S::fma(x, wide[0], acc[0]), S::fma(x, wide[1], acc[1])];
            }
            if row + 1 < rows.end {
                (x, w) = (x.add(sums.thin.stride), w.add(sums.wide.stride));
            }
        }
        for (number, acc) in acc.iter().enumerate() {
            let to = sums.sums.as_mut_ptr().add((m + number) * sums.stride + column);
            if whole {
                S::store(to, acc[0]);
                S::store(to.add(S::LANES), acc[1]);
            } else {
                store_some::<S>(to, acc[0], counts[0]);
                store_some::<S>(to.wrapping_add(S::LANES), acc[1], counts[1]);
            }
        }
    }
    MR
}

#[inline(always)]
unsafe fn two<S: Simd>(from: *const f32, whole: bool, counts: [usize; 2]) -> [S::V; 2] {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        match whole {
            true => [S::load(from), S::load(from.add(S::LANES))],
            false => [load_some::<S>(from, counts[0]), load_some::<S>(from.wrapping_add(S::LANES), counts[1])],
        }
    }
}
