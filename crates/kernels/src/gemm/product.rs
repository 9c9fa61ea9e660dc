//! Divides a matrix product into blocks: packs inputs, divides them to fit the caches, and orders the tiles.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::super::pack::CodeRun;
use super::super::pack::{Expand, INPUT_STRIDE, Line, PANEL, PackDtype, PackedMatrix};
#[cfg(target_arch = "x86_64")]
use super::few;
use super::place::Place;
use super::tile::{AHEAD, Kernels, LINE, MOST_ROWS, Tile, TileKernels, prefetch};
use super::{Job, Rows, Side};

/// Number of rows for which a block of weights is read once from memory, and number of steps in a block:
/// together with their inputs they stay in the second-level cache. Blocks are deep, because sums are stored in
/// memory between two blocks.
pub(super) const ROWS: usize = 96;
const DEEP: usize = 1024;
/// Maximum number of steps in a block of a weight in 4-bit codes. Expanded, it stays in the first-level cache.
pub(super) const EXPANDED: usize = 128;
/// Number of elements of packed inputs that stay in the second-level cache.
const INPUTS: usize = 96 << 10;

/// Temporary buffers of a thread for matrix products. They grow and are never shrunk.
#[derive(Default)]
pub(in super::super) struct Scratch {
    /// Packed inputs of the weight's product, and of the adapter's.
    pub inputs: [Packed; 2],
    /// A transposed block of the weight.
    pub transposed: Vec<Line>,
    /// A block of the weight that is stored in 4-bit codes.
    pub expanded: Vec<Line>,
    /// The outputs of a tile at the edge of the matrix, or the sums of AMX.
    pub edge: Vec<Line>,
    /// The values x·Aᵀ of some rows.
    pub hidden: Vec<f32>,
    /// Id of the call and range of rows that `hidden` was computed for.
    pub hidden_of: Option<(u64, Range<usize>)>,
}

/// Packed inputs, and what they were packed from.
#[derive(Default)]
pub(in super::super) struct Packed {
    pub lines: Vec<Line>,
    of: Option<PackedOf>,
}

#[derive(PartialEq)]
struct PackedOf {
    call: u64,
    x: *const f32,
    rows: Range<usize>,
    sum: Range<usize>,
    layout: usize,
}

impl Packed {
    /// Whether the buffer already holds these inputs of this call in this layout; marks the buffer as holding them.
    pub fn holds(&mut self, job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, layout: usize) -> bool {
        let x = job.inputs.values.as_ptr();
        let of = PackedOf { call: job.call, x, rows: rows.clone(), sum: sum.clone(), layout };
        self.of.replace(of).is_some_and(|before| Some(before) == self.of)
    }
}

/// Makes room for this many words in the buffer; returns its address.
pub(in super::super) fn room(lines: &mut Vec<Line>, words: usize) -> *mut f32 {
    let count = words.div_ceil(16);
    if lines.len() < count {
        lines.resize(count, Line::default());
    }
    lines.as_mut_ptr().cast()
}

/// Splits a range into pieces of at most `most`.
pub(in super::super) fn pieces(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(most).map(move |start| start..(start + most).min(range.end))
}

/// Splits a range into the fewest pieces of at most `most`, equal except for one.
pub(super) fn balanced(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = range.len().div_ceil(most);
    let at = move |piece: usize| range.start + range.len() * piece / count;
    (0..count).map(move |piece| at(piece)..at(piece + 1))
}

/// Computes the sum of one or two products for these rows and panels of outputs.
///
/// # Safety
/// The machine supports the instruction set; rows and panels are within the jobs' bounds.
pub(super) unsafe fn product(
    kernels_of_isa: &TileKernels,
    jobs: &[Job<'_>],
    scratch: &mut Scratch,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let Scratch { inputs, transposed, expanded, edge, .. } = scratch;
    let edge = room(edge, MOST_ROWS * PANEL);
    for rows in balanced(rows, ROWS) {
        let deeper = (INPUTS / rows.len() / DEEP).max(1) * DEEP;
        // If the inputs of all products are packed at the same time, process one panel after the other: its outputs are
        // then still in the cache for the second product.
        let together =
            jobs.len() == 2 && jobs[0].slot != jobs[1].slot && jobs.iter().all(|job| job.sum.len() <= deeper);
        let at_once = if together { 2 } else { 1 };
        for jobs in jobs.chunks(at_once) {
            let pieces = |job: &Job<'_>| pieces(job.sum.clone(), deeper);
            for sum in pieces(&jobs[0]) {
                let mut sums = [sum, 0..0];
                if let Some(second) = jobs.get(1) {
                    sums[1] = second.sum.clone();
                }
                for (job, sum) in jobs.iter().zip(&sums) {
                    let inputs = &mut inputs[job.slot];
                    if !inputs.holds(job, &rows, sum, DEEP) {
                        pack_inputs(job, &rows, sum, &mut inputs.lines);
                    }
                }
                for panel in panels.clone() {
                    for (job, sum) in jobs.iter().zip(&sums) {
                        let packed = inputs[job.slot].lines.as_ptr().cast::<f32>();
                        // Safety: the caller guarantees what this `unsafe fn` requires.
                        unsafe {
                            let buffers = (&mut *transposed, &mut *expanded, edge);
                            one_panel(kernels_of_isa, job, (packed, sum), panel, &rows, buffers);
                        }
                    }
                }
            }
        }
    }
}

/// Computes a panel's outputs for some rows, with packed inputs of a part of the summed dimension.
unsafe fn one_panel(
    kernels_of_isa: &TileKernels,
    job: &Job<'_>,
    (packed, sum): (*const f32, &Range<usize>),
    panel: usize,
    rows: &Range<usize>,
    (transposed, expanded, edge): (&mut Vec<Line>, &mut Vec<Line>, *mut f32),
) {
    let pairs = job.weight.dtype() == PackDtype::Bf16;
    let kernels = if pairs { kernels_of_isa.bf16 } else { kernels_of_isa.f32 };
    let depth = job.depth(panel);
    let in_codes = job.weight.is_in_codes() && job.side == Side::Forward;
    #[cfg(target_arch = "x86_64")]
    let few = kernels_of_isa.codes.get(rows.len() - 1).filter(|_| in_codes && job.weight.has_exact_codes(panel));
    #[cfg(target_arch = "x86_64")]
    let expands = in_codes && few.is_none();
    #[cfg(not(target_arch = "x86_64"))]
    let expands = in_codes;
    let deep = pieces(sum.clone(), DEEP).enumerate();
    let blocks = deep.flat_map(|(index, deep)| {
        let first = deep.start;
        pieces(deep, if expands { EXPANDED } else { DEEP }).map(move |block| (index, first, block))
    });
    for (index, first, block) in blocks {
        let block = block.start.max(depth.start)..block.end.min(depth.end);
        if block.is_empty() {
            continue;
        }
        let x = packed.wrapping_add(index * rows.len() * INPUT_STRIDE + block.start - first);
        let fresh = block.start == depth.start;
        #[cfg(target_arch = "x86_64")]
        if let Some(kernel) = few
            && let Some(run) = job.weight.code_run(panel, block.clone())
        {
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe { multiply_codes(*kernel, &run, job, (x, panel, fresh), rows, edge) };
            continue;
        }
        // Safety: the caller guarantees what this `unsafe fn` requires.
        let w = unsafe {
            match job.side {
                Side::Backward => {
                    let words = block.len().div_ceil(PANEL) * transposed_words(job.weight.dtype());
                    let out = room(transposed, words);
                    transpose(kernels_of_isa, &kernels_of_isa.expand, job.weight, panel, &block, out);
                    out.cast_const().cast()
                }
                Side::Forward => job.weight.words(&kernels_of_isa.expand, panel, block.clone(), expanded),
            }
        };
        let next = match job.side {
            Side::Backward => w,
            Side::Forward if block.end < sum.end => job.weight.ahead(panel, block.end),
            Side::Forward => job.weight.ahead(panel + 1, sum.start),
        };
        let at = Block { panel, x, w, next, depth: block.len(), fresh };
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { tiles(kernels_of_isa, kernels, job, &at, rows, edge) };
    }
}

/// Packs input rows as `[block][row][INPUT_STRIDE]`, with a zero after each row for kernels that read pairs.
fn pack_inputs(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, lines: &mut Vec<Line>) {
    let size = rows.len() * INPUT_STRIDE;
    let out = room(lines, sum.len().div_ceil(DEEP) * size);
    for (index, block) in pieces(sum.clone(), DEEP).enumerate() {
        for (number, row) in rows.clone().enumerate() {
            let x = job.inputs.row(row, &block);
            // Safety: the buffer has room for all blocks, and a block is shorter than the stride.
            unsafe {
                let out = out.add(index * size + number * INPUT_STRIDE);
                std::ptr::copy_nonoverlapping(x.as_ptr(), out, x.len());
                *out.add(x.len()) = 0.0;
            }
        }
    }
}

/// Transposes 32 inputs of a range of a weight's outputs to `[outputs][32]`, or in pairs to `[outputs / 2][32][2]`. The
/// outputs begin at a panel.
///
/// # Safety
/// The machine supports the instruction set and the instructions of `expand`, and `out` has room.
pub(in super::super) unsafe fn transpose(
    kernels_of_isa: &TileKernels,
    expand: &Expand,
    weight: &PackedMatrix,
    block: usize,
    outputs: &Range<usize>,
    out: *mut f32,
) {
    let panels = outputs.start / PANEL..outputs.end.div_ceil(PANEL);
    let words = transposed_words(weight.dtype());
    let inputs = (weight.k() - block * PANEL).min(PANEL);
    let mut expanded = Vec::new();
    for (number, panel) in panels.clone().enumerate() {
        // The 32 × 32 blocks are far apart in memory: prefetch each one two iterations ahead.
        let (next, block_of_next) = if panel + 2 < panels.end { (panel + 2, block) } else { (panels.start, block + 1) };
        let next = weight.ahead(next, block_of_next * PANEL);
        for line in (0..words).step_by(16) {
            prefetch(next.wrapping_add(line));
        }
        // Safety: the block is inside the panel, whose pairs are padded, and `out` has room for it.
        unsafe {
            let from = weight.words(expand, panel, block * PANEL..block * PANEL + inputs, &mut expanded);
            let out = out.add(number * words);
            match weight.dtype() {
                PackDtype::F32 => (kernels_of_isa.transpose_f32)(from, inputs, out),
                PackDtype::Bf16 => (kernels_of_isa.transpose_bf16)(from, out.cast()),
            }
        }
    }
}

/// Number of 32-bit words that 32 inputs of 32 outputs take.
pub(in super::super) fn transposed_words(dtype: PackDtype) -> usize {
    match dtype {
        PackDtype::F32 => PANEL * PANEL,
        PackDtype::Bf16 => PANEL * PANEL / 2,
    }
}

/// One block of a panel of weights.
struct Block {
    panel: usize,
    x: *const f32,
    w: *const u32,
    /// Address of the block's weights that are multiplied next, in pairs.
    next: *const u32,
    depth: usize,
    /// Whether this is the first block of the summed dimension, which starts from the initial values.
    fresh: bool,
}

/// Computes a panel's outputs for some rows, tile by tile.
unsafe fn tiles(
    kernels_of_isa: &TileKernels,
    kernels: Kernels,
    job: &Job<'_>,
    block: &Block,
    rows: &Range<usize>,
    edge: *mut f32,
) {
    for column in (0..PANEL).step_by(kernels_of_isa.columns) {
        let first = block.panel * PANEL + column;
        let valid = job.columns.end.saturating_sub(first).min(kernels_of_isa.columns);
        if valid == 0 {
            return;
        }
        let (kernels, width) = match valid <= kernels_of_isa.columns / 2 {
            true => (kernels.half, kernels_of_isa.columns / 2),
            false => (kernels.whole, kernels_of_isa.columns),
        };
        let columns = first..first + valid;
        let mut begin = [0.0; PANEL];
        let tiles = rows.len().div_ceil(kernels_of_isa.rows);
        for (number, tile) in balanced(rows.clone(), kernels_of_isa.rows).enumerate() {
            let count = tile.len();
            // A single tile of rows prefetches the packed weights a few columns ahead. If there are several tiles, the first two
            // each prefetch half of the next panel of packed weights.
            let (fetch, fetch_step) = match (tiles, number) {
                (1, _) => (block.w.wrapping_add(AHEAD), 2 * LINE),
                (_, 0 | 1) => (block.next.wrapping_add(number * block.depth / 2 * LINE), LINE),
                _ => (block.w, LINE),
            };
            // Safety: the caller guarantees the bounds; the buffer `edge` has room for a tile.
            unsafe {
                let place = Place::new(job, block.fresh, (&tile, &columns), width, (edge, &mut begin));
                kernels[count - 1](&Tile {
                    x: block.x.add((tile.start - rows.start) * INPUT_STRIDE),
                    w: block.w.add(column),
                    depth: block.depth,
                    from: place.from,
                    from_stride: place.from_stride,
                    y: place.to,
                    y_stride: place.to_stride,
                    next: job.y(tile.start, first).wrapping_add(count * job.stride),
                    fetch,
                    fetch_step,
                });
                place.finish(job, (&tile, &columns), width);
            }
        }
    }
}

/// Multiplies a few rows with a panel's 4-bit codes.
///
/// # Safety
/// The machine has the kernel's instructions; rows, panel and inputs are within the job's bounds.
#[cfg(target_arch = "x86_64")]
unsafe fn multiply_codes(
    kernel: few::Kernel,
    run: &CodeRun<'_>,
    job: &Job<'_>,
    (x, panel, fresh): (*const f32, usize, bool),
    rows: &Range<usize>,
    edge: *mut f32,
) {
    let columns = panel * PANEL..((panel + 1) * PANEL).min(job.columns.end);
    if columns.is_empty() {
        return;
    }
    let mut begin = [0.0; PANEL];
    // Safety: the caller guarantees the bounds; the buffer `edge` has room for as many rows as a kernel has.
    unsafe {
        let place = Place::new(job, fresh, (rows, &columns), PANEL, (edge, &mut begin));
        let Place { from, from_stride, to, to_stride } = place;
        kernel(run, &few::Sums { x, from, from_stride, to, to_stride });
        place.finish(job, (rows, &columns), PANEL);
    }
}

/// Transposes up to 16 rows of equal width to `[width][INPUT_STRIDE]`.
fn transpose_rows<'a>(rows: impl Iterator<Item = &'a [f32]>, out: *mut f32) {
    let mut all: [&[f32]; 16] = [&[]; 16];
    let mut count = 0;
    for (slot, row) in all.iter_mut().zip(rows) {
        *slot = row;
        count += 1;
    }
    let width = all[0].len();
    for index in 0..width {
        for (step, row) in all[..count].iter().enumerate() {
            // Safety: the caller made room for this many rows, which all have the same width.
            unsafe { *out.add(index * INPUT_STRIDE + step) = *row.get_unchecked(index) };
        }
    }
}

/// Computes the gradient of a weight, c `[i, j]` += Σ over rows a `[rows, i]`ᵀ · b `[rows, j]`, for a range of panels
/// of the wider operand, whose blocks are used like weights. If the wider operand is a, c is transposed.
///
/// # Safety
/// The machine supports the instruction set; the panels are inside the wider operand, and both operands
/// have this many rows.
pub(super) unsafe fn outer(
    kernels_of_isa: &TileKernels,
    job: &Job<'_>,
    scratch: &mut Scratch,
    (rows, a, b): (usize, &Rows<'_>, &Rows<'_>),
    panels: Range<usize>,
) {
    let flipped = a.width > b.width;
    let (narrow, wide) = if flipped { (b, a) } else { (a, b) };
    let Scratch { inputs: [inputs, _], transposed, edge, .. } = scratch;
    let edge = room(edge, ROWS * PANEL);
    for i in balanced(0..narrow.width, ROWS) {
        for block in pieces(0..rows, DEEP) {
            if !inputs.holds(job, &i, &block, 0) {
                let x = room(&mut inputs.lines, i.len() * INPUT_STRIDE);
                for steps in pieces(block.clone(), 16) {
                    let first = steps.start - block.start;
                    transpose_rows(
                        steps.map(|row| &narrow.values[row * narrow.stride..][i.clone()]),
                        x.wrapping_add(first),
                    );
                }
            }
            let x = inputs.lines.as_ptr().cast();
            for panel in panels.clone() {
                let columns = panel * PANEL..((panel + 1) * PANEL).min(wide.width);
                let w = room(transposed, block.len() * PANEL);
                for (step, row) in block.clone().enumerate() {
                    let from = &wide.values[row * wide.stride..][columns.clone()];
                    // Safety: the buffer has room for a panel of the block.
                    unsafe { copy(from.as_ptr(), w.add(step * PANEL), from.len()) };
                }
                let at = Block { panel, x, w: w.cast(), next: w.cast(), depth: block.len(), fresh: false };
                // Safety: the caller guarantees the bounds; the buffer `edge` has room for all of i.
                unsafe {
                    if !flipped {
                        tiles(kernels_of_isa, kernels_of_isa.f32, job, &at, &i, edge);
                        continue;
                    }
                    for (m, j) in i.clone().enumerate() {
                        for (column, i) in columns.clone().enumerate() {
                            *edge.add(m * PANEL + column) = *job.y(i, j);
                        }
                    }
                    for tile in balanced(0..i.len(), kernels_of_isa.rows) {
                        for column in (0..PANEL).step_by(kernels_of_isa.columns) {
                            let y = edge.add(tile.start * PANEL + column);
                            kernels_of_isa.f32.whole[tile.len() - 1](&Tile {
                                x: at.x.add(tile.start * INPUT_STRIDE),
                                w: at.w.add(column),
                                depth: at.depth,
                                from: y,
                                from_stride: PANEL,
                                y,
                                y_stride: PANEL,
                                next: y,
                                fetch: at.w,
                                fetch_step: LINE,
                            });
                        }
                    }
                    for (m, j) in i.clone().enumerate() {
                        for (column, i) in columns.clone().enumerate() {
                            *job.y(i, j) = *edge.add(m * PANEL + column);
                        }
                    }
                }
            }
        }
    }
}

/// Copies values; has a short path for a whole panel.
///
/// # Safety
/// Both pointers are valid for `count` values.
pub(in super::super) unsafe fn copy(from: *const f32, to: *mut f32, count: usize) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        match count {
            PANEL => to.cast::<[u32; PANEL]>().write_unaligned(from.cast::<[u32; PANEL]>().read_unaligned()),
            _ => std::ptr::copy_nonoverlapping(from, to, count),
        }
    }
}
