//! How much memory a run takes, by the arithmetic of the engine that will run it: what it allocates, in which phase, and
//! how it cuts its work. `crates/engine/tests/it/memory.rs` holds it against the measured peak.
//!
//! Weights are held in `training.dtype`; everything else on the CPU is f32. What a GPU holds is in `device`.

mod device;

use super::{ComputeDtype, LoraPlan, ModelShape, OptimizerKind, Plan, Reference};

/// What a run computes on, and how much memory of that there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The processor; its memory is the machine's.
    Cpu,
    /// A GPU.
    Cuda {
        /// Its memory, bytes; None = unknown.
        memory_bytes: Option<u64>,
    },
}

impl Place {
    /// What a run may take of the memory of a GPU, bytes; None where that is not known, or for the processor.
    pub fn usable_bytes(self) -> Option<u64> {
        match self {
            Place::Cuda { memory_bytes } => memory_bytes.map(device::usable),
            Place::Cpu => None,
        }
    }
}

/// Bytes of KV cache that generation may hold on the CPU, at least one group.
pub const KV_CACHE_BYTES: u64 = 1 << 30;

/// Prompt tokens that a prefill computes at once.
pub const PREFILL_TOKENS: u64 = 8192;

/// Logits alive in one chunk of scored positions, in elements.
pub const MAX_LOGITS: u64 = 1 << 24;

/// The same on a GPU.
pub const CUDA_MAX_LOGITS: u64 = 1 << 27;

/// What the driver takes of a GPU's memory for the process: its context, the kernels, cuBLAS and its workspace.
pub const CUDA_CONTEXT_BYTES: u64 = 640 << 20;

/// Memory of a GPU that buffers leave free: the driver needs room for kernels that it loads late, for the stacks of their
/// threads, and for graphs.
pub const CUDA_KEPT_FREE_BYTES: u64 = 512 << 20;

/// The fewest positions of such a chunk.
pub const MIN_LOGIT_ROWS: u64 = 16;

/// Activations that a training forward keeps for its backward instead of computing them again, where nothing is asked.
pub const SAVED_BYTES: u64 = 1 << 30;

/// Buffers of a training pass that stay for the next one while a rollout is generated, at most.
pub const KEPT_BYTES: u64 = 256 << 20;

/// Positions of a sequence's keys and values that are allocated together.
const KV_BLOCK: u64 = 16;

/// Positions of a completion that a layer with a window keeps besides it on the CPU, until it drops so many together.
const KV_UNSEEN: u64 = 256;

/// Outputs of a packed weight side by side.
const PANEL: u64 = 32;

/// Words of 32 bits that the head keeps of each position and chunk of the vocabulary, and the length of a chunk.
const HEAD_TABLE: u64 = 4;
const HEAD_CHUNK: u64 = 512;

/// Values that share a scale in 8-bit optimizer states.
pub const OPTIMIZER_BLOCK: u64 = 256;

/// The program itself: code, threads, tokenizer, HTTP client.
const PROCESS_BYTES: u64 = 24 << 20;

/// Prompt tokens assumed where they were not counted.
const UNCOUNTED_PROMPT_TOKENS: u64 = 512;

/// Of a rollout's or a training pass's buffers: what the C library's allocator keeps of those that were freed. Most are
/// used again by the engine itself. Measured: `benches/results/memory.md`.
const ALLOCATOR_PERCENT: u64 = 5;

const F32: u64 = 4;

/// Memory of a run in bytes, part by part. `total` is the peak over its phases, not the sum: a rollout's KV cache and a
/// training step's activations are not alive together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// The program itself.
    pub process: u64,
    /// Weights of the model.
    pub weights: u64,
    /// The frozen copy that the KL penalty needs, where it is one.
    pub reference: u64,
    /// The adapter, or in full fine-tuning the buffer of all weights.
    pub trained: u64,
    /// Its gradient.
    pub gradient: u64,
    /// Moments.
    pub optimizer: u64,
    /// Keys and values of a rollout.
    pub kv_cache: u64,
    /// Logits alive at once: next-token logits of a rollout or a chunk of scored positions, whichever is more.
    pub logits: u64,
    /// A micro-batch's activations: what each layer began with, what its backward reads, and what it takes.
    pub activations: u64,
    /// Of these, what the backward of all layers reads: it could be computed again.
    pub saved: u64,
    /// What the C library's allocator keeps of buffers that were freed.
    pub allocator: u64,
    /// The peak.
    pub total: u64,
}

/// Weights that are trained.
pub fn trainable_parameters(plan: &Plan, num_parameters: u64, shape: &ModelShape) -> u64 {
    plan.lora.as_ref().map_or(num_parameters, |lora| {
        let of_name = |name: &String| {
            // A name in one layer, or in all of them.
            let layers = if name.starts_with("layers.") { 1 } else { shape.num_hidden_layers };
            let r = lora.rank_pattern.get(name).copied().unwrap_or(lora.r);
            in_plus_out(shape, last(name)) * layers * u64::from(r)
        };
        lora.target_modules.iter().map(of_name).sum()
    })
}

/// Linear layers that read the same input, however they are stored.
const QKV: [&str; 4] = ["q_proj", "k_proj", "v_proj", "qkv_proj"];
const GATE_UP: [&str; 4] = ["gate_proj", "up_proj", "gate_up_proj", "input_linear"];
const DOWN: [&str; 2] = ["down_proj", "output_linear"];

/// A module's own name.
fn last(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// The largest rank that an adapter has somewhere.
fn largest_rank(lora: &LoraPlan) -> u64 {
    u64::from(lora.rank_pattern.values().copied().max().unwrap_or(0).max(lora.r))
}

fn in_plus_out(shape: &ModelShape, module: &str) -> u64 {
    let (queries, keys) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    match module {
        "q_proj" | "o_proj" => shape.hidden_size + queries,
        "k_proj" | "v_proj" => shape.hidden_size + keys,
        "qkv_proj" => shape.hidden_size + queries + 2 * keys,
        "gate_up_proj" | "input_linear" => shape.hidden_size + 2 * shape.intermediate_size,
        _ => shape.hidden_size + shape.intermediate_size,
    }
}

/// Bytes of both moments.
pub fn optimizer_bytes(kind: OptimizerKind, parameters: u64) -> u64 {
    match kind {
        OptimizerKind::Adamw => 2 * F32 * parameters,
        OptimizerKind::Adamw8bit => 2 * (parameters + F32 * parameters.div_ceil(OPTIMIZER_BLOCK)),
    }
}

/// What a GPU holds all the time: the weights, and of what is trained its values in f32 and their moments.
pub fn held_bytes(dtype: ComputeDtype, num_parameters: u64, kind: OptimizerKind, trained: u64) -> u64 {
    value_bytes(dtype) * num_parameters + F32 * trained + optimizer_bytes(kind, trained)
}

/// Sequences that generation may decode at once, where each may grow to `tokens_per_row` tokens (prompt included), of a
/// model of this shape; on a GPU beside so many bytes that it holds.
pub fn generation_rows(
    place: Place,
    dtype: ComputeDtype,
    shape: &ModelShape,
    held_bytes: u64,
    tokens_per_row: u64,
) -> u64 {
    let (budget, row) = match place {
        // How much of it is the prompt's is not known: both may fill a window.
        Place::Cpu => {
            (KV_CACHE_BYTES, kv_bytes(shape, tokens_per_row, tokens_per_row.min(2 * shape.window + KV_UNSEEN)))
        }
        Place::Cuda { .. } => {
            let layers = kv_token_bytes(shape, value_bytes(dtype)) * shape.num_hidden_layers;
            (device::kv_budget(place.usable_bytes(), held_bytes), layers.saturating_mul(tokens_per_row))
        }
    };
    (budget / row.max(1)).max(1)
}

/// Keys and values on the CPU, bytes, of prompts and of the completions that continue them: how many, and how long each.
pub fn kv_cache_bytes(shape: &ModelShape, prompts: (u64, u64), completions: (u64, u64)) -> u64 {
    let positions = |prompt: u64, completion: u64| {
        prompts.0 * prompt.next_multiple_of(KV_BLOCK) + completions.0 * completion.next_multiple_of(KV_BLOCK)
    };
    let windowed = positions(prompts.1.min(shape.window), completions.1.min(shape.window + KV_UNSEEN));
    kv_bytes(shape, positions(prompts.1, completions.1), windowed)
}

/// Keys and values on the CPU, bytes, from the positions that a layer holds: one without a window, and one with it.
fn kv_bytes(shape: &ModelShape, full: u64, windowed: u64) -> u64 {
    let full_layers = shape.num_hidden_layers - shape.num_windowed_layers;
    let positions = full_layers.saturating_mul(full).saturating_add(shape.num_windowed_layers.saturating_mul(windowed));
    kv_token_bytes(shape, F32).saturating_mul(positions)
}

/// Keys and values of a token in a layer.
fn kv_token_bytes(shape: &ModelShape, value_bytes: u64) -> u64 {
    2 * value_bytes * shape.num_key_value_heads * shape.head_dim
}

/// Of a weight.
fn value_bytes(dtype: ComputeDtype) -> u64 {
    match dtype {
        ComputeDtype::F32 => F32,
        ComputeDtype::Bf16 => F32 / 2,
    }
}

impl Footprint {
    /// Of a run at this place, whose longest prompt has so many tokens (`None` = not counted) and whose micro-batches hold
    /// so many: the process's memory on the CPU, the GPU's on a GPU.
    pub fn on(
        place: Place,
        plan: &Plan,
        num_parameters: u64,
        shape: &ModelShape,
        longest_prompt: Option<u64>,
        micro_batch_tokens: u64,
    ) -> Footprint {
        match place {
            Place::Cpu => Footprint::of(plan, num_parameters, shape, longest_prompt, micro_batch_tokens),
            Place::Cuda { .. } => {
                device::footprint(place, plan, num_parameters, shape, longest_prompt, micro_batch_tokens)
            }
        }
    }

    /// Peak on the CPU, bytes, of a process that generates and never trains: first with the base model, then with the
    /// trained weights, `plan.rloo.num_generations` completions of one prompt at once.
    pub fn of_generation(plan: &Plan, num_parameters: u64, shape: &ModelShape, prompt: u64) -> u64 {
        let (rows, completion) =
            (u64::from(plan.rloo.num_generations.get()), u64::from(plan.sampling.max_completion_length));
        let parameters = trainable_parameters(plan, num_parameters, shape);
        let weight_bytes = value_bytes(plan.training.dtype);
        // The largest matrix as it comes and packed, while the weights of full fine-tuning take the base model's place.
        let trained = match plan.lora {
            Some(_) => F32 * parameters + packed_adapter_bytes(plan, shape),
            None => F32 * parameters + (F32 + weight_bytes) * shape.vocab_size * shape.hidden_size,
        };
        let kv_cache = kv_cache_bytes(shape, (1, prompt), (rows, completion));
        let logits = filtered_bytes(plan, shape, rows);
        let prefill = F32 * prompt.min(PREFILL_TOKENS) * forward_width(shape);
        let rollout = kv_cache + logits.max(prefill);
        PROCESS_BYTES + weight_bytes * num_parameters + trained + rollout + rollout * ALLOCATOR_PERCENT / 100
    }

    /// Of a run on the CPU.
    pub fn of(
        plan: &Plan,
        num_parameters: u64,
        shape: &ModelShape,
        longest_prompt: Option<u64>,
        micro_batch_tokens: u64,
    ) -> Footprint {
        let prompt = longest_prompt.unwrap_or(UNCOUNTED_PROMPT_TOKENS).max(1);
        let completion = u64::from(plan.sampling.max_completion_length);
        let group = u64::from(plan.rloo.num_generations.get());
        let per_step = u64::from(plan.training.prompts_per_step);
        let full = plan.lora.is_none();
        let with_reference = plan.rloo.needs_reference();
        let initial = plan.has_warmed_reference()
            || plan.warm_start.as_ref().is_some_and(|warm| warm.reference == Reference::Initial);

        let parameters = trainable_parameters(plan, num_parameters, shape);
        let weight_bytes = value_bytes(plan.training.dtype);
        let weights = weight_bytes * num_parameters;
        let packed_adapter = if full { 0 } else { packed_adapter_bytes(plan, shape) };
        let trained = F32 * parameters + packed_adapter;
        let reference = match (with_reference, full, initial) {
            (true, true, _) => weights,
            (true, false, true) => packed_adapter,
            (true, false, false) | (false, _, _) => 0,
        };
        let gradient = F32 * parameters;
        let optimizer = optimizer_bytes(plan.optimizer.kind, parameters);

        // Rollout: prompts with their completions until the cache is full. A prompt stays until its last row ends, so where
        // rows leave and others join, each may be of a prompt of its own.
        let prompts_per_block = per_step * u64::from(plan.rloo.steps_per_generation);
        let rows = generation_rows(Place::Cpu, plan.training.dtype, shape, 0, prompt + completion)
            .min(prompts_per_block * group)
            .max(group);
        let prompts = prompts_per_block.min(rows);
        let kv_cache = kv_cache_bytes(shape, (prompts, prompt), (rows, completion));
        let logits = filtered_bytes(plan, shape, rows);
        let prefill_tokens = (prompts * prompt).min(PREFILL_TOKENS.max(prompt));
        let prefill = F32 * prefill_tokens * forward_width(shape);
        let rollout = kv_cache + logits.max(prefill);

        // Training: whole groups of one step until the micro-batch is full; their prompts are computed once.
        let group_tokens = group * (prompt + completion);
        let groups = (micro_batch_tokens / group_tokens).clamp(1, per_step);
        let warm_up_tokens = warm_up_tokens(plan, micro_batch_tokens);
        let tokens = (groups * (prompt + group * completion.saturating_sub(1))).max(warm_up_tokens);
        let targets = (groups * group * completion).max(warm_up_tokens);
        let head = F32 * targets * (4 * shape.hidden_size + HEAD_TABLE * shape.vocab_size.div_ceil(HEAD_CHUNK));
        let inputs = F32 * tokens * (shape.num_hidden_layers + 1) * shape.hidden_size;
        let layer = F32 * tokens * saved_width(shape);
        let saved = layer * if plan.training.gradient_checkpointing { 1 } else { shape.num_hidden_layers };
        let backward = F32 * tokens * backward_width(shape);
        let activations = inputs + saved + backward.max(head);
        let training = gradient + activations;
        let kept = activations.min(KEPT_BYTES);
        // New weights beside the old ones, the largest matrix at a time, as they come and packed.
        let update = gradient + if full { (F32 + weight_bytes) * shape.vocab_size * shape.hidden_size } else { 0 };

        let resident = PROCESS_BYTES + weights + reference + trained + optimizer;
        let phase = (rollout + kept).max(training).max(update);
        let allocator = rollout.max(training - gradient) * ALLOCATOR_PERCENT / 100;
        Footprint {
            process: PROCESS_BYTES,
            weights,
            reference,
            trained,
            gradient,
            optimizer,
            kv_cache,
            logits,
            activations,
            saved,
            allocator,
            total: resident + phase + allocator,
        }
    }
}

/// Tokens of a warm-up's micro-batch: whole rows until it is full, at least one. Any of them may be the answer's.
fn warm_up_tokens(plan: &Plan, micro_batch_tokens: u64) -> u64 {
    let Some(warm_up) = &plan.warm_up else { return 0 };
    let row = warm_up.longest_row_tokens.unwrap_or(2 * UNCOUNTED_PROMPT_TOKENS).max(1);
    row * (micro_batch_tokens / row).clamp(1, u64::from(warm_up.batch_size))
}

/// The factors that compute an adapter, packed in panels: A stacked, B block-diagonal over the modules that read the same
/// input, and each module's Bᵀ.
fn packed_adapter_bytes(plan: &Plan, shape: &ModelShape) -> u64 {
    let Some(lora) = &plan.lora else { return 0 };
    let (hidden, inter) = (shape.hidden_size, shape.intermediate_size);
    let (q, kv) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    let has = |name: &str| u64::from(lora.target_modules.iter().any(|module| last(module) == name));
    let sum = |names: &[&str]| names.iter().map(|name| has(name)).sum::<u64>();
    let fused = [
        (sum(&QKV), hidden, q + 2 * kv),
        (has("o_proj"), q, hidden),
        (sum(&GATE_UP), hidden, 2 * inter),
        (sum(&DOWN), inter, hidden),
    ];
    let rank = |blocks: u64| blocks * largest_rank(lora);
    let panels = |outputs: u64| outputs.next_multiple_of(PANEL);
    // A, B, and Bᵀ of each module.
    let of_fused = |(blocks, input, out): &(u64, u64, u64)| {
        let transposed = if *blocks > 0 { panels(largest_rank(lora)) * out } else { 0 };
        panels(rank(*blocks)) * input + panels(*out) * rank(*blocks) + transposed
    };
    let per_layer: u64 = fused.iter().map(of_fused).sum();
    F32 * per_layer * shape.num_hidden_layers
}

/// Rows whose tokens are chosen side by side, at most.
const FILTERED_AT_ONCE: u64 = 64;

/// What sampling takes on the processor where it looks at all logits: these, and of the rows that are under way each token's
/// weight and place in their order.
fn filtered_bytes(plan: &Plan, shape: &ModelShape, rows: u64) -> u64 {
    let sampling = &plan.sampling;
    let filters = sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0;
    match (filters, sampling.repetition_penalty != 1.0) {
        (false, false) => 0,
        (_, penalized) => {
            let tensor_and_copy = if penalized { 2 * F32 } else { F32 };
            (tensor_and_copy * rows + 3 * F32 * rows.min(FILTERED_AT_ONCE)) * shape.vocab_size
        }
    }
}

/// Widths of the rows alive together in a layer's vector-Jacobian product, besides what the forward saved.
fn backward_width(shape: &ModelShape) -> u64 {
    let (q, kv) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    6 * shape.hidden_size + (q + 2 * kv) + q + 4 * shape.intermediate_size + 2 * kv
}

/// The same of a forward pass without gradient.
fn forward_width(shape: &ModelShape) -> u64 {
    let (q, kv) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    4 * shape.hidden_size + 2 * (q + 2 * kv) + q + 3 * shape.intermediate_size + 2 * kv
}

/// Widths of the rows that a layer keeps for its backward.
fn saved_width(shape: &ModelShape) -> u64 {
    let (q, kv) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    2 * (q + 2 * kv) + q + shape.hidden_size + 2 * shape.intermediate_size + 2 * shape.num_attention_heads
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: ModelShape = ModelShape {
        hidden_size: 1024,
        intermediate_size: 4096,
        num_hidden_layers: 24,
        num_attention_heads: 16,
        num_key_value_heads: 1,
        head_dim: 64,
        vocab_size: 32_000,
        num_windowed_layers: 0,
        window: 0,
    };

    #[test]
    fn a_window_bounds_the_cache_on_the_cpu_alone() {
        let windowed = ModelShape { num_windowed_layers: 20, window: 512, ..SHAPE };
        let cache = |shape: &ModelShape, tokens: u64| kv_cache_bytes(shape, (1, tokens), (4, tokens));
        assert_eq!(cache(&windowed, 512), cache(&SHAPE, 512));
        let added = |shape: &ModelShape| cache(shape, 16_384) - cache(shape, 8192);
        assert_eq!(added(&windowed), added(&SHAPE) / 6);
        let rows = |place: Place, shape: &ModelShape| generation_rows(place, ComputeDtype::F32, shape, 0, 16_384);
        assert!(rows(Place::Cpu, &windowed) > 3 * rows(Place::Cpu, &SHAPE));
        let gpu = Place::Cuda { memory_bytes: Some(40 << 30) };
        assert_eq!(rows(gpu, &windowed), rows(gpu, &SHAPE));
    }
}
