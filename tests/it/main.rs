//! The integration tests, in one binary.

mod golden;
mod gradients;
mod oracle;
mod parity;
mod rewards;
mod spec;
mod vectors;
