//! Products of few rows with [`Gemm::Fast`](super::Gemm::Fast), as in decoding: a single launch computes product and
//! added terms at the speed of memory.

use super::super::driver::{Device, Launch};
use super::super::rows::{Dtype, Result, Rows, check};
use super::{Form, Product, SplitK, by_16, params};

/// Maximum number of rows: those of a tensor core's tile.
const MOST_ROWS: usize = 16;
/// Number of columns that a thread block computes.
const COLUMNS: usize = 8;
/// Number of values of k in a step, and number of steps that a warp has in progress.
const STEP: usize = 32;
const STEPS: usize = 8;
const MOST_WARPS: usize = 16;

/// Whether there is a kernel of few rows for this product.
pub(super) fn is_few(product: &Product<'_>, out: Rows<'_>) -> bool {
    let Product { form, a, b, .. } = *product;
    let whole = a.width.is_multiple_of(8) && by_16(a) && by_16(b);
    form == Form::Nt && a.dtype == Dtype::Bf16 && out.rows <= MOST_ROWS && whole
}

/// Computes a product of few rows. The number of warps that share k depends only on k, so that a row's bits do not
/// depend on the other rows.
pub(super) fn few(device: &Device, product: &Product<'_>, out: Rows<'_>) -> Result<()> {
    let k = product.a.width;
    let (blocks, warps) = (out.width.div_ceil(COLUMNS), k.div_ceil(STEP * STEPS).clamp(1, MOST_WARPS));
    check(blocks < 1 << 31, || {
        format!("a matrix product of {} columns needs more blocks than a GPU grid can have", out.width)
    })?;
    let kernel = match out.rows {
        ..=8 => out.dtype.of(["gemm_few_f32", "gemm_few_bf16"]),
        _ => out.dtype.of(["gemm_few_tall_f32", "gemm_few_tall_bf16"]),
    };
    let launch = Launch {
        grid: [blocks as u32, 1, 1],
        block: 32 * warps as u32,
        shared: (warps * MOST_ROWS * COLUMNS * size_of::<f32>()) as u32,
    };
    device.launch(kernel, launch, &params(product, SplitK::whole(k), out)?)
}
