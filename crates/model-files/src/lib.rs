//! Reads the metadata of a model without loading its tensors: config.json, safetensors headers, tokenizer, chat template.
//!
//! The server uses this crate when a job is submitted, and the engine when it loads a model. Reading never panics, whatever the
//! files contain; every error names the file, the key, its value and what to do.

pub mod adapter;
pub mod classifier;
pub mod config;
mod families;
pub mod foreign;
pub mod gguf;
pub mod template;
#[cfg(test)]
mod tests;
pub mod text;
pub mod weights;

use rlood_templates as jinja;
use rlood_types::digest::Sha256Digest;
use rlood_types::protocol::FileEntry;
use rlood_types::spec::ModelShape;
use rlood_types::{spec, strict_json};

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

pub use classifier::{Backbone, ClassifierCard};
pub use config::{
    Activation, DeltaNet, LayerNorms, ModelDescription, Projections, QkNorm, QueryGrowth, Rope, RopeKind,
};
pub use foreign::ForeignCard;
pub use weights::{FourBitTensors, Scale, Skipped, TensorDtype, TensorLocation, precision};

/// The reason why a model directory cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {detail}")]
pub struct ModelCardError {
    /// Path of the file that has the problem, relative to the model directory.
    pub file: String,
    /// The key in that file, its value, and what to do.
    pub detail: String,
}

impl ModelCardError {
    pub(crate) fn new(file: impl Into<String>, detail: impl Into<String>) -> ModelCardError {
        ModelCardError { file: file.into(), detail: detail.into() }
    }
}

/// A file that belongs to the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFile {
    /// Path relative to the model directory.
    pub name: String,
    /// Size of the file in bytes.
    pub size_bytes: u64,
}

/// Metadata of a model, read without loading its tensors.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The content of config.json that defines the model's computation.
    pub config: ModelDescription,
    /// The location in the files of each tensor that the model needs, in the order of [`ModelDescription::tensors`].
    pub tensors: Vec<TensorLocation>,
    /// The model's files, sorted by name.
    pub files: Vec<ModelFile>,
    /// The ids of all tokens that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Length of the longest supported sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Total number of weights; shared weights count once.
    pub num_parameters: u64,
    /// The model's chat template, as Jinja source.
    pub chat_template: Option<String>,
    /// The tensors of a multimodal checkpoint that its text part does not need.
    pub skipped: Option<Skipped>,
}

impl ModelCard {
    /// Returns the sizes that determine the memory that training needs. Layers that the engine fuses are kept in 4 bits only if
    /// all of them are stored so.
    pub fn shape(&self) -> ModelShape {
        let mut shape = self.config.shape();
        let stored: HashMap<&str, &TensorLocation> =
            self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        for layer in 0..self.config.num_hidden_layers {
            let Projections { qkv, o, gate_up, down } = self.config.projections_of(layer);
            for fused in [qkv, &[o], gate_up, &[down]] {
                let tensor = |path: &&str| stored.get(format!("model.layers.{layer}.{path}.weight").as_str()).copied();
                let tensors: Vec<&TensorLocation> = fused.iter().filter_map(tensor).collect();
                let codes: Vec<&FourBitTensors> =
                    tensors.iter().filter_map(|tensor| tensor.four_bit.as_deref()).collect();
                let weights = tensors.iter().map(|tensor| tensor.num_elements() as u64).sum::<u64>();
                if codes.is_empty() || codes.len() < fused.len() {
                    continue;
                }
                match codes.iter().all(|codes| codes.nested.is_some()) {
                    true => shape.nested_four_bit_weights += weights,
                    false => shape.four_bit_weights += weights,
                }
            }
        }
        shape
    }
}

/// Reads and validates a model directory.
pub fn read(dir: &Path) -> Result<ModelCard, ModelCardError> {
    read_with_config(dir, "config.json")
}

/// Reads a model directory like [`read`], with another file instead of `config.json`.
pub fn read_with_config(dir: &Path, config_file: &str) -> Result<ModelCard, ModelCardError> {
    if !dir.is_dir() {
        let detail =
            "this path is not a directory; give a folder with config.json, model.safetensors and tokenizer.json";
        return Err(ModelCardError::new(dir.display().to_string(), detail));
    }
    let value = read_json(dir, config_file, MAX_CONFIG_BYTES)?;
    let mut config = ModelDescription::from_json(config_file, &value)?;
    if config.tie_word_embeddings && weights::has_own_head(dir, &config)? {
        config.tie_word_embeddings = false;
    }
    let tensors = weights::locate(dir, &config)?;
    let skipped = weights::skipped(dir, &config)?;
    let num_parameters = tensors.iter().map(|t| t.num_elements() as u64).sum();

    let tokenizer = text::TokenizerInfo::read(dir)?;
    let eos_token_ids = eos_token_ids(dir, config_file, &value, &config, &tokenizer)?;

    let files = model_files(dir, config_file, &tensors);
    Ok(ModelCard {
        max_position_embeddings: config.max_position_embeddings,
        config,
        tensors,
        files,
        eos_token_ids,
        num_parameters,
        chat_template: tokenizer.chat_template,
        skipped,
    })
}

/// Lists the files that make up a model, sorted by name.
fn model_files(dir: &Path, config_file: &str, tensors: &[TensorLocation]) -> Vec<ModelFile> {
    let mut names: Vec<String> = tensors.iter().map(|t| t.file.clone()).collect();
    names.extend(tensors.iter().filter_map(|t| t.scale.as_ref()).map(|scale| scale.values.file.clone()));
    names.extend(
        tensors.iter().filter_map(|t| t.four_bit.as_ref()).flat_map(|codes| codes.all().map(|t| t.file.clone())),
    );
    names.extend(OTHER_FILES.iter().map(|n| (*n).to_owned()));
    names.push(config_file.to_owned());
    names.sort();
    names.dedup();
    let sized = names.into_iter().filter_map(|name| {
        let size_bytes = std::fs::metadata(dir.join(&name)).ok()?.len();
        Some(ModelFile { name, size_bytes })
    });
    sized.collect()
}

/// Returns the model's fingerprint: SHA-256 in hex over the files that determine its output (config, weights, tokenizer, chat
/// template). Reads every byte, which takes seconds for gigabytes.
pub fn fingerprint(dir: &Path) -> Result<String, ModelCardError> {
    fingerprint_files(dir, &read(dir)?.files)
}

/// Computes the [`fingerprint`] over these files.
pub fn fingerprint_files(dir: &Path, files: &[ModelFile]) -> Result<String, ModelCardError> {
    Ok(fingerprint_entries(&hash_files(dir, files)?))
}

/// Returns the size and SHA-256 of each of these files. Reads every byte, which takes seconds for gigabytes.
///
/// # Errors
/// Fails if one of the files cannot be read.
pub fn hash_files(dir: &Path, files: &[ModelFile]) -> Result<Vec<FileEntry>, ModelCardError> {
    let hash = |file: &ModelFile| {
        let read = Sha256Digest::of_reader(&mut open(dir, &file.name)?).map_err(|e| io_error(&file.name, &e))?;
        Ok(FileEntry { name: file.name.clone(), size_bytes: read.0, sha256: read.1 })
    };
    files.iter().map(hash).collect()
}

/// Returns the [`fingerprint`] of a model from the hashes of its files, in this order.
pub fn fingerprint_entries(files: &[FileEntry]) -> String {
    let mut all = Sha256::new();
    for file in files {
        all.update(file.name.as_bytes());
        all.update([0]);
        all.update(file.sha256.bytes());
    }
    Sha256Digest::from(all).to_string()
}

/// Returns the ids of all tokens that end a completion, for a language model of any architecture.
pub(crate) fn eos_token_ids_of(dir: &Path) -> Result<Vec<u32>, ModelCardError> {
    match (read(dir), ForeignCard::read(dir)) {
        (Ok(card), _) => Ok(card.eos_token_ids),
        (Err(_), Ok(Some(card))) => Ok(card.eos_token_ids),
        (Err(error), Ok(None)) | (Err(_), Err(error)) => Err(error),
    }
}

/// Lists the files of a directory with a language model of any architecture, or with a sequence-classification model.
///
/// # Errors
/// Fails if the directory holds no model; see [`read`].
pub fn files_of(dir: &Path) -> Result<Vec<ModelFile>, ModelCardError> {
    match classifier::is_classifier(dir) {
        true => Ok(ClassifierCard::read(dir)?.files),
        false => match (read(dir), ForeignCard::read(dir)) {
            (Ok(card), _) => Ok(card.files),
            (Err(_), Ok(Some(card))) => Ok(card.files),
            (Err(error), Ok(None)) | (Err(_), Err(error)) => Err(error),
        },
    }
}

/// Returns a stamp of a model's files: SHA-256 in hex over their names, sizes and modification times. The stamp is cheap and
/// changes whenever a file is written, but the same content may have several stamps.
pub fn stamp(dir: &Path, files: &[ModelFile]) -> String {
    let mut all = Sha256::new();
    for file in files {
        let modified = std::fs::metadata(dir.join(&file.name)).and_then(|metadata| metadata.modified()).ok();
        let nanoseconds = modified
            .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
            .map_or(0, |since| since.as_nanos());
        all.update(format!("{}\0{}\0{nanoseconds}\0", file.name, file.size_bytes));
    }
    Sha256Digest::from(all).to_string()
}

const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Files, besides the weights and config.json, that affect a model's output.
const OTHER_FILES: [&str; 6] = [
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Returns the ids of generation_config.json's `eos_token_id`, and the tokenizer's own EOS token. Those of
/// config.json count only if there is no generation_config.json: transformers then derives one from config.json, and
/// TRL adds the tokenizer's (rloo_trainer.py).
fn eos_token_ids(
    dir: &Path,
    config_file: &str,
    config_json: &Value,
    config: &ModelDescription,
    tokenizer: &text::TokenizerInfo,
) -> Result<Vec<u32>, ModelCardError> {
    let file = "generation_config.json";
    let mut of_config = token_ids(config_file, config_json, config.vocab_size)?;
    if let (true, Some(text)) = (of_config.is_empty(), config_json.get("text_config")) {
        of_config = token_ids(config_file, text, config.vocab_size)?;
    }
    let mut ids = match dir.join(file).exists() {
        true => token_ids(file, &read_json(dir, file, MAX_CONFIG_BYTES)?, config.vocab_size)?,
        false => of_config,
    };
    ids.extend(tokenizer.eos_token_id.filter(|id| (*id as usize) < config.vocab_size));
    let mut seen = std::collections::HashSet::new();
    ids.retain(|id| seen.insert(*id));
    if ids.is_empty() {
        let detail = "no eos_token_id here (config.json's counts only without this file) or in the tokenizer: completions \
                      could never end; set eos_token_id to the id (or list of ids) of the end-of-sequence token";
        return Err(ModelCardError::new(file, detail));
    }
    Ok(ids)
}

fn token_ids(file: &str, value: &Value, vocab_size: usize) -> Result<Vec<u32>, ModelCardError> {
    let one = |v: &Value| {
        v.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
            let advice = format!("the value must be token ids below vocab_size ({vocab_size})");
            ModelCardError::new(file, format!("eos_token_id holds {}; {advice}", brief(v)))
        })
    };
    match value.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(v) => Ok(vec![one(v)?]),
    }
}

pub(crate) fn io_error(file: &str, error: &std::io::Error) -> ModelCardError {
    let advice = match error.kind() {
        std::io::ErrorKind::NotFound => "is missing; the model directory needs it",
        std::io::ErrorKind::PermissionDenied => "cannot be read (permission denied)",
        _ => return ModelCardError::new(file, format!("the file cannot be read: {error}")),
    };
    ModelCardError::new(file, advice)
}

/// Opens a file of a model. Only regular files are opened, because opening a pipe would block forever.
///
/// # Errors
/// Fails if the file does not exist, may not be read, or is not a regular file.
pub fn open(dir: &Path, file: &str) -> Result<File, ModelCardError> {
    let path = dir.join(file);
    let kind = std::fs::metadata(&path).map_err(|e| io_error(file, &e))?.file_type();
    if !kind.is_file() {
        let found = if kind.is_dir() { "a directory" } else { "a pipe, a socket or a device" };
        return Err(ModelCardError::new(file, format!("is {found}; it must be a regular file: replace it")));
    }
    File::open(path).map_err(|e| io_error(file, &e))
}

/// Reads a text file of a model, of at most `max_bytes`.
pub(crate) fn read_text(dir: &Path, file: &str, max_bytes: u64) -> Result<String, ModelCardError> {
    let opened = open(dir, file)?;
    let mut bytes = Vec::new();
    opened.take(max_bytes + 1).read_to_end(&mut bytes).map_err(|e| io_error(file, &e))?;
    if bytes.len() as u64 > max_bytes {
        return Err(ModelCardError::new(file, format!("is larger than {max_bytes} bytes, the maximum for this file")));
    }
    check_downloaded(file, &bytes)?;
    String::from_utf8(bytes).map_err(|_| ModelCardError::new(file, "is not valid UTF-8; copy the file again"))
}

/// Reads a model's file with a JSON object, of at most `max_bytes`.
pub fn read_json(dir: &Path, file: &str, max_bytes: u64) -> Result<Value, ModelCardError> {
    let text = read_text(dir, file, max_bytes)?;
    let value: Value = serde_json::from_str(&text)
        .map_err(|e| ModelCardError::new(file, format!("is not valid JSON ({e}); copy the file again")))?;
    if !value.is_object() {
        return Err(ModelCardError::new(file, "is not a JSON object; copy the file again"));
    }
    Ok(value)
}

/// Returns an error if the first bytes of a model's file show that it was never downloaded, for example a Git LFS pointer.
pub(crate) fn check_downloaded(file: &str, start: &[u8]) -> Result<(), ModelCardError> {
    let text = start.trim_ascii_start();
    let begins = |mark: &str| text.get(..mark.len()).is_some_and(|start| start.eq_ignore_ascii_case(mark.as_bytes()));
    let detail = if begins("version https://git-lfs") {
        "is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`, or download the model again"
    } else if begins("<!doctype") || begins("<html") || begins("<?xml") {
        "is a web page (HTML), not the file itself: the download was refused or redirected; download the model again"
    } else {
        return Ok(());
    };
    Err(ModelCardError::new(file, detail))
}

/// Formats a JSON value for an error message, shortened to a readable length.
pub fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
