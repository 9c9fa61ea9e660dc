//! The Mistral 7B family.

use serde_json::Value;

use super::Family;
use crate::config::windows;

pub(super) const MISTRAL: Family = Family {
    model_type: "mistral",
    describe: |keys, mut model| {
        // The default window size is the 4096 of transformers' MistralConfig.
        let window = match keys.value.get("sliding_window") {
            None => Some(4096),
            Some(Value::Null) => None,
            Some(_) => Some(keys.size("sliding_window", None)?),
        };
        model.windows = windows(keys, model.num_hidden_layers, window, |_| true)?;
        Ok(model)
    },
    ..Family::COMMON
};
