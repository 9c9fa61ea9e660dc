//! AVX512-BF16: pairs of bf16 multiplied and added to sums of f32, in vectors (`VDPBF16PS`).
//!
//! Weights are the packs of bf16 as they are, inputs the layout that tiles have too ([`Tiled`]), rounded to bf16 once. Every
//! output is one chain over its pairs in order, whatever the rows, the threads and the cut, by [`naive`]'s arithmetic.

mod calibration;
mod kernels;
#[cfg(all(test, target_os = "linux"))]
pub(super) mod tests;

use std::ops::Range;

use super::amx::{self, Begin, Output, Tiled, valid};
use super::gemm::product::{Scratch, copy, pieces, room, turn, turned_words};
use super::gemm::tile::rung;
use super::gemm::{Job, Side};
use super::isa::Isa;
use super::pack::{Line, PANEL, PackDtype};
pub(super) use calibration::{gain, refused};
pub(super) use kernels::{PEAK_FLOPS, peak};

/// Rows of a cell: their inputs stay in the second-level cache while the weights stream by.
pub(super) const ROWS_AT_ONCE: usize = 144;
/// Elements of a cell's inputs that stay there.
const INPUTS: usize = 256 << 10;
/// Steps of a block of weights that several groups of rows meet while it is near.
const DEEP: usize = 512;
/// The same where all rows are one tile: the block stays in the first-level cache, beside the next one that is fetched.
const DEEP_FOR_FEW: usize = 128;

/// Steps that an inputs' block of 32 holds.
const STEPS: usize = amx::STEPS;

/// The part of a sum of products that lies in these rows and panels. Every job but the first adds to what is there.
///
/// # Safety
/// The machine has AVX512-BF16; rows and panels are the jobs', the weights are packs of bf16, what is shared of their
/// inputs begins at a tile of the rows.
pub(super) unsafe fn product(jobs: &[Job<'_>], scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    let Scratch { inputs, turned, edge, .. } = scratch;
    // More of them share a weight that is turned on the way.
    let turns = jobs.iter().any(|job| job.side == Side::Backward && job.turned.is_none());
    for rows in pieces(rows, if turns { 2 * ROWS_AT_ONCE } else { ROWS_AT_ONCE }) {
        let tiles = rows.len().div_ceil(amx::ROWS);
        let sums = room(edge, rows.len() * PANEL);
        let deeper = (INPUTS / (tiles * amx::ROWS)).max(DEEP) / DEEP * DEEP;
        // The second sum is added to a panel's outputs while they are near.
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
                            // Safety: AVX-512.
                            unsafe { amx::lay_out(job, &rows, &sum, &mut inputs.lines) };
                        }
                        Tiled::new(inputs.lines.as_ptr().cast(), &rows, &sum)
                    });
                    *part = Some((job, tiled, sum));
                }
                for panel in panels.clone() {
                    // Safety: the caller's; there is room for the sums.
                    unsafe { one_panel(parts.iter().flatten(), &rows, panel, turned, sums) };
                }
            }
        }
    }
}

/// A panel's outputs for some rows: blocks of weights one after the other, each for all rows. Between two blocks the sums
/// wait in `sums`; the first begins with what the sum begins with, the last writes the outputs.
unsafe fn one_panel<'a, 'j: 'a>(
    parts: impl Iterator<Item = &'a (&'a Job<'j>, Tiled, Range<usize>)> + Clone,
    rows: &Range<usize>,
    panel: usize,
    turned: &mut Vec<Line>,
    sums: *mut f32,
) {
    // One group of rows: the weights stream by once.
    let at_once = match rows.len() {
        ..=kernels::ROWS => usize::MAX / 2,
        ..=amx::ROWS => DEEP_FOR_FEW,
        _ => DEEP,
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
    // Where the panel is cut off, its outputs begin and end in `sums`.
    let is_whole = valid == PANEL;
    let mut fresh = true;
    let mut end = None;
    while let Some((job, tiled, begins, block)) = blocks.next() {
        // Safety: the caller's.
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
                Side::Backward => match job.turned {
                    Some(all) => all.at(job.weight, panel, block.start),
                    None => {
                        let out = room(turned, block.len().div_ceil(PANEL) * turned_words(PackDtype::Bf16));
                        turn(rung(Isa::Avx512), job.weight, panel, &block, out);
                        out.cast_const().cast()
                    }
                },
            };
            let steps = block.len().div_ceil(STEPS);
            let is_turned_here = job.side == Side::Backward && job.turned.is_none();
            kernels::Block {
                inputs: tiled.at(rows.start, block.start),
                inputs_stride: tiled.tile_bytes(),
                weights: weights.cast(),
                steps,
                next: weights.wrapping_add(if is_turned_here { 0 } else { steps * STEPS / 2 * PANEL }).cast(),
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
        // Safety: the caller's.
        unsafe { copy(sums.add(row * PANEL), y.at.add(row * y.stride), valid) };
    }
}

/// What the instruction adds to one sum: the second values of the pairs first, each product with its addition rounded once to
/// the nearest f32, ties to even; values, sums and results too small to be normal are zeros of their sign. Intel's manual,
/// volume 2, VDPBF16PS. Bits of NaNs aside.
#[cfg(all(test, target_os = "linux"))]
fn naive(sum: f32, x: [half::bf16; 2], w: [half::bf16; 2]) -> f32 {
    let flush = |value: f32| if value.is_subnormal() { 0f32.copysign(value) } else { value };
    let add = |sum: f32, x: half::bf16, w: half::bf16| flush(flush(x.to_f32()).mul_add(flush(w.to_f32()), flush(sum)));
    add(add(sum, x[1], w[1]), x[0], w[0])
}
