//! Llama 3.x.

use super::Family;
use crate::config::windows;

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    reads: &[],
    head_dim: None,
    rope_theta: 10_000.0,
    is_tied: false,
    has_kv_heads_by_default: true,
    describe: |keys, mut model| {
        let attention_bias = keys.flag("attention_bias", false)?;
        (model.qkv_bias, model.o_bias) = (attention_bias, attention_bias);
        model.mlp_bias = keys.flag("mlp_bias", false)?;
        model.windows = windows(keys, model.num_hidden_layers, None, |_| false)?;
        Ok(model)
    },
};
