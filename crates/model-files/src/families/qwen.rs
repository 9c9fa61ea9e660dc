//! The families of Qwen3, Qwen2 and Qwen2.5.

use serde_json::Value;

use super::{Family, read_attention_bias};
use crate::ModelCardError;
use crate::config::{Keys, QkNorm, windows};

pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    sizes: &[("head_dim", 128)],
    describe: |keys, mut model| {
        read_attention_bias(keys, &mut model)?;
        model.qk_norm = QkNorm::Head;
        model.windows = late_windows(keys, model.num_hidden_layers)?;
        Ok(model)
    },
    ..Family::COMMON
};

pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    describe: |keys, mut model| {
        model.qkv_bias = true;
        model.windows = late_windows(keys, model.num_hidden_layers)?;
        Ok(model)
    },
    ..Family::COMMON
};

/// Returns the attention windows: if `use_sliding_window` is true, layers from `max_window_layers` on have one.
fn late_windows(keys: &Keys<'_>, num_layers: usize) -> Result<Vec<Option<usize>>, ModelCardError> {
    // An explicit null is not the default: no layer has a window.
    let has_windows = keys.flag("use_sliding_window", false)? && keys.value.get("sliding_window") != Some(&Value::Null);
    let window = has_windows.then(|| keys.size("sliding_window", Some(4096))).transpose()?;
    let first = match keys.get("max_window_layers") {
        None => 28,
        Some(value) => match value.as_u64() {
            Some(n) => usize::try_from(n).unwrap_or(usize::MAX),
            None => return keys.refuse("max_window_layers", value, "the value must be a whole number"),
        },
    };
    windows(keys, num_layers, window, |layer| layer >= first)
}
