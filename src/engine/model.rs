//! The decoder: one description, per-layer recomputation, log-probs by chunks.

/// One trainable tensor and where it lies in the flat buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterInfo {
    /// PEFT's name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// First element in the flat buffers.
    pub offset: usize,
}
