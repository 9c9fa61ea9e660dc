//! The tokens and the text of an answer that is being generated: incomplete characters and the possible beginning of a stop
//! string are kept back.

use super::Selected;
use crate::error::Result;
use crate::text::Text;
use rlood_types::serving::{ServedFinish, ServedPiece, ServedRequest, TokenLogprobs};

/// An answer that is being generated.
#[derive(Debug)]
pub struct Answer {
    index: u32,
    ids: Vec<u32>,
    /// The text so far, in whole characters; bytes before `sent` were sent.
    text: String,
    sent: usize,
    /// Index of the first token that is decoded with the next ones, because the text of a token may depend on those before it.
    context: usize,
    /// Number of tokens whose text is in `text`.
    decoded: usize,
    /// Number of tokens that were sent.
    sent_ids: usize,
    logprobs: Vec<TokenLogprobs>,
    has_ended: bool,
}

impl Answer {
    /// Creates an answer without tokens.
    pub fn new(request: &ServedRequest, index: u32) -> Answer {
        let room = (request.max_tokens as usize).min(1024);
        Answer {
            index,
            ids: Vec::with_capacity(room),
            text: String::new(),
            sent: 0,
            context: 0,
            decoded: 0,
            sent_ids: 0,
            logprobs: Vec::new(),
            has_ended: false,
        }
    }

    /// The tokens so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Number of tokens so far.
    pub fn num_tokens(&self) -> usize {
        self.ids.len()
    }

    /// The last token of the answer.
    pub fn last_token(&self) -> Option<u32> {
        self.ids.last().copied()
    }

    /// Whether the answer has its last token.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Appends a token. Returns the next piece if there is something to send: at the end, or if the request wants a stream.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot decode a token.
    pub fn push(
        &mut self,
        text: &Text,
        id: u64,
        request: &ServedRequest,
        selected: Selected,
    ) -> Result<Option<ServedPiece>> {
        self.ids.push(selected.token);
        self.logprobs.extend(selected.logprobs);
        let scanned = self.text.len();
        self.decode(text, request.shows_special)?;
        let mut finish = None;
        if !request.ignores_eos && text.eos_token_ids().contains(&selected.token) {
            finish = Some(ServedFinish::Eos(selected.token));
        } else if self.ids.len() >= request.max_tokens as usize {
            finish = Some(ServedFinish::Length);
        }
        if finish.is_some() {
            self.decode_rest(text, request.shows_special)?;
        }
        if let Some((place, stop)) = find_stop(&self.text, scanned, &request.stop) {
            self.text.truncate(if request.keeps_stop { place + stop.len() } else { place });
            finish = Some(ServedFinish::Stop(stop.to_owned()));
        }
        self.has_ended = finish.is_some();
        if !self.has_ended && !request.stream {
            return Ok(None);
        }
        let end = match self.has_ended {
            true => self.text.len(),
            false => self.text.len() - kept_back(&self.text[self.sent..], &request.stop),
        };
        if !self.has_ended && end <= self.sent && request.logprobs.is_none() {
            return Ok(None);
        }
        let piece = ServedPiece {
            id,
            index: self.index,
            prompt: None,
            text: self.text[self.sent.min(end)..end].to_owned(),
            ids: self.ids[self.sent_ids..].to_vec(),
            logprobs: std::mem::take(&mut self.logprobs),
            finish,
        };
        (self.sent, self.sent_ids) = (end.max(self.sent), self.ids.len());
        Ok(Some(piece))
    }

    /// Appends the text of new tokens, unless they end within a character.
    fn decode(&mut self, text: &Text, shows_special: bool) -> Result<()> {
        let before = text.decode(&self.ids[self.context..self.decoded], !shows_special)?;
        let now = text.decode(&self.ids[self.context..], !shows_special)?;
        if now.ends_with('\u{fffd}') {
            return Ok(());
        }
        if let Some(new) = now.strip_prefix(&before) {
            self.text.push_str(new);
            (self.context, self.decoded) = (self.decoded, self.ids.len());
        }
        Ok(())
    }

    /// Appends the text of the last tokens, even if they end within a character.
    fn decode_rest(&mut self, text: &Text, shows_special: bool) -> Result<()> {
        if self.decoded == self.ids.len() {
            return Ok(());
        }
        let before = text.decode(&self.ids[self.context..self.decoded], !shows_special)?;
        let now = text.decode(&self.ids[self.context..], !shows_special)?;
        self.text.push_str(now.get(before.len()..).unwrap_or_default());
        self.decoded = self.ids.len();
        Ok(())
    }
}

/// Finds the first stop string that ends after byte `scanned` of the text; earlier ones were looked for already.
fn find_stop<'s>(text: &str, scanned: usize, stop: &'s [String]) -> Option<(usize, &'s str)> {
    let found = stop.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| {
        let from = text.floor_char_boundary(scanned.saturating_sub(stop.len() - 1));
        text[from..].find(stop.as_str()).map(|place| (from + place, stop.as_str()))
    });
    found.min_by_key(|(place, stop)| (*place, stop.len()))
}

/// Number of bytes at the end of a text that may be the beginning of a stop string.
fn kept_back(text: &str, stop: &[String]) -> usize {
    let longest = stop.iter().map(|stop| stop.len().saturating_sub(1)).max().unwrap_or(0).min(text.len());
    let may_begin = |count: &usize| {
        let place = text.len() - count;
        text.is_char_boundary(place) && stop.iter().any(|stop| stop.len() > *count && stop.starts_with(&text[place..]))
    };
    (1..=longest).rev().find(may_begin).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_string_is_found_across_pieces_and_the_first_one_wins() {
        let stop: Vec<String> = ["END", "N"].map(str::to_owned).to_vec();
        assert_eq!(find_stop("a END", 4, &stop), Some((2, "END")));
        assert_eq!(find_stop("a END", 5, &stop), None);
        assert_eq!(find_stop("é é", 0, &["é".to_owned()]), Some((0, "é")));
        assert_eq!(find_stop("abc", 0, &[String::new()]), None);
    }

    #[test]
    fn the_beginning_of_a_stop_string_is_kept_back() {
        let stop: Vec<String> = ["###", "\n\nUser"].map(str::to_owned).to_vec();
        for (text, kept) in [("a", 0), ("a#", 1), ("a##", 2), ("x\n", 1), ("x\n\nUse", 5), ("x\n\nUsex", 0), ("é", 0)]
        {
            assert_eq!(kept_back(text, &stop), kept, "{text:?}");
        }
        assert_eq!(kept_back("a#", &[]), 0);
    }
}
