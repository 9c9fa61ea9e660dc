//! Matrix products of attention for a few queries, used by the forward and the backward pass.

use super::super::gemm::tile::prefetch;
use super::super::simd::{Simd, tanh};
use super::BLOCK;

/// Keys of one head, `[16 lanes]` for each column, or values of one head, 16 rows; block by block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    /// Address of the first block of positions.
    pub first: *const f32,
    /// Number of elements from one block of positions to the next.
    pub stride: usize,
}

/// Number of queries below which reading keys and values from memory takes the time, not using them: then those of the
/// next head, which follow in memory, are prefetched.
const MANY: usize = 8;
/// Number of blocks of positions from which on the CPU prefetches well by itself.
const LONG: usize = 8;

/// Transposes the first rows of a block of positions to `[column][16]`; lanes without a row are not changed.
pub(super) fn transpose<'a>(rows: impl Iterator<Item = &'a [f32]>, to: &mut [f32]) {
    let mut all: [&[f32]; BLOCK] = [&[]; BLOCK];
    let mut count = 0;
    for (slot, row) in all.iter_mut().zip(rows) {
        *slot = row;
        count += 1;
    }
    for (column, to) in to.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        for (to, row) in to.iter_mut().zip(&all[..count]) {
            *to = row[column];
        }
    }
}

/// Runs `$f` on `$total` vectors, in groups of as many as `$acc` registers hold for `$nq` queries.
macro_rules! by_vectors {
    ($total:expr, $nq:expr, $acc:expr, |$at:ident, $nv:ident| $f:expr) => {{
        let total = $total;
        let mut $at = 0;
        while $at < total {
            let left = total - $at;
            if 8 * $nq <= $acc && left >= 8 {
                const $nv: usize = 8;
                $f;
                $at += 8;
            } else if 4 * $nq <= $acc && left >= 4 {
                const $nv: usize = 4;
                $f;
                $at += 4;
            } else if 2 * $nq <= $acc && left >= 2 {
                const $nv: usize = 2;
                $f;
                $at += 2;
            } else {
                const $nv: usize = 1;
                $f;
                $at += 1;
            }
        }
    }};
}

/// Runs `$f` on `$total` queries, in groups of at most `$tile`.
macro_rules! by_queries {
    ($total:expr, $tile:expr, |$at:ident, $nq:ident| $f:expr) => {{
        let total = $total;
        let mut $at = 0;
        while $at < total {
            let left = total - $at;
            if $tile >= 8 && left >= 8 {
                const $nq: usize = 8;
                $f;
                $at += 8;
            } else if $tile >= 4 && left >= 4 {
                const $nq: usize = 4;
                $f;
                $at += 4;
            } else if left >= 2 {
                const $nq: usize = 2;
                $f;
                $at += 2;
            } else {
                const $nq: usize = 1;
                $f;
                $at += 1;
            }
        }
    }};
}
pub(super) use by_queries;

/// Address of rows that are `stride` elements apart, one per query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines<T> {
    /// Address of the first row.
    pub first: T,
    /// Number of elements from one row to the next.
    pub stride: usize,
}

impl Lines<*const f32> {
    #[inline(always)]
    pub unsafe fn from(self, row: usize) -> Self {
        Lines { first: unsafe { self.first.add(row * self.stride) }, stride: self.stride }
    }
}

impl Lines<*mut f32> {
    #[inline(always)]
    pub unsafe fn from(self, row: usize) -> Self {
        Lines { first: unsafe { self.first.add(row * self.stride) }, stride: self.stride }
    }

    #[inline(always)]
    pub fn read(self) -> Lines<*const f32> {
        Lines { first: self.first.cast_const(), stride: self.stride }
    }
}

/// Computes unscaled attention scores of whole blocks, `[query][position]` = Σ over columns query·key.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, const NQ: usize, const ACC: usize>(
    head_dim: usize,
    keys: Blocks,
    blocks: usize,
    q: Lines<*const f32>,
    to: Lines<*mut f32>,
) {
    unsafe {
        by_vectors!(blocks * BLOCK / S::LANES, NQ, ACC, |at, NV| score::<S, NQ, NV>(head_dim, keys, at, q, to));
    }
}

#[inline(always)]
unsafe fn score<S: Simd, const NQ: usize, const NV: usize>(
    head_dim: usize,
    keys: Blocks,
    vector: usize,
    q: Lines<*const f32>,
    to: Lines<*mut f32>,
) {
    unsafe {
        let mut at = [keys.first; NV];
        for (v, at) in at.iter_mut().enumerate() {
            let position = (vector + v) * S::LANES;
            *at = keys.first.add(position / BLOCK * keys.stride + position % BLOCK);
        }
        let mut acc = [[S::zero(); NV]; NQ];
        for d in 0..head_dim {
            let mut key = [S::zero(); NV];
            for (key, at) in key.iter_mut().zip(&at) {
                let at = at.add(d * BLOCK);
                *key = S::load(at);
                if NQ < MANY && NV < LONG {
                    prefetch(at.wrapping_add(head_dim * BLOCK));
                }
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                let q = S::splat(*q.first.add(i * q.stride + d));
                for (acc, key) in acc.iter_mut().zip(&key) {
                    *acc = S::fma(q, *key, *acc);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                S::store(to.first.add(i * to.stride + (vector + v) * S::LANES), *acc);
            }
        }
    }
}

/// Adds weighted values to outputs, acc `[query][padded]` = acc·alpha + Σ over the positions of whole blocks p·value.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, const NQ: usize, const ACC: usize>(
    padded: usize,
    values: Blocks,
    blocks: usize,
    p: Lines<*const f32>,
    alpha: &[f32; NQ],
    acc: Lines<*mut f32>,
) {
    unsafe {
        by_vectors!(padded / S::LANES, NQ, ACC, |at, NV| {
            weigh_columns::<S, NQ, NV>(padded, values, blocks, p, alpha, acc, at * S::LANES)
        });
    }
}

#[inline(always)]
unsafe fn weigh_columns<S: Simd, const NQ: usize, const NV: usize>(
    padded: usize,
    values: Blocks,
    blocks: usize,
    p: Lines<*const f32>,
    alpha: &[f32; NQ],
    to: Lines<*mut f32>,
    column: usize,
) {
    unsafe {
        let mut acc = [[S::zero(); NV]; NQ];
        for (i, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                let from = to.first.add(i * to.stride + column + v * S::LANES);
                *acc = S::mul(S::load(from), S::splat(alpha[i]));
            }
        }
        let fetches = NQ < MANY && blocks < LONG;
        for block in 0..blocks {
            let mut value = values.first.add(block * values.stride + column);
            let of_block = p.first.add(block * BLOCK);
            for lane in 0..BLOCK {
                let mut row = [S::zero(); NV];
                for (v, row) in row.iter_mut().enumerate() {
                    let at = value.add(v * S::LANES);
                    *row = S::load(at);
                    if fetches {
                        prefetch(at.wrapping_add(padded * BLOCK));
                    }
                }
                for (i, acc) in acc.iter_mut().enumerate() {
                    let p = S::splat(*of_block.add(i * p.stride + lane));
                    for (acc, row) in acc.iter_mut().zip(&row) {
                        *acc = S::fma(p, *row, *acc);
                    }
                }
                value = value.wrapping_add(padded);
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                S::store(to.first.add(i * to.stride + column + v * S::LANES), *acc);
            }
        }
    }
}

/// Adds weighted queries to the gradients of keys or values, `[position][padded]` += Σ over queries weight
/// `[query][position]` · row `[query][padded]`, in the order of the queries, for `positions` positions,
/// a multiple of 16.
#[inline(always)]
pub(super) unsafe fn spread<S: Simd, const NP: usize>(
    padded: usize,
    positions: usize,
    queries: usize,
    weights: Lines<*const f32>,
    rows: Lines<*const f32>,
    to: *mut f32,
) {
    unsafe {
        for position in (0..positions).step_by(NP) {
            let mut column = 0;
            while column < padded {
                let to = to.add(position * padded + column);
                let weights = Lines { first: weights.first.add(position), stride: weights.stride };
                let rows = Lines { first: rows.first.add(column), stride: rows.stride };
                if padded - column >= 2 * S::LANES {
                    spread_tile::<S, NP, 2>(padded, queries, weights, rows, to);
                    column += 2 * S::LANES;
                } else {
                    spread_tile::<S, NP, 1>(padded, queries, weights, rows, to);
                    column += S::LANES;
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn spread_tile<S: Simd, const NP: usize, const NV: usize>(
    padded: usize,
    queries: usize,
    weights: Lines<*const f32>,
    rows: Lines<*const f32>,
    to: *mut f32,
) {
    unsafe {
        let mut acc = [[S::zero(); NV]; NP];
        for (m, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(to.add(m * padded + v * S::LANES));
            }
        }
        for i in 0..queries {
            let mut row = [S::zero(); NV];
            for (v, row) in row.iter_mut().enumerate() {
                *row = S::load(rows.first.add(i * rows.stride + v * S::LANES));
            }
            let weights = weights.first.add(i * weights.stride);
            for (m, acc) in acc.iter_mut().enumerate() {
                let weight = S::splat(*weights.add(m));
                for (acc, row) in acc.iter_mut().zip(&row) {
                    *acc = S::fma(weight, *row, *acc);
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                S::store(to.add(m * padded + v * S::LANES), *acc);
            }
        }
    }
}

/// Constants to add to scores (−∞ or 0) and to multiply weights with (0 or 1): slices of these arrays mask
/// positions of a block.
const HIDDEN: [f32; 3 * BLOCK] = mask(f32::NEG_INFINITY, 0.0);
const SEEN: [f32; 3 * BLOCK] = mask(0.0, 1.0);

const fn mask(outside: f32, inside: f32) -> [f32; 3 * BLOCK] {
    let mut values = [outside; 3 * BLOCK];
    let mut lane = BLOCK;
    while lane < 2 * BLOCK {
        values[lane] = inside;
        lane += 1;
    }
    values
}

/// Two slices of a mask array: the first masks lanes before `begin`, the second lanes from `end` on.
#[inline(always)]
pub(super) fn windows(values: &'static [f32; 3 * BLOCK], begin: usize, end: usize) -> [&'static [f32]; 2] {
    [&values[BLOCK - begin..2 * BLOCK - begin], &values[2 * BLOCK - end..3 * BLOCK - end]]
}

/// Applies the soft cap c·tanh(x / c) in place to `len` attention scores in whole vectors.
#[inline(always)]
pub(super) unsafe fn cap<S: Simd>(scores: *mut f32, len: usize, softcap: f32) {
    for at in (0..len).step_by(S::LANES) {
        unsafe {
            let t = tanh::<S>(S::mul(S::load(scores.add(at)), S::splat(1.0 / softcap)));
            S::store(scores.add(at), S::mul(t, S::splat(softcap)));
        }
    }
}

/// Sets the scores of a block's positions outside of `begin..end` to −∞.
#[inline(always)]
pub(super) unsafe fn hide<S: Simd>(scores: *mut f32, begin: usize, end: usize) {
    let windows = windows(&HIDDEN, begin, end);
    for at in (0..BLOCK).step_by(S::LANES) {
        unsafe {
            let [a, b] = [S::load(windows[0].as_ptr().add(at)), S::load(windows[1].as_ptr().add(at))];
            S::store(scores.add(at), S::add(S::add(S::load(scores.add(at)), a), b));
        }
    }
}

/// Sets the weights of a block's positions outside of `begin..end` to 0.
#[inline(always)]
pub(super) unsafe fn clear<S: Simd>(weights: *mut f32, begin: usize, end: usize) {
    let windows = windows(&SEEN, begin, end);
    for at in (0..BLOCK).step_by(S::LANES) {
        unsafe {
            let [a, b] = [S::load(windows[0].as_ptr().add(at)), S::load(windows[1].as_ptr().add(at))];
            S::store(weights.add(at), S::mul(S::mul(S::load(weights.add(at)), a), b));
        }
    }
}
