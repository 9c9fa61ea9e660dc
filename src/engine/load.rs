//! Weights from a model directory: safetensors, single or sharded, bf16, f16 or f32; f32 in memory.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::{bf16, f16};

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
        if !values.iter().all(|value| value.is_finite()) {
            let what = format!("tensor {name} in {} holds NaN or infinite values", location.file);
            return Err(EngineError::ModelNotFinite { what });
        }
        Ok((values, location.shape.clone()))
    }
}

/// Read one tensor of a safetensors file, widened to f32.
pub(super) fn read_values(file: &mut File, location: &TensorLocation) -> std::io::Result<Vec<f32>> {
    file.seek(SeekFrom::Start(location.offset_bytes))?;
    let mut bytes = vec![0u8; location.size_bytes()];
    file.read_exact(&mut bytes)?;
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    Ok(match location.dtype {
        TensorDtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        TensorDtype::Bf16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        TensorDtype::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
    })
}
