//! Expands 4-bit codes to the words of a packed weight, for each instruction set with the same bits:
//! `value = bf16(table[code] · scale)`, or without the rounding for other formats.

use super::super::{Line, PANEL};
use super::{GROUP, GROUP_LINES};
use crate::four_bit::Rounding;

/// The codes of a panel for some groups of inputs that share scales.
pub(in super::super::super) struct CodeBlock<'b> {
    /// `[groups][4]` lines.
    pub lines: &'b [Line],
    /// The scale of each output.
    pub scales: &'b [f32; PANEL],
    pub table: &'b [f32; 16],
    pub rounding: Rounding,
}

/// Functions of an instruction set that expand codes whose values are rounded to bf16: to pairs of bf16, and to f32. They write
/// the same words as [`to_bf16_plain`] and [`to_f32_plain`].
pub(in super::super::super) struct Expand {
    pub to_bf16: unsafe fn(&CodeBlock<'_>, *mut u32),
    pub to_f32: unsafe fn(&CodeBlock<'_>, *mut u32),
}

pub(in super::super::super) const EXPAND_PORTABLE: Expand = Expand { to_bf16: to_bf16_plain, to_f32: to_f32_plain };

/// Calls `f` with the group, the output, the input within the group, and the value of each code.
fn each_value(block: &CodeBlock<'_>, mut f: impl FnMut(usize, usize, usize, f32)) {
    for (group, lines) in block.lines.chunks_exact(GROUP_LINES).enumerate() {
        for (line, words) in lines.iter().enumerate() {
            for (lane, word) in words.0.iter().enumerate() {
                let output = line * 8 + lane / 2;
                for step in 0..8 {
                    let code = (word >> (4 * step)) & 15;
                    let value = block.table[code as usize] * block.scales[output];
                    f(group, output, 2 * step + lane % 2, block.rounding.round(value));
                }
            }
        }
    }
}

/// Writes `[inputs / 2][32][2]` bf16.
///
/// # Safety
/// `out` has room for them.
pub(super) unsafe fn to_bf16_plain(block: &CodeBlock<'_>, out: *mut u32) {
    each_value(block, |group, output, input, value| {
        let bits = super::super::bf16_bits(value);
        // Safety: the caller guarantees the room.
        unsafe {
            let word = out.add((group * GROUP / 2 + input / 2) * PANEL + output);
            *word = if input % 2 == 0 { bits } else { *word | bits << 16 };
        }
    });
}

/// Writes `[inputs][32]` f32.
///
/// # Safety
/// `out` has room for them.
pub(super) unsafe fn to_f32_plain(block: &CodeBlock<'_>, out: *mut u32) {
    each_value(block, |group, output, input, value| {
        // Safety: the caller guarantees the room.
        unsafe { *out.add((group * GROUP + input) * PANEL + output) = value.to_bits() };
    });
}

#[cfg(target_arch = "x86_64")]
pub(in super::super::super) use x86::{EXPAND_AVX2, EXPAND_AVX512, EXPAND_AVX512_BF16, each_line};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::super::LANES;
    use super::*;

    /// Number of words ahead of the current ones at which codes are prefetched.
    const AHEAD: usize = 1024;

    pub(in super::super::super::super) const EXPAND_AVX2: Expand =
        Expand { to_bf16: to_bf16_avx2, to_f32: to_f32_avx2 };
    pub(in super::super::super::super) const EXPAND_AVX512: Expand =
        Expand { to_bf16: to_bf16_avx512, to_f32: to_f32_avx512 };
    pub(in super::super::super::super) const EXPAND_AVX512_BF16: Expand =
        Expand { to_bf16: to_bf16_converting, to_f32: to_f32_avx512 };

    /// The scales of eight outputs, each twice.
    #[inline(always)]
    unsafe fn doubled(scales: &[f32]) -> __m512 {
        unsafe {
            let eight = _mm512_castps256_ps512(_mm256_loadu_ps(scales[..8].as_ptr()));
            _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), eight)
        }
    }

    /// Passes each line of 16 outputs and two inputs to `f`, with the number of the group, the half of the panel and the step in the
    /// group. `narrow` converts 2 × 16 values to bf16.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[inline(always)]
    pub(in super::super::super::super) unsafe fn each_line(
        block: &CodeBlock<'_>,
        narrow: impl Fn(__m512, __m512) -> __m512i,
        mut f: impl FnMut(usize, usize, usize, __m512i),
    ) {
        unsafe {
            let table = _mm512_loadu_ps(block.table.as_ptr());
            let scales: [__m512; 4] = std::array::from_fn(|line| doubled(&block.scales[line * 8..]));
            for (group, lines) in block.lines.as_chunks::<GROUP_LINES>().0.iter().enumerate() {
                let mut codes: [__m512i; 4] =
                    std::array::from_fn(|line| _mm512_load_si512(lines[line].0.as_ptr().cast()));
                for line in lines {
                    // A prefetch has no effect on memory, whatever the address.
                    _mm_prefetch::<_MM_HINT_T0>(line.0.as_ptr().wrapping_add(AHEAD).cast());
                }
                for step in 0..8 {
                    for half in 0..2 {
                        // The permutation reads only the lowest four bits of each index.
                        let of = |line: usize| _mm512_mul_ps(_mm512_permutexvar_ps(codes[line], table), scales[line]);
                        f(group, half, step, narrow(of(2 * half), of(2 * half + 1)));
                    }
                    codes = codes.map(|codes| _mm512_srli_epi32::<4>(codes));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn to_bf16_converting(block: &CodeBlock<'_>, out: *mut u32) {
        unsafe {
            expand_bf16(block, out, |low, high| {
                std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
            });
        }
    }

    /// Rounds to the nearest bf16, ties to even, in the upper half of each word. The values are finite.
    #[inline(always)]
    unsafe fn rounded(value: __m512) -> __m512i {
        unsafe {
            let bits = _mm512_castps_si512(value);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)))
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn to_bf16_avx512(block: &CodeBlock<'_>, out: *mut u32) {
        unsafe {
            expand_bf16(block, out, |low, high| {
                let narrow = |value| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded(value)));
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow(low)), narrow(high))
            });
        }
    }

    /// Writes a line of 16 outputs for each pair of inputs; `narrow` converts 2 × 16 values to bf16.
    #[inline(always)]
    unsafe fn expand_bf16(block: &CodeBlock<'_>, out: *mut u32, narrow: impl Fn(__m512, __m512) -> __m512i) {
        unsafe {
            each_line(block, narrow, |group, half, step, words| {
                _mm512_storeu_si512(out.add((group * GROUP / 2 + step) * PANEL + half * LANES).cast(), words);
            });
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn to_f32_avx512(block: &CodeBlock<'_>, out: *mut u32) {
        unsafe {
            let table = _mm512_loadu_ps(block.table.as_ptr());
            let scales: [__m512; 4] = std::array::from_fn(|line| doubled(&block.scales[line * 8..]));
            let even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
            let odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            for (group, lines) in block.lines.chunks_exact(GROUP_LINES).enumerate() {
                for half in 0..2 {
                    let mut low = _mm512_load_si512(lines[2 * half].0.as_ptr().cast());
                    let mut high = _mm512_load_si512(lines[2 * half + 1].0.as_ptr().cast());
                    for step in 0..8 {
                        let of = |codes, line: usize| {
                            let value = _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scales[line]);
                            _mm512_and_si512(rounded(value), upper)
                        };
                        let (a, b) = (of(low, 2 * half), of(high, 2 * half + 1));
                        let out = out.add((group * GROUP + 2 * step) * PANEL + half * LANES);
                        _mm512_storeu_si512(out.cast(), _mm512_permutex2var_epi32(a, even, b));
                        _mm512_storeu_si512(out.add(PANEL).cast(), _mm512_permutex2var_epi32(a, odd, b));
                        (low, high) = (_mm512_srli_epi32::<4>(low), _mm512_srli_epi32::<4>(high));
                    }
                }
            }
        }
    }

    /// The values of eight codes, times their scales, rounded to bf16 in the upper half of each word.
    #[inline(always)]
    unsafe fn eight_values(codes: __m256i, tables: [__m256; 2], scales: __m256) -> __m256i {
        unsafe {
            let (low, high) = (_mm256_permutevar8x32_ps(tables[0], codes), _mm256_permutevar8x32_ps(tables[1], codes));
            // The highest of the four bits selects the half of the table.
            let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
            let value = _mm256_mul_ps(_mm256_blendv_ps(low, high, is_high), scales);
            let bits = _mm256_castps_si256(value);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)))
        }
    }

    /// The two halves of the table, and the scales of four outputs each, each scale twice.
    #[inline(always)]
    unsafe fn prepared(block: &CodeBlock<'_>) -> ([__m256; 2], [__m256; 8]) {
        unsafe {
            let tables = [_mm256_loadu_ps(block.table.as_ptr()), _mm256_loadu_ps(block.table[8..].as_ptr())];
            let twice = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
            let four = |index: usize| _mm256_castps128_ps256(_mm_loadu_ps(block.scales[index * 4..][..4].as_ptr()));
            (tables, std::array::from_fn(|index| _mm256_permutevar8x32_ps(four(index), twice)))
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn to_bf16_avx2(block: &CodeBlock<'_>, out: *mut u32) {
        unsafe {
            let (tables, scales) = prepared(block);
            for (group, lines) in block.lines.chunks_exact(GROUP_LINES).enumerate() {
                for (line, words) in lines.iter().enumerate() {
                    let mut low = _mm256_load_si256(words.0.as_ptr().cast());
                    let mut high = _mm256_load_si256(words.0[8..].as_ptr().cast());
                    for step in 0..8 {
                        let of = |codes, half: usize| {
                            _mm256_srli_epi32::<16>(eight_values(codes, tables, scales[2 * line + half]))
                        };
                        // Packing works in each half of the vector: put the pairs back in order.
                        let pairs = _mm256_packus_epi32(of(low, 0), of(high, 1));
                        let pairs = _mm256_permute4x64_epi64::<0b1101_1000>(pairs);
                        _mm256_storeu_si256(out.add((group * GROUP / 2 + step) * PANEL + line * 8).cast(), pairs);
                        (low, high) = (_mm256_srli_epi32::<4>(low), _mm256_srli_epi32::<4>(high));
                    }
                }
            }
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn to_f32_avx2(block: &CodeBlock<'_>, out: *mut u32) {
        unsafe {
            let (tables, scales) = prepared(block);
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            // Brings the even words of a vector to its lower half.
            let evens_first = _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0);
            for (group, lines) in block.lines.chunks_exact(GROUP_LINES).enumerate() {
                for (line, words) in lines.iter().enumerate() {
                    let mut low = _mm256_load_si256(words.0.as_ptr().cast());
                    let mut high = _mm256_load_si256(words.0[8..].as_ptr().cast());
                    for step in 0..8 {
                        let of = |codes, half: usize| {
                            let values = _mm256_and_si256(eight_values(codes, tables, scales[2 * line + half]), upper);
                            _mm256_permutevar8x32_epi32(values, evens_first)
                        };
                        let (a, b) = (of(low, 0), of(high, 1));
                        let out = out.add((group * GROUP + 2 * step) * PANEL + line * 8);
                        _mm256_storeu_si256(out.cast(), _mm256_permute2x128_si256::<0x20>(a, b));
                        _mm256_storeu_si256(out.add(PANEL).cast(), _mm256_permute2x128_si256::<0x31>(a, b));
                        (low, high) = (_mm256_srli_epi32::<4>(low), _mm256_srli_epi32::<4>(high));
                    }
                }
            }
        }
    }
}
