//! The decoder: one description, per-layer recomputation, log-probs by chunks.
