//! Weights from a model directory: safetensors, single or sharded, bf16, f16 or f32; f32 in memory.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;

use super::error::{EngineError, Result};
use crate::modelcard::{self, ModelCard, TensorDtype, TensorLocation};

/// Reads tensors by name.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    locations: HashMap<String, TensorLocation>,
    files: HashMap<String, File>,
}

impl Weights {
    /// The weights that a card found.
    pub fn open(dir: &Path, card: &ModelCard) -> Weights {
        Weights::of(dir, &card.tensors)
    }

    /// These tensors of a model directory.
    pub fn of(dir: &Path, tensors: &[TensorLocation]) -> Weights {
        let locations = tensors.iter().map(|t| (t.name.clone(), t.clone())).collect();
        Weights { dir: dir.to_owned(), locations, files: HashMap::new() }
    }

    /// Every tensor's name.
    pub fn names(&self) -> Vec<String> {
        self.locations.keys().cloned().collect()
    }

    /// One tensor's values, row-major; all of them finite.
    pub fn values(&mut self, name: &str) -> Result<(Vec<f32>, Vec<usize>)> {
        let location = self.locations.get(name).ok_or_else(|| EngineError::Input(format!("no tensor {name}")))?;
        let path = self.dir.join(&location.file);
        let failed = |source| EngineError::Io { path: path.clone(), source };
        let file = match self.files.entry(location.file.clone()) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(modelcard::open(&self.dir, &location.file)?)
            }
        };
        let values = read_values(file, location).map_err(failed)?;
        if !values.par_iter().with_min_len(CHUNK).all(|value| value.is_finite()) {
            let what = format!("tensor {name} in {} holds NaN or infinite values", location.file);
            return Err(EngineError::ModelNotFinite { what });
        }
        Ok((values, location.shape.clone()))
    }
}

/// Values that a thread reads at a time.
const CHUNK: usize = 1 << 20;

/// Read one tensor of a safetensors file, widened to f32, by all threads.
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
        }
        Ok::<(), std::io::Error>(())
    })?;
    Ok(values)
}
