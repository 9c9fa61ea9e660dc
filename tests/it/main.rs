//! The integration tests, in one binary.

mod golden;
mod parity;
mod spec;
mod vectors;
