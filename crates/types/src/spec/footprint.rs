//! Computes the memory of a run by the arithmetic of the engine: what it allocates in each phase, and how it splits its work.
//! `crates/engine/tests/it/memory.rs` compares the result with the measured peak.
//!
//! Weights are kept in `training.dtype`, or on the CPU in 4-bit codes; everything else on the CPU is f32. Memory of a GPU is computed in `device`.
//!
//! Longer than other files: one calculation, whose parts share their constants.

mod device;
mod ranks;

pub use ranks::RanksFootprint;

use super::{ComputeDtype, DeltaShape, LoraPlan, ModelShape, OptimizerKind, Plan, Reference};

/// The device that a run computes on, and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The CPU, with the machine's memory.
    Cpu,
    /// A GPU with CUDA support.
    Cuda {
        /// Memory of the GPU, in bytes; `None` = unknown.
        memory_bytes: Option<u64>,
    },
}

impl Place {
    /// Returns how much of a GPU's memory a run may use, in bytes; `None` = unknown, or the CPU.
    pub fn usable_bytes(self) -> Option<u64> {
        match self {
            Place::Cuda { memory_bytes } => memory_bytes.map(device::usable),
            Place::Cpu => None,
        }
    }
}

/// Maximum size of the KV cache in generation on the CPU, in bytes; at least one group always fits.
pub const KV_CACHE_BYTES: u64 = 1 << 30;

/// Maximum number of prompt tokens per prefill.
pub const PREFILL_TOKENS: u64 = 8192;

/// Maximum number of logits in one chunk of scored positions.
pub const MAX_LOGITS: u64 = 1 << 24;

/// Maximum number of logits in one chunk of scored positions on a GPU.
pub const CUDA_MAX_LOGITS: u64 = 1 << 27;

/// GPU memory that the driver uses for the process, in bytes: its context, the kernels, and cuBLAS with its workspaces for two
/// streams. As an NVIDIA H200 had it (benches/results/gpu_nvidia_h200.json: peaks beside estimates).
pub const CUDA_CONTEXT_BYTES: u64 = 960 << 20;

/// GPU memory that buffers leave free, in bytes. The driver needs it for kernels that are loaded late, for the stacks of their
/// threads, and for graphs.
pub const CUDA_KEPT_FREE_BYTES: u64 = 512 << 20;

/// Minimum number of positions in one chunk of scored positions.
pub const MIN_LOGIT_ROWS: u64 = 16;

/// Maximum size of the activations that a training forward pass keeps by default for its backward pass instead of
/// recomputing them, in bytes.
pub const SAVED_BYTES: u64 = 1 << 30;

/// Maximum size of the training buffers that are kept during a rollout for the next training pass, in bytes.
pub const KEPT_BYTES: u64 = 256 << 20;

/// Number of positions whose keys and values are allocated together.
const KV_BLOCK: u64 = 16;

/// Positions that a layer with a window keeps beyond the window on the CPU before it drops all of them at once.
const KV_UNSEEN: u64 = 256;

/// Number of outputs of a packed weight that are stored side by side.
const PANEL: u64 = 32;

/// Number of 32-bit words that the head keeps per position and chunk of the vocabulary, and the length of a chunk.
const HEAD_TABLE: u64 = 4;
const HEAD_CHUNK: u64 = 512;

/// Number of 8-bit values of an optimizer state that share a scale.
pub const OPTIMIZER_BLOCK: u64 = 256;

/// Memory of the program itself, in bytes: code, threads, tokenizer, HTTP client.
const PROCESS_BYTES: u64 = 24 << 20;

/// Assumed number of tokens of a prompt, if prompts were not counted.
const UNCOUNTED_PROMPT_TOKENS: u64 = 512;

/// Share of a rollout's or a training pass's buffers that the C library's allocator keeps after they were freed. The engine itself
/// reuses most buffers. Measured: `benches/results/memory.md`.
const ALLOCATOR_PERCENT: u64 = 5;

const F32: u64 = 4;

/// Memory of a run in bytes, by part. `total` is the peak over its phases and not the sum, because a rollout's KV cache and a
/// training step's activations do not exist at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Memory of the program itself.
    pub process: u64,
    /// Memory for the model's weights.
    pub weights: u64,
    /// Memory for the frozen reference weights that the KL penalty may need; otherwise 0.
    pub reference: u64,
    /// Memory for the adapter, or in full fine-tuning for the buffer of all weights.
    pub trained: u64,
    /// Memory for the gradient of the trained weights.
    pub gradient: u64,
    /// Memory for the optimizer's moments.
    pub optimizer: u64,
    /// Memory for the keys and values of a rollout.
    pub kv_cache: u64,
    /// Memory for logits that exist at the same time: next-token logits of a rollout or a chunk of scored
    /// positions, whichever is larger.
    pub logits: u64,
    /// Memory for a micro-batch's activations: each layer's input, what its backward pass reads, and its temporary buffers.
    pub activations: u64,
    /// The part of the activations that the backward pass of all layers reads and that could be recomputed.
    pub saved: u64,
    /// Freed memory that the C library's allocator keeps.
    pub allocator: u64,
    /// Peak memory of the run.
    pub total: u64,
}

/// Returns the number of weights that are trained.
pub fn trainable_parameters(plan: &Plan, num_parameters: u64, shape: &ModelShape) -> u64 {
    plan.lora.as_ref().map_or(num_parameters, |lora| {
        let of_name = |name: &String| {
            // A target module's name stands for one layer or for all of them.
            let layers = if name.starts_with("layers.") { 1 } else { layers_with(shape, last(name)) };
            let r = lora.rank_pattern.get(name).copied().unwrap_or(lora.r);
            in_plus_out(shape, last(name)) * layers * u64::from(r)
        };
        lora.target_modules.iter().map(of_name).sum()
    })
}

/// Groups of linear layers that read the same input, in any storage layout.
const QKV: [&str; 4] = ["q_proj", "k_proj", "v_proj", "qkv_proj"];
const GATE_UP: [&str; 4] = ["gate_proj", "up_proj", "gate_up_proj", "input_linear"];
const DOWN: [&str; 2] = ["down_proj", "output_linear"];

/// The projections of a Gated DeltaNet layer that read its input, and that of its output.
const DELTA_IN: [&str; 4] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"];
const DELTA_OUT: &str = "out_proj";

/// Returns the number of layers that have a module.
fn layers_with(shape: &ModelShape, module: &str) -> u64 {
    if DELTA_IN.contains(&module) || module == DELTA_OUT {
        shape.num_delta_layers()
    } else if QKV.contains(&module) || module == "o_proj" {
        shape.num_attention_layers()
    } else {
        shape.num_hidden_layers
    }
}

/// Returns the last part of a module's name.
fn last(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Returns the largest rank of an adapter in any layer.
fn largest_rank(lora: &LoraPlan) -> u64 {
    u64::from(lora.rank_pattern.values().copied().max().unwrap_or(0).max(lora.r))
}

fn in_plus_out(shape: &ModelShape, module: &str) -> u64 {
    let (queries, keys) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    let delta = |width: fn(&DeltaShape) -> u64| shape.hidden_size + shape.delta_net.as_ref().map_or(0, width);
    match module {
        "q_proj" if shape.has_output_gate => shape.hidden_size + 2 * queries,
        "q_proj" | "o_proj" => shape.hidden_size + queries,
        "in_proj_qkv" => delta(|net| net.conv_width),
        "in_proj_z" | DELTA_OUT => delta(|net| net.value_width),
        "in_proj_b" | "in_proj_a" => delta(|net| net.num_value_heads),
        "k_proj" | "v_proj" => shape.hidden_size + keys,
        "qkv_proj" => shape.hidden_size + queries + 2 * keys,
        "gate_up_proj" | "input_linear" => shape.hidden_size + 2 * shape.intermediate_size,
        _ => shape.hidden_size + shape.intermediate_size,
    }
}

/// Returns the size of both moments, in bytes.
pub fn optimizer_bytes(kind: OptimizerKind, parameters: u64) -> u64 {
    match kind {
        OptimizerKind::Adamw => 2 * F32 * parameters,
        OptimizerKind::Adamw8bit => 2 * (parameters + F32 * parameters.div_ceil(OPTIMIZER_BLOCK)),
    }
}

/// Returns the permanent GPU memory of a run, in bytes: the weights, and the f32 values and moments of the trained ones.
pub fn held_bytes(dtype: ComputeDtype, num_parameters: u64, kind: OptimizerKind, trained: u64) -> u64 {
    value_bytes(dtype) * num_parameters + F32 * trained + optimizer_bytes(kind, trained)
}

/// Returns how many sequences generation may decode at once, if each may grow to `tokens_per_row` tokens (including the prompt)
/// and, on a GPU, `held_bytes` are already in use.
pub fn generation_rows(
    place: Place,
    dtype: ComputeDtype,
    shape: &ModelShape,
    held_bytes: u64,
    tokens_per_row: u64,
) -> u64 {
    let (budget, row) = match place {
        // The length of the prompt alone is unknown, so prompt and completion may each fill an attention window.
        Place::Cpu => {
            let keys = kv_bytes(shape, tokens_per_row, tokens_per_row.min(2 * shape.window + KV_UNSEEN));
            (KV_CACHE_BYTES, keys.saturating_add(state_bytes(shape)))
        }
        Place::Cuda { .. } => {
            let layers = kv_token_bytes(shape, value_bytes(dtype)) * shape.num_attention_layers();
            (device::kv_budget(place.usable_bytes(), held_bytes), layers.saturating_mul(tokens_per_row))
        }
    };
    (budget / row.max(1)).max(1)
}

/// Returns the size of keys and values on the CPU, in bytes, for prompts and the completions that continue them,
/// each given as (number, length).
pub fn kv_cache_bytes(shape: &ModelShape, prompts: (u64, u64), completions: (u64, u64)) -> u64 {
    let positions = |prompt: u64, completion: u64| {
        prompts.0 * prompt.next_multiple_of(KV_BLOCK) + completions.0 * completion.next_multiple_of(KV_BLOCK)
    };
    let windowed = positions(prompts.1.min(shape.window), completions.1.min(shape.window + KV_UNSEEN));
    kv_bytes(shape, positions(prompts.1, completions.1), windowed) + (prompts.0 + completions.0) * state_bytes(shape)
}

/// Returns the size of a sequence's states in all Gated DeltaNet layers, in bytes.
fn state_bytes(shape: &ModelShape) -> u64 {
    shape.delta_net.map_or(0, |net| F32 * net.num_layers * net.state_size)
}

/// Returns the size of keys and values on the CPU, in bytes, for the number of positions in a layer without a window and in
/// one with a window.
fn kv_bytes(shape: &ModelShape, full: u64, windowed: u64) -> u64 {
    let full_layers = shape.num_attention_layers() - shape.num_windowed_layers;
    let positions = full_layers.saturating_mul(full).saturating_add(shape.num_windowed_layers.saturating_mul(windowed));
    kv_token_bytes(shape, F32).saturating_mul(positions)
}

/// Returns the size of keys and values of one token in one layer, in bytes.
fn kv_token_bytes(shape: &ModelShape, value_bytes: u64) -> u64 {
    2 * value_bytes * shape.num_key_value_heads * shape.head_dim
}

/// Returns the size of one weight, in bytes.
fn value_bytes(dtype: ComputeDtype) -> u64 {
    match dtype {
        ComputeDtype::F32 => F32,
        ComputeDtype::Bf16 => F32 / 2,
    }
}

/// Number of 4-bit weights that share a scale, and number of 8-bit scales that share one.
const CODE_BLOCK: u64 = 64;
const SCALE_BLOCK: u64 = 256;

/// Returns the number of weights of a decoder's linear layers that can be kept in 4 bits: rows must be whole blocks.
fn packable_weights(shape: &ModelShape) -> u64 {
    let (queries, projected) = shape.attention_widths();
    let (delta, values) = shape.delta_net.map_or((0, 0), |net| (net.width(), net.value_width));
    let (hidden, inter) = (shape.hidden_size, shape.intermediate_size);
    let matrices = [
        (shape.num_attention_layers(), projected, hidden),
        (shape.num_attention_layers(), hidden, queries),
        (shape.num_delta_layers(), delta, hidden),
        (shape.num_delta_layers(), hidden, values),
        (shape.num_hidden_layers, 2 * inter, hidden),
        (shape.num_hidden_layers, hidden, inter),
    ];
    let fits = matrices.iter().filter(|(_, _, inputs)| inputs.is_multiple_of(CODE_BLOCK));
    fits.map(|(layers, outputs, inputs)| layers * outputs * inputs).sum()
}

/// Returns the size of the base model's weights on the CPU, in bytes: 4-bit codes with their scales, and all other weights in the
/// precision of the products.
pub fn weight_bytes(plan: &Plan, num_parameters: u64, shape: &ModelShape) -> u64 {
    let (mut plain, mut nested) = (shape.four_bit_weights, shape.nested_four_bit_weights);
    if let Some(four_bit) = plan.training.four_bit() {
        let quantized = packable_weights(shape).saturating_sub(plain + nested);
        if four_bit.is_nested { nested += quantized } else { plain += quantized }
    }
    let scales = F32 * plain.div_ceil(CODE_BLOCK)
        + nested.div_ceil(CODE_BLOCK)
        + F32 * nested.div_ceil(CODE_BLOCK * SCALE_BLOCK);
    let others = num_parameters.saturating_sub(plain + nested);
    value_bytes(plan.training.dtype) * others + (plain + nested).div_ceil(2) + scales
}

impl Footprint {
    /// Computes the footprint of a run on this device; `prompt` is the longest prompt in tokens (`None` = not counted), and
    /// `micro_batch_tokens` the size of a micro-batch. On the CPU it is the process's memory, on a GPU the GPU's.
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

    /// Computes the footprint of a run on the CPU.
    pub fn of(
        plan: &Plan,
        num_parameters: u64,
        shape: &ModelShape,
        longest_prompt: Option<u64>,
        micro_batch_tokens: u64,
    ) -> Footprint {
        let prompt = longest_prompt.unwrap_or(UNCOUNTED_PROMPT_TOKENS).max(1);
        let completion = u64::from(plan.max_tokens_after_prompt());
        let group = u64::from(plan.rloo.num_generations.get());
        let per_step = u64::from(plan.training.prompts_per_step);
        let full = plan.lora.is_none();
        let with_reference = plan.rloo.needs_reference();
        let initial = plan.has_warmed_reference()
            || plan.warm_start.as_ref().is_some_and(|warm| warm.reference == Reference::Initial);

        let parameters = trainable_parameters(plan, num_parameters, shape);
        let weight_bytes = value_bytes(plan.training.dtype);
        let weights = self::weight_bytes(plan, num_parameters, shape);
        let packed_adapter = if full { 0 } else { packed_adapter_bytes(plan, shape) };
        let trained = F32 * parameters + packed_adapter;
        let reference = match (with_reference, full, initial) {
            (true, true, _) => weights,
            (true, false, true) => packed_adapter,
            (true, false, false) | (false, _, _) => 0,
        };
        let gradient = F32 * parameters;
        let optimizer = optimizer_bytes(plan.optimizer.kind, parameters);

        // Rollout: prompts with their completions until the cache is full. A prompt stays until its last row ends, so when rows end
        // and others start, each may belong to a different prompt.
        let prompts_per_block = per_step * u64::from(plan.rloo.steps_per_generation);
        let rows = generation_rows(Place::Cpu, plan.training.dtype, shape, 0, prompt + completion)
            .min(prompts_per_block * group)
            .max(group);
        let prompts = prompts_per_block.min(rows);
        let kv_cache = kv_cache_bytes(shape, (prompts, prompt), (rows, completion));
        let logits = filtered_bytes(plan, shape, rows);
        let prefill_tokens = (prompts * prompt).min(PREFILL_TOKENS.max(prompt));
        let prefill = F32 * prefill_tokens * forward_width(shape) + prompts * layer_state_bytes(shape);
        let [kv_cache, logits, prefill] = of_sampling(plan, [kv_cache, logits, prefill]);
        let rollout = kv_cache + logits.max(prefill);

        // Training: whole groups of one step until the micro-batch is full; each prompt is computed once.
        let group_tokens = group * (prompt + completion);
        let groups = (micro_batch_tokens / group_tokens).clamp(1, per_step);
        let warm_up_tokens = warm_up_tokens(plan, micro_batch_tokens);
        let tokens = (groups * (prompt + group * completion.saturating_sub(1))).max(warm_up_tokens);
        let targets = (groups * group * completion).max(warm_up_tokens);
        let head = F32 * targets * (4 * shape.hidden_size + HEAD_TABLE * shape.vocab_size.div_ceil(HEAD_CHUNK));
        let inputs = F32 * tokens * (shape.num_hidden_layers + 1) * shape.hidden_size;
        let saved = F32 * tokens * saved_width(shape, plan.training.gradient_checkpointing);
        let sequences = (groups * (1 + group)).max(u64::from(plan.warm_up.is_some()));
        let backward = F32 * tokens * backward_width(shape) + delta_backward_bytes(shape, tokens, sequences);
        let activations = inputs + saved + backward.max(head);
        let training = gradient + activations;
        let kept = activations.min(KEPT_BYTES);
        // New weights exist in addition to the old ones, the largest matrix at a time, both as computed and packed.
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

/// Returns parts of a rollout's memory, which is not needed where servers sample. Evaluations are sampled by the worker in any case.
fn of_sampling<const N: usize>(plan: &Plan, parts: [u64; N]) -> [u64; N] {
    match plan.rollout.is_some() && plan.eval.is_none() {
        true => [0; N],
        false => parts,
    }
}

/// Returns the memory that each rollout server needs, in bytes: the model, and the keys and values of its share of a rollout in 16 bits.
pub fn rollout_server_bytes(plan: &Plan, num_parameters: u64, shape: &ModelShape, longest_prompt: Option<u64>) -> u64 {
    let servers = plan.rollout.as_ref().map_or(1, |rollout| rollout.servers.len().max(1)) as u64;
    let prompt = longest_prompt.unwrap_or(UNCOUNTED_PROMPT_TOKENS).max(1);
    let block = u64::from(plan.training.prompts_per_step) * u64::from(plan.rloo.steps_per_generation);
    let prompts = plan.rollout.as_ref().map_or(block, |rollout| block.min(u64::from(rollout.max_concurrency)));
    let rows = prompts.div_ceil(servers) * u64::from(plan.rloo.num_generations.get());
    let tokens = rows * (prompt + u64::from(plan.sampling.max_completion_length));
    value_bytes(plan.training.dtype) * num_parameters + kv_token_bytes(shape, 2) * shape.num_attention_layers() * tokens
}

/// Returns the number of tokens in a micro-batch of the warm-up: whole rows until it is full, at least one row. Any of the tokens
/// may belong to an answer.
fn warm_up_tokens(plan: &Plan, micro_batch_tokens: u64) -> u64 {
    let Some(warm_up) = &plan.warm_up else { return 0 };
    let row = warm_up.longest_row_tokens.unwrap_or(2 * UNCOUNTED_PROMPT_TOKENS).max(1);
    row * (micro_batch_tokens / row).clamp(1, u64::from(warm_up.batch_size))
}

/// Returns the size of the adapter's packed factors, in bytes: A stacked, B block-diagonal over the modules that read the same
/// input, and each module's Bᵀ.
fn packed_adapter_bytes(plan: &Plan, shape: &ModelShape) -> u64 {
    let Some(lora) = &plan.lora else { return 0 };
    let (hidden, inter) = (shape.hidden_size, shape.intermediate_size);
    let (q, projected) = shape.attention_widths();
    let (delta, values) = shape.delta_net.map_or((0, 0), |net| (net.width(), net.value_width));
    let has = |name: &str| u64::from(lora.target_modules.iter().any(|module| last(module) == name));
    let sum = |names: &[&str]| names.iter().map(|name| has(name)).sum::<u64>();
    let fused = [
        (shape.num_attention_layers(), sum(&QKV), hidden, projected),
        (shape.num_attention_layers(), has("o_proj"), q, hidden),
        (shape.num_delta_layers(), sum(&DELTA_IN), hidden, delta),
        (shape.num_delta_layers(), has(DELTA_OUT), values, hidden),
        (shape.num_hidden_layers, sum(&GATE_UP), hidden, 2 * inter),
        (shape.num_hidden_layers, sum(&DOWN), inter, hidden),
    ];
    let rank = |blocks: u64| blocks * largest_rank(lora);
    let panels = |outputs: u64| outputs.next_multiple_of(PANEL);
    // Sizes of A, of B, and of each module's Bᵀ.
    let of_fused = |(layers, blocks, input, out): &(u64, u64, u64, u64)| {
        let transposed = if *blocks > 0 { panels(largest_rank(lora)) * out } else { 0 };
        layers * (panels(rank(*blocks)) * input + panels(*out) * rank(*blocks) + transposed)
    };
    F32 * fused.iter().map(of_fused).sum::<u64>()
}

/// Maximum number of rows whose tokens are chosen in parallel.
const FILTERED_AT_ONCE: u64 = 64;

/// Returns the memory of sampling on the CPU when it examines all logits, in bytes: the logits, and the weight and sort position of
/// each token for the rows in progress.
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

/// Returns the total width of the rows that exist at the same time in a layer's vector-Jacobian product, in
/// addition to the saved ones.
fn backward_width(shape: &ModelShape) -> u64 {
    let (q, projected) = shape.attention_widths();
    let kv = shape.num_key_value_heads * shape.head_dim;
    // The gate, its gradient, and the gated output.
    let gate = if shape.has_output_gate { 4 * q } else { 0 };
    let attention = projected + q + 2 * kv + gate;
    let delta = shape.delta_net.map_or(0, |net| net.width() + 2 * net.value_width);
    6 * shape.hidden_size + 4 * shape.intermediate_size + attention.max(delta)
}

/// Returns the total width of the rows that exist at the same time in a forward pass without gradient.
fn forward_width(shape: &ModelShape) -> u64 {
    let (q, projected) = shape.attention_widths();
    let attention = 2 * projected + q + 2 * shape.num_key_value_heads * shape.head_dim;
    let delta = shape.delta_net.map_or(0, |net| net.width() + net.value_width);
    4 * shape.hidden_size + 3 * shape.intermediate_size + attention.max(delta)
}

/// Returns the total width of the rows that a layer keeps for its backward pass: an attention layer, and a Gated DeltaNet layer.
fn saved_widths(shape: &ModelShape) -> [u64; 2] {
    let (q, projected) = shape.attention_widths();
    let around = shape.hidden_size + 2 * shape.intermediate_size;
    // The gate is kept once; queries, keys and values are kept before and after their rotation.
    let twice = if shape.has_output_gate { 2 * projected - q } else { 2 * projected };
    let attention = twice + q + around + 2 * shape.num_attention_heads;
    [attention, shape.delta_net.map_or(0, |net| net.width() + net.value_width + around)]
}

/// Returns the total width of the rows that are kept for the backward pass: those of all layers, or of the widest one if they
/// are recomputed layer by layer.
fn saved_width(shape: &ModelShape, gradient_checkpointing: bool) -> u64 {
    let [attention, delta] = saved_widths(shape);
    match gradient_checkpointing {
        true => attention.max(delta),
        false => attention * shape.num_attention_layers() + delta * shape.num_delta_layers(),
    }
}

/// Number of tokens between two states that the backward pass of a Gated DeltaNet layer keeps, and number of states of a sequence
/// beside them: the last one, its gradient, and the one that is changed.
const STATE_TOKENS: u64 = 64;
const STATES_OF_SEQUENCE: u64 = 3;

/// Number of rows whose intermediate values a Gated DeltaNet layer computes together.
const DELTA_ROWS: u64 = 512;

/// Returns the size of a sequence's state in one Gated DeltaNet layer, in bytes.
fn layer_state_bytes(shape: &ModelShape) -> u64 {
    shape.delta_net.map_or(0, |net| F32 * net.state_size)
}

/// Returns the memory of the states of one layer in its backward pass, in bytes.
fn delta_backward_bytes(shape: &ModelShape, tokens: u64, sequences: u64) -> u64 {
    let values = shape.delta_net.map_or(0, |net| 3 * net.conv_width + 2 * net.value_width);
    // Each sequence may have one more state than its tokens fill.
    let states = tokens / STATE_TOKENS + (1 + STATES_OF_SEQUENCE) * sequences;
    layer_state_bytes(shape) * states + F32 * values * tokens.min(DELTA_ROWS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: ModelShape = ModelShape {
        four_bit_weights: 0,
        nested_four_bit_weights: 0,
        hidden_size: 1024,
        intermediate_size: 4096,
        num_hidden_layers: 24,
        num_attention_heads: 16,
        num_key_value_heads: 1,
        head_dim: 64,
        vocab_size: 32_000,
        num_windowed_layers: 0,
        window: 0,
        delta_net: None,
        has_output_gate: false,
    };

    #[test]
    fn weights_in_four_bits_take_a_quarter() {
        let mut plan = crate::spec::example::resolved(serde_json::json!({
            "model": "m", "dataset": {"records": [{"prompt": "a"}, {"prompt": "b"}]},
            "rewards": [{"type": "length", "min_words": 1, "max_words": 2}],
            "training": {"prompts_per_step": 1, "dtype": "bf16"},
        }));
        let linear = packable_weights(&SHAPE);
        let (all, bits) = (linear + 1000, |plan: &Plan, shape: &ModelShape| weight_bytes(plan, linear + 1000, shape));
        assert_eq!(bits(&plan, &SHAPE), 2 * all);
        plan.training.load_in_4bit = true;
        let plain = bits(&plan, &SHAPE);
        assert_eq!(plain, 2 * 1000 + linear / 2 + 4 * linear.div_ceil(64));
        plan.training.use_bnb_nested_quant = true;
        let nested = bits(&plan, &SHAPE);
        assert!(nested < plain && (nested as f64) < 0.26 * 2.0 * all as f64 + 2000.0, "{nested} of {all}");
        // Layers that are stored in 4 bits stay as they are.
        let stored = ModelShape { four_bit_weights: linear, ..SHAPE };
        assert_eq!(bits(&plan, &stored), plain);
        plan.training.load_in_4bit = false;
        assert_eq!(bits(&plan, &stored), plain);
    }

    #[test]
    fn where_servers_sample_the_worker_needs_no_cache() {
        let document = serde_json::json!({
            "model": "m", "dataset": {"records": [{"prompt": "p"}]}, "rewards": [{"type": "length"}],
            "rollout": {"engine": "vllm", "servers": [{"url": "http://10.0.0.7:8000"}, {"url": "http://10.0.0.8:8000"}]},
            "rloo": {"num_generations": 8}, "training": {"prompts_per_step": 1, "max_steps": 2},
        });
        let mut served = crate::spec::example::resolved(document);
        served.training.prompts_per_step = 4;
        let mut own = served.clone();
        own.rollout = None;
        for place in [Place::Cpu, Place::Cuda { memory_bytes: Some(40 << 30) }] {
            let [served, own] =
                [&served, &own].map(|plan| Footprint::on(place, plan, 1_000_000_000, &SHAPE, Some(64), 1024));
            assert!(served.kv_cache == 0 && own.kv_cache > 0 && served.total <= own.total, "{place:?}");
        }
        // Two of the four prompts each, with eight completions.
        let tokens = 2 * 8 * (64 + u64::from(served.sampling.max_completion_length));
        let expected =
            4_000_000_000 + 2 * 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * SHAPE.num_hidden_layers * tokens;
        assert_eq!(rollout_server_bytes(&served, 1_000_000_000, &SHAPE, Some(64)), expected);
    }

    #[test]
    fn states_do_not_grow_with_the_sequence() {
        let net = DeltaShape {
            num_layers: 18,
            num_value_heads: 16,
            conv_width: 6144,
            value_width: 2048,
            state_size: 280_576,
        };
        let hybrid = ModelShape { delta_net: Some(net), has_output_gate: true, ..SHAPE };
        let cache = |shape: &ModelShape, tokens: u64| kv_cache_bytes(shape, (1, tokens), (4, tokens));
        let added = |shape: &ModelShape| cache(shape, 16_384) - cache(shape, 8192);
        assert_eq!(added(&hybrid), added(&SHAPE) / 4);
        assert_eq!(cache(&hybrid, 16) - cache(&SHAPE, 16) / 4, 5 * 4 * 18 * 280_576);
        // The states of one layer under recomputation, one per 64 tokens.
        let rows = 4 * 512 * (3 * 6144 + 2 * 2048);
        assert_eq!(delta_backward_bytes(&hybrid, 6400, 0), 100 * 4 * 280_576 + rows);
        let lora = |plan: &mut Plan, names: &[&str]| {
            let mut lora = LoraPlan::all_linear(16, 32.0);
            lora.target_modules = names.iter().map(|name| (*name).to_owned()).collect();
            plan.lora = Some(lora);
            trainable_parameters(plan, 0, &hybrid)
        };
        let mut plan = crate::spec::example::resolved(serde_json::json!({
            "model": "m", "dataset": {"records": [{"prompt": "a"}, {"prompt": "b"}]},
            "rewards": [{"type": "length", "min_words": 1, "max_words": 2}], "training": {"prompts_per_step": 1},
        }));
        assert_eq!(lora(&mut plan, &["q_proj"]), 6 * 16 * (1024 + 2 * 1024));
        assert_eq!(lora(&mut plan, &["in_proj_qkv", "out_proj"]), 18 * 16 * (1024 + 6144 + 1024 + 2048));
        assert_eq!(lora(&mut plan, &["in_proj_a", "up_proj"]), 16 * (18 * (1024 + 16) + 24 * (1024 + 4096)));
    }

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
