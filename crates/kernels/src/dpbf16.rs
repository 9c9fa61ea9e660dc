//! Matrix products with AVX512-BF16: its instruction `VDPBF16PS` multiplies pairs of bf16 and adds the products to f32 sums.
//!
//! The kernels read the same packed weights as AMX, and inputs in the same layout ([`pairs::Tiled`]), rounded to bf16 once. Each
//! output is one chain of pairs in order, for any number of rows and threads. The function `naive` defines the exact
//! arithmetic of the instruction.

mod calibration;
mod kernels;
#[cfg(all(test, target_os = "linux"))]
pub(super) mod tests;

use std::ops::Range;

use super::gemm::Job;
use super::gemm::pairs::{self, Block, Multiply};
use super::gemm::product::Scratch;
use super::pack::PackedMatrix;
pub(super) use calibration::{gain, refused};
pub(super) use kernels::{PEAK_FLOPS, peak};

/// AVX512-BF16, as an instruction that multiplies pairs of bf16.
pub(super) struct Dpbf16;

impl Multiply for Dpbf16 {
    const ROWS_AT_ONCE: usize = 144;
    const ROWS_TRANSPOSING: usize = 2 * Self::ROWS_AT_ONCE;
    // Half of a second-level cache of 1 MiB.
    const INPUTS: usize = 256 << 10;
    const DEEP: usize = 512;
    const DEEPER: usize = Self::DEEP;

    fn steps_at_once(rows: usize) -> usize {
        match rows {
            // One group of rows: a single block, since the weights are read only once anyway.
            0..=kernels::ROWS => usize::MAX / 2,
            _ => Self::DEEP,
        }
    }

    const ROWS_OF_CODES: usize = kernels::ROWS;

    fn rows_in_place(rows: usize) -> usize {
        rows
    }

    unsafe fn multiply_codes(block: &Block, weight: &PackedMatrix, panel: usize, steps: Range<usize>) -> bool {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { kernels::multiply_codes(block, weight, panel, steps) }
    }

    unsafe fn multiply(block: &Block) {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { kernels::multiply(block) };
    }
}

/// Computes products with AVX512-BF16, see [`pairs::product`].
///
/// # Safety
/// The machine has AVX512-BF16; otherwise as for [`pairs::product`].
pub(super) unsafe fn product(jobs: &[Job<'_>], scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { pairs::product::<Dpbf16>(jobs, scratch, rows, panels) };
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
