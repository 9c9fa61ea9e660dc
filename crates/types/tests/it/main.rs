//! The integration tests of `rlood-types`, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod algorithm;
mod datasets;
mod sources;
mod spec;
mod trl;
mod warm_up;
