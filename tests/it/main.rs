//! The integration tests, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod demo;
mod golden;
mod layering;
mod parity;
mod rewards;
mod spec;
mod vectors;
