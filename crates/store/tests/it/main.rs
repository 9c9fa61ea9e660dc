//! The integration tests of `rlood-store`, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod doctor;
mod gc;
mod journal;
mod listing;
mod migrations;
mod points;
mod queue;
#[cfg(feature = "failpoints")]
mod queue_model;
mod setting;
mod store;
mod strikes;
