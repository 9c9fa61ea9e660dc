//! OLMo 2 and 3: Llama with its norms after attention and MLP, and norms over all query and all key heads.

use super::{Family, read_attention_bias};
use crate::ModelCardError;
use crate::config::{Keys, LayerNorms, ModelDescription, QkNorm, ropes_by_layer_type, windows};

pub(super) const OLMO2: Family = Family {
    model_type: "olmo2",
    rms_norm_eps: 1e-5,
    has_kv_heads_by_default: true,
    describe: |keys, model| {
        let mut model = common(keys, model)?;
        model.windows = windows(keys, model.num_hidden_layers, None, |_| false)?;
        Ok(model)
    },
    ..Family::COMMON
};

/// The family of OLMo 3. Three of four layers have an attention window, and only in these the rotary position embedding is not
/// scaled to the longer context.
pub(super) const OLMO3: Family = Family {
    model_type: "olmo3",
    reads: &["rope_local_base_freq"],
    rms_norm_eps: 1e-5,
    rope_theta: 500_000.0,
    ropes: |keys, theta, sizes| {
        let (full, local) = ropes_by_layer_type(keys, theta, ("rope_local_base_freq", None), sizes)?;
        Ok((full, Some(local)))
    },
    has_kv_heads_by_default: true,
    describe: |keys, model| {
        let mut model = common(keys, model)?;
        let window = keys.size("sliding_window", Some(4096))?;
        model.windows = windows(keys, model.num_hidden_layers, Some(window), |layer| (layer + 1) % 4 != 0)?;
        Ok(model)
    },
    ..Family::COMMON
};

fn common(keys: &Keys<'_>, mut model: ModelDescription) -> Result<ModelDescription, ModelCardError> {
    read_attention_bias(keys, &mut model)?;
    (model.qk_norm, model.norms) = (QkNorm::Width, LayerNorms::AFTER);
    Ok(model)
}
