//! AMX kernels, which multiply tiles of 16 × 32 bf16. They use inline assembly, because the intrinsics are not stable.
//!
//! Sources: Intel's manual (volume 1, chapter 18; volume 2, TDPBF16PS); for
//! the permission, Linux's `ARCH_REQ_XCOMP_PERM`.

mod codes;
mod few;
mod permission;
#[cfg(all(test, target_os = "linux"))]
pub(super) mod tests;
mod tiles;

use std::ops::Range;

use super::gemm::Job;
use super::gemm::pairs::{self, Block, Multiply, Parts, ROWS, STEPS};
use super::gemm::product::Scratch;
#[cfg(all(test, target_os = "linux"))]
use super::isa::Isa;
use permission::configure;
pub(super) use permission::refused;

/// AMX, as an instruction that multiplies pairs of bf16.
pub(super) struct Amx;

impl Multiply for Amx {
    const ROWS_AT_ONCE: usize = 288;
    const ROWS_TRANSPOSING: usize = Self::ROWS_AT_ONCE;
    const INPUTS: usize = Self::ROWS_AT_ONCE * Self::DEEPER;
    // A block stays in the first-level cache while all rows are processed.
    const DEEP: usize = 256;
    const DEEPER: usize = 2048;

    fn steps_at_once(rows: usize) -> usize {
        // One tile of rows: a single block, since the weights are read only once anyway.
        if rows <= ROWS { usize::MAX / 2 } else { Self::DEEP }
    }

    fn rows_in_place(rows: usize) -> usize {
        rows / ROWS * ROWS
    }

    unsafe fn multiply(block: &Block) {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { tiles::multiply(block) };
    }

    unsafe fn multiply_few(parts: &Parts<'_, '_>, rows: &Range<usize>, panels: Range<usize>, sums: *mut f32) -> bool {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe {
            if few::takes(parts) {
                few::product(parts, rows, panels, sums);
            } else if codes::takes(parts, &panels) {
                codes::product(parts, rows, panels, sums);
            } else {
                return false;
            }
        }
        true
    }
}

/// Computes products with AMX, see [`pairs::product`].
///
/// # Safety
/// The machine has AMX; otherwise as for [`pairs::product`].
pub(super) unsafe fn product(jobs: &[Job<'_>], scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    configure(ROWS);
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { pairs::product::<Amx>(jobs, scratch, rows, panels) };
}

/// Number of floating-point operations in a step of [`peak`].
pub(super) const PEAK_FLOPS: usize = 4 * 2 * ROWS * ROWS * STEPS;

/// Computes four tile products per step, to measure the peak throughput of AMX.
///
/// # Safety
/// The machine has AMX.
pub(super) unsafe fn peak(steps: usize) -> f32 {
    configure(ROWS);
    // Safety: the caller guarantees that the machine has AMX; only registers are used.
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
