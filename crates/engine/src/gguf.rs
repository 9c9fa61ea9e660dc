//! Checkpoints as GGUF, the format of llama.cpp: a merged model, or the LoRA adapter alone.
//!
//! Each weight is widened to f32, the adapter's update is added in f32, and the sum is rounded once. A model is written front to back:
//! a part of one matrix is in memory, or all of one whose rows change places. [`crate::modelcard::gguf`] knows llama.cpp's names,
//! and refuses what it does not compute as transformers does.

use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::error::{EngineError, Result};
use super::lora::Module;
use super::merge::{Base, Sums, Survived, part, read_lora};
use crate::modelcard::gguf::{Kind, Refused, Tensor, Value, Writer, model, tokenizer};
use crate::modelcard::{self, ModelDescription, TensorLocation};
use crate::spec::FourBitPlan;

/// Number of values that are read, merged and written at a time.
const PART: usize = 1 << 22;
/// The largest finite 16-bit float.
const LARGEST_F16: f32 = 65504.0;

/// The checkpoint to write as a model, its format and the file.
#[derive(Clone, Copy, Debug)]
pub struct GgufInput<'a> {
    /// Directory of the base model.
    pub model_dir: &'a Path,
    /// The checkpoint: a PEFT adapter, or all weights.
    pub checkpoint_dir: &'a Path,
    /// Whether the checkpoint is an adapter.
    pub is_adapter: bool,
    /// The 4-bit format to which the run quantized the base's linear layers.
    pub four_bit: Option<FourBitPlan>,
    /// Storage format of the matrices; vectors are f32.
    pub kind: Kind,
    /// The context length to write; None = that of the model.
    pub context_length: Option<usize>,
    /// The file to create.
    pub out: &'a Path,
}

/// The result of writing a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// How much of the update survives rounding; None without an adapter, or if the adapter is zero.
    pub survived: Option<Survived>,
    /// The largest absolute value of the weights.
    pub largest: f32,
}

/// A tensor of the model to write: where it comes from.
struct Source {
    /// Its name in the checkpoint.
    name: String,
    location: TensorLocation,
    /// Whether its rows change places, in heads of this size.
    interleaved: Option<usize>,
}

/// Writes base and adapter as one model. `progress` receives the number of weights done and the total, and returns whether to continue.
///
/// # Errors
/// Fails if llama.cpp was not compared for the model or its tokenizer, a file cannot be read or written, the adapter belongs to another
/// model, or a weight is not finite in the format.
pub fn write_model(input: GgufInput<'_>, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Option<Written>> {
    let mut base = Base::open(input.model_dir, input.checkpoint_dir, input.is_adapter, input.four_bit)?;
    let card = modelcard::read(input.model_dir)?;
    let mut keys = vec![
        ("general.type".to_owned(), Value::String("model".into())),
        ("general.name".to_owned(), Value::String(name_of(input.model_dir))),
        ("general.file_type".to_owned(), Value::U32(input.kind.file_type())),
    ];
    if input.kind == Kind::Q8_0 {
        keys.push(("general.quantization_version".to_owned(), Value::U32(2)));
    }
    keys.extend(model::keys(&card.config, input.context_length)?);
    keys.extend(tokenizer::keys(input.model_dir, &card)?);
    let (sources, mut tensors) = sources(&base, input.kind)?;
    let divisors = model::rope_divisors(&card.config.rope);
    if let Some(divisors) = &divisors {
        tensors.push(Tensor { name: "rope_freqs.weight".into(), shape: vec![divisors.len()], kind: Kind::F32 });
    }
    let kinds: Vec<Kind> = tensors.iter().map(|tensor| tensor.kind).collect();
    let total = sources.iter().map(|source| source.location.num_elements() as u64).sum();
    let io = |source| EngineError::Io { path: input.out.to_owned(), source };
    let file = BufWriter::with_capacity(1 << 20, File::create(input.out).map_err(io)?);
    let mut writer = Writer::new(file, &keys, tensors).map_err(io)?;
    let (mut sums, mut largest, mut done) = (Sums::default(), 0.0f32, 0);
    for (source, kind) in sources.iter().zip(kinds) {
        let mut rows = Rows::open(&mut base, source)?;
        for range in rows.parts() {
            let (mut values, update) = rows.read(&base, range)?;
            if let Some(update) = update {
                let mut before = values.clone();
                values.iter_mut().zip(&update).for_each(|(value, update)| *value += update);
                let mut after = values.clone();
                kind.round(&mut before);
                kind.round(&mut after);
                sums = sums.add(Sums::of(&before, &after, &update));
            }
            let beyond = if kind == Kind::F16 { LARGEST_F16 } else { f32::MAX };
            let most = values
                .iter()
                .fold(0.0f32, |most, value| if value.is_nan() { f32::INFINITY } else { most.max(value.abs()) });
            if most > beyond {
                return Err(EngineError::ModelNotFinite {
                    what: format!(
                        "the merged tensor {} is not finite in this format: choose float32 or bfloat16",
                        source.name
                    ),
                });
            }
            largest = largest.max(most);
            writer.write(&values).map_err(io)?;
            done += values.len() as u64;
            if !progress(done, total) {
                return Ok(None);
            }
        }
    }
    if let Some(divisors) = divisors {
        writer.write(&divisors).map_err(io)?;
    }
    close(writer, input.out)?;
    Ok(Some(Written { survived: sums.survived(), largest }))
}

/// Writes a PEFT adapter as a LoRA adapter of llama.cpp, in f32 or f16.
///
/// # Errors
/// Fails if llama.cpp was not compared for the model, or a file cannot be read or written.
pub fn write_adapter(model_dir: &Path, checkpoint_dir: &Path, kind: Kind, out: &Path) -> Result<()> {
    let config = modelcard::read(model_dir)?.config;
    let architecture = model::architecture(&config)?;
    let lora = read_lora(model_dir, checkpoint_dir)?;
    let values = lora.values.values()?;
    let modules = Module::of_model(&config);
    let slots: Vec<_> = (0..config.num_hidden_layers)
        .flat_map(|layer| modules.iter().map(move |module| (layer, *module)))
        .filter_map(|(layer, module)| Some((layer, module, lora.slot(layer, module)?)))
        .collect();
    // llama.cpp multiplies by alpha / r with the rank r of each matrix, and has one alpha for all: where another would be needed, as with
    // alpha_pattern, B is scaled. With rsLoRA the scaling is alpha / √r.
    let alpha = slots.first().map_or(1.0, |(_, _, slot)| slot.scaling * slot.r as f64);
    let keys = [
        ("general.type".to_owned(), Value::String("adapter".into())),
        ("general.architecture".to_owned(), Value::String(architecture.into())),
        ("general.name".to_owned(), Value::String(name_of(model_dir))),
        ("adapter.type".to_owned(), Value::String("lora".into())),
        ("adapter.lora.alpha".to_owned(), Value::F32(alpha as f32)),
    ];
    let mut tensors = Vec::new();
    let mut contents = Vec::new();
    for (layer, module, slot) in slots {
        let path = format!("model.layers.{layer}.{}.weight", module.path());
        let name = model::tensor_name(&path)
            .ok_or_else(|| EngineError::Input(format!("llama.cpp has no tensor for {path}")))?;
        let (outputs, inputs) = module.shape(&config);
        let a = &values[slot.a..slot.a + slot.r * inputs];
        // With alpha 0 the adapter changes nothing, whatever B is.
        let factor = if alpha == 0.0 { 1.0 } else { (slot.scaling * slot.r as f64 / alpha) as f32 };
        let interleaved = interleaved(&config, architecture, module.path());
        let row = |row: usize| interleaved.map_or(row, |head| model::interleaved(row, head));
        let b: Vec<f32> = (0..outputs)
            .flat_map(|output| {
                let at = slot.b + row(output) * slot.r;
                values[at..at + slot.r].iter().map(|value| value * factor)
            })
            .collect();
        let largest = a.iter().chain(&b).fold(0.0f32, |most, value| most.max(value.abs()));
        if kind == Kind::F16 && largest > LARGEST_F16 {
            return Err(EngineError::ModelNotFinite {
                what: format!("the adapter of {path} is not finite as float16: choose float32"),
            });
        }
        tensors.push(Tensor { name: format!("{name}.lora_a"), shape: vec![slot.r, inputs], kind });
        tensors.push(Tensor { name: format!("{name}.lora_b"), shape: vec![outputs, slot.r], kind });
        contents.push((a.to_vec(), b));
    }
    let io = |source| EngineError::Io { path: out.to_owned(), source };
    let file = BufWriter::with_capacity(1 << 20, File::create(out).map_err(io)?);
    let mut writer = Writer::new(file, &keys, tensors).map_err(io)?;
    for (a, b) in contents {
        writer.write(&a).and_then(|()| writer.write(&b)).map_err(io)?;
    }
    close(writer, out)
}

fn close(writer: Writer<BufWriter<File>>, out: &Path) -> Result<()> {
    let io = |source| EngineError::Io { path: out.to_owned(), source };
    let file = writer.finish().map_err(io)?.into_inner().map_err(|error| io(error.into_error()))?;
    file.sync_all().map_err(io)
}

fn name_of(model_dir: &Path) -> String {
    model_dir.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The head size by which the rows of a matrix or bias change places; None if they do not.
fn interleaved(config: &ModelDescription, architecture: &str, path: &str) -> Option<usize> {
    let turns = path.ends_with("self_attn.q_proj") || path.ends_with("self_attn.k_proj");
    (turns && model::interleaves(architecture)).then_some(config.head_dim)
}

/// The tensors of the model in the order of the checkpoint's config, and llama.cpp's entries of them.
fn sources(base: &Base, kind: Kind) -> Result<(Vec<Source>, Vec<Tensor>)> {
    let config = &base.card.config;
    let architecture = model::architecture(config)?;
    let mut sources = Vec::new();
    let mut tensors = Vec::new();
    for (name, shape) in config.tensors() {
        let location = base.card.tensors.iter().find(|tensor| tensor.name == name);
        let (Some(location), Some(named)) = (location, model::tensor_name(&name)) else {
            return Err(Refused(format!(
                "the tensor {name} is not written as GGUF: llama.cpp was not compared with it"
            ))
            .into());
        };
        let stem = name.rsplit_once('.').map_or("", |(stem, _)| stem);
        let interleaved = interleaved(config, architecture, stem);
        tensors.push(Tensor { name: named, kind: kind.of_tensor(&shape), shape });
        sources.push(Source { location: location.clone(), interleaved, name });
    }
    Ok((sources, tensors))
}

/// The rows of a tensor with the adapter's update, in llama.cpp's order.
struct Rows {
    name: String,
    location: TensorLocation,
    width: usize,
    count: usize,
    /// All values, where they cannot be read in parts.
    whole: Option<Vec<f32>>,
    interleaved: Option<usize>,
    file: File,
    dir: PathBuf,
}

impl Rows {
    fn open(base: &mut Base, source: &Source) -> Result<Rows> {
        let Source { name, location, interleaved } = source;
        // A bias counts as one column, so that its values change places like rows.
        let width = if location.shape.len() == 1 { 1 } else { location.shape.last().copied().unwrap_or(1).max(1) };
        let count = location.num_elements() / width;
        let file = modelcard::open(&base.dir, &location.file)?;
        let whole = match (base.expanded(name, location)?, interleaved) {
            (None, Some(_)) => Some(part(&base.dir, &file, location, 0..count, width)?),
            (whole, _) => whole,
        };
        let (name, location, dir) = (name.clone(), location.clone(), base.dir.clone());
        Ok(Rows { name, location, width, count, whole, interleaved: *interleaved, file, dir })
    }

    /// The ranges of rows that are read one after the other; all rows together where they change places.
    fn parts(&self) -> Vec<Range<usize>> {
        let at_once = if self.interleaved.is_some() { self.count } else { (PART / self.width).max(1) };
        (0..self.count).step_by(at_once.max(1)).map(|first| first..(first + at_once).min(self.count)).collect()
    }

    /// Returns the base's values of these rows, and the adapter's update of them.
    fn read(&mut self, base: &Base, rows: Range<usize>) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let values = match &self.whole {
            Some(all) => all[rows.start * self.width..rows.end * self.width].to_vec(),
            None => part(&self.dir, &self.file, &self.location, rows.clone(), self.width)?,
        };
        let update = base.update(&self.name).map(|update| update.rows(rows, self.width));
        let Some(head) = self.interleaved else { return Ok((values, update)) };
        let turned = |values: Vec<f32>| -> Vec<f32> {
            let row = |row: usize| &values[model::interleaved(row, head) * self.width..][..self.width];
            (0..self.count).flat_map(row).copied().collect()
        };
        Ok((turned(values), update.map(turned)))
    }
}
