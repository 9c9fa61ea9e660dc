//! Counter-based randomness.
