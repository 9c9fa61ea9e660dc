//! The golden suite.
