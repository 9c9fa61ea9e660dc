//! What lies on the device.

use std::sync::Arc;

use half::bf16;

use crate::engine::error::Result;
use crate::engine::kernels::cuda::driver::{Buffer, Device};
use crate::engine::kernels::cuda::rows::{self, Dtype, Rows};
use crate::engine::ops::RopeTable;

/// `[count, width]`, row-major.
#[derive(Debug)]
pub struct Tensor {
    buffer: Buffer,
    count: usize,
    width: usize,
    dtype: Dtype,
}

impl Tensor {
    /// With whatever was in its memory.
    pub(super) fn new(device: &Device, count: usize, width: usize, dtype: Dtype) -> Result<Tensor> {
        Ok(Tensor { buffer: device.alloc(count * width * dtype.bytes())?, count, width, dtype })
    }

    /// Of zeros.
    pub(super) fn zeros(device: &Device, count: usize, width: usize, dtype: Dtype) -> Result<Tensor> {
        Ok(Tensor { buffer: device.zeros(count * width * dtype.bytes())?, count, width, dtype })
    }

    /// All of it.
    pub(super) fn rows(&self) -> Rows<'_> {
        Rows::new(&self.buffer, self.count, self.width, self.dtype)
    }

    /// Its rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Of its values.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The first rows of it.
    pub(super) fn first(self, count: usize) -> Tensor {
        Tensor { count: count.min(self.count), ..self }
    }

    /// Wait for its values.
    pub(super) fn values(&self, device: &Device) -> Result<Vec<f32>> {
        if self.dtype == Dtype::F32 {
            return Ok(device.download(&self.buffer, 0, self.count * self.width)?);
        }
        let wide = Tensor::new(device, self.count, self.width, Dtype::F32)?;
        rows::copy(device, self.rows(), wide.rows())?;
        wide.values(device)
    }
}

/// f32 `[width]`.
#[derive(Clone, Debug)]
pub struct Vector {
    buffer: Arc<Buffer>,
    width: usize,
}

impl Vector {
    pub(super) fn new(device: &Device, values: &[f32]) -> Result<Vector> {
        Ok(Vector { buffer: Arc::new(device.upload(values)?), width: values.len() })
    }

    /// One row.
    pub(super) fn rows(&self) -> Rows<'_> {
        Rows::new(&self.buffer, 1, self.width, Dtype::F32)
    }
}

/// A matrix `[out, in]` and its bias.
#[derive(Clone, Debug)]
pub struct Weight {
    matrix: Arc<Buffer>,
    outputs: usize,
    inputs: usize,
    dtype: Dtype,
    bias: Option<Vector>,
}

/// Values that are converted and sent at a time.
const CHUNK: usize = 1 << 20;

impl Weight {
    pub(super) fn new(
        device: &Device,
        dtype: Dtype,
        values: Vec<f32>,
        inputs: usize,
        bias: Option<Vec<f32>>,
    ) -> Result<Weight> {
        let matrix = device.alloc(values.len() * dtype.bytes())?;
        for (index, chunk) in values.chunks(CHUNK).enumerate() {
            match dtype {
                Dtype::F32 => device.write(&matrix, index * CHUNK, chunk)?,
                Dtype::Bf16 => {
                    let rounded: Vec<u16> = chunk.iter().map(|value| bf16::from_f32(*value).to_bits()).collect();
                    device.write(&matrix, index * CHUNK, &rounded)?;
                }
            }
        }
        let bias = bias.map(|bias| Vector::new(device, &bias)).transpose()?;
        let outputs = values.len() / inputs.max(1);
        Ok(Weight { matrix: Arc::new(matrix), outputs, inputs, dtype, bias })
    }

    /// All of it.
    pub(super) fn rows(&self) -> Rows<'_> {
        Rows::new(&self.matrix, self.outputs, self.inputs, self.dtype)
    }

    pub(super) fn bias(&self) -> Option<Rows<'_>> {
        self.bias.as_ref().map(Vector::rows)
    }

    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }
}

/// A flat gradient of f32.
#[derive(Debug)]
pub struct Gradient {
    buffer: Buffer,
    len: usize,
}

impl Gradient {
    /// With these values so far.
    pub(super) fn new(device: &Device, values: &[f32]) -> Result<Gradient> {
        let buffer = match values.iter().all(|value| value.to_bits() == 0) {
            true => device.zeros(size_of_val(values))?,
            false => device.upload(values)?,
        };
        Ok(Gradient { buffer, len: values.len() })
    }

    pub(super) fn values(&self, device: &Device) -> Result<Vec<f32>> {
        Ok(device.download(&self.buffer, 0, self.len)?)
    }

    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// A place in it.
    pub(super) fn vector(&self, at: usize, width: usize) -> Rows<'_> {
        Rows::flat(&self.buffer, at, width, Dtype::F32)
    }

    /// A place of several rows.
    pub(super) fn matrix(&self, at: usize, rows: usize, width: usize) -> Rows<'_> {
        Rows { buffer: &self.buffer, at, rows, width, stride: width, dtype: Dtype::F32 }
    }
}

/// Cosines and sines by position.
#[derive(Debug)]
pub(super) struct Table {
    cos: Buffer,
    sin: Buffer,
    positions: usize,
    half: usize,
}

impl Table {
    pub(super) fn new(device: &Device, table: &RopeTable) -> Result<Table> {
        let (cos, sin) = (device.upload(&table.cos)?, device.upload(&table.sin)?);
        Ok(Table { cos, sin, positions: table.len(), half: table.half })
    }

    pub(super) fn cos(&self) -> Rows<'_> {
        Rows::new(&self.cos, self.positions, self.half, Dtype::F32)
    }

    pub(super) fn sin(&self) -> Rows<'_> {
        Rows::new(&self.sin, self.positions, self.half, Dtype::F32)
    }
}

/// Angles of some tokens.
#[derive(Debug)]
pub struct Angles {
    pub(super) table: Arc<Table>,
    /// u32, one a token.
    pub(super) positions: Buffer,
}
