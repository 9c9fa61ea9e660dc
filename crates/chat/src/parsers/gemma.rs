//! Gemma: up to version 3 the form is what the prompt asks for, by Google's guide a list of calls in Python's form or JSON; from version
//! 4 on the calls have marks, and strings have quotes of their own.

use serde_json::{Map, Number, Value};

use super::{llama3, python};
use crate::scan::{RawArguments, RawCall, Scan};
use crate::tools::Tools;
use crate::turn::{ContentError, ContentErrorKind, shortened};

const OPEN: &str = "<|tool_call>";
const CLOSE: &str = "<tool_call|>";
const CALL: &str = "call:";
const QUOTE: &str = "<|\"|>";
const FORM: &str = "write <|tool_call>call:NAME{key:value}<tool_call|>";
/// Maximum nesting depth of a value.
const MAX_DEPTH: usize = 64;

/// Reads the calls: with marks anywhere, without them only as the whole answer, which may stand between lines of backticks.
pub(crate) fn calls(scan: &mut Scan<'_>, tools: &Tools) -> Result<Vec<RawCall>, ContentError> {
    if !scan.rest().contains(OPEN) {
        let text = scan.whole();
        let calls = whole(text, tools)?;
        if !calls.is_empty() {
            scan.clear_content();
        }
        return Ok(calls);
    }
    let mut calls = Vec::new();
    while scan.next_call(&[OPEN], calls.is_empty()).is_some() {
        calls.push(marked(scan)?);
        if !scan.take(CLOSE) && !scan.is_at_end() {
            return Err(ContentError::malformed(format!("the tool call has text behind its arguments: {FORM}")));
        }
    }
    Ok(calls)
}

/// Reads an answer that is nothing but calls.
fn whole(text: &str, tools: &Tools) -> Result<Vec<RawCall>, ContentError> {
    let (body, is_code) = unfenced(text);
    if is_code && !body.starts_with(['[', '{']) {
        return python::single_call(body).map(|call| vec![call]).map_err(|why| {
            ContentError::malformed(format!("the tool call cannot be read, {why}: write [NAME(key=value, …)]"))
        });
    }
    if let Some(calls) = llama3::json_calls(body)? {
        return Ok(calls);
    }
    if body.starts_with('[') { python::call_list(body, tools) } else { Ok(Vec::new()) }
}

/// Removes the lines of backticks around a text, and returns whether they mark it as code that calls tools.
fn unfenced(text: &str) -> (&str, bool) {
    let inner = text.strip_prefix("```").and_then(|text| text.strip_suffix("```"));
    match inner.and_then(|inner| inner.split_once('\n')) {
        Some((language @ ("tool_code" | "json" | "python" | ""), body)) if !body.contains("```") => {
            (body.trim(), language == "tool_code")
        }
        _ => (text, false),
    }
}

/// Reads a call from its word `call:` on, `call:NAME{…}`.
fn marked(scan: &mut Scan<'_>) -> Result<RawCall, ContentError> {
    let malformed = |why: &str| ContentError::malformed(format!("the tool call cannot be read, {why}: {FORM}"));
    let head = scan.rest().trim_start().strip_prefix(CALL).ok_or_else(|| malformed("'call:' is missing"))?;
    let (name, _) = head.split_once('{').ok_or_else(|| malformed("the arguments are missing"))?;
    let mut reader = Reader { rest: &head[name.len()..] };
    let name = name.trim();
    match reader.value(MAX_DEPTH) {
        Ok(Value::Object(arguments)) => {
            scan.move_to(reader.rest);
            Ok(RawCall { name: name.to_owned(), arguments: RawArguments::Values(arguments), id: None })
        }
        Ok(_) => Err(malformed("the arguments are missing")),
        Err(why) => {
            let message = format!("the call of '{}' cannot be read, {why}: {FORM}", shortened(name));
            Err(ContentError::new(ContentErrorKind::Malformed, Some(name), message))
        }
    }
}

struct Reader<'t> {
    rest: &'t str,
}

impl Reader<'_> {
    fn take(&mut self, mark: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn value(&mut self, left: usize) -> Result<Value, &'static str> {
        if left == 0 {
            return Err("a value is nested too deeply");
        }
        if self.take("{") {
            return self.entries(left).map(Value::Object);
        }
        if self.take("[") {
            return self.items(left).map(Value::Array);
        }
        match self.string()? {
            Some(text) => Ok(Value::String(text)),
            None => self.word(),
        }
    }

    fn entries(&mut self, left: usize) -> Result<Map<String, Value>, &'static str> {
        let mut entries = Map::new();
        loop {
            if self.take("}") {
                return Ok(entries);
            }
            let key = match self.string()? {
                Some(key) => key,
                None => self.bare(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '$')).to_owned(),
            };
            if key.is_empty() || !self.take(":") {
                return Err("a key is missing");
            }
            if entries.insert(key, self.value(left - 1)?).is_some() {
                return Err("a key occurs twice");
            }
            if !self.take(",") && !self.rest.trim_start().starts_with('}') {
                return Err("a comma or a brace is missing");
            }
        }
    }

    fn items(&mut self, left: usize) -> Result<Vec<Value>, &'static str> {
        let mut items = Vec::new();
        loop {
            if self.take("]") {
                return Ok(items);
            }
            items.push(self.value(left - 1)?);
            if !self.take(",") && !self.rest.trim_start().starts_with(']') {
                return Err("a comma or a bracket is missing");
            }
        }
    }

    /// Reads a string between Gemma's quotes or in JSON; None if something else follows.
    fn string(&mut self) -> Result<Option<String>, &'static str> {
        if self.take(QUOTE) {
            let (text, rest) = self.rest.split_once(QUOTE).ok_or("a quote is missing")?;
            self.rest = rest;
            return Ok(Some(text.to_owned()));
        }
        if !self.rest.trim_start().starts_with('"') {
            return Ok(None);
        }
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter::<String>();
        let text = values.next().and_then(Result::ok).ok_or("a string is not valid")?;
        self.rest = self.rest.get(values.byte_offset()..).unwrap_or_default();
        Ok(Some(text))
    }

    fn bare(&mut self, is_allowed: impl Fn(char) -> bool) -> &str {
        let rest = self.rest.trim_start();
        let end = rest.find(|c| !is_allowed(c)).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        self.rest = rest;
        word
    }

    fn word(&mut self) -> Result<Value, &'static str> {
        match self.bare(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+')) {
            "true" => Ok(Value::Bool(true)),
            "false" => Ok(Value::Bool(false)),
            "null" => Ok(Value::Null),
            word => serde_json::from_str::<Number>(word).map(Value::Number).map_err(|_| "a value is not a literal"),
        }
    }
}
