//! The forms of tool calls, a file for each family.
//!
//! The forms were read in the chat templates of TRL 1.16 and in vLLM's documentation of tool calling.

pub(crate) mod gemma;
pub(crate) mod hermes;
pub(crate) mod llama3;
pub(crate) mod mistral;
pub(crate) mod phi;
mod python;
pub(crate) mod qwen3_coder;
