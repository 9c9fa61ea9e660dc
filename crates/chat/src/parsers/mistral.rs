//! Mistral: a list of JSON objects up to tokenizer version 7, names with JSON objects from version 11 on.

use serde_json::Value;

use crate::scan::{RawArguments, RawCall, Scan, json_prefix};
use crate::turn::{ContentError, ContentErrorKind, shortened};

const MARK: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";
const FORM: &str = "write [TOOL_CALLS][{\"name\": …, \"arguments\": {…}}] or [TOOL_CALLS]NAME{…}";

/// Reads the calls. Text before the mark is content.
pub(crate) fn calls(scan: &mut Scan<'_>) -> Result<Vec<RawCall>, ContentError> {
    let mut calls = Vec::new();
    while scan.next_call(&[MARK], calls.is_empty()).is_some() {
        let rest = scan.rest().trim_start();
        let rest = if rest.starts_with(['[', '{']) { list(rest, &mut calls)? } else { named(rest, &mut calls)? };
        scan.move_to(rest);
        if !scan.is_at_end() && !scan.rest().trim_start().starts_with(MARK) {
            return Err(ContentError::malformed(format!("the answer has text behind its tool calls: {FORM}")));
        }
    }
    Ok(calls)
}

/// Reads `[{"name": …, "arguments": {…}, "id": …}, …]`, or one such object.
fn list<'t>(text: &'t str, calls: &mut Vec<RawCall>) -> Result<&'t str, ContentError> {
    let (value, rest) = json_prefix(text)?;
    let items = match value {
        Value::Array(items) => items,
        object => vec![object],
    };
    if items.is_empty() {
        return Err(ContentError::malformed(format!("the list of tool calls is empty: {FORM}")));
    }
    for item in items {
        calls.push(RawCall::of_json(item, &["arguments"])?);
    }
    Ok(rest)
}

/// Reads `NAME{…}`, between which `[CALL_ID]…` and `[ARGS]` may stand.
fn named<'t>(text: &'t str, calls: &mut Vec<RawCall>) -> Result<&'t str, ContentError> {
    let (head, _) = text
        .split_once('{')
        .ok_or_else(|| ContentError::malformed(format!("the tool call has no arguments: {FORM}")))?;
    let body = &text[head.len()..];
    let head = head.trim().strip_suffix(ARGS).unwrap_or(head.trim());
    let (name, id) = match head.split_once(CALL_ID) {
        Some((name, id)) => (name.trim(), Some(id.trim().to_owned())),
        None => (head.trim(), None),
    };
    if name.is_empty() || name.contains(char::is_whitespace) {
        let message = format!("'{}' is no name of a tool: {FORM}", shortened(name));
        return Err(ContentError::malformed(message));
    }
    match json_prefix(body) {
        Ok((Value::Object(arguments), rest)) => {
            calls.push(RawCall { name: name.to_owned(), arguments: RawArguments::Values(arguments), id });
            Ok(rest)
        }
        Ok(_) => Err(ContentError::malformed(format!("the arguments must be a JSON object: {FORM}"))),
        Err(error) => Err(ContentError::new(ContentErrorKind::Malformed, Some(name), error.message)),
    }
}
