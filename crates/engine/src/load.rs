//! Loads weights from a model directory: safetensors, single or sharded, in bf16, f16 or f32; always f32 in memory.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;

use super::error::{EngineError, Result};
use crate::modelcard::{self, ModelCard, TensorDtype, TensorLocation};

/// Reads tensors of a model directory by name.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    locations: HashMap<String, TensorLocation>,
    files: HashMap<String, File>,
}

impl Weights {
    /// Opens the weights that a model card lists.
    pub fn open(dir: &Path, card: &ModelCard) -> Weights {
        Weights::of(dir, &card.tensors)
    }

    /// Opens only these tensors of a model directory.
    pub fn of(dir: &Path, tensors: &[TensorLocation]) -> Weights {
        let locations = tensors.iter().map(|t| (t.name.clone(), t.clone())).collect();
        Weights { dir: dir.to_owned(), locations, files: HashMap::new() }
    }

    /// The names of all tensors that were opened.
    pub fn names(&self) -> Vec<String> {
        self.locations.keys().cloned().collect()
    }

    /// Reads the values of one tensor, row-major; fails if one is not finite.
    pub fn values(&mut self, name: &str) -> Result<(Vec<f32>, Vec<usize>)> {
        let location =
            self.locations.get(name).ok_or_else(|| EngineError::Input(format!("the model has no tensor {name}")))?;
        let path = self.dir.join(&location.file);
        let failed = |source| EngineError::Io { path: path.clone(), source };
        let file = match self.files.entry(location.file.clone()) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(modelcard::open(&self.dir, &location.file)?)
            }
        };
        let mut values = read_values(file, location).map_err(failed)?;
        let shape = location.shape.clone();
        let what = format!("tensor {name} in {}", location.file);
        if let Some(scale) = location.scale.clone() {
            let file = modelcard::open(&self.dir, &scale.values.file)?;
            let path = self.dir.join(&scale.values.file);
            let scales =
                read_values(&file, &scale.values).map_err(|source| EngineError::Io { path: path.clone(), source })?;
            expand(&mut values, &shape, &scales, scale.block);
        }
        if !values.par_iter().with_min_len(CHUNK).all(|value| value.is_finite()) {
            return Err(EngineError::ModelNotFinite { what: format!("{what} holds NaN or infinite values") });
        }
        Ok((values, shape))
    }
}

/// Number of values that one thread reads at a time.
const CHUNK: usize = 1 << 20;

/// Multiplies 8-bit weights by the scales of their blocks and rounds to bf16, as transformers does for such a
/// checkpoint with dtype bfloat16.
fn expand(values: &mut [f32], shape: &[usize], scales: &[f32], block: [usize; 2]) {
    let width = shape.last().copied().unwrap_or(1).max(1);
    let [rows, columns] = block;
    let blocks = width.div_ceil(columns);
    values.par_chunks_mut(width).enumerate().for_each(|(row, values)| {
        for (column, value) in values.iter_mut().enumerate() {
            let scale = scales[row / rows * blocks + column / columns];
            *value = bf16::from_f32(*value * scale).to_f32();
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

/// Reads one tensor of a safetensors file, widened to f32, with all threads.
pub(super) fn read_values(file: &File, location: &TensorLocation) -> std::io::Result<Vec<f32>> {
    let size = location.dtype.size_bytes();
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
        }
        Ok::<(), std::io::Error>(())
    })?;
    Ok(values)
}
