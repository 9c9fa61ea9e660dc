//! Tests of the Hub client with a fake Hub on two ports.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod downloads;
mod fake;
mod plans;
mod pushes;
mod python;
mod ranges;
