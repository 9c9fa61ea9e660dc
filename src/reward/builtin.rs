//! Built-in rewards: pure functions.
