//! Reads the metadata of a sequence-classification checkpoint without loading its tensors: backbone, labels, head.
//!
//! Reward models are such checkpoints. Decoders (Qwen3, Qwen2, Llama, Mistral) score their last token; encoders
//! (DeBERTa-v2 and v3, RoBERTa and XLM-RoBERTa, ModernBERT) have a head of their own. The config keys of transformers 4
//! and 5 are both supported.

mod encoder;

use std::path::Path;

use serde_json::Value;

use super::config::Keys;
use super::{
    MAX_CONFIG_BYTES, ModelCardError, ModelDescription, ModelFile, TensorLocation, fingerprint_files, model_files,
    read_json, text, weights,
};

pub use encoder::{Activation, DebertaV2, EncoderConfig, EncoderKind, ModernBert, Pooling};

const CONFIG: &str = "config.json";
/// Maximum number of labels that is accepted; more would indicate a damaged config.json.
const MAX_LABELS: usize = 1 << 16;

/// Metadata of a sequence-classification checkpoint, read without loading its tensors.
#[derive(Clone, Debug)]
pub struct ClassifierCard {
    /// The `model_type` in config.json: `qwen3`, `deberta-v2`, …
    pub model_type: String,
    /// The network below the classification head: decoder or encoder.
    pub backbone: Backbone,
    /// The names of the labels, in the order of the model's scores.
    pub labels: Vec<String>,
    /// The token id that transformers treats as padding.
    pub pad_token_id: Option<u32>,
    /// The location of each tensor in the files, including the tensors of the classification head.
    pub tensors: Vec<TensorLocation>,
    /// The model's files, sorted by name.
    pub files: Vec<ModelFile>,
    /// Length of the longest supported sequence, in tokens.
    pub max_tokens: usize,
    /// Total number of weights; shared weights count once.
    pub num_parameters: u64,
    /// The model's chat template, as Jinja source.
    pub chat_template: Option<String>,
}

/// The network that computes the hidden states for the classification head.
#[derive(Clone, Debug, PartialEq)]
pub enum Backbone {
    /// A decoder of one of the families that rlood can train.
    Decoder(Box<ModelDescription>),
    /// A bidirectional encoder, such as DeBERTa.
    Encoder(EncoderConfig),
}

impl ClassifierCard {
    /// Reads and validates the directory of a sequence-classification model.
    ///
    /// # Errors
    /// Fails if the model cannot be used; the error names the file, the key, its value and what to do.
    pub fn read(dir: &Path) -> Result<ClassifierCard, ModelCardError> {
        if !dir.is_dir() {
            let detail =
                "this path is not a directory; give a folder with config.json, model.safetensors and tokenizer.json";
            return Err(ModelCardError::new(dir.display().to_string(), detail));
        }
        let value = read_json(dir, CONFIG, MAX_CONFIG_BYTES)?;
        let keys = Keys { file: CONFIG, value: &value };
        if !names_classifier(&value) {
            return keys.refuse(
                "architectures",
                value.get("architectures").unwrap_or(&Value::Null),
                "a reward model is a …ForSequenceClassification checkpoint",
            );
        }
        let labels = labels(&keys)?;
        let model_type = keys.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let (backbone, mut needed, max_tokens) = match EncoderConfig::read(&keys, &model_type)? {
            Some(config) => {
                let (tensors, max_tokens) = (config.tensors(labels.len()), config.max_tokens());
                (Backbone::Encoder(config), tensors, max_tokens)
            }
            None => {
                let config = ModelDescription::of_backbone(&keys)?;
                let mut tensors = config.tensors();
                tensors.push((SCORE.to_owned(), vec![labels.len(), config.hidden_size]));
                let max_tokens = config.max_position_embeddings;
                (Backbone::Decoder(Box::new(config)), tensors, max_tokens)
            }
        };
        needed.sort();
        let tensors = weights::locate_named(dir, needed)?;
        let tokenizer = text::TokenizerInfo::read(dir)?;
        Ok(ClassifierCard {
            model_type,
            backbone,
            labels,
            pad_token_id: pad_token_id(&keys)?,
            files: model_files(dir, CONFIG, &tensors),
            num_parameters: tensors.iter().map(|t| t.num_elements() as u64).sum(),
            tensors,
            max_tokens,
            chat_template: tokenizer.chat_template,
        })
    }

    /// Computes the model's fingerprint; see [`super::fingerprint`].
    ///
    /// # Errors
    /// Fails if a file cannot be read.
    pub fn fingerprint(&self, dir: &Path) -> Result<String, ModelCardError> {
        fingerprint_files(dir, &self.files)
    }

    /// Returns the index of the score that a label's name or number selects; without a label, of the model's only score.
    ///
    /// # Errors
    /// Returns a message that lists the existing labels.
    pub fn label_index(&self, label: Option<&str>) -> Result<usize, String> {
        let Some(label) = label else {
            return match self.labels.len() {
                1 => Ok(0),
                n => Err(format!("the model has {n} scores ({}): select one with 'label'", self.labels.join(", "))),
            };
        };
        let by_name = self.labels.iter().position(|known| known == label);
        let by_number = || label.parse::<usize>().ok().filter(|index| *index < self.labels.len());
        by_name
            .or_else(by_number)
            .ok_or_else(|| format!("the model has no label '{label}', only: {}", self.labels.join(", ")))
    }
}

/// Name of the classification head's weight in a decoder checkpoint.
pub const SCORE: &str = "score.weight";

/// Returns whether config.json in a directory names a sequence-classification architecture; false if the file cannot be read.
pub fn is_classifier(dir: &Path) -> bool {
    read_json(dir, CONFIG, MAX_CONFIG_BYTES).is_ok_and(|value| names_classifier(&value))
}

fn names_classifier(config: &Value) -> bool {
    let list = config.get("architectures").and_then(Value::as_array);
    list.is_some_and(|list| {
        list.iter().any(|name| name.as_str().is_some_and(|name| name.ends_with("ForSequenceClassification")))
    })
}

/// Reads the label names from config.json. transformers omits `id2label` if it has the default: two labels.
fn labels(keys: &Keys) -> Result<Vec<String>, ModelCardError> {
    let numbered = |n: usize| (0..n).map(|index| format!("LABEL_{index}")).collect();
    let Some(value) = keys.get("id2label") else {
        return match keys.size("num_labels", Some(2))? {
            n if n <= MAX_LABELS => Ok(numbered(n)),
            n => keys.refuse("num_labels", &n.into(), "the number of labels is out of range"),
        };
    };
    let Some(map) = value.as_object().filter(|map| (1..=MAX_LABELS).contains(&map.len())) else {
        return keys.refuse("id2label", value, "the value must be an object from label numbers to names");
    };
    let mut labels = Vec::with_capacity(map.len());
    for index in 0..map.len() {
        match map.get(&index.to_string()) {
            Some(Value::String(name)) => labels.push(name.clone()),
            Some(other) => labels.push(other.to_string()),
            None => return keys.refuse("id2label", value, "the keys of id2label must be the numbers from 0 on"),
        }
    }
    Ok(labels)
}

fn pad_token_id(keys: &Keys) -> Result<Option<u32>, ModelCardError> {
    match keys.get("pad_token_id") {
        None => Ok(None),
        Some(value) => match value.as_i64() {
            Some(id) if id < 0 => Ok(None),
            Some(id) if u32::try_from(id).is_ok() => Ok(u32::try_from(id).ok()),
            _ => keys.refuse("pad_token_id", value, "the value must be a token id"),
        },
    }
}
