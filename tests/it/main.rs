//! The integration tests, in one binary.

mod golden;
mod parity;
mod rewards;
mod spec;
mod vectors;
