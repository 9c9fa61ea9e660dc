//! The integration tests, in one binary.

mod golden;
mod layering;
mod parity;
mod rewards;
mod spec;
mod vectors;
