//! Merges base weights and adapter, `W + s·B·A`, into a model directory that transformers, vLLM and others load.
//!
//! PEFT computes `B·A` in the adapter's dtype and adds it in the base's dtype, which rounds twice. Here each weight is
//! widened to f32, the update is added in f32, and the sum is rounded once, to nearest, ties to even. [`Survived`]
//! measures how much of the update survives that rounding. The sharding of the base model is kept, and only a part of
//! one tensor per file is in memory.

mod companions;
mod layout;
mod update;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use self::companions::{copy_others, write_config, write_index};
use self::layout::{FilePlan, SINGLE, TensorKind, TensorPlan, weight_files};
use self::update::{Update, add, updates_of};
use super::error::{EngineError, Result};
use super::load::{Weights, read_values};
use super::lora::{self, Lora};
use crate::modelcard::{self, ModelCard, TensorDtype, TensorLocation};
use crate::spec::FourBitPlan;

pub(crate) use self::update::Sums;
pub use self::update::Survived;

/// Storage format of the merged weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergedDtype {
    /// 32-bit float: no part of the update is lost.
    Float32,
    /// 16-bit IEEE floating point.
    Float16,
    /// bfloat16: 8 bits of exponent.
    Bfloat16,
}

impl MergedDtype {
    /// The format's name in a model's config.json.
    pub fn as_str(self) -> &'static str {
        match self {
            MergedDtype::Float32 => "float32",
            MergedDtype::Float16 => "float16",
            MergedDtype::Bfloat16 => "bfloat16",
        }
    }

    /// The format of a base tensor's values: for 8-bit weights, that of the expanded values.
    fn of(tensor: &TensorLocation) -> Self {
        match tensor.scale.as_ref().map_or(tensor.dtype, |scale| scale.dtype) {
            TensorDtype::F32 => MergedDtype::Float32,
            TensorDtype::F16 => MergedDtype::Float16,
            TensorDtype::Bf16 | TensorDtype::F8E4M3 | TensorDtype::Nf4 | TensorDtype::Fp4 | TensorDtype::U8 => {
                MergedDtype::Bfloat16
            }
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

    /// Rounds a value to this format, as storing and reading it does.
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

/// The result of merging an adapter into its base model.
#[derive(Debug, Clone, PartialEq)]
pub struct Merged {
    /// Storage format of the weights.
    pub dtype: MergedDtype,
    /// How much of the update survives rounding; `None` without an adapter, or if the adapter is zero.
    pub survived: Option<Survived>,
    /// The largest absolute value of the merged weights.
    pub largest: f32,
}

/// The arguments of [`merge`].
#[derive(Debug, Clone, Copy)]
pub struct MergeInput<'a> {
    /// Directory of the base model; for full fine-tuning it provides config and tokenizer.
    pub model_dir: &'a Path,
    /// The checkpoint: a PEFT adapter, or all weights (`model.safetensors`).
    pub checkpoint_dir: &'a Path,
    /// Whether the checkpoint is an adapter.
    pub is_adapter: bool,
    /// Storage format of the merged weights; None selects the format of most base weights.
    pub dtype: Option<MergedDtype>,
    /// The 4-bit format to which the run quantized the base's linear layers. The adapter was trained on the values of their codes,
    /// so these are merged.
    pub four_bit: Option<FourBitPlan>,
    /// The directory of the merged model, which must be empty.
    pub out_dir: &'a Path,
}

const INDEX: &str = "model.safetensors.index.json";
/// Number of values of a tensor that are merged and written at a time.
const PART: usize = 1 << 22;
/// Writes the merged model directory. `progress` receives the number of weights done and the total, and
/// returns whether to continue.
///
/// # Errors
/// Fails if a file cannot be read or written, if the adapter belongs to another model, or if a merged weight is not
/// finite in the dtype.
pub fn merge(input: MergeInput<'_>, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Option<Merged>> {
    let dtype = match input.dtype {
        Some(dtype) => dtype,
        None => base_dtype(input.model_dir)?,
    };
    let base = Base::open(input.model_dir, input.checkpoint_dir, input.is_adapter, input.four_bit)?;
    let files = weight_files(&base.dir)?;
    let mut plans = Vec::with_capacity(files.len());
    for name in &files {
        plans.push(FilePlan::of(&base.dir, name, &base.card, dtype)?);
    }
    let total = plans.iter().flat_map(|plan| &plan.tensors).map(|tensor| tensor.num_elements).sum();
    let mut merging = Merging { base, dtype, sums: Sums::default(), largest: 0.0, done: 0, total };
    for plan in &plans {
        if !merging.write(plan, input.out_dir, progress)? {
            return Ok(None);
        }
    }
    // Loaders find the weights by the name model.safetensors, or else by the index.
    if files.iter().any(|file| file != SINGLE) {
        write_index(&plans, dtype, input.out_dir)?;
    }
    write_config(input.model_dir, dtype, input.out_dir)?;
    copy_others(input.model_dir, input.out_dir)?;
    Ok(Some(Merged { dtype, survived: merging.sums.survived(), largest: merging.largest }))
}

/// The names of the matrices of linear layers: those that `training.load_in_4bit` quantizes.
fn linear_layers(card: &ModelCard) -> HashSet<String> {
    let is_linear = |name: &str| name.starts_with("model.layers.");
    let tensors = card.config.tensors().into_iter();
    tensors.filter(|(name, shape)| shape.len() == 2 && is_linear(name)).map(|(name, _)| name).collect()
}

/// The storage format of most weights of a base model.
///
/// # Errors
/// Fails if the model cannot be read.
pub fn base_dtype(model_dir: &Path) -> Result<MergedDtype> {
    Ok(most_common(&modelcard::read(model_dir)?))
}

/// The storage format of most weights of the base model that are not 4-bit codes. Embeddings never are.
fn most_common(card: &ModelCard) -> MergedDtype {
    let count = |dtype| {
        let stored = card.tensors.iter().filter(|tensor| !tensor.dtype.is_four_bit());
        let of_dtype = stored.filter(|tensor| MergedDtype::of(tensor) == dtype);
        of_dtype.map(TensorLocation::num_elements).sum::<usize>()
    };
    let all = [MergedDtype::Bfloat16, MergedDtype::Float16, MergedDtype::Float32];
    all.into_iter().max_by_key(|dtype| count(*dtype)).unwrap_or(MergedDtype::Bfloat16)
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> EngineError + '_ {
    move |source| EngineError::Io { path: path.to_owned(), source }
}

/// The weights that an adapter was trained on, and its updates of them.
pub(crate) struct Base {
    /// The directory of the weights.
    pub(crate) dir: PathBuf,
    /// Describes the weights.
    pub(crate) card: ModelCard,
    updates: HashMap<String, Update>,
    /// Reads the weights that are stored in 8 bits with scales, in 4 bits, or that the run quantized.
    weights: Weights,
    /// The names of the matrices that the run quantized.
    quantized: HashSet<String>,
}

impl Base {
    /// Reads the base's card, and the adapter if the checkpoint is one.
    pub(crate) fn open(
        model_dir: &Path,
        checkpoint_dir: &Path,
        is_adapter: bool,
        four_bit: Option<FourBitPlan>,
    ) -> Result<Base> {
        let (dir, lora) = match is_adapter {
            true => (model_dir, Some(read_lora(model_dir, checkpoint_dir)?)),
            false => (checkpoint_dir, None),
        };
        let card = modelcard::read(dir)?;
        let updates = lora.as_ref().map(|lora| updates_of(lora, &card)).transpose()?.unwrap_or_default();
        let weights = Weights::open(dir, &card).quantized(four_bit);
        let quantized = four_bit.map_or_else(HashSet::new, |_| linear_layers(&card));
        Ok(Base { dir: dir.to_owned(), card, updates, weights, quantized })
    }

    /// The adapter's update of a matrix.
    pub(crate) fn update(&self, name: &str) -> Option<&Update> {
        self.updates.get(name)
    }

    /// Reads a tensor as a whole; None if it is stored in floats, which can be read in parts ([`part`]).
    pub(crate) fn expanded(&mut self, name: &str, location: &TensorLocation) -> Result<Option<Vec<f32>>> {
        Ok(match () {
            () if self.quantized.contains(name) => Some(self.weights.matrix(name)?.0.into_values()),
            () if location.scale.is_some() || location.four_bit.is_some() => Some(self.weights.values(name)?.0),
            () => None,
        })
    }
}

/// Reads a checkpoint that is an adapter.
pub(crate) fn read_lora(model_dir: &Path, checkpoint_dir: &Path) -> Result<Lora> {
    let card = modelcard::read(model_dir)?;
    let config = lora::read_config(checkpoint_dir, &card.config)?;
    Lora::read(&config, &card.config, &checkpoint_dir.join(lora::WEIGHTS))
}

/// Reads these rows of a tensor that is stored in floats.
pub(crate) fn part(
    dir: &Path,
    source: &File,
    location: &TensorLocation,
    rows: Range<usize>,
    width: usize,
) -> Result<Vec<f32>> {
    let offset = location.offset_bytes + location.dtype.bytes_of(rows.start * width) as u64;
    let of_part = TensorLocation { shape: vec![rows.len(), width], offset_bytes: offset, ..location.clone() };
    read_values(source, &of_part).map_err(io(&dir.join(&location.file)))
}

struct Merging {
    base: Base,
    dtype: MergedDtype,
    sums: Sums,
    largest: f32,
    done: u64,
    total: u64,
}

impl Merging {
    /// Writes one safetensors file; returns false if `progress` requests a stop.
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
        let source = modelcard::open(&self.base.dir, &plan.file)?;
        for tensor in &plan.tensors {
            let mut wrote = |bytes: &[u8]| file.write_all(bytes).map_err(io(&path));
            match &tensor.kind {
                TensorKind::Floats { location, canonical } => {
                    if !self.floats(tensor, location, canonical.as_deref(), &source, &mut wrote, progress)? {
                        return Ok(false);
                    }
                }
                TensorKind::Bytes { offset, length, .. } => {
                    let from = self.base.dir.join(&plan.file);
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

    /// Writes one tensor of the merged model, piece by piece.
    fn floats(
        &mut self,
        tensor: &TensorPlan,
        location: &TensorLocation,
        canonical: Option<&str>,
        source: &File,
        wrote: &mut dyn FnMut(&[u8]) -> Result<()>,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool> {
        // A tensor stored in 8 bits with scales, or in 4 bits, or that the run quantized, is widened as a whole.
        let expanded = match canonical {
            Some(name) => self.base.expanded(name, location)?,
            None => None,
        };
        let update = canonical.and_then(|name| self.base.update(name));
        let width = tensor.shape.last().copied().unwrap_or(1).max(1);
        let rows = location.num_elements() / width;
        let rows_at_once = (PART / width).max(1);
        let mut bytes = Vec::new();
        for first in (0..rows).step_by(rows_at_once) {
            let part = first..(first + rows_at_once).min(rows);
            let mut values = match &expanded {
                Some(all) => all[part.start * width..part.end * width].to_vec(),
                None => self::part(&self.base.dir, source, location, part.clone(), width)?,
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

/// The maximum of two floats, or NaN if either is NaN.
trait MaxOrNan {
    fn max_or_nan(self, other: Self) -> Self;
}

impl MaxOrNan for f32 {
    fn max_or_nan(self, other: Self) -> Self {
        if self.is_nan() || self > other { self } else { other }
    }
}
