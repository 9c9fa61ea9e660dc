//! AdamW on flat f32 buffers, as `engine::optim::AdamW` on the host, bit for bit, and the gradient's norm.

use super::driver::{Device, Launch, params};
use super::rows::{Dtype, Result, Rows, THREADS, check_rows, size};

/// The numbers of one update, as `engine::optim` computes them.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// lr / (1 − β₁ᵗ)
    pub step_size: f32,
    /// 1 − lr · weight decay
    pub keep: f32,
    /// β₂
    pub beta2: f32,
    /// 1 − β₁
    pub one_minus_beta1: f32,
    /// 1 − β₂
    pub one_minus_beta2: f32,
    /// √(1 − β₂ᵗ)
    pub correction: f32,
    /// ε
    pub epsilon: f32,
}

/// Flat buffers of one length, one row of f32 each.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// Changed in place.
    pub parameters: Rows<'a>,
    /// dL/dparameters.
    pub gradient: Rows<'a>,
    /// m, changed in place.
    pub first: Rows<'a>,
    /// v, changed in place.
    pub second: Rows<'a>,
}

params! {
    struct AdamW {
        parameters: u64,
        gradient: u64,
        first: u64,
        second: u64,
        count: u64,
        step_size: f32,
        keep: f32,
        beta2: f32,
        one_minus_beta1: f32,
        one_minus_beta2: f32,
        correction: f32,
        epsilon: f32,
        pad: u32,
    }
}

fn is_flat(rows: &Rows<'_>, count: usize) -> bool {
    (rows.rows, rows.width, rows.dtype) == (1, count, Dtype::F32)
}

fn one_each(count: usize) -> Result<Launch> {
    Ok(Launch { grid: [size(count.div_ceil(THREADS as usize))?, 1, 1], block: THREADS, shared: 0 })
}

/// One update.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): the buffers differ in length.
pub fn adamw(device: &Device, update: &Update, state: State<'_>) -> Result<()> {
    let State { parameters, gradient, first, second } = state;
    let count = parameters.width;
    let all = [parameters, gradient, first, second];
    check_rows(all.iter().all(|rows| is_flat(rows, count)), "adamw", &all)?;
    if count == 0 {
        return Ok(());
    }
    let Update { step_size, keep, beta2, one_minus_beta1, one_minus_beta2, correction, epsilon } = *update;
    let params = AdamW {
        parameters: parameters.address()?,
        gradient: gradient.address()?,
        first: first.address()?,
        second: second.address()?,
        count: count as u64,
        step_size,
        keep,
        beta2,
        one_minus_beta1,
        one_minus_beta2,
        correction,
        epsilon,
        pad: 0,
    };
    device.launch("adamw", one_each(count)?, &params)
}

params! {
    struct Squares { x: u64, sums: u64, count: u64, of_block: u64 }
}

/// The L2 norm of a flat gradient, summed in f64 in a fixed order; waits for it.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): it is not one row of f32.
pub fn norm(device: &Device, gradient: Rows<'_>) -> Result<f64> {
    const OF_BLOCK: usize = 1 << 14;
    let count = gradient.width;
    check_rows(is_flat(&gradient, count), "norm", &[gradient])?;
    let blocks = count.div_ceil(OF_BLOCK);
    if blocks == 0 {
        return Ok(0.0);
    }
    let sums = device.alloc(blocks * size_of::<f64>())?;
    let params = Squares {
        x: gradient.address()?,
        sums: sums.at::<f64>(0, blocks)?,
        count: count as u64,
        of_block: OF_BLOCK as u64,
    };
    device.launch("squares", Launch { grid: [size(blocks)?, 1, 1], block: THREADS, shared: 0 }, &params)?;
    Ok(device.download::<f64>(&sums, 0, blocks)?.iter().sum::<f64>().sqrt())
}

params! {
    struct ScaleFlat { x: u64, count: u64, factor: f32, pad: u32 }
}

/// gradient ·= factor
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): it is not one row of f32.
pub fn scale(device: &Device, gradient: Rows<'_>, factor: f32) -> Result<()> {
    let count = gradient.width;
    check_rows(is_flat(&gradient, count), "scale", &[gradient])?;
    if count == 0 {
        return Ok(());
    }
    let params = ScaleFlat { x: gradient.address()?, count: count as u64, factor, pad: 0 };
    device.launch("scale_flat", one_each(count)?, &params)
}
