//! Qwen3-Coder, Qwen3.5 and Nemotron 3: tags with the arguments as plain text.

use crate::scan::{RawArguments, RawCall, Scan};
use crate::turn::{ContentError, ContentErrorKind, shortened};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_OF_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_OF_PARAMETER: &str = "</parameter>";
const FORM: &str = "write <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, with a tag for each argument";

/// Reads the calls. As in vLLM, the outer mark may be missing; the last call may be without it at its end.
pub(crate) fn calls(scan: &mut Scan<'_>) -> Result<Vec<RawCall>, ContentError> {
    let mut calls = Vec::new();
    while let Some(mark) = scan.next_call(&[OPEN, FUNCTION], calls.is_empty()) {
        if mark == 0 && !scan.take(FUNCTION) {
            return Err(ContentError::malformed(format!("the tool call has no function: {FORM}")));
        }
        calls.push(function(scan)?);
        if !scan.take(CLOSE) && mark == 0 && !scan.is_at_end() {
            return Err(ContentError::malformed(format!("the tool call has text behind {END_OF_FUNCTION}: {FORM}")));
        }
    }
    Ok(calls)
}

/// Reads a function from its name on.
fn function(scan: &mut Scan<'_>) -> Result<RawCall, ContentError> {
    let name = tag_name(scan)?;
    let mut arguments: Vec<(String, String)> = Vec::new();
    let wrong = |detail: String| {
        let message = format!("the call of '{}' {detail}: {FORM}", shortened(&name));
        ContentError::new(ContentErrorKind::Malformed, Some(&name), message)
    };
    loop {
        if scan.take(END_OF_FUNCTION) {
            return Ok(RawCall { name, arguments: RawArguments::Texts(arguments), id: None });
        }
        if !scan.take(PARAMETER) {
            return Err(wrong(format!("has text where <parameter=…> or {END_OF_FUNCTION} should be")));
        }
        let key = tag_name(scan)?;
        let Some((value, rest)) = scan.rest().split_once(END_OF_PARAMETER) else {
            return Err(wrong(format!("does not close the argument '{}'", shortened(&key))));
        };
        scan.move_to(rest);
        if arguments.iter().any(|(other, _)| *other == key) {
            return Err(wrong(format!("has the argument '{}' twice", shortened(&key))));
        }
        // The template puts each value on lines of its own.
        let value = value.strip_prefix('\n').unwrap_or(value);
        arguments.push((key, value.strip_suffix('\n').unwrap_or(value).to_owned()));
    }
}

/// Reads the rest of a tag: a name on one line, and `>`.
fn tag_name(scan: &mut Scan<'_>) -> Result<String, ContentError> {
    match scan.rest().split_once('>') {
        Some((name, rest)) if !name.trim().is_empty() && !name.contains(['\n', '<']) => {
            scan.move_to(rest);
            Ok(name.trim().to_owned())
        }
        _ => Err(ContentError::malformed(format!("the tool call has a tag without a name: {FORM}"))),
    }
}
