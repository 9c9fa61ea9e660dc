//! The worker protocol, the server's side.
