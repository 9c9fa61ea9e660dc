//! Checkpoints and adapters.
