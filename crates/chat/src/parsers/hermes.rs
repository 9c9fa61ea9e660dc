//! Qwen2.5, Qwen3 and Hermes: `<tool_call>` around a JSON object, several allowed.

use crate::scan::{RawCall, Scan, json_prefix};
use crate::turn::ContentError;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Reads the calls. The last one may be without its closing mark, as vLLM takes it too. Text behind the first call is dropped.
pub(crate) fn calls(scan: &mut Scan<'_>) -> Result<Vec<RawCall>, ContentError> {
    let mut calls = Vec::new();
    while scan.next_call(&[OPEN], calls.is_empty()).is_some() {
        let (value, rest) = json_prefix(scan.rest())?;
        calls.push(RawCall::of_json(value, &["arguments"])?);
        scan.move_to(rest);
        if !scan.take(CLOSE) && !scan.is_at_end() {
            let message = format!("the tool call has text behind its JSON object: write one object, then {CLOSE}");
            return Err(ContentError::malformed(message));
        }
    }
    Ok(calls)
}
