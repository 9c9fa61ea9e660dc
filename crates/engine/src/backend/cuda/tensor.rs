//! Tensors, weights and rotary angles on the device.

use std::sync::Arc;

use half::bf16;
use rayon::prelude::*;

use super::Flat;
use crate::backend::FullSlot;
use crate::error::Result;
use crate::kernels::cuda::driver::{Buffer, Device};
use crate::kernels::cuda::rows::{self, Dtype, Rows};
use crate::ops::RopeTable;

/// A row-major tensor `[count, width]`.
#[derive(Debug)]
pub struct Tensor {
    buffer: Buffer,
    count: usize,
    width: usize,
    dtype: Dtype,
}

impl Tensor {
    /// Allocates a row-major tensor with uninitialized values.
    pub(super) fn new(device: &Device, count: usize, width: usize, dtype: Dtype) -> Result<Tensor> {
        Ok(Tensor { buffer: device.alloc(count * width * dtype.bytes())?, count, width, dtype })
    }

    /// Allocates a row-major tensor of zeros.
    pub(super) fn zeros(device: &Device, count: usize, width: usize, dtype: Dtype) -> Result<Tensor> {
        Ok(Tensor { buffer: device.zeros(count * width * dtype.bytes())?, count, width, dtype })
    }

    /// A view of all rows of the tensor.
    pub(super) fn rows(&self) -> Rows<'_> {
        Rows::new(&self.buffer, self.count, self.width, self.dtype)
    }

    /// Number of rows of the tensor.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of values in a row of the tensor.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The type of the tensor's values.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Truncates the tensor to its first `count` rows.
    pub(super) fn first(self, count: usize) -> Tensor {
        Tensor { count: count.min(self.count), ..self }
    }

    /// Waits for the values and copies them to the host.
    pub(super) fn values(&self, device: &Device) -> Result<Vec<f32>> {
        if self.dtype == Dtype::F32 {
            return Ok(device.download(&self.buffer, 0, self.count * self.width)?);
        }
        let wide = Tensor::new(device, self.count, self.width, Dtype::F32)?;
        rows::copy(device, self.rows(), wide.rows())?;
        wide.values(device)
    }
}

/// A vector of f32 `[width]`.
#[derive(Clone, Debug)]
pub struct Vector {
    buffer: Arc<Buffer>,
    width: usize,
}

impl Vector {
    pub(super) fn new(device: &Device, values: &[f32]) -> Result<Vector> {
        Ok(Vector { buffer: Arc::new(device.upload(values)?), width: values.len() })
    }

    /// Copies these values into a new vector on the device.
    pub(super) fn of(device: &Device, values: Rows<'_>) -> Result<Vector> {
        let buffer = device.alloc(values.width * size_of::<f32>())?;
        rows::copy(device, values, Rows::new(&buffer, 1, values.width, Dtype::F32))?;
        Ok(Vector { buffer: Arc::new(buffer), width: values.width })
    }

    /// A view of the vector as a tensor of one row.
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

/// Number of values of a weight that are converted and uploaded at a time.
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
                    let round = |value: &f32| bf16::from_f32(*value).to_bits();
                    let rounded: Vec<u16> = chunk.par_iter().with_min_len(1 << 14).map(round).collect();
                    device.write(&matrix, index * CHUNK, &rounded)?;
                }
            }
        }
        let bias = bias.map(|bias| Vector::new(device, &bias)).transpose()?;
        let outputs = values.len() / inputs.max(1);
        Ok(Weight { matrix: Arc::new(matrix), outputs, inputs, dtype, bias })
    }

    /// Copies the weight of each module from the flat parameters.
    pub(super) fn of(
        device: &Device,
        dtype: Dtype,
        parameters: &Flat,
        modules: &[FullSlot],
        inputs: usize,
    ) -> Result<Weight> {
        let outputs = modules.last().map_or(0, |module| module.outputs.end);
        let matrix = device.alloc(outputs * inputs * dtype.bytes())?;
        let bias = match modules.iter().any(|module| module.bias.is_some()) {
            true => Some(Vector { buffer: Arc::new(device.zeros(outputs * size_of::<f32>())?), width: outputs }),
            false => None,
        };
        for FullSlot { outputs: range, weight, bias: bias_at } in modules {
            let place = Rows::new(&matrix, outputs, inputs, dtype).part(range.clone());
            rows::copy(device, parameters.matrix(*weight, range.len(), inputs), place)?;
            if let (Some(at), Some(bias)) = (bias_at, &bias) {
                rows::copy(device, parameters.vector(*at, range.len()), bias.rows().columns(range.clone()))?;
            }
        }
        Ok(Weight { matrix: Arc::new(matrix), outputs, inputs, dtype, bias })
    }

    /// A view of all rows of the matrix.
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

/// Table of cosines and sines of the rotary embedding, by position.
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

/// The rotary angles of a batch's tokens: a table, and the position of each token.
#[derive(Debug)]
pub struct Angles {
    pub(super) table: Arc<Table>,
    /// The position of each token, u32.
    pub(super) positions: Buffer,
}
