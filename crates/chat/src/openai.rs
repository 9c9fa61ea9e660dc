//! Tool calls in the messages of OpenAI's API: from a turn to a message, and from messages to what chat templates read.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::parser::ToolParser;
use crate::turn::{SHORT_ID, ToolCall, is_short_id};

/// The reason why a message cannot be shown to a chat template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct MessageError {
    /// JSON pointer into the list of messages, such as `/2/tool_calls/0/function/arguments`.
    pub pointer: String,
    /// The error, and how to fix it.
    pub detail: String,
}

/// The calls as OpenAI's API writes them in `tool_calls`: the arguments are JSON text.
pub fn tool_calls_value(calls: &[ToolCall]) -> Value {
    let one = |call: &ToolCall| {
        let arguments = Value::Object(call.arguments.clone()).to_string();
        json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    };
    calls.iter().map(one).collect()
}

/// Prepares messages in OpenAI's form for chat templates: the arguments of calls become objects, each message of role `tool` gets the
/// name of the tool that its call names, and ids for Mistral's templates have 9 letters and digits.
///
/// # Errors
/// Fails at the first call without a name, and at arguments that are not a JSON object.
pub fn for_template(messages: &[Value], parser: ToolParser) -> Result<Vec<Value>, MessageError> {
    let mut names: HashMap<String, String> = HashMap::new();
    let mut prepared = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let mut message = message.clone();
        if let Some(fields) = message.as_object_mut() {
            match fields.get("role").and_then(Value::as_str) {
                Some("assistant") => prepare_calls(fields, &format!("/{index}/tool_calls"), parser, &mut names)?,
                Some("tool") => prepare_result(fields, parser, &names),
                _ => {}
            }
        }
        prepared.push(message);
    }
    Ok(prepared)
}

fn prepare_calls(
    fields: &mut Map<String, Value>,
    pointer: &str,
    parser: ToolParser,
    names: &mut HashMap<String, String>,
) -> Result<(), MessageError> {
    let wrong = |place: String, detail: &str| Err(MessageError { pointer: place, detail: detail.to_owned() });
    let calls = match fields.get_mut("tool_calls") {
        None => return Ok(()),
        Some(Value::Null) => {
            fields.remove("tool_calls");
            return Ok(());
        }
        Some(Value::Array(calls)) => calls,
        Some(_) => return wrong(pointer.to_owned(), "tool_calls must be a list"),
    };
    // Templates ask only whether the field exists.
    if calls.is_empty() {
        fields.remove("tool_calls");
        return Ok(());
    }
    for (index, call) in calls.iter_mut().enumerate() {
        let place = format!("{pointer}/{index}/function");
        let id = call.get("id").and_then(Value::as_str).map(str::to_owned);
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
            return wrong(place, "a tool call must have a 'function' with 'name' and 'arguments'");
        };
        let Some(name) = function.get("name").and_then(Value::as_str).map(str::to_owned) else {
            return wrong(format!("{place}/name"), "the name of the function is required");
        };
        let arguments = match function.get("arguments") {
            None | Some(Value::Null) => Some(Map::new()),
            Some(Value::String(text)) if text.trim().is_empty() => Some(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text).ok(),
            Some(Value::Object(arguments)) => Some(arguments.clone()),
            Some(_) => None,
        };
        let Some(arguments) = arguments else {
            return wrong(format!("{place}/arguments"), "the arguments must be a JSON object, written as a text");
        };
        function.insert("arguments".to_owned(), Value::Object(arguments));
        if let Some(id) = id {
            call["id"] = json!(id_for(parser, &id));
            names.insert(id, name);
        }
    }
    Ok(())
}

fn prepare_result(fields: &mut Map<String, Value>, parser: ToolParser, names: &HashMap<String, String>) {
    let Some(id) = fields.get("tool_call_id").and_then(Value::as_str).map(str::to_owned) else { return };
    if let Some(name) = names.get(&id) {
        fields.entry("name").or_insert_with(|| json!(name));
    }
    fields.insert("tool_call_id".to_owned(), json!(id_for(parser, &id)));
}

/// The id that a template of this family accepts. The same id always gives the same one.
fn id_for(parser: ToolParser, id: &str) -> String {
    if parser != ToolParser::Mistral || is_short_id(id) {
        return id.to_owned();
    }
    let kept: Vec<char> = id.chars().filter(char::is_ascii_alphanumeric).collect();
    let last: String = kept[kept.len().saturating_sub(SHORT_ID)..].iter().collect();
    format!("{last:0>SHORT_ID$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(id: &str, arguments: Value) -> Vec<Value> {
        let call = json!({"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}});
        vec![
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": id, "content": "3"}),
        ]
    }

    #[test]
    fn templates_see_arguments_as_objects_and_results_with_names() {
        let shown = for_template(&chat("call_0_0", json!("{\"a\": 1}")), ToolParser::Hermes).unwrap();
        assert_eq!(shown[0]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!((&shown[1]["name"], &shown[1]["tool_call_id"]), (&json!("add"), &json!("call_0_0")));
        let shown = for_template(&chat("call_0_0", json!("")), ToolParser::Mistral).unwrap();
        assert_eq!(
            (&shown[0]["tool_calls"][0]["id"], &shown[1]["tool_call_id"]),
            (&json!("000call00"), &json!("000call00"))
        );
        let shown = for_template(&chat("chatcmpl-tool-0123456789", json!({})), ToolParser::Mistral).unwrap();
        assert_eq!(shown[1]["tool_call_id"], "123456789");
        for (wrong, pointer) in [(json!("[1]"), "arguments"), (json!(3), "arguments"), (json!("{"), "arguments")] {
            let error = for_template(&chat("c", wrong), ToolParser::Hermes).unwrap_err();
            assert_eq!(error.pointer, format!("/0/tool_calls/0/function/{pointer}"));
        }
        let none = [
            json!({"role": "assistant", "content": "x", "tool_calls": []}),
            json!({"role": "assistant", "tool_calls": null}),
        ];
        let shown = for_template(&none, ToolParser::Hermes).unwrap();
        assert!(shown.iter().all(|message| message.get("tool_calls").is_none()));
    }

    #[test]
    fn calls_are_written_as_openai_does() {
        let arguments = json!({"b": [1], "a": "x"}).as_object().unwrap().clone();
        let call = ToolCall { id: "call_1".into(), name: "f".into(), arguments };
        let expected = json!([{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"b\":[1],\"a\":\"x\"}"}}]);
        assert_eq!(tool_calls_value(&[call]), expected);
    }
}
