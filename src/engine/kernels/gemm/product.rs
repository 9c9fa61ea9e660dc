//! Blocks of a product: what is packed, what stays in which cache, in which order the tiles go.

use std::ops::Range;

use super::super::pack::{Line, PANEL, PackDtype, PackedMatrix};
use super::tile::{INPUT_STRIDE, MOST_ROWS, Rung, Tile, prefetch};
use super::{Job, Rows, Side, Start};

/// Rows for which a block of weights is streamed once from memory, and steps of it: with the inputs that they meet they
/// stay in the second-level cache. Deep, as sums wait in memory between two blocks.
const FORWARD: (usize, usize) = (96, 1024);
/// The same for the way back: more rows, as a block is turned for them once.
const BACKWARD: (usize, usize) = (96, 1024);
/// The same for the gradients of weights, whose inputs are turned.
const OUTER: (usize, usize) = (192, 256);
/// Elements of packed inputs that stay in the second-level cache.
const INPUTS: usize = 96 << 10;

/// What a thread needs for a while. Buffers grow and are never cleared.
#[derive(Default)]
pub(in super::super) struct Scratch {
    /// Packed inputs: of the weight and of the adapter.
    pub inputs: [Packed; 2],
    /// A turned block of the weights.
    pub turned: Vec<Line>,
    /// A tile at the edge, or the sums of AMX.
    pub edge: Vec<Line>,
    /// x·Aᵀ of some rows.
    pub hidden: Vec<f32>,
    /// Which: the call and the rows.
    pub hidden_of: Option<(u64, Range<usize>)>,
}

/// Packed inputs and what they are.
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
    /// Whether it holds these inputs of this call in this layout already; from now on it does.
    pub fn holds(&mut self, job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, layout: usize) -> bool {
        let x = job.inputs.values.as_ptr();
        let of = PackedOf { call: job.call, x, rows: rows.clone(), sum: sum.clone(), layout };
        self.of.replace(of).is_some_and(|before| Some(before) == self.of)
    }
}

/// Room for so many words.
pub(in super::super) fn room(lines: &mut Vec<Line>, words: usize) -> *mut f32 {
    let count = words.div_ceil(16);
    if lines.len() < count {
        lines.resize(count, Line::default());
    }
    lines.as_mut_ptr().cast()
}

/// Cut a range into pieces of at most so many.
pub(in super::super) fn pieces(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(most).map(move |start| start..(start + most).min(range.end))
}

/// Cut a range into the fewest pieces of at most so many, all alike but for one.
fn balanced(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = range.len().div_ceil(most);
    let at = move |piece: usize| range.start + range.len() * piece / count;
    (0..count).map(move |piece| at(piece)..at(piece + 1))
}

/// The part of a product that lies in these rows and panels.
///
/// # Safety
/// The machine has the rung's instructions; rows and panels are the job's.
pub(super) unsafe fn product(
    rung: &Rung,
    job: &Job<'_>,
    scratch: &mut Scratch,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let pairs = job.weight.dtype() == PackDtype::Bf16;
    let (rows_at_once, deep) = if job.side == Side::Forward { FORWARD } else { BACKWARD };
    let Scratch { inputs, turned, edge, .. } = scratch;
    let inputs = &mut inputs[job.slot];
    let edge = room(edge, MOST_ROWS * PANEL);
    for rows in balanced(rows, rows_at_once) {
        let deeper = (INPUTS / rows.len() / deep).max(1) * deep;
        for sum in pieces(job.sum.clone(), deeper) {
            if !inputs.holds(job, &rows, &sum, deep) {
                pack_inputs(job, &rows, &sum, deep, &mut inputs.lines);
            }
            let packed = inputs.lines.as_ptr().cast::<f32>();
            for panel in panels.clone() {
                let depth = job.depth(panel);
                for (index, block) in pieces(sum.clone(), deep).enumerate() {
                    let first = block.start;
                    let block = block.start.max(depth.start)..block.end.min(depth.end);
                    if block.is_empty() {
                        continue;
                    }
                    let x = packed.wrapping_add(index * rows.len() * INPUT_STRIDE + block.start - first);
                    // Safety: the block lies inside the weight.
                    let w = unsafe {
                        match job.side {
                            Side::Backward => turn(rung, job.weight, panel, &block, turned),
                            Side::Forward if pairs => job.weight.panel(panel).add(block.start / 2 * PANEL),
                            Side::Forward => job.weight.panel(panel).add(block.start * PANEL),
                        }
                    };
                    let kernels = if pairs { rung.bf16 } else { rung.f32 };
                    let fresh = block.start == depth.start;
                    let at = Block { panel, x, w, depth: block.len(), fresh };
                    // Safety: the caller's.
                    unsafe { tiles(rung, kernels, job, &at, &rows, edge) };
                }
            }
        }
    }
}

/// `[block][row][INPUT_STRIDE]`, a zero after each row for pairs.
fn pack_inputs(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, deep: usize, lines: &mut Vec<Line>) {
    let size = rows.len() * INPUT_STRIDE;
    let out = room(lines, sum.len().div_ceil(deep) * size);
    for (index, block) in pieces(sum.clone(), deep).enumerate() {
        for (number, row) in rows.clone().enumerate() {
            let x = job.inputs.row(row, &block);
            // Safety: there is room, and a block is less deep than the stride.
            unsafe {
                let out = out.add(index * size + number * INPUT_STRIDE);
                std::ptr::copy_nonoverlapping(x.as_ptr(), out, x.len());
                *out.add(x.len()) = 0.0;
            }
        }
    }
}

/// 32 inputs of some outputs, `[outputs][32]` or in pairs `[outputs / 2][32][2]`. The outputs begin at a panel.
///
/// # Safety
/// The machine has the rung's instructions.
pub(in super::super) unsafe fn turn(
    rung: &Rung,
    weight: &PackedMatrix,
    block: usize,
    outputs: &Range<usize>,
    turned: &mut Vec<Line>,
) -> *const u32 {
    let panels = outputs.start / PANEL..outputs.end.div_ceil(PANEL);
    let words = match weight.dtype() {
        PackDtype::F32 => PANEL * PANEL,
        PackDtype::Bf16 => PANEL * PANEL / 2,
    };
    let out = room(turned, panels.len() * words);
    let inputs = (weight.k() - block * PANEL).min(PANEL);
    for (number, panel) in panels.clone().enumerate() {
        // The blocks lie far apart: fetch one of them two turns ahead.
        let (next, block_of_next) = if panel + 2 < panels.end { (panel + 2, block) } else { (panels.start, block + 1) };
        let next = weight.panel(next).wrapping_add(block_of_next * words);
        for line in (0..words).step_by(16) {
            prefetch(next.wrapping_add(line));
        }
        // Safety: the block lies inside the panel, whose pairs are padded, and there is room.
        unsafe {
            let (from, out) = (weight.panel(panel).add(block * words), out.add(number * words));
            match weight.dtype() {
                PackDtype::F32 => (rung.turn_f32)(from, inputs, out),
                PackDtype::Bf16 => (rung.turn_bf16)(from, out.cast()),
            }
        }
    }
    out.cast()
}

/// One block of weights.
struct Block {
    panel: usize,
    x: *const f32,
    w: *const u32,
    depth: usize,
    /// Nothing has been summed before it.
    fresh: bool,
}

/// A panel's outputs for some rows.
unsafe fn tiles(
    rung: &Rung,
    kernels: &[super::tile::Kernel],
    job: &Job<'_>,
    block: &Block,
    rows: &Range<usize>,
    edge: *mut f32,
) {
    for column in (0..PANEL).step_by(rung.columns) {
        let first = block.panel * PANEL + column;
        let valid = job.columns.end.saturating_sub(first).min(rung.columns);
        if valid == 0 {
            return;
        }
        let mut begin = [0.0; PANEL];
        let mut from = begin.as_ptr();
        if let Start::Bias(bias) = job.start {
            if valid == rung.columns {
                from = bias[first..first + valid].as_ptr();
            } else {
                begin[..valid].copy_from_slice(&bias[first..first + valid]);
                from = begin.as_ptr();
            }
        }
        let adds = !block.fresh || matches!(job.start, Start::Add);
        for tile in balanced(rows.clone(), rung.rows) {
            let count = tile.len();
            // Safety: the caller's; the edge has room for a tile.
            unsafe {
                let y = job.y(tile.start, first);
                let at_edge = valid < rung.columns;
                let (to, to_stride) = if at_edge { (edge, PANEL) } else { (y, job.stride) };
                if at_edge && adds {
                    for row in 0..count {
                        std::ptr::copy_nonoverlapping(y.add(row * job.stride), edge.add(row * PANEL), valid);
                    }
                }
                let (from, from_stride) = if adds { (to.cast_const(), to_stride) } else { (from, 0) };
                kernels[count - 1](&Tile {
                    x: block.x.add((tile.start - rows.start) * INPUT_STRIDE),
                    w: block.w.add(column),
                    depth: block.depth,
                    from,
                    from_stride,
                    y: to,
                    y_stride: to_stride,
                    next: y.wrapping_add(count * job.stride),
                });
                if at_edge {
                    for row in 0..count {
                        std::ptr::copy_nonoverlapping(edge.add(row * PANEL), y.add(row * job.stride), valid);
                    }
                }
            }
        }
    }
}

/// Up to 16 rows side by side: `[width][INPUT_STRIDE]`.
fn turn_rows<'a>(rows: impl Iterator<Item = &'a [f32]>, out: *mut f32) {
    let mut all: [&[f32]; 16] = [&[]; 16];
    let mut count = 0;
    for (slot, row) in all.iter_mut().zip(rows) {
        *slot = row;
        count += 1;
    }
    let width = all[0].len();
    for index in 0..width {
        for (step, row) in all[..count].iter().enumerate() {
            // Safety: the caller made room for so many rows, which are all as wide.
            unsafe { *out.add(index * INPUT_STRIDE + step) = *row.get_unchecked(index) };
        }
    }
}

/// c `[i, j]` += Σ over rows a `[rows, i]`ᵀ · b `[rows, j]` in a range of i and of panels of j.
///
/// # Safety
/// The machine has the rung's instructions; the ranges are inside the matrices, which have so many rows.
pub(super) unsafe fn outer(
    rung: &Rung,
    job: &Job<'_>,
    scratch: &mut Scratch,
    (rows, a, b): (usize, &Rows<'_>, &Rows<'_>),
    i: Range<usize>,
    panels: Range<usize>,
) {
    let Scratch { inputs: [inputs, _], turned, edge, .. } = scratch;
    inputs.holds(job, &(0..0), &(0..0), 0);
    let edge = room(edge, MOST_ROWS * PANEL);
    for i in balanced(i, OUTER.0) {
        for block in pieces(0..rows, OUTER.1) {
            let x = room(&mut inputs.lines, i.len() * INPUT_STRIDE);
            for steps in pieces(block.clone(), 16) {
                let first = steps.start - block.start;
                let rows = steps.map(|row| &a.values[row * a.stride..][i.clone()]);
                turn_rows(rows, x.wrapping_add(first));
            }
            for panel in panels.clone() {
                let columns = panel * PANEL..((panel + 1) * PANEL).min(b.width);
                let w = room(turned, block.len() * PANEL);
                for (step, row) in block.clone().enumerate() {
                    let b = &b.values[row * b.stride..][columns.clone()];
                    // Safety: there is room.
                    unsafe { std::ptr::copy_nonoverlapping(b.as_ptr(), w.add(step * PANEL), b.len()) };
                }
                let at = Block { panel, x, w: w.cast(), depth: block.len(), fresh: false };
                // Safety: the caller's.
                unsafe { tiles(rung, rung.f32, job, &at, &i, edge) };
            }
        }
    }
}
