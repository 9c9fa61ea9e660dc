//! The integration tests of `rlood-rewards`, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod adapters;
mod corpus;
mod environment;
mod environment_later;
mod journal;
mod judge;
mod openenv;
mod python;
mod python_environments;
mod reward_load;
mod reward_values;
mod rewards;
mod service;
mod ssrf;
mod tools;
