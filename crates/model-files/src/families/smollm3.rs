//! SmolLM3: Llama in which some layers have no rotary position embedding.

use super::{Family, read_attention_bias};
use crate::ModelCardError;
use crate::config::{Keys, windows};

pub(super) const SMOLLM3: Family = Family {
    model_type: "smollm3",
    reads: &["no_rope_layers", "no_rope_layer_interval"],
    rope_theta: 2_000_000.0,
    is_tied: true,
    describe: |keys, mut model| {
        read_attention_bias(keys, &mut model)?;
        model.mlp_bias = keys.flag("mlp_bias", false)?;
        model.rotates = rotating_layers(keys, model.num_hidden_layers)?;
        // If the model uses attention windows, only the layers without rotary position embedding have them.
        let window = match keys.flag("use_sliding_window", false)? && keys.get("sliding_window").is_some() {
            true => Some(keys.size("sliding_window", None)?),
            false => None,
        };
        model.windows = windows(keys, model.num_hidden_layers, window, |layer| !model.rotates[layer])?;
        Ok(model)
    },
    ..Family::COMMON
};

/// Reads which layers have a rotary position embedding: `no_rope_layers` has 1 for a layer with it and 0 for one without. If the
/// key is missing, every `no_rope_layer_interval`th layer has none (transformers 5.23.0, configuration_smollm3.py).
fn rotating_layers(keys: &Keys<'_>, num_layers: usize) -> Result<Vec<bool>, ModelCardError> {
    let Some(value) = keys.get("no_rope_layers") else {
        let interval = keys.size("no_rope_layer_interval", Some(4))?;
        return Ok((1..=num_layers).map(|layer| layer % interval != 0).collect());
    };
    let flag = |flag: &serde_json::Value| match flag.as_u64() {
        Some(flag @ (0 | 1)) => Some(flag == 1),
        _ => None,
    };
    let list: Option<Vec<bool>> = value.as_array().and_then(|flags| flags.iter().map(flag).collect());
    match list.filter(|list| list.len() >= num_layers) {
        Some(list) => Ok(list.into_iter().take(num_layers).collect()),
        None => {
            let advice = "the value must have 1 (with rotary position embedding) or 0 (without) for each of num_hidden_layers \
                          layers";
            keys.refuse("no_rope_layers", value, advice)
        }
    }
}
