//! Estimates the memory that a job needs, by the engine's own arithmetic ([`super::footprint`]), and whether the machine has it.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::footprint::{Footprint, Place, RanksFootprint, SAVED_BYTES, rollout_server_bytes, trainable_parameters};
use super::{FieldError, MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS_ON_CPU, ModelFacts, Plan, PromptLengths, RuntimeName};

/// Estimated memory and tokens of a run. Everything is computed, nothing is measured. Null = the model's sizes are not known. Of a job
/// with several devices, the parts are those of each device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Estimate {
    /// The program that trains.
    #[serde(default)]
    pub runtime: RuntimeName,
    /// Number of devices that train together.
    #[serde(default)]
    pub devices: u32,
    /// Number of servers that sample; 0 = the program that trains also samples.
    #[serde(default)]
    pub rollout_servers: u32,
    /// Memory that each of these servers needs at least, in bytes.
    #[serde(default)]
    pub rollout_server_bytes: Option<u64>,
    /// Memory of the machine for the weights and moments that DeepSpeed keeps outside of the devices, for all together, in bytes.
    #[serde(default)]
    pub offloaded_bytes: u64,
    /// Number of weights in the base model.
    pub num_parameters: u64,
    /// Number of weights that are trained: those of the adapter, or all weights of the model.
    pub trainable_parameters: Option<u64>,
    /// Size of the base model's files, in bytes.
    pub model_bytes: u64,
    /// Memory of the process itself, or the GPU driver's overhead, in bytes.
    pub process_bytes: u64,
    /// Memory for the model's weights, in bytes.
    pub weights_bytes: Option<u64>,
    /// Memory for the frozen reference weights, in bytes. The KL penalty needs them in full fine-tuning, after a warm start or
    /// after a warm-up; otherwise 0.
    pub reference_bytes: Option<u64>,
    /// Memory for the weights of reward models that the worker runs, in bytes.
    #[serde(default)]
    pub reward_models_bytes: u64,
    /// Memory for the adapter, or in full fine-tuning for the buffer of all weights, in bytes.
    pub adapter_bytes: Option<u64>,
    /// Memory for the gradient of the trained weights, in bytes.
    pub gradient_bytes: Option<u64>,
    /// Memory for both moments of the optimizer, in bytes.
    pub optimizer_bytes: Option<u64>,
    /// Memory for the keys and values of the completions that are sampled together, at full length, in bytes.
    pub kv_cache_bytes: Option<u64>,
    /// Memory for logits that exist at the same time, in bytes.
    pub logits_bytes: Option<u64>,
    /// Memory for the activations of a micro-batch at full length, in bytes.
    pub activation_bytes: Option<u64>,
    /// Freed memory that the allocator keeps, in bytes.
    pub allocator_bytes: Option<u64>,
    /// Peak resident memory of the worker or peak GPU memory, in bytes. It is less than the sum of the parts, because rollout and
    /// training do not overlap.
    pub total_bytes: Option<u64>,
    /// Memory that a worker may use, on its GPU if it has one, in bytes; null = unknown. A job that needs more is rejected.
    pub memory_limit_bytes: Option<u64>,
    /// Size of one checkpoint on disk, in bytes.
    pub checkpoint_bytes: Option<u64>,
    /// Length of the longest prompt, in tokens; null = prompts were not counted.
    pub longest_prompt_tokens: Option<u64>,
    /// Maximum number of completion tokens that can be sampled in total.
    pub max_completion_tokens: u64,
}

/// The prompts of training and evaluation, and the resources that a worker may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits<'a> {
    /// Lengths of the longest prompts; `None` = unknown.
    pub lengths: Option<PromptLengths>,
    /// Memory that a worker on the CPU may use, in bytes; `None` = unknown.
    pub memory_bytes: Option<u64>,
    /// Memory used by reward models, in bytes.
    pub reward_model_bytes: u64,
    /// The devices that may run the job; empty = the CPU.
    pub places: &'a [Place],
    /// Micro-batch size requested by the job, in tokens; `None` = depends on the available memory.
    pub micro_batch_tokens: Option<u32>,
    /// Gradient checkpointing requested by the job; `None` = only if memory requires it.
    pub gradient_checkpointing: Option<bool>,
}

/// Minimum number of tokens to which a micro-batch is reduced to save memory.
const MIN_MICRO_BATCH_TOKENS: u32 = 256;

/// Chooses the micro-batch size and estimates the run's memory (on the first of the devices that may run the job). Fails if the
/// memory exceeds the limit.
#[expect(clippy::too_many_lines, reason = "one search, then one literal with every field of the estimate")]
pub(super) fn choose_micro_batch(
    plan: &mut Plan,
    model: &ModelFacts,
    limits: Limits<'_>,
) -> Result<Estimate, FieldError> {
    let longest = limits.lengths.map(|lengths| lengths.longest);
    let places = if limits.places.is_empty() { &[Place::Cpu] } else { limits.places };
    let colocated = plan.rollout.as_ref().filter(|rollout| rollout.colocate).map(|rollout| rollout.memory_share);
    let limit = |place: Place| {
        let limit = match place {
            Place::Cpu => limits.memory_bytes,
            Place::Cuda { .. } => place.usable_bytes(),
        }?;
        // A server on the same device has the share that the job gives it.
        Some((limit as f64 * (1.0 - colocated.unwrap_or(0.0))) as u64)
    };
    let needs = |plan: &Plan, tokens: u32, place: Place| {
        let shape = model.shape?;
        let mut needs = Footprint::on(place, plan, model.num_parameters, &shape, longest, u64::from(tokens));
        needs.total += limits.reward_model_bytes;
        Some(needs)
    };
    let fits_at = |plan: &Plan, tokens: u32, place: Place| match (needs(plan, tokens, place), limit(place)) {
        (Some(needs), Some(limit)) => needs.total <= limit,
        (_, _) => true,
    };
    let fits = |plan: &Plan, tokens: u32| places.iter().all(|place| fits_at(plan, tokens, *place));
    let sizes: Vec<u32> = match limits.micro_batch_tokens {
        Some(tokens) => vec![tokens],
        None => {
            let most = if places.contains(&Place::Cpu) { MICRO_BATCH_TOKENS_ON_CPU } else { MICRO_BATCH_TOKENS };
            (0..).map(|halvings| most >> halvings).take_while(|t| *t >= MIN_MICRO_BATCH_TOKENS).collect()
        }
    };
    // Small batches with kept activations are faster than large ones with recomputed activations. But kept activations should not
    // dominate a run's memory, except on a GPU, which runs one job at a time.
    let modest = |plan: &Plan, tokens: u32| {
        places
            .contains(&Place::Cpu)
            .then(|| needs(plan, tokens, Place::Cpu))
            .flatten()
            .is_none_or(|needs| needs.saved <= SAVED_BYTES)
    };
    let (keeps, recomputes) = match limits.gradient_checkpointing {
        None => (true, true),
        Some(checkpointing) => (!checkpointing, checkpointing),
    };
    let asked = limits.gradient_checkpointing == Some(false);
    plan.training.gradient_checkpointing = false;
    let kept = sizes.iter().copied().filter(|_| keeps).find(|t| fits(plan, *t) && (asked || modest(plan, *t)));
    let tokens = kept.unwrap_or_else(|| {
        plan.training.gradient_checkpointing = recomputes;
        let smallest = sizes.last().copied().unwrap_or(MIN_MICRO_BATCH_TOKENS);
        sizes.iter().copied().find(|tokens| fits(plan, *tokens)).unwrap_or(smallest)
    });
    plan.training.micro_batch_tokens = tokens;
    for place in places.iter().copied().filter(|place| !fits_at(plan, tokens, *place)) {
        if let (Some(needs), Some(limit)) = (needs(plan, tokens, place), limit(place)) {
            let sizes = (&needs, limit, limits.reward_model_bytes);
            return Err(too_large(plan, place, sizes, |plan| fits(plan, tokens)));
        }
    }
    let place = places[0];
    let ranks = model.shape.filter(|_| !plan.runtime.is_own());
    let ranks = ranks.map(|shape| RanksFootprint::of(plan, model.num_parameters, &shape, longest));
    let footprint = ranks.map(|ranks| ranks.each).or_else(|| needs(plan, tokens, place));
    let rollout = plan.rollout.as_ref();
    let of_server = rollout.and(model.shape);
    let trainable = model.shape.map(|shape| trainable_parameters(plan, model.num_parameters, &shape));
    let part = |part: fn(&Footprint) -> u64| footprint.as_ref().map(part);
    Ok(Estimate {
        runtime: plan.runtime.name,
        devices: plan.resources.devices,
        rollout_servers: rollout.map_or(0, |rollout| rollout.servers.len().max(1) as u32),
        rollout_server_bytes: of_server.map(|shape| rollout_server_bytes(plan, model.num_parameters, &shape, longest)),
        offloaded_bytes: ranks.map_or(0, |ranks| ranks.offloaded),
        num_parameters: model.num_parameters,
        trainable_parameters: trainable,
        model_bytes: model.size_bytes,
        process_bytes: part(|needs| needs.process).unwrap_or(0),
        weights_bytes: part(|needs| needs.weights),
        reference_bytes: part(|needs| needs.reference),
        reward_models_bytes: limits.reward_model_bytes,
        adapter_bytes: part(|needs| needs.trained),
        gradient_bytes: part(|needs| needs.gradient),
        optimizer_bytes: part(|needs| needs.optimizer),
        kv_cache_bytes: part(|needs| needs.kv_cache),
        logits_bytes: part(|needs| needs.logits),
        activation_bytes: part(|needs| needs.activations),
        allocator_bytes: part(|needs| needs.allocator),
        total_bytes: part(|needs| needs.total),
        memory_limit_bytes: limit(place),
        checkpoint_bytes: trainable.zip(part(|needs| needs.optimizer)).map(|(count, moments)| {
            // The frozen reference weights are in memory in addition to the trained weights.
            let copies = if plan.has_warmed_reference() { 2 } else { 1 };
            copies * 4 * count + moments
        }),
        longest_prompt_tokens: longest,
        max_completion_tokens: plan.totals.max_completion_tokens,
    })
}

/// Returns the error for a job that is too large: the numbers, and the settings that would make it fit.
fn too_large(
    plan: &Plan,
    place: Place,
    (needs, limit, reward_models): (&Footprint, u64, u64),
    fits: impl Fn(&Plan) -> bool,
) -> FieldError {
    let changed = |change: fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        fits(&plan)
    };
    let mut knobs = Vec::new();
    let completion = u64::from(plan.sampling.max_completion_length);
    let halvings = (1..20).map(|halvings| completion >> halvings).take_while(|length| *length > 0);
    let shorter = halvings.into_iter().find(|length| {
        let mut plan = plan.clone();
        plan.sampling.max_completion_length = *length as u32;
        fits(&plan)
    });
    if let Some(length) = shorter {
        knobs.push(format!("sampling.max_completion_length {completion} → {length}"));
    }
    if changed(|plan| plan.training.prompts_per_step = 1) {
        knobs.push("fewer training.prompts_per_step".to_owned());
    }
    if changed(|plan| plan.rloo.num_generations = NonZeroU32::MIN.saturating_add(1)) {
        knobs.push("fewer rloo.num_generations".to_owned());
    }
    if changed(|plan| plan.optimizer.kind = super::OptimizerKind::Adamw8bit) {
        knobs.push("optimizer.kind adamw_8bit".to_owned());
    }
    if plan.lora.is_none() {
        if changed(|plan| plan.rloo.beta = 0.0) {
            knobs.push("rloo.beta 0 (no frozen copy of the model as reference)".to_owned());
        }
        knobs.push("lora instead of full fine-tuning".to_owned());
    }
    let (pointer, advice) = match (shorter, knobs.is_empty()) {
        (_, true) => ("/model", "use a smaller model or a larger machine".to_owned()),
        (Some(_), false) => {
            ("/sampling/max_completion_length", format!("any of these changes makes the job fit: {}", knobs.join("; ")))
        }
        (None, false) if plan.lora.is_none() => {
            ("/lora", format!("these changes lower the memory that the job needs: {}", knobs.join("; ")))
        }
        (None, false) => {
            ("/training/prompts_per_step", format!("any of these changes makes the job fit: {}", knobs.join("; ")))
        }
    };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let has = match place {
        Place::Cpu => format!("a worker may use {} MiB (--memory-limit)", mib(limit)),
        Place::Cuda { .. } => format!("a run may use {} MiB of the GPU's memory (--gpu-memory)", mib(limit)),
    };
    let detail = format!(
        "the job needs about {} MiB (process {}, weights {}, reference {}, reward models {}, trained {}, gradient {}, optimizer {}, KV cache {}, logits {}, activations {}, allocator {}) and {has}: {advice}",
        mib(needs.total),
        mib(needs.process),
        mib(needs.weights),
        mib(needs.reference),
        mib(reward_models),
        mib(needs.trained),
        mib(needs.gradient),
        mib(needs.optimizer),
        mib(needs.kv_cache),
        mib(needs.logits),
        mib(needs.activations),
        mib(needs.allocator),
    );
    FieldError::new(pointer, "not_enough_memory", detail)
}
