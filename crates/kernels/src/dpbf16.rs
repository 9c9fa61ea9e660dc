//! Matrix products with AVX512-BF16: the instruction `VDPBF16PS` multiplies pairs of bf16 and adds them to sums of f32.
//!
//! The kernels read the same packed weights as AMX, and inputs in the same layout ([`Tiled`]), rounded to bf16 once. Each output
//! is one chain over its pairs in order, for any number of rows and threads. The function `naive` states the exact arithmetic.

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

/// Most rows of a cell. The packed inputs of so many rows stay in the second-level cache while the weights stream by.
pub(super) const ROWS_AT_ONCE: usize = 144;
/// Most elements of a cell's packed inputs, half of a second-level cache of 1 MiB.
const INPUTS: usize = 256 << 10;
/// Steps of a block of weights. All groups of rows use a block before the next one is read.
const DEEP: usize = 512;
/// Steps of a block for at most one tile of rows. The block and the next one, which is prefetched, stay in the first-level cache.
const DEEP_FOR_FEW: usize = 128;

/// Steps of a block in the layout of the inputs.
const STEPS: usize = amx::STEPS;

/// Computes the sum of all jobs' products for some rows and panels. Each job but the first adds to the outputs.
///
/// # Safety
/// The machine has AVX512-BF16; rows and panels are the jobs', the weights are packs of bf16, what is shared of their
/// inputs begins at a tile of the rows.
pub(super) unsafe fn product(jobs: &[Job<'_>], scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    let Scratch { inputs, turned, edge, .. } = scratch;
    // A weight that this thread transposes itself serves twice as many rows.
    let turns = jobs.iter().any(|job| job.side == Side::Backward && job.turned.is_none());
    for rows in pieces(rows, if turns { 2 * ROWS_AT_ONCE } else { ROWS_AT_ONCE }) {
        let tiles = rows.len().div_ceil(amx::ROWS);
        let sums = room(edge, rows.len() * PANEL);
        let deeper = (INPUTS / (tiles * amx::ROWS)).max(DEEP) / DEEP * DEEP;
        // The second product is added panel by panel, while the outputs are in the cache.
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

/// Computes one panel of outputs for some rows, block by block, each block for all rows. The buffer `sums` holds the sums between
/// two blocks. The first block starts from the product's start values, and the last block writes the outputs.
unsafe fn one_panel<'a, 'j: 'a>(
    parts: impl Iterator<Item = &'a (&'a Job<'j>, Tiled, Range<usize>)> + Clone,
    rows: &Range<usize>,
    panel: usize,
    turned: &mut Vec<Line>,
    sums: *mut f32,
) {
    // With one group of rows, each weight is read once.
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
    // The last panel may be narrower than the vectors. Its outputs are copied to `sums` first and back at the end.
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

/// The naive twin of VDPBF16PS for one lane (Intel's manual, volume 2). The instruction adds the product of the second values
/// first, then that of the first values. Each multiply-add is rounded once, to the nearest f32, ties to even. Subnormal inputs,
/// sums and results count as zeros of their sign. The bits of a NaN are not specified here.
#[cfg(all(test, target_os = "linux"))]
fn naive(sum: f32, x: [half::bf16; 2], w: [half::bf16; 2]) -> f32 {
    let flush = |value: f32| if value.is_subnormal() { 0f32.copysign(value) } else { value };
    let add = |sum: f32, x: half::bf16, w: half::bf16| flush(flush(x.to_f32()).mul_add(flush(w.to_f32()), flush(sum)));
    add(add(sum, x[1], w[1]), x[0], w[0])
}
