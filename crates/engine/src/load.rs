//! Loads weights from a model directory: safetensors, single or sharded, in f32, f16, bf16, 8-bit floats with scales, or
//! bitsandbytes' 4-bit codes. The values are f32 in memory.

mod four_bit;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;

use super::error::{EngineError, Result};
use crate::kernels::four_bit::{FourBit, Rounding};
use crate::modelcard::{self, ModelCard, Scale, TensorDtype, TensorLocation};
use crate::quantize::{FP4, NF4, quantize};
use crate::spec::{FourBitPlan, QuantType};

/// A weight matrix, row-major: its values, or 4-bit codes.
#[derive(Clone, Debug, PartialEq)]
pub enum Matrix {
    /// The values of the weights.
    Values(Vec<f32>),
    /// The codes of 4 bits with their scales.
    FourBit(Box<FourBit>),
}

impl Matrix {
    /// Returns the number of weights.
    pub fn len(&self) -> usize {
        match self {
            Matrix::Values(values) => values.len(),
            Matrix::FourBit(codes) => codes.len,
        }
    }

    /// Whether there are no weights.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Computes the values, with all threads.
    pub fn into_values(self) -> Vec<f32> {
        match self {
            Matrix::Values(values) => values,
            Matrix::FourBit(codes) => expanded(&codes),
        }
    }
}

/// Reads tensors of a model directory by name.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    locations: HashMap<String, TensorLocation>,
    files: HashMap<String, File>,
    four_bit: Option<FourBitPlan>,
}

impl Weights {
    /// Opens the weights that a model card lists.
    pub fn open(dir: &Path, card: &ModelCard) -> Weights {
        Weights::of(dir, &card.tensors)
    }

    /// Opens only these tensors of a model directory.
    pub fn of(dir: &Path, tensors: &[TensorLocation]) -> Weights {
        let locations = tensors.iter().map(|t| (t.name.clone(), t.clone())).collect();
        Weights { dir: dir.to_owned(), locations, files: HashMap::new(), four_bit: None }
    }

    /// Quantizes the matrices of linear layers that are not stored in 4 bits.
    #[must_use]
    pub fn quantized(self, four_bit: Option<FourBitPlan>) -> Weights {
        Weights { four_bit, ..self }
    }

    /// The names of all tensors that were opened.
    pub fn names(&self) -> Vec<String> {
        self.locations.keys().cloned().collect()
    }

    /// Reads the values of one tensor, row-major; fails if one is not finite.
    pub fn values(&mut self, name: &str) -> Result<(Vec<f32>, Vec<usize>)> {
        let location = self.location(name)?;
        let shape = location.shape.clone();
        let mut values = match self.four_bit(name)? {
            Some(matrix) => expanded(&matrix),
            None => self.read(&location)?,
        };
        if let Some(scale) = &location.scale {
            let scales = self.read(&scale.values)?;
            expand(&mut values, &shape, &scales, scale);
        }
        if !values.par_iter().with_min_len(CHUNK).all(|value| value.is_finite()) {
            let what = format!("tensor {name} in {} holds NaN or infinite values", location.file);
            return Err(EngineError::ModelNotFinite { what });
        }
        Ok((values, shape))
    }

    /// Reads the matrix of a linear layer and its shape. Stored 4-bit codes are not expanded. Other matrices become codes if
    /// [`Weights::quantized`] asks for them.
    pub fn matrix(&mut self, name: &str) -> Result<(Matrix, Vec<usize>)> {
        if let Some(codes) = self.four_bit(name)? {
            return Ok((Matrix::FourBit(Box::new(codes)), self.location(name)?.shape));
        }
        let (values, shape) = self.values(name)?;
        let Some(FourBitPlan { quant_type, is_nested }) = self.four_bit else {
            return Ok((Matrix::Values(values), shape));
        };
        let table = match quant_type {
            QuantType::Nf4 => NF4,
            QuantType::Fp4 => FP4,
        };
        let location = self.location(name)?;
        // As in transformers, the values of the codes have the format of the weights that were quantized.
        let rounding = match location.scale.as_ref().map_or(location.dtype, |scale| scale.dtype) {
            TensorDtype::F32 => Rounding::F32,
            TensorDtype::F16 => Rounding::F16,
            _ => Rounding::Bf16,
        };
        Ok((Matrix::FourBit(Box::new(quantize(&values, table, is_nested, rounding))), shape))
    }

    /// Reads a matrix of 4-bit codes without expanding it; None if the tensor is stored in another format.
    pub fn four_bit(&mut self, name: &str) -> Result<Option<FourBit>> {
        let location = self.location(name)?;
        let Some(tensors) = location.four_bit.as_deref() else { return Ok(None) };
        let parts = four_bit::Parts {
            codes: self.bytes(&location)?,
            state: self.bytes(&tensors.state)?,
            table: self.read(&tensors.table)?,
            scales: match tensors.nested {
                Some(_) => four_bit::Stored::Codes(self.bytes(&tensors.scales)?),
                None => four_bit::Stored::Values(self.read(&tensors.scales)?),
            },
            nested: match &tensors.nested {
                Some((table, scales)) => Some((self.read(table)?, self.read(scales)?)),
                None => None,
            },
        };
        let damaged = |why: String| {
            let why = format!("tensor {name}: {why}; copy the file again, or quantize the model again");
            EngineError::Input(format!("{}: {why}", location.file))
        };
        four_bit::assemble(parts, &location.shape).map(Some).map_err(damaged)
    }

    fn location(&self, name: &str) -> Result<TensorLocation> {
        let found = self.locations.get(name).cloned();
        found.ok_or_else(|| EngineError::Input(format!("the model has no tensor {name}")))
    }

    fn file(&mut self, location: &TensorLocation) -> Result<&File> {
        match self.files.entry(location.file.clone()) {
            std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(entry) => {
                Ok(entry.insert(modelcard::open(&self.dir, &location.file)?))
            }
        }
    }

    fn read(&mut self, location: &TensorLocation) -> Result<Vec<f32>> {
        let path = self.dir.join(&location.file);
        read_values(self.file(location)?, location).map_err(|source| EngineError::Io { path, source })
    }

    fn bytes(&mut self, location: &TensorLocation) -> Result<Vec<u8>> {
        let path = self.dir.join(&location.file);
        let mut bytes = vec![0; location.size_bytes()];
        let read = self.file(location)?.read_exact_at(&mut bytes, location.offset_bytes);
        read.map_err(|source| EngineError::Io { path, source })?;
        Ok(bytes)
    }
}

/// Computes the values of all codes, with all threads.
fn expanded(matrix: &FourBit) -> Vec<f32> {
    let mut values = vec![0.0; matrix.len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(index, values)| {
        matrix.expand(index * CHUNK..index * CHUNK + values.len(), values);
    });
    values
}

/// Number of values that one thread reads at a time.
const CHUNK: usize = 1 << 20;

/// Multiplies 8-bit weights by the scales of their blocks and rounds to the dtype of config.json, as transformers does
/// (integrations/finegrained_fp8.py: `Fp8Dequantize`).
fn expand(values: &mut [f32], shape: &[usize], scales: &[f32], scale: &Scale) {
    let product = |value: f32, scale: f32| value * scale;
    match scale.dtype {
        TensorDtype::F32 | TensorDtype::F8E4M3 | TensorDtype::Nf4 | TensorDtype::Fp4 | TensorDtype::U8 => {
            scaled(values, shape, scales, scale.block, product)
        }
        TensorDtype::F16 => {
            scaled(values, shape, scales, scale.block, |value, scale| f16::from_f32(product(value, scale)).to_f32())
        }
        TensorDtype::Bf16 => {
            scaled(values, shape, scales, scale.block, |value, scale| bf16::from_f32(product(value, scale)).to_f32())
        }
    }
}

fn scaled(
    values: &mut [f32],
    shape: &[usize],
    scales: &[f32],
    [rows, columns]: [usize; 2],
    product: impl Fn(f32, f32) -> f32 + Sync,
) {
    let width = shape.last().copied().unwrap_or(1).max(1);
    let blocks = width.div_ceil(columns);
    values.par_chunks_mut(width).enumerate().for_each(|(row, values)| {
        for (column, value) in values.iter_mut().enumerate() {
            *value = product(*value, scales[row / rows * blocks + column / columns]);
        }
    });
}

/// Decodes an E4M3 value: 1 bit of sign, 4 of exponent (bias 7), 3 of fraction; all ones but the sign
/// is NaN (arXiv 2209.05433).
fn of_e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = ((byte >> 3) & 0xf, f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction / 8.0 * 2f32.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(i32::from(exponent) - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Reads one tensor of numbers from a safetensors file, widened to f32, with all threads. Bytes and 4-bit codes are not numbers.
pub(super) fn read_values(file: &File, location: &TensorLocation) -> std::io::Result<Vec<f32>> {
    let size = location.dtype.size_bits() / 8;
    let mut values = vec![0.0; location.num_elements()];
    values.par_chunks_mut(CHUNK).enumerate().try_for_each(|(index, values)| {
        let mut bytes = vec![0; values.len() * size];
        file.read_exact_at(&mut bytes, location.offset_bytes + (index * CHUNK * size) as u64)?;
        let (pairs, words) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
        match location.dtype {
            TensorDtype::F32 => {
                values.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_le_bytes(*word))
            }
            TensorDtype::Bf16 => {
                values.iter_mut().zip(pairs).for_each(|(value, pair)| *value = bf16::from_le_bytes(*pair).to_f32());
            }
            TensorDtype::F16 => {
                values.iter_mut().zip(pairs).for_each(|(value, pair)| *value = f16::from_le_bytes(*pair).to_f32());
            }
            TensorDtype::F8E4M3 => values.iter_mut().zip(&bytes).for_each(|(value, byte)| *value = of_e4m3(*byte)),
            TensorDtype::Nf4 | TensorDtype::Fp4 | TensorDtype::U8 => {
                return Err(std::io::Error::other("the tensor holds codes, not numbers"));
            }
        }
        Ok::<(), std::io::Error>(())
    })?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The values of a tensor of the FP8 fixture if its config.json names this dtype.
    fn values(dtype: &str) -> Vec<f32> {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(rlood_test_support::fixture("parity/qwen3_fp8")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["dtype"] = json!(dtype);
        std::fs::write(path, config.to_string()).unwrap();
        let card = modelcard::read(dir.path()).unwrap();
        Weights::open(dir.path(), &card).values("model.layers.1.mlp.up_proj.weight").unwrap().0
    }

    #[test]
    fn eight_bits_are_expanded_in_the_dtype_of_the_model() {
        let exact = values("float32");
        let [halves, brains] = [values("float16"), values("bfloat16")];
        assert!(exact.iter().zip(&brains).any(|(exact, brain)| exact != brain));
        assert!(exact.iter().zip(&halves).any(|(exact, half)| exact != half));
        for ((exact, half), brain) in exact.iter().zip(&halves).zip(&brains) {
            assert_eq!([*half, *brain], [f16::from_f32(*exact).to_f32(), bf16::from_f32(*exact).to_f32()]);
        }
    }
}
