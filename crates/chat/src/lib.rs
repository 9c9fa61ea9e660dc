//! Turns of a chat: the tool calls in a model's text ([`ToolParser`]), and the tokens that follow a turn ([`TurnRenderer`]).
//!
//! Training with environments and the OpenAI API use the same code, so a model is served as it was trained. Nothing here reads
//! files or waits. Texts of models and of environments are untrusted: no text makes a function panic.
//!
//! The tokens of a conversation are only ever appended: `prompt ids + sampled ids + suffix ids + sampled ids + …`. No turn is
//! decoded and encoded again, because ids → text → ids is not the identity.

mod escape;
mod openai;
mod parser;
mod parsers;
mod renderer;
mod scan;
mod schema;
mod tools;
mod turn;

pub use openai::{MessageError, for_template, tool_calls_value};
pub use parser::{Choice, ParseContext, ToolParser};
pub use renderer::{FirstTurn, RenderError, Suffix, ToolRole, TurnRenderer};
pub use tools::{MAX_TOOLS, Tool, ToolError, Tools};
pub use turn::{ContentError, ContentErrorKind, Outcome, ToolCall, Turn};
