//! The Llama 3.x family.

use super::{Family, read_attention_bias};
use crate::config::windows;

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    has_kv_heads_by_default: true,
    describe: |keys, mut model| {
        read_attention_bias(keys, &mut model)?;
        model.mlp_bias = keys.flag("mlp_bias", false)?;
        model.windows = windows(keys, model.num_hidden_layers, None, |_| false)?;
        Ok(model)
    },
    ..Family::COMMON
};
