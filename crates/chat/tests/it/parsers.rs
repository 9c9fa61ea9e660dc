//! Texts of turns and what they mean: `tests/fixtures/chat/parsers`, a file for each parser.

use rlood_chat::{Outcome, ParseContext, ToolParser, Tools};
use serde_json::{Value, json};

use crate::support;

pub(crate) const FILES: [&str; 7] = ["hermes", "qwen3_coder", "llama3", "mistral", "gemma", "phi", "none"];

fn tool(name: &str, properties: Value, required: &[&str]) -> Value {
    let parameters = json!({
        "type": "object", "properties": properties, "required": required, "additionalProperties": false,
    });
    json!({"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}})
}

/// The tools of all cases.
pub(crate) fn tools() -> Tools {
    let whole = json!({"type": "integer"});
    let mixed = json!({
        "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "f": {"type": "boolean"},
        "l": {"type": "array"}, "o": {"type": "object"}, "u": {"type": ["string", "null"]},
    });
    let tools = [
        tool("add", json!({"a": whole, "b": whole}), &["a", "b"]),
        tool("note", json!({"text": {"type": "string"}}), &["text"]),
        tool("mixed", mixed, &[]),
        tool("now", json!({}), &[]),
    ];
    Tools::new(&tools).unwrap()
}

#[test]
fn each_text_means_what_its_case_says() {
    let tools = tools();
    let mut count = 0;
    for file in FILES {
        let parser = ToolParser::named(file).unwrap();
        assert_eq!(parser.name(), file);
        for case in support::json(&format!("parsers/{file}.json")).as_array().unwrap() {
            let name = format!("{file}: {}", case["name"]);
            let opens_reasoning = case["opens_reasoning"] == true;
            let context = ParseContext { tools: &tools, turn: 3, opens_reasoning };
            let turn = parser.parse(case["text"].as_str().unwrap(), &context);
            assert_eq!(json!(turn.reasoning_content), case["reasoning"], "{name}");
            assert_eq!(json!(turn.content), case["content"], "{name}");
            match turn.outcome {
                Outcome::Answer => assert!(case["calls"].is_null() && case["error"].is_null(), "{name}: an answer"),
                Outcome::Calls(calls) => {
                    let read: Vec<Value> =
                        calls.iter().map(|call| json!({"name": call.name, "arguments": call.arguments})).collect();
                    assert_eq!(json!(read), case["calls"], "{name}");
                    let ids: Vec<&str> = calls.iter().map(|call| call.id.as_str()).collect();
                    match &case["ids"] {
                        Value::Null if file == "mistral" => assert!(ids.iter().all(|id| id.len() == 9), "{name}"),
                        Value::Null => assert!(ids.iter().enumerate().all(|(i, id)| *id == format!("call_3_{i}"))),
                        expected => assert_eq!(json!(ids), *expected, "{name}"),
                    }
                }
                Outcome::Invalid(error) => {
                    assert_eq!(json!(error.kind.name()), case["error"], "{name}: {error}");
                    assert_eq!(json!(error.tool), case["tool"], "{name}: {error}");
                    assert!(error.message.len() < 400, "{name}: {error}");
                }
            }
            count += 1;
        }
    }
    assert!(count > 130, "{count}");
}

#[test]
fn an_error_tells_the_model_what_to_write() {
    let tools = tools();
    let context = ParseContext { tools: &tools, turn: 0, opens_reasoning: false };
    for (text, expected) in [
        ("<tool_call>{\"name\": \"rm\"}</tool_call>", "there is no tool 'rm': the tools are add, note, mixed, now"),
        (
            "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>",
            "the call of 'add' is not valid: the argument 'b' is missing",
        ),
        ("<tool_call>{\"name\": 1}</tool_call>", "the tool call has no name: write {\"name\": …, \"arguments\": {…}}"),
    ] {
        let Outcome::Invalid(error) = ToolParser::Hermes.parse(text, &context).outcome else { panic!("{text}") };
        assert_eq!(error.message, expected);
        let reply = error.reply("call_0_0");
        assert_eq!((&reply["role"], &reply["content"]), (&json!("tool"), &json!(expected)));
    }
    let many = "<tool_call>{\"name\": \"now\"}</tool_call>".repeat(65);
    let Outcome::Invalid(error) = ToolParser::Hermes.parse(&many, &context).outcome else { panic!() };
    assert_eq!(error.kind.name(), "too_many_calls");
}

#[test]
fn the_template_chooses_the_parser() {
    for (template, parser) in [
        (support::template("qwen2_5"), ToolParser::Hermes),
        (support::template("qwen3"), ToolParser::Hermes),
        (support::template("llama3_1"), ToolParser::Llama3),
        ("{{ '<tool_call>\\n<function=' + name }}".to_owned(), ToolParser::Qwen3Coder),
        ("{{ '<tool_call>' }}<arg_key>".to_owned(), ToolParser::None),
        ("{{ '[TOOL_CALLS]' }}".to_owned(), ToolParser::Mistral),
        ("{{ '<|tool_call>call:' }}".to_owned(), ToolParser::Gemma),
        ("{{ '<|tool|>' }}".to_owned(), ToolParser::Phi),
        ("{{ messages[0].content }}".to_owned(), ToolParser::None),
    ] {
        let choice = ToolParser::by_template(&template);
        assert_eq!(choice.parser, parser, "{}", choice.because);
    }
    assert!(ToolParser::named("nothing").is_none());
    assert_eq!(ToolParser::named("qwen"), Some(ToolParser::Hermes));
}
