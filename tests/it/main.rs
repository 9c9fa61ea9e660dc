//! The integration tests, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod adapters;
mod algorithm;
mod artifacts;
mod bench;
mod bits;
mod datasets;
mod demo;
mod doctor;
mod exact;
#[cfg(feature = "failpoints")]
mod failpoints;
mod fork;
mod fuzz;
mod generate;
mod golden;
#[cfg(feature = "cuda")]
mod gpu;
mod gradients;
mod http;
mod interrupt;
mod job_events;
mod job_moves;
mod job_records;
mod jobs_api;
mod journal;
mod judge;
mod kill;
mod kills;
mod kinds;
mod layering;
mod long;
mod memory;
mod openapi;
mod oracle;
mod params;
mod parity;
mod precision;
mod probe;
mod processes;
mod queue;
mod resume;
mod reward_model;
mod reward_server;
mod rewards;
mod scale;
mod secrets;
mod server;
mod setting;
mod spec;
mod ssrf;
mod store;
mod train;
mod trl;
mod variants;
mod vectors;
mod watch;
mod worker_protocol;
