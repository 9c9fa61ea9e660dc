//! Differentiable operations; each with a fused twin is used through here only.
