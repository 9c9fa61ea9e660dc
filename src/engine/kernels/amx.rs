//! AMX: tiles of 16 × 32 bf16 multiplied at once. The instructions are written by name: their intrinsics are not stable.
//!
//! Intel's manual (volume 1, chapter 18; volume 2, TDPBF16PS); the permission is Linux's `ARCH_REQ_XCOMP_PERM`.

#[cfg(all(test, target_os = "linux"))]
pub(super) mod emulator;
mod tiles;

use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;

use super::gemm::product::{Scratch, copy, pieces, room, turn};
use super::gemm::tile::rung;
use super::gemm::{Job, Side, Start};
use super::isa::Isa;
use super::pack::{Line, PANEL};

/// Rows of a tile.
const ROWS: usize = 16;
/// Steps of a sum that a tile holds.
const STEPS: usize = 32;
/// Rows for which a block of weights is turned once; with [`DEEPER`] the inputs stay in the second-level cache.
const ROWS_AT_ONCE: usize = 512;
/// Steps of the packed inputs of many rows.
const DEEPER: usize = 1024;
/// Elements of packed inputs of fewer rows.
const INPUTS: usize = ROWS_AT_ONCE * DEEPER;
/// Steps of a block of weights that stays in the first-level cache while the rows stream by.
const DEEP: usize = 256;

/// Why AMX is not used: `None` where it is.
pub(super) fn refused() -> Option<&'static str> {
    static REFUSED: OnceLock<Option<&str>> = OnceLock::new();
    *REFUSED.get_or_init(|| {
        if !Isa::Avx512.is_available() {
            return Some("the processor has no AVX-512");
        }
        if !has_tiles() {
            return Some("the processor has no AMX for bf16");
        }
        if !is_permitted() {
            return Some("the system does not permit AMX");
        }
        check()
    })
}

/// AMX-BF16 and AMX-TILE.
fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const NEEDED: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & NEEDED == NEEDED
}

/// Ask for the state of the tiles, once for the process.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let result: isize;
    // Safety: the call touches no memory of ours.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// A few odd shapes against the rung below.
fn check() -> Option<&'static str> {
    const SHAPES: [(usize, usize, usize); 4] = [(1, 1, 1), (17, 65, 33), (33, 31, 70), (5, 100, 300)];
    // Inputs and weights are exact; only the order of the sums differs.
    const TOLERANCE: f32 = 1e-3;
    let wrong = SHAPES.iter().any(|shape| super::gemm::apart(Isa::Amx, Isa::Avx512, *shape) > TOLERANCE);
    wrong.then_some("AMX gives wrong products on this machine")
}

thread_local! {
    /// Whether this thread's tiles have their shapes. Nothing else in the process configures tiles.
    static CONFIGURED: Cell<bool> = const { Cell::new(false) };
}

/// Shapes of the tiles: 16 rows of 64 bytes all.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

fn configure() {
    const TILES: usize = 8;
    if CONFIGURED.replace(true) {
        return;
    }
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    configuration.row_bytes[..TILES].fill(64);
    configuration.rows[..TILES].fill(ROWS as u8);
    // Safety: the machine has tiles.
    unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) };
}

/// The part of a product that lies in these rows and panels.
///
/// # Safety
/// The machine has AMX and AVX-512; rows and panels are the job's, the weight is a pack of bf16.
pub(super) unsafe fn product(job: &Job<'_>, scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    configure();
    let rung = rung(Isa::Avx512);
    let Scratch { inputs, turned, edge, .. } = scratch;
    let inputs = &mut inputs[job.slot];
    for rows in pieces(rows, ROWS_AT_ONCE) {
        let tiles = rows.len().div_ceil(ROWS);
        let sums = room(edge, tiles * ROWS * PANEL);
        let deeper = (INPUTS / (tiles * ROWS)).max(DEEPER) / DEEP * DEEP;
        for sum in pieces(job.sum.clone(), deeper) {
            let blocks = sum.len().div_ceil(STEPS);
            if !inputs.holds(job, &rows, &sum, 0) {
                // Safety: AVX-512.
                unsafe { pack_inputs(job, &rows, &sum, &mut inputs.lines) };
            }
            let packed = inputs.lines.as_ptr().cast::<u8>();
            for panel in panels.clone() {
                let all = job.depth(panel);
                let depth = sum.start.max(all.start)..sum.end.min(all.end);
                if depth.is_empty() {
                    continue;
                }
                let mut zero = depth.start == all.start && matches!(job.start, Start::Zero);
                // Safety: the caller's; there is room for the sums, and the blocks lie inside the weight.
                unsafe {
                    if !zero {
                        begin(job, &rows, panel, depth.start == all.start, sums);
                    }
                    // Few rows: the weights stream by once.
                    let deep = if tiles == 1 { depth.len().next_multiple_of(STEPS) } else { DEEP };
                    for block in pieces(depth.clone(), deep) {
                        let weights = match job.side {
                            Side::Forward => job.weight.panel(panel).add(block.start / 2 * PANEL),
                            Side::Backward => turn(rung, job.weight, panel, &block, turned),
                        };
                        let at = tiles::Block {
                            inputs: packed.add((block.start - sum.start) / STEPS * tiles::BYTES),
                            inputs_stride: blocks * tiles::BYTES,
                            weights: weights.cast(),
                            steps: block.len().div_ceil(STEPS),
                            sums,
                            zero,
                        };
                        at.multiply(tiles);
                        zero = false;
                    }
                    end(job, &rows, panel, sums);
                }
            }
        }
    }
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

/// `[tile][block][16][32]` bf16, zeros beyond the rows and the sum.
#[target_feature(enable = "avx512f")]
unsafe fn pack_inputs(job: &Job<'_>, rows: &Range<usize>, sum: &Range<usize>, lines: &mut Vec<Line>) {
    use std::arch::x86_64::*;
    let (tiles, blocks) = (rows.len().div_ceil(ROWS), sum.len().div_ceil(STEPS));
    let out = room(lines, tiles * blocks * tiles::BYTES / 4).cast::<u8>();
    let tail = sum.len() % STEPS;
    // Values of the last block.
    let whole = if tail == 0 { blocks } else { blocks - 1 };
    let (first, second) = ((1u32 << tail.min(16)) - 1, (1u32 << tail.saturating_sub(16)) - 1);
    let narrow = |value: __m512| -> __m512i {
        let bits = _mm512_castps_si512(value);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        // What is no number stays none.
        let none = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        let rounded = _mm512_mask_or_epi32(nearest, none, bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_srli_epi32::<16>(rounded)
    };
    for row in 0..tiles * ROWS {
        // Safety: there is room for the tiles, and the loads of the last block are masked.
        unsafe {
            let out = out.add(row / ROWS * blocks * tiles::BYTES + row % ROWS * 2 * STEPS);
            let at = |block: usize| out.add(block * tiles::BYTES).cast::<__m256i>();
            if row >= rows.len() {
                for block in 0..blocks {
                    _mm512_storeu_si512(at(block).cast(), _mm512_setzero_si512());
                }
                continue;
            }
            let x = job.inputs.row(rows.start + row, sum).as_ptr();
            let put = |block: usize, low: __m512, high: __m512| {
                _mm256_storeu_si256(at(block), _mm512_cvtepi32_epi16(narrow(low)));
                _mm256_storeu_si256(at(block).add(1), _mm512_cvtepi32_epi16(narrow(high)));
            };
            for block in 0..whole {
                let x = x.add(block * STEPS);
                put(block, _mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16)));
            }
            if tail > 0 {
                let x = x.wrapping_add(whole * STEPS);
                let high = _mm512_maskz_loadu_ps(second as u16, x.wrapping_add(16));
                put(whole, _mm512_maskz_loadu_ps(first as u16, x), high);
            }
        }
    }
}

/// Outputs of a panel.
fn valid(job: &Job<'_>, panel: usize) -> usize {
    job.columns.end.saturating_sub(panel * PANEL).min(PANEL)
}

/// What the sums begin with: the bias, or what is in the output.
unsafe fn begin(job: &Job<'_>, rows: &Range<usize>, panel: usize, first: bool, sums: *mut f32) {
    let (valid, column) = (valid(job, panel), panel * PANEL);
    for (number, row) in rows.clone().enumerate() {
        // Safety: the caller's.
        unsafe {
            let from = match job.start {
                Start::Bias(bias) if first => bias[column..column + valid].as_ptr(),
                Start::Rows(rows) if first => rows.at(row, column),
                Start::Zero | Start::Bias(_) | Start::Rows(_) | Start::Add => job.y(row, column).cast_const(),
            };
            copy(from, sums.add(number * PANEL), valid);
        }
    }
}

/// The sums of the rows there are.
unsafe fn end(job: &Job<'_>, rows: &Range<usize>, panel: usize, sums: *const f32) {
    let (valid, column) = (valid(job, panel), panel * PANEL);
    for (number, row) in rows.clone().enumerate() {
        // Safety: the caller's.
        unsafe { copy(sums.add(number * PANEL), job.y(row, column), valid) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_shapes_of_the_start_up_check_agree_under_emulation() {
        if !emulator::install() {
            return;
        }
        for shape in [
            (1, 1, 1),
            (17, 65, 33),
            (33, 31, 70),
            (5, 100, 300),
            (70, 64, 32),
            (3, 33, 1100),
            (521, 33, 1100),
            (550, 1300, 40),
        ] {
            let apart = super::super::gemm::apart(Isa::Amx, Isa::Avx512, shape);
            assert!(apart <= 1e-3, "{shape:?}: {apart}");
        }
    }

    #[test]
    fn inputs_are_rounded_to_the_nearest_bf16() {
        if !emulator::install() {
            return;
        }
        let one = super::super::pack::PackedMatrix::new(&[1.0], 1, super::super::pack::PackDtype::Bf16);
        let given = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -3.0, f32::INFINITY, f32::from_bits(0x7fff_ffff)];
        let mut y = [0.0; 5];
        let terms = [super::super::gemm::Term { x: &given, stride: 1, weight: &one }];
        let out = super::super::gemm::Output { y: &mut y, stride: 1, rows: 5, add: false };
        super::super::gemm::forward_panels(Isa::Amx, &terms, None, 0..1, out);
        assert_eq!(y[..4], [1.0, 1.015_625, -3.0, f32::INFINITY]);
        assert!(y[4].is_nan());
    }
}
