//! A turn of the assistant as it was understood.

use serde_json::{Map, Value};

/// A call of a tool, with arguments that fit the tool's schema.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Id of the call, unique within the conversation.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// The arguments by name, in the order in which the model wrote them.
    pub arguments: Map<String, Value>,
}

/// A turn of the assistant.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The text outside of reasoning, up to the first call.
    pub content: String,
    /// The text of the reasoning, if there is any.
    pub reasoning_content: Option<String>,
    /// The consequence of the turn.
    pub outcome: Outcome,
}

/// The consequence of a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The turn calls no tool.
    Answer,
    /// The turn calls these tools; the list is not empty.
    Calls(Vec<ToolCall>),
    /// The turn tries to call a tool, but a call is not valid. None of its calls is carried out.
    Invalid(ContentError),
}

/// The kind of an invalid call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContentErrorKind {
    /// The call is not written in the form of the model's family.
    Malformed,
    /// There is no tool of that name.
    UnknownTool,
    /// An argument is missing, unknown or of the wrong type.
    InvalidArguments,
    /// The turn has more calls than are allowed.
    TooManyCalls,
}

impl ContentErrorKind {
    /// Stable name of the kind in metrics and samples.
    pub fn name(self) -> &'static str {
        match self {
            ContentErrorKind::Malformed => "malformed",
            ContentErrorKind::UnknownTool => "unknown_tool",
            ContentErrorKind::InvalidArguments => "invalid_arguments",
            ContentErrorKind::TooManyCalls => "too_many_calls",
        }
    }
}

/// An invalid call. The model can be told, and may try again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ContentError {
    /// The kind of the error.
    pub kind: ContentErrorKind,
    /// Name of the tool, if the call has a readable one. It may be any text.
    pub tool: Option<String>,
    /// The message to show to the model: what is wrong, and what to write instead.
    pub message: String,
}

impl ContentError {
    pub(crate) fn new(kind: ContentErrorKind, tool: Option<&str>, message: impl Into<String>) -> ContentError {
        ContentError { kind, tool: tool.map(str::to_owned), message: message.into() }
    }

    pub(crate) fn malformed(message: impl Into<String>) -> ContentError {
        ContentError::new(ContentErrorKind::Malformed, None, message)
    }

    /// The message of role `tool` that tells the model about the error.
    pub fn reply(&self, call_id: &str) -> Value {
        let name = self.tool.as_deref().map_or_else(|| "error".to_owned(), shortened);
        serde_json::json!({"role": "tool", "tool_call_id": call_id, "name": name, "content": self.message})
    }
}

/// Number of characters of a call's id in Mistral's templates.
pub(crate) const SHORT_ID: usize = 9;

/// Whether Mistral's templates accept an id.
pub(crate) fn is_short_id(id: &str) -> bool {
    id.len() == SHORT_ID && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Maximum number of characters of a model's text that an error message repeats.
const MAX_SHOWN_CHARS: usize = 64;

/// The beginning of a text for an error message.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
