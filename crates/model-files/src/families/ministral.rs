//! Ministral 3: Llama with YaRN, and queries that are scaled beyond the original context.

use super::Family;
use crate::ModelCardError;
use crate::config::{Keys, QueryGrowth, windows};

pub(super) const MINISTRAL3: Family = Family {
    model_type: "ministral3",
    sizes: &[("head_dim", 128)],
    rope_theta: 1_000_000.0,
    is_tied: true,
    describe: |keys, mut model| {
        let window = keys.get("sliding_window").map(|_| keys.size("sliding_window", None)).transpose()?;
        model.windows = windows(keys, model.num_hidden_layers, window, |_| true)?;
        model.query_growth = query_growth(keys)?;
        Ok(model)
    },
    ..Family::COMMON
};

/// Reads the query scaling from `rope_parameters`, or from `rope_scaling` as transformers 4 called it.
fn query_growth(keys: &Keys<'_>) -> Result<Option<QueryGrowth>, ModelCardError> {
    let Some(rope) = keys.get("rope_parameters").or_else(|| keys.get("rope_scaling")) else { return Ok(None) };
    let rope = Keys { file: keys.file, value: rope };
    let Some(_) = rope.get("llama_4_scaling_beta") else { return Ok(None) };
    Ok(Some(QueryGrowth {
        beta: rope.number("llama_4_scaling_beta", None)?,
        original_max_position_embeddings: rope.number("original_max_position_embeddings", None)?,
    }))
}
