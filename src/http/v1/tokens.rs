//! The texts of single tokens, as log-probs show them.

use serde_json::{Map, Value, json};

use crate::modelcard::text::Text;
use crate::openai::{ChatToken, TextLogprobs};
use crate::serving::TokenLogprobs;

/// Stands for minus infinity, which JSON does not have.
const LEAST: f32 = -9999.0;

/// Writes tokens of one model.
pub(super) struct Tokens<'t> {
    pub text: &'t Text,
    /// Whether tokens are written as `token_id:ID`.
    pub as_ids: bool,
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LEAST }
}

impl Tokens<'_> {
    /// A token's text.
    pub(super) fn name(&self, id: u32) -> String {
        match self.as_ids {
            true => format!("token_id:{id}"),
            false => String::from_utf8_lossy(&self.text.token_bytes(id)).into_owned(),
        }
    }

    fn token(&self, id: u32, logprob: f32, top_logprobs: Option<Vec<ChatToken>>) -> ChatToken {
        ChatToken { token: self.name(id), logprob: finite(logprob), bytes: self.text.token_bytes(id), top_logprobs }
    }

    /// The entries of a chat's log-probs.
    pub(super) fn of_chat(&self, ids: &[u32], logprobs: &[TokenLogprobs]) -> Vec<ChatToken> {
        let entry = |(id, logprobs): (&u32, &TokenLogprobs)| {
            let top = logprobs.top.iter().map(|(id, logprob)| self.token(*id, *logprob, None));
            self.token(*id, logprobs.logprob, Some(top.collect()))
        };
        ids.iter().zip(logprobs).map(entry).collect()
    }

    /// Appends tokens to a completion's log-probs. `offset` is the number of characters before them; it moves behind them.
    pub(super) fn append<'l>(
        &self,
        to: &mut TextLogprobs,
        ids: &[u32],
        logprobs: impl IntoIterator<Item = Option<&'l TokenLogprobs>>,
        offset: &mut u64,
    ) {
        for (id, logprobs) in ids.iter().zip(logprobs) {
            to.tokens.push(self.name(*id));
            to.text_offset.push(*offset);
            let text = String::from_utf8_lossy(&self.text.token_bytes(*id)).chars().count();
            *offset += text as u64;
            to.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.logprob).into()));
            to.top_logprobs.push(logprobs.map(|logprobs| self.top(*id, logprobs)));
        }
    }

    /// The most probable tokens by their texts, and the token itself.
    fn top(&self, id: u32, logprobs: &TokenLogprobs) -> Map<String, Value> {
        let mut top = Map::new();
        top.insert(self.name(id), json!(f64::from(finite(logprobs.logprob))));
        for (other, logprob) in logprobs.top.iter().filter(|(other, _)| *other != id) {
            // Parts of characters have the same text. A client that looks for the most probable token must find every one.
            let name = self.name(*other);
            let name = if top.contains_key(&name) { format!("token_id:{other}") } else { name };
            top.insert(name, json!(f64::from(finite(*logprob))));
        }
        top
    }
}
