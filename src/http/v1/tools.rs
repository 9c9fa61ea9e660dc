//! Tools in chats: what the model sees of them, and the calls in its answers. Rendering and parsing are those of training.

use serde_json::Value;

use super::Facts;
use super::answer::Whole;
use super::fields::invalid;
use crate::chat::{Outcome, ParseContext, ToolParser, Tools, Turn};
use crate::http::error::Problem;
use crate::openai::{ChatFields, ChatFunctionCall, ChatMessage, ChatToolCall};
use crate::serving::ServedFinish;

/// The tools of a chat that is being answered.
#[derive(Debug, Clone)]
pub(super) struct ToolUse {
    parser: ToolParser,
    tools: Tools,
    /// Whether the generation prompt has opened the reasoning.
    pub opens_reasoning: bool,
}

/// The parser for the model's chat template.
pub(super) fn parser_of(facts: &Facts) -> ToolParser {
    facts.text.chat_template().map_or(ToolParser::None, |source| ToolParser::by_template(source).parser)
}

impl ToolUse {
    /// Reads the tools of a request. None if there are none, or if the request does without them.
    ///
    /// # Errors
    /// Fails if a tool is not valid, or if the model's template has no known form of calls.
    pub fn of(fields: &ChatFields, facts: &Facts) -> Result<Option<ToolUse>, Problem> {
        let given = fields.tools.as_deref().unwrap_or_default();
        if given.is_empty() || fields.tool_choice.as_ref().and_then(Value::as_str) == Some("none") {
            return Ok(None);
        }
        let tools =
            Tools::new(given).map_err(|error| invalid(&format!("tools{}", error.pointer), "invalid", error.detail))?;
        let parser = parser_of(facts);
        if parser == ToolParser::None {
            let detail = "the model's chat template has no known form of tool calls: leave the tools out, or set tool_choice to 'none'";
            return Err(invalid("tools", "unsupported_value", detail));
        }
        Ok(Some(ToolUse { parser, tools, opens_reasoning: false }))
    }

    /// The schemas, for the chat template.
    pub fn schemas(&self) -> &[Value] {
        self.tools.schemas()
    }

    /// The message of an answer that calls tools. None if the answer calls none, or if a call is not valid: then it is a text.
    pub fn message(&self, whole: &Whole, facts: &Facts) -> Option<ChatMessage> {
        let text = match &whole.finish {
            // The text ends before the stop string, the tokens behind it.
            Some(ServedFinish::Stop(_)) => whole.text.clone(),
            Some(ServedFinish::Eos(_)) => {
                let ids = match whole.ids.split_last() {
                    Some((last, ids)) if facts.text.eos_token_ids().contains(last) => ids,
                    _ => &whole.ids,
                };
                facts.text.decode(ids, false).ok()?
            }
            Some(ServedFinish::Length) | None => return None,
        };
        let context = ParseContext { tools: &self.tools, turn: 0, opens_reasoning: self.opens_reasoning };
        let Turn { content, reasoning_content, outcome } = self.parser.parse(&text, &context);
        let Outcome::Calls(calls) = outcome else { return None };
        let tool_calls = calls.into_iter().map(|call| ChatToolCall {
            id: self.new_id(),
            kind: "function",
            function: ChatFunctionCall { name: call.name, arguments: Value::Object(call.arguments).to_string() },
        });
        Some(ChatMessage {
            role: "assistant",
            content: Some(content).filter(|content| !content.is_empty()),
            reasoning_content,
            tool_calls: tool_calls.collect(),
            refusal: None,
        })
    }

    /// A new id of a call, in the form that the model's template accepts.
    fn new_id(&self) -> String {
        let id = ulid::Ulid::generate().to_string().to_lowercase();
        match self.parser {
            ToolParser::Mistral => id[id.len() - 9..].to_owned(),
            _ => format!("call_{id}"),
        }
    }
}
