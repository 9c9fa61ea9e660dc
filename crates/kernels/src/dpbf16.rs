//! Matrix products with AVX512-BF16: its instruction `VDPBF16PS` multiplies pairs of bf16 and adds the products to f32 sums.
//!
//! The kernels read the same packed weights as AMX, and inputs in the same layout ([`Tiled`]), rounded to bf16 once. Each
//! output is one chain of pairs in order, for any number of rows and threads. The function `naive` defines the exact
//! arithmetic of the instruction.

mod calibration;
mod kernels;
#[cfg(all(test, target_os = "linux"))]
pub(super) mod tests;

use std::ops::Range;

use super::amx::{self, Begin, Output, Tiled, valid};
use super::gemm::product::{Scratch, copy, pieces, room, transpose, transposed_words};
use super::gemm::tile::tile_kernels;
use super::gemm::{Job, Side};
use super::isa::Isa;
use super::pack::{Line, PANEL, PackDtype};
pub(super) use calibration::{gain, refused};
pub(super) use kernels::{PEAK_FLOPS, peak};

/// Maximum number of rows in a cell, the unit of work of a thread. The packed inputs of this many rows stay in the
/// second-level cache while the weights are read.
pub(super) const ROWS_AT_ONCE: usize = 144;
/// Maximum number of elements in the packed inputs of a cell: half of a second-level cache of 1 MiB.
const INPUTS: usize = 256 << 10;
/// Number of steps of the summed dimension in a block of weights. A block is multiplied with all rows of a cell before the
/// next block is read.
const DEEP: usize = 512;
/// Number of steps in a block of weights for at most one tile of rows, so that the block and the prefetched next block stay
/// in the first-level cache.
const DEEP_FOR_FEW: usize = 128;

/// Number of steps in a block of the packed inputs.
const STEPS: usize = amx::STEPS;

/// Computes the sum of the products of all jobs for a range of rows and panels. Each job after the first adds to the outputs.
///
/// # Safety
/// The machine has AVX512-BF16, rows and panels are within the bounds of the jobs, the weights are packs of bf16, and shared
/// packed inputs begin at a tile of the rows.
pub(super) unsafe fn product(jobs: &[Job<'_>], scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    let Scratch { inputs, transposed, edge, .. } = scratch;
    // If this thread transposes weights itself, use each transposed block for twice as many rows.
    let transposes = jobs.iter().any(|job| job.side == Side::Backward && job.transposed.is_none());
    for rows in pieces(rows, if transposes { 2 * ROWS_AT_ONCE } else { ROWS_AT_ONCE }) {
        let tiles = rows.len().div_ceil(amx::ROWS);
        let sums = room(edge, rows.len() * PANEL);
        let deeper = (INPUTS / (tiles * amx::ROWS)).max(DEEP) / DEEP * DEEP;
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
                            unsafe { amx::pack_inputs(job, &rows, &sum, &mut inputs.lines) };
                        }
                        Tiled::new(inputs.lines.as_ptr().cast(), &rows, &sum)
                    });
                    *part = Some((job, tiled, sum));
                }
                for panel in panels.clone() {
                    // Safety: the caller guarantees the bounds; `sums` has room for all rows of one panel.
                    unsafe { one_panel(parts.iter().flatten(), &rows, panel, transposed, sums) };
                }
            }
        }
    }
}

/// Computes a panel's outputs for a range of rows: blocks of weights one after another, each for all rows. Between two
/// blocks the partial sums are stored in `sums`. The first block starts from the initial value (zero, bias, residual or
/// existing output); the last one writes the outputs.
unsafe fn one_panel<'a, 'j: 'a>(
    parts: impl Iterator<Item = &'a (&'a Job<'j>, Tiled, Range<usize>)> + Clone,
    rows: &Range<usize>,
    panel: usize,
    transposed: &mut Vec<Line>,
    sums: *mut f32,
) {
    // One group of rows: a single block, since the weights are read only once anyway.
    let at_once = if rows.len() <= kernels::ROWS {
        usize::MAX / 2
    } else if rows.len() <= amx::ROWS {
        DEEP_FOR_FEW
    } else {
        DEEP
    };
    let blocks = parts.flat_map(|(job, tiled, sum)| {
        let depth = job.depth(panel);
        let begins = sum.start <= depth.start;
        let depth = sum.start.max(depth.start)..sum.end.min(depth.end);
        let depth = depth.start..depth.end.max(depth.start);
        pieces(depth.clone(), at_once).map(move |block| (*job, tiled, begins && block.start == depth.start, block))
    });
    let mut blocks = blocks.peekable();
    let Some((first, ..)) = blocks.peek() else { return };
    let (valid, column) = (valid(first, panel), panel * PANEL);
    let waiting = Output { at: sums, stride: PANEL };
    // The last panel may be narrower than the vectors. Its initial values are copied to `sums`, and its outputs from `sums`.
    let is_whole = valid == PANEL;
    let mut fresh = true;
    let mut end = None;
    while let Some((job, tiled, begins, block)) = blocks.next() {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe {
            let y = Output { at: job.y(rows.start, column), stride: job.stride };
            let mut from = Begin::Rows(waiting.at, PANEL);
            if fresh {
                from = Begin::of(job, begins, rows.start, column);
                if !is_whole {
                    from.copy(rows.clone(), rows.start, valid, sums);
                    from = Begin::Rows(waiting.at, PANEL);
                }
            }
            let weights = match job.side {
                Side::Forward => job.weight.panel(panel).add(block.start / 2 * PANEL),
                Side::Backward => match job.transposed {
                    Some(all) => all.at(job.weight, panel, block.start),
                    None => {
                        let out = room(transposed, block.len().div_ceil(PANEL) * transposed_words(PackDtype::Bf16));
                        transpose(tile_kernels(Isa::Avx512), job.weight, panel, &block, out);
                        out.cast_const().cast()
                    }
                },
            };
            let steps = block.len().div_ceil(STEPS);
            let is_transposed_here = job.side == Side::Backward && job.transposed.is_none();
            kernels::Block {
                inputs: tiled.at(rows.start, block.start),
                inputs_stride: tiled.tile_bytes(),
                weights: weights.cast(),
                steps,
                next: weights.wrapping_add(if is_transposed_here { 0 } else { steps * STEPS / 2 * PANEL }).cast(),
                from,
                to: if is_whole && blocks.peek().is_none() { y } else { waiting },
            }
            .multiply(rows.len());
            end = Some(y);
        }
        fresh = false;
    }
    let Some(y) = end.filter(|_| !is_whole) else { return };
    for row in 0..rows.len() {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { copy(sums.add(row * PANEL), y.at.add(row * y.stride), valid) };
    }
}

/// A naive implementation of `VDPBF16PS` for one lane, after Intel's manual, volume 2. The instruction adds the product of the
/// second values first, then the product of the first values. It rounds each multiply-add once, to the nearest f32, ties to
/// even, and replaces subnormal inputs, sums and results by zeros of the same sign. The instruction may return a NaN
/// with other bits than this function.
#[cfg(all(test, target_os = "linux"))]
fn naive(sum: f32, x: [half::bf16; 2], w: [half::bf16; 2]) -> f32 {
    let flush = |value: f32| if value.is_subnormal() { 0f32.copysign(value) } else { value };
    let add = |sum: f32, x: half::bf16, w: half::bf16| flush(flush(x.to_f32()).mul_add(flush(w.to_f32()), flush(sum)));
    add(add(sum, x[1], w[1]), x[0], w[0])
}
