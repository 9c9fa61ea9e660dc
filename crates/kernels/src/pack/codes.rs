//! Weights in 4-bit codes, in the panels of a packed weight. A product expands a block of a panel into the cache and multiplies
//! from there, or for a few rows multiplies each value as soon as it is found. Its bits are those of the same weight packed as
//! values.
//!
//! Codes lie as `[panel][16 inputs][4]` lines of 16 words. Line 2·h + p of a group of inputs has outputs 16·h + 8·p to
//! 16·h + 8·p + 7: word 2·o + i has the eight codes of output o for the inputs i, i + 2, …, the first one in the lowest bits.
//! Two neighboring words thus become one pair of bf16.

#[cfg(target_arch = "x86_64")]
mod decode;
mod expand;
#[cfg(target_arch = "x86_64")]
mod lookup;

use std::ops::Range;

use super::{LANES, Line, PANEL, PackDtype, zeros_in_huge_pages};
use crate::four_bit::{FourBit, Rounding, Scales};
use crate::threads::{Shared, Threads};
#[cfg(target_arch = "x86_64")]
pub(in super::super) use decode::{EXPAND_AVX512, Take, each_pair};
pub(in super::super) use expand::{CodeBlock, EXPAND_PORTABLE, Expand};
#[cfg(target_arch = "x86_64")]
pub(in super::super) use expand::{EXPAND_AVX512_BF16, each_line};
#[cfg(target_arch = "x86_64")]
pub(in super::super) use lookup::{EXPAND_AVX2, Values, widened};

/// Number of inputs in a group.
const GROUP: usize = 16;
/// Number of lines of a group of inputs in a panel.
const GROUP_LINES: usize = 4;

/// The 4-bit codes of a weight.
#[derive(Clone, Debug)]
pub(super) struct Codes {
    lines: Vec<Line>,
    /// Number of lines in a panel.
    panel_lines: usize,
    /// Matrices whose outputs follow each other, each from a whole panel on.
    parts: Vec<Part>,
}

/// The tables and scales of one matrix.
#[derive(Clone, Debug)]
struct Part {
    panels: Range<usize>,
    table: [f32; 16],
    rounding: Rounding,
    /// Number of inputs that share a scale.
    block: usize,
    /// Number of scales of an output.
    blocks: usize,
    /// Whether no value is subnormal, so that instructions that replace such values by 0 can be used.
    is_normal: bool,
    scales: PanelScales,
    /// Which `[panel][block of inputs]` have a value halfway between two bf16 that rounds toward 0.
    ties: Vec<bool>,
}

/// The codes of a panel for a range of inputs (whole groups of 16).
#[cfg(target_arch = "x86_64")]
pub(in super::super) struct CodeRun<'c> {
    codes: &'c Codes,
    part: &'c Part,
    panel: usize,
    inputs: Range<usize>,
}

#[cfg(target_arch = "x86_64")]
impl CodeRun<'_> {
    /// Number of inputs in a group.
    pub const GROUP: usize = GROUP;

    /// The blocks with equal scales, in order of their inputs.
    #[inline(always)]
    pub fn blocks(&self) -> Blocks<'_> {
        let mut blocks = Blocks {
            run: self,
            inputs: self.inputs.clone(),
            scales: [[0.0; PANEL]; 2],
            slot: 0,
            outer: Outer::default(),
        };
        blocks.find_scales(self.inputs.start, 0);
        blocks
    }
}

/// The blocks of a run with equal scales. The scales are found one block ahead: a vector load that directly follows the stores
/// of its values would wait until they are in the cache.
#[cfg(target_arch = "x86_64")]
pub(in super::super) struct Blocks<'r> {
    run: &'r CodeRun<'r>,
    /// The inputs of the next block and of those after it.
    inputs: Range<usize>,
    /// The scales of a block and of the one before or after it.
    scales: [[f32; PANEL]; 2],
    /// The index in `scales` of the next block.
    slot: usize,
    outer: Outer,
}

#[cfg(target_arch = "x86_64")]
impl Blocks<'_> {
    /// Returns the next block.
    #[inline(always)]
    pub fn take_next(&mut self) -> Option<CodeBlock<'_>> {
        if self.inputs.is_empty() {
            return None;
        }
        let CodeRun { codes, part, panel, .. } = *self.run;
        let (inputs, slot) = (self.inputs.clone(), self.slot);
        self.inputs.start = ((inputs.start / part.block + 1) * part.block).min(inputs.end);
        self.slot = 1 - slot;
        self.find_scales(self.inputs.start, self.slot);
        Some(codes.first_block(part, panel, &inputs, &self.scales[slot]))
    }

    /// Finds the scales of the block that begins with an input, if the run has this input.
    fn find_scales(&mut self, input: usize, slot: usize) {
        let CodeRun { part, panel, .. } = self.run;
        if input < self.inputs.end {
            part.scales_of(*panel, input / part.block, &mut self.outer, &mut self.scales[slot]);
        }
    }
}

/// The scales of the scales of a panel's outputs, for a range of blocks of inputs in which they are the same.
#[derive(Default)]
struct Outer {
    scales: [f32; PANEL],
    blocks: Range<usize>,
}

/// The scales of the blocks as `[panel][block of inputs][32]`.
#[derive(Clone, Debug)]
enum PanelScales {
    Plain(Vec<f32>),
    Nested {
        codes: Vec<u8>,
        table: Box<[f32; 256]>,
        scales: Vec<f32>,
        /// Binary logarithm of the number of codes, in order of the matrix, that share a scale.
        block_log2: u32,
        offset: f32,
    },
}

impl Codes {
    /// Packs matrices whose outputs follow each other; None if their layout does not allow it: then they must be expanded.
    pub(super) fn new(threads: &Threads, matrices: &[FourBit], k: usize) -> Option<Codes> {
        let last = matrices.len().checked_sub(1)?;
        let fits = |index: usize| {
            let matrix = &matrices[index];
            let n = matrix.len.checked_div(k)?;
            let is_whole = n.is_multiple_of(PANEL) || index == last;
            let blocks = matrix.block.is_multiple_of(PANEL) && k.is_multiple_of(matrix.block);
            // A shift finds the scale of a scale; a division would take longer than all else.
            let is_shift = match &matrix.scales {
                Scales::Nested { block, .. } => block.is_power_of_two(),
                Scales::Plain(_) => true,
            };
            let zero = matrix.table.iter().position(|value| *value == 0.0)?;
            (n > 0 && is_whole && blocks && is_shift).then_some((matrix, n, zero as u32))
        };
        let matrices: Vec<(&FourBit, usize, u32)> = (0..matrices.len()).map(fits).collect::<Option<_>>()?;
        let panels: usize = matrices.iter().map(|(_, n, _)| n.div_ceil(PANEL)).sum();
        let panel_lines = k / GROUP * GROUP_LINES;
        let mut codes = Codes { lines: zeros_in_huge_pages(panels * panel_lines), panel_lines, parts: Vec::new() };
        let mut first = 0;
        for (matrix, n, zero) in matrices {
            let panels = first..first + n.div_ceil(PANEL);
            let lines = &mut codes.lines[panels.start * panel_lines..panels.end * panel_lines];
            pack(threads, lines, matrix, (n, k), zero);
            codes.parts.push(Part::new(threads, panels.clone(), matrix, n, k));
            first = panels.end;
        }
        Some(codes)
    }

    /// Memory of codes, scales and tables in bytes.
    pub(super) fn size_bytes(&self) -> usize {
        let of_part = |part: &Part| {
            let scales = match &part.scales {
                PanelScales::Plain(scales) => size_of_val(scales.as_slice()),
                PanelScales::Nested { codes, scales, .. } => {
                    codes.len() + size_of_val(scales.as_slice()) + size_of::<[f32; 256]>()
                }
            };
            scales + part.ties.len()
        };
        self.lines.len() * size_of::<Line>() + self.parts.iter().map(of_part).sum::<usize>()
    }

    /// Writes the words of a range of inputs (whole groups of 32) of a panel, as a pack of this dtype holds them.
    ///
    /// # Safety
    /// The machine supports the instructions of `expand`, and `out` has room.
    pub(super) unsafe fn expand(
        &self,
        expand: &Expand,
        panel: usize,
        inputs: Range<usize>,
        dtype: PackDtype,
        out: *mut u32,
    ) {
        let Some(part) = self.part(panel) else { return };
        let words_of_group = match dtype {
            PackDtype::F32 => GROUP * PANEL,
            PackDtype::Bf16 => GROUP * PANEL / 2,
        };
        let write = match dtype {
            PackDtype::Bf16 if part.is_exact() => expand.to_bf16,
            PackDtype::Bf16 => expand::to_bf16_plain,
            PackDtype::F32 if part.rounding == Rounding::Bf16 => expand.to_f32,
            PackDtype::F32 => expand::to_f32_plain,
        };
        // Without `Blocks`: for the few blocks that are expanded at a time, finding scales ahead costs more than it saves.
        let (mut outer, mut scales) = (Outer::default(), [0.0; PANEL]);
        let (mut inputs, mut groups) = (inputs, 0);
        while !inputs.is_empty() {
            part.scales_of(panel, inputs.start / part.block, &mut outer, &mut scales);
            let block = self.first_block(part, panel, &inputs, &scales);
            // Safety: the caller guarantees the instructions and the room.
            unsafe { write(&block, out.add(groups * words_of_group)) };
            groups += block.lines.len() / GROUP_LINES;
            inputs.start += block.lines.len() / GROUP_LINES * GROUP;
        }
    }

    /// The codes of a panel for a range of inputs, whole groups of 16, if instructions that convert f32 to bf16 give their values.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn run(&self, panel: usize, inputs: Range<usize>) -> Option<CodeRun<'_>> {
        let part = self.part(panel).filter(|part| part.is_exact())?;
        Some(CodeRun { codes: self, part, panel, inputs })
    }

    fn part(&self, panel: usize) -> Option<&Part> {
        self.parts.iter().find(|part| part.panels.contains(&panel))
    }

    /// The first block with equal scales, these, of a panel's inputs.
    #[inline(always)]
    fn first_block<'b>(
        &'b self,
        part: &'b Part,
        panel: usize,
        inputs: &Range<usize>,
        scales: &'b [f32; PANEL],
    ) -> CodeBlock<'b> {
        let block = inputs.start / part.block;
        let groups = (((block + 1) * part.block).min(inputs.end) - inputs.start) / GROUP;
        let at = panel * self.panel_lines + inputs.start / GROUP * GROUP_LINES;
        let lines = &self.lines[at..at + groups * GROUP_LINES];
        let has_ties = part.ties[(panel - part.panels.start) * part.blocks + block];
        CodeBlock { lines, scales, table: &part.table, rounding: part.rounding, has_ties }
    }

    /// Address of the codes of a panel from an input on.
    pub(super) fn at(&self, panel: usize, input: usize) -> *const u32 {
        let line = panel * self.panel_lines + input / GROUP * GROUP_LINES;
        self.lines.as_ptr().wrapping_add(line).cast()
    }
}

impl Part {
    fn new(threads: &Threads, panels: Range<usize>, matrix: &FourBit, n: usize, k: usize) -> Part {
        let blocks = k / matrix.block;
        /// Reorders values of `[n][blocks]` to `[panel][block][32]`.
        fn by_panel<T: Copy + Default>(values: &[T], n: usize, blocks: usize) -> Vec<T> {
            let mut ordered = vec![T::default(); n.div_ceil(PANEL) * blocks * PANEL];
            for (output, row) in values.chunks_exact(blocks).enumerate() {
                for (block, value) in row.iter().enumerate() {
                    ordered[(output / PANEL * blocks + block) * PANEL + output % PANEL] = *value;
                }
            }
            ordered
        }
        let smallest =
            matrix.table.iter().filter(|value| **value != 0.0).fold(f32::MAX, |least, value| least.min(value.abs()));
        let is_normal = (0..matrix.scales.len()).all(|index| {
            let scale = matrix.scales.at(index).abs();
            scale == 0.0 || smallest * scale >= 2.0 * f32::MIN_POSITIVE
        });
        let scales = match &matrix.scales {
            Scales::Plain(scales) => PanelScales::Plain(by_panel(scales, n, blocks)),
            Scales::Nested { codes, table, scales, block, offset } => PanelScales::Nested {
                codes: by_panel(codes, n, blocks),
                table: table.clone(),
                scales: scales.clone(),
                block_log2: block.trailing_zeros(),
                offset: *offset,
            },
        };
        let mut part = Part {
            ties: Vec::new(),
            panels,
            table: matrix.table,
            rounding: matrix.rounding,
            block: matrix.block,
            blocks,
            is_normal,
            scales,
        };
        part.ties = part.find_ties(threads);
        part
    }

    /// Returns which blocks of all panels have ties.
    fn find_ties(&self, threads: &Threads) -> Vec<bool> {
        let mut ties = vec![false; self.panels.len() * self.blocks];
        let all = Shared::new(&mut ties);
        threads.split(self.panels.len(), |panels| {
            for panel in panels {
                let (mut outer, mut scales) = (Outer::default(), [0.0; PANEL]);
                // Safety: each thread writes other panels.
                let ties = unsafe { all.part(panel * self.blocks..(panel + 1) * self.blocks) };
                for (block, has_ties) in ties.iter_mut().enumerate() {
                    self.scales_of(self.panels.start + panel, block, &mut outer, &mut scales);
                    // Has no branch, so that it can be vectorized.
                    *has_ties = self.table.iter().fold(false, |found, of_code| {
                        scales.iter().fold(found, |found, scale| found | is_tie_toward_0(of_code * scale))
                    });
                }
            }
        });
        ties
    }

    /// Whether the values have one rounding, to bf16, and instructions that replace subnormal values by 0 give them.
    fn is_exact(&self) -> bool {
        self.is_normal && self.rounding == Rounding::Bf16
    }

    /// Writes the scales of a panel's outputs for a block of inputs to `of_outputs`. `outer` is of the same panel, or empty.
    fn scales_of(&self, panel: usize, block: usize, outer: &mut Outer, of_outputs: &mut [f32; PANEL]) {
        let panel = panel - self.panels.start;
        let at = (panel * self.blocks + block) * PANEL;
        match &self.scales {
            PanelScales::Plain(scales) => of_outputs.copy_from_slice(&scales[at..at + PANEL]),
            PanelScales::Nested { codes, table, scales, block_log2, offset } => {
                if !outer.blocks.contains(&block) {
                    *outer = self.outer(panel, block, scales, *block_log2);
                }
                let codes = &codes[at..at + PANEL];
                for ((scale, code), outer) in of_outputs.iter_mut().zip(codes).zip(&outer.scales) {
                    let product = table[usize::from(*code)] * outer;
                    *scale = product + offset;
                }
            }
        }
    }

    /// Returns the scales of the scales of a panel (of this part) for a block, and the blocks after it that have the same ones.
    fn outer(&self, panel: usize, block: usize, scales: &[f32], block_log2: u32) -> Outer {
        let mut outer = Outer { scales: [0.0; PANEL], blocks: block..self.blocks };
        for (output, scale) in outer.scales.iter_mut().enumerate() {
            let code = (panel * PANEL + output) * self.blocks + block;
            let index = code >> block_log2;
            // Outputs beyond the matrix may have any scale, because their codes mean the value 0.
            *scale = scales[index.min(scales.len() - 1)];
            outer.blocks.end = outer.blocks.end.min(block + (((index + 1) << block_log2) - code));
        }
        outer
    }
}

/// Whether a value is halfway between two bf16, of which the one nearer to 0 is even: the only case in which adding half of a
/// bf16's last place, and cutting off the rest, is not the rounding to the nearest bf16, ties to even.
fn is_tie_toward_0(value: f32) -> bool {
    value.to_bits() & 0x1_ffff == 0x8000
}

/// Packs the codes of a matrix `[n, k]`; `zero` is the code of the value 0, for outputs beyond the matrix.
fn pack(threads: &Threads, lines: &mut [Line], matrix: &FourBit, (n, k): (usize, usize), zero: u32) {
    let panel_lines = k / GROUP * GROUP_LINES;
    let all = Shared::new(lines);
    threads.split(n.div_ceil(PANEL), |panels| {
        for panel in panels {
            // Safety: each thread writes other panels.
            let lines = unsafe { all.part(panel * panel_lines..(panel + 1) * panel_lines) };
            for (index, line) in lines.iter_mut().enumerate() {
                let (group, line_of_group) = (index / GROUP_LINES, index % GROUP_LINES);
                for (lane, word) in line.0.iter_mut().enumerate() {
                    let output = panel * PANEL + line_of_group * 8 + lane / 2;
                    let code = |step: usize| match output < n {
                        true => u32::from(matrix.code(output * k + group * GROUP + 2 * step + lane % 2)),
                        false => zero,
                    };
                    *word = (0..8).fold(0, |word, step| word | code(step) << (4 * step));
                }
            }
        }
    });
}

const _: () = assert!(LANES == GROUP && PANEL == 2 * LANES);
