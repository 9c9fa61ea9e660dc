//! Samples in, one score or one error each out.

pub mod builtin;
pub mod example;
pub mod outgoing;
pub mod webhook;
