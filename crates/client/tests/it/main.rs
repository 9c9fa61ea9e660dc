//! The client against a server that breaks what it can: connections, bodies, hashes, streams.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod calls;
mod downloads;
mod fake;
mod follow;
mod operations;
