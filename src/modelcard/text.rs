//! tokenizer.json, chat template, EOS ids.

use std::path::Path;

use super::ModelCardError;

/// Why a text could not be processed.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer is missing or damaged.
    #[error("the tokenizer cannot be used")]
    Files(#[from] ModelCardError),
    /// The tokenizer refused a text or ids.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// The model has no chat template.
    #[error(
        "the prompt is a list of chat messages, but the model has no chat template; send the prompt as a string, or add chat_template.jinja to the model"
    )]
    NoChatTemplate,
    /// The chat template refused the messages.
    #[error("the chat template failed: {0}")]
    Template(String),
}

/// What a client sends as a prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Plain text, tokenised with the tokenizer's default special tokens.
    Text(String),
    /// Chat messages, rendered by the chat template with a generation prompt.
    Chat(Vec<serde_json::Value>),
}

/// A tokenizer with its chat template.
#[derive(Debug)]
pub struct Text {}

impl Text {
    /// Load from a model directory.
    pub fn load(_dir: &Path) -> Result<Text, TextError> {
        todo!()
    }

    /// Text to ids.
    pub fn encode(&self, _text: &str, _add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        todo!()
    }

    /// Ids to text.
    pub fn decode(&self, _ids: &[u32], _skip_special_tokens: bool) -> Result<String, TextError> {
        todo!()
    }

    /// Messages to text.
    pub fn render_chat(
        &self,
        _messages: &[serde_json::Value],
        _add_generation_prompt: bool,
        _kwargs: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        todo!()
    }

    /// A prompt's ids: special tokens are added once.
    pub fn prompt_ids(&self, _prompt: &Prompt) -> Result<Vec<u32>, TextError> {
        todo!()
    }

    /// Every id that ends a completion.
    pub fn eos_token_ids(&self) -> &[u32] {
        todo!()
    }
}
