//! The vectors suite.
