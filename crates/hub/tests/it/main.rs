//! The hub's client against a fake hub on two ports.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod downloads;
mod fake;
mod plans;
mod python;
mod ranges;
