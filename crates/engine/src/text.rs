//! The tokenizer, chat template and EOS ids. The code is in [`crate::modelcard::text`], because the HTTP server
//! checks prompts at submission.

pub use crate::modelcard::text::{Prompt, Text, TextError};
