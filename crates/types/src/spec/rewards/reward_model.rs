//! Reads the reward `reward_model`: a sequence-classification checkpoint on the worker's device.

use crate::spec::reader::{Field, Reader};
use crate::spec::{ComputeDtype, RewardModelPlan, RewardTextFormat};

pub(super) fn read_reward_model(reader: &Reader<'_>) -> RewardModelPlan {
    let model = reader.required("model", "name the registered reward model (POST /models), such as \"org/name\"");
    RewardModelPlan {
        model: model.nonempty(200).unwrap_or_default().to_owned(),
        label: read_label(&reader.field("label")),
        format: reader.field("format").variant().unwrap_or(RewardTextFormat::Auto),
        max_length: reader.field("max_length").whole(1..=10_000_000),
        dtype: reader.field("dtype").variant().unwrap_or(ComputeDtype::F32),
    }
}

/// Reads a label's name, or its number from 0.
fn read_label(field: &Field<'_>) -> Option<String> {
    match field.value() {
        Some(value) if value.is_u64() => Some(value.to_string()),
        Some(_) => field.nonempty(200).map(str::to_owned),
        None => None,
    }
}
