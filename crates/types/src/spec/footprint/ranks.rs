//! Computes the memory of the processes of the runtime `trl`, one for each device, from what transformers, PEFT and DeepSpeed allocate.
//!
//! Of these numbers only the memory of a process without a model was measured. The rest is arithmetic.

use super::{
    CUDA_CONTEXT_BYTES, F32, Footprint, UNCOUNTED_PROMPT_TOKENS, kv_token_bytes, optimizer_bytes, packable_weights,
    saved_width, trainable_parameters, value_bytes, weight_bytes,
};
use crate::spec::{ModelShape, Plan, ResumeGuarantee};

/// Memory of a process that has imported TRL, torch, PEFT and DeepSpeed, in bytes (884 MiB with the pinned versions).
const PYTHON_BYTES: u64 = 900 << 20;

/// Memory of a job's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RanksFootprint {
    /// Memory of one process: on the CPU all of it, otherwise that of its GPU.
    pub each: Footprint,
    /// Memory of the machine for weights and moments that DeepSpeed keeps there, in bytes, for all processes together.
    pub offloaded: u64,
}

impl RanksFootprint {
    /// Computes the memory of the processes; `prompt` is the longest prompt in tokens (`None` = not counted).
    pub fn of(plan: &Plan, num_parameters: u64, shape: &ModelShape, longest_prompt: Option<u64>) -> Self {
        let devices = u64::from(plan.resources.devices.max(1));
        let stage = plan.runtime.zero_stage.unwrap_or(0);
        let shared = |bytes: u64, from_stage: u8| if stage >= from_stage { bytes.div_ceil(devices) } else { bytes };
        let value = value_bytes(plan.training.dtype);
        let prompt = longest_prompt.unwrap_or(UNCOUNTED_PROMPT_TOKENS).max(1);
        let completion = u64::from(plan.sampling.max_completion_length);
        let full = plan.lora.is_none();
        let on_gpus = plan.runtime.guarantees.resume == ResumeGuarantee::Recorded;

        let all_weights = match plan.runtime.load_in_8bit {
            true => value * num_parameters - (value - 1) * packable_weights(shape).min(num_parameters),
            false => weight_bytes(plan, num_parameters, shape),
        };
        let weights = shared(all_weights, 3);
        let reference = if full && plan.rloo.needs_reference() { shared(all_weights, 3) } else { 0 };
        let parameters = trainable_parameters(plan, num_parameters, shape);
        let trained = if full { 0 } else { shared(F32 * parameters, 3) };
        // Without ZeRO, the buckets in which several processes add their gradients are a copy of it.
        let copies = if stage == 0 && devices > 1 { 2 } else { 1 };
        let gradient = copies * shared(if full { value } else { F32 } * parameters, 2);
        // DeepSpeed keeps f32 values of the trained weights besides the moments.
        let masters = if stage > 0 { F32 * parameters } else { 0 };
        let optimizer = shared(optimizer_bytes(plan.optimizer.kind, parameters) + masters, 1);

        // The trainer samples all completions of a process at once.
        let per_step = u64::from(plan.training.prompts_per_step) * u64::from(plan.rloo.num_generations.get());
        let of_rank = per_step.div_ceil(devices);
        let rows = of_rank * u64::from(plan.rloo.steps_per_generation);
        let kv_cache = kv_token_bytes(shape, value) * shape.num_attention_layers() * rows * (prompt + completion);
        let batch = (u64::from(plan.training.micro_batch_tokens) / (prompt + completion)).clamp(1, of_rank.max(1));
        let logits = 2 * F32 * batch * completion * shape.vocab_size;
        let tokens = batch * (prompt + completion);
        let saved = value * tokens * saved_width(shape, plan.training.gradient_checkpointing);
        let activations = value * tokens * shape.num_hidden_layers * shape.hidden_size + saved;

        let offloaded = match (plan.runtime.offload, stage) {
            (false, _) => 0,
            (true, 3) => weights + reference + trained + optimizer,
            (true, _) => optimizer,
        };
        let process = if on_gpus { CUDA_CONTEXT_BYTES } else { PYTHON_BYTES };
        let resident = process + weights + reference + trained + optimizer - offloaded;
        // With ZeRO 3, every process gathers all weights to sample.
        let gathered = if stage == 3 { all_weights } else { 0 };
        let total = resident + (gathered + kv_cache).max(gradient + activations + logits);
        let each = Footprint {
            process,
            weights,
            reference,
            trained,
            gradient,
            optimizer,
            kv_cache,
            logits,
            activations,
            saved,
            allocator: 0,
            total,
        };
        Self { each, offloaded: offloaded * devices }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// 80 layers of a model of 70 billion weights.
    const LARGE: ModelShape = ModelShape {
        four_bit_weights: 0,
        nested_four_bit_weights: 0,
        hidden_size: 8192,
        intermediate_size: 28_672,
        num_hidden_layers: 80,
        num_attention_heads: 64,
        num_key_value_heads: 8,
        head_dim: 128,
        vocab_size: 128_256,
        num_windowed_layers: 0,
        window: u64::MAX,
        delta_net: None,
        has_output_gate: false,
    };
    const WEIGHTS: u64 = 70_000_000_000;

    fn plan(devices: u32, zero_stage: Option<u8>, offload: bool) -> Plan {
        let mut plan = crate::spec::example::resolved(json!({
            "model": "m", "dataset": {"records": [{"prompt": "p"}]}, "rewards": [{"type": "length"}],
            "rloo": {"num_generations": 8}, "training": {"prompts_per_step": 1, "max_steps": 2, "dtype": "bf16"},
        }));
        plan.training.prompts_per_step = 16;
        plan.resources.devices = devices;
        plan.runtime.zero_stage = zero_stage;
        plan.runtime.offload = offload;
        plan.runtime.guarantees.resume = ResumeGuarantee::Recorded;
        plan
    }

    fn of(devices: u32, zero_stage: Option<u8>, offload: bool) -> RanksFootprint {
        RanksFootprint::of(&plan(devices, zero_stage, offload), WEIGHTS, &LARGE, Some(1024))
    }

    #[test]
    fn zero_divides_what_its_stage_says_and_offload_moves_it_to_the_machine() {
        let [alone, two, three] = [of(8, None, false), of(8, Some(2), false), of(8, Some(3), false)];
        assert_eq!(alone.each.weights, 2 * WEIGHTS);
        assert_eq!((two.each.weights, three.each.weights), (2 * WEIGHTS, 2 * WEIGHTS / 8));
        // Several processes without ZeRO have a second copy of the gradient; ZeRO has an eighth of it.
        assert_eq!(alone.each.gradient, 16 * two.each.gradient);
        assert_eq!((two.each.gradient, two.each.optimizer), (three.each.gradient, three.each.optimizer));
        // Everything is gathered to sample, so a step does not fit into 80 GB.
        assert!(three.each.total > 140_000_000_000 && three.offloaded == 0);
        let offloaded = of(8, Some(3), true);
        let parts = three.each.weights + three.each.trained + three.each.optimizer;
        assert_eq!((offloaded.each.total, offloaded.offloaded), (three.each.total - parts, 8 * parts));
        assert_eq!(of(8, Some(2), true).offloaded, 8 * two.each.optimizer);
    }

    #[test]
    fn eight_bits_halve_the_linear_layers_of_16() {
        let mut plan = plan(1, None, false);
        plan.runtime.load_in_8bit = true;
        let bytes = RanksFootprint::of(&plan, WEIGHTS, &LARGE, None).each.weights;
        assert_eq!(bytes, 2 * WEIGHTS - packable_weights(&LARGE));
    }
}
