//! What a run takes of a GPU's memory.

use super::{ComputeDtype, Footprint, ModelShape, Place, Plan, value_bytes};

/// Of the cache where the GPU's memory is not known.
const UNKNOWN_KV_BYTES: u64 = 8 << 30;

/// Bytes of KV cache that generation may hold, at least one group: half of what the weights leave.
pub(super) fn kv_budget(memory_bytes: Option<u64>, dtype: ComputeDtype, num_parameters: u64) -> u64 {
    memory_bytes.map_or(UNKNOWN_KV_BYTES, |bytes| bytes.saturating_sub(value_bytes(dtype) * num_parameters) / 2)
}

pub(super) fn footprint(
    place: Place,
    plan: &Plan,
    num_parameters: u64,
    shape: &ModelShape,
    longest_prompt: Option<u64>,
    micro_batch_tokens: u64,
) -> Footprint {
    let _ = place;
    Footprint::of(plan, num_parameters, shape, longest_prompt, micro_batch_tokens)
}
