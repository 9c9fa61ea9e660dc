//! Merging: base weights plus adapter, `W + s·B·A`, as a model directory that transformers, vLLM and others load.
//!
//! PEFT makes `B·A` in the adapter's dtype and adds it in the base's, rounding twice. Here a weight is widened to f32, the update is
//! added in f32, and the sum is rounded once, to the nearest, ties to even. What of the update survives that rounding is measured
//! ([`Survived`]). The base's sharding is kept, and of each file a part of one tensor is in memory at a time.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use super::error::{EngineError, Result};
use super::load::{Weights, read_values};
use super::lora::{self, Lora, Module};
use crate::modelcard::{self, ModelCard, TensorDtype, TensorLocation};

/// How the merged weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergedDtype {
    /// 32-bit float: nothing of the update is lost.
    Float32,
    /// 16-bit IEEE float.
    Float16,
    /// bfloat16.
    Bfloat16,
}

impl MergedDtype {
    /// The name in config.json.
    pub fn as_str(self) -> &'static str {
        match self {
            MergedDtype::Float32 => "float32",
            MergedDtype::Float16 => "float16",
            MergedDtype::Bfloat16 => "bfloat16",
        }
    }

    fn of(stored: TensorDtype) -> Self {
        match stored {
            TensorDtype::F32 => MergedDtype::Float32,
            TensorDtype::F16 => MergedDtype::Float16,
            TensorDtype::Bf16 | TensorDtype::F8E4M3 => MergedDtype::Bfloat16,
        }
    }

    fn header(self) -> &'static str {
        match self {
            MergedDtype::Float32 => "F32",
            MergedDtype::Float16 => "F16",
            MergedDtype::Bfloat16 => "BF16",
        }
    }

    fn size_bytes(self) -> u64 {
        match self {
            MergedDtype::Float32 => 4,
            MergedDtype::Float16 | MergedDtype::Bfloat16 => 2,
        }
    }

    /// A value as it is read back.
    fn rounded(self, value: f32) -> f32 {
        match self {
            MergedDtype::Float32 => value,
            MergedDtype::Float16 => f16::from_f32(value).to_f32(),
            MergedDtype::Bfloat16 => bf16::from_f32(value).to_f32(),
        }
    }

    fn append(self, values: &[f32], bytes: &mut Vec<u8>) {
        match self {
            MergedDtype::Float32 => values.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
            MergedDtype::Float16 => values.iter().for_each(|value| bytes.extend(f16::from_f32(*value).to_le_bytes())),
            MergedDtype::Bfloat16 => values.iter().for_each(|value| bytes.extend(bf16::from_f32(*value).to_le_bytes())),
        }
    }
}

/// What of the adapter's update is still there after rounding, over all adapted weights: `u` is the update, `d` the difference
/// between merged and base weights as both are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Survived {
    /// `d·u / u·u`: 1 = all of it, 0 = nothing.
    pub fraction: f64,
    /// `d·u / ‖d‖‖u‖`: 1 = nothing but the update.
    pub cosine: f64,
}

/// What a merge made.
#[derive(Debug, Clone, PartialEq)]
pub struct Merged {
    /// How the weights are stored.
    pub dtype: MergedDtype,
    /// What of the update survives; `None` without an adapter, or of one that is zero.
    pub survived: Option<Survived>,
    /// The largest merged weight, without its sign.
    pub largest: f32,
}

/// What to merge.
#[derive(Debug, Clone, Copy)]
pub struct MergeInput<'a> {
    /// The base model's directory; of full fine-tuning the one that lends config and tokenizer.
    pub model_dir: &'a Path,
    /// The checkpoint: a PEFT adapter, or all weights (`model.safetensors`).
    pub checkpoint_dir: &'a Path,
    /// Whether the checkpoint is an adapter.
    pub is_adapter: bool,
    /// None = as most of the base's weights are stored.
    pub dtype: Option<MergedDtype>,
    /// An empty directory.
    pub out_dir: &'a Path,
}

/// Values that are worked on at once.
const PART: usize = 1 << 22;
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Files of a model directory that merging leaves to itself.
const OWN: [&str; 2] = ["config.json", INDEX];
/// Endings of what goes with a model beside its weights.
const COPIED: [&str; 5] = [".json", ".txt", ".jinja", ".model", ".tiktoken"];

/// Writes a model directory; `progress` is told weights done and in all, and says whether to go on.
///
/// # Errors
/// Files that cannot be read or written, an adapter of another model, weights that are not finite in the dtype.
pub fn merge(input: MergeInput<'_>, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Option<Merged>> {
    let card = modelcard::read(input.model_dir)?;
    let weights_dir = if input.is_adapter { input.model_dir } else { input.checkpoint_dir };
    let weights_card = if input.is_adapter { card.clone() } else { full_card(input)? };
    let lora = match input.is_adapter {
        true => {
            let config = lora::read_config(input.checkpoint_dir, &card.config)?;
            Some(Lora::read(&config, &card.config, &input.checkpoint_dir.join(lora::WEIGHTS))?)
        }
        false => None,
    };
    let dtype = input.dtype.unwrap_or_else(|| most_common(&card));
    let files = weight_files(weights_dir)?;
    let mut plans = Vec::with_capacity(files.len());
    for name in &files {
        plans.push(FilePlan::of(weights_dir, name, &weights_card, dtype)?);
    }
    let total = plans.iter().flat_map(|plan| &plan.tensors).map(|tensor| tensor.num_elements).sum();
    let mut merging = Merging {
        dir: weights_dir.to_owned(),
        dtype,
        updates: lora.as_ref().map(|lora| updates_of(lora, &card)).transpose()?.unwrap_or_default(),
        weights: Weights::open(weights_dir, &weights_card),
        sums: Sums::default(),
        largest: 0.0,
        done: 0,
        total,
    };
    for plan in &plans {
        if !merging.write(plan, input.out_dir, progress)? {
            return Ok(None);
        }
    }
    if plans.len() > 1 {
        write_index(&plans, dtype, input.out_dir)?;
    }
    write_config(input.model_dir, dtype, input.out_dir)?;
    copy_others(input.model_dir, input.out_dir)?;
    Ok(Some(Merged { dtype, survived: merging.sums.survived(), largest: merging.largest }))
}

/// The card of a checkpoint of all weights, which has the base's config beside it.
fn full_card(input: MergeInput<'_>) -> Result<ModelCard> {
    Ok(modelcard::read(input.checkpoint_dir)?)
}

/// How most of the weights are stored.
fn most_common(card: &ModelCard) -> MergedDtype {
    let count = |dtype| {
        let of_dtype = card.tensors.iter().filter(|tensor| MergedDtype::of(tensor.dtype) == dtype);
        of_dtype.map(TensorLocation::num_elements).sum::<usize>()
    };
    let all = [MergedDtype::Bfloat16, MergedDtype::Float16, MergedDtype::Float32];
    all.into_iter().max_by_key(|dtype| count(*dtype)).unwrap_or(MergedDtype::Bfloat16)
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> EngineError + '_ {
    move |source| EngineError::Io { path: path.to_owned(), source }
}

/// The files of weights, by name.
fn weight_files(dir: &Path) -> Result<Vec<String>> {
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
struct TensorPlan {
    name: String,
    shape: Vec<usize>,
    num_elements: u64,
    kind: TensorKind,
}

enum TensorKind {
    /// Numbers that are stored anew; by the canonical name those that an adapter may change or that have scales.
    Floats { location: TensorLocation, canonical: Option<String> },
    /// Bytes that are copied: type, place and length.
    Bytes { dtype: String, offset: u64, length: u64 },
}

struct FilePlan {
    file: String,
    tensors: Vec<TensorPlan>,
}

impl FilePlan {
    fn of(dir: &Path, file: &str, card: &ModelCard, dtype: MergedDtype) -> Result<Self> {
        let path = dir.join(file);
        let damaged = |why: String| EngineError::Input(format!("{file}: {why}"));
        let opened = modelcard::open(dir, file)?;
        let mut size = [0; 8];
        opened.read_exact_at(&mut size, 0).map_err(io(&path))?;
        let size = u64::from_le_bytes(size);
        let length = opened.metadata().map_err(io(&path))?.len();
        if size > length.saturating_sub(8) || size > 100_000_000 {
            return Err(damaged(format!("its header says that it has {size} bytes")));
        }
        let mut header = vec![0; size as usize];
        opened.read_exact_at(&mut header, 8).map_err(io(&path))?;
        let header: safetensors::tensor::Metadata =
            serde_json::from_slice(&header).map_err(|why| damaged(why.to_string()))?;
        // By its place: the same tensor has several spellings.
        let known: HashMap<u64, &TensorLocation> = card
            .tensors
            .iter()
            .filter(|tensor| tensor.file == file)
            .map(|tensor| (tensor.offset_bytes, tensor))
            .collect();
        let scales: Vec<(&str, u64)> = card
            .tensors
            .iter()
            .filter_map(|tensor| tensor.scale.as_ref())
            .map(|scale| (scale.values.file.as_str(), scale.values.offset_bytes))
            .collect();
        let mut entries: Vec<_> = header.tensors().into_iter().collect();
        entries.sort_by_key(|(_, info)| info.data_offsets.0);
        let mut tensors = Vec::with_capacity(entries.len());
        for (name, info) in entries {
            let (begin, end) = info.data_offsets;
            let offset = 8 + size + begin as u64;
            // What is expanded needs its scales no more, and a head that is the embedding is not written twice.
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
                    };
                    TensorKind::Floats { location, canonical: None }
                }
                (None, None) if matches!(info.dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2) => {
                    return Err(damaged(format!(
                        "tensor {name} is stored in 8 bits outside the text model: it cannot be stored as {}",
                        dtype.as_str()
                    )));
                }
                (None, None) => {
                    let dtype = serde_json::to_value(info.dtype).ok();
                    let dtype = dtype.and_then(|dtype| dtype.as_str().map(str::to_owned)).unwrap_or_default();
                    TensorKind::Bytes { dtype, offset, length: (end - begin) as u64 }
                }
            };
            let num_elements = info.shape.iter().product::<usize>() as u64;
            tensors.push(TensorPlan { name, shape: info.shape.clone(), num_elements, kind });
        }
        Ok(Self { file: file.to_owned(), tensors })
    }

    fn size_bytes(&self, dtype: MergedDtype) -> u64 {
        self.tensors.iter().map(|tensor| tensor.size_bytes(dtype)).sum()
    }
}

impl TensorPlan {
    fn size_bytes(&self, dtype: MergedDtype) -> u64 {
        match &self.kind {
            TensorKind::Floats { .. } => self.num_elements * dtype.size_bytes(),
            TensorKind::Bytes { length, .. } => *length,
        }
    }
}

/// The update of one matrix.
struct Update {
    /// `[r, in]`
    a: Vec<f32>,
    /// `[out, r]`
    b: Vec<f32>,
    r: usize,
    scaling: f32,
}

impl Update {
    /// `s·B·A` of these rows, `[rows, in]`.
    fn rows(&self, rows: std::ops::Range<usize>, width: usize) -> Vec<f32> {
        let mut update = vec![0.0; rows.len() * width];
        update.par_chunks_mut(width).zip(rows.into_par_iter()).for_each(|(update, row)| {
            for (factor, a) in self.b[row * self.r..(row + 1) * self.r].iter().zip(self.a.chunks_exact(width)) {
                update.iter_mut().zip(a).for_each(|(update, a)| *update += factor * a);
            }
            update.iter_mut().for_each(|update| *update *= self.scaling);
        });
        update
    }
}

/// The adapter's updates by the canonical names of their weights.
fn updates_of(lora: &Lora, card: &ModelCard) -> Result<HashMap<String, Update>> {
    let values = lora.values.values()?;
    let mut updates = HashMap::new();
    for layer in 0..card.config.num_hidden_layers {
        for module in Module::of_model(&card.config) {
            let Some(slot) = lora.slot(layer, module) else { continue };
            let (rows, columns) = module.shape(&card.config);
            let update = Update {
                a: values[slot.a..slot.a + slot.r * columns].to_vec(),
                b: values[slot.b..slot.b + rows * slot.r].to_vec(),
                r: slot.r,
                scaling: slot.scaling as f32,
            };
            updates.insert(format!("model.layers.{layer}.{}.weight", module.path()), update);
        }
    }
    Ok(updates)
}

/// Sums over all adapted weights.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    /// `d·u`
    both: f64,
    /// `u·u`
    update: f64,
    /// `d·d`
    difference: f64,
}

impl Sums {
    fn add(self, other: Self) -> Self {
        Self {
            both: self.both + other.both,
            update: self.update + other.update,
            difference: self.difference + other.difference,
        }
    }

    fn survived(self) -> Option<Survived> {
        let norms = (self.difference * self.update).sqrt();
        let cosine = if norms > 0.0 { self.both / norms } else { 0.0 };
        (self.update > 0.0).then(|| Survived { fraction: self.both / self.update, cosine })
    }
}

struct Merging {
    dir: PathBuf,
    dtype: MergedDtype,
    updates: HashMap<String, Update>,
    /// For what has scales.
    weights: Weights,
    sums: Sums,
    largest: f32,
    done: u64,
    total: u64,
}

impl Merging {
    /// Writes one file; false when `progress` says no.
    fn write(&mut self, plan: &FilePlan, out: &Path, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<bool> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut end = 0;
        for tensor in &plan.tensors {
            let begin = end;
            end += tensor.size_bytes(self.dtype);
            let dtype = match &tensor.kind {
                TensorKind::Floats { .. } => self.dtype.header(),
                TensorKind::Bytes { dtype, .. } => dtype,
            };
            let entry = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]});
            header.insert(tensor.name.clone(), entry);
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let path = out.join(&plan.file);
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&path).map_err(io(&path))?);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(io(&path))?;
        file.write_all(&header).map_err(io(&path))?;
        let source = modelcard::open(&self.dir, &plan.file)?;
        for tensor in &plan.tensors {
            let mut wrote = |bytes: &[u8]| file.write_all(bytes).map_err(io(&path));
            match &tensor.kind {
                TensorKind::Floats { location, canonical } => {
                    if !self.floats(tensor, location, canonical.as_deref(), &source, &mut wrote, progress)? {
                        return Ok(false);
                    }
                }
                TensorKind::Bytes { offset, length, .. } => {
                    let from = self.dir.join(&plan.file);
                    for begin in (0..*length).step_by(PART) {
                        let mut bytes = vec![0; (length - begin).min(PART as u64) as usize];
                        source.read_exact_at(&mut bytes, offset + begin).map_err(io(&from))?;
                        wrote(&bytes)?;
                    }
                    self.done += tensor.num_elements;
                }
            }
        }
        let file = file.into_inner().map_err(std::io::IntoInnerError::into_error).map_err(io(&path))?;
        file.sync_all().map_err(io(&path))?;
        Ok(true)
    }

    /// Writes one tensor part by part.
    fn floats(
        &mut self,
        tensor: &TensorPlan,
        location: &TensorLocation,
        canonical: Option<&str>,
        source: &File,
        wrote: &mut dyn FnMut(&[u8]) -> Result<()>,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool> {
        // What has scales is expanded as a whole.
        let expanded = match (canonical, &location.scale) {
            (Some(name), Some(_)) => Some(self.weights.values(name)?.0),
            (Some(_) | None, _) => None,
        };
        let update = canonical.and_then(|name| self.updates.get(name));
        let width = tensor.shape.last().copied().unwrap_or(1).max(1);
        let rows = location.num_elements() / width;
        let rows_at_once = (PART / width).max(1);
        let path = self.dir.join(&location.file);
        let mut bytes = Vec::new();
        for first in (0..rows).step_by(rows_at_once) {
            let part = first..(first + rows_at_once).min(rows);
            let mut values = match &expanded {
                Some(all) => all[part.start * width..part.end * width].to_vec(),
                None => {
                    let offset = (part.start * width * location.dtype.size_bytes()) as u64;
                    let shape = vec![part.len(), width];
                    let of_part =
                        TensorLocation { shape, offset_bytes: location.offset_bytes + offset, ..location.clone() };
                    read_values(source, &of_part).map_err(io(&path))?
                }
            };
            if let Some(update) = update {
                let change = update.rows(part.clone(), width);
                self.sums = self.sums.add(add(&mut values, &change, self.dtype));
            }
            let dtype = self.dtype;
            let largest = values.par_iter().map(|value| dtype.rounded(*value).abs()).reduce(|| 0.0, f32::max_or_nan);
            if !largest.is_finite() {
                return Err(EngineError::ModelNotFinite {
                    what: format!(
                        "the merged tensor {} is not finite as {}: choose float32 or bfloat16",
                        tensor.name,
                        dtype.as_str()
                    ),
                });
            }
            self.largest = self.largest.max(largest);
            bytes.clear();
            dtype.append(&values, &mut bytes);
            wrote(&bytes)?;
            self.done += (part.len() * width) as u64;
            if !progress(self.done, self.total) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The larger one, or what is no number.
trait MaxOrNan {
    fn max_or_nan(self, other: Self) -> Self;
}

impl MaxOrNan for f32 {
    fn max_or_nan(self, other: Self) -> Self {
        if self.is_nan() || self > other { self } else { other }
    }
}

/// Adds an update to base weights, and measures what of it rounding leaves.
fn add(values: &mut [f32], change: &[f32], dtype: MergedDtype) -> Sums {
    let sums = values.par_chunks_mut(1 << 16).zip(change.par_chunks(1 << 16)).map(|(values, change)| {
        let mut sums = Sums::default();
        for (value, change) in values.iter_mut().zip(change) {
            let merged = *value + change;
            let difference = f64::from(dtype.rounded(merged)) - f64::from(dtype.rounded(*value));
            let change = f64::from(*change);
            sums.both += difference * change;
            sums.update += change * change;
            sums.difference += difference * difference;
            *value = merged;
        }
        sums
    });
    // In the order of the parts: the same figures on every machine.
    sums.collect::<Vec<Sums>>().into_iter().fold(Sums::default(), Sums::add)
}

fn write_index(plans: &[FilePlan], dtype: MergedDtype, out: &Path) -> Result<()> {
    let mut map = Map::new();
    for plan in plans {
        map.extend(plan.tensors.iter().map(|tensor| (tensor.name.clone(), json!(plan.file))));
    }
    let total: u64 = plans.iter().map(|plan| plan.size_bytes(dtype)).sum();
    write_json(&out.join(INDEX), &json!({"metadata": {"total_size": total}, "weight_map": map}))
}

/// The base's config, with the dtype, without the quantization that is no more.
fn write_config(model_dir: &Path, dtype: MergedDtype, out: &Path) -> Result<()> {
    let mut config = modelcard::read_json(model_dir, "config.json", 1 << 24)?;
    let set = |config: &mut Map<String, Value>, always: bool| {
        config.shift_remove("quantization_config");
        config.shift_remove("_name_or_path");
        for key in ["dtype", "torch_dtype"] {
            if always || config.contains_key(key) {
                config.insert(key.to_owned(), json!(dtype.as_str()));
            }
        }
    };
    if let Some(config) = config.as_object_mut() {
        set(config, true);
        if let Some(text) = config.get_mut("text_config").and_then(Value::as_object_mut) {
            set(text, false);
        }
    }
    write_json(&out.join("config.json"), &config)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut file = File::create(path).map_err(io(path))?;
    file.write_all(format!("{value:#}\n").as_bytes()).and_then(|()| file.sync_all()).map_err(io(path))
}

/// Everything beside the weights, byte for byte: tokenizer, chat template, generation config.
fn copy_others(model_dir: &Path, out: &Path) -> Result<()> {
    for entry in std::fs::read_dir(model_dir).map_err(io(model_dir))? {
        let entry = entry.map_err(io(model_dir))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_copied = COPIED.iter().any(|ending| name.ends_with(ending)) && !OWN.contains(&name.as_str());
        let path = entry.path();
        if is_copied && std::fs::metadata(&path).map_err(io(&path))?.is_file() {
            std::fs::copy(&path, out.join(&name)).map_err(io(&path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Key, Stream};

    /// Standard normal numbers (Box and Muller).
    fn normal(count: usize, seed: u64) -> Vec<f32> {
        let key = Key::new(seed, Stream::Init);
        let number = |index: usize| {
            let (one, two) = (key.with(2 * index as u64).uniform(), key.with(2 * index as u64 + 1).uniform());
            ((-2.0 * one.max(1e-12).ln()).sqrt() * (2.0 * std::f64::consts::PI * two).cos()) as f32
        };
        (0..count).map(number).collect()
    }

    #[test]
    fn what_survives_rounding_is_what_was_measured_with_torch() {
        // Share of the weights' norm, and of the update what survives (cosine) in bfloat16 and in float16.
        for (share, bf16_left, f16_left) in [
            (0.1, (1.0, 1.0), (1.0, 1.0)),
            (0.01, (1.0, 0.987), (1.0, 1.0)),
            (0.001, (0.53, 0.639), (1.0, 0.979)),
            (0.0003, (0.18, 0.368), (0.87, 0.851)),
        ] {
            let (rows, width, r) = (512, 512, 16);
            let base: Vec<f32> =
                normal(rows * width, 1).iter().map(|value| bf16::from_f32(0.02 * value).to_f32()).collect();
            let mut update = Update { a: normal(r * width, 2), b: normal(rows * r, 3), r, scaling: 1.0 };
            let norm = |values: &[f32]| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            update.scaling = (share * norm(&base) / norm(&update.rows(0..rows, width))) as f32;
            let change = update.rows(0..rows, width);
            for (dtype, (fraction, cosine)) in [(MergedDtype::Bfloat16, bf16_left), (MergedDtype::Float16, f16_left)] {
                let left = add(&mut base.clone(), &change, dtype).survived().expect("an update");
                let near = |one: f64, other: f64| (one - other).abs() < 0.03;
                assert!(near(left.fraction, fraction) && near(left.cosine, cosine), "{share} {dtype:?} {left:?}");
            }
            let whole = add(&mut base.clone(), &change, MergedDtype::Float32).survived().expect("an update");
            assert!(whole.cosine > 0.9999, "{whole:?}");
        }
    }

    #[test]
    fn the_rows_of_an_update_are_those_of_the_product() {
        let (rows, width, r) = (5, 7, 3);
        let update = Update { a: normal(r * width, 4), b: normal(rows * r, 5), r, scaling: 0.5 };
        let part = update.rows(2..4, width);
        for (index, value) in part.iter().enumerate() {
            let (row, column) = (2 + index / width, index % width);
            let product: f64 =
                (0..r).map(|k| f64::from(update.b[row * r + k]) * f64::from(update.a[k * width + column])).sum();
            assert!((f64::from(*value) - 0.5 * product).abs() < 1e-6);
        }
    }
}
