//! The parity suite.
