//! Prompts: templated once, tokenised once, at the start of a run.

use serde_json::{Map, Value};

use super::error::{EngineError, Result};
use super::host::PromptRow;
use super::text::{Prompt, Text};
use crate::spec::SamplingPlan;

/// One row of a dataset, ready for the model and for the rewards.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizedPrompt {
    /// What the model sees.
    pub ids: Vec<u32>,
    /// The same as text, chat template applied.
    pub text: String,
    /// The chat messages, if it came as such.
    pub messages: Option<Value>,
    /// Every other column.
    pub columns: Map<String, Value>,
}

/// Rows to prompts. Prompts that are empty, or that leave no room for `max_completion_length` tokens below
/// `max_position_embeddings`, are a user failure with counts; they are never cut.
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
            "{} of {} prompts are empty after tokenisation; the first is row {first}; drop them",
            empty.len(),
            prompts.len(),
        )));
    }
    Ok(prompts)
}

/// One row to a prompt, however long.
pub fn tokenize_row(text: &Text, row: PromptRow, sampling: &SamplingPlan) -> Result<TokenizedPrompt> {
    let PromptRow { prompt, columns } = row;
    // Special tokens are added once: by the tokenizer to a text, by the template to a chat.
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
