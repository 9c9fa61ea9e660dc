//! Qwen3.5: three of four layers are Gated DeltaNet layers with a state of constant size; the others are attention with
//! a gate on its output. Norms are stored minus 1, and a quarter of each head rotates.

use serde_json::Value;

use super::{Family, read_attention_bias};
use crate::ModelCardError;
use crate::config::{Activation, DeltaNet, Keys, Projections, QkNorm};

/// The text model. The defaults are those of transformers 5.23.0 (configuration_qwen3_5.py: `Qwen3_5TextConfig`).
pub(super) const QWEN3_5_TEXT: Family = Family {
    model_type: "qwen3_5_text",
    reads: &["partial_rotary_factor"],
    sizes: &[
        ("hidden_size", 4096),
        ("intermediate_size", 12_288),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("vocab_size", 248_320),
        ("max_position_embeddings", 32_768),
    ],
    rotary_factor: Some(0.25),
    describe: |keys, mut model| {
        read_attention_bias(keys, &mut model)?;
        if let Some(value) = keys.get("attn_output_gate").filter(|value| **value != Value::Bool(true)) {
            return keys.refuse("attn_output_gate", value, "the only supported value is true");
        }
        if model.activation != Activation::Silu {
            let value = keys.get("hidden_act").cloned().unwrap_or_default();
            return keys.refuse("hidden_act", &value, "the only supported value for this model_type is \"silu\"");
        }
        model.has_output_gate = true;
        model.qk_norm = QkNorm::Head;
        model.norm_offset = 1.0;
        model.projections = Projections::SEPARATE;
        model.delta_net = Some(delta_net(keys, model.num_hidden_layers)?);
        Ok(model)
    },
    ..Family::COMMON
};

/// Reads the sizes of the Gated DeltaNet layers, and which layers they are.
fn delta_net(keys: &Keys<'_>, num_layers: usize) -> Result<DeltaNet, ModelCardError> {
    let size = |key: &str, usual: usize, most: usize| match keys.size(key, Some(usual))? {
        size if size <= most => Ok(size),
        size => keys.refuse(key, &size.into(), &format!("the value must be at most {most}")),
    };
    let num_key_heads = size("linear_num_key_heads", 16, 4096)?;
    let num_value_heads = size("linear_num_value_heads", 32, 4096)?;
    if num_value_heads % num_key_heads != 0 {
        let advice = format!("linear_num_key_heads ({num_key_heads}) must divide it");
        return keys.refuse("linear_num_value_heads", &num_value_heads.into(), &advice);
    }
    let kernel = size("linear_conv_kernel_dim", 4, 64)?;
    if kernel < 2 {
        return keys.refuse("linear_conv_kernel_dim", &kernel.into(), "the value must be at least 2");
    }
    Ok(DeltaNet {
        layers: linear_layers(keys, num_layers)?,
        num_key_heads,
        num_value_heads,
        key_dim: size("linear_key_head_dim", 128, 1024)?,
        value_dim: size("linear_value_head_dim", 128, 1024)?,
        kernel,
    })
}

/// Reads which layers are Gated DeltaNet layers: `layer_types`, or all but every `full_attention_interval`-th layer.
fn linear_layers(keys: &Keys<'_>, num_layers: usize) -> Result<Vec<bool>, ModelCardError> {
    let Some(value) = keys.get("layer_types") else {
        let interval = keys.size("full_attention_interval", Some(4))?;
        return Ok((1..=num_layers).map(|number| !number.is_multiple_of(interval)).collect());
    };
    let is_linear = |name: &Value| match name.as_str() {
        Some("linear_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    };
    let list: Option<Vec<bool>> = value.as_array().and_then(|names| names.iter().map(is_linear).collect());
    let advice = "the value must name linear_attention or full_attention for each of num_hidden_layers layers";
    match list.filter(|list| list.len() == num_layers) {
        Some(list) => Ok(list),
        None => keys.refuse("layer_types", value, advice),
    }
}
