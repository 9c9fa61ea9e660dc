//! The integration tests, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod artifacts;
mod datasets;
mod demo;
mod doctor;
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
mod vectors;
mod watch;
mod worker_protocol;
