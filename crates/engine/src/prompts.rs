//! Prompts: rendered and tokenized once, at the start of a run.

use serde_json::{Map, Value};

use super::error::{EngineError, Result};
use super::host::PromptRow;
use super::text::{Prompt, Text};
use crate::spec::SamplingPlan;

/// One row of a dataset, ready for the model and for the rewards.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizedPrompt {
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// The prompt as text, after the chat template.
    pub text: String,
    /// The chat messages, if the prompt is a chat.
    pub messages: Option<Value>,
    /// All other columns of the row.
    pub columns: Map<String, Value>,
}

/// Tokenizes rows. Prompts that are empty, or that leave no room for `max_completion_length` tokens within
/// `max_position_embeddings`, are a user error that counts them; prompts are never truncated.
pub fn tokenize(
    text: &Text,
    rows: Vec<PromptRow>,
    sampling: &SamplingPlan,
    max_position_embeddings: usize,
) -> Result<Vec<TokenizedPrompt>> {
    let prompts: Vec<TokenizedPrompt> =
        rows.into_iter().map(|row| tokenize_row(text, row, sampling)).collect::<Result<_>>()?;
    let room = max_position_embeddings.saturating_sub(sampling.max_completion_length as usize);
    let too_long: Vec<usize> = (0..prompts.len()).filter(|&row| prompts[row].ids.len() > room).collect();
    let empty: Vec<usize> = (0..prompts.len()).filter(|&row| prompts[row].ids.is_empty()).collect();
    if let Some(first) = too_long.first() {
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        return Err(EngineError::Prompts(format!(
            "{} of {} prompts are longer than {room} tokens (max_position_embeddings {max_position_embeddings} − max_completion_length {}); the longest has {longest}, the first is row {first}; shorten or drop them, or lower max_completion_length",
            too_long.len(),
            prompts.len(),
            sampling.max_completion_length,
        )));
    }
    if let Some(first) = empty.first() {
        return Err(EngineError::Prompts(format!(
            "{} of {} prompts are empty after tokenization; the first is row {first}; drop them",
            empty.len(),
            prompts.len(),
        )));
    }
    Ok(prompts)
}

/// Tokenizes one row, whatever its length.
pub fn tokenize_row(text: &Text, row: PromptRow, sampling: &SamplingPlan) -> Result<TokenizedPrompt> {
    let PromptRow { prompt, columns } = row;
    // Special tokens are added once: to a text by the tokenizer, to a chat by the template.
    let (rendered, ids, messages) = match Prompt::from_value(&prompt)? {
        Prompt::Text(plain) => {
            let ids = text.encode(&plain, true)?;
            (plain, ids, None)
        }
        Prompt::Chat(messages) => {
            let rendered = text.render_chat(&messages, true, &sampling.chat_template_kwargs)?;
            let ids = text.encode(&rendered, false)?;
            (rendered, ids, Some(prompt))
        }
    };
    Ok(TokenizedPrompt { ids, text: rendered, messages, columns })
}
