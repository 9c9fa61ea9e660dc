//! Weight matrices in the order in which the kernels read them. The same packed matrix is used for decode,
//! forward and backward products.

mod codes;

use std::ops::Range;

use super::four_bit::FourBit;
use super::threads::{Shared, Threads};
use codes::Codes;
#[cfg(target_arch = "x86_64")]
pub(super) use codes::{
    CodeBlock, CodeRun, EXPAND_AVX2, EXPAND_AVX512, EXPAND_AVX512_BF16, Take, Values, each_line, each_pair, widened,
};
pub(super) use codes::{EXPAND_PORTABLE, Expand};

/// Number of outputs in a panel of a packed weight.
pub const PANEL: usize = 32;

/// Number of elements from one packed row of inputs to the next. It is a constant, so that one register addresses all
/// rows; an odd number of cache lines, so that rows are in different cache sets; and more than the depth of a block.
pub(super) const INPUT_STRIDE: usize = 1040;

/// Inputs of a bf16 pack are padded with zeros to a multiple of this, the depth of an AMX tile.
const DEPTH: usize = 32;

/// Number of words in a line: half a panel.
const LANES: usize = 16;

/// The format of a packed weight's values, for the kernels that multiply them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackDtype {
    /// Values unchanged, as f32.
    F32,
    /// Values rounded to bf16; sums stay in f32.
    Bf16,
}

/// One cache line of 32-bit words.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u32; LANES]);

/// Allocates default values (zeros), on Linux in huge pages where the kernel has them: decode steps read all weights in
/// order, and an address translation every 4 KiB would hold them up.
pub(super) fn zeros_in_huge_pages<T: Clone + Default>(count: usize) -> Vec<T> {
    let mut lines: Vec<T> = Vec::with_capacity(count);
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let start = lines.as_ptr().addr();
        let whole_pages = start.next_multiple_of(PAGE)..(start + count * size_of::<T>()) / PAGE * PAGE;
        if !whole_pages.is_empty() {
            // Safety: the range is inside the allocation, and the advice changes no value. An error means that there are no
            // huge pages.
            unsafe { libc::madvise(whole_pages.start as *mut libc::c_void, whole_pages.len(), libc::MADV_HUGEPAGE) };
        }
    }
    lines.resize(count, T::default());
    lines
}

/// A weight `[n, k]` (n outputs, k inputs), in panels of [`PANEL`] outputs, padded with zeros.
///
/// | dtype | layout |
/// |---|---|
/// | f32 | `[n / 32][k][32]` f32 |
/// | bf16 | `[n / 32][k / 2][32][2]` bf16, k padded to a multiple of 32: pairs of adjacent inputs, which is what AMX and AVX512-BF16 multiply (VNNI) |
///
/// A frozen weight may be stored in 4-bit codes instead. The kernels expand a block of a panel at a time to this layout.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    n: usize,
    k: usize,
    dtype: PackDtype,
    /// The values; empty if the weight is stored in codes.
    lines: Vec<Line>,
    codes: Option<Codes>,
}

impl PackedMatrix {
    /// Packs `weight`, row-major `[n, k]`, n = weight.len() / k.
    pub fn new(weight: &[f32], k: usize, dtype: PackDtype) -> PackedMatrix {
        let mut packed = PackedMatrix::zeros(weight.len().checked_div(k).unwrap_or(0), k, dtype);
        packed.set(weight);
        packed
    }

    /// Packs like [`PackedMatrix::new`], with all threads.
    pub fn new_on(threads: &Threads, weight: &[f32], k: usize, dtype: PackDtype) -> PackedMatrix {
        let mut packed = PackedMatrix::zeros(weight.len().checked_div(k).unwrap_or(0), k, dtype);
        packed.set_on(threads, weight);
        packed
    }

    /// Packs matrices of 4-bit codes whose outputs follow each other, all with `k` inputs. Products compute with the values
    /// in the format `dtype`. Returns None if the codes cannot be packed: if a block of weights with one scale is not a whole
    /// part of a row and a multiple of 32, or if a matrix other than the last does not have a multiple of 32 outputs. Then pack
    /// the values instead.
    pub fn of_codes(threads: &Threads, matrices: &[FourBit], k: usize, dtype: PackDtype) -> Option<PackedMatrix> {
        let codes = Codes::new(threads, matrices, k)?;
        let n = matrices.iter().map(|matrix| matrix.len / k).sum();
        Some(PackedMatrix { n, k, dtype, lines: Vec::new(), codes: Some(codes) })
    }

    /// Whether the weight is stored in 4-bit codes.
    pub fn is_in_codes(&self) -> bool {
        self.codes.is_some()
    }

    fn zeros(n: usize, k: usize, dtype: PackDtype) -> PackedMatrix {
        let mut packed = PackedMatrix { n, k, dtype, lines: vec![], codes: None };
        packed.lines = zeros_in_huge_pages(packed.panels() * packed.panel_words() / LANES);
        packed
    }

    /// Replaces the values of the packed weight; the shape must be the same.
    pub fn set(&mut self, weight: &[f32]) {
        assert!(weight.len() == self.n * self.k && self.codes.is_none(), "another shape, or 4-bit codes");
        if weight.is_empty() {
            return;
        }
        let (k, dtype, lines) = (self.k, self.dtype, self.panel_words() / LANES);
        for (panel, weight) in self.lines.chunks_exact_mut(lines).zip(weight.chunks(PANEL * k)) {
            pack_panel(panel, weight, k, dtype);
        }
    }

    /// Replaces the values like [`PackedMatrix::set`], with all threads.
    pub fn set_on(&mut self, threads: &Threads, weight: &[f32]) {
        assert!(weight.len() == self.n * self.k && self.codes.is_none(), "another shape, or 4-bit codes");
        if weight.is_empty() {
            return;
        }
        let (n, k, dtype, lines) = (self.n, self.k, self.dtype, self.panel_words() / LANES);
        let all = Shared::new(&mut self.lines);
        threads.split(n.div_ceil(PANEL), |panels| {
            for panel in panels {
                let weight = &weight[panel * PANEL * k..n.min((panel + 1) * PANEL) * k];
                // Safety: each thread writes other panels, which are `lines` long each.
                pack_panel(unsafe { all.part(panel * lines..(panel + 1) * lines) }, weight, k, dtype);
            }
        });
    }

    /// Number of outputs n of the weight.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of inputs k of the weight.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The storage format of the packed values.
    pub fn dtype(&self) -> PackDtype {
        self.dtype
    }

    /// Number of panels of [`PANEL`] outputs.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Memory of the packed weight in bytes.
    pub fn size_bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>() + self.codes.as_ref().map_or(0, Codes::size_bytes)
    }

    /// Unpacks one row (the weights of one output), with the values that the kernels use.
    pub fn row(&self, output: usize, out: &mut [f32]) {
        let (half, lane) = (output % PANEL / LANES, output % LANES);
        let lines = self.panel_words() / LANES;
        let panel = output / PANEL;
        let mut expanded = Vec::new();
        let lines = match &self.codes {
            None => &self.lines[panel * lines..][..lines],
            Some(codes) => {
                expanded.resize(lines, Line::default());
                // Safety: the portable function needs no instructions, and the buffer has room for a panel.
                unsafe {
                    codes.expand(&EXPAND_PORTABLE, panel, 0..self.k, self.dtype, expanded.as_mut_ptr().cast());
                }
                &expanded
            }
        };
        let lines = lines.chunks_exact(2).map(|pair| pair[half].0[lane]);
        let out = &mut out[..self.k];
        match self.dtype {
            PackDtype::F32 => out.iter_mut().zip(lines).for_each(|(out, word)| *out = f32::from_bits(word)),
            PackDtype::Bf16 => {
                for (out, word) in out.chunks_mut(2).zip(lines) {
                    out[0] = f32::from_bits(word << 16);
                    if let Some(out) = out.get_mut(1) {
                        *out = f32::from_bits(word & 0xffff_0000);
                    }
                }
            }
        }
    }

    /// Number of 32-bit words in a panel.
    pub(super) fn panel_words(&self) -> usize {
        PANEL
            * match self.dtype {
                PackDtype::F32 => self.k,
                PackDtype::Bf16 => self.k.div_ceil(DEPTH) * (DEPTH / 2),
            }
    }

    /// Address of a panel's first word. The weight is not stored in codes.
    pub(super) fn panel(&self, panel: usize) -> *const u32 {
        let lines = self.panel_words() / LANES;
        self.lines[panel * lines..(panel + 1) * lines].as_ptr().cast()
    }

    /// Address of a panel's words from the first of these inputs on. Codes of the inputs, whole groups of 32, are expanded into
    /// `room` first.
    ///
    /// # Safety
    /// The machine supports the instructions of `expand`.
    pub(super) unsafe fn words(
        &self,
        expand: &Expand,
        panel: usize,
        inputs: Range<usize>,
        room: &mut Vec<Line>,
    ) -> *const u32 {
        let words_of = |inputs: usize| match self.dtype {
            PackDtype::F32 => inputs * PANEL,
            PackDtype::Bf16 => inputs.div_ceil(2) * PANEL,
        };
        let Some(codes) = &self.codes else { return self.panel(panel).wrapping_add(words_of(inputs.start)) };
        debug_assert!(inputs.start.is_multiple_of(DEPTH), "codes are expanded in groups of 32 inputs");
        let inputs = inputs.start..inputs.end.next_multiple_of(DEPTH).min(self.k);
        let lines = words_of(inputs.len()) / LANES;
        if room.len() < lines {
            room.resize(lines, Line::default());
        }
        // Safety: the caller guarantees the instructions, and the buffer has room for the inputs.
        unsafe { codes.expand(expand, panel, inputs, self.dtype, room.as_mut_ptr().cast()) };
        room.as_ptr().cast()
    }

    /// Whether [`PackedMatrix::code_run`] gives a panel's codes.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn has_exact_codes(&self, panel: usize) -> bool {
        self.code_run(panel, 0..0).is_some()
    }

    /// The 4-bit codes of a panel for a range of inputs, see [`Codes::run`].
    #[cfg(target_arch = "x86_64")]
    pub(super) fn code_run(&self, panel: usize, inputs: Range<usize>) -> Option<CodeRun<'_>> {
        self.codes.as_ref()?.run(panel, inputs)
    }

    /// Address to prefetch: a panel's codes or words from an input on, which may lie beyond the weight.
    pub(super) fn ahead(&self, panel: usize, input: usize) -> *const u32 {
        match &self.codes {
            Some(codes) => codes.at(panel, input),
            None => {
                let words = panel * self.panel_words()
                    + match self.dtype {
                        PackDtype::F32 => input * PANEL,
                        PackDtype::Bf16 => input / 2 * PANEL,
                    };
                self.lines.as_ptr().cast::<u32>().wrapping_add(words)
            }
        }
    }
}

/// Packs a panel from up to 32 rows of `k` values, several inputs at a time so that their cache lines stay
/// in the first-level cache.
fn pack_panel(lines: &mut [Line], weight: &[f32], k: usize, dtype: PackDtype) {
    let values = match dtype {
        PackDtype::F32 => LANES,
        PackDtype::Bf16 => 2 * LANES,
    };
    for (block, lines) in lines.chunks_mut(2 * LANES).enumerate() {
        let inputs = (block * values).min(k)..((block + 1) * values).min(k);
        for half in 0..2 {
            // Collect words as `[column][word]`, then transpose them.
            let mut words = [[0u32; LANES]; LANES];
            for (words, row) in words.iter_mut().zip(weight.chunks_exact(k).skip(half * LANES)) {
                let row = &row[inputs.clone()];
                match dtype {
                    PackDtype::F32 => words.iter_mut().zip(row).for_each(|(word, value)| *word = value.to_bits()),
                    PackDtype::Bf16 => pairs(words, row),
                }
            }
            for (index, pair) in lines.chunks_exact_mut(2).enumerate() {
                for (lane, word) in pair[half].0.iter_mut().enumerate() {
                    *word = words[lane][index];
                }
            }
        }
    }
}

/// Writes values of a row as words of two bf16, as many as the row has.
fn pairs(words: &mut [u32; LANES], row: &[f32]) {
    let mut padded = [0.0; 2 * LANES];
    let whole = row.first_chunk().unwrap_or_else(|| {
        padded[..row.len()].copy_from_slice(row);
        &padded
    });
    for (word, pair) in words.iter_mut().zip(whole.as_chunks().0) {
        let [low, high]: [f32; 2] = *pair;
        *word = bf16_bits(low) | bf16_bits(high) << 16;
    }
}

/// Converts a value to the nearest bf16, ties to even. Has no branch, so that it can be vectorized.
fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // Keep a NaN a NaN: rounding its bits could give infinity.
    (if value.is_nan() { bits | 0x0040_0000 } else { nearest }) >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pack_gives_back_its_rows() {
        for dtype in [PackDtype::F32, PackDtype::Bf16] {
            for (n, k) in [(1, 1), (31, 33), (33, 31), (70, 64), (5, 129)] {
                // Multiples of this kind are exact in bf16.
                let weight: Vec<f32> = (0..n * k).map(|index| (index * 37 % 255) as f32 - 127.0).collect();
                let packed = PackedMatrix::new(&weight, k, dtype);
                let shared = PackedMatrix::new_on(&Threads::new(2), &weight, k, dtype);
                let mut row = vec![0.0; k];
                for (output, expected) in weight.chunks_exact(k).enumerate() {
                    packed.row(output, &mut row);
                    assert_eq!(row, expected);
                    shared.row(output, &mut row);
                    assert_eq!(row, expected);
                }
            }
        }
    }

    #[test]
    fn values_are_rounded_to_the_nearest_bf16() {
        let packed = PackedMatrix::new(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::INFINITY], 3, PackDtype::Bf16);
        let mut row = [0.0; 3];
        packed.row(0, &mut row);
        // The expected values show that ties are rounded to even.
        assert_eq!(row, [1.0, 1.015_625, f32::INFINITY]);
        for index in 0..1 << 16 {
            let value = f32::from_bits(index * 0x1_0003);
            assert_eq!(bf16_bits(value), u32::from(half::bf16::from_f32(value).to_bits()), "{value}");
        }
    }
}
