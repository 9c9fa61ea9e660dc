//! The position in a turn's text while it is read, and calls before they are checked.

use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};

use crate::schema;
use crate::tools::Tool;
use crate::turn::{ContentError, ContentErrorKind, Outcome, Turn, shortened};

/// The marks around reasoning: of most families, of Mistral's and of Gemma 4.
const REASONING: [(&str, &str); 3] =
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>")];

/// A call as the model wrote it.
#[derive(Debug)]
pub(crate) struct RawCall {
    pub name: String,
    pub arguments: RawArguments,
    pub id: Option<String>,
}

/// The arguments of a call as the model wrote them.
#[derive(Debug)]
pub(crate) enum RawArguments {
    Values(Map<String, Value>),
    /// Plain texts, whose types the tool's schema tells.
    Texts(Vec<(String, String)>),
}

impl RawArguments {
    pub fn typed(self, tool: &Tool) -> Map<String, Value> {
        match self {
            RawArguments::Values(values) => values,
            RawArguments::Texts(texts) => {
                let typed = |(name, text): (String, String)| {
                    let value = schema::typed(tool.parameter(&name), &text);
                    (name, value)
                };
                texts.into_iter().map(typed).collect()
            }
        }
    }
}

impl RawCall {
    /// Reads `{"name": …, KEY: {…}}`, where KEY is one of `keys`. Arguments may also be a text that contains the object; without
    /// any, there are none.
    pub fn of_json(value: Value, keys: &[&str]) -> Result<RawCall, ContentError> {
        let form = format!("write {{\"name\": …, \"{}\": {{…}}}}", keys.first().copied().unwrap_or("arguments"));
        let Value::Object(mut fields) = value else {
            return Err(ContentError::malformed(format!("a tool call must be a JSON object: {form}")));
        };
        let Some(Value::String(name)) = fields.remove("name") else {
            return Err(ContentError::malformed(format!("the tool call has no name: {form}")));
        };
        let arguments = match keys.iter().find_map(|key| fields.remove(*key)) {
            None | Some(Value::Null) => Some(Map::new()),
            Some(Value::Object(arguments)) => Some(arguments),
            Some(Value::String(text)) => serde_json::from_str(&text).ok(),
            Some(_) => None,
        };
        let Some(arguments) = arguments else {
            let message = format!("the arguments of '{}' must be a JSON object: {form}", shortened(&name));
            return Err(ContentError::new(ContentErrorKind::Malformed, Some(&name), message));
        };
        let id = fields.remove("id").and_then(|id| id.as_str().map(str::to_owned));
        Ok(RawCall { name, arguments: RawArguments::Values(arguments), id })
    }
}

/// Reads the JSON value at the beginning of a text, and returns it with the rest of the text.
pub(crate) fn json_prefix(text: &str) -> Result<(Value, &str), ContentError> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        Some(Ok(value)) => Ok((value, text.get(values.byte_offset()..).unwrap_or_default())),
        Some(Err(error)) => Err(ContentError::malformed(format!("the tool call is not valid JSON: {error}"))),
        None => Err(ContentError::malformed("the tool call is empty: write a JSON object")),
    }
}

/// A position in the text of a turn, and what was read before it.
#[derive(Debug)]
pub(crate) struct Scan<'t> {
    rest: &'t str,
    content: String,
    reasoning: Option<String>,
}

impl<'t> Scan<'t> {
    pub fn new(text: &'t str) -> Scan<'t> {
        Scan { rest: text, content: String::new(), reasoning: None }
    }

    pub fn into_turn(self, outcome: Outcome) -> Turn {
        Turn { content: self.content.trim().to_owned(), reasoning_content: self.reasoning, outcome }
    }

    fn add_reasoning(&mut self, text: &str) {
        let text = text.trim();
        let reasoning = self.reasoning.get_or_insert_default();
        if !reasoning.is_empty() && !text.is_empty() {
            reasoning.push('\n');
        }
        reasoning.push_str(text);
    }

    /// Skips the reasoning that the generation prompt has opened.
    pub fn skip_opened_reasoning(&mut self) {
        let ends = REASONING.iter().filter_map(|(_, close)| self.rest.find(close).map(|at| (at, close.len())));
        let (at, length) = ends.min().unwrap_or((self.rest.len(), 0));
        self.add_reasoning(&self.rest[..at]);
        self.rest = &self.rest[at + length..];
    }

    /// Moves behind the next of the marks that is outside of reasoning, and returns its index. The text before it becomes content.
    pub fn next_mark(&mut self, marks: &[&str]) -> Option<usize> {
        let opening = REASONING.iter().map(|(open, _)| *open);
        // Cannot fail: the patterns are few and short.
        let finder = AhoCorasick::new(marks.iter().copied().chain(opening)).ok()?;
        while let Some(found) = finder.find(self.rest) {
            self.content.push_str(&self.rest[..found.start()]);
            self.rest = &self.rest[found.end()..];
            match REASONING.get(found.pattern().as_usize().wrapping_sub(marks.len())) {
                Some((_, close)) => self.skip_reasoning(close),
                None => return Some(found.pattern().as_usize()),
            }
        }
        self.content.push_str(self.rest);
        self.rest = "";
        None
    }

    /// Skips reasoning up to behind its closing mark, or to the end of the text.
    fn skip_reasoning(&mut self, close: &str) {
        let (thought, rest) = self.rest.split_once(close).unwrap_or((self.rest, ""));
        self.add_reasoning(thought);
        self.rest = rest;
    }

    /// Like [`Scan::next_mark`]; text between and behind calls is dropped.
    pub fn next_call(&mut self, marks: &[&str], is_first: bool) -> Option<usize> {
        let before = self.content.len();
        let found = self.next_mark(marks);
        if !is_first {
            self.content.truncate(before);
        }
        found
    }

    /// Takes the text up to the end as content, without the reasoning at its beginning, and returns it.
    pub fn whole(&mut self) -> &'t str {
        while let Some((rest, close)) =
            REASONING.iter().find_map(|(open, close)| Some((self.rest.trim_start().strip_prefix(open)?, close)))
        {
            self.rest = rest;
            self.skip_reasoning(close);
        }
        let text = std::mem::take(&mut self.rest);
        self.content.push_str(text);
        text.trim()
    }

    /// The text from the position on.
    pub fn rest(&self) -> &'t str {
        self.rest
    }

    /// Moves to a later part of the text.
    pub fn move_to(&mut self, rest: &'t str) {
        self.rest = rest;
    }

    /// Removes what was read as content, because it is a call.
    pub fn clear_content(&mut self) {
        self.content.clear();
    }

    /// Moves behind a mark that follows directly, but for white space, and returns whether there was one.
    pub fn take(&mut self, mark: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Returns whether only white space is left.
    pub fn is_at_end(&self) -> bool {
        self.rest.trim().is_empty()
    }
}
