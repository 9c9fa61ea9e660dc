//! Calls in Python's form, `[f(a=1, b="x"), g()]`, with literals as arguments.

use serde_json::{Map, Number, Value};

use crate::scan::{RawArguments, RawCall};
use crate::tools::Tools;
use crate::turn::{ContentError, ContentErrorKind};

/// Maximum nesting depth of a literal.
const MAX_DEPTH: usize = 64;

/// Reads a text that is a list of calls. Other texts in brackets are no calls, unless they begin with the call of a known tool: such a
/// text is an error.
pub(super) fn call_list(text: &str, tools: &Tools) -> Result<Vec<RawCall>, ContentError> {
    let inner = text.strip_prefix('[').unwrap_or(text);
    let mut reader = Reader { rest: inner };
    match reader.calls(']') {
        Ok(calls) if reader.rest.trim().is_empty() => Ok(calls),
        result => {
            let name = inner.trim_start().split('(').next().unwrap_or_default().trim_end();
            if tools.get(name).is_none() || !inner.contains('(') {
                return Ok(Vec::new());
            }
            let why = result.err().unwrap_or("there is text behind the list");
            let message = format!("the tool call cannot be read, {why}: write [NAME(key=value, …)] and nothing else");
            Err(ContentError::new(ContentErrorKind::Malformed, Some(name), message))
        }
    }
}

/// Reads a text that is one call.
pub(super) fn single_call(text: &str) -> Result<RawCall, &'static str> {
    let mut reader = Reader { rest: text };
    let call = reader.call()?;
    if reader.rest.trim().is_empty() { Ok(call) } else { Err("there is text behind the call") }
}

/// Reads the arguments of a call that ends the text, behind its opening parenthesis.
pub(super) fn arguments(text: &str) -> Result<Map<String, Value>, &'static str> {
    let mut reader = Reader { rest: text };
    let arguments = reader.arguments()?;
    if reader.rest.trim().is_empty() { Ok(arguments) } else { Err("there is text behind the call") }
}

struct Reader<'t> {
    rest: &'t str,
}

impl Reader<'_> {
    fn take(&mut self, mark: char) -> bool {
        let rest = self.rest.trim_start().strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Reads calls with commas between them, up to the closing mark.
    fn calls(&mut self, close: char) -> Result<Vec<RawCall>, &'static str> {
        let mut calls = Vec::new();
        loop {
            calls.push(self.call()?);
            let goes_on = self.take(',');
            if self.take(close) {
                return Ok(calls);
            }
            if !goes_on {
                return Err("a comma or a bracket is missing");
            }
        }
    }

    fn call(&mut self) -> Result<RawCall, &'static str> {
        let name = self.name().ok_or("a name is missing")?;
        if !self.take('(') {
            return Err("a parenthesis is missing");
        }
        Ok(RawCall { name, arguments: RawArguments::Values(self.arguments()?), id: None })
    }

    fn arguments(&mut self) -> Result<Map<String, Value>, &'static str> {
        let mut arguments = Map::new();
        loop {
            if self.take(')') {
                return Ok(arguments);
            }
            let key = self.name().ok_or("arguments need names")?;
            if !self.take('=') {
                return Err("arguments need names");
            }
            let value = self.value(MAX_DEPTH)?;
            if arguments.insert(key, value).is_some() {
                return Err("an argument occurs twice");
            }
            if !self.take(',') && !self.rest.trim_start().starts_with(')') {
                return Err("a comma or a parenthesis is missing");
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let rest = self.rest.trim_start();
        let is_character = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        let end = rest.find(|c| !is_character(c)).unwrap_or(rest.len());
        let name = rest.get(..end).filter(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_'))?;
        self.rest = &rest[end..];
        Some(name.to_owned())
    }

    fn value(&mut self, left: usize) -> Result<Value, &'static str> {
        if left == 0 {
            return Err("a value is nested too deeply");
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next() {
            Some('[') => self.items(']', left),
            Some('(') => self.items(')', left),
            Some('{') => self.entries(left),
            Some('"' | '\'') => self.string().map(Value::String),
            Some(_) => self.word(),
            None => Err("a value is missing"),
        }
    }

    fn items(&mut self, close: char, left: usize) -> Result<Value, &'static str> {
        self.rest = &self.rest[1..];
        let mut items = Vec::new();
        loop {
            if self.take(close) {
                return Ok(Value::Array(items));
            }
            items.push(self.value(left - 1)?);
            if !self.take(',') && !self.rest.trim_start().starts_with(close) {
                return Err("a comma or a bracket is missing");
            }
        }
    }

    fn entries(&mut self, left: usize) -> Result<Value, &'static str> {
        self.rest = &self.rest[1..];
        let mut entries = Map::new();
        loop {
            if self.take('}') {
                return Ok(Value::Object(entries));
            }
            self.rest = self.rest.trim_start();
            let key = self.string()?;
            if !self.take(':') {
                return Err("a colon is missing");
            }
            entries.insert(key, self.value(left - 1)?);
            if !self.take(',') && !self.rest.trim_start().starts_with('}') {
                return Err("a comma or a brace is missing");
            }
        }
    }

    /// Reads a quoted text with the escapes that Python and JSON share.
    fn string(&mut self) -> Result<String, &'static str> {
        let mut characters = self.rest.char_indices();
        let quote = match characters.next() {
            Some((_, quote @ ('"' | '\''))) => quote,
            _ => return Err("a quote is missing"),
        };
        let mut text = String::new();
        while let Some((at, character)) = characters.next() {
            match character {
                '\\' => match characters.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
                    Some((_, 'u')) => {
                        let digits: String = characters.by_ref().take(4).map(|(_, digit)| digit).collect();
                        let code = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                        text.push(code.ok_or("an escape is not valid")?);
                    }
                    Some((_, other @ ('\\' | '"' | '\'' | '/'))) => text.push(other),
                    // Python keeps the backslash of other pairs.
                    Some((_, other)) => text.extend(['\\', other]),
                    None => break,
                },
                character if character == quote => {
                    self.rest = &self.rest[at + 1..];
                    return Ok(text);
                }
                character => text.push(character),
            }
        }
        Err("a quote is missing")
    }

    fn word(&mut self) -> Result<Value, &'static str> {
        let is_character = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '+');
        let end = self.rest.find(|c| !is_character(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "True" | "true" => Ok(Value::Bool(true)),
            "False" | "false" => Ok(Value::Bool(false)),
            "None" | "null" => Ok(Value::Null),
            _ => {
                let number = word.strip_prefix('+').unwrap_or(word);
                let whole = number.parse::<i64>().ok().map(Number::from);
                // A float's words, such as `nan` and `inf`, are no literals.
                let is_number = number.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '.'))
                    && number.contains(|c: char| c.is_ascii_digit());
                let float = || number.parse::<f64>().ok().filter(|_| is_number).and_then(Number::from_f64);
                whole.or_else(float).map(Value::Number).ok_or("a value is not a literal")
            }
        }
    }
}
