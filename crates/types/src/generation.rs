//! Completions beside each other: what the base model says to a prompt, and what the weights of a checkpoint say.
//!
//! The server holds no model. It hands a [`GenerationTask`] to a process of its own (`crate::generator`), which answers with
//! a [`GenerationReport`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::event::FinishReason;
use crate::spec::{FieldError, Plan};

/// What to generate; goes to the child's standard input as one line of JSON.
#[derive(Serialize, Deserialize)]
pub struct GenerationTask {
    /// The job as resolved, with the sampling asked for.
    pub plan: Plan,
    /// The model's directory.
    pub model_dir: PathBuf,
    /// The checkpoint's directory.
    pub checkpoint_dir: PathBuf,
    /// As in a dataset: text, or a list of chat messages.
    pub prompt: Value,
    /// Completions of each.
    pub num_generations: u32,
    /// The same numbers are drawn for both.
    pub seed: u64,
    /// What the process may use, bytes; None = unknown.
    pub memory_limit_bytes: Option<u64>,
    /// From the start of the process on, ms.
    pub limit_ms: u64,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GenerationReport {
    /// Completions.
    Generated(Generation),
    /// The request asks for what cannot be: where, and what to do.
    Refused(FieldError),
    /// The files of the model or of the checkpoint cannot be used: why.
    Unusable(String),
    /// The time limit came first.
    TimedOut,
}

/// Completions of the base model and of the trained weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generation {
    /// The prompt as the model saw it.
    pub prompt: RenderedPrompt,
    /// Of the base model.
    pub base: Vec<GeneratedText>,
    /// Of the checkpoint's weights.
    pub trained: Vec<GeneratedText>,
}

/// A prompt as the model saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RenderedPrompt {
    /// The text, chat template applied.
    pub text: String,
    /// Its tokens, those that the tokenizer puts around a text included.
    pub num_tokens: u64,
}

/// One completion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GeneratedText {
    /// The text, without special tokens.
    pub completion: String,
    /// Its tokens, the one that ends it included.
    pub num_tokens: u64,
    /// Why it ended.
    pub finish_reason: FinishReason,
}
