//! Side-by-side generation: completions of the base model and of a checkpoint for the same prompt.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::event::FinishReason;

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
