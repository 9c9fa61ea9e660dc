//! Tests of the client against a server that breaks connections, bodies, hashes and streams.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod calls;
mod downloads;
mod fake;
mod follow;
mod operations;
