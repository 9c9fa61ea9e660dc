//! Matrix products with a single tile of rows, as in a decode step. Two panels of weights are processed together, so
//! that a tile product need not wait for the previous one, and the sums stay in tile registers from the weight's
//! product to the adapter's.

use std::arch::asm;
use std::ops::Range;

use super::super::gemm::pairs::{Begin, Output, Parts, ROWS, STEPS, valid};
use super::super::gemm::product::copy;
use super::super::gemm::{Job, Side};
use super::super::pack::PANEL;
use super::tiles::Place;

/// One product's contribution to the sums of two panels: inputs, weights, number of blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Link {
    /// Inputs of each panel: blocks of 32 steps, `[16][32]` bf16.
    inputs: [*const u8; 2],
    /// Weights of each panel, `[steps][16][32][2]` bf16.
    weights: [*const u8; 2],
    /// Number of blocks of 32 steps of the summed dimension; may be 0.
    steps: usize,
}

impl Link {
    const EMPTY: Link = Link { inputs: [std::ptr::null(); 2], weights: [std::ptr::null(); 2], steps: 0 };
}

/// The work for two panels: where their sums start from and end, and the products to add.
#[repr(C)]
struct Chain {
    places: [Place; 2],
    links: [Link; 2],
}

/// Length of the summed dimension from which on two panels together are faster than one.
const LONG: usize = 512;

/// Whether [`product`] supports these products, for one tile of rows.
pub(super) fn takes(parts: &Parts<'_, '_>) -> bool {
    let mut jobs = parts.iter().flatten().map(|(job, ..)| job);
    jobs.clone().next().is_some_and(|first| first.sum.len() >= LONG)
        && jobs.all(|job| job.side == Side::Forward && !job.weight.is_in_codes())
}

/// Computes the outputs of panels for rows that fit into one tile, with untransposed weights.
///
/// # Safety
/// The same as for [`super::super::gemm::pairs::product`]; `sums` has room for two panels of one tile.
pub(super) unsafe fn product(parts: &Parts<'_, '_>, rows: &Range<usize>, panels: Range<usize>, sums: *mut f32) {
    // Pair panels of the two halves: the CPU then reads each half in order, as a stream.
    let half = panels.len().div_ceil(2);
    for first in panels.start..panels.start + half {
        let pair = [first, first + half];
        let pair = &pair[..if pair[1] < panels.end { 2 } else { 1 }];
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe {
            match pair {
                [a, b] if !steps(parts, *a).eq(steps(parts, *b)) => {
                    pair.iter().for_each(|panel| chain(parts, rows, &[*panel], sums));
                }
                _ => chain(parts, rows, pair, sums),
            }
        }
    }
}

/// Number of blocks of 32 steps that a panel has in each product.
fn steps(parts: &Parts<'_, '_>, panel: usize) -> impl Iterator<Item = usize> {
    parts.iter().flatten().map(move |(job, _, sum)| depth(job, sum, panel).len().div_ceil(STEPS))
}

/// The range of the summed dimension that a panel needs in one product.
fn depth(job: &Job<'_>, sum: &Range<usize>, panel: usize) -> Range<usize> {
    let depth = job.depth(panel);
    let start = sum.start.max(depth.start);
    start..sum.end.min(depth.end).max(start)
}

/// Where the sums of the tile start from, and where they are stored.
fn place(begin: Begin, at: *mut f32, stride: usize) -> Place {
    let (from, from_stride) = begin.at(0);
    Place::new((from, from_stride, Output { at, stride }))
}

/// Computes one panel of outputs, or two with the same number of steps.
unsafe fn chain(parts: &Parts<'_, '_>, rows: &Range<usize>, panels: &[usize], sums: *mut f32) {
    let Some((first, _, sum)) = &parts[0] else { return };
    let mut links = [Link::EMPTY; 2];
    for ((job, tiled, sum), link) in parts.iter().flatten().zip(&mut links) {
        for (side, &panel) in panels.iter().enumerate() {
            let depth = depth(job, sum, panel);
            link.inputs[side] = tiled.at(rows.start, depth.start);
            // Safety: the caller guarantees what this `unsafe fn` requires.
            link.weights[side] = unsafe { job.weight.panel(panel).add(depth.start / 2 * PANEL) }.cast();
            link.steps = depth.len().div_ceil(STEPS);
        }
    }
    let mut places = [Place::NONE; 2];
    let mut edges = [None; 2];
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        for (side, &panel) in panels.iter().enumerate() {
            let (valid, column) = (valid(first, panel), panel * PANEL);
            let begins = sum.start <= first.depth(panel).start;
            let (begin, y) = (Begin::of(first, begins, rows.start, column), first.y(rows.start, column));
            places[side] = if valid == PANEL && rows.len() == ROWS {
                place(begin, y, first.stride)
            } else {
                let sums = sums.add(side * ROWS * PANEL);
                begin.copy(rows.clone(), rows.start, valid, sums);
                edges[side] = Some((sums, y, valid));
                place(Begin::Rows(sums, PANEL), sums, PANEL)
            };
        }
        multiply(&Chain { places, links }, panels.len() == 2);
        for (sums, y, valid) in edges.into_iter().flatten() {
            for row in 0..rows.len() {
                copy(sums.add(row * PANEL), y.add(row * first.stride), valid);
            }
        }
    }
}

/// Inline assembly that runs a [`Chain`]; the arguments are the additional instructions for a second panel at the
/// beginning, in each step, and at the end.
macro_rules! run {
    ($chain:expr, [$($begin:literal,)*], [$($step:literal,)*], [$($end:literal,)*]) => {
        asm!(
            "mov {at}, [{chain}]",
            "test {at}, {at}",
            "jnz 3f",
            "tilezero tmm0",
            "tilezero tmm1",
            "jmp 4f",
            "3:",
            "mov {stride}, [{chain} + 8]",
            "tileloadd tmm0, [{at} + {stride}]",
            "tileloadd tmm1, [{at} + {stride} + 64]",
            "4:",
            $($begin,)*
            "lea {at}, [{chain} + 64]",
            "lea {end}, [{chain} + 144]",
            "5:",
            "mov {steps}, [{at} + 32]",
            "test {steps}, {steps}",
            "jz 6f",
            "mov {x}, [{at}]",
            "mov {y}, [{at} + 8]",
            "mov {v}, [{at} + 16]",
            "mov {w}, [{at} + 24]",
            "2:",
            "tileloadd tmm4, [{x} + {short}]",
            "tileloadd tmm6, [{v} + {long}]",
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
            "prefetcht0 [{v} + 8192 + \\line]",
            ".endr",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{v} + {long} + 64]",
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
            "prefetcht0 [{v} + 9216 + \\line]",
            ".endr",
            "tdpbf16ps tmm1, tmm4, tmm7",
            $($step,)*
            "add {x}, 1024",
            "add {v}, 2048",
            "dec {steps}",
            "jnz 2b",
            "6:",
            "add {at}, 40",
            "cmp {at}, {end}",
            "jne 5b",
            "mov {at}, [{chain} + 16]",
            "mov {stride}, [{chain} + 24]",
            "tilestored [{at} + {stride}], tmm0",
            "tilestored [{at} + {stride} + 64], tmm1",
            $($end,)*
            "# {y} {w}",
            chain = in(reg) std::ptr::from_ref($chain),
            at = out(reg) _,
            stride = out(reg) _,
            end = out(reg) _,
            steps = out(reg) _,
            x = out(reg) _,
            y = out(reg) _,
            v = out(reg) _,
            w = out(reg) _,
            short = in(reg) 64usize,
            long = in(reg) 128usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// # Safety
/// The machine has AMX, this thread's tiles are configured, and all pointers are valid for the accessed ranges.
unsafe fn multiply(chain: &Chain, is_pair: bool) {
    // Safety: the caller guarantees what this `unsafe fn` requires. Prefetching has no effect on memory.
    unsafe {
        if !is_pair {
            return run!(chain, [], [], []);
        }
        run!(
            chain,
            [
                "mov {at}, [{chain} + 32]",
                "test {at}, {at}",
                "jnz 3f",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 4f",
                "3:",
                "mov {stride}, [{chain} + 40]",
                "tileloadd tmm2, [{at} + {stride}]",
                "tileloadd tmm3, [{at} + {stride} + 64]",
                "4:",
            ],
            [
                "tileloadd tmm5, [{y} + {short}]",
                "tileloadd tmm6, [{w} + {long}]",
                ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                "prefetcht0 [{w} + 8192 + \\line]",
                ".endr",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm7, [{w} + {long} + 64]",
                ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                "prefetcht0 [{w} + 9216 + \\line]",
                ".endr",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {y}, 1024",
                "add {w}, 2048",
            ],
            [
                "mov {at}, [{chain} + 48]",
                "mov {stride}, [{chain} + 56]",
                "tilestored [{at} + {stride}], tmm2",
                "tilestored [{at} + {stride} + 64], tmm3",
            ]
        )
    }
}
