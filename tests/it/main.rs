//! The integration tests, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod algorithm;
mod artifacts;
mod datasets;
mod demo;
mod golden;
mod gradients;
mod http;
mod jobs_api;
mod kill;
mod layering;
mod openapi;
mod oracle;
mod parity;
mod processes;
mod queue;
mod resume;
mod rewards;
mod setting;
mod spec;
mod store;
mod train;
mod variants;
mod vectors;
mod worker_protocol;
