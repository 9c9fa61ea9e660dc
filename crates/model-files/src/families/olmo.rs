//! OLMo 2: Llama with its norms behind attention and MLP, and norms over all query and all key heads.

use super::{Family, read_attention_bias};
use crate::config::{LayerNorms, QkNorm, windows};

pub(super) const OLMO2: Family = Family {
    model_type: "olmo2",
    has_kv_heads_by_default: true,
    describe: |keys, mut model| {
        read_attention_bias(keys, &mut model)?;
        (model.qk_norm, model.norms) = (QkNorm::Width, LayerNorms::AFTER);
        model.windows = windows(keys, model.num_hidden_layers, None, |_| false)?;
        Ok(model)
    },
    ..Family::COMMON
};
