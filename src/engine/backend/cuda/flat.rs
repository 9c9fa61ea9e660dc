//! Flat f32 values on the device: what is trained, its gradient, and the moments of AdamW beside them.

use crate::engine::error::Result;
use crate::engine::kernels::cuda::driver::{Buffer, Device};
use crate::engine::kernels::cuda::optim::{self, Codes, State};
use crate::engine::kernels::cuda::rows::{Dtype, Rows};
use crate::engine::optim::blockwise::{Map, Quantized};
use crate::engine::optim::{self as host, Update};

/// f32, one after the other.
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

    /// As many zeros on the same device.
    pub fn zeros_like(&self) -> Result<Flat> {
        Flat::zeros(self.buffer.device(), self.len)
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Wait for the values.
    pub fn values(&self) -> Result<Vec<f32>> {
        Ok(self.buffer.device().download(&self.buffer, 0, self.len)?)
    }

    /// Overwrite those from `at` on.
    pub fn write(&mut self, at: usize, values: &[f32]) -> Result<()> {
        Ok(self.buffer.device().write(&self.buffer, at, values)?)
    }

    /// Wait until they are there.
    pub fn settle(&self) -> Result<()> {
        Ok(self.buffer.device().synchronize()?)
    }

    /// Wait for the L2 norm.
    pub fn norm(&self) -> Result<f64> {
        Ok(optim::norm(self.buffer.device(), self.all())?)
    }

    /// Multiply all.
    pub fn scale(&mut self, factor: f32) -> Result<()> {
        Ok(optim::scale(self.buffer.device(), self.all(), factor)?)
    }

    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    fn all(&self) -> Rows<'_> {
        self.vector(0, self.len)
    }

    /// A place among them.
    pub(super) fn vector(&self, at: usize, width: usize) -> Rows<'_> {
        Rows::flat(&self.buffer, at, width, Dtype::F32)
    }

    /// A place of several rows.
    pub(super) fn matrix(&self, at: usize, rows: usize, width: usize) -> Rows<'_> {
        Rows::within(&self.buffer, at, rows, width)
    }
}

/// First and second moments on the device.
#[derive(Debug)]
pub enum Moments {
    /// 8 bytes a parameter.
    F32 {
        /// m
        first: Flat,
        /// v
        second: Flat,
    },
    /// 2 bytes a parameter and 8 a block.
    Blockwise {
        /// m
        first: Codes,
        /// v
        second: Codes,
        /// Of both maps, `[2][256]`.
        levels: Buffer,
        /// Parameters.
        len: usize,
    },
}

impl Moments {
    /// These, where the parameters are.
    pub fn beside(parameters: &Flat, moments: &host::Moments) -> Result<Moments> {
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

    /// Parameters.
    pub fn len(&self) -> usize {
        match self {
            Moments::F32 { first, .. } => first.len,
            Moments::Blockwise { len, .. } => *len,
        }
    }

    /// Whether there is no parameter.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Wait for them.
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

    /// One update of the parameters, the first `decayed` of which decay, and of the moments.
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
