//! What can be known of a model without tensors: config.json, safetensors headers, tokenizer, chat template, memory estimate.

pub mod text;

use std::path::Path;

/// Why a model directory cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct ModelCardError {
    /// The file at fault, relative to the model directory.
    pub file: String,
    /// The key and its value, and what to do.
    pub detail: String,
}

/// A decoder family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// Qwen3
    Qwen3,
    /// Qwen2 and Qwen2.5
    Qwen2,
    /// Llama 3.x
    Llama,
    /// Mistral
    Mistral,
}

/// A file of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFile {
    /// Relative to the model directory.
    pub name: String,
    /// In bytes.
    pub size_bytes: u64,
}

/// What is known of a model without its tensors.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The family.
    pub arch: Arch,
    /// The files that make the model.
    pub files: Vec<ModelFile>,
    /// Every id that ends a completion.
    pub eos_token_ids: Vec<u32>,
    /// The longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Weights, each counted once.
    pub num_parameters: u64,
    /// The chat template's source.
    pub chat_template: Option<String>,
}

/// Read and validate a model directory.
pub fn read(_dir: &Path) -> Result<ModelCard, ModelCardError> {
    todo!()
}

/// SHA-256 in hex over the files that matter: config, weights, tokenizer, chat template.
pub fn fingerprint(_dir: &Path) -> Result<String, ModelCardError> {
    todo!()
}
