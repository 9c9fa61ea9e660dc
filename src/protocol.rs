//! The worker protocol.
