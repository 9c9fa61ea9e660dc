//! AdamW on flat f32 buffers, with moments in f32 or in 8 bits, bit for bit like [`Update::apply`] on the host;
//! and the gradient's norm.

use super::driver::{Buffer, Device, Launch, params};
use super::rows::{Dtype, Result, Rows, THREADS, check, check_rows, size};
use crate::adamw::{BLOCK, Update};

/// The flat buffers of an AdamW update, of equal length, each one row of f32.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// The parameters, changed in place.
    pub parameters: Rows<'a>,
    /// The gradient of the parameters.
    pub gradient: Rows<'a>,
    /// First moment m, changed in place.
    pub first: Rows<'a>,
    /// Second moment v, changed in place.
    pub second: Rows<'a>,
}

params! {
    struct AdamW {
        parameters: u64,
        gradient: u64,
        first: u64,
        second: u64,
        count: u64,
        decayed: u64,
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

params! {
    struct AdamW8bit {
        parameters: u64,
        gradient: u64,
        first: u64,
        second: u64,
        first_scales: u64,
        second_scales: u64,
        levels: u64,
        count: u64,
        decayed: u64,
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

/// A flat buffer with 8 bits per value and one scale per block of 256 values; see the engine's `optim::blockwise`.
#[derive(Debug)]
pub struct Codes {
    /// The 8-bit codes, one u8 per value.
    pub codes: Buffer,
    /// The scales, one f32 per block of values.
    pub scales: Buffer,
}

impl Codes {
    /// Waits for the codes of `count` values and their scales, and returns both.
    ///
    /// # Errors
    /// [`CudaError::Input`](super::driver::CudaError::Input) if the buffer has fewer than `count` values.
    pub fn values(&self, count: usize) -> Result<(Vec<u8>, Vec<f32>)> {
        let device = self.codes.device();
        Ok((device.download(&self.codes, 0, count)?, device.download(&self.scales, 0, count.div_ceil(BLOCK))?))
    }
}

fn is_flat(rows: &Rows<'_>, count: usize) -> bool {
    (rows.rows, rows.width, rows.dtype) == (1, count, Dtype::F32)
}

fn one_each(count: usize) -> Result<Launch> {
    Ok(Launch { grid: [size(count.div_ceil(THREADS as usize))?, 1, 1], block: THREADS, shared: 0 })
}

/// Computes one AdamW update with moments in f32; weight decay applies to the first `decayed` parameters.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the buffers differ in length.
pub fn adamw(device: &Device, update: &Update, decayed: usize, state: State<'_>) -> Result<()> {
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
        decayed: decayed as u64,
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

/// Computes an AdamW update like [`adamw`] with first and second moments in 8 bits; `levels` holds the quantization
/// levels of both, f32 `[2][256]`.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the buffers differ in length.
pub fn adamw_8bit(
    device: &Device,
    (update, decayed): (&Update, usize),
    parameters: Rows<'_>,
    gradient: Rows<'_>,
    [first, second]: [&Codes; 2],
    levels: &Buffer,
) -> Result<()> {
    let count = parameters.width;
    check_rows(is_flat(&parameters, count) && is_flat(&gradient, count), "adamw_8bit", &[parameters, gradient])?;
    check(levels.count::<f32>() == 2 * BLOCK, || {
        format!("the 8-bit optimizer was given {} quantization levels, not two maps of 256", levels.count::<f32>())
    })?;
    if count == 0 {
        return Ok(());
    }
    let blocks = count.div_ceil(BLOCK);
    let Update { step_size, keep, beta2, one_minus_beta1, one_minus_beta2, correction, epsilon } = *update;
    let params = AdamW8bit {
        parameters: parameters.address()?,
        gradient: gradient.address()?,
        first: first.codes.at::<u8>(0, count)?,
        second: second.codes.at::<u8>(0, count)?,
        first_scales: first.scales.at::<f32>(0, blocks)?,
        second_scales: second.scales.at::<f32>(0, blocks)?,
        levels: levels.pointer(),
        count: count as u64,
        decayed: decayed as u64,
        step_size,
        keep,
        beta2,
        one_minus_beta1,
        one_minus_beta2,
        correction,
        epsilon,
        pad: 0,
    };
    device.launch("adamw_8bit", Launch { grid: [size(blocks)?, 1, 1], block: BLOCK as u32, shared: 0 }, &params)
}

params! {
    struct Squares { x: u64, sums: u64, count: u64, of_block: u64 }
}

/// The L2 norm of a flat gradient, summed in f64 in a fixed order; waits for the result.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the gradient is not one row of f32.
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

/// Multiplies the flat gradient by a factor.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the gradient is not one row of f32.
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
    use crate::rows::tests::assert_same;

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
            let decayed = 2 * count / 3;
            let [mut p, mut m, mut v] = [&parameters, &first, &second].map(Given::values);
            for _ in 0..3 {
                let state = State {
                    parameters: parameters.rows(),
                    gradient: gradient.rows(),
                    first: first.rows(),
                    second: second.rows(),
                };
                adamw(&device, &update, decayed, state).expect("an update");
                update.apply(decayed, &mut p, &gradient.values(), (&mut m, &mut v));
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
