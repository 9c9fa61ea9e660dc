//! What AMX and AVX512-BF16 share, which both multiply pairs of bf16: packed inputs, transposed weights, and the walk over the
//! blocks of a product. Each has its own innermost loop ([`Multiply`]).
//!
//! Longer than other files: the walk uses all of these layouts.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::isa::Isa;
use super::super::pack::{EXPAND_AVX512, EXPAND_AVX512_BF16, Expand, Line, PANEL, PackDtype, PackedMatrix};
use super::super::threads::{Shared, Threads};
use super::product::{EXPANDED, Scratch, copy, pieces, room, transpose, transposed_words};
use super::tile::tile_kernels;
use super::{Job, Side, Start};

/// Number of rows of inputs in a tile.
pub(in super::super) const ROWS: usize = 16;
/// Number of steps of a dot product (values of the summed dimension) that a tile holds.
pub(in super::super) const STEPS: usize = 32;
/// Size of a tile in bytes.
pub(in super::super) const TILE_BYTES: usize = ROWS * STEPS * 2;

/// Inputs of a range of rows, packed for tiles: `[tile of 16 rows][block of 32 steps][16][32]` bf16, with zeros beyond
/// the rows and the sum.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Tiled {
    data: *const u8,
    /// Rows and steps of the summed dimension that the packed inputs cover.
    rows: (usize, usize),
    sum: (usize, usize),
    /// Number of blocks of 32 steps from one tile of rows to the next.
    blocks: usize,
}

// Safety: the caller of `share` keeps the packed inputs alive, and no thread writes to them meanwhile.
unsafe impl Send for Tiled {}
unsafe impl Sync for Tiled {}

impl Tiled {
    pub(in super::super) fn new(data: *const u8, rows: &Range<usize>, sum: &Range<usize>) -> Tiled {
        Tiled { data, rows: (rows.start, rows.end), sum: (sum.start, sum.end), blocks: sum.len().div_ceil(STEPS) }
    }

    /// Address of the packed inputs of a tile of rows, from a step of the summed dimension on.
    pub(in super::super) fn at(&self, row: usize, step: usize) -> *const u8 {
        let (tile, block) = ((row - self.rows.0) / ROWS, (step - self.sum.0) / STEPS);
        self.data.wrapping_add((tile * self.blocks + block) * TILE_BYTES)
    }

    /// Number of bytes from the packed inputs of one tile of rows to those of the next.
    pub(in super::super) fn tile_bytes(&self) -> usize {
        self.blocks * TILE_BYTES
    }

    /// Returns the packed inputs from a row on, which must be a whole number of tiles after the first; rows
    /// then count from it.
    pub fn starting_at(&self, row: usize) -> Tiled {
        Tiled { data: self.at(self.rows.0 + row, self.sum.0), rows: (0, self.rows.1 - self.rows.0 - row), ..*self }
    }

    /// Returns the packed inputs of a range of steps of the summed dimension, which must begin with a block; steps
    /// then count from 0.
    pub fn steps(&self, steps: &Range<usize>) -> Tiled {
        Tiled { data: self.at(self.rows.0, steps.start), sum: (0, steps.len()), ..*self }
    }
}

/// Number of rows up to which every thread packs the inputs of a product itself.
const FEW: usize = 64;
/// Maximum number of elements of inputs that are packed once for all threads.
const SHARED: usize = 4 << 20;

/// Whether the inputs of these products are packed once for all threads.
pub(in super::super) fn shares(jobs: &[Job<'_>], rows: usize) -> bool {
    shares_rows(rows) && jobs.iter().all(|job| job.weight.dtype() == PackDtype::Bf16 && !job.sum.is_empty())
}

/// Whether there are enough rows to pack their inputs once for all threads.
pub(in super::super) fn shares_rows(rows: usize) -> bool {
    rows > FEW
}

/// Number of rows whose inputs are packed together for all threads; at least the rows of a cell.
pub(in super::super) fn rows_shared(jobs: &[Job<'_>], cell: usize) -> usize {
    let steps: usize = jobs.iter().map(|job| job.sum.len()).sum();
    (SHARED / steps.max(1)).max(cell) / (2 * ROWS) * (2 * ROWS)
}

/// Packs the inputs of a product for a range of rows, with all threads.
pub(in super::super) fn share(threads: &Threads, job: &Job<'_>, rows: &Range<usize>, lines: &mut Vec<Line>) -> Tiled {
    let (tiles, blocks) = (rows.len().div_ceil(ROWS), job.sum.len().div_ceil(STEPS));
    let words = blocks * TILE_BYTES / 4;
    // Safety: `room` returns memory for `tiles * words` words.
    let out = Shared::new(unsafe { std::slice::from_raw_parts_mut(room(lines, tiles * words), tiles * words) });
    threads.split(tiles, |some| {
        let rows = rows.start + some.start * ROWS..(rows.start + some.end * ROWS).min(rows.end);
        // Safety: the machine has AVX-512, and each thread writes other tiles of the packed inputs.
        unsafe { pack(job, &rows, &job.sum, out.at(some.start * words).cast()) };
    });
    // Safety: index 0 is inside the buffer.
    let data = unsafe { out.at(0).cast_const().cast() };
    Tiled::new(data, rows, &job.sum)
}

/// A weight transposed for dX = dY·W, `[panel of inputs][block of 32 outputs][16][32][2]` bf16.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Transposed(*const u32);

// Safety: the caller of `transpose_all` keeps the transposed weight alive, and no thread writes to it meanwhile.
unsafe impl Send for Transposed {}
unsafe impl Sync for Transposed {}

impl Transposed {
    /// Address of a panel of inputs in the transposed weight, from an output on.
    pub(in super::super) fn at(&self, weight: &PackedMatrix, panel: usize, output: usize) -> *const u32 {
        let blocks = panel * weight.panels() + output / PANEL;
        self.0.wrapping_add(blocks * transposed_words(PackDtype::Bf16))
    }
}

/// Transposes a weight with all threads, for backward products of more rows than one cell has.
pub(in super::super) fn transpose_all(threads: &Threads, weight: &PackedMatrix, lines: &mut Vec<Line>) -> Transposed {
    let words = weight.panels() * transposed_words(PackDtype::Bf16);
    let panels = weight.k().div_ceil(PANEL);
    // Safety: `room` returns memory for `panels * words` words.
    let out = Shared::new(unsafe { std::slice::from_raw_parts_mut(room(lines, panels * words), panels * words) });
    threads.split(panels, |some| {
        for panel in some {
            // Safety: the machine has AVX-512, and each thread writes other panels of the transposed weight.
            unsafe {
                let kernels = tile_kernels(Isa::Avx512);
                transpose(kernels, expand_for_pairs(), weight, panel, &(0..weight.n()), out.at(panel * words));
            }
        }
    });
    // Safety: index 0 is inside the buffer.
    Transposed(unsafe { out.at(0).cast_const().cast() })
}

/// The functions that expand 4-bit codes on this machine, which has AVX-512.
fn expand_for_pairs() -> &'static Expand {
    match std::arch::is_x86_feature_detected!("avx512bf16") {
        true => &EXPAND_AVX512_BF16,
        false => &EXPAND_AVX512,
    }
}

/// An instruction that multiplies pairs of bf16: how its products are divided, and the product of one block.
pub(in super::super) trait Multiply {
    /// Maximum number of rows in a cell, the unit of work of a thread. Their packed inputs stay in the second-level cache while
    /// the weights are read.
    const ROWS_AT_ONCE: usize;
    /// The same, if the thread transposes weights itself: each transposed block is used for all of them.
    const ROWS_TRANSPOSING: usize;
    /// Maximum number of elements in the packed inputs of a cell.
    const INPUTS: usize;
    /// Number of steps in a block of weights. A block is multiplied with all rows of a cell before the next block is read.
    const DEEP: usize;
    /// Minimum number of steps that inputs are packed for at a time, even if they exceed [`Multiply::INPUTS`].
    const DEEPER: usize;

    /// Maximum number of steps in a block of weights for this many rows.
    fn steps_at_once(rows: usize) -> usize;

    /// How many of the rows, from the first on, have their outputs in a whole panel stored in place. The others are copied.
    fn rows_in_place(rows: usize) -> usize;

    /// Adds the products of a block to the sums.
    ///
    /// # Safety
    /// The machine has the instruction, and the pointers are valid for all rows and steps.
    unsafe fn multiply(block: &Block);

    /// Maximum number of rows that are multiplied with 4-bit codes as they are expanded, without storing them in between.
    const ROWS_OF_CODES: usize = 0;

    /// Adds the products of steps of a panel's 4-bit codes to the sums; `block.weights` is not used. Returns false, without having
    /// added any, if the codes must be expanded first.
    ///
    /// # Safety
    /// The same as for [`Multiply::multiply`], for up to [`Multiply::ROWS_OF_CODES`] rows.
    unsafe fn multiply_codes(_: &Block, _: &PackedMatrix, _: usize, _: Range<usize>) -> bool {
        false
    }

    /// Computes the products of one tile of rows in another way, if there is one. Returns whether there is.
    ///
    /// # Safety
    /// The same as for [`product`]; `sums` has room for two panels of one tile.
    unsafe fn multiply_few(_: &Parts<'_, '_>, _: &Range<usize>, _: Range<usize>, _: *mut f32) -> bool {
        false
    }
}

/// One or two products to add: each a job, its packed inputs, and its range of the summed dimension.
pub(in super::super) type Parts<'p, 'j> = [Option<(&'p Job<'j>, Tiled, Range<usize>)>; 2];

/// A block of a panel's weights, and the rows that are multiplied with it.
pub(in super::super) struct Block {
    /// Packed inputs in tiles of 16 rows, `inputs_stride` bytes apart. A tile is a sequence of blocks of 32 steps.
    pub inputs: *const u8,
    pub inputs_stride: usize,
    /// Packed weights of the panel, `[steps][16][32][2]` bf16.
    pub weights: *const u8,
    /// Number of blocks of 32 steps of the summed dimension.
    pub steps: usize,
    /// Weights to prefetch meanwhile: those of the next block, or `weights` again if the next block is unknown.
    pub next: *const u8,
    /// The initial value of the sums of the first rows, and where these sums are stored.
    pub from: Begin,
    pub to: Output,
    /// Number of these first rows; the sums of the others start from and end in `edge`.
    pub whole: usize,
    /// Memory for the sums of the other rows, `[rows][32]`, from the first row of the block on.
    pub edge: Output,
    /// Number of rows.
    pub rows: usize,
}

impl Block {
    /// The initial value of the sums from a row on, as address and stride (a null address means zero), and where they are stored.
    pub fn place(&self, row: usize) -> (*const f32, usize, Output) {
        let (from, to) = match row < self.whole {
            true => (self.from, self.to),
            false => (Begin::Rows(self.edge.at, self.edge.stride), self.edge),
        };
        let (from, from_stride) = from.at(row);
        (from, from_stride, Output { at: to.at.wrapping_add(row * to.stride), ..to })
    }
}

/// Computes the sum of the jobs' products for these rows and panels of outputs. Every job but the first adds
/// to the existing values.
///
/// # Safety
/// The machine has the instruction; rows and panels are within the jobs' bounds; the weights are packed as bf16; shared
/// inputs begin at a tile of the rows.
pub(in super::super) unsafe fn product<M: Multiply>(
    jobs: &[Job<'_>],
    scratch: &mut Scratch,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let Scratch { inputs, transposed, expanded, edge, .. } = scratch;
    let transposes = jobs.iter().any(|job| job.side == Side::Backward && job.transposed.is_none());
    let most = if transposes { M::ROWS_TRANSPOSING } else { M::ROWS_AT_ONCE };
    // Pieces of equally many pairs of tiles: a short one would read the weights for a few rows.
    let equal = rows.len().div_ceil(rows.len().div_ceil(most)).next_multiple_of(2 * ROWS);
    for rows in pieces(rows, equal.min(most)) {
        let tiles = rows.len().div_ceil(ROWS);
        let sums = room(edge, tiles.max(2) * ROWS * PANEL);
        let deeper = (M::INPUTS / (tiles * ROWS)).max(M::DEEPER) / M::DEEP * M::DEEP;
        // Process two products panel by panel, so that the second one is added to outputs that are still in the cache.
        let together = jobs.len() == 2 && jobs[0].slot != jobs[1].slot && jobs[1].sum.len() <= deeper;
        for jobs in jobs.chunks(if together { 2 } else { 1 }) {
            let whole = &jobs[0].sum;
            for sum in pieces(whole.clone(), deeper) {
                let mut parts = [None, None];
                let second = jobs.get(1).filter(|_| sum.end == whole.end).map(|job| (job, job.sum.clone()));
                for ((job, sum), part) in [(&jobs[0], sum)].into_iter().chain(second).zip(&mut parts) {
                    let tiled = job.tiled.unwrap_or_else(|| {
                        let inputs = &mut inputs[job.slot];
                        if !inputs.holds(job, &rows, &sum, 0) {
                            // Safety: the machine has AVX-512.
                            unsafe { pack_inputs(job, &rows, &sum, &mut inputs.lines) };
                        }
                        Tiled::new(inputs.lines.as_ptr().cast(), &rows, &sum)
                    });
                    *part = Some((job, tiled, sum));
                }
                // Safety: the caller guarantees the bounds; `sums` has room for two panels of one tile.
                if tiles == 1 && unsafe { M::multiply_few(&parts, &rows, panels.clone(), sums) } {
                    continue;
                }
                for panel in panels.clone() {
                    // Safety: the caller guarantees the bounds; `sums` has room for all rows of one panel.
                    unsafe { one_panel::<M>(&parts, &rows, panel, (transposed, expanded), sums) };
                }
            }
        }
    }
}

/// Computes a panel's outputs for a range of rows: blocks of weights one after another, each for all rows. Between two
/// blocks the partial sums are stored in `sums`. The first block starts from the initial value (zero, bias, residual or
/// existing output); the last one writes the outputs.
unsafe fn one_panel<M: Multiply>(
    parts: &Parts<'_, '_>,
    rows: &Range<usize>,
    panel: usize,
    (transposed, expanded): (&mut Vec<Line>, &mut Vec<Line>),
    sums: *mut f32,
) {
    let depths = parts.each_ref().map(|part| {
        part.as_ref().map_or(0..0, |(job, _, sum)| {
            let depth = job.depth(panel);
            sum.start.max(depth.start)..sum.end.min(depth.end)
        })
    });
    let (Some(first), Some(last)) =
        (depths.iter().position(|depth| !depth.is_empty()), depths.iter().rposition(|depth| !depth.is_empty()))
    else {
        return;
    };
    let Some((first, ..)) = &parts[first] else { return };
    let (valid, column) = (valid(first, panel), panel * PANEL);
    let whole = if valid == PANEL { M::rows_in_place(rows.len()) } else { 0 };
    let edge = rows.start + whole..rows.end;
    let waiting = Output { at: sums, stride: PANEL };
    let (mut fresh, mut out) = (true, waiting);
    for (index, depth) in depths.iter().enumerate() {
        let Some((job, tiled, sum)) = &parts[index] else { continue };
        // Safety: the caller guarantees what this `unsafe fn` requires.
        let y = Output { at: unsafe { job.y(rows.start, column) }, stride: job.stride };
        let is_stored = match job.side {
            Side::Forward => !job.weight.is_in_codes(),
            Side::Backward => job.transposed.is_some(),
        };
        let has_codes = job.side == Side::Forward && !is_stored;
        let is_direct = has_codes && rows.len() <= M::ROWS_OF_CODES;
        let at_once = M::steps_at_once(rows.len()).min(if has_codes && !is_direct { EXPANDED } else { usize::MAX });
        for block in pieces(depth.clone(), at_once) {
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe {
                let begins = sum.start <= job.depth(panel).start && block.start == depth.start;
                let begin = Begin::of(job, begins, rows.start, column);
                if fresh {
                    begin.copy(edge.clone(), rows.start, valid, sums);
                    out = y;
                }
                let steps = block.len().div_ceil(STEPS);
                let mut of_block = Block {
                    inputs: tiled.at(rows.start, block.start),
                    inputs_stride: tiled.tile_bytes(),
                    weights: std::ptr::null(),
                    steps,
                    next: std::ptr::null(),
                    from: if fresh { begin } else { Begin::Rows(waiting.at, PANEL) },
                    to: if index == last && block.end == depth.end { y } else { waiting },
                    whole,
                    edge: waiting,
                    rows: rows.len(),
                };
                fresh = false;
                if is_direct && M::multiply_codes(&of_block, job.weight, panel, block.clone()) {
                    continue;
                }
                let weights = match job.side {
                    Side::Forward => job.weight.words(expand_for_pairs(), panel, block.clone(), expanded),
                    Side::Backward => match job.transposed {
                        Some(all) => all.at(job.weight, panel, block.start),
                        None => {
                            let out = room(transposed, block.len().div_ceil(PANEL) * transposed_words(PackDtype::Bf16));
                            transpose(tile_kernels(Isa::Avx512), expand_for_pairs(), job.weight, panel, &block, out);
                            out.cast_const().cast()
                        }
                    },
                };
                of_block.weights = weights.cast();
                of_block.next = weights.wrapping_add(if is_stored { steps * STEPS / 2 * PANEL } else { 0 }).cast();
                M::multiply(&of_block);
            }
        }
    }
    for row in edge {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { copy(sums.add((row - rows.start) * PANEL), out.at.add((row - rows.start) * out.stride), valid) };
    }
}

/// The initial value of the sums in a tile of outputs.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Begin {
    Zero,
    /// The same bias for every row.
    Bias(*const f32),
    /// Address of other values that the sums start from, at the first row, and the stride of these rows.
    Rows(*const f32, usize),
}

impl Begin {
    /// The initial value of a job's outputs, from a row and column on.
    pub(in super::super) unsafe fn of(job: &Job<'_>, begins: bool, row: usize, column: usize) -> Begin {
        match job.start {
            Start::Zero if begins => Begin::Zero,
            Start::Bias(bias) if begins => Begin::Bias(bias[column..].as_ptr()),
            Start::Rows(rows) if begins => Begin::Rows(rows.at(row, column), rows.stride),
            // Safety: the caller guarantees what this `unsafe fn` requires.
            Start::Zero | Start::Bias(_) | Start::Rows(_) | Start::Add => unsafe {
                Begin::Rows(job.y(row, column).cast_const(), job.stride)
            },
        }
    }

    /// The initial value from a row on, as address and stride. A null address means zero.
    pub(in super::super) fn at(self, row: usize) -> (*const f32, usize) {
        match self {
            Begin::Zero => (std::ptr::null(), 0),
            Begin::Bias(bias) => (bias, 0),
            Begin::Rows(rows, stride) => (rows.wrapping_add(row * stride), stride),
        }
    }

    /// Copies the initial value into the sums of a range of rows, for `valid` columns.
    pub(in super::super) unsafe fn copy(self, rows: Range<usize>, first: usize, valid: usize, sums: *mut f32) {
        for row in rows {
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe {
                let to = sums.add((row - first) * PANEL);
                match self {
                    Begin::Zero => to.write_bytes(0, PANEL),
                    Begin::Bias(bias) => copy(bias, to, valid),
                    Begin::Rows(from, stride) => copy(from.add((row - first) * stride), to, valid),
                }
            }
        }
    }
}

/// The memory that tiles of outputs are stored to.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Output {
    pub at: *mut f32,
    pub stride: usize,
}

/// Packs the inputs of a product for a range of rows, on the calling thread.
///
/// # Safety
/// The machine has AVX-512.
pub(in super::super) unsafe fn pack_inputs(
    job: &Job<'_>,
    rows: &Range<usize>,
    sum: &Range<usize>,
    lines: &mut Vec<Line>,
) {
    let words = rows.len().div_ceil(ROWS) * sum.len().div_ceil(STEPS) * TILE_BYTES / 4;
    // Safety: the machine has AVX-512, and `room` returns memory for the packed inputs.
    unsafe { pack(job, rows, sum, room(lines, words).cast()) };
}

/// Packs input rows of a product as `[tile][block][16][32]` bf16, with zeros beyond the rows and the summed dimension.
///
/// # Safety
/// The machine has AVX-512, and `out` has room for the packed inputs.
unsafe fn pack(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, out: *mut u8) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        match std::arch::is_x86_feature_detected!("avx512bf16") {
            true => pack_converting(job, rows, sum, out),
            false => pack_rounding(job, rows, sum, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pack_converting(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, out: *mut u8) {
    // Safety: both types have 64 bytes.
    unsafe { pack_with(job, rows, sum, out, |low, high| std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))) }
}

#[target_feature(enable = "avx512f")]
unsafe fn pack_rounding(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, out: *mut u8) {
    let narrow = |value: __m512| -> __m256i {
        let bits = _mm512_castps_si512(value);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        // Keep a NaN a NaN: rounding its bits could give infinity.
        let none = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        let rounded = _mm512_mask_or_epi32(nearest, none, bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
    };
    let both = |low, high| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow(low)), narrow(high));
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { pack_with(job, rows, sum, out, both) }
}

/// Packs input rows of a product; `narrow` converts 2 × 16 values to 32 bf16.
#[inline(always)]
unsafe fn pack_with(
    job: &Job<'_>,
    rows: &Range<usize>,
    sum: &Range<usize>,
    out: *mut u8,
    narrow: impl Fn(__m512, __m512) -> __m512i,
) {
    let (tiles, blocks) = (rows.len().div_ceil(ROWS), sum.len().div_ceil(STEPS));
    let tail = sum.len() % STEPS;
    let (first, second) = ((1u32 << tail.min(16)) - 1, (1u32 << tail.saturating_sub(16)) - 1);
    for row in 0..tiles * ROWS {
        // Safety: `out` has room for the tiles, and the loads of the last block are masked.
        unsafe {
            let out = out.add(row / ROWS * blocks * TILE_BYTES + row % ROWS * 2 * STEPS);
            let at = |block: usize| out.add(block * TILE_BYTES).cast::<__m512i>();
            if row >= rows.len() {
                (0..blocks).for_each(|block| at(block).write(_mm512_setzero_si512()));
                continue;
            }
            let x = job.inputs.row(rows.start + row, sum).as_ptr();
            for block in 0..sum.len() / STEPS {
                let x = x.add(block * STEPS);
                at(block).write(narrow(_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16))));
            }
            if tail > 0 {
                let x = x.wrapping_add(sum.len() - tail);
                let high = _mm512_maskz_loadu_ps(second as u16, x.wrapping_add(16));
                at(blocks - 1).write(narrow(_mm512_maskz_loadu_ps(first as u16, x), high));
            }
        }
    }
}

/// Number of outputs in a panel that exist in the product.
pub(in super::super) fn valid(job: &Job<'_>, panel: usize) -> usize {
    job.columns.end.saturating_sub(panel * PANEL).min(PANEL)
}
