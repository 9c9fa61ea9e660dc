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

#[cfg(test)]
mod tests {
    use super::super::rows::tests::{Given, device};
    use super::*;
    use crate::engine::kernels::rows::tests::assert_same;

    #[test]
    fn an_update_has_the_bits_of_the_hosts() {
        let Some(device) = device() else { return };
        for count in [1, 37, 256, 3000] {
            let given = |seed| Given::placed(&device, (1, count), (5, count), seed, Dtype::F32);
            let (parameters, gradient, first) = (given(1), given(2), given(3));
            let squares: Vec<f32> = given(4).values().iter().map(|value| value * value).collect();
            let second = Given::of(&device, &squares, count, Dtype::F32);
            let update = Update {
                step_size: 3e-3,
                keep: 1.0 - 1e-4,
                beta2: 0.999,
                one_minus_beta1: 0.1,
                one_minus_beta2: 0.001,
                correction: 0.17,
                epsilon: 1e-8,
            };
            let [mut p, mut m, mut v] = [&parameters, &first, &second].map(Given::values);
            for _ in 0..3 {
                let state = State {
                    parameters: parameters.rows(),
                    gradient: gradient.rows(),
                    first: first.rows(),
                    second: second.rows(),
                };
                adamw(&device, &update, state).expect("an update");
                // As engine::optim has it.
                for (i, g) in gradient.values().into_iter().enumerate() {
                    m[i] += (g - m[i]) * update.one_minus_beta1;
                    v[i] = v[i] * update.beta2 + g * g * update.one_minus_beta2;
                    p[i] = p[i] * update.keep
                        - update.step_size * (m[i] / (v[i].sqrt() / update.correction + update.epsilon));
                }
            }
            assert_same(&parameters.now(&device), &p, "parameters");
            assert_same(&first.now(&device), &m, "first moments");
            assert_same(&second.now(&device), &v, "second moments");
        }
    }

    #[test]
    fn a_gradient_is_measured_and_scaled() {
        let Some(device) = device() else { return };
        for count in [1, 255, 16384, 40_001] {
            let gradient = Given::placed(&device, (1, count), (3, count), 1, Dtype::F32);
            let expected = gradient.wide().iter().map(|value| value * value).sum::<f64>().sqrt();
            let actual = norm(&device, gradient.rows()).expect("a norm");
            assert!((actual - expected).abs() <= 1e-12 * expected, "{actual} for {expected}");
            scale(&device, gradient.rows(), 0.3).expect("a product");
            let scaled: Vec<f32> = gradient.values().iter().map(|value| value * 0.3).collect();
            assert_same(&gradient.now(&device), &scaled, "scaled");
        }
    }
}
