//! The reward test endpoint.
