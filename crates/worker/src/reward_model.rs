//! A reward model with its text: conversations in, scores out. Used by a worker as a job's reward, and by
//! `rlood reward-server`. Everything here blocks: callers in async code use `spawn_blocking`.

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

/// How a reward model is to be used.
#[derive(Debug, Clone)]
pub struct ScorerOptions {
    /// The model directory.
    pub dir: PathBuf,
    /// What computes.
    pub backend: BackendKind,
    /// Precision of a decoder's matrices.
    pub dtype: ComputeDtype,
    /// Which score is the reward; may be left out where there is one.
    pub label: Option<String>,
    /// What the model reads.
    pub format: RewardTextFormat,
    /// Longer texts lose their beginning; None = as long as the model takes.
    pub max_length: Option<u32>,
    /// Variables of the chat template.
    pub chat_template_kwargs: Map<String, Value>,
}

/// Why a reward model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScorerError {
    /// Its files.
    #[error("the reward model cannot be used")]
    Model(#[from] EngineError),
    /// A setting does not fit the model.
    #[error("{0}")]
    Setting(String),
}

/// What is scored.
#[derive(Debug, Clone, Copy)]
pub struct Conversation<'a> {
    /// The prompt as chat messages, if it came as such.
    pub messages: Option<&'a [Value]>,
    /// The prompt as text.
    pub prompt: &'a str,
    /// The completion.
    pub completion: &'a str,
}

/// The score of one conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// The label's raw logit.
    pub reward: f64,
    /// Every label's, where there are several.
    pub scores: Vec<(String, f64)>,
    /// Tokens that the model read.
    pub num_tokens: usize,
    /// The beginning of the text was cut off.
    pub truncated: bool,
}

impl Scored {
    /// What is told beside the reward.
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

/// A reward model, its tokenizer and its chat template.
#[derive(Debug)]
pub struct Scorer {
    model: RewardModel,
    text: Text,
    label: usize,
    format: RewardTextFormat,
    chat_template_kwargs: Map<String, Value>,
}

impl Scorer {
    /// Load it. Takes as long as reading the weights.
    ///
    /// # Errors
    /// When the files or the options cannot be used; says which and what to do.
    pub fn load(options: &ScorerOptions) -> Result<Scorer, ScorerError> {
        let ScorerOptions { dir, backend, dtype, label, format, max_length, chat_template_kwargs } = options;
        let card = ClassifierCard::read(dir).map_err(EngineError::from)?;
        let label = card.label_index(label.as_deref()).map_err(ScorerError::Setting)?;
        let max_tokens = max_length.map_or(card.max_tokens, |max| max as usize);
        if max_tokens == 0 || max_tokens > card.max_tokens {
            let detail = format!("max_length is {max_tokens}; this model takes 1 to {}", card.max_tokens);
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

    /// What is known of the model.
    pub fn card(&self) -> &ClassifierCard {
        self.model.card()
    }

    /// The label whose score is the reward.
    pub fn label(&self) -> &str {
        &self.card().labels[self.label]
    }

    /// Scores conversations; one that cannot be put into words for the model has an error of its own.
    ///
    /// # Errors
    /// When the model itself fails.
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
                    let reward = reward.ok_or_else(|| EngineError::Input("a score is missing".to_owned()))?;
                    let named = self.card().labels.iter().cloned().zip(scores.into_iter().map(f64::from));
                    let scores = if self.card().labels.len() > 1 { named.collect() } else { Vec::new() };
                    Ok(Scored { reward, scores, num_tokens: ids.len(), truncated })
                }
            });
        }
        Ok(scored)
    }

    /// What the model reads of a conversation; and whether it had to be cut.
    fn ids(&self, conversation: &Conversation<'_>) -> Result<(Vec<u32>, bool), TextError> {
        let Conversation { messages, prompt, completion } = *conversation;
        let is_encoder = matches!(self.card().backbone, Backbone::Encoder(_));
        let format = match (self.format, messages) {
            (RewardTextFormat::Auto, Some(_)) if self.text.has_chat_template() => RewardTextFormat::Chat,
            (RewardTextFormat::Auto, _) if is_encoder => RewardTextFormat::Pair,
            (RewardTextFormat::Auto, _) => RewardTextFormat::Text,
            (format, _) => format,
        };
        // What a template writes has its special tokens; those of an encoder (its first token is scored) are the tokenizer's.
        let (ids, truncated) = match format {
            RewardTextFormat::Chat => {
                let said =
                    self.text.render_chat(&chat(messages, prompt, completion), false, &self.chat_template_kwargs)?;
                self.text.encode_cut(&said, None, is_encoder)?
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
            true => Err(TextError::Tokenizer("the text has no token".to_owned())),
            false => Ok((ids, truncated)),
        }
    }
}

fn read_text(dir: &Path, max_tokens: usize) -> Result<Text, TextError> {
    let mut text = Text::load_classifier(dir)?;
    text.truncate_left(max_tokens)?;
    Ok(text)
}

/// The whole conversation. A completion is a message of its own, also where the assistant spoke last: so was the policy asked.
fn chat(messages: Option<&[Value]>, prompt: &str, completion: &str) -> Vec<Value> {
    let mut all = match messages {
        Some(messages) => messages.to_vec(),
        None => vec![json!({"role": "user", "content": prompt})],
    };
    all.push(json!({"role": "assistant", "content": completion}));
    all
}

/// A prompt for models without a chat template: what its messages say, line by line.
fn plain<'a>(messages: Option<&[Value]>, prompt: &'a str) -> Cow<'a, str> {
    let Some(messages) = messages else { return prompt.into() };
    let said: Vec<&str> = messages.iter().filter_map(|message| message["content"].as_str()).collect();
    said.join("\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_ends_with_the_completion_whoever_spoke_last() {
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
