//! Side-by-side generation: completions of the base model and of a checkpoint for the same prompt.
//!
//! The server does not load models. It passes a [`GenerateTask`] to a child process (`rlood_worker::generate`), which
//! answers with a [`GenerateReport`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::event::FinishReason;
use crate::spec::{FieldError, Plan};

/// The task of a generation process, sent to its standard input as one line of JSON.
#[derive(Serialize, Deserialize)]
pub struct GenerateTask {
    /// The job's resolved plan, with the requested sampling settings.
    pub plan: Plan,
    /// Directory of the base model.
    pub model_dir: PathBuf,
    /// Directory of the checkpoint.
    pub checkpoint_dir: PathBuf,
    /// The prompt, as in a dataset: text, or a list of chat messages.
    pub prompt: Value,
    /// Number of completions per model.
    pub num_generations: u32,
    /// Random seed, the same for both models.
    pub seed: u64,
    /// Maximum memory of the process, in bytes; null = unknown.
    pub memory_limit_bytes: Option<u64>,
    /// Time limit from the start of the process, in milliseconds.
    pub limit_ms: u64,
}

/// The result of a generation process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GenerateReport {
    /// The completions of both models.
    Generated(Generation),
    /// The request is invalid: the field at fault, and how to fix it.
    Refused(FieldError),
    /// The files of the model or the checkpoint cannot be used, for this reason.
    Unusable(String),
    /// The time limit was reached.
    TimedOut,
}

/// Completions of the base model and of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generation {
    /// The prompt as the models saw it.
    pub prompt: RenderedPrompt,
    /// Completions of the base model.
    pub base: Vec<GeneratedText>,
    /// Completions of the checkpoint.
    pub trained: Vec<GeneratedText>,
}

/// A prompt as the model saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RenderedPrompt {
    /// Text of the prompt, with the chat template applied.
    pub text: String,
    /// Length in tokens, including special tokens that the tokenizer adds.
    pub num_tokens: u64,
}

/// A completion that a model generated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GeneratedText {
    /// Text of the completion, without special tokens.
    pub completion: String,
    /// Length in tokens, including the end-of-sequence token.
    pub num_tokens: u64,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
}
