//! The integration tests, in one binary.

mod artifacts;
mod datasets;
mod golden;
mod http;
mod layering;
mod openapi;
mod parity;
mod rewards;
mod spec;
mod vectors;
