//! Gemma 2 and the text part of Gemma 3: norms around attention and MLP whose weights are stored minus 1, scaled
//! embeddings, GELU, windows on most layers.

use super::Family;
use crate::ModelCardError;
use crate::config::{Keys, LayerNorms, ModelDescription, QkNorm, ropes_by_layer_type, windows};

pub(super) const GEMMA2: Family = Family {
    model_type: "gemma2",
    reads: &["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"],
    sizes: &[("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 256), ("vocab_size", 256_000)],
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    is_tied: true,
    describe: |keys, model| {
        let mut model = common(keys, model, Some(30.0))?;
        model.attention_softcap = softcap(keys, "attn_logit_softcapping", Some(50.0))?;
        model.windows = windows(keys, model.num_hidden_layers, Some(window(keys)?), |layer| layer % 2 == 0)?;
        Ok(model)
    },
    ..Family::COMMON
};

/// The family of Gemma 3. A released config.json may omit every key that has its
/// default (transformers 5.23.0, configuration_gemma3.py).
pub(super) const GEMMA3_TEXT: Family = Family {
    model_type: "gemma3_text",
    reads: &["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"],
    sizes: &[
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 26),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("vocab_size", 262_208),
        ("max_position_embeddings", 131_072),
    ],
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    rope_theta: 1_000_000.0,
    ropes: |keys, theta, sizes| {
        let (full, local) = ropes_by_layer_type(keys, theta, ("rope_local_base_freq", Some(10_000.0)), sizes)?;
        Ok((full, Some(local)))
    },
    is_tied: true,
    describe: |keys, model| {
        // `attn_logit_softcapping` has no effect: Gemma3Attention of transformers reads the key, but does not use it.
        let mut model = common(keys, model, None)?;
        model.qk_norm = QkNorm::Head;
        let pattern = match keys.get("sliding_window_pattern") {
            Some(_) => keys.size("sliding_window_pattern", None)?,
            None => keys.size("_sliding_window_pattern", Some(6))?,
        };
        let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
        model.windows = windows(keys, model.num_hidden_layers, Some(window(keys)?), slides)?;
        Ok(model)
    },
    ..Family::COMMON
};

fn window(keys: &Keys<'_>) -> Result<usize, ModelCardError> {
    keys.size("sliding_window", Some(4096))
}

/// Reads a soft cap. An explicit null turns it off.
fn softcap(keys: &Keys<'_>, key: &str, default: Option<f64>) -> Result<Option<f64>, ModelCardError> {
    match keys.value.get(key) {
        None => Ok(default),
        Some(value) if value.is_null() => Ok(None),
        Some(_) => keys.number(key, None).map(Some),
    }
}

/// Sets the fields that Gemma 2 and Gemma 3 share, given the default soft cap of logits.
fn common(
    keys: &Keys<'_>,
    mut model: ModelDescription,
    logits_softcap: Option<f64>,
) -> Result<ModelDescription, ModelCardError> {
    super::read_attention_bias(keys, &mut model)?;
    model.norms = LayerNorms::AROUND;
    model.norm_offset = 1.0;
    // transformers rounds the factor on the embeddings to the dtype of the weights; here the factor is f32 in every precision.
    model.embedding_multiplier = (model.hidden_size as f64).sqrt();
    model.attention_scale = keys.number("query_pre_attn_scalar", Some(256.0))?.powf(-0.5);
    model.logits_softcap = softcap(keys, "final_logit_softcapping", logits_softcap)?;
    Ok(model)
}
