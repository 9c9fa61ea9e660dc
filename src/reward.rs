//! Samples in, one value or one error each out.
//!
//! The rest of rlood sees a reward through [`Reward`]; [`build`] makes them from a plan. Everything here is async and
//! knows nothing of jobs' storage or the engine: the worker calls it from its runtime.

pub mod builtin;
pub mod example;
pub mod outgoing;
pub mod webhook;
