//! Llama 3.x: the whole answer is a JSON object with `name` and `parameters`, or a list of calls in Python's form.
//!
//! A JSON object within other text is no call: a model that explains JSON would call tools.

use serde_json::Value;

use super::python;
use crate::scan::{RawArguments, RawCall, Scan, json_prefix};
use crate::tools::Tools;
use crate::turn::ContentError;

const PYTHON_TAG: &str = "<|python_tag|>";
const KEYS: &[&str] = &["parameters", "arguments"];
const FORM: &str = "write {\"name\": …, \"parameters\": {…}} and nothing else";

/// Reads the calls. Several objects may follow one another with `;` between them, as vLLM reads them.
pub(crate) fn calls(scan: &mut Scan<'_>, tools: &Tools) -> Result<Vec<RawCall>, ContentError> {
    let text = scan.whole();
    let (body, is_tagged) = match text.strip_prefix(PYTHON_TAG) {
        Some(body) => (body.trim(), true),
        None => (text, false),
    };
    let calls = if body.starts_with('{') {
        objects(body, is_tagged)?
    } else if is_tagged {
        built_in(body)?
    } else if body.starts_with('[') {
        python::call_list(body, tools)?
    } else {
        Vec::new()
    };
    if !calls.is_empty() {
        scan.clear_content();
    }
    Ok(calls)
}

/// Reads objects. Text that only happens to be JSON is no call, unless the model has marked it as one.
fn objects(body: &str, is_tagged: bool) -> Result<Vec<RawCall>, ContentError> {
    let is_meant = is_tagged || begins_as_call(body);
    let (mut calls, mut rest) = (Vec::new(), body);
    loop {
        match json_prefix(rest) {
            Ok((value, after)) if is_call(&value) => {
                calls.push(RawCall::of_json(value, KEYS)?);
                rest = after.trim_start();
            }
            Ok(_) | Err(_) if !is_meant => return Ok(Vec::new()),
            Ok(_) => {
                return Err(ContentError::malformed(format!("the tool call has no name or no parameters: {FORM}")));
            }
            Err(error) => return Err(error),
        }
        rest = match rest.strip_prefix(';') {
            _ if rest.is_empty() => return Ok(calls),
            Some(after) => after.trim_start(),
            None if is_meant => {
                return Err(ContentError::malformed(format!("the tool call has text behind it: {FORM}")));
            }
            None => return Ok(Vec::new()),
        };
        if rest.is_empty() {
            return Ok(calls);
        }
    }
}

fn is_call(value: &Value) -> bool {
    let has_arguments = KEYS.iter().any(|key| value.get(key).is_some());
    value.get("name").is_some_and(Value::is_string) && has_arguments
}

/// Returns whether a text begins as a call does: with the key `name`, or with the type `function`.
fn begins_as_call(body: &str) -> bool {
    let compact: String = body.chars().filter(|c| !c.is_whitespace()).take(24).collect();
    compact.starts_with("{\"name\":") || compact.starts_with("{\"type\":\"function\"")
}

/// Reads `NAME.call(key="value", …)`, the form of built-in tools.
fn built_in(body: &str) -> Result<Vec<RawCall>, ContentError> {
    let wrong = || ContentError::malformed(format!("code behind {PYTHON_TAG} cannot be run: {FORM}"));
    let (name, arguments) = body.split_once(".call(").ok_or_else(wrong)?;
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err(wrong());
    }
    let arguments = python::arguments(arguments).map_err(|_| wrong())?;
    Ok(vec![RawCall { name: name.to_owned(), arguments: RawArguments::Values(arguments), id: None }])
}

/// Reads a list of JSON calls or one JSON call that is a whole text; None if the text is something else.
pub(super) fn json_calls(body: &str) -> Result<Option<Vec<RawCall>>, ContentError> {
    let value: Value = match serde_json::from_str(body) {
        Ok(value) => value,
        Err(_) if !begins_as_call(body) => return Ok(None),
        Err(error) => return Err(ContentError::malformed(format!("the tool call is not valid JSON: {error}"))),
    };
    let items = match value {
        Value::Array(items) => items,
        item => vec![item],
    };
    if items.is_empty() || !items.iter().all(is_call) {
        return Ok(None);
    }
    items.into_iter().map(|item| RawCall::of_json(item, KEYS)).collect::<Result<_, _>>().map(Some)
}
