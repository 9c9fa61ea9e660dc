//! The innermost loops of matrix products: a few rows times half a panel or a whole one, with the sums in registers.

use super::super::isa::Isa;
use super::super::pack::{EXPAND_PORTABLE, Expand, INPUT_STRIDE, PANEL};
use super::super::simd::{Portable, Simd};
#[cfg(target_arch = "x86_64")]
use super::few;

/// Maximum number of rows of any tile.
pub(in super::super) const MOST_ROWS: usize = 12;

/// The operands and sums of one tile.
pub(in super::super) struct Tile {
    /// The packed inputs, `[rows][INPUT_STRIDE]`.
    pub x: *const f32,
    /// Weights `[depth][32]` f32 or `[depth / 2][32][2]` bf16, from the tile's first column on.
    pub w: *const u32,
    /// Number of steps of the summed dimension; for bf16 rounded up to pairs.
    pub depth: usize,
    /// Initial values of the sums, rows `from_stride` apart.
    pub from: *const f32,
    pub from_stride: usize,
    /// Memory that the sums are stored to.
    pub y: *mut f32,
    pub y_stride: usize,
    /// Outputs of the next tile, to prefetch.
    pub next: *const f32,
    /// Weights in pairs to prefetch: `fetch_step` words per pair of steps, one or two cache lines.
    pub fetch: *const u32,
    pub fetch_step: usize,
}

/// Number of 32-bit words in a cache line.
pub(in super::super) const LINE: usize = 16;

/// The tile kernels of one instruction set.
pub(in super::super) struct TileKernels {
    /// Maximum number of rows of a tile.
    pub rows: usize,
    /// Number of columns of a tile.
    pub columns: usize,
    /// Kernels for weights packed as f32 and as bf16.
    pub f32: Kernels,
    pub bf16: Kernels,
    /// Transposes a block of 32 × 32 weights: `[inputs][32]` for the given number of inputs
    /// to `[32 outputs][32 inputs]`.
    pub transpose_f32: unsafe fn(*const u32, usize, *mut f32),
    /// Transposes pairs of inputs `[16][32][2]` to pairs of outputs `[16][32 inputs][2]`.
    pub transpose_bf16: unsafe fn(*const u32, *mut u32),
    /// Expands 4-bit codes.
    pub expand: Expand,
    /// Kernels that multiply 4-bit codes without expanding them first, indexed by their number of rows − 1.
    #[cfg(target_arch = "x86_64")]
    pub codes: &'static [few::Kernel],
}

/// Tile kernels with all columns, indexed by their number of rows − 1.
#[derive(Clone, Copy)]
pub(in super::super) struct Kernels {
    pub whole: &'static [Kernel],
    /// Tile kernels with half the columns, for narrow edges.
    pub half: &'static [Kernel],
}

pub(in super::super) type Kernel = unsafe fn(&Tile);

/// The tile kernels of an instruction set, for packs of f32, and of bf16 if it has no instructions for products of bf16.
pub(in super::super) fn tile_kernels(isa: Isa) -> &'static TileKernels {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => &x86::AVX512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => &x86::AVX2,
        _ => &PORTABLE,
    }
}

/// Defines tile kernels of 1, 2, … rows, with two vectors and with one.
macro_rules! kernels {
    ($tile:ident, $bf16:literal, $($rows:literal)*) => {
        Kernels { whole: &[$($tile::<$rows, 2, $bf16>,)*], half: &[$($tile::<$rows, 1, $bf16>,)*] }
    };
}

const PORTABLE: TileKernels = TileKernels {
    rows: 4,
    columns: 16,
    f32: kernels!(tile_portable, false, 1 2 3 4),
    bf16: kernels!(tile_portable, true, 1 2 3 4),
    transpose_f32,
    transpose_bf16,
    expand: EXPAND_PORTABLE,
    #[cfg(target_arch = "x86_64")]
    codes: &[],
};

unsafe fn tile_portable<const MR: usize, const NV: usize, const BF16: bool>(tile: &Tile) {
    unsafe { multiply::<Portable, MR, NV, BF16>(tile) }
}

#[cfg(target_arch = "x86_64")]
pub(in super::super) use x86::transpose as transpose_words;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::super::pack::{EXPAND_AVX2, EXPAND_AVX512};
    use super::super::super::simd::{Avx2, Avx512};
    use super::*;

    pub(super) const AVX2: TileKernels = TileKernels {
        rows: 6,
        columns: 16,
        f32: kernels!(tile_avx2, false, 1 2 3 4 5 6),
        bf16: kernels!(tile_avx2, true, 1 2 3 4 5 6),
        transpose_f32,
        transpose_bf16,
        expand: EXPAND_AVX2,
        codes: few::AVX2,
    };

    #[target_feature(enable = "avx2,fma")]
    unsafe fn tile_avx2<const MR: usize, const NV: usize, const BF16: bool>(tile: &Tile) {
        unsafe { multiply::<Avx2, MR, NV, BF16>(tile) }
    }

    pub(super) const AVX512: TileKernels = TileKernels {
        rows: 12,
        columns: 32,
        f32: kernels!(tile_avx512, false, 1 2 3 4 5 6 7 8 9 10 11 12),
        bf16: kernels!(tile_avx512, true, 1 2 3 4 5 6 7 8 9 10 11 12),
        transpose_f32: transpose_f32_avx512,
        transpose_bf16: transpose_bf16_avx512,
        expand: EXPAND_AVX512,
        codes: few::AVX512,
    };

    #[target_feature(enable = "avx512f")]
    unsafe fn tile_avx512<const MR: usize, const NV: usize, const BF16: bool>(tile: &Tile) {
        unsafe { multiply::<Avx512, MR, NV, BF16>(tile) }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn transpose_f32_avx512(words: *const u32, inputs: usize, out: *mut f32) {
        unsafe {
            for (half, first) in [(0, 0), (0, 16), (1, 0), (1, 16)] {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (row, index) in rows.iter_mut().zip(first..inputs) {
                    *row = _mm512_loadu_si512(words.add(index * PANEL + half * 16).cast());
                }
                for (output, row) in transpose(rows).into_iter().enumerate() {
                    _mm512_storeu_si512(out.add((half * 16 + output) * PANEL + first).cast(), row);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn transpose_bf16_avx512(words: *const u32, out: *mut u32) {
        unsafe {
            let low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
            let high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            for half in 0..2 {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (pair, row) in rows.iter_mut().enumerate() {
                    *row = _mm512_loadu_si512(words.add(pair * PANEL + half * 16).cast());
                }
                for (pair, [a, b]) in transpose(rows).as_chunks().0.iter().enumerate() {
                    // The two bf16 inputs of one output are a pair: combine the even ones of two outputs,
                    // and the odd ones.
                    let even = _mm512_or_si512(_mm512_andnot_si512(upper, *a), _mm512_slli_epi32::<16>(*b));
                    let odd = _mm512_or_si512(_mm512_srli_epi32::<16>(*a), _mm512_and_si512(upper, *b));
                    let out = out.add((half * 8 + pair) * PANEL);
                    _mm512_storeu_si512(out.cast(), _mm512_permutex2var_epi32(even, low, odd));
                    _mm512_storeu_si512(out.add(16).cast(), _mm512_permutex2var_epi32(even, high, odd));
                }
            }
        }
    }

    /// Transposes 16 × 16 words in registers.
    #[inline(always)]
    pub(in super::super::super) unsafe fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
        unsafe {
            let mut a = r;
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
                a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
            }
            // b[4·i + j] holds column j of each group of four columns, rows 4·i …
            let mut b = a;
            for i in 0..4 {
                let (p, q, r, s) = (a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
                b[4 * i] = _mm512_unpacklo_epi64(p, r);
                b[4 * i + 1] = _mm512_unpackhi_epi64(p, r);
                b[4 * i + 2] = _mm512_unpacklo_epi64(q, s);
                b[4 * i + 3] = _mm512_unpackhi_epi64(q, s);
            }
            let mut out = b;
            for j in 0..4 {
                let (p, q) =
                    (_mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]), _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j]));
                out[j] = _mm512_shuffle_i32x4::<0x88>(p, q);
                out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(p, q);
                let (p, q) =
                    (_mm512_shuffle_i32x4::<0xdd>(b[j], b[4 + j]), _mm512_shuffle_i32x4::<0xdd>(b[8 + j], b[12 + j]));
                out[4 + j] = _mm512_shuffle_i32x4::<0x88>(p, q);
                out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(p, q);
            }
            out
        }
    }
}

unsafe fn transpose_f32(words: *const u32, inputs: usize, out: *mut f32) {
    for input in 0..PANEL {
        for output in 0..PANEL {
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe {
                let word = if input < inputs { *words.add(input * PANEL + output) } else { 0 };
                *out.add(output * PANEL + input) = f32::from_bits(word);
            }
        }
    }
}

unsafe fn transpose_bf16(words: *const u32, out: *mut u32) {
    for pair in 0..PANEL / 2 {
        for half in 0..PANEL / 2 {
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe {
                let (a, b) = (*words.add(pair * PANEL + 2 * half), *words.add(pair * PANEL + 2 * half + 1));
                let out = out.add(half * PANEL + 2 * pair);
                *out = a & 0xffff | b << 16;
                *out.add(1) = a >> 16 | b & 0xffff_0000;
            }
        }
    }
}

/// Prefetches a cache line.
#[inline(always)]
pub(in super::super) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // Safety: a prefetch has no effect on memory; SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Fetches a cache line into the second-level cache.
#[cfg(target_arch = "x86_64")]
pub(in super::super) fn prefetch_further<T>(at: *const T) {
    // Safety: a prefetch has no effect on memory; SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
}

/// Number of words ahead of the current ones at which weights are prefetched.
pub(in super::super) const AHEAD: usize = 768;

#[inline(always)]
unsafe fn multiply<S: Simd, const MR: usize, const NV: usize, const BF16: bool>(tile: &Tile) {
    unsafe {
        let mut acc = [[S::zero(); NV]; MR];
        for (m, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(tile.from.add(m * tile.from_stride + v * S::LANES));
            }
        }
        for m in 0..MR {
            let next = tile.next.wrapping_add(m * tile.y_stride);
            prefetch(next);
            prefetch(next.wrapping_add(NV * S::LANES - 1));
        }
        let (mut x, mut w) = (tile.x, tile.w);
        if BF16 {
            let mut fetch = tile.fetch;
            let second = tile.fetch_step - LINE;
            for _ in 0..tile.depth.div_ceil(2) {
                prefetch(fetch);
                prefetch(fetch.wrapping_add(second));
                fetch = fetch.wrapping_add(tile.fetch_step);
                // The odd values of a pair are loaded again instead of being kept, which saves a register.
                let mut weights = [S::zero(); NV];
                for (v, weight) in weights.iter_mut().enumerate() {
                    *weight = S::load_pairs(w.add(v * S::LANES)).0;
                }
                step::<S, MR, NV>(&mut acc, x, &weights);
                for (v, weight) in weights.iter_mut().enumerate() {
                    *weight = S::load_pairs(w.add(v * S::LANES)).1;
                }
                step::<S, MR, NV>(&mut acc, x.add(1), &weights);
                (x, w) = (x.add(2), w.add(PANEL));
            }
        } else {
            for _ in 0..tile.depth {
                let mut weights = [S::zero(); NV];
                for (v, weight) in weights.iter_mut().enumerate() {
                    prefetch(w.wrapping_add(AHEAD + v * S::LANES));
                    *weight = S::load(w.add(v * S::LANES).cast());
                }
                step::<S, MR, NV>(&mut acc, x, &weights);
                (x, w) = (x.add(1), w.add(PANEL));
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                S::store(tile.y.add(m * tile.y_stride + v * S::LANES), *acc);
            }
        }
    }
}

#[inline(always)]
unsafe fn step<S: Simd, const MR: usize, const NV: usize>(
    acc: &mut [[S::V; NV]; MR],
    x: *const f32,
    weights: &[S::V; NV],
) {
    unsafe {
        for (m, acc) in acc.iter_mut().enumerate() {
            let x = S::splat(*x.add(m * INPUT_STRIDE));
            for (acc, weight) in acc.iter_mut().zip(weights) {
                *acc = S::fma(x, *weight, *acc);
            }
        }
    }
}
