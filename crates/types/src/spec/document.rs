//! Reads a submitted document into a [`JobSpec`].

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::environments::{ENVIRONMENT_SECRET, environment_reward, read_environment, submittable_environment};
use super::evaluation::{EvalSpec, read_eval};
use super::foreign::advice;
use super::oversight::{EarlyStoppingSpec, read_doctor, read_early_stopping};
use super::reader::{Errors, Field, FieldError, Reader, kind_of, shown};
use super::rewards::{read_reward_secrets, read_rewards};
use super::rloo::read_rloo;
use super::rollouts::read_rollout;
use super::runtime_spec::{RuntimeSpec, read_runtime};
use super::sections::{read_certificate, read_lora, read_optimizer, read_section, read_training, read_warm_start};
use super::settings::{CHECKPOINTS, SAMPLING};
use super::sources::{DatasetSource, attach_records, detach_records, read_dataset, with_prompts};
use super::tools::{read_tools, submittable_tools};
use super::warm_up::read_warm_up;
use super::{
    Arithmetic, CertificatePlan, CheckpointPlan, ComputeDtype, DatasetPlan, DoctorPlan, EnvironmentPlan, LoraPlan,
    OptimizerPlan, Plan, QuantType, ResourcesPlan, RewardKind, RewardPlan, RewardSecrets, RlooPlan, RolloutPlan,
    SamplingPlan, WarmStartPlan, WarmUpSpec,
};

/// A submitted job. A field that was rejected has a harmless placeholder, so that the rest can still be checked.
#[derive(Debug, Clone)]
pub struct JobSpec {
    /// Display name of the job.
    pub name: Option<String>,
    /// Priority in the queue; jobs with a higher number run first.
    pub priority: i64,
    /// Id of a registered model; empty if missing.
    pub model: String,
    /// The training prompts; `None` = missing or rejected.
    pub dataset: Option<DatasetSource>,
    /// Evaluation settings; `None` = no evaluation.
    pub eval: Option<EvalSpec>,
    /// The rewards, with unique names.
    pub rewards: Vec<RewardPlan>,
    /// Secrets by reward name (those of the evaluation's own rewards by `eval_secret_name`), for rewards that have secrets.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// Settings of the algorithm.
    pub rloo: RlooPlan,
    /// Sampling settings of the rollouts.
    pub sampling: SamplingPlan,
    /// Servers that sample the completions; `None` = the engine that trains also samples.
    pub rollout: Option<RolloutPlan>,
    /// The environment that episodes are played with; `None` = a completion is one turn.
    pub environment: Option<EnvironmentPlan>,
    /// The LoRA adapter; `None` = full fine-tuning.
    pub lora: Option<LoraPlan>,
    /// The checkpoint or adapter to start from; `None` = none.
    pub warm_start: Option<WarmStartPlan>,
    /// Supervised steps before the first RLOO step; `None` = no warm-up.
    pub warm_up: Option<WarmUpSpec>,
    /// The optimizer and its schedule.
    pub optimizer: OptimizerPlan,
    /// Batch sizes, number of steps and seed.
    pub training: TrainingSpec,
    /// When checkpoints are saved and which ones are kept.
    pub checkpoints: CheckpointPlan,
    /// The prompts of the checkpoints' certificates; `None` = those that are part of rlood.
    pub certificate: Option<CertificatePlan>,
    /// When to end before the last step; `None` = train all steps.
    pub early_stopping: Option<EarlyStoppingSpec>,
    /// Alert rules, and what happens on an alert.
    pub doctor: DoctorPlan,
    /// The program that trains, as requested.
    pub runtime: RuntimeSpec,
    /// The devices that the job needs.
    pub resources: ResourcesPlan,
    /// The client's own labels, as key-value pairs.
    pub metadata: BTreeMap<String, String>,
    /// The rules that decide the exact bits of the run: the latest, unless the job continues another one.
    pub arithmetic: Arithmetic,
    /// The document that may be stored and shown: without secrets, header values and inline records.
    pub redacted: Value,
}

/// Batch sizes, number of steps and seed, as requested.
#[derive(Debug, Clone, Deserialize)]
pub struct TrainingSpec {
    /// Prompts per optimizer step.
    pub prompts_per_step: u32,
    /// Number of optimizer steps; `None` = determined by epochs.
    pub max_steps: Option<u64>,
    /// Passes over the dataset if `max_steps` is not given; `None` = 1.
    pub num_train_epochs: Option<f64>,
    /// Random seed of sampling, data order and initialization.
    pub seed: u64,
    /// Whether each epoch uses a new random order; false = the dataset's order.
    pub shuffle_dataset: bool,
    /// Precision of the matrix products.
    pub dtype: ComputeDtype,
    /// Whether linear layers are quantized to 4 bits when the model is loaded.
    #[serde(default)]
    pub load_in_4bit: bool,
    /// The 4-bit format to which layers are quantized.
    #[serde(default)]
    pub bnb_4bit_quant_type: QuantType,
    /// Whether the scales of 4-bit weights are quantized to 8 bits too.
    #[serde(default)]
    pub use_bnb_nested_quant: bool,
    /// Tokens per micro-batch; `None` = depends on the available memory.
    pub micro_batch_tokens: Option<u32>,
    /// Whether to recompute a layer's activations in the backward pass; `None` = only if memory requires it.
    pub gradient_checkpointing: Option<bool>,
    /// Number of failed attempts that fail the job; `None` = no limit.
    pub max_attempts: Option<u32>,
}

impl JobSpec {
    /// Reads a document. The returned errors are complete, and the job may be used only if there are none.
    pub fn read(mut document: Value) -> (JobSpec, Vec<FieldError>) {
        if !document.is_object() {
            let example = "{\"model\": …, \"dataset\": …, \"rewards\": […]}";
            let detail = format!("a job must be an object such as {example}, not {}", kind_of(&document));
            return (Self::read(json!({})).0, vec![FieldError::new("", "invalid_type", detail)]);
        }
        name_runtime(&mut document);
        let train_records = detach_records(&mut document, "/dataset");
        let eval_records = detach_records(&mut document, "/eval/dataset");
        let test_records = detach_records(&mut document, "/eval/test_dataset");
        let guard_records = detach_records(&mut document, "/eval/guard/dataset");
        let warm_up_records = detach_records(&mut document, "/warm_up/dataset");
        let errors = Errors::default();
        let mut spec = read_job(&Reader::document(&document, &errors));
        let mut errors = errors.into_vec();
        let (mut eval, mut test, mut guard) = (None, None, None);
        if let Some(spec) = &mut spec.eval {
            (eval, test) = (spec.dataset.as_mut(), spec.test_dataset.as_mut());
            guard = spec.guard.as_mut().and_then(|guard| guard.dataset.as_mut());
        }
        for (source, at, records) in [
            (spec.dataset.as_mut(), "/dataset", train_records),
            (eval, "/eval/dataset", eval_records),
            (test, "/eval/test_dataset", test_records),
            (guard, "/eval/guard/dataset", guard_records),
        ] {
            if let Some(source) = source {
                errors.extend(attach_records(source, at, records, false));
            }
        }
        if let Some(warm_up) = &mut spec.warm_up
            && let Some(source) = &mut warm_up.dataset
        {
            let is_mapped = warm_up.map.is_some();
            let records = if is_mapped { warm_up_records } else { with_prompts(source, warm_up_records) };
            errors.extend(attach_records(source, "/warm_up/dataset", records, is_mapped));
        }
        spec.redacted = redacted(document);
        (spec, errors)
    }
}

/// Replaces the name of a runtime by the section that it stands for.
fn name_runtime(document: &mut Value) {
    if let Some(runtime @ Value::String(_)) = document.get_mut("runtime") {
        *runtime = json!({ "name": runtime });
    }
}

/// Returns a plan as a document that can be submitted again, without secrets.
pub fn submittable(plan: &Plan) -> Value {
    // Destructured without `..`, so that a new setting cannot be forgotten here.
    let Plan {
        name,
        model,
        dataset,
        eval,
        rewards,
        reward_models: _,
        rloo,
        sampling,
        rollout,
        environment,
        lora,
        warm_start,
        warm_up,
        optimizer,
        training,
        checkpoints,
        certificate,
        early_stopping,
        doctor,
        runtime,
        resources,
        metadata,
        totals: _,
        // The arithmetic rules are left out: a job created from this document follows the latest ones.
        arithmetic: _,
    } = plan;
    let mut document = json!({
        "name": name, "model": model.id, "dataset": submittable_dataset(dataset), "eval": eval, "rewards": rewards, "rloo": rloo,
        "sampling": sampling, "rollout": rollout, "environment": environment.as_ref().map(submittable_environment), "lora": lora, "warm_start": warm_start, "optimizer": optimizer, "training": training, "checkpoints": checkpoints,
        "certificate": certificate, "early_stopping": early_stopping, "doctor": doctor, "metadata": metadata,
    });
    if let Some(environment) = environment.as_ref().filter(|environment| !environment.tools.is_empty()) {
        document["tools"] = submittable_tools(&environment.tools);
    }
    if !runtime.is_own() {
        document["runtime"] = json!({"name": runtime.name, "load_in_8bit": runtime.load_in_8bit, "zero_stage": runtime.zero_stage, "offload": runtime.offload});
        document["resources"] = json!(resources);
    }
    if let Some(eval) = eval {
        // The evaluation rows of a fraction come from the training dataset, and their number follows from the fraction.
        document["eval"]["dataset"] = eval.fraction.map_or_else(|| submittable_dataset(&eval.dataset), |_| Value::Null);
        document["eval"]["held_out_rows"] = Value::Null;
        document["eval"]["test_rows"] = Value::Null;
        if eval.fraction.is_some() {
            // A document without `test_fraction` would get the default share instead of none.
            document["eval"]["test_fraction"] = json!(eval.test_fraction.unwrap_or(0.0));
        }
        if let Some(test) = &eval.test_dataset {
            document["eval"]["test_dataset"] = submittable_dataset(test);
        }
        if let Some(guard) = &eval.guard {
            document["eval"]["guard"]["dataset"] = submittable_dataset(&guard.dataset);
        }
    }
    if let Some(warm_up) = warm_up {
        document["warm_up"] = json!(warm_up);
        document["warm_up"]["dataset"] = submittable_dataset(&warm_up.dataset);
        document["warm_up"]["longest_row_tokens"] = Value::Null;
    }
    without_nulls(&mut document);
    if lora.is_none() {
        // A document without `lora` would get an adapter with default settings.
        document["lora"] = Value::Null;
    }
    document
}

/// Returns the dataset of a plan in the form in which a job can refer to it again.
pub fn submittable_dataset(dataset: &DatasetPlan) -> Value {
    match dataset.sources.as_slice() {
        [] => json!({"id": dataset.id}),
        sources => json!({"id": dataset.id, "sources": sources}),
    }
}

fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            // Nulls in objects that the client defines freely are kept.
            let ours = |name: &str| !matches!(name, "params" | "chat_template_kwargs" | "parameters");
            map.iter_mut().filter(|(name, _)| ours(name)).for_each(|(_, value)| without_nulls(value));
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns the document without values that must not be shown again.
fn redacted(mut document: Value) -> Value {
    for at in ["/rewards", "/eval/rewards", "/eval/guard/rewards"] {
        for reward in document.pointer_mut(at).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(reward) = reward.as_object_mut() {
                reward.shift_remove("secret");
                reward.shift_remove("previous_secret");
                reward.shift_remove("headers");
            }
        }
    }
    if let Some(environment) = document.pointer_mut("/environment").and_then(Value::as_object_mut) {
        ["secret", "previous_secret", "headers"].iter().for_each(|name| drop(environment.shift_remove(*name)));
    }
    for tool in document.pointer_mut("/tools").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(tool) = tool.as_object_mut() {
            tool.shift_remove("headers");
        }
    }
    for server in document.pointer_mut("/rollout/servers").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(server) = server.as_object_mut() {
            server.shift_remove("api_key");
        }
    }
    document
}

fn read_job(document: &Reader<'_>) -> JobSpec {
    let lora = read_lora(document);
    let tools = document.field("tools");
    let has_tools = tools.value().is_some();
    let has_environment = !has_tools && document.field("environment").value().is_some();
    let rewards = match has_environment && document.field("rewards").value().is_none() {
        true => document.field("rewards"),
        false => {
            document.required("rewards", "give at least one reward, such as {\"type\": \"length\"} or your own webhook")
        }
    };
    let (mut rewards, mut secrets) = read_rewards(&rewards);
    if has_environment && !rewards.iter().any(|reward| reward.kind == RewardKind::Environment) {
        rewards.push(environment_reward());
    }
    let eval = document.field("eval").object().map(read_eval).map(|(eval, own_secrets)| {
        secrets.extend(own_secrets);
        eval
    });
    let rollout = document.field("rollout").object().and_then(read_rollout).map(|(rollout, keys)| {
        secrets.extend(keys);
        rollout
    });
    let environment = (has_tools || has_environment).then(|| {
        let tools = has_tools.then(|| {
            let (tools, own) = read_tools(&tools);
            secrets.extend(own);
            tools
        });
        let (environment, own) = read_environment(document.section("environment"), tools);
        if own != RewardSecrets::default() {
            secrets.insert(ENVIRONMENT_SECRET.to_owned(), own);
        }
        environment
    });
    let (runtime, resources) = read_runtime(document);
    let spec = JobSpec {
        name: document.field("name").name(200).map(str::to_owned),
        priority: read_priority(&document.field("priority")).unwrap_or(0),
        model: document
            .required("model", "name a registered model; GET /models lists them")
            .nonempty(500)
            .unwrap_or_default()
            .to_owned(),
        dataset: read_dataset(&document.required(
            "dataset",
            "give {\"id\": \"ds_…\"} of an uploaded dataset, {\"hub\": \"org/name\"}, {\"records\": [{\"prompt\": \"…\"}]}, or a list of these",
        )),
        eval,
        rewards,
        secrets,
        rloo: read_rloo(document.section("rloo")),
        sampling: read_section(&SAMPLING, document.section("sampling")),
        rollout,
        environment,
        warm_start: document.field("warm_start").object().and_then(read_warm_start),
        warm_up: document
            .field("warm_up")
            .object()
            .and_then(|reader| read_warm_up(reader, !document.field("warm_start").value().is_none_or(Value::is_null))),
        optimizer: read_optimizer(document.section("optimizer"), lora.is_none()),
        lora,
        training: read_training(document.section("training")),
        checkpoints: read_section(&CHECKPOINTS, document.section("checkpoints")),
        certificate: document.field("certificate").object().and_then(read_certificate),
        early_stopping: document.field("early_stopping").object().map(read_early_stopping),
        doctor: read_doctor(document.section("doctor")),
        runtime,
        resources,
        metadata: read_metadata(&document.field("metadata")).unwrap_or_default(),
        arithmetic: Arithmetic::LATEST,
        redacted: Value::Null,
    };
    document.finish(advice);
    spec
}

/// The fields that PATCH can change.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Labels {
    /// New display name; `Some(None)` removes the name.
    pub name: Option<Option<String>>,
    /// New labels, which replace all existing ones.
    pub metadata: Option<BTreeMap<String, String>>,
    /// New priority in the queue.
    pub priority: Option<i64>,
    /// New secrets, by reward name.
    pub reward_secrets: BTreeMap<String, RewardSecrets>,
}

/// Reads the body of PATCH /jobs/{id}.
pub fn read_labels(document: &Value) -> Result<Labels, Vec<FieldError>> {
    let errors = Errors::default();
    let reader = Reader::document(document, &errors);
    for name in ["metadata", "priority", "reward_secrets"].into_iter().filter(|name| document[*name].is_null()) {
        if reader.has(name) {
            errors.add(
                reader.pointer_to(name),
                "invalid_type",
                "must not be null: leave it out to keep the current value",
            );
        }
    }
    let name = reader.field("name").name(200).map(str::to_owned);
    let labels = Labels {
        name: reader.has("name").then_some(name),
        metadata: read_metadata(&reader.field("metadata")),
        priority: read_priority(&reader.field("priority")),
        reward_secrets: read_reward_secrets(&reader.field("reward_secrets")),
    };
    reader.finish(|key, _| {
        Some((
            "unknown_field",
            format!("'{}' cannot be changed: only name, metadata, priority and reward_secrets can", shown(key)),
        ))
    });
    let errors = errors.into_vec();
    if errors.is_empty() { Ok(labels) } else { Err(errors) }
}

fn read_priority(field: &Field<'_>) -> Option<i64> {
    field
        .number("a whole number between -1000 and 1000", |number| number.fract() == 0.0 && number.abs() <= 1000.0)
        .map(|number| number as i64)
}

fn read_metadata(field: &Field<'_>) -> Option<BTreeMap<String, String>> {
    let labels = field.texts(64, 512)?;
    for key in labels.keys().filter(|key| key.is_empty() || key.chars().count() > 64) {
        field.fail("out_of_range", format!("a label's name has 1 to 64 characters: '{}'", shown(key)));
    }
    Some(labels)
}
