//! Computes the GPU memory of a run: everything that the CUDA backend allocates, stage by stage of a layer.

use super::{
    CUDA_CONTEXT_BYTES, CUDA_KEPT_FREE_BYTES, CUDA_MAX_LOGITS, F32, Footprint, MIN_LOGIT_ROWS, ModelShape,
    PREFILL_TOKENS, Place, Plan, UNCOUNTED_PROMPT_TOKENS, generation_rows, held_bytes, optimizer_bytes,
    trainable_parameters, value_bytes,
};
use crate::spec::Reference;

/// Size of the KV cache if the GPU's memory is not known, in bytes.
const UNKNOWN_KV_BYTES: u64 = 8 << 30;

/// Number of positions per page of keys and values, and the size of the largest slab of pages in bytes.
const PAGE: u64 = 64;
const SLAB_BYTES: u64 = 256 << 20;

/// Bytes that summarize a chunk of 512 logits.
const HEAD_CELL: u64 = 12;
const HEAD_CHUNK: u64 = 512;

/// Share of a phase's memory that is lost to gaps between buffers of different sizes: 4 to 12 % on an NVIDIA H200.
const FRAGMENTS_PERCENT: u64 = 10;

/// Returns how much of a GPU's memory a run may use, in bytes. A margin is left because segments of buffers are not completely
/// full, and graphs are not counted.
pub(super) fn usable(memory_bytes: u64) -> u64 {
    memory_bytes.saturating_sub(CUDA_KEPT_FREE_BYTES + memory_bytes / 64)
}

/// Returns the maximum size of the KV cache in generation, in bytes: half of the memory that permanent buffers leave free. At least
/// one group always fits.
pub(super) fn kv_budget(usable_bytes: Option<u64>, held_bytes: u64) -> u64 {
    usable_bytes.map_or(UNKNOWN_KV_BYTES, |bytes| bytes.saturating_sub(held_bytes) / 2)
}

/// Widths of a layer's rows, in bytes per token.
struct Widths {
    /// Size of one value of the compute type, in bytes.
    value: u64,
    /// Width of the residual stream, in f32.
    stream: u64,
    /// Width of the normalized rows.
    normed: u64,
    /// Width of the output of attention.
    attended: u64,
    /// Width of the concatenated rows `[q | k | v]`.
    qkv: u64,
    /// Width of one f32 number per head.
    heads: u64,
    /// Width of the MLP's inner rows.
    inner: u64,
    /// Widths of x·Aᵀ for the modules that read the same input: qkv, o, gate and up, down.
    hidden: [u64; 4],
    /// Whether LoRA dropout is on.
    drops: bool,
}

impl Widths {
    fn new(plan: &Plan, shape: &ModelShape) -> Widths {
        let value = value_bytes(plan.training.dtype);
        let (q, kv) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
        Widths {
            value,
            stream: F32 * shape.hidden_size,
            normed: value * shape.hidden_size,
            attended: value * q,
            qkv: value * (q + 2 * kv),
            heads: F32 * shape.num_attention_heads,
            inner: value * shape.intermediate_size,
            hidden: ranks(plan).map(|rank| value * rank),
            drops: plan.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0),
        }
    }

    /// Returns the largest total width of the rows that exist at the same time in a forward pass without gradient.
    fn forward(&self) -> u64 {
        let Widths { stream, normed, attended, qkv, heads, inner, hidden, .. } = *self;
        let [of_qkv, _, of_gate_up, of_down] = hidden;
        let mlp = (normed + 2 * inner + of_gate_up).max(3 * inner).max(inner + stream + of_down);
        let project = normed + (2 * qkv).max(qkv + of_qkv);
        let attend = qkv + attended + heads;
        stream + project.max(attend).max(qkv + attended + stream + mlp)
    }

    /// Returns the width of the rows that a layer keeps for its backward pass, without the layer's input.
    fn saved(&self) -> u64 {
        2 * self.qkv + self.attended + self.heads + self.stream + 2 * self.inner
    }

    /// Returns the largest total width of the rows that exist at the same time in a layer's backward pass, in addition to the saved
    /// rows and including dL/dy.
    fn backward(&self) -> u64 {
        let Widths { value, stream, normed, attended, qkv, heads, inner, hidden, drops } = *self;
        let [of_qkv, of_o, of_gate_up, of_down] = hidden;
        let rounded = if value < F32 { normed } else { 0 };
        // Only with dropout: f32 sums of the masked gradients, and the masked input.
        let masked = |width: u64| if drops { 2 * F32 * (width / value) + width } else { 0 };
        // Saved activations that the backward pass has freed before a later stage.
        let (mlp, middle) = (2 * inner, 2 * inner + stream);
        let stages = [
            2 * inner + rounded + 2 * of_down + masked(inner),
            3 * inner,
            (2 * inner + 2 * normed + 2 * of_gate_up + masked(normed)).saturating_sub(mlp),
            (stream + rounded + attended + 2 * of_o + masked(attended)).saturating_sub(middle),
            (stream + attended + qkv + heads).saturating_sub(middle),
            (stream + 2 * normed + qkv + 2 * of_qkv + masked(normed)).saturating_sub(middle + qkv + attended + heads),
        ];
        stream + stages.into_iter().max().unwrap_or(0)
    }
}

/// Returns the ranks of the adapters that read the same input: qkv, o, gate and up, down.
fn ranks(plan: &Plan) -> [u64; 4] {
    let Some(lora) = &plan.lora else { return [0; 4] };
    // A target module's name that occurs in several layers counts once.
    let has = |name: &&&str| lora.target_modules.iter().any(|module| super::last(module) == **name);
    [&super::QKV[..], &["o_proj"], &super::GATE_UP, &super::DOWN]
        .map(|names| names.iter().filter(has).count() as u64 * super::largest_rank(lora))
}

/// Returns the size of the adapter's factors, in bytes: A stacked, and B block-diagonal over the modules that read the same input.
fn adapter_bytes(plan: &Plan, shape: &ModelShape) -> u64 {
    let (hidden, inter) = (shape.hidden_size, shape.intermediate_size);
    let (q, kv) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    let sizes = [hidden + q + 2 * kv, q + hidden, hidden + 2 * inter, inter + hidden];
    let values: u64 = ranks(plan).iter().zip(sizes).map(|(rank, size)| rank * size).sum();
    value_bytes(plan.training.dtype) * values * shape.num_hidden_layers
}

/// Returns the number of rows of logits that are computed at a time.
fn logit_rows(shape: &ModelShape, rows: u64) -> u64 {
    (CUDA_MAX_LOGITS / shape.vocab_size.next_multiple_of(PAGE).max(1)).max(MIN_LOGIT_ROWS).min(rows)
}

/// Returns the size of `rows` rows of logits and of their summaries, in bytes, with `bytes` per logit.
fn logit_bytes(shape: &ModelShape, rows: u64, bytes: u64) -> u64 {
    let vocab = shape.vocab_size;
    logit_rows(shape, rows) * (vocab.next_multiple_of(PAGE) * bytes + vocab.div_ceil(HEAD_CHUNK) * HEAD_CELL)
}

/// Returns the number of pages that the cache allocates when `needed` are needed; it grows by halves.
fn pages_held(needed: u64, page_bytes: u64) -> u64 {
    let most = (SLAB_BYTES / page_bytes.max(1)).max(1);
    let mut count = 0;
    while count < needed {
        count += (count / 2).clamp(8.min(most), most);
    }
    count
}

pub(super) fn footprint(
    place: Place,
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
    let (full, with_reference) = (plan.lora.is_none(), plan.rloo.needs_reference());
    let initial = plan.has_warmed_reference()
        || plan.warm_start.as_ref().is_some_and(|warm| warm.reference == Reference::Initial);
    let dtype = plan.training.dtype;
    let value = value_bytes(dtype);
    let widths = Widths::new(plan, shape);

    let parameters = trainable_parameters(plan, num_parameters, shape);
    let weights = value * num_parameters;
    let adapter = adapter_bytes(plan, shape);
    let reference = match (with_reference, full, initial) {
        (true, true, _) => weights,
        (true, false, true) => adapter,
        (true, false, false) | (false, _, _) => 0,
    };
    let (gradient, trained) = (F32 * parameters, F32 * parameters + adapter);
    let optimizer = optimizer_bytes(plan.optimizer.kind, parameters);
    let table = 2 * F32 * (prompt + completion).next_power_of_two().max(256) * shape.head_dim / 2;

    // Rollout: the pages of prompts are allocated before those of the rows, unless rows wait for others to end.
    let prompts_per_block = per_step * u64::from(plan.rloo.steps_per_generation);
    let all_rows = prompts_per_block * group;
    let held_always = held_bytes(dtype, num_parameters, plan.optimizer.kind, parameters);
    let room = generation_rows(place, dtype, shape, held_always, prompt + completion);
    let rows = room.min(all_rows).max(group);
    let prompts = prompts_per_block.min(rows);
    let page_bytes = shape.num_hidden_layers * PAGE * 2 * value * shape.num_key_value_heads * shape.head_dim;
    let held = |rows: u64| {
        let pages = prompts * prompt.div_ceil(PAGE) + rows * completion.saturating_sub(1).div_ceil(PAGE);
        pages_held(pages, page_bytes) * page_bytes
    };
    let kv_cache = held(rows);
    // The full logits leave the head only if the repetition penalty changes them on the host.
    let logits = match plan.sampling.repetition_penalty != 1.0 {
        true => F32 * rows * shape.vocab_size,
        false => logit_bytes(shape, rows, F32),
    };
    let prefill_tokens = (prompts * prompt).min(PREFILL_TOKENS.max(prompt));
    let before = if rows < all_rows { kv_cache } else { held(0) };
    let prefill = before + widths.forward() * prefill_tokens;
    let step = (widths.forward() * rows).max((widths.stream + widths.normed) * rows + logits);
    let [kv_cache, logits, prefill, step] = super::of_sampling(plan, [kv_cache, logits, prefill, step]);
    let rollout = prefill.max(kv_cache + step);

    // Training: whole groups of one step until the micro-batch is full; each prompt is computed once.
    let group_tokens = group * (prompt + completion);
    let groups = (micro_batch_tokens / group_tokens).clamp(1, per_step);
    let warm_up_tokens = super::warm_up_tokens(plan, micro_batch_tokens);
    let tokens = (groups * (prompt + group * completion.saturating_sub(1))).max(warm_up_tokens);
    let targets = (groups * group * completion).max(warm_up_tokens);
    let inputs = widths.stream * tokens * shape.num_hidden_layers;
    let layer = widths.saved() * tokens;
    let checkpointing = plan.training.gradient_checkpointing;
    let saved = layer * if checkpointing { 0 } else { shape.num_hidden_layers };
    let head = (widths.stream + 2 * widths.normed + 24) * targets + logit_bytes(shape, targets, F32 + value);
    let backward = widths.backward() * tokens + if checkpointing { layer } else { 0 };
    let forward = widths.stream * tokens + if checkpointing { widths.forward() * tokens } else { 0 };
    let activations = inputs + saved + backward.max(head).max(forward);
    let training = gradient + activations;
    // New weights exist in addition to the old ones, the largest matrix at a time, while the gradient is still allocated.
    let update = gradient + if full { value * shape.vocab_size * shape.hidden_size } else { 0 };

    let resident = CUDA_CONTEXT_BYTES + weights + reference + trained + optimizer + table;
    let phase = rollout.max(training).max(update);
    let allocator = phase * FRAGMENTS_PERCENT / 100;
    Footprint {
        process: CUDA_CONTEXT_BYTES,
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
