//! Reads the headers of safetensors files: locates every tensor that a model needs, and checks its shape and its place in the file.
//!
//! Longer than other files: the spellings of names, and the formats in 8 and 4 bits, need the same open files and headers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::{Read, Seek};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::strict_json;

use super::{ModelCardError, ModelDescription, check_downloaded, io_error, read_json};

/// Maximum length in bytes of a file header in the safetensors format.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// The number format in which a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorDtype {
    /// 32-bit IEEE floating point.
    F32,
    /// 16-bit IEEE floating point.
    F16,
    /// bfloat16: 8 bits of exponent.
    Bf16,
    /// 8-bit float: 4 bits of exponent, 3 of fraction, no infinity.
    F8E4M3,
    /// bitsandbytes' 4-bit NormalFloat: codes of a table, with a scale per block.
    Nf4,
    /// bitsandbytes' 4-bit float: codes of a table, with a scale per block.
    Fp4,
    /// Bytes, which describe the values of another tensor.
    U8,
}

impl TensorDtype {
    /// Returns the size of one element in bits.
    pub fn size_bits(self) -> usize {
        match self {
            TensorDtype::F32 => 32,
            TensorDtype::F16 | TensorDtype::Bf16 => 16,
            TensorDtype::F8E4M3 | TensorDtype::U8 => 8,
            TensorDtype::Nf4 | TensorDtype::Fp4 => 4,
        }
    }

    /// Returns the size of this number of elements in bytes.
    pub fn bytes_of(self, elements: usize) -> usize {
        (elements * self.size_bits()).div_ceil(8)
    }

    /// Returns the short name of the number format: `f32`, `f16`, `bf16`, `fp8`, `nf4`, `fp4` or `u8`.
    pub fn name(self) -> &'static str {
        match self {
            TensorDtype::F32 => "f32",
            TensorDtype::F16 => "f16",
            TensorDtype::Bf16 => "bf16",
            TensorDtype::F8E4M3 => "fp8",
            TensorDtype::Nf4 => "nf4",
            TensorDtype::Fp4 => "fp4",
            TensorDtype::U8 => "u8",
        }
    }

    /// Whether values are 4-bit codes.
    pub fn is_four_bit(self) -> bool {
        matches!(self, TensorDtype::Nf4 | TensorDtype::Fp4)
    }
}

/// Returns the number format in which most of a model's weights are stored; `None` = there are no tensors.
pub fn precision(tensors: &[TensorLocation]) -> Option<TensorDtype> {
    let formats = [
        TensorDtype::F32,
        TensorDtype::F16,
        TensorDtype::Bf16,
        TensorDtype::F8E4M3,
        TensorDtype::Nf4,
        TensorDtype::Fp4,
    ];
    let stored = |dtype: TensorDtype| -> usize {
        tensors.iter().filter(|tensor| tensor.dtype == dtype).map(TensorLocation::num_elements).sum()
    };
    formats.into_iter().filter(|dtype| stored(*dtype) > 0).max_by_key(|dtype| stored(*dtype))
}

/// The location of a tensor in a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLocation {
    /// The tensor's name, as in a text-only model of transformers.
    pub name: String,
    /// Path of the file that contains the tensor, relative to the model directory.
    pub file: String,
    /// The number format of the tensor's elements.
    pub dtype: TensorDtype,
    /// The size of each of the tensor's dimensions.
    pub shape: Vec<usize>,
    /// Position of the tensor's first byte, from the beginning of the file.
    pub offset_bytes: u64,
    /// The scales by which stored 8-bit values are multiplied; None for other formats.
    pub scale: Option<Box<Scale>>,
    /// The tensors that describe stored 4-bit codes; None for other formats.
    pub four_bit: Option<Box<FourBitTensors>>,
}

/// The tensors that describe a weight matrix in 4 bits, as bitsandbytes stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FourBitTensors {
    /// The values of the 16 codes (`quant_map`), in f32.
    pub table: TensorLocation,
    /// The scale of each block of weights (`absmax`), in f32; with double quantization in 8-bit codes.
    pub scales: TensorLocation,
    /// The description in JSON (`quant_state`): sizes of blocks, shape, number format of the values.
    pub state: TensorLocation,
    /// The values of 256 codes (`nested_quant_map`) and their scales (`nested_absmax`), with double quantization.
    pub nested: Option<(TensorLocation, TensorLocation)>,
}

impl FourBitTensors {
    /// Lists all these tensors.
    pub fn all(&self) -> impl Iterator<Item = &TensorLocation> {
        let nested = self.nested.iter().flat_map(|(table, scales)| [table, scales]);
        [&self.table, &self.scales, &self.state].into_iter().chain(nested)
    }
}

/// The scales of a weight matrix that is stored in 8 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scale {
    /// The tensor with one scale per block of weights: `[blocks of rows][blocks of columns]`.
    pub values: TensorLocation,
    /// Number of rows and columns of a block that shares a scale.
    pub block: [usize; 2],
    /// Number format to which the products of weight and scale are rounded.
    pub dtype: TensorDtype,
}

impl TensorLocation {
    /// Returns the number of elements of the tensor.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the size of the tensor in bytes.
    pub fn size_bytes(&self) -> usize {
        self.dtype.bytes_of(self.num_elements())
    }
}

#[derive(Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Locates every tensor that a model with this config.json needs.
pub(super) fn locate(dir: &Path, config: &ModelDescription) -> Result<Vec<TensorLocation>, ModelCardError> {
    let mut found = locate_spelled(dir, config.tensors(), config.is_part)?;
    // Each tensor stored in 8 bits has a second tensor with its scales, which is located too.
    let scaled = |location: &TensorLocation| location.dtype == TensorDtype::F8E4M3;
    let scales = found.iter().filter(|location| scaled(location)).map(|location| {
        let block = match (config.fp8_block, location.shape.as_slice()) {
            (Some(block), [_, _]) => block,
            _ => [usize::MAX; 2],
        };
        let shape = match config.fp8_block {
            Some([rows, columns]) if location.shape.len() == 2 => {
                vec![location.shape[0].div_ceil(rows), location.shape[1].div_ceil(columns)]
            }
            _ => Vec::new(),
        };
        (format!("{}_scale_inv", location.name), shape, block)
    });
    let scales: Vec<(String, Vec<usize>, [usize; 2])> = scales.collect();
    let needed = scales.iter().map(|(name, shape, _)| (name.clone(), shape.clone())).collect();
    let located = locate_spelled(dir, needed, config.is_part)?;
    let dtype = config.fp8_dtype;
    for location in found.iter_mut().filter(|location| location.dtype.is_four_bit()) {
        location.four_bit = Some(Box::new(locate_four_bit(dir, location, config.is_part)?));
    }
    let scales =
        located.into_iter().zip(scales).map(|(values, (_, _, block))| Box::new(Scale { values, block, dtype }));
    for (location, scale) in found.iter_mut().filter(|location| scaled(location)).zip(scales) {
        location.scale = Some(scale);
    }
    Ok(found)
}

/// Locates the tensors that describe a matrix of 4-bit codes.
fn locate_four_bit(dir: &Path, of: &TensorLocation, is_part: bool) -> Result<FourBitTensors, ModelCardError> {
    let mut files = Files::new(dir, is_part)?;
    let mut located = |suffix: &str, dtypes: &[TensorDtype]| {
        let name = format!("{}.{suffix}", of.name);
        let location = files.find(&name)?.ok_or_else(|| missing(&of.file, &name))?;
        if dtypes.contains(&location.dtype) {
            return Ok(location);
        }
        let detail =
            format!("tensor {name} is stored as {}, which is not a format of bitsandbytes", location.dtype.name());
        Err(ModelCardError::new(&of.file, detail))
    };
    let table = located("quant_map", &[TensorDtype::F32])?;
    let scales = located("absmax", &[TensorDtype::F32, TensorDtype::U8])?;
    let state = located(&format!("quant_state.bitsandbytes__{}", of.dtype.name()), &[TensorDtype::U8])?;
    let nested = match scales.dtype {
        TensorDtype::U8 => {
            Some((located("nested_quant_map", &[TensorDtype::F32])?, located("nested_absmax", &[TensorDtype::F32])?))
        }
        _ => None,
    };
    Ok(FourBitTensors { table, scales, state, nested })
}

/// Tensors of a multimodal checkpoint that its text part does not need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Number of tensors that are not needed.
    pub count: usize,
    /// The parts of the model that these tensors belong to, such as `vision_tower`.
    pub parts: Vec<String>,
}

/// Lists the tensors of a multimodal checkpoint that its text part does not need, and those of a text-only Qwen3.5 that predict
/// further tokens (`mtp`); None for other checkpoints.
pub(super) fn skipped(dir: &Path, config: &ModelDescription) -> Result<Option<Skipped>, ModelCardError> {
    if !config.is_part && config.delta_net.is_none() {
        return Ok(None);
    }
    let names: Vec<String> = match weight_files(dir)? {
        WeightFiles::Sharded(map) => map.into_keys().collect(),
        WeightFiles::Single(file) => {
            let header = read_header(dir, &file)?;
            header.tensors.into_keys().chain(header.unsupported.into_keys()).collect()
        }
    };
    let mut needed: HashSet<String> = HashSet::new();
    for (name, _) in config.tensors() {
        for name in spellings(&name, true) {
            // Tensors with the scales of 8-bit weights or activations do not count as tensors of other parts.
            let base = name.strip_suffix(".weight").unwrap_or(&name);
            needed.extend([format!("{base}.activation_scale"), format!("{name}_scale_inv")]);
            needed.insert(name);
        }
    }
    let others: Vec<String> = names.into_iter().filter(|name| !needed.contains(name)).collect();
    let part = |name: &String| {
        let mut path = name.split('.');
        match (path.next().unwrap_or(""), path.next()) {
            ("model", Some(second)) => format!("model.{second}"),
            (first, _) => first.to_owned(),
        }
    };
    let parts: BTreeSet<String> = others.iter().map(part).collect();
    Ok((!others.is_empty()).then(|| Skipped { count: others.len(), parts: parts.into_iter().take(16).collect() }))
}

/// Returns the names that a decoder's tensor may have in the files. In a multimodal checkpoint the decoder is
/// `language_model.model` (saved by transformers 4, and published for Gemma 3 and Mistral 3) or `model.language_model`
/// (saved by transformers 5).
fn spellings(name: &str, is_part: bool) -> Vec<String> {
    let mut spellings = vec![name.to_owned()];
    if is_part {
        spellings.push(format!("language_model.{name}"));
        spellings.extend(name.strip_prefix("model.").map(|rest| format!("model.language_model.{rest}")));
    }
    spellings
}

/// Returns whether the files contain a language-model head that differs from the embedding although config.json ties the
/// two: transformers 5 then unties them. Both tensors are compared if both exist; two different tensors nearly always differ
/// in the first bytes.
pub(super) fn has_own_head(dir: &Path, config: &ModelDescription) -> Result<bool, ModelCardError> {
    let shape = vec![config.vocab_size, config.hidden_size];
    let names = ["model.embed_tokens.weight", "lm_head.weight"].map(|name| (name.to_owned(), shape.clone()));
    // If one of the two tensors is missing, there is nothing to untie; a missing embedding is reported when
    // the tensors are located.
    let Ok(found) = locate_spelled(dir, names.into(), config.is_part) else { return Ok(false) };
    let [embedding, head] = found.as_slice() else { return Ok(false) };
    if embedding.dtype != head.dtype {
        return Ok(true);
    }
    let (mut of_embedding, mut of_head) = (bytes_of(dir, embedding)?, bytes_of(dir, head)?);
    let (mut one, mut other) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for begin in (0..embedding.size_bytes()).step_by(one.len()) {
        let length = one.len().min(embedding.size_bytes() - begin);
        of_embedding.read_exact(&mut one[..length]).map_err(|e| io_error(&embedding.file, &e))?;
        of_head.read_exact(&mut other[..length]).map_err(|e| io_error(&head.file, &e))?;
        if one[..length] != other[..length] {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Opens the file that contains a tensor, at the tensor's first byte.
fn bytes_of(dir: &Path, location: &TensorLocation) -> Result<std::fs::File, ModelCardError> {
    let mut file = super::open(dir, &location.file)?;
    file.seek(std::io::SeekFrom::Start(location.offset_bytes)).map_err(|e| io_error(&location.file, &e))?;
    Ok(file)
}

/// Locates the tensors with the given names, and checks their shapes.
pub(super) fn locate_named(
    dir: &Path,
    needed: Vec<(String, Vec<usize>)>,
) -> Result<Vec<TensorLocation>, ModelCardError> {
    locate_spelled(dir, needed, false)
}

fn locate_spelled(
    dir: &Path,
    needed: Vec<(String, Vec<usize>)>,
    is_part: bool,
) -> Result<Vec<TensorLocation>, ModelCardError> {
    let mut files = Files::new(dir, is_part)?;
    needed.into_iter().map(|(name, shape)| files.locate(&name, &shape)).collect()
}

/// A tensor as the header of its file describes it.
struct Entry {
    file: String,
    name: String,
    /// The tensor, if its elements are numbers or bytes.
    location: Option<TensorLocation>,
    /// The tensor's format, if its elements are not supported as numbers.
    unsupported: Option<String>,
}

/// Describes a matrix of 4-bit codes by the shape of its values.
fn four_bit(
    codes: TensorLocation,
    canonical: &str,
    dtype: TensorDtype,
    shape: &[usize],
) -> Result<TensorLocation, ModelCardError> {
    let (stored, needed) = (codes.num_elements(), dtype.bytes_of(shape.iter().product()));
    if stored != needed || shape.len() != 2 {
        let detail = format!(
            "tensor {canonical} has {stored} bytes of 4-bit codes, but config.json asks for {shape:?}, which take {needed}: weights and \
             config.json are of different models"
        );
        return Err(ModelCardError::new(codes.file, detail));
    }
    Ok(TensorLocation { name: canonical.to_owned(), dtype, shape: shape.to_vec(), ..codes })
}

/// The files with a model's weights, and their headers.
struct Files<'d> {
    dir: &'d Path,
    is_part: bool,
    names: WeightFiles,
    headers: BTreeMap<String, Header>,
}

impl<'d> Files<'d> {
    fn new(dir: &'d Path, is_part: bool) -> Result<Self, ModelCardError> {
        Ok(Files { dir, is_part, names: weight_files(dir)?, headers: BTreeMap::new() })
    }

    /// Looks up a tensor in the file that should contain it; None = the index does not list the tensor.
    fn look_up(&mut self, canonical: &str) -> Result<Option<Entry>, ModelCardError> {
        let spellings = spellings(canonical, self.is_part);
        let file = match &self.names {
            WeightFiles::Single(file) => file,
            WeightFiles::Sharded(map) => match spellings.iter().find_map(|name| map.get(name)) {
                Some(file) => file,
                None => return Ok(None),
            },
        };
        if !self.headers.contains_key(file) {
            self.headers.insert(file.clone(), read_header(self.dir, file)?);
        }
        let Some(header) = self.headers.get(file) else { return Ok(None) };
        let is_here = |name: &String| header.tensors.contains_key(name) || header.unsupported.contains_key(name);
        let name = spellings.into_iter().find(is_here).unwrap_or_else(|| canonical.to_owned());
        let location = header.tensors.get(&name).or_else(|| header.bytes.get(&name)).cloned();
        let unsupported = header.unsupported.get(&name).cloned();
        Ok(Some(Entry { file: file.clone(), name, location, unsupported }))
    }

    /// Locates a tensor of numbers or bytes, whatever its shape.
    fn find(&mut self, canonical: &str) -> Result<Option<TensorLocation>, ModelCardError> {
        Ok(self.look_up(canonical)?.and_then(|entry| entry.location))
    }

    /// Locates a tensor of this shape. A matrix of 4-bit codes has the shape of its values.
    fn locate(&mut self, canonical: &str, shape: &[usize]) -> Result<TensorLocation, ModelCardError> {
        let entry = self.look_up(canonical)?.ok_or_else(|| missing(INDEX, canonical))?;
        let Entry { file, name, location, unsupported } = entry;
        if let Some(stored) = unsupported {
            return match (location, self.four_bit_format(canonical)?) {
                (Some(codes), Some(dtype)) => four_bit(codes, canonical, dtype, shape),
                _ => {
                    let detail = format!(
                        "tensor {name} is stored as {stored}; supported are BF16, F16, F32, F8_E4M3 with scales, and bitsandbytes' 4 bits"
                    );
                    Err(ModelCardError::new(file, detail))
                }
            };
        }
        let location = location.ok_or_else(|| missing(&file, &name))?;
        if location.shape != shape {
            let detail = format!(
                "tensor {name} has shape {:?}, but config.json asks for {shape:?}: weights and config.json are of different models",
                location.shape
            );
            return Err(ModelCardError::new(file, detail));
        }
        Ok(TensorLocation { name: canonical.to_owned(), ..location })
    }

    /// Returns the format of 4-bit codes, if a tensor that describes them is present.
    fn four_bit_format(&mut self, canonical: &str) -> Result<Option<TensorDtype>, ModelCardError> {
        for dtype in [TensorDtype::Nf4, TensorDtype::Fp4] {
            if self.find(&format!("{canonical}.quant_state.bitsandbytes__{}", dtype.name()))?.is_some() {
                return Ok(Some(dtype));
            }
        }
        Ok(None)
    }
}

/// The file that lists the file of each tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

fn missing(file: &str, tensor: &str) -> ModelCardError {
    let detail =
        format!("tensor {tensor} is missing; download the model again, or check that config.json belongs to it");
    ModelCardError::new(file, detail)
}

/// The files of a model's weights.
pub(super) enum WeightFiles {
    /// A single file with all tensors.
    Single(String),
    /// The file of each tensor, by tensor name.
    Sharded(HashMap<String, String>),
}

/// Returns the files of a model's weights.
pub(super) fn weight_files(dir: &Path) -> Result<WeightFiles, ModelCardError> {
    if dir.join(SINGLE).exists() {
        return Ok(WeightFiles::Single(SINGLE.to_owned()));
    }
    if !dir.join(INDEX).exists() {
        let other = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors"]
            .into_iter()
            .find(|f| dir.join(f).exists());
        let detail = match other {
            Some(file) => {
                format!("the file is missing ({file} is there); save the model with save_pretrained, as safetensors")
            }
            None => format!("the file is missing, and so is {INDEX}; the model's weights must be safetensors"),
        };
        return Err(ModelCardError::new(SINGLE, detail));
    }
    let index = read_json(dir, INDEX, MAX_INDEX_BYTES)?;
    let Some(map) = index.get("weight_map").and_then(|m| m.as_object()) else {
        return Err(ModelCardError::new(
            INDEX,
            "the index's weight_map is missing or not an object; copy the file again",
        ));
    };
    let mut files = HashMap::new();
    for (tensor, file) in map {
        let plain = file.as_str().filter(|f| !f.is_empty() && !f.contains(['/', '\\', '\0']) && *f != "..");
        let Some(file) = plain else {
            let detail = format!("weight_map.{tensor} is {}; it must be a plain file name", super::brief(file));
            return Err(ModelCardError::new(INDEX, detail));
        };
        files.insert(tensor.clone(), file.to_owned());
    }
    Ok(WeightFiles::Sharded(files))
}

/// The parsed header of a safetensors file.
#[derive(Debug, Default)]
pub struct Header {
    /// Tensors in a supported number format, by name.
    pub tensors: BTreeMap<String, TensorLocation>,
    /// The number formats of the tensors that are not supported as numbers, by tensor name.
    pub unsupported: BTreeMap<String, String>,
    /// Tensors of bytes, by name. They are in `unsupported` too.
    pub bytes: BTreeMap<String, TensorLocation>,
}

/// Reads the header of a safetensors file: 8 bytes of length, then JSON.
pub fn read_header(dir: &Path, file: &str) -> Result<Header, ModelCardError> {
    let damaged = |why: String| ModelCardError::new(file, format!("{why}; the file is damaged, copy it again"));
    let mut reader = super::open(dir, file)?;
    let file_bytes = reader.metadata().map_err(|e| io_error(file, &e))?.len();
    if file_bytes < 8 {
        return Err(damaged(format!("the file has {file_bytes} bytes, too few for a safetensors header")));
    }
    let mut start = [0u8; 64];
    let known = reader.read(&mut start).map_err(|e| io_error(file, &e))?;
    check_downloaded(file, &start[..known])?;
    reader.rewind().map_err(|e| io_error(file, &e))?;
    let mut length = [0u8; 8];
    reader.read_exact(&mut length).map_err(|e| io_error(file, &e))?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES || header_bytes > file_bytes - 8 {
        return Err(damaged(format!("the header claims to have {header_bytes} bytes, but the file has {file_bytes}")));
    }
    let mut header = vec![0u8; header_bytes as usize];
    reader.read_exact(&mut header).map_err(|e| io_error(file, &e))?;
    let entries = match strict_json::read(&header) {
        Ok(Value::Object(entries)) => entries,
        Ok(_) => return Err(damaged("the header is not a JSON object".to_owned())),
        Err(error) if error.is_data() => {
            return Err(damaged(format!("the header cannot be used: {}", strict_json::error_text(&error))));
        }
        Err(error) => return Err(damaged(format!("the header is not JSON ({error})"))),
    };
    let data_bytes = file_bytes - 8 - header_bytes;
    let mut result = Header::default();
    let mut spans = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        if name == "__metadata__" {
            let all_text = |notes: &Map<String, Value>| notes.values().all(Value::is_string);
            if !value.is_null() && !value.as_object().is_some_and(all_text) {
                return Err(damaged("the header's __metadata__ must be an object of strings".to_owned()));
            }
            continue;
        }
        let entry: HeaderEntry =
            serde_json::from_value(value).map_err(|e| damaged(format!("tensor {name}: the header is wrong ({e})")))?;
        let (begin, end) = entry.data_offsets;
        if begin > end || end > data_bytes {
            return Err(damaged(format!(
                "tensor {name} claims bytes {begin}..{end}, but the file holds {data_bytes} bytes of data"
            )));
        }
        spans.push((begin, end, name.clone()));
        let Some(dtype) = dtype(&entry.dtype) else {
            result.unsupported.insert(name, entry.dtype);
            continue;
        };
        let elements = entry.shape.iter().try_fold(1u64, |product, d| product.checked_mul(*d));
        if elements.and_then(|n| n.checked_mul(dtype.size_bits() as u64 / 8)) != Some(end - begin) {
            return Err(damaged(format!(
                "tensor {name} with elements of {} and the shape {:?} does not have the size of {} bytes that the header gives",
                entry.dtype,
                entry.shape,
                end - begin
            )));
        }
        let location = TensorLocation {
            name: name.clone(),
            file: file.to_owned(),
            dtype,
            shape: entry.shape.iter().map(|d| *d as usize).collect(),
            offset_bytes: 8 + header_bytes + begin,
            scale: None,
            four_bit: None,
        };
        if dtype == TensorDtype::U8 {
            result.unsupported.insert(name.clone(), entry.dtype);
            result.bytes.insert(name, location);
        } else {
            result.tensors.insert(name, location);
        }
    }
    spans.sort();
    cover(&spans, data_bytes).map_err(damaged)?;
    Ok(result)
}

/// Checks that every byte of a safetensors file belongs to exactly one tensor, as the format requires; `spans` must be sorted.
fn cover(spans: &[(u64, u64, String)], data_bytes: u64) -> Result<(), String> {
    let mut expected = 0;
    for (begin, end, name) in spans {
        if *begin != expected {
            let what = if *begin < expected { "overlap" } else { "leave a gap" };
            return Err(format!("tensor {name} begins at byte {begin}, not {expected}: tensors {what}"));
        }
        expected = *end;
    }
    if expected != data_bytes {
        return Err(format!("the file has {} bytes after the last tensor", data_bytes - expected));
    }
    Ok(())
}

fn dtype(name: &str) -> Option<TensorDtype> {
    match name {
        "F32" => Some(TensorDtype::F32),
        "F16" => Some(TensorDtype::F16),
        "BF16" => Some(TensorDtype::Bf16),
        "F8_E4M3" => Some(TensorDtype::F8E4M3),
        "U8" => Some(TensorDtype::U8),
        _ => None,
    }
}
