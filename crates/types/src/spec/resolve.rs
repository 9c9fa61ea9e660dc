//! Resolves a [`JobSpec`] to a [`Plan`], with facts about the model and the data.
//!
//! This file is longer than others because each check uses the results of the previous ones, and all errors are reported at once.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::environments;
use super::estimate::{Estimate, Limits, choose_micro_batch};
use super::evaluation::{FEWEST_TEST_ROWS, shared_prompts};
use super::facts::{Context, DatasetFacts, ModelFacts};
use super::footprint::Place;
use super::mixture::Mixture;
use super::oversight::resolve_metrics;
use super::prompts::one_of_several_detail;
use super::reader::shown;
use super::rloo;
use super::rollouts;
use super::runtime;
use super::split::{Split, mixture_of, split};
use super::warm;
use super::warm_up;
use super::{
    ComputeDtype, DatasetSource, Estimator, EvalPlan, EvalSpec, FieldError, GuardPlan, JobSpec, LoraPlan, ModelPlan,
    OnInvalid, Plan, RewardKind, RewardModelPlan, RewardPlan, SamplingPlan, Totals, TrainingPlan, low_lora_rate,
};

/// A warning about a setting that is legal but probably not intended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Warning {
    /// JSON pointer to the setting.
    pub pointer: String,
    /// Stable warning code in snake_case.
    pub code: String,
    /// Explanation of the consequence, and how to change it.
    pub detail: String,
}

/// Code of the warning, and of the preflight's finding, that an adapter's learning rate is low.
const LOW_LORA_RATE: &str = "learning_rate_low_for_lora";
/// Code of the warning, in a validation and in a run, that evaluation and training share prompts.
pub const SHARED_PROMPTS: &str = "eval_prompts_in_training";
/// Code of the warning that the verdict and training share prompts.
const TEST_IN_TRAINING: &str = "test_prompts_in_training";

/// A job that can run, because its settings are complete and valid.
#[derive(Debug, Clone)]
pub struct Resolution {
    /// The resolved plan of the job.
    pub plan: Plan,
    /// Warnings for the user.
    pub warnings: Vec<Warning>,
    /// Estimated memory and tokens of the run.
    pub estimate: Estimate,
}

/// Resolves a job, or returns all of its errors. The list may be empty if facts about the model or the data are missing.
#[expect(clippy::too_many_lines, reason = "one check after another, in the order in which errors are reported")]
pub fn resolve(spec: &JobSpec, context: &Context) -> Result<Resolution, Vec<FieldError>> {
    let mut errors = Vec::new();
    for (facts, at) in context.datasets() {
        check_dataset(spec, facts, context.model.as_ref(), at, &mut errors);
    }
    warm_up::check(spec, context, &mut errors);
    let sampling = fit_completions(spec, context, &mut errors);
    rloo::check(spec, &sampling, &mut errors);
    rollouts::check(spec, &mut errors);
    environments::check(spec, context, &mut errors);
    let runtime = runtime::choose(spec, context, &mut errors);
    let (checkpoints, early_stopping) = resolve_metrics(spec, &mut errors);
    let Some(dataset) = &context.dataset else { return Err(errors) };
    let split = split(dataset, spec);
    if spec.eval.as_ref().is_some_and(|eval| eval.fraction.is_some()) && split.evaluated() == 0 && dataset.num_rows > 0
    {
        let detail = "all prompts are equal, and equal prompts are never divided between training and evaluation: give an evaluation dataset, or add prompts";
        errors.push(FieldError::new("/eval/fraction", "nothing_to_hold_out", detail));
    }
    let mixture = mixture_of(dataset, &split);
    if let Some(error) = unusual_shares(dataset, &mixture).or_else(|| smaller_than_a_block(spec, &mixture, &split)) {
        errors.push(error);
        return Err(errors);
    }
    let Some(model) = &context.model else { return Err(errors) };
    errors.extend(four_bit_without_adapter(spec, model).filter(|_| runtime.is_own()));
    let lora = match (&spec.warm_start, &context.warm_start) {
        (Some(_), Some(facts)) => warm::adapter(spec, facts, model, &mut errors),
        (Some(_), None) => return Err(errors),
        (None, _) => spec.lora.clone().and_then(|lora| modules_of(spec, lora, model, &mut errors)),
    };
    errors.extend(beyond_all_places(model, context).filter(|_| runtime.is_own()));
    errors.extend(full_with_states(model).filter(|_| lora.is_none() && runtime.is_own()));
    let eval = match (&spec.eval, &context.eval_dataset) {
        (None, _) => None,
        (Some(eval), _) if eval.fraction.is_some() => {
            Some(plan_eval((eval, spec.environment.is_some()), dataset, &split, context))
        }
        (Some(eval), Some(facts)) => Some(plan_eval((eval, spec.environment.is_some()), facts, &split, context)),
        (Some(_), None) => return Err(errors),
    };
    if spec.warm_up.is_some() && context.warm_up_dataset.is_none() {
        return Err(errors);
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let (training, totals) = plan_training(spec, &sampling, &mixture);
    let mut plan = Plan {
        name: spec.name.clone(),
        model: ModelPlan { id: model.id.clone(), sha256: model.sha256.clone() },
        dataset: dataset.plan(),
        eval,
        rewards: spec.rewards.clone(),
        reward_models: context.reward_models.iter().map(|(id, facts)| (id.clone(), facts.sha256.clone())).collect(),
        rloo: spec.rloo.clone(),
        sampling,
        rollout: spec.rollout.clone(),
        environment: spec.environment.clone(),
        lora,
        warm_start: spec.warm_start.clone().map(|warm_start| warm::found(warm_start, context)),
        warm_up: context.warm_up_dataset.as_ref().and_then(|facts| warm_up::plan(spec, facts, facts.plan())),
        optimizer: spec.optimizer.clone(),
        training,
        checkpoints,
        certificate: spec.certificate.clone(),
        early_stopping,
        doctor: spec.doctor.clone(),
        runtime,
        resources: spec.resources.clone(),
        metadata: spec.metadata.clone(),
        totals,
        arithmetic: spec.arithmetic,
    };
    // The estimate of TRL's processes is not measured, so it refuses no job.
    let is_own = plan.runtime.is_own();
    let limits = Limits {
        lengths: context.datasets().filter_map(|(facts, _)| facts.prompt_lengths).max_by_key(|lengths| lengths.longest),
        memory_bytes: context.memory_limit_bytes.filter(|_| is_own),
        reward_model_bytes: reward_model_bytes(spec, context),
        places: if is_own { &context.places } else { &[] },
        micro_batch_tokens: spec.training.micro_batch_tokens,
        gradient_checkpointing: spec.training.gradient_checkpointing,
    };
    let estimate = choose_micro_batch(&mut plan, model, limits).map_err(|error| vec![error])?;
    Ok(Resolution { warnings: warnings(spec, context, &plan, mixture.epoch_len(0)), plan, estimate })
}

/// Rejects training all weights of a model in 4 bits.
fn four_bit_without_adapter(spec: &JobSpec, model: &ModelFacts) -> Option<FieldError> {
    if spec.lora.is_some() {
        return None;
    }
    let advice = "set lora: a 4-bit base is frozen, and only an adapter is trained on it";
    if spec.training.load_in_4bit {
        let detail = format!("all weights cannot be trained in 4 bits: remove load_in_4bit, or {advice}");
        return Some(FieldError::new("/training/load_in_4bit", "conflict", detail));
    }
    let is_stored = model.shape.is_some_and(|shape| shape.four_bit_weights + shape.nested_four_bit_weights > 0);
    let detail = format!("the model is stored in 4 bits, so its weights cannot be trained: {advice}");
    is_stored.then(|| FieldError::new("/lora", "conflict", detail))
}

/// Returns the memory of reward models' weights, in bytes; several rewards with the same settings share one.
fn reward_model_bytes(spec: &JobSpec, context: &Context) -> u64 {
    let mut counted: Vec<&RewardModelPlan> = Vec::new();
    for (_, reward) in spec.rewards_by_secret_name() {
        let RewardKind::RewardModel(model) = &reward.kind else { continue };
        if !counted.contains(&model) {
            counted.push(model);
        }
    }
    let bytes = counted.into_iter().filter_map(|plan| {
        let facts = context.reward_models.get(&plan.model)?;
        let each = if plan.dtype == ComputeDtype::Bf16 && !facts.is_encoder { 2 } else { 4 };
        Some(each * facts.num_parameters)
    });
    bytes.sum()
}

/// Maximum number of prompts per epoch, which is kept in memory with one number per prompt.
const MAX_PROMPTS_AN_EPOCH: u64 = 50_000_000;

/// Rejects weights with which a source provides no prompts, or with which an epoch is so long that no job completes it.
fn unusual_shares(dataset: &DatasetFacts, mixture: &Mixture) -> Option<FieldError> {
    let (longest, rows) = (mixture.epoch_len(0), mixture.num_rows());
    if longest > MAX_PROMPTS_AN_EPOCH.max(rows) {
        let detail = format!(
            "the largest source has so little weight that an epoch, in which it is seen once, has {longest} prompts (at most {MAX_PROMPTS_AN_EPOCH}): give it more weight, or limit its rows"
        );
        return Some(FieldError::new("/dataset", "out_of_range", detail));
    }
    let empty = dataset.sources.iter().zip(mixture.rows()).find(|(_, rows)| *rows == 0);
    empty.map(|(source, _)| {
        let detail = match source.plan.num_rows {
            0 => format!("the source '{}' has no rows", source.plan.name),
            _ => format!(
                "evaluation holds out every row of the source '{}': nothing of it is left to train on",
                source.plan.name
            ),
        };
        FieldError::new("/dataset", "empty_dataset", detail)
    })
}

fn plan_eval(
    (eval, has_environment): (&EvalSpec, bool),
    facts: &DatasetFacts,
    split: &Split,
    context: &Context,
) -> EvalPlan {
    let test_rows = Some(split.tested()).filter(|rows| *rows > 0);
    let guard = eval.guard.as_ref().zip(context.guard_dataset.as_ref());
    EvalPlan {
        dataset: facts.plan(),
        fraction: eval.fraction,
        held_out_rows: eval.fraction.map(|_| split.evaluated()),
        test_fraction: test_rows.map(|_| eval.wanted_test_fraction()),
        test_rows,
        test_dataset: context.test_dataset.as_ref().map(DatasetFacts::plan),
        guard: guard.map(|(guard, facts)| GuardPlan {
            dataset: facts.plan(),
            rewards: guard.rewards.clone(),
            margin: guard.margin,
        }),
        // A verdict samples single turns.
        auto_verdict: eval.auto_verdict && !has_environment,
        top_p: eval.top_p,
        top_k: eval.top_k,
        min_p: eval.min_p,
        repetition_penalty: eval.repetition_penalty,
        rewards: eval.rewards.clone(),
        every_steps: eval.every_steps,
        before_start: eval.before_start,
        num_generations: eval.num_generations,
        temperature: eval.temperature,
    }
}

fn check_dataset(
    spec: &JobSpec,
    facts: &DatasetFacts,
    model: Option<&ModelFacts>,
    at: &str,
    errors: &mut Vec<FieldError>,
) {
    let inline = inline_records(spec, at);
    if !inline && facts.num_rows == 0 {
        errors.push(FieldError::new(at, "empty_dataset", "the dataset is empty: it needs at least one row"));
    }
    if !inline && !facts.is_pending && !facts.columns.iter().any(|column| column == "prompt") {
        let detail = format!("the dataset has no column 'prompt', only: {}", facts.columns.join(", "));
        errors.push(FieldError::new(at, "missing_column", detail));
    }
    if facts.has_images() && !facts.sources.is_empty() {
        errors.push(FieldError::new(at, "unsupported", one_of_several_detail()));
    }
    if let Some(model) = model.filter(|model| facts.has_chat_prompts && !model.has_chat_template) {
        let detail = format!(
            "prompts are chat messages, but model '{}' has no chat template: give prompts as strings, or add chat_template.jinja to the model",
            model.id
        );
        errors.push(FieldError::new(at, "no_chat_template", detail));
    }
    let judged = judging(spec, at);
    let judged = judged.into_iter().flat_map(|(rewards, at)| rewards.iter().enumerate().map(move |pair| (at, pair)));
    let facts_are_of_evaluation = at != "/dataset";
    let which = match at {
        "/dataset" => "dataset",
        "/eval/test_dataset" => "test dataset",
        "/eval/guard/dataset" => "guard's dataset",
        _ => "evaluation dataset",
    };
    for (rewards_at, (index, reward)) in judged {
        let at = |field: &str| format!("{rewards_at}/{index}/{field}");
        for name in unknown_sources(reward, facts) {
            let known: Vec<_> = facts.sources.iter().map(|source| source.plan.name.as_str()).collect();
            let there_are = match known.as_slice() {
                [] if facts_are_of_evaluation => format!(
                    "the {which} is not a list of sources: make it one, with the same names, or give the evaluation its own rewards (eval.rewards)"
                ),
                [] => "the dataset is not a list of sources".to_owned(),
                known => format!("the sources of the {which} are {}", known.join(", ")),
            };
            let detail = format!("the dataset has no source '{}': {there_are}", shown(name));
            errors.push(FieldError::new(at("applies_to"), "unknown_source", detail));
        }
        // A reward that judges some sources needs its columns in those sources only.
        let judged = facts.sources.iter().filter(|source| reward.judges(&source.plan.name));
        let judged: Vec<_> =
            judged.filter_map(|source| Some((Some(&source.plan.name), source.columns.as_ref()?))).collect();
        let judged = match facts.sources.is_empty() {
            true if facts.is_pending => Vec::new(),
            true => vec![(None, &facts.columns)],
            false => judged,
        };
        for (field, column) in reward.kind.columns() {
            let lacks = judged.iter().find(|(_, columns)| !columns.iter().any(|known| known == column));
            let Some((source, columns)) = lacks.filter(|_| !column.is_empty()) else { continue };
            let columns = columns.join(", ");
            let detail = match source {
                None => format!("the {which} has no column '{column}', only: {columns}"),
                Some(source) => format!(
                    "the source '{source}' has no column '{column}', only: {columns}; add it with the source's map, or list in applies_to the sources that this reward judges"
                ),
            };
            errors.push(FieldError::new(at(&field), "missing_column", detail));
        }
    }
    for source in &facts.sources {
        let judges = |rewards: &[RewardPlan]| {
            rewards.iter().any(|reward| reward.weight != 0.0 && reward.judges(&source.plan.name))
        };
        if at == "/dataset" && !judges(&spec.rewards) {
            let detail = format!(
                "no reward with a weight judges the source '{}': its prompts would teach nothing",
                source.plan.name
            );
            errors.push(FieldError::new("/rewards", "unjudged_source", detail));
        }
    }
}

/// Returns the rewards that judge the rows of a dataset, and the JSON pointer to their place in the job.
fn judging<'s>(spec: &'s JobSpec, at: &str) -> Vec<(&'s [RewardPlan], &'static str)> {
    // The evaluation's own rewards judge rows that are evaluated or tested, the guard set's rewards the guard rows, and the job's
    // rewards all other rows.
    let eval = spec.eval.as_ref();
    let own = eval.and_then(|eval| Some((eval.rewards.as_deref()?, "/eval/rewards")));
    let of_guard = eval.and_then(|eval| Some((eval.guard.as_ref()?.rewards.as_deref()?, "/eval/guard/rewards")));
    let is_divided = eval.is_some_and(|eval| eval.fraction.is_some());
    let is_tested = eval.is_some_and(|eval| eval.wanted_test_fraction() > 0.0);
    let job = (spec.rewards.as_slice(), "/rewards");
    match at {
        "/dataset" => std::iter::once(job).chain(own.filter(|_| is_divided || is_tested)).collect(),
        "/eval/guard/dataset" => vec![of_guard.or(own).unwrap_or(job)],
        "/eval/dataset" => vec![own.filter(|_| !is_divided).unwrap_or(job)],
        _ => vec![own.unwrap_or(job)],
    }
}

/// Returns the source names in a reward's `applies_to` that do not exist.
fn unknown_sources<'r>(reward: &'r RewardPlan, facts: &DatasetFacts) -> Vec<&'r str> {
    let names = reward.applies_to.iter().flatten().map(String::as_str);
    names.filter(|name| !facts.sources.iter().any(|source| source.plan.name == *name)).collect()
}

/// Whether the rows were sent with the job. Such rows have been checked one by one.
fn inline_records(spec: &JobSpec, at: &str) -> bool {
    let eval = spec.eval.as_ref();
    let source = match at {
        "/dataset" => spec.dataset.as_ref(),
        "/eval/test_dataset" => eval.and_then(|eval| eval.test_dataset.as_ref()),
        "/eval/guard/dataset" => eval.and_then(|eval| eval.guard.as_ref()?.dataset.as_ref()),
        _ => eval.and_then(|eval| eval.dataset.as_ref()),
    };
    matches!(source, Some(DatasetSource::Records(_)))
}

/// Checks prompts and completions against the model's context. The default completion length is reduced if necessary.
fn fit_completions(spec: &JobSpec, context: &Context, errors: &mut Vec<FieldError>) -> SamplingPlan {
    const AT: &str = "/sampling/max_completion_length";
    let mut sampling = spec.sampling.clone();
    let Some(model) = &context.model else { return sampling };
    let limit = model.max_position_embeddings;
    let given = spec.redacted.pointer(AT).filter(|value| !value.is_null());
    if given.is_some_and(|value| value.as_f64() != Some(f64::from(sampling.max_completion_length))) {
        return sampling; // The reader refused it, and has said so.
    }
    let (mut longest, mut too_long) = (0, false);
    for (facts, at) in context.datasets() {
        let Some(lengths) = facts.prompt_lengths else { continue };
        if lengths.longest >= limit {
            let detail = format!(
                "{} prompts leave no room for a completion: the model reads at most {limit} tokens, the longest prompt (row {}) has {}; shorten or remove them (prompts are never truncated)",
                lengths.too_long, lengths.longest_row, lengths.longest
            );
            errors.push(FieldError::new(at, "prompt_too_long", detail));
            too_long = true;
        }
        longest = lengths.longest.max(longest);
    }
    let room = limit.saturating_sub(longest);
    if too_long || u64::from(sampling.max_completion_length) <= room.saturating_sub(u64::from(longest == 0)) {
        return sampling;
    }
    if given.is_some() {
        let detail = format!(
            "the model reads at most {limit} tokens and the longest prompt has {longest}: a completion can have at most {room}, not {}",
            sampling.max_completion_length
        );
        errors.push(FieldError::new(AT, "out_of_range", detail));
    } else {
        // If the prompts have not been counted, half of the context is reserved for them.
        let fit = if longest == 0 { limit / 2 } else { room };
        sampling.max_completion_length =
            u32::try_from(fit.max(1)).unwrap_or(u32::MAX).min(sampling.max_completion_length);
    }
    sampling
}

fn prompts_per_block(spec: &JobSpec) -> u64 {
    u64::from(spec.training.prompts_per_step) * u64::from(spec.rloo.steps_per_generation)
}

/// Reports a training set that is smaller than a block. The mixture's rows are the ones that train, without those
/// that evaluation holds out.
fn smaller_than_a_block(spec: &JobSpec, mixture: &Mixture, split: &Split) -> Option<FieldError> {
    let (block, num_rows) = (prompts_per_block(spec), mixture.shortest_epoch());
    if num_rows >= block || num_rows == 0 {
        return None;
    }
    let steps = u64::from(spec.rloo.steps_per_generation);
    let block_text = match steps {
        1 => format!("one step takes {block} prompts"),
        _ => format!("one generation block takes {block} prompts (prompts_per_step · steps_per_generation {steps})"),
    };
    let fix = match num_rows / steps {
        0 => format!("the nearest valid values are prompts_per_step 1 with rloo.steps_per_generation {num_rows}"),
        nearest => format!("the nearest valid value is {nearest}"),
    };
    let rows_text = match (split.evaluated(), split.tested()) {
        (0, 0) if mixture.num_rows() != num_rows => format!("an epoch of these sources has {num_rows} prompts"),
        (0, 0) => format!("the dataset has {num_rows} rows"),
        (evaluated, 0) => format!("the dataset has {num_rows} rows to train on (eval.fraction holds out {evaluated})"),
        (evaluated, tested) => format!(
            "the dataset has {num_rows} rows to train on ({evaluated} are held out for evaluation, {tested} for the verdict: eval.test_fraction)"
        ),
    };
    let detail = format!("{rows_text} but {block_text}: {fix}, or add rows");
    Some(FieldError::new("/training/prompts_per_step", "dataset_too_small", detail))
}

fn plan_training(spec: &JobSpec, sampling: &SamplingPlan, mixture: &Mixture) -> (TrainingPlan, Totals) {
    let (training, rloo) = (&spec.training, &spec.rloo);
    let block = prompts_per_block(spec);
    let steps_per_block = u64::from(rloo.steps_per_generation) * u64::from(rloo.num_iterations);
    let prompts_per_epoch = mixture.epoch_len(0);
    let steps_of = |epoch: u64| (mixture.epoch_len(epoch) / block) * steps_per_block;
    let steps_per_epoch = steps_of(0);
    let by_epochs = || {
        let epochs = training.num_train_epochs.unwrap_or(1.0);
        let steps = match mixture.is_even() {
            true => epochs * steps_per_epoch as f64,
            // Epochs differ by up to one prompt per source, so the steps of each are added.
            false => {
                (0..epochs as u64).map(steps_of).sum::<u64>() as f64 + epochs.fract() * steps_of(epochs as u64) as f64
            }
        };
        // transformers counts a partial last step as a step too.
        (steps.ceil() as u64).max(1)
    };
    let max_steps = training.max_steps.unwrap_or_else(by_epochs);
    let generation_blocks = max_steps.div_ceil(steps_per_block);
    let completions = generation_blocks * block * u64::from(rloo.num_generations.get());
    let greedy_completions = if rloo.estimator == Estimator::Remax { generation_blocks * block } else { 0 };
    let sampled = completions + greedy_completions;
    let refills = if rloo.min_informative_groups > 0 { u64::from(rloo.max_refills) } else { 0 };
    let max_refill_completions = sampled.saturating_mul(refills);
    let totals = Totals {
        optimizer_steps: max_steps,
        completions_per_step: u64::from(training.prompts_per_step) * u64::from(rloo.num_generations.get()),
        prompts_per_block: block,
        generation_blocks,
        completions,
        greedy_completions,
        max_refill_completions,
        epochs: max_steps as f64 / steps_per_epoch as f64,
        dropped_rows_per_epoch: prompts_per_epoch % block,
        max_completion_tokens: sampled.saturating_add(max_refill_completions).saturating_mul(u64::from(
            spec.environment
                .as_ref()
                .map_or(sampling.max_completion_length, |environment| environment.max_episode_tokens),
        )),
    };
    let plan = TrainingPlan {
        prompts_per_step: training.prompts_per_step,
        max_steps,
        seed: training.seed,
        shuffle_dataset: training.shuffle_dataset,
        dtype: training.dtype,
        load_in_4bit: training.load_in_4bit,
        bnb_4bit_quant_type: training.bnb_4bit_quant_type,
        use_bnb_nested_quant: training.use_bnb_nested_quant,
        micro_batch_tokens: training.micro_batch_tokens.unwrap_or(super::MICRO_BATCH_TOKENS),
        gradient_checkpointing: training.gradient_checkpointing.unwrap_or(false),
        max_attempts: training.max_attempts,
    };
    (plan, totals)
}

fn warnings(spec: &JobSpec, context: &Context, plan: &Plan, prompts: u64) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut warn = |pointer: String, code: &str, detail: String| {
        warnings.push(Warning { pointer, code: code.to_owned(), detail });
    };
    warn_of_rewards(spec, plan, &mut warn);
    let totals = &plan.totals;
    if totals.dropped_rows_per_epoch > 0 {
        let detail = format!(
            "{} of {prompts} {} are left out of each epoch, because they do not fill a block of {} prompts",
            totals.dropped_rows_per_epoch,
            if plan.dataset.sources.is_empty() { "rows" } else { "prompts" },
            totals.prompts_per_block
        );
        warn("/training/prompts_per_step".to_owned(), "incomplete_block_dropped", detail);
    }
    if spec.training.max_steps.is_none() && spec.training.num_train_epochs.is_none() && plan.training.max_steps < 10 {
        let detail = format!(
            "without max_steps a job makes one pass over its dataset: {} optimizer steps, too few to learn much",
            plan.training.max_steps
        );
        warn("/training/max_steps".to_owned(), "few_steps", detail);
    }
    if plan.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0) {
        let detail = "dropout is on only in the forward pass of training, so the ratio of the first update to the log-probs of sampling is not 1 (nor in TRL): the metric sampling/log_ratio_max shows the difference";
        warn("/lora/dropout".to_owned(), "dropout_moves_the_ratio", detail.to_owned());
    }
    if plan.lora.is_some() && plan.optimizer.learning_rate <= 2e-6 {
        let detail = format!(
            "a learning rate of {:e} suits full fine-tuning; a LoRA adapter learns next to nothing at it: 4e-5 to 1e-4 are usual",
            plan.optimizer.learning_rate
        );
        warn("/optimizer/learning_rate".to_owned(), "low_learning_rate", detail);
    }
    let hidden_size = context.model.as_ref().and_then(|model| model.shape).map(|shape| shape.hidden_size);
    if let Some((lora, hidden_size)) = plan.lora.as_ref().zip(hidden_size)
        && let Some((detail, fix)) = low_lora_rate(lora, hidden_size, plan.optimizer.learning_rate)
    {
        warn("/optimizer/learning_rate".to_owned(), LOW_LORA_RATE, format!("{detail}: {fix}"));
    }
    if plan.lora.is_none() && plan.optimizer.learning_rate >= 5e-5 {
        let detail = format!(
            "a learning rate of {:e} suits a LoRA adapter; full fine-tuning usually takes a tenth of it or less: 1e-6 is the default",
            plan.optimizer.learning_rate
        );
        warn("/optimizer/learning_rate".to_owned(), "high_learning_rate", detail);
    }
    if plan.optimizer.warmup_steps >= plan.training.max_steps {
        let detail = format!(
            "warmup_steps is {} and the job has {} steps: the learning rate never reaches its peak",
            plan.optimizer.warmup_steps, plan.training.max_steps
        );
        warn("/optimizer/warmup_steps".to_owned(), "warmup_too_long", detail);
    }
    if let Some(DatasetSource::Mixed(sources)) = &spec.dataset
        && sources.iter().any(|source| source.weight.is_some())
        && let Some(without) = sources.iter().find(|source| source.weight.is_none())
    {
        let detail =
            format!("the source '{}' has no weight, so its number of rows is used as its weight", without.name);
        warn("/dataset".to_owned(), "weights_and_rows", detail);
    }
    warn_of_evaluation(spec, plan, context, &mut warn);
    environments::warn(spec, plan, context, &mut warn);
    warnings.extend(rloo::warnings(plan));
    warnings
}

/// Warns about reward services that could be configured better.
fn warn_of_rewards(spec: &JobSpec, plan: &Plan, warn: &mut impl FnMut(String, &str, String)) {
    for (index, reward) in plan.rewards.iter().enumerate() {
        let Some(service) = reward.kind.service() else { continue };
        let signed = spec.secrets.get(&reward.name).is_some_and(|secrets| secrets.secret.is_some());
        if matches!(reward.kind, RewardKind::Webhook(_)) && !signed {
            let detail =
                "requests are not signed, so the service cannot tell them from forged ones: give a whsec_… secret";
            warn(format!("/rewards/{index}/secret"), "unsigned_webhook", detail.to_owned());
        }
        if let RewardKind::OpenaiJudge(judge) = &reward.kind
            && judge.votes > 1
            && judge.temperature == 0.0
        {
            let detail =
                "at temperature 0 all votes of the judge are the same: raise the judge's temperature, or use one vote";
            warn(format!("/rewards/{index}/votes"), "votes_alike", detail.to_owned());
        }
        if service.on_invalid == OnInvalid::Zero {
            let detail = "an invalid answer counts as reward 0, which teaches the model from the service's faults; on_invalid mask leaves it out";
            warn(format!("/rewards/{index}/on_invalid"), "invalid_counts_as_zero", detail.to_owned());
        }
    }
}

/// Warns about an evaluation that cannot show whether training helped.
fn warn_of_evaluation(spec: &JobSpec, plan: &Plan, context: &Context, warn: &mut impl FnMut(String, &str, String)) {
    if plan
        .eval
        .as_ref()
        .filter(|eval| eval.fraction.is_none() && !eval.dataset.sha256.is_empty())
        .is_some_and(|eval| eval.dataset.sha256 == plan.dataset.sha256)
    {
        let detail = "evaluation uses the training prompts: it cannot show whether the model learned more than these";
        warn("/eval/dataset".to_owned(), "eval_on_training_data", detail.to_owned());
    } else if let Some((shared, all)) = also_trained(context, context.eval_dataset.as_ref()) {
        let detail = format!(
            "{shared} of {all} evaluation prompts are training prompts too: on these prompts the evaluation cannot show whether the model learned more than them; remove them from one of the two datasets"
        );
        warn("/eval/dataset".to_owned(), SHARED_PROMPTS, detail);
    }
    let Some(eval) = &plan.eval else { return };
    if let Some(test) = &eval.test_dataset
        && [&plan.dataset, &eval.dataset].iter().any(|other| !test.sha256.is_empty() && other.sha256 == test.sha256)
    {
        let detail = "the test dataset is also used during training, so a verdict on it is optimistic: use other prompts for the test";
        warn("/eval/test_dataset".to_owned(), TEST_IN_TRAINING, detail.to_owned());
    } else if let Some((shared, all)) = also_trained(context, context.test_dataset.as_ref()) {
        let detail = format!(
            "{shared} of {all} test prompts are training prompts too, so a verdict on them is optimistic: remove them from one of the two datasets"
        );
        warn("/eval/test_dataset".to_owned(), TEST_IN_TRAINING, detail);
    }
    let asked = spec.eval.as_ref().and_then(|eval| eval.test_fraction).filter(|asked| *asked > 0.0);
    if let Some(asked) = asked.filter(|_| eval.test_fraction.is_none()) {
        let detail = format!(
            "test_fraction {asked} of this dataset gives fewer than {FEWEST_TEST_ROWS} rows, so no rows are set aside: the verdict will judge the evaluation's rows, which also choose the checkpoint"
        );
        warn("/eval/test_fraction".to_owned(), "no_test_rows", detail);
    }
}

/// Counts the prompts of a dataset that are also training prompts, and all of its prompts; `None` = none are shared, or the
/// prompts are not known.
fn also_trained(context: &Context, other: Option<&DatasetFacts>) -> Option<(u64, usize)> {
    let trained = context.dataset.as_ref()?.prompt_keys.as_ref()?;
    let others = other?.prompt_keys.as_ref()?;
    let shared = shared_prompts(trained, others);
    (shared > 0).then_some((shared, others.len()))
}

/// Rejects a model that only the CPU supports if the server has only GPUs.
fn beyond_all_places(model: &ModelFacts, context: &Context) -> Option<FieldError> {
    let keys = model.beyond_gpu.filter(|_| !context.places.is_empty() && context.places.iter().all(is_gpu))?;
    let detail = format!(
        "this model cannot run on a GPU yet ({keys} in its config.json), and this server has only GPUs: start a server with --devices cpu"
    );
    Some(FieldError::new("/model", "not_on_gpu", detail))
}

/// Rejects full fine-tuning of a model with Gated DeltaNet layers, whose own weights have no gradient yet.
fn full_with_states(model: &ModelFacts) -> Option<FieldError> {
    model.shape.and_then(|shape| shape.delta_net)?;
    let detail = "this model cannot be trained in full yet (layer_types: linear_attention in its config.json): train a LoRA adapter";
    Some(FieldError::new("/lora", "unsupported", detail))
}

fn is_gpu(place: &Place) -> bool {
    matches!(place, Place::Cuda { .. })
}

/// Returns the adapter on the model's own linear layers: all of them, unless the job names some.
fn modules_of(
    spec: &JobSpec,
    mut lora: LoraPlan,
    model: &ModelFacts,
    errors: &mut Vec<FieldError>,
) -> Option<LoraPlan> {
    let asked = spec.redacted.pointer("/lora/target_modules").filter(|value| value.is_array());
    if model.modules.is_empty() {
        return Some(lora);
    }
    match asked {
        None => lora.target_modules = model.modules.iter().map(|name| (*name).to_owned()).collect(),
        Some(_) => {
            for name in lora.target_modules.iter().filter(|name| !model.modules.contains(&name.as_str())) {
                let detail =
                    format!("the model '{}' has no module {name}; it has {}", model.id, model.modules.join(", "));
                errors.push(FieldError::new("/lora/target_modules", "unknown_module", detail));
            }
        }
    }
    Some(lora)
}
