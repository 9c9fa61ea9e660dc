//! OLMo 2: Llama with its norms behind attention and MLP, and norms over all query and all key heads.

use super::Family;
use crate::config::{LayerNorms, QkNorm, windows};

pub(super) const OLMO2: Family = Family {
    model_type: "olmo2",
    reads: &[],
    head_dim: None,
    rope_theta: 10_000.0,
    is_tied: false,
    has_kv_heads_by_default: true,
    describe: |keys, mut model| {
        let attention_bias = keys.flag("attention_bias", false)?;
        (model.qkv_bias, model.o_bias) = (attention_bias, attention_bias);
        (model.qk_norm, model.norms) = (QkNorm::Width, LayerNorms::AFTER);
        model.windows = windows(keys, model.num_hidden_layers, None, |_| false)?;
        Ok(model)
    },
};
