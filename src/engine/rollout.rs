//! Which prompts a block holds, and what a completion is.
