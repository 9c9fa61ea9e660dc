//! The integration tests, in one binary.

mod golden;
mod layering;
mod parity;
mod queue;
mod rewards;
mod setting;
mod spec;
mod store;
mod vectors;
mod worker_protocol;
