//! Untrusted text in a rendered chat: the texts of special tokens in it must not become special tokens, which could end a turn or
//! forge one.
//!
//! Before rendering, each such text is replaced by a placeholder that no template changes. In the rendered text, the texts of special
//! tokens that are left come from the template. The text is split there, as the tokenizer does, and the pieces between them are
//! encoded as ordinary text, with the placeholders replaced back. The ids are those of the whole text with only the template's tokens
//! recognized.

use std::collections::{HashMap, HashSet};

use aho_corasick::{AhoCorasick, MatchKind};
use rlood_model_files::text::{SpecialToken, Text, TextError};
use serde_json::Value;

/// A text that keeps the ids behind it as they are in the middle of a text; see [`Specials::adds_prefix`].
const GUARD: &str = "\n";
/// The characters that mark placeholders: private use, so that texts hardly contain them.
const MARKS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{FFFFD}';

/// The special tokens of a tokenizer.
#[derive(Debug)]
pub(crate) struct Specials {
    tokens: Vec<SpecialToken>,
    /// Finds the texts of the tokens. None if there are no special tokens.
    finder: Option<AhoCorasick>,
    by_text: HashMap<String, usize>,
    /// Whether the tokenizer encodes the beginning of a text differently than the same text behind a special token, as SentencePiece
    /// does with its mark for a space.
    adds_prefix: bool,
}

/// Untrusted values with placeholders, and the mark that they have around their number.
#[derive(Debug)]
pub(crate) struct Escaped {
    mark: char,
    /// Number of texts of special tokens that were replaced.
    pub count: usize,
}

impl Escaped {
    /// A text with empty placeholders around it, so that it forms no special token together with the text around it.
    pub fn fenced(&self, text: &str) -> String {
        let fence = String::from_iter([self.mark, self.mark]);
        format!("{fence}{text}{fence}")
    }
}

impl Specials {
    pub fn new(text: &Text) -> Result<Specials, TextError> {
        let tokens: Vec<SpecialToken> =
            text.marked_special().into_iter().filter(|token| !token.text.is_empty()).collect();
        let texts = tokens.iter().map(|token| token.text.as_str());
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts);
        let finder = finder.map_err(|error| TextError::Tokenizer(error.to_string()))?;
        let by_text = tokens.iter().enumerate().map(|(index, token)| (token.text.clone(), index)).collect();
        let adds_prefix = match tokens.iter().find(|token| !token.takes_right) {
            Some(token) => {
                let behind = text.encode(&format!("{}x", token.text), false)?;
                behind.get(1..) != Some(text.encode("x", false)?.as_slice())
            }
            None => false,
        };
        Ok(Specials { finder: (!tokens.is_empty()).then_some(finder), tokens, by_text, adds_prefix })
    }

    /// The special token of exactly this text.
    pub fn of_text(&self, text: &str) -> Option<&SpecialToken> {
        self.by_text.get(text).map(|index| &self.tokens[*index])
    }

    /// The longest special token that a text begins with.
    pub fn at_start(&self, text: &str) -> Option<&SpecialToken> {
        let found = self.finder.as_ref()?.find(text)?;
        (found.start() == 0).then(|| &self.tokens[found.pattern().as_usize()])
    }

    /// Number of ids that are special tokens.
    pub fn count(&self, ids: &[u32]) -> usize {
        ids.iter().filter(|id| self.tokens.binary_search_by_key(*id, |token| token.id).is_ok()).count()
    }

    /// Returns whether a string in a value contains the text of a special token.
    pub fn occur_in(&self, value: &Value) -> bool {
        let Some(finder) = &self.finder else { return false };
        strings(value).any(|text| finder.is_match(text))
    }

    /// Replaces the texts of special tokens in all strings of the values by placeholders. `others` are the further texts of the same
    /// rendering, in which the placeholders' mark must not occur.
    pub fn escape(&self, values: &mut [&mut Value], others: &[&Value]) -> Option<Escaped> {
        let given = values.iter().map(|value| &**value).chain(others.iter().copied());
        let used: HashSet<char> =
            given.flat_map(strings).flat_map(str::chars).filter(|letter| MARKS.contains(letter)).collect();
        let mark = MARKS.into_iter().find(|mark| !used.contains(mark))?;
        let mut escaped = Escaped { mark, count: 0 };
        for value in values {
            self.escape_value(value, &mut escaped);
        }
        Some(escaped)
    }

    fn escape_value(&self, value: &mut Value, escaped: &mut Escaped) {
        match value {
            Value::String(text) => *text = self.escape_text(text, escaped),
            Value::Array(items) => items.iter_mut().for_each(|item| self.escape_value(item, escaped)),
            Value::Object(fields) => {
                // Keys are texts of the same stranger: the names of arguments in a schema.
                let old = std::mem::take(fields);
                for (key, mut field) in old {
                    self.escape_value(&mut field, escaped);
                    fields.insert(self.escape_text(&key, escaped), field);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn escape_text(&self, text: &str, escaped: &mut Escaped) -> String {
        let Some(finder) = &self.finder else { return text.to_owned() };
        let (mut out, mut from) = (String::with_capacity(text.len()), 0);
        for found in finder.find_iter(text) {
            out.push_str(&text[from..found.start()]);
            out.extend([escaped.mark.to_string(), found.pattern().as_usize().to_string(), escaped.mark.to_string()]);
            from = found.end();
            escaped.count += 1;
        }
        out + &text[from..]
    }

    /// Encodes a rendered text with placeholders: the special tokens in it are the template's.
    pub fn encode(&self, text: &Text, rendered: &str, escaped: &Escaped) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        let (mut from, mut before) = (0, None);
        let found = self.finder.iter().flat_map(|finder| finder.find_iter(rendered));
        for found in found {
            let token = &self.tokens[found.pattern().as_usize()];
            self.encode_piece(text, &rendered[from..found.start()], [before, Some(token)], escaped, &mut ids)?;
            ids.push(token.id);
            (from, before) = (found.end(), Some(token));
        }
        self.encode_piece(text, &rendered[from..], [before, None], escaped, &mut ids)?;
        Ok(ids)
    }

    /// Encodes the text between two special tokens.
    fn encode_piece(
        &self,
        text: &Text,
        piece: &str,
        [before, after]: [Option<&SpecialToken>; 2],
        escaped: &Escaped,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let piece = if before.is_some_and(|token| token.takes_right) { piece.trim_start() } else { piece };
        let piece = if after.is_some_and(|token| token.takes_left) { piece.trim_end() } else { piece };
        if piece.is_empty() {
            return Ok(());
        }
        let piece = self.restored(piece, escaped);
        if before.is_some() && self.adds_prefix {
            let guard = text.encode_as_text(GUARD)?;
            let guarded = text.encode_as_text(&format!("{GUARD}{piece}"))?;
            if let Some(own) = guarded.strip_prefix(guard.as_slice()) {
                ids.extend(own);
                return Ok(());
            }
        }
        ids.extend(text.encode_as_text(&piece)?);
        Ok(())
    }

    /// Replaces placeholders by the texts that they stand for.
    fn restored(&self, piece: &str, escaped: &Escaped) -> String {
        let mut parts = piece.split(escaped.mark);
        let mut out = parts.next().unwrap_or_default().to_owned();
        // Between two marks is a number; behind the second one, ordinary text.
        while let (Some(number), Some(rest)) = (parts.next(), parts.next()) {
            let token = number.parse::<usize>().ok().and_then(|index| self.tokens.get(index));
            out.push_str(token.map_or(number, |token| &token.text));
            out.push_str(rest);
        }
        out
    }
}

/// All strings in a value, its keys included.
fn strings(value: &Value) -> Box<dyn Iterator<Item = &str> + '_> {
    match value {
        Value::String(text) => Box::new(std::iter::once(text.as_str())),
        Value::Array(items) => Box::new(items.iter().flat_map(strings)),
        Value::Object(fields) => {
            Box::new(fields.iter().flat_map(|(key, field)| std::iter::once(key.as_str()).chain(strings(field))))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => Box::new(std::iter::empty()),
    }
}
