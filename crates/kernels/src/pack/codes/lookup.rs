//! Values of 4-bit codes with AVX2: the 16 rounded values of each output's block once, then all of its codes by looking up bytes.

use std::arch::x86_64::*;

use super::super::{LANES, PANEL};
use super::decode::AHEAD;
use super::expand::{CodeBlock, Expand};
use super::{GROUP, GROUP_LINES};

pub(in super::super::super) const EXPAND_AVX2: Expand = Expand { to_bf16: to_bf16_avx2, to_f32: to_f32_avx2 };

/// The 16 values of eight outputs. Entry i has those of output i in its lower half, and of output i + 4 in its upper half: the
/// lower bytes of the bf16, and the upper ones.
#[derive(Clone, Copy)]
pub(in super::super::super) struct Values([[__m256i; 2]; 4]);

impl Values {
    /// Room for the values of a block, line by line.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub fn room() -> [Values; GROUP_LINES] {
        [Values([[_mm256_setzero_si256(); 2]; 4]); GROUP_LINES]
    }

    /// Computes the values of a block's outputs and writes them over `all`.
    ///
    /// # Safety
    /// The machine has AVX2 and FMA.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn replace(all: &mut [Values; GROUP_LINES], block: &CodeBlock<'_>) {
        unsafe {
            match block.has_ties {
                true => Values::round::<true>(all, block),
                false => Values::round::<false>(all, block),
            }
        }
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn round<const TIES: bool>(all: &mut [Values; GROUP_LINES], block: &CodeBlock<'_>) {
        unsafe {
            let table = [0, 1, 2, 3].map(|first| codes_from(block.table, first));
            for (line, values) in all.iter_mut().enumerate() {
                let scales = _mm256_loadu_ps(block.scales[line * 8..].as_ptr());
                let of = |scale: __m256| {
                    let value = |index: usize| rounded::<TIES>(_mm256_mul_ps(table[index], scale));
                    // In each word two bf16, then the bytes of four: those of the codes c, c + 1, c + 2 and c + 3.
                    let two = |low, high| _mm256_blend_epi16::<0xaa>(_mm256_srli_epi32::<16>(low), high);
                    let (even, odd) = (two(value(0), value(2)), two(value(1), value(3)));
                    let bytes = _mm256_set1_epi16(0xff);
                    [
                        _mm256_or_si256(_mm256_and_si256(even, bytes), _mm256_slli_epi16::<8>(odd)),
                        _mm256_or_si256(_mm256_srli_epi16::<8>(even), _mm256_andnot_si256(bytes, odd)),
                    ]
                };
                values.0[0] = of(_mm256_permute_ps::<0x00>(scales));
                values.0[1] = of(_mm256_permute_ps::<0x55>(scales));
                values.0[2] = of(_mm256_permute_ps::<0xaa>(scales));
                values.0[3] = of(_mm256_permute_ps::<0xff>(scales));
            }
        }
    }

    /// Writes what [`Values::pairs`] gives, vectors `stride` apart.
    ///
    /// # Safety
    /// The same as for [`Values::pairs`], and `out` has room.
    // Not inlined: the compiler would mix several lines and run out of registers.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn store_pairs(&self, line: *const u32, out: *mut __m256i, stride: usize) {
        unsafe {
            for (pair, words) in self.pairs(line).into_iter().enumerate() {
                _mm256_storeu_si256(out.add(pair * stride), words);
            }
        }
    }

    /// The values of a line of codes, as pairs of bf16: one vector of the eight outputs for each pair of inputs.
    ///
    /// # Safety
    /// The machine has AVX2, and a line is readable.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn pairs(&self, line: *const u32) -> [__m256i; 8] {
        unsafe {
            // A prefetch has no effect on memory, whatever the address.
            _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD).cast());
            let [[a, b], [c, d]] = [codes_of::<false>(line), codes_of::<true>(line.add(4))];
            let values = [(0, a), (1, b), (2, c), (3, d)].map(|(index, codes)| {
                let [low, high]: [__m256i; 2] = self.0[index];
                let (low, high) = (_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
                [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)]
            });
            let [a, b] = [0, 1].map(|part| transposed(values.map(|halves| halves[part])));
            [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
        }
    }
}

/// Every fourth value of the table, in both halves.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn codes_from(table: &[f32; 16], first: usize) -> __m256 {
    let [a, b, c, d] = [table[first], table[first + 4], table[first + 8], table[first + 12]];
    _mm256_setr_ps(a, b, c, d, a, b, c, d)
}

/// The codes of four outputs, one per byte: outputs o and o + 4 from the first word on, and the next two. The pairs of inputs are in
/// the order that [`transposed`] needs for the outputs 0 and 1, or 2 and 3 (`LAST`).
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn codes_of<const LAST: bool>(words: *const u32) -> [__m256i; 2] {
    unsafe {
        let [low, high] = [0, 8].map(|at| _mm_loadu_si128(words.add(at).cast()));
        // Bytes of even inputs and of odd ones, in turns.
        let in_turns = match LAST {
            false => _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15),
            true => _mm_setr_epi8(1, 5, 0, 4, 3, 7, 2, 6, 9, 13, 8, 12, 11, 15, 10, 14),
        };
        let bytes = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
        let bytes = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(in_turns));
        let lowest = _mm256_set1_epi8(15);
        let (low, high) = (_mm256_and_si256(bytes, lowest), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), lowest));
        [_mm256_unpacklo_epi16(low, high), _mm256_unpackhi_epi16(high, low)]
    }
}

/// Transposes 4 × 4 words in each half, where word p of row r is that of the column p ^ r. In this order a column has its words at
/// different places, and most of the work is choosing words, which more of a processor's units can do than moving them.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transposed([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
    let (p, q) = (_mm256_blend_epi32::<0xaa>(a, b), _mm256_blend_epi32::<0xaa>(c, d));
    let (r, s) = (_mm256_blend_epi32::<0xaa>(b, a), _mm256_blend_epi32::<0xaa>(d, c));
    [
        _mm256_blend_epi32::<0xcc>(p, q),
        _mm256_shuffle_epi32::<0b10_11_00_01>(_mm256_blend_epi32::<0xcc>(r, s)),
        _mm256_shuffle_epi32::<0b01_00_11_10>(_mm256_blend_epi32::<0xcc>(q, p)),
        _mm256_shuffle_epi32::<0b00_01_10_11>(_mm256_blend_epi32::<0xcc>(s, r)),
    ]
}

/// Rounds to the nearest bf16, ties to even, as with AVX-512: see there. The lower half of each word is any.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn rounded<const TIES: bool>(value: __m256) -> __m256i {
    let bits = _mm256_castps_si256(value);
    if !TIES {
        return _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000));
    }
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)))
}

/// The two values of each pair, as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in super::super::super) fn widened(pairs: __m256i) -> [__m256; 2] {
    let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd)]
}

#[target_feature(enable = "avx2,fma")]
unsafe fn to_bf16_avx2(block: &CodeBlock<'_>, out: *mut u32) {
    unsafe {
        let mut values = Values::room();
        Values::replace(&mut values, block);
        for (line, values) in values.iter().enumerate() {
            for (group, lines) in block.lines.as_chunks::<GROUP_LINES>().0.iter().enumerate() {
                let out = out.add(group * GROUP / 2 * PANEL + line * 8);
                values.store_pairs(lines[line].0.as_ptr(), out.cast(), GROUP_LINES);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn to_f32_avx2(block: &CodeBlock<'_>, out: *mut u32) {
    unsafe {
        let mut values = Values::room();
        Values::replace(&mut values, block);
        for (line, values) in values.iter().enumerate() {
            for (group, lines) in block.lines.as_chunks::<GROUP_LINES>().0.iter().enumerate() {
                for (pair, words) in values.pairs(lines[line].0.as_ptr()).into_iter().enumerate() {
                    let out = out.add((group * GROUP + 2 * pair) * PANEL + line * 8);
                    let [even, odd] = widened(words);
                    _mm256_storeu_ps(out.cast(), even);
                    _mm256_storeu_ps(out.add(PANEL).cast(), odd);
                }
            }
        }
    }
}

const _: () = assert!(LANES == 16 && GROUP_LINES * 8 == PANEL);
