//! The innermost loops: a few rows by a panel, the sums in registers.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::super::amx::{Begin, Output, ROWS as TILE};
use super::super::gemm::tile::prefetch;
use super::super::pack::PANEL;

/// Rows of a group: with a panel 16 sums, enough to hide the instruction's latency.
pub(super) const ROWS: usize = 8;
/// Bytes of a row in a block of 32 steps of inputs, and of the block.
const ROW_BYTES: usize = 64;
const BLOCK_BYTES: usize = TILE * ROW_BYTES;
/// Bytes of a pair of steps of weights, and of 32 steps.
const PAIR_BYTES: usize = PANEL * 4;
const WEIGHT_BYTES: usize = 16 * PAIR_BYTES;
/// Bytes by which the stream of weights is fetched ahead.
const AHEAD: usize = 4096;
const LINE: usize = 64;

/// Rows of inputs and a block of weights of one panel.
pub(super) struct Block {
    /// Tiles of 16 rows, `inputs_stride` bytes apart; inside one, blocks of 32 steps.
    pub inputs: *const u8,
    pub inputs_stride: usize,
    /// `[steps][16][32][2]` bf16
    pub weights: *const u8,
    /// Blocks of 32 steps.
    pub steps: usize,
    /// The weights after these; where they are not known, these.
    pub next: *const u8,
    /// What the sums begin with, and where they go.
    pub from: Begin,
    pub to: Output,
}

/// One group of rows.
struct Group {
    inputs: *const u8,
    weights: *const u8,
    steps: usize,
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
    /// Weights that are fetched meanwhile.
    fetch: *const u8,
}

type Kernel = unsafe fn(&Group);

/// By rows − 1: no weights fetched, one line a pair of steps, two.
macro_rules! kernels {
    ($($rows:literal)*) => { [[$(group::<$rows, 0>,)*], [$(group::<$rows, 1>,)*], [$(group::<$rows, 2>,)*]] };
}
const KERNELS: [[Kernel; ROWS]; 3] = kernels!(1 2 3 4 5 6 7 8);

impl Block {
    /// Add up so many rows.
    ///
    /// # Safety
    /// The machine has AVX512-BF16, and the pointers reach as far as they must.
    pub unsafe fn multiply(&self, rows: usize) {
        // Groups lie inside tiles.
        let groups_of = |rows: usize| rows.div_ceil(ROWS);
        let groups = rows / TILE * groups_of(TILE) + groups_of(rows % TILE);
        let mut number = 0;
        for tile in 0..rows.div_ceil(TILE) {
            let in_tile = (rows - tile * TILE).min(TILE);
            let count = groups_of(in_tile);
            for group in 0..count {
                let first = in_tile * group / count;
                let len = in_tile * (group + 1) / count - first;
                let row = tile * TILE + first;
                // One group fetches its own weights, a little ahead. Where there are several, what follows is fetched
                // meanwhile, half of it by each of the first two.
                let (fetch, lines) = match (groups, number) {
                    (1, _) => (self.weights.wrapping_add(AHEAD), 2),
                    (_, 0 | 1) => (self.next.wrapping_add(number * self.steps * WEIGHT_BYTES / 2), 1),
                    _ => (self.weights, 0),
                };
                let (from, from_stride) = match self.from {
                    Begin::Zero => (std::ptr::null(), 0),
                    Begin::Bias(bias) => (bias, 0),
                    Begin::Rows(rows, stride) => (rows.wrapping_add(row * stride), stride),
                };
                // Safety: the caller's.
                unsafe {
                    KERNELS[lines][len - 1](&Group {
                        inputs: self.inputs.add(tile * self.inputs_stride + first * ROW_BYTES),
                        weights: self.weights,
                        steps: self.steps,
                        from,
                        from_stride,
                        to: self.to.at.wrapping_add(row * self.to.stride),
                        to_stride: self.to.stride,
                        fetch,
                    });
                }
                number += 1;
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn group<const MR: usize, const FETCH: usize>(group: &Group) {
    // Safety: the caller's. Fetching ahead touches nothing.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; MR];
        if !group.from.is_null() {
            for (m, acc) in acc.iter_mut().enumerate() {
                let from = group.from.add(m * group.from_stride);
                *acc = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
            }
        }
        for m in 0..MR {
            let next = group.to.wrapping_add((MR + m) * group.to_stride);
            prefetch(next);
            prefetch(next.wrapping_add(PANEL - 1));
        }
        let (mut x, mut w, mut fetch) = (group.inputs, group.weights, group.fetch);
        for _ in 0..group.steps {
            for pair in 0..16 {
                for _ in 0..FETCH {
                    prefetch(fetch);
                    fetch = fetch.wrapping_add(LINE);
                }
                let weights = w.add(pair * PAIR_BYTES);
                let weights: [__m512bh; 2] = [
                    std::mem::transmute(_mm512_loadu_si512(weights.cast())),
                    std::mem::transmute(_mm512_loadu_si512(weights.add(64).cast())),
                ];
                for (m, acc) in acc.iter_mut().enumerate() {
                    let x = x.add(m * ROW_BYTES + pair * 4).cast::<i32>().read();
                    let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(x));
                    *acc = [_mm512_dpbf16_ps(acc[0], x, weights[0]), _mm512_dpbf16_ps(acc[1], x, weights[1])];
                }
            }
            (x, w) = (x.add(BLOCK_BYTES), w.add(WEIGHT_BYTES));
        }
        for (m, acc) in acc.iter().enumerate() {
            let to = group.to.add(m * group.to_stride);
            _mm512_storeu_ps(to, acc[0]);
            _mm512_storeu_ps(to.add(16), acc[1]);
        }
    }
}

/// Independent chains of [`peak`].
const CHAINS: usize = 24;
/// Operations of a step of [`peak`].
pub(in super::super) const PEAK_FLOPS: usize = CHAINS * 16 * 4;

/// [`CHAINS`] pairs of bf16 in every lane a step, on registers alone.
///
/// # Safety
/// The machine has AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in super::super) unsafe fn peak(steps: usize) -> f32 {
    let pair = |value: f32| half::bf16::from_f32(value).to_bits() as i32 * 0x1_0001;
    // Safety: as wide.
    let (x, w): (__m512bh, __m512bh) = unsafe {
        let x = _mm512_set1_epi32(black_box(pair(1e-3)));
        (std::mem::transmute(x), std::mem::transmute(_mm512_set1_epi32(black_box(pair(0.999)))))
    };
    let mut acc = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm512_dpbf16_ps(*acc, x, w);
        }
    }
    total(acc)
}

/// [`CHAINS`] multiply-adds of f32 in every lane a step, half the operations of [`peak`].
#[target_feature(enable = "avx512f")]
pub(super) fn peak_f32(steps: usize) -> f32 {
    let (x, w) = (_mm512_set1_ps(black_box(1e-3)), _mm512_set1_ps(black_box(0.999)));
    let mut acc = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm512_fmadd_ps(*acc, w, x);
        }
    }
    total(acc)
}

#[target_feature(enable = "avx512f")]
fn total(acc: [__m512; CHAINS]) -> f32 {
    let mut sum = _mm512_setzero_ps();
    for acc in acc {
        sum = _mm512_add_ps(sum, acc);
    }
    _mm512_reduce_add_ps(sum)
}
