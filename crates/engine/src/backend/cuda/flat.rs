//! Flat f32 values on the device: trained parameters, their gradient, and the moments of AdamW.

use crate::error::Result;
use crate::kernels::adamw::Update;
use crate::kernels::cuda::driver::{Buffer, Device};
use crate::kernels::cuda::optim::{self, Codes, State};
use crate::kernels::cuda::rows::{Dtype, Rows};
use crate::optim as host;
use crate::optim::blockwise::{Map, Quantized};

/// Contiguous f32 values on the device.
#[derive(Debug)]
pub struct Flat {
    buffer: Buffer,
    len: usize,
}

impl Flat {
    pub(super) fn zeros(device: &Device, len: usize) -> Result<Flat> {
        Ok(Flat { buffer: device.zeros(len * size_of::<f32>())?, len })
    }

    pub(super) fn new(device: &Device, values: &[f32]) -> Result<Flat> {
        let buffer = match values.iter().all(|value| value.to_bits() == 0) {
            true => device.zeros(size_of_val(values))?,
            false => device.upload(values)?,
        };
        Ok(Flat { buffer, len: values.len() })
    }

    /// Allocates as many zeros on the same device.
    pub fn zeros_like(&self) -> Result<Flat> {
        Flat::zeros(self.buffer.device(), self.len)
    }

    /// Number of values in the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Waits for the values and copies them to the host.
    pub fn values(&self) -> Result<Vec<f32>> {
        Ok(self.buffer.device().download(&self.buffer, 0, self.len)?)
    }

    /// Overwrites the values from index `at` on.
    pub fn write(&mut self, at: usize, values: &[f32]) -> Result<()> {
        Ok(self.buffer.device().write(&self.buffer, at, values)?)
    }

    /// Waits until all queued writes are done.
    pub fn settle(&self) -> Result<()> {
        Ok(self.buffer.device().synchronize()?)
    }

    /// Waits for the L2 norm of all values.
    pub fn norm(&self) -> Result<f64> {
        Ok(optim::norm(self.buffer.device(), self.all())?)
    }

    /// Multiplies all values by a factor.
    pub fn scale(&mut self, factor: f32) -> Result<()> {
        Ok(optim::scale(self.buffer.device(), self.all(), factor)?)
    }

    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    fn all(&self) -> Rows<'_> {
        self.vector(0, self.len)
    }

    /// A view of `width` values from index `at` on.
    pub(super) fn vector(&self, at: usize, width: usize) -> Rows<'_> {
        Rows::flat(&self.buffer, at, width, Dtype::F32)
    }

    /// A view of several rows from index `at` on.
    pub(super) fn matrix(&self, at: usize, rows: usize, width: usize) -> Rows<'_> {
        Rows::within(&self.buffer, at, rows, width)
    }
}

/// First and second moments on the device.
#[derive(Debug)]
pub enum Moments {
    /// Moments in f32: 8 bytes per parameter.
    F32 {
        /// First moment m of each parameter.
        first: Flat,
        /// Second moment v of each parameter.
        second: Flat,
    },
    /// Moments in 8 bits: 2 bytes per parameter and 8 per block.
    Blockwise {
        /// First moment m of each parameter.
        first: Codes,
        /// Second moment v of each parameter.
        second: Codes,
        /// The quantization levels of 8-bit moments, `[2][256]`: those of the first moments, then those of the second.
        levels: Buffer,
        /// Number of parameters that have moments.
        len: usize,
    },
}

impl Moments {
    /// Copies host moments to the device that holds the parameters.
    pub fn from_host(parameters: &Flat, moments: &host::Moments) -> Result<Moments> {
        let device = parameters.buffer.device();
        let codes = |quantized: &Quantized| -> Result<Codes> {
            let (codes, scales) = (device.upload(&quantized.codes)?, device.upload(&quantized.absmax)?);
            Ok(Codes { codes, scales })
        };
        Ok(match moments {
            host::Moments::F32 { first, second } => {
                Moments::F32 { first: Flat::new(device, first)?, second: Flat::new(device, second)? }
            }
            host::Moments::Blockwise { first, second } => Moments::Blockwise {
                len: first.codes.len(),
                first: codes(first)?,
                second: codes(second)?,
                levels: device.upload(&[*Map::Signed.levels(), *Map::Unsigned.levels()].concat())?,
            },
        })
    }

    /// Number of parameters that have moments.
    pub fn len(&self) -> usize {
        match self {
            Moments::F32 { first, .. } => first.len,
            Moments::Blockwise { len, .. } => *len,
        }
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits for the moments and copies them to the host.
    pub fn values(&self) -> Result<host::Moments> {
        Ok(match self {
            Moments::F32 { first, second } => host::Moments::F32 { first: first.values()?, second: second.values()? },
            Moments::Blockwise { first, second, len, .. } => {
                let of = |map, codes: &Codes| -> Result<Quantized> {
                    let (codes, absmax) = codes.values(*len)?;
                    Ok(Quantized { map, codes, absmax })
                };
                host::Moments::Blockwise { first: of(Map::Signed, first)?, second: of(Map::Unsigned, second)? }
            }
        })
    }

    /// Updates the parameters and the moments; weight decay applies to the first `decayed` parameters.
    pub fn update(&mut self, update: &Update, decayed: usize, parameters: &mut Flat, gradient: &Flat) -> Result<()> {
        let device = parameters.buffer.device();
        let (parameters, gradient) = (parameters.all(), gradient.all());
        match self {
            Moments::F32 { first, second } => {
                let state = State { parameters, gradient, first: first.all(), second: second.all() };
                Ok(optim::adamw(device, update, decayed, state)?)
            }
            Moments::Blockwise { first, second, levels, .. } => {
                Ok(optim::adamw_8bit(device, (update, decayed), parameters, gradient, [first, second], levels)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cuda::driver::CudaError;
    use crate::optim::{AdamW, update_number};
    use crate::random::{Key, Stream};
    use crate::spec::{LrSchedulerType, OptimizerKind, OptimizerPlan};

    /// Opens the emulator or a GPU for a test; None if neither exists and the test is not required to use one.
    fn device() -> Option<Device> {
        let asked =
            cfg!(feature = "cuda-emulator") || std::env::var("RLOOD_TEST_BACKEND").is_ok_and(|kind| kind == "cuda");
        match Device::open(0) {
            Err(CudaError::Unavailable(why)) if !asked => {
                eprintln!("not run: {why}");
                None
            }
            opened => Some(opened.unwrap()),
        }
    }

    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let key = Key::new(seed, Stream::Probe);
        (0..count).map(|i| key.with(i as u64).uniform() as f32 - 0.5).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn a_cuda_update_of_moments_in_8_bits_has_the_bits_of_the_hosts() {
        let Some(device) = device() else { return };
        let plan = OptimizerPlan {
            kind: OptimizerKind::Adamw8bit,
            learning_rate: 1e-2,
            adam_beta1: 0.9,
            adam_beta2: 0.99,
            adam_epsilon: 1e-8,
            weight_decay: 0.1,
            max_grad_norm: 1.0,
            lr_scheduler_type: LrSchedulerType::Constant,
            warmup_steps: 0,
        };
        for count in [1, 255, 256, 3000] {
            let decayed = 2 * count / 3;
            let mut adam = AdamW { decayed, ..AdamW::of_kind(plan.kind, count) };
            let mut values = noise(count, 1);
            let mut parameters = Flat::new(&device, &values).unwrap();
            let mut moments = Moments::from_host(&parameters, &adam.moments).unwrap();
            for step in 1..6 {
                let mut gradient = noise(count, 1 + step);
                // The gradient includes whole blocks of zeros, values of many magnitudes, and values from which no
                // scale can be computed.
                gradient.iter_mut().enumerate().for_each(|(i, g)| *g *= 10f32.powi(-((i % 9) as i32)));
                if step < 3 {
                    gradient.iter_mut().skip(512).take(256).for_each(|g| *g = 0.0);
                }
                if step == 5 {
                    gradient[count / 2] = f32::NAN;
                }
                adam.update(&mut values, &gradient, plan.learning_rate, &plan).unwrap();
                let update = update_number(step, plan.learning_rate, &plan);
                let gradient = Flat::new(&device, &gradient).unwrap();
                moments.update(&update, decayed, &mut parameters, &gradient).unwrap();
                let (host::Moments::Blockwise { first: m, second: v }, now) =
                    (&adam.moments, moments.values().unwrap())
                else {
                    panic!("{adam:?}")
                };
                let host::Moments::Blockwise { first, second } = now else { panic!("{now:?}") };
                for (ours, theirs, name) in [(&first, m, "first"), (&second, v, "second")] {
                    assert!(ours.codes == theirs.codes, "{name} moments of {count} after {step}");
                    assert_eq!(bits(&ours.absmax), bits(&theirs.absmax), "{name} scales of {count} after {step}");
                }
                let now = parameters.values().unwrap();
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                assert!(now.iter().zip(&values).all(same), "parameters of {count} after {step}");
            }
        }
    }
}
