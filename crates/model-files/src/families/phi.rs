//! Phi-3, 3.5, 4 and 4-mini: Llama with two fused projections; the rotary position embedding may rotate only a part of each head.

use super::Family;
use crate::config::{Projections, windows};

pub(super) const PHI3: Family = Family {
    model_type: "phi3",
    reads: &["partial_rotary_factor"],
    rms_norm_eps: 1e-5,
    has_kv_heads_by_default: true,
    rotary_factor: Some(1.0),
    describe: |keys, mut model| {
        model.projections = Projections::FUSED;
        let window = keys.get("sliding_window").map(|_| keys.size("sliding_window", None)).transpose()?;
        model.windows = windows(keys, model.num_hidden_layers, window, |_| true)?;
        Ok(model)
    },
    ..Family::COMMON
};
