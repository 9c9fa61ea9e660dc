//! The innermost loops: they multiply up to 8 rows with one panel of 32 outputs, and keep the sums in registers.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;

use super::super::gemm::pairs::{Block, ROWS as TILE, STEPS, TILE_BYTES};
use super::super::gemm::tile::{prefetch, prefetch_further};
use super::super::pack::{CodeRun, PANEL, PackedMatrix, each_line};

/// Maximum number of rows in a group. The 16 independent sums of 8 rows hide the latency of the instruction.
pub(super) const ROWS: usize = 8;
/// Number of bytes of one row in a block of 32 steps of the packed inputs.
const ROW_BYTES: usize = TILE_BYTES / TILE;
/// Number of bytes of a panel's weights for one pair of steps, and for 32 steps.
const PAIR_BYTES: usize = PANEL * 4;
const WEIGHT_BYTES: usize = 16 * PAIR_BYTES;
/// Number of bytes that a sequential read of weights is prefetched ahead.
const PREFETCH_DISTANCE: usize = 4096;
/// Number of bytes beyond a prefetched address from which weights are fetched into the second-level cache: the first-level
/// cache alone does not have enough reads in flight to keep up with the memory.
const FURTHER: usize = 8192;
/// Number of bytes in a cache line.
const LINE: usize = 64;

/// The arguments of a kernel: a group of rows and a block of weights.
struct Group {
    inputs: *const u8,
    weights: *const u8,
    steps: usize,
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
    /// Address of the first byte to prefetch.
    fetch: *const u8,
}

type Kernel = unsafe fn(&Group);

/// Builds the table of kernels. The first index is the number of cache lines to prefetch per pair of steps (0 to 2), the second
/// one the number of rows − 1.
macro_rules! kernels {
    ($($rows:literal)*) => { [[$(group::<$rows, 0>,)*], [$(group::<$rows, 1>,)*], [$(group::<$rows, 2>,)*]] };
}
const KERNELS: [[Kernel; ROWS]; 3] = kernels!(1 2 3 4 5 6 7 8);

/// Multiplies the block of weights with its rows, in groups of up to 8.
///
/// # Safety
/// The machine has AVX512-BF16, and the pointers are valid for all rows and steps.
pub(super) unsafe fn multiply(block: &Block) {
    let rows = block.rows;
    // Each group of rows is within one tile.
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
            // A single group prefetches its own weights a little ahead. With several groups, the first two prefetch one
            // half of the next block each.
            let (fetch, lines) = match (groups, number) {
                (1, _) => (block.weights.wrapping_add(PREFETCH_DISTANCE), 2),
                (_, 0 | 1) => (block.next.wrapping_add(number * block.steps * WEIGHT_BYTES / 2), 1),
                _ => (block.weights, 0),
            };
            let (from, from_stride, to) = block.place(row);
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe {
                KERNELS[lines][len - 1](&Group {
                    inputs: block.inputs.add(tile * block.inputs_stride + first * ROW_BYTES),
                    weights: block.weights,
                    steps: block.steps,
                    from,
                    from_stride,
                    to: to.at,
                    to_stride: to.stride,
                    fetch,
                });
            }
            number += 1;
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn group<const MR: usize, const FETCH: usize>(group: &Group) {
    // Safety: the caller guarantees the pointers. A prefetch from an invalid address has no effect.
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
                    prefetch_further(fetch.wrapping_add(FURTHER));
                    fetch = fetch.wrapping_add(LINE);
                }
                let weights = w.add(pair * PAIR_BYTES);
                let weights: [__m512bh; 2] = [
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(weights.cast())),
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(weights.add(64).cast())),
                ];
                for (m, acc) in acc.iter_mut().enumerate() {
                    let x = x.add(m * ROW_BYTES + pair * 4).cast::<i32>().read();
                    let x: __m512bh = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(x));
                    *acc = [_mm512_dpbf16_ps(acc[0], x, weights[0]), _mm512_dpbf16_ps(acc[1], x, weights[1])];
                }
            }
            (x, w) = (x.add(TILE_BYTES), w.add(WEIGHT_BYTES));
        }
        for (m, acc) in acc.iter().enumerate() {
            let to = group.to.add(m * group.to_stride);
            _mm512_storeu_ps(to, acc[0]);
            _mm512_storeu_ps(to.add(16), acc[1]);
        }
    }
}

/// The arguments of a kernel that multiplies codes: where its sums are, and the inputs of the first step.
struct Sums {
    inputs: *const u8,
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
}

type CodesKernel = unsafe fn(&Sums, &CodeRun<'_>);

macro_rules! codes_kernels {
    ($($rows:literal)*) => { [$(codes::<$rows>,)*] };
}
const CODES_KERNELS: [CodesKernel; ROWS] = codes_kernels!(1 2 3 4 5 6 7 8);

/// Multiplies up to 8 rows with steps of a panel's 4-bit codes. Returns false if the codes must be expanded first.
///
/// # Safety
/// The machine has AVX512-BF16, and the pointers are valid for all rows and steps.
pub(super) unsafe fn multiply_codes(block: &Block, weight: &PackedMatrix, panel: usize, steps: Range<usize>) -> bool {
    let Some(run) = weight.code_run(panel, steps) else { return false };
    let (from, from_stride, to) = block.place(0);
    let sums = Sums { inputs: block.inputs, from, from_stride, to: to.at, to_stride: to.stride };
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { CODES_KERNELS[block.rows - 1](&sums, &run) };
    true
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn codes<const MR: usize>(sums: &Sums, run: &CodeRun<'_>) {
    // Safety: the caller guarantees the pointers.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; MR];
        if !sums.from.is_null() {
            for (m, acc) in acc.iter_mut().enumerate() {
                let from = sums.from.add(m * sums.from_stride);
                *acc = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
            }
        }
        let narrow = |low, high| std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        let (mut blocks, mut inputs) = (run.blocks(), sums.inputs);
        while let Some(block) = blocks.take_next() {
            each_line(&block, narrow, |group, half, step, words| {
                // Two groups of 16 inputs are one block of 32 steps of the packed inputs.
                let x = inputs.add(group / 2 * TILE_BYTES + (group % 2 * 8 + step) * 4);
                let words: __m512bh = std::mem::transmute::<__m512i, __m512bh>(words);
                for (m, acc) in acc.iter_mut().enumerate() {
                    let x = _mm512_set1_epi32(x.add(m * ROW_BYTES).cast::<i32>().read());
                    acc[half] = _mm512_dpbf16_ps(acc[half], std::mem::transmute::<__m512i, __m512bh>(x), words);
                }
            });
            inputs = inputs.add(block.inputs() / STEPS * TILE_BYTES);
        }
        for (m, acc) in acc.iter().enumerate() {
            let to = sums.to.add(m * sums.to_stride);
            _mm512_storeu_ps(to, acc[0]);
            _mm512_storeu_ps(to.add(16), acc[1]);
        }
    }
}

/// Number of independent chains of multiply-adds in [`peak`] and [`peak_f32`], enough to hide the latency of both instructions.
const CHAINS: usize = 24;
/// Number of floating-point operations in a step of [`peak`]; a multiply-add counts as two.
pub(in super::super) const PEAK_FLOPS: usize = CHAINS * 16 * 4;

/// Executes `VDPBF16PS` on registers only, [`CHAINS`] times per step, to measure the peak throughput.
///
/// # Safety
/// The machine has AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in super::super) unsafe fn peak(steps: usize) -> f32 {
    let pair = |value: f32| half::bf16::from_f32(value).to_bits() as i32 * 0x1_0001;
    // Safety: both types have 64 bytes.
    let (x, w): (__m512bh, __m512bh) = unsafe {
        let x = _mm512_set1_epi32(black_box(pair(1e-3)));
        (
            std::mem::transmute::<__m512i, __m512bh>(x),
            std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(black_box(pair(0.999)))),
        )
    };
    let mut acc = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm512_dpbf16_ps(*acc, x, w);
        }
    }
    total(acc)
}

/// Executes f32 multiply-adds on registers only, [`CHAINS`] times per step. A step has half as many operations as one of [`peak`].
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
