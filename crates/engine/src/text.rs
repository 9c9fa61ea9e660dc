//! tokenizer.json, chat template, EOS ids. The code lives in [`crate::modelcard::text`], because the HTTP server checks prompts at submission.

pub use crate::modelcard::text::{Prompt, Text, TextError};
