//! Tests of `rlood-chat` on recorded and hostile texts.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod hostile;
mod observations;
mod parsers;
mod support;
mod tool_loop;
