//! Scores conversations with a reward model and its tokenizer, for a job's `reward_model` reward and for `rlood reward-server`. The
//! functions block: async code must call them in `spawn_blocking`.

mod local;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::engine::backend::BackendKind;
use crate::engine::error::EngineError;
use crate::engine::reward_model::RewardModel;
use crate::modelcard::text::{Text, TextError};
use crate::modelcard::{Backbone, ClassifierCard};
use crate::spec::{ComputeDtype, RewardTextFormat};

pub use local::LocalRewardModels;

/// Settings of a reward model.
#[derive(Debug, Clone)]
pub struct ScorerOptions {
    /// Directory of the reward model.
    pub dir: PathBuf,
    /// Compute backend (CPU or GPU) that runs the model.
    pub backend: BackendKind,
    /// Precision in which the weight matrices of a decoder model are kept.
    pub dtype: ComputeDtype,
    /// Label of the model whose score is the reward; optional if the model has one label.
    pub label: Option<String>,
    /// Format of the text that the model reads.
    pub format: RewardTextFormat,
    /// Maximum number of tokens that the model reads; the beginning of longer texts is cut off. `None` uses the model's maximum.
    pub max_length: Option<u32>,
    /// Additional variables for the model's chat template.
    pub chat_template_kwargs: Map<String, Value>,
}

/// Reason why a reward model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScorerError {
    /// The model's files cannot be used.
    #[error("the reward model cannot be used")]
    Model(#[from] EngineError),
    /// A setting of the reward is not valid for this model.
    #[error("{0}")]
    Setting(String),
}

/// A prompt and its completion, to be scored.
#[derive(Debug, Clone, Copy)]
pub struct Conversation<'a> {
    /// The prompt as chat messages, if it was given in this form.
    pub messages: Option<&'a [Value]>,
    /// The prompt as text.
    pub prompt: &'a str,
    /// The completion to score.
    pub completion: &'a str,
}

/// The reward model's score of one conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// Raw logit of the reward's label.
    pub reward: f64,
    /// Scores of all labels, if the model has several.
    pub scores: Vec<(String, f64)>,
    /// Number of tokens that the model read.
    pub num_tokens: usize,
    /// Whether the beginning of the text was cut off.
    pub truncated: bool,
}

impl Scored {
    /// Returns the metrics of a scored conversation: number of tokens, truncation, and the scores of all labels.
    pub fn metrics(&self) -> Map<String, Value> {
        let mut metrics = Map::new();
        metrics.insert("num_tokens".to_owned(), json!(self.num_tokens));
        if self.truncated {
            metrics.insert("truncated".to_owned(), json!(true));
        }
        metrics.extend(self.scores.iter().map(|(label, score)| (label.clone(), json!(score))));
        metrics
    }
}

/// A reward model with its tokenizer and chat template.
#[derive(Debug)]
pub struct Scorer {
    model: RewardModel,
    text: Text,
    label: usize,
    format: RewardTextFormat,
    chat_template_kwargs: Map<String, Value>,
}

impl Scorer {
    /// Loads the reward model, which takes as long as reading the weights.
    ///
    /// # Errors
    /// Fails when the files or the settings cannot be used; the message says which, and what to do.
    pub fn load(options: &ScorerOptions) -> Result<Scorer, ScorerError> {
        let ScorerOptions { dir, backend, dtype, label, format, max_length, chat_template_kwargs } = options;
        let card = ClassifierCard::read(dir).map_err(EngineError::from)?;
        let label = card.label_index(label.as_deref()).map_err(ScorerError::Setting)?;
        let max_tokens = max_length.map_or(card.max_tokens, |max| max as usize);
        if max_tokens == 0 || max_tokens > card.max_tokens {
            let detail =
                format!("max_length is {max_tokens}; for this model max_length must be 1 to {}", card.max_tokens);
            return Err(ScorerError::Setting(detail));
        }
        let text = read_text(dir, max_tokens).map_err(EngineError::from)?;
        if *format == RewardTextFormat::Chat && !text.has_chat_template() {
            let detail = "format is chat, but the reward model has no chat template: add chat_template.jinja to it";
            return Err(ScorerError::Setting(detail.to_owned()));
        }
        let model = RewardModel::load_card(dir, card, *backend, *dtype)?;
        Ok(Scorer { model, text, label, format: *format, chat_template_kwargs: chat_template_kwargs.clone() })
    }

    /// Returns the reward model's metadata.
    pub fn card(&self) -> &ClassifierCard {
        self.model.card()
    }

    /// Returns the label whose score is the reward.
    pub fn label(&self) -> &str {
        &self.card().labels[self.label]
    }

    /// Scores conversations. A conversation that cannot be tokenized gets its own error.
    ///
    /// # Errors
    /// Fails when the model itself fails.
    pub fn score(&self, conversations: &[Conversation<'_>]) -> Result<Vec<Result<Scored, TextError>>, EngineError> {
        let texts: Vec<_> = conversations.iter().map(|conversation| self.ids(conversation)).collect();
        let readable: Vec<&[u32]> = texts.iter().flatten().map(|(ids, _)| ids.as_slice()).collect();
        let mut scores = self.model.scores(&readable)?.into_iter();
        let mut scored = Vec::with_capacity(texts.len());
        for text in texts {
            scored.push(match text {
                Err(error) => Err(error),
                Ok((ids, truncated)) => {
                    let scores = scores.next().unwrap_or_default();
                    let reward = scores.get(self.label).copied().map(f64::from);
                    let reward = reward.ok_or_else(|| {
                        EngineError::Input("the reward model returned no score for a completion".to_owned())
                    })?;
                    let named = self.card().labels.iter().cloned().zip(scores.into_iter().map(f64::from));
                    let scores = if self.card().labels.len() > 1 { named.collect() } else { Vec::new() };
                    Ok(Scored { reward, scores, num_tokens: ids.len(), truncated })
                }
            });
        }
        Ok(scored)
    }

    /// Returns the tokens of a conversation, and whether its beginning was cut off.
    fn ids(&self, conversation: &Conversation<'_>) -> Result<(Vec<u32>, bool), TextError> {
        let Conversation { messages, prompt, completion } = *conversation;
        let is_encoder = matches!(self.card().backbone, Backbone::Encoder(_));
        let format = match (self.format, messages) {
            (RewardTextFormat::Auto, Some(_)) if self.text.has_chat_template() => RewardTextFormat::Chat,
            (RewardTextFormat::Auto, _) if is_encoder => RewardTextFormat::Pair,
            (RewardTextFormat::Auto, _) => RewardTextFormat::Text,
            (format, _) => format,
        };
        // A chat template writes special tokens into the text itself. For an encoder, whose first token is scored,
        // the tokenizer adds them.
        let (ids, truncated) = match format {
            RewardTextFormat::Chat => {
                let content =
                    self.text.render_chat(&chat(messages, prompt, completion), false, &self.chat_template_kwargs)?;
                self.text.encode_cut(&content, None, is_encoder)?
            }
            RewardTextFormat::Pair => {
                let prompt = plain(messages, prompt);
                self.text.encode_cut(&prompt, Some(completion), true)?
            }
            RewardTextFormat::Text | RewardTextFormat::Auto => {
                let prompt = plain(messages, prompt);
                self.text.encode_cut(&format!("{prompt}{completion}"), None, is_encoder)?
            }
        };
        match ids.is_empty() {
            true => Err(TextError::Tokenizer("the text to score has no tokens".to_owned())),
            false => Ok((ids, truncated)),
        }
    }
}

fn read_text(dir: &Path, max_tokens: usize) -> Result<Text, TextError> {
    let mut text = Text::load_classifier(dir)?;
    text.truncate_left(max_tokens)?;
    Ok(text)
}

/// Returns the messages of the whole conversation. The completion is a separate message even after an assistant message, as in the
/// prompt of the trained model.
fn chat(messages: Option<&[Value]>, prompt: &str, completion: &str) -> Vec<Value> {
    let mut all = match messages {
        Some(messages) => messages.to_vec(),
        None => vec![json!({"role": "user", "content": prompt})],
    };
    all.push(json!({"role": "assistant", "content": completion}));
    all
}

/// Returns a prompt for models without a chat template: the contents of its messages, one per line.
fn plain<'a>(messages: Option<&[Value]>, prompt: &'a str) -> Cow<'a, str> {
    let Some(messages) = messages else { return prompt.into() };
    let content: Vec<&str> = messages.iter().filter_map(|message| message["content"].as_str()).collect();
    content.join("\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_always_ends_with_the_completion() {
        let asked = [json!({"role": "system", "content": "be short"}), json!({"role": "user", "content": "2+2?"})];
        let whole = chat(Some(&asked), "ignored", "4");
        assert_eq!(whole[2], json!({"role": "assistant", "content": "4"}));
        let begun = [json!({"role": "user", "content": "2+2?"}), json!({"role": "assistant", "content": "It is "})];
        let whole = chat(Some(&begun), "ignored", "4");
        assert_eq!((whole.len(), &whole[2]["content"]), (3, &json!("4")));
        let whole = chat(None, "2+2?", "4");
        assert_eq!((whole.len(), &whole[0]["content"]), (2, &json!("2+2?")));
        assert_eq!(plain(Some(&asked), "ignored"), "be short\n2+2?");
        assert_eq!(plain(None, "2+2?"), "2+2?");
    }
}
