//! The tensors of a merged model directory: those of the base model's files, in the same order.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::Dtype;

use super::{INDEX, MergedDtype, io};
use crate::error::{EngineError, Result};
use crate::modelcard::{self, ModelCard, TensorDtype, TensorLocation};

/// Name of the only weight file of a model without an index.
pub(super) const SINGLE: &str = "model.safetensors";

/// Lists the base model's weight files, sorted by name.
pub(super) fn weight_files(dir: &Path) -> Result<Vec<String>> {
    if dir.join(SINGLE).exists() {
        return Ok(vec![SINGLE.to_owned()]);
    }
    let index = modelcard::read_json(dir, INDEX, 100_000_000)?;
    let map = index["weight_map"].as_object().into_iter().flatten();
    let mut files: Vec<String> = map.filter_map(|(_, file)| file.as_str().map(str::to_owned)).collect();
    files.sort();
    files.dedup();
    Ok(files)
}

/// A tensor of a file to write.
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) num_elements: u64,
    pub(super) kind: TensorKind,
}

pub(super) enum TensorKind {
    /// A tensor of floats, which are converted to the output format; `canonical` is set for tensors that an adapter may
    /// change or that have scales.
    Floats { location: TensorLocation, canonical: Option<String> },
    /// A tensor whose bytes are copied unchanged: type, offset and length.
    Bytes { dtype: String, offset: u64, length: u64 },
}

/// A safetensors file to write, with its tensors in order.
pub(super) struct FilePlan {
    pub(super) file: String,
    pub(super) tensors: Vec<TensorPlan>,
}

impl FilePlan {
    pub(super) fn of(dir: &Path, file: &str, card: &ModelCard, dtype: MergedDtype) -> Result<Self> {
        let path = dir.join(file);
        let damaged = |why: String| EngineError::Input(format!("{file}: {why}"));
        let opened = modelcard::open(dir, file)?;
        let mut size = [0; 8];
        opened.read_exact_at(&mut size, 0).map_err(io(&path))?;
        let size = u64::from_le_bytes(size);
        let length = opened.metadata().map_err(io(&path))?.len();
        if size > length.saturating_sub(8) || size > 100_000_000 {
            return Err(damaged(format!("the file's header claims a length of {size} bytes")));
        }
        let mut header = vec![0; size as usize];
        opened.read_exact_at(&mut header, 8).map_err(io(&path))?;
        let header: safetensors::tensor::Metadata =
            serde_json::from_slice(&header).map_err(|why| damaged(why.to_string()))?;
        // Tensors are identified by their position in the file, because the same tensor may have several names.
        let known: HashMap<u64, &TensorLocation> = card
            .tensors
            .iter()
            .filter(|tensor| tensor.file == file)
            .map(|tensor| (tensor.offset_bytes, tensor))
            .collect();
        let of_scale = card.tensors.iter().filter_map(|tensor| tensor.scale.as_ref()).map(|scale| &scale.values);
        let of_codes = card.tensors.iter().filter_map(|tensor| tensor.four_bit.as_ref()).flat_map(|codes| codes.all());
        let scales: Vec<(&str, u64)> =
            of_scale.chain(of_codes).map(|tensor| (tensor.file.as_str(), tensor.offset_bytes)).collect();
        let mut entries: Vec<_> = header.tensors().into_iter().collect();
        entries.sort_by_key(|(_, info)| info.data_offsets.0);
        let mut tensors = Vec::with_capacity(entries.len());
        for (name, info) in entries {
            let (begin, end) = info.data_offsets;
            let offset = 8 + size + begin as u64;
            // Leave out the scales and tables of widened tensors, and a head that is the same as the embedding.
            let is_scale =
                scales.contains(&(file, offset)) || (!scales.is_empty() && name.ends_with(".activation_scale"));
            if is_scale || (card.config.tie_word_embeddings && name.ends_with("lm_head.weight")) {
                continue;
            }
            let stored = match info.dtype {
                Dtype::F32 => Some(TensorDtype::F32),
                Dtype::F16 => Some(TensorDtype::F16),
                Dtype::BF16 => Some(TensorDtype::Bf16),
                _ => None,
            };
            let known = known.get(&offset);
            let kind = match (known, stored) {
                (Some(known), _) => {
                    TensorKind::Floats { location: (*known).clone(), canonical: Some(known.name.clone()) }
                }
                (None, Some(stored)) => {
                    let location = TensorLocation {
                        name: name.clone(),
                        file: file.to_owned(),
                        dtype: stored,
                        shape: info.shape.clone(),
                        offset_bytes: offset,
                        scale: None,
                        four_bit: None,
                    };
                    TensorKind::Floats { location, canonical: None }
                }
                (None, None) if matches!(info.dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2) => {
                    return Err(damaged(format!(
                        "tensor {name} is stored in 8 bits outside the text model, so it cannot be converted to {}",
                        dtype.as_str()
                    )));
                }
                (None, None) => {
                    let dtype = serde_json::to_value(info.dtype).ok();
                    let dtype = dtype.and_then(|dtype| dtype.as_str().map(str::to_owned)).unwrap_or_default();
                    TensorKind::Bytes { dtype, offset, length: (end - begin) as u64 }
                }
            };
            // 4-bit codes are stored in another shape than their values.
            let shape = known.map_or_else(|| info.shape.clone(), |known| known.shape.clone());
            let num_elements = shape.iter().product::<usize>() as u64;
            tensors.push(TensorPlan { name, shape, num_elements, kind });
        }
        Ok(Self { file: file.to_owned(), tensors })
    }

    pub(super) fn size_bytes(&self, dtype: MergedDtype) -> u64 {
        self.tensors.iter().map(|tensor| tensor.size_bytes(dtype)).sum()
    }
}

impl TensorPlan {
    pub(super) fn size_bytes(&self, dtype: MergedDtype) -> u64 {
        match &self.kind {
            TensorKind::Floats { .. } => self.num_elements * dtype.size_bytes(),
            TensorKind::Bytes { length, .. } => *length,
        }
    }
}
