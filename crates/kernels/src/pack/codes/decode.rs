//! Values of 4-bit codes in vector registers with AVX-512, one output per lane, rounded to bf16 and kept as f32: to be stored, or
//! multiplied at once.

use std::arch::x86_64::*;

use super::super::{LANES, PANEL};
use super::expand::{CodeBlock, Expand};
use super::{GROUP, GROUP_LINES};

/// Number of words ahead of the current ones at which codes are prefetched.
pub(super) const AHEAD: usize = 1024;

pub(in super::super::super) const EXPAND_AVX512: Expand = Expand { to_bf16: to_bf16_avx512, to_f32: to_f32_avx512 };

/// Takes the values of codes.
// A trait and not a closure: only functions can be forced inline, and without that, these would lack the instructions.
pub(in super::super::super) trait Take {
    /// Takes the values of a pair of inputs for half a panel of outputs, with the number of the group, of the half, and of the
    /// pair in the group.
    ///
    /// # Safety
    /// The machine has AVX-512.
    unsafe fn take(&mut self, group: usize, half: usize, pair: usize, values: [__m512; 2]);
}

/// Passes all values of a block to `to`.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
pub(in super::super::super) unsafe fn each_pair(block: &CodeBlock<'_>, to: &mut impl Take) {
    unsafe {
        match block.has_ties {
            true => each_group::<true>(block, to),
            false => each_group::<false>(block, to),
        }
    }
}

#[inline(always)]
unsafe fn each_group<const TIES: bool>(block: &CodeBlock<'_>, to: &mut impl Take) {
    unsafe {
        let table = _mm512_loadu_ps(block.table.as_ptr());
        let scales = [_mm512_loadu_ps(block.scales.as_ptr()), _mm512_loadu_ps(block.scales.as_ptr().add(LANES))];
        for (group, lines) in block.lines.as_chunks::<GROUP_LINES>().0.iter().enumerate() {
            let words: *const u32 = lines.as_ptr().cast();
            for line in lines {
                // A prefetch has no effect on memory, whatever the address.
                _mm_prefetch::<_MM_HINT_T0>(line.0.as_ptr().wrapping_add(AHEAD).cast());
            }
            let mut codes = [of_half(words), of_half(words.add(2 * LANES))];
            for pair in 0..GROUP / 2 {
                for half in 0..2 {
                    let mut values = [_mm512_setzero_ps(); 2];
                    for parity in 0..2 {
                        // The permutation reads only the lowest four bits of each index.
                        let of_codes = _mm512_permutexvar_ps(codes[half][parity], table);
                        let value = _mm512_mul_ps(of_codes, scales[half]);
                        values[parity] = rounded::<TIES>(value);
                        codes[half][parity] = _mm512_srli_epi32::<4>(codes[half][parity]);
                    }
                    to.take(group, half, pair, values);
                }
            }
        }
    }
}

/// The words of 16 outputs: the codes of their even inputs, and of their odd ones.
#[inline(always)]
unsafe fn of_half(words: *const u32) -> [__m512i; 2] {
    unsafe {
        let even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        let odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
        let (low, high) = (_mm512_loadu_si512(words.cast()), _mm512_loadu_si512(words.add(LANES).cast()));
        [_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high)]
    }
}

/// Rounds to the nearest bf16, ties to even. Unless a tie rounds toward 0 (`TIES`), adding half of the last place is enough.
#[inline(always)]
unsafe fn rounded<const TIES: bool>(value: __m512) -> __m512 {
    unsafe {
        let bits = _mm512_castps_si512(value);
        let nearest = if TIES {
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)))
        } else {
            _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000))
        };
        _mm512_castsi512_ps(_mm512_and_si512(nearest, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
    }
}

/// Writes values as a pack of bf16 holds them, or of f32.
struct Write<const BF16: bool>(*mut u32);

impl<const BF16: bool> Take for Write<BF16> {
    #[inline(always)]
    unsafe fn take(&mut self, group: usize, half: usize, pair: usize, [even, odd]: [__m512; 2]) {
        let (pair, output) = (group * GROUP / 2 + pair, half * LANES);
        unsafe {
            if BF16 {
                let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(even));
                let pairs = _mm512_or_si512(low, _mm512_castps_si512(odd));
                return _mm512_storeu_si512(self.0.add(pair * PANEL + output).cast(), pairs);
            }
            _mm512_storeu_ps(self.0.add(2 * pair * PANEL + output).cast(), even);
            _mm512_storeu_ps(self.0.add((2 * pair + 1) * PANEL + output).cast(), odd);
        }
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn to_bf16_avx512(block: &CodeBlock<'_>, out: *mut u32) {
    unsafe { each_pair(block, &mut Write::<true>(out)) }
}

#[target_feature(enable = "avx512f")]
pub(super) unsafe fn to_f32_avx512(block: &CodeBlock<'_>, out: *mut u32) {
    unsafe { each_pair(block, &mut Write::<false>(out)) }
}
