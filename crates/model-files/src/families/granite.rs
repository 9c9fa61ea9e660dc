//! Granite 3.x: Llama with four multipliers.

use super::{Family, read_attention_bias};
use crate::config::windows;

pub(super) const GRANITE: Family = Family {
    model_type: "granite",
    reads: &["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"],
    has_kv_heads_by_default: true,
    describe: |keys, mut model| {
        read_attention_bias(keys, &mut model)?;
        model.mlp_bias = keys.flag("mlp_bias", false)?;
        model.windows = windows(keys, model.num_hidden_layers, None, |_| false)?;
        // Each is 1 by default, the attention's too (transformers 5.23.0, configuration_granite.py).
        model.embedding_multiplier = keys.number("embedding_multiplier", Some(1.0))?;
        model.attention_scale = keys.number("attention_multiplier", Some(1.0))?;
        model.residual_multiplier = keys.number("residual_multiplier", Some(1.0))?;
        model.logits_divisor = keys.number("logits_scaling", Some(1.0))?;
        Ok(model)
    },
    ..Family::COMMON
};
