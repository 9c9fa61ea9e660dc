//! The rows of a warm-up: prompts with answers, rendered and tokenized at the start of a run.

use serde_json::Value;

use super::error::{EngineError, Result};
use super::host::PromptRow;
use super::text::Text;
use crate::dataset::answered;
use crate::spec::{PromptKey, SamplingPlan, prompt_key};
use crate::trajectory::Segments;

/// A tokenized row with an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredRow {
    /// Token ids of the prompt, the same as in a rollout.
    pub prompt: Vec<u32>,
    /// The answer's tokens; only these contribute to the loss.
    pub answer: Segments,
}

/// The key that identifies a row's prompt, without its answer.
pub fn prompt_key_of(row: &PromptRow) -> PromptKey {
    match &row.prompt {
        Value::Array(messages) => match messages.split_last() {
            Some((last, before)) if last["role"] == "assistant" => prompt_key(&Value::Array(before.to_vec())),
            Some(_) | None => prompt_key(&row.prompt),
        },
        prompt => prompt_key(prompt),
    }
}

/// Tokenizes rows. A row without an answer, or longer than the model's context, is a user error that names the row's
/// number; rows are never truncated.
///
/// # Errors
/// Fails on the first row without an answer or with too many tokens.
pub fn tokenize(
    text: &Text,
    rows: Vec<PromptRow>,
    sampling: &SamplingPlan,
    max_position_embeddings: usize,
) -> Result<Vec<AnsweredRow>> {
    let of_row = |(index, row): (usize, PromptRow)| {
        let wrong = |detail: String| EngineError::Prompts(format!("row {index} of the warm-up: {detail}"));
        let answered = answered(&row.prompt, &row.columns).map_err(|(_, detail)| wrong(detail))?;
        let ids = text.answered_ids(&answered, &sampling.chat_template_kwargs);
        let (prompt, answer) = ids.map_err(|error| wrong(error.to_string()))?;
        let tokens = prompt.len() + answer.len();
        if prompt.is_empty() || answer.is_empty() {
            return Err(wrong("the prompt or the answer is empty after tokenization; drop the row".to_owned()));
        }
        if tokens > max_position_embeddings {
            return Err(wrong(format!(
                "prompt and answer have {tokens} tokens, and the model reads at most {max_position_embeddings}; \
                 shorten or drop the row"
            )));
        }
        Ok(AnsweredRow { prompt, answer: Segments::of_completion(answer, None) })
    };
    rows.into_iter().enumerate().map(of_row).collect()
}
