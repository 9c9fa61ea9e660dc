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
    /// Whether a value is halfway between two bf16 and rounds toward 0. Without one, adding half of a bf16's last place and cutting
    /// off the rest rounds all values.
    pub has_ties: bool,
}

#[cfg(target_arch = "x86_64")]
impl CodeBlock<'_> {
    /// Number of inputs of the matrix.
    pub fn inputs(&self) -> usize {
        self.lines.len() / GROUP_LINES * GROUP
    }
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
pub(in super::super::super) use x86::{EXPAND_AVX512_BF16, each_line};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::super::LANES;
    use super::super::decode::{AHEAD, to_f32_avx512};
    use super::*;

    pub(in super::super::super::super) const EXPAND_AVX512_BF16: Expand =
        Expand { to_bf16: to_bf16_converting, to_f32: to_f32_avx512 };

    /// The scales of the eight outputs of each line, each twice.
    #[inline(always)]
    unsafe fn doubled(scales: &[f32; PANEL]) -> [__m512; GROUP_LINES] {
        unsafe {
            let first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
            let last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
            std::array::from_fn(|line| {
                let half = _mm512_loadu_ps(scales.as_ptr().add(line / 2 * LANES));
                _mm512_permutexvar_ps(if line % 2 == 0 { first } else { last }, half)
            })
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
            let scales = doubled(block.scales);
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

    /// Writes a line of 16 outputs for each pair of inputs.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn to_bf16_converting(block: &CodeBlock<'_>, out: *mut u32) {
        unsafe {
            let narrow = |low, high| std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            each_line(block, narrow, |group, half, step, words| {
                _mm512_storeu_si512(out.add((group * GROUP / 2 + step) * PANEL + half * LANES).cast(), words);
            });
        }
    }
}
