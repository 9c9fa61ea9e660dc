//! Phi-4-mini: a list of JSON objects behind `functools`, or between the marks of its chat template.

use serde_json::Value;

use crate::scan::{RawCall, Scan, json_prefix};
use crate::turn::ContentError;

const FUNCTOOLS: &str = "functools[";
const OPEN: &str = "<|tool_call|>";
const CLOSE: &str = "<|/tool_call|>";

/// Reads the calls. Text before the first mark is content.
pub(crate) fn calls(scan: &mut Scan<'_>) -> Result<Vec<RawCall>, ContentError> {
    let mut calls = Vec::new();
    while let Some(mark) = scan.next_call(&[FUNCTOOLS, OPEN], calls.is_empty()) {
        let rest = scan.rest();
        let (value, rest) = if mark == 0 { bracketed(rest)? } else { json_prefix(rest)? };
        let items = match value {
            Value::Array(items) => items,
            object => vec![object],
        };
        if items.is_empty() {
            return Err(ContentError::malformed(
                "the list of tool calls is empty: write functools[{\"name\": …, \"arguments\": {…}}]",
            ));
        }
        for item in items {
            calls.push(RawCall::of_json(item, &["arguments", "parameters"])?);
        }
        scan.move_to(rest);
        scan.take(CLOSE);
    }
    Ok(calls)
}

/// Reads a list whose opening bracket was part of the mark.
fn bracketed(rest: &str) -> Result<(Value, &str), ContentError> {
    let list = format!("[{rest}");
    let (value, after) = json_prefix(&list)?;
    Ok((value, &rest[rest.len() - after.len()..]))
}
