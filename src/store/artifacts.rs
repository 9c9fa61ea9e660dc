//! Published checkpoints.
