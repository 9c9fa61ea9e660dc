//! Ministral 3: Llama with YaRN, and queries that are scaled beyond the original context.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::Family;
use crate::ModelCardError;
use crate::config::{Keys, QueryGrowth, rope, windows};

/// The defaults are those of transformers 5.23.0, configuration_ministral3.py.
pub(super) const MINISTRAL3: Family = Family {
    model_type: "ministral3",
    sizes: &[("head_dim", 128)],
    rms_norm_eps: 1e-5,
    ropes: |keys, theta, sizes| {
        let value = with_rope(keys);
        Ok((rope(&Keys { file: keys.file, value: &value }, theta, sizes)?, None))
    },
    describe: |keys, mut model| {
        let window = keys.get("sliding_window").map(|_| keys.size("sliding_window", None)).transpose()?;
        model.windows = windows(keys, model.num_hidden_layers, window, |_| true)?;
        model.query_growth = query_growth(keys)?;
        Ok(model)
    },
    ..Family::COMMON
};

/// Returns config.json with the default of `rope_parameters` if it has neither this key nor `rope_scaling`. The default has a
/// base of its own, so that `rope_theta` outside of it has no effect.
fn with_rope<'a>(keys: &Keys<'a>) -> Cow<'a, Value> {
    if keys.get("rope_parameters").or_else(|| keys.get("rope_scaling")).is_some() {
        return Cow::Borrowed(keys.value);
    }
    let mut value = keys.value.clone();
    value["rope_parameters"] = json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    });
    Cow::Owned(value)
}

/// Reads the query scaling from `rope_parameters`, or from `rope_scaling` as transformers 4 called it.
fn query_growth(keys: &Keys<'_>) -> Result<Option<QueryGrowth>, ModelCardError> {
    let value = with_rope(keys);
    let keys = Keys { file: keys.file, value: &value };
    let Some(rope) = keys.get("rope_parameters").or_else(|| keys.get("rope_scaling")) else { return Ok(None) };
    let rope = Keys { file: keys.file, value: rope };
    let Some(_) = rope.get("llama_4_scaling_beta") else { return Ok(None) };
    Ok(Some(QueryGrowth {
        beta: rope.number("llama_4_scaling_beta", None)?,
        original_max_position_embeddings: rope.number("original_max_position_embeddings", None)?,
    }))
}
