//! AMX: tiles of 16 × 32 bf16 multiplied at once. The instructions are written by name: their intrinsics are not stable.
//!
//! Intel's manual (volume 1, chapter 18; volume 2, TDPBF16PS); the permission is Linux's `ARCH_REQ_XCOMP_PERM`.

mod few;
mod permission;
#[cfg(all(test, target_os = "linux"))]
pub(super) mod tests;
mod tiles;

use std::arch::x86_64::*;
use std::ops::Range;

use super::gemm::product::{Scratch, copy, pieces, room, turn, turned_words};
use super::gemm::tile::rung;
use super::gemm::{Job, Side, Start};
use super::isa::Isa;
use super::pack::{Line, PANEL, PackDtype, PackedMatrix};
use super::threads::{Shared, Threads};
use permission::configure;
pub(super) use permission::refused;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;
/// Steps of a sum that a tile holds.
pub(super) const STEPS: usize = 32;
/// Rows of a cell: a block of weights meets them all, and with [`DEEPER`] the inputs stay in the second-level cache.
pub(super) const ROWS_AT_ONCE: usize = 288;
/// Steps of the packed inputs of many rows.
const DEEPER: usize = 2048;
/// Elements of packed inputs of fewer rows.
const INPUTS: usize = ROWS_AT_ONCE * DEEPER;
/// Steps of a block of weights that stays in the first-level cache while the rows stream by.
const DEEP: usize = 256;

/// Inputs of some rows laid out for tiles: `[tile of 16 rows][block of 32 steps][16][32]` bf16, zeros beyond the rows and
/// the sum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiled {
    data: *const u8,
    /// Whose rows and steps.
    rows: (usize, usize),
    sum: (usize, usize),
    /// Blocks from one tile of rows to the next.
    blocks: usize,
}

// Safety: whoever uses it keeps the memory, which nobody writes meanwhile.
unsafe impl Send for Tiled {}
unsafe impl Sync for Tiled {}

impl Tiled {
    pub(super) fn new(data: *const u8, rows: &Range<usize>, sum: &Range<usize>) -> Tiled {
        Tiled { data, rows: (rows.start, rows.end), sum: (sum.start, sum.end), blocks: sum.len().div_ceil(STEPS) }
    }

    /// Of a tile of rows, from a step on.
    pub(super) fn at(&self, row: usize, step: usize) -> *const u8 {
        let (tile, block) = ((row - self.rows.0) / ROWS, (step - self.sum.0) / STEPS);
        self.data.wrapping_add((tile * self.blocks + block) * tiles::BYTES)
    }

    /// Bytes from one tile of rows to the next.
    pub(super) fn tile_bytes(&self) -> usize {
        self.blocks * tiles::BYTES
    }

    /// From a row on, a whole number of tiles after the first: from now on rows count from it.
    pub fn starting_at(&self, row: usize) -> Tiled {
        Tiled { data: self.at(self.rows.0 + row, self.sum.0), rows: (0, self.rows.1 - self.rows.0 - row), ..*self }
    }

    /// Some of the steps, which begin with a block: from now on they count from 0.
    pub fn steps(&self, steps: &Range<usize>) -> Tiled {
        Tiled { data: self.at(self.rows.0, steps.start), sum: (0, steps.len()), ..*self }
    }
}

/// Rows below which every thread lays out the inputs for itself.
const FEW: usize = 64;
/// Elements of shared inputs.
const SHARED: usize = 4 << 20;

/// Whether the inputs of these products are laid out once for all threads.
pub(super) fn shares(jobs: &[Job<'_>], rows: usize) -> bool {
    shares_rows(rows) && jobs.iter().all(|job| job.weight.dtype() == PackDtype::Bf16 && !job.sum.is_empty())
}

/// Whether so many rows do.
pub(super) fn shares_rows(rows: usize) -> bool {
    rows > FEW
}

/// For how many rows at a time, at least those of a cell.
pub(super) fn rows_shared(jobs: &[Job<'_>], cell: usize) -> usize {
    let steps: usize = jobs.iter().map(|job| job.sum.len()).sum();
    (SHARED / steps.max(1)).max(cell) / (2 * ROWS) * (2 * ROWS)
}

/// The inputs of a job for some rows, laid out by all threads.
pub(super) fn share(threads: &Threads, job: &Job<'_>, rows: &Range<usize>, lines: &mut Vec<Line>) -> Tiled {
    let (tiles, blocks) = (rows.len().div_ceil(ROWS), job.sum.len().div_ceil(STEPS));
    let words = blocks * tiles::BYTES / 4;
    // Safety: there is room for so many.
    let out = Shared::new(unsafe { std::slice::from_raw_parts_mut(room(lines, tiles * words), tiles * words) });
    threads.split(tiles, |some| {
        let rows = rows.start + some.start * ROWS..(rows.start + some.end * ROWS).min(rows.end);
        // Safety: the machine has AVX-512, and tiles are disjoint.
        unsafe { pack(job, &rows, &job.sum, out.at(some.start * words).cast()) };
    });
    // Safety: the first element.
    let data = unsafe { out.at(0).cast_const().cast() };
    Tiled::new(data, rows, &job.sum)
}

/// A weight turned for dX, `[panel of inputs][block of 32 outputs][16][32][2]` bf16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turned(*const u32);

// Safety: whoever uses it keeps the memory, which nobody writes meanwhile.
unsafe impl Send for Turned {}
unsafe impl Sync for Turned {}

impl Turned {
    /// Of a panel of inputs, from an output on.
    pub(super) fn at(&self, weight: &PackedMatrix, panel: usize, output: usize) -> *const u32 {
        let blocks = panel * weight.panels() + output / PANEL;
        self.0.wrapping_add(blocks * turned_words(PackDtype::Bf16))
    }
}

/// A weight turned by all threads, for products whose rows are more than one cell.
pub(super) fn turn_all(threads: &Threads, weight: &PackedMatrix, lines: &mut Vec<Line>) -> Turned {
    let words = weight.panels() * turned_words(PackDtype::Bf16);
    let panels = weight.k().div_ceil(PANEL);
    // Safety: there is room for so many.
    let out = Shared::new(unsafe { std::slice::from_raw_parts_mut(room(lines, panels * words), panels * words) });
    threads.split(panels, |some| {
        for panel in some {
            // Safety: the machine has AVX-512, and panels are disjoint.
            unsafe { turn(rung(Isa::Avx512), weight, panel, &(0..weight.n()), out.at(panel * words)) };
        }
    });
    // Safety: the first element.
    Turned(unsafe { out.at(0).cast_const().cast() })
}

/// The part of a sum of products that lies in these rows and panels. Every job but the first adds to what is there.
///
/// # Safety
/// The machine has AMX and AVX-512; rows and panels are the jobs', the weights are packs of bf16, what is shared of their
/// inputs begins at a tile of the rows.
pub(super) unsafe fn product(jobs: &[Job<'_>], scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    configure();
    let Scratch { inputs, turned, edge, .. } = scratch;
    for rows in pieces(rows, ROWS_AT_ONCE) {
        let tiles = rows.len().div_ceil(ROWS);
        let sums = room(edge, tiles.max(2) * ROWS * PANEL);
        let deeper = (INPUTS / (tiles * ROWS)).max(DEEPER) / DEEP * DEEP;
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
                            unsafe { lay_out(job, &rows, &sum, &mut inputs.lines) };
                        }
                        Tiled::new(inputs.lines.as_ptr().cast(), &rows, &sum)
                    });
                    *part = Some((job, tiled, sum));
                }
                if tiles == 1 && few::takes(jobs) {
                    // Safety: the caller's; there is room for the sums.
                    unsafe { few::product(&parts, &rows, panels.clone(), sums) };
                    continue;
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
    let tiles = rows.len().div_ceil(ROWS);
    // Few rows: the weights stream by once.
    let at_once = if tiles == 1 { usize::MAX / 2 } else { DEEP };
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
    // Tiles of rows whose outputs are whole tiles.
    let whole = if valid == PANEL { rows.len() / ROWS } else { 0 };
    let edge = rows.start + whole * ROWS..rows.end;
    let mut fresh = true;
    let mut out = Output { at: sums, stride: PANEL };
    while let Some((job, tiled, begins, block)) = blocks.next() {
        // Safety: the caller's.
        unsafe {
            let begin = Begin::of(job, begins, rows.start, column);
            let y = Output { at: job.y(rows.start, column), stride: job.stride };
            if fresh {
                begin.copy(edge.clone(), rows.start, valid, sums);
                out = y;
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
            let waiting = Output { at: sums, stride: PANEL };
            let steps = block.len().div_ceil(STEPS);
            let is_turned_here = job.side == Side::Backward && job.turned.is_none();
            tiles::Block {
                inputs: tiled.at(rows.start, block.start),
                inputs_stride: tiled.tile_bytes(),
                weights: weights.cast(),
                steps,
                next: weights.wrapping_add(if is_turned_here { 0 } else { steps * STEPS / 2 * PANEL }).cast(),
                from: if fresh { begin } else { Begin::Rows(waiting.at, PANEL) },
                to: if blocks.peek().is_none() { y } else { waiting },
                whole,
                edge: waiting,
            }
            .multiply(tiles);
        }
        fresh = false;
    }
    for row in edge {
        // Safety: the caller's.
        unsafe { copy(sums.add((row - rows.start) * PANEL), out.at.add((row - rows.start) * out.stride), valid) };
    }
}

/// What sums of tiles begin with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Begin {
    Zero,
    /// For every row the same.
    Bias(*const f32),
    /// From the first row of the piece on, and their stride.
    Rows(*const f32, usize),
}

impl Begin {
    /// Of a job's outputs from a row and column on.
    pub(super) unsafe fn of(job: &Job<'_>, begins: bool, row: usize, column: usize) -> Begin {
        match job.start {
            Start::Zero if begins => Begin::Zero,
            Start::Bias(bias) if begins => Begin::Bias(bias[column..].as_ptr()),
            Start::Rows(rows) if begins => Begin::Rows(rows.at(row, column), rows.stride),
            // Safety: the caller's.
            Start::Zero | Start::Bias(_) | Start::Rows(_) | Start::Add => unsafe {
                Begin::Rows(job.y(row, column).cast_const(), job.stride)
            },
        }
    }

    /// Into the sums of some rows, so many columns.
    pub(super) unsafe fn copy(self, rows: Range<usize>, first: usize, valid: usize, sums: *mut f32) {
        for row in rows {
            // Safety: the caller's.
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

/// Where tiles go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    pub at: *mut f32,
    pub stride: usize,
}

/// Operations of a step of [`peak`].
pub(super) const PEAK_FLOPS: usize = 4 * 2 * ROWS * ROWS * STEPS;

/// Four products of tiles a step.
///
/// # Safety
/// The machine has AMX.
pub(super) unsafe fn peak(steps: usize) -> f32 {
    configure();
    // Safety: the caller's; only registers.
    unsafe {
        std::arch::asm!(
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {steps}",
            "jnz 2b",
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
    0.0
}

/// The inputs of a job for some rows, on the calling thread.
///
/// # Safety
/// The machine has AVX-512.
pub(super) unsafe fn lay_out(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, lines: &mut Vec<Line>) {
    let words = rows.len().div_ceil(ROWS) * sum.len().div_ceil(STEPS) * tiles::BYTES / 4;
    // Safety: the caller's; there is room.
    unsafe { pack(job, rows, sum, room(lines, words).cast()) };
}

/// `[tile][block][16][32]` bf16, zeros beyond the rows and the sum.
///
/// # Safety
/// The machine has AVX-512, and there is room.
unsafe fn pack(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, out: *mut u8) {
    // Safety: the caller's.
    unsafe {
        match std::arch::is_x86_feature_detected!("avx512bf16") {
            true => pack_converting(job, rows, sum, out),
            false => pack_rounding(job, rows, sum, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pack_converting(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, out: *mut u8) {
    // Safety: 64 bytes both.
    unsafe { pack_with(job, rows, sum, out, |low, high| std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))) }
}

#[target_feature(enable = "avx512f")]
unsafe fn pack_rounding(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, out: *mut u8) {
    let narrow = |value: __m512| -> __m256i {
        let bits = _mm512_castps_si512(value);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        // What is no number stays none.
        let none = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        let rounded = _mm512_mask_or_epi32(nearest, none, bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
    };
    let both = |low, high| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow(low)), narrow(high));
    // Safety: the caller's.
    unsafe { pack_with(job, rows, sum, out, both) }
}

/// `narrow` makes 32 bf16 of 2 × 16 values.
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
        // Safety: there is room for the tiles, and the loads of the last block are masked.
        unsafe {
            let out = out.add(row / ROWS * blocks * tiles::BYTES + row % ROWS * 2 * STEPS);
            let at = |block: usize| out.add(block * tiles::BYTES).cast::<__m512i>();
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

/// Outputs of a panel.
pub(super) fn valid(job: &Job<'_>, panel: usize) -> usize {
    job.columns.end.saturating_sub(panel * PANEL).min(PANEL)
}
