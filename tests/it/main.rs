//! The integration tests, in one binary.

mod golden;
mod jobs_api;
mod layering;
mod parity;
mod rewards;
mod spec;
mod vectors;
