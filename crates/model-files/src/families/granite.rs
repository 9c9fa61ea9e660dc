//! Granite 3.x, and Granite 4 without Mamba layers and experts: Llama with four multipliers.

use super::{Family, read_attention_bias};
use crate::ModelCardError;
use crate::config::{Keys, ModelDescription, Projections, windows};

const MULTIPLIERS: [&str; 4] =
    ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"];

pub(super) const GRANITE: Family = Family {
    model_type: "granite",
    reads: &MULTIPLIERS,
    has_kv_heads_by_default: true,
    describe: |keys, model| {
        let mut model = common(keys, model)?;
        model.mlp_bias = keys.flag("mlp_bias", false)?;
        model.windows = windows(keys, model.num_hidden_layers, None, |_| false)?;
        Ok(model)
    },
    ..Family::COMMON
};

/// The family of Granite 4. Its MLP has the names of the shared MLP in mixture-of-experts models (`shared_intermediate_size`);
/// `intermediate_size` is the size of the experts, which supported models do not have.
pub(super) const GRANITE_HYBRID: Family = Family {
    model_type: "granitemoehybrid",
    reads: &MULTIPLIERS,
    has_kv_heads_by_default: true,
    describe: |keys, model| {
        let mut model = common(keys, model)?;
        model.projections = Projections::SHARED_MLP;
        model.intermediate_size = keys.size("shared_intermediate_size", Some(1024))?;
        without_experts(keys)?;
        only_attention(keys, model.num_hidden_layers)?;
        if keys.get("position_embedding_type").is_none_or(|value| value != "rope") {
            model.rotates = vec![false; model.num_hidden_layers];
        }
        Ok(model)
    },
    ..Family::COMMON
};

/// Reads Granite's multipliers. Each defaults to 1, including the attention's (transformers 5.23.0, configuration_granite.py).
fn common(keys: &Keys<'_>, mut model: ModelDescription) -> Result<ModelDescription, ModelCardError> {
    read_attention_bias(keys, &mut model)?;
    model.embedding_multiplier = keys.number("embedding_multiplier", Some(1.0))?;
    model.attention_scale = keys.number("attention_multiplier", Some(1.0))?;
    model.residual_multiplier = keys.number("residual_multiplier", Some(1.0))?;
    model.logits_divisor = keys.number("logits_scaling", Some(1.0))?;
    Ok(model)
}

/// Rejects models with experts. A number other than 0 is rejected earlier, because no family supports it.
fn without_experts(keys: &Keys<'_>) -> Result<(), ModelCardError> {
    match keys.get("num_local_experts") {
        Some(_) => Ok(()),
        None => {
            let detail = "num_local_experts is missing, so that the MLPs have 8 experts, which are not supported; use a Granite 4 model \
                          with num_local_experts 0";
            Err(ModelCardError::new(keys.file, detail))
        }
    }
}

/// Rejects models with layers other than attention; without `layer_types` all layers are Mamba layers. transformers knows the key
/// by a second name too, `layers_block_type`, which takes precedence.
fn only_attention(keys: &Keys<'_>, num_layers: usize) -> Result<(), ModelCardError> {
    let found = ["layers_block_type", "layer_types"].into_iter().find_map(|key| Some((key, keys.get(key)?)));
    let Some((key, value)) = found else {
        let detail = "layer_types is missing, so that all layers are Mamba's, which are not supported; use a Granite 4 model \
                      with attention layers only";
        return Err(ModelCardError::new(keys.file, detail));
    };
    let is_attention = |name: &serde_json::Value| name == "attention" || name == "full_attention";
    match value.as_array() {
        Some(list) if list.len() == num_layers && list.iter().all(is_attention) => Ok(()),
        _ => keys.refuse(key, value, "the value must name attention for each of num_hidden_layers layers"),
    }
}
