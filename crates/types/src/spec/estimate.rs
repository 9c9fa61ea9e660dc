//! What a job will need, by the engine's own arithmetic ([`super::footprint`]), and whether the machine has it.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::footprint::{Footprint, Place, SAVED_BYTES, trainable_parameters};
use super::{FieldError, MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS_ON_CPU, ModelFacts, Plan, PromptLengths};

/// Memory and tokens of a run, by arithmetic: nothing is measured. Null where the model's sizes are not known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Estimate {
    /// Weights of the base model.
    pub num_parameters: u64,
    /// Weights that are trained: the adapter's, or all.
    pub trainable_parameters: Option<u64>,
    /// The base model as stored, bytes.
    pub model_bytes: u64,
    /// The program itself, or what the GPU's driver takes, bytes.
    pub process_bytes: u64,
    /// The model's weights in memory, bytes.
    pub weights_bytes: Option<u64>,
    /// The frozen copy that the KL penalty needs in full fine-tuning, after a warm start or after a warm-up, bytes; else 0.
    pub reference_bytes: Option<u64>,
    /// The weights of reward models that the worker runs, bytes.
    #[serde(default)]
    pub reward_models_bytes: u64,
    /// The adapter, or in full fine-tuning the buffer of all weights, bytes.
    pub adapter_bytes: Option<u64>,
    /// The gradient of what is trained, bytes.
    pub gradient_bytes: Option<u64>,
    /// Both moments, bytes.
    pub optimizer_bytes: Option<u64>,
    /// Keys and values of the completions sampled together, at full length, bytes.
    pub kv_cache_bytes: Option<u64>,
    /// Logits alive together, bytes.
    pub logits_bytes: Option<u64>,
    /// Activations of a micro-batch at full length, bytes.
    pub activation_bytes: Option<u64>,
    /// What the allocator keeps of freed buffers, bytes.
    pub allocator_bytes: Option<u64>,
    /// The peak of the worker's resident memory, or of the GPU's, bytes. Less than the sum: rollout and training do not overlap.
    pub total_bytes: Option<u64>,
    /// What a worker may use, of its GPU where it has one, bytes; null when unknown. A job that needs more is refused.
    pub memory_limit_bytes: Option<u64>,
    /// One checkpoint on disk, bytes.
    pub checkpoint_bytes: Option<u64>,
    /// Tokens of the longest prompt; null when they were not counted.
    pub longest_prompt_tokens: Option<u64>,
    /// Most completion tokens that can be sampled in all.
    pub max_completion_tokens: u64,
}

/// Prompts of training and evaluation, and what a worker may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits<'a> {
    /// Of the longest prompts.
    pub lengths: Option<PromptLengths>,
    /// What a worker on the processor may use; None = unknown.
    pub memory_bytes: Option<u64>,
    /// Taken by reward models.
    pub reward_model_bytes: u64,
    /// What the job may be computed on; empty = the processor.
    pub places: &'a [Place],
    /// Asked for by the job; None = as memory allows.
    pub micro_batch_tokens: Option<u32>,
    /// Asked for by the job; None = as memory asks for.
    pub gradient_checkpointing: Option<bool>,
}

/// Micro-batches are not made smaller than this for memory's sake.
const MIN_MICRO_BATCH_TOKENS: u32 = 256;

/// Chooses the micro-batch and says what the run needs (at the first of the places); an error when that is more than there
/// is.
pub(super) fn fit(plan: &mut Plan, model: &ModelFacts, limits: Limits<'_>) -> Result<Estimate, FieldError> {
    let longest = limits.lengths.map(|lengths| lengths.longest);
    let places = if limits.places.is_empty() { &[Place::Cpu] } else { limits.places };
    let limit = |place: Place| match place {
        Place::Cpu => limits.memory_bytes,
        Place::Cuda { .. } => place.usable_bytes(),
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
    // Small batches whose activations are kept cost less than large ones whose activations are computed again; but what
    // is kept shall not be most of the memory that a run takes. A GPU's is there for one run.
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
    let footprint = needs(plan, tokens, place);
    let trainable = model.shape.map(|shape| trainable_parameters(plan, model.num_parameters, &shape));
    let part = |part: fn(&Footprint) -> u64| footprint.as_ref().map(part);
    Ok(Estimate {
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
            // The reference beside the weights.
            let copies = if plan.has_warmed_reference() { 2 } else { 1 };
            copies * 4 * count + moments
        }),
        longest_prompt_tokens: longest,
        max_completion_tokens: plan.totals.max_completion_tokens,
    })
}

/// The refusal: the numbers, and the knobs that would make it fit.
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
            knobs.push("rloo.beta 0 (no frozen copy as reference)".to_owned());
        }
        knobs.push("lora instead of full fine-tuning".to_owned());
    }
    let (pointer, advice) = match (shorter, knobs.is_empty()) {
        (_, true) => ("/model", "use a smaller model or a larger machine".to_owned()),
        (Some(_), false) => {
            ("/sampling/max_completion_length", format!("any of these makes it fit: {}", knobs.join("; ")))
        }
        (None, false) if plan.lora.is_none() => ("/lora", format!("what would help: {}", knobs.join("; "))),
        (None, false) => ("/training/prompts_per_step", format!("any of these makes it fit: {}", knobs.join("; "))),
    };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let has = match place {
        Place::Cpu => format!("a worker may use {} MiB (--memory-limit)", mib(limit)),
        Place::Cuda { .. } => format!("a run may use {} MiB of the GPU (--gpu-memory)", mib(limit)),
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
