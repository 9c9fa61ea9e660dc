//! Reads a submitted document into a [`JobSpec`].

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::foreign::advice;
use super::reader::{Errors, Field, FieldError, Reader, shown};
use super::rewards::read_rewards;
use super::{
    CheckpointPlan, Combine, LoraPlan, LrSchedulerType, OptimizerPlan, Plan, RewardPlan, RewardSecrets, RlooPlan,
    SamplingPlan,
};
use crate::id::DatasetId;

/// A submitted job. Where a field was refused it holds a harmless stand-in, so that the rest can still be checked.
#[derive(Debug, Clone)]
pub struct JobSpec {
    /// For people.
    pub name: Option<String>,
    /// Higher runs first.
    pub priority: i64,
    /// Id of a registered model; empty when missing.
    pub model: String,
    /// The training prompts; None when missing or refused.
    pub dataset: Option<DatasetSource>,
    /// Evaluation, if asked for.
    pub eval: Option<EvalSpec>,
    /// Names are unique.
    pub rewards: Vec<RewardPlan>,
    /// By reward name; only rewards that have some.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// The algorithm.
    pub rloo: RlooPlan,
    /// Rollouts.
    pub sampling: SamplingPlan,
    /// The adapter.
    pub lora: LoraPlan,
    /// The optimizer and its schedule.
    pub optimizer: OptimizerPlan,
    /// Batches, length, seed.
    pub training: TrainingSpec,
    /// When to save and what to keep.
    pub checkpoints: CheckpointPlan,
    /// The client's own labels.
    pub metadata: BTreeMap<String, String>,
    /// What may be stored and shown: the document without secrets, header values and inline records.
    pub redacted: Value,
}

/// Where prompts come from.
#[derive(Debug, Clone, PartialEq)]
pub enum DatasetSource {
    /// An uploaded dataset.
    Id(DatasetId),
    /// Sent along, one object a row.
    Records(Vec<Value>),
}

/// Evaluation, as asked for.
#[derive(Debug, Clone)]
pub struct EvalSpec {
    /// The evaluation prompts; None when missing or refused.
    pub dataset: Option<DatasetSource>,
    /// Optimizer steps between evaluations.
    pub every_steps: u64,
    /// Evaluate before the first step too.
    pub before_start: bool,
    /// Completions a prompt.
    pub num_generations: u32,
    /// 0 = greedy.
    pub temperature: f64,
}

/// Batches, length and seed, as asked for.
#[derive(Debug, Clone)]
pub struct TrainingSpec {
    /// Prompts an optimizer step.
    pub prompts_per_step: u32,
    /// Optimizer steps; None = by epochs.
    pub max_steps: Option<u64>,
    /// Passes over the dataset when `max_steps` is not given; None = 1.
    pub num_train_epochs: Option<f64>,
    /// Of sampling, order and initialisation.
    pub seed: u64,
    /// A new permutation each epoch; false = the dataset's order.
    pub shuffle_dataset: bool,
}

/// The most optimizer steps a job may have.
const MAX_STEPS: u64 = 10_000_000;
/// JSON numbers beyond this lose digits in many clients.
const MAX_SEED: u64 = (1 << 53) - 1;
const ALL_LINEAR: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

impl JobSpec {
    /// Reads a document; the errors are all there are, and the job may be used only when there are none.
    pub fn read(mut document: Value) -> (JobSpec, Vec<FieldError>) {
        let train_records = detach_records(&mut document, "/dataset/records");
        let eval_records = detach_records(&mut document, "/eval/dataset/records");
        let errors = Errors::default();
        let mut spec = read_job(&Reader::document(&document, &errors));
        let mut errors = errors.into_vec();
        for (source, records, pointer) in [
            (spec.dataset.as_mut(), train_records, "/dataset/records"),
            (spec.eval.as_mut().and_then(|eval| eval.dataset.as_mut()), eval_records, "/eval/dataset/records"),
        ] {
            if let (Some(DatasetSource::Records(rows)), Some(records)) = (source, records) {
                errors.extend(super::check_records(&records, pointer));
                *rows = records;
            }
        }
        spec.redacted = redacted(document);
        (spec, errors)
    }

    /// The sections of a job in which nothing is set.
    pub(super) fn sections_of_defaults() -> Map<String, Value> {
        let (spec, _) = Self::read(json!({}));
        let training = json!({
            "prompts_per_step": spec.training.prompts_per_step, "max_steps": null, "num_train_epochs": null,
            "seed": spec.training.seed, "shuffle_dataset": spec.training.shuffle_dataset,
        });
        let sections = json!({
            "rloo": spec.rloo, "sampling": spec.sampling, "lora": spec.lora, "optimizer": spec.optimizer,
            "training": training, "checkpoints": spec.checkpoints,
        });
        match sections {
            Value::Object(sections) => sections,
            _ => Map::new(),
        }
    }
}

/// A plan in the form in which it can be submitted again; secrets are not part of it.
pub fn submittable(plan: &Plan) -> Value {
    // Without `..`: a setting that a job forgets when it is submitted again would be a bug.
    let Plan {
        name,
        model,
        dataset,
        eval,
        rewards,
        rloo,
        sampling,
        lora,
        optimizer,
        training,
        checkpoints,
        metadata,
        totals: _,
    } = plan;
    let mut document = json!({
        "name": name, "model": model.id, "dataset": {"id": dataset.id}, "eval": eval, "rewards": rewards, "rloo": rloo,
        "sampling": sampling, "lora": lora, "optimizer": optimizer, "training": training, "checkpoints": checkpoints,
        "metadata": metadata,
    });
    if let Some(eval) = eval {
        document["eval"]["dataset"] = json!({"id": eval.dataset.id});
    }
    without_nulls(&mut document);
    document
}

fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            // What is the client's own stays as it is.
            let ours = |name: &str| !matches!(name, "params" | "chat_template_kwargs");
            map.iter_mut().filter(|(name, _)| ours(name)).for_each(|(_, value)| without_nulls(value));
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Takes inline records out, so that no copy of them is made; an empty list stays in their place.
fn detach_records(document: &mut Value, pointer: &str) -> Option<Vec<Value>> {
    document.pointer_mut(pointer)?.as_array_mut().map(std::mem::take)
}

/// The document without what must not be shown again.
fn redacted(mut document: Value) -> Value {
    for reward in document.get_mut("rewards").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(reward) = reward.as_object_mut() {
            reward.shift_remove("secret");
            reward.shift_remove("headers");
        }
    }
    document
}

fn read_job(document: &Reader<'_>) -> JobSpec {
    let (rewards, secrets) = read_rewards(
        &document.required("rewards", "give at least one reward, {\"type\": \"length\"} say, or a webhook of your own"),
    );
    let spec = JobSpec {
        name: document.field("name").nonempty(200).map(str::to_owned),
        priority: read_priority(&document.field("priority")).unwrap_or(0),
        model: document
            .required("model", "name a registered model; GET /models lists them")
            .nonempty(500)
            .unwrap_or_default()
            .to_owned(),
        dataset: read_dataset(&document.required(
            "dataset",
            "give {\"id\": \"ds_…\"} of an uploaded dataset, or {\"records\": [{\"prompt\": \"…\"}]}",
        )),
        eval: document.field("eval").object().map(read_eval),
        rewards,
        secrets,
        rloo: read_rloo(document.section("rloo")),
        sampling: read_sampling(document.section("sampling")),
        lora: read_lora(document),
        optimizer: read_optimizer(document.section("optimizer")),
        training: read_training(document.section("training")),
        checkpoints: read_checkpoints(document.section("checkpoints")),
        metadata: read_metadata(&document.field("metadata")).unwrap_or_default(),
        redacted: Value::Null,
    };
    document.finish(advice);
    spec
}

/// What PATCH may change.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Labels {
    /// `Some(None)` takes the name away.
    pub name: Option<Option<String>>,
    /// New labels, all of them.
    pub metadata: Option<BTreeMap<String, String>>,
    /// A new priority.
    pub priority: Option<i64>,
}

/// Reads the body of PATCH /jobs/{id}.
pub fn read_labels(document: &Value) -> Result<Labels, Vec<FieldError>> {
    let errors = Errors::default();
    let reader = Reader::document(document, &errors);
    let name = reader.field("name").nonempty(200).map(str::to_owned);
    let labels = Labels {
        name: reader.has("name").then_some(name),
        metadata: read_metadata(&reader.field("metadata")),
        priority: read_priority(&reader.field("priority")),
    };
    reader.finish(|key, _| {
        Some(("unknown_field", format!("'{}' cannot be changed: only name, metadata and priority can", shown(key))))
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

fn read_dataset(field: &Field<'_>) -> Option<DatasetSource> {
    let reader = field.object()?;
    let id = reader.field("id");
    let records = reader.field("records");
    let source = match (id.value(), records.value()) {
        (Some(_), Some(_)) => {
            field.fail("conflict", "give either an id or records, not both");
            None
        }
        (Some(_), None) => id.string(64).and_then(|text| match text.parse() {
            Ok(id) => Some(DatasetSource::Id(id)),
            Err(error) => {
                id.fail("invalid_value", format!("{error}"));
                None
            }
        }),
        (None, Some(_)) => records.items().map(|_| DatasetSource::Records(Vec::new())),
        (None, None) => {
            field.fail("required", "give the id of an uploaded dataset, or records: a list of {\"prompt\": …}");
            None
        }
    };
    reader.finish(advice);
    source
}

fn read_eval(reader: Reader<'_>) -> EvalSpec {
    let eval = EvalSpec {
        dataset: read_dataset(
            &reader.required("dataset", "evaluation needs prompts of its own: {\"id\": …} or {\"records\": […]}"),
        ),
        every_steps: reader.field("every_steps").whole(1..=MAX_STEPS).unwrap_or(20),
        before_start: reader.field("before_start").bool().unwrap_or(true),
        num_generations: reader.field("num_generations").whole(1..=1024).unwrap_or(1),
        temperature: reader
            .field("temperature")
            .number("at least 0 (0 = greedy) and at most 100", |value| (0.0..=100.0).contains(&value))
            .unwrap_or(0.0),
    };
    reader.finish(advice);
    eval
}

fn read_rloo(reader: Reader<'_>) -> RlooPlan {
    let positive = |value: f64| value > 0.0;
    let epsilon = reader
        .field("epsilon")
        .number("greater than 0 and less than 1", |value| value > 0.0 && value < 1.0)
        .unwrap_or(0.2);
    let rloo = RlooPlan {
        num_generations: reader
            .field("num_generations")
            .hint("the baseline of a completion is the mean reward of the other completions of its prompt, so one alone has none")
            .whole(2..=1024)
            .unwrap_or(4),
        beta: reader
            .field_of(&["beta", "kl_coef", "kl_coeff"])
            .number("at least 0 (0 = no reference model)", |value| value >= 0.0)
            .unwrap_or(0.05),
        epsilon,
        epsilon_high: reader.field("epsilon_high").number("greater than 0", positive).unwrap_or(epsilon),
        num_iterations: reader.field("num_iterations").whole(1..=1000).unwrap_or(1),
        steps_per_generation: reader.field("steps_per_generation").whole(1..=1000).unwrap_or(1),
        normalize_advantages: reader.field("normalize_advantages").bool().unwrap_or(false),
        reward_clip_range: read_range(&reader.field("reward_clip_range")),
        mask_truncated_completions: reader.field("mask_truncated_completions").bool().unwrap_or(false),
        combine: reader
            .field("combine")
            .choice(&[("renormalize", Combine::Renormalize), ("nansum", Combine::Nansum)])
            .unwrap_or(Combine::Renormalize),
    };
    reader.only("estimator", &json!("rloo"), "other estimators come later");
    reader.only("loss", &json!("sequence"), "the ratio of whole sequences, as in TRL; other losses come later");
    reader.only("kl_in", &json!("reward"), "the KL penalty is part of the reward; in the loss it comes later");
    reader.only("reward_normalization", &json!("none"), "normalize_advantages standardises advantages");
    reader.only("drop_tied_groups", &json!(false), "groups of equal rewards train on KL alone");
    reader.finish(advice);
    rloo
}

fn read_range(field: &Field<'_>) -> Option<(f64, f64)> {
    let items = field.items()?;
    let [low, high] = items.as_slice() else {
        field.fail("invalid_value", format!("must be a list of two numbers, [min, max], not of {}", items.len()));
        return None;
    };
    let (low, high) = (low.number("a number", |_| true)?, high.number("a number", |_| true)?);
    if low >= high {
        field.fail("invalid_value", format!("the first must be less than the second, not {low} and {high}"));
        return None;
    }
    Some((low, high))
}

fn read_sampling(reader: Reader<'_>) -> SamplingPlan {
    let sampling = SamplingPlan {
        max_completion_length: reader.field("max_completion_length").whole(1..=1_000_000).unwrap_or(256),
        temperature: reader
            .field("temperature")
            .hint("at 0 all completions of a prompt are equal and every advantage is 0; evaluation may be greedy: eval.temperature 0")
            .number("greater than 0 and at most 100", |value| value > 0.0 && value <= 100.0)
            .unwrap_or(1.0),
        top_p: reader
            .field("top_p")
            .number("greater than 0 and at most 1 (1 = off)", |value| value > 0.0 && value <= 1.0)
            .unwrap_or(1.0),
        top_k: reader.field("top_k").whole(0..=u64::from(u32::MAX)).unwrap_or(0),
        min_p: reader
            .field("min_p")
            .number("at least 0 (0 = off) and less than 1", |value| (0.0..1.0).contains(&value))
            .unwrap_or(0.0),
        repetition_penalty: reader
            .field("repetition_penalty")
            .number("greater than 0 (1 = off) and at most 10", |value| value > 0.0 && value <= 10.0)
            .unwrap_or(1.0),
        stop: read_stop(&reader.field("stop")).unwrap_or_default(),
        chat_template_kwargs: reader.field("chat_template_kwargs").map().cloned().unwrap_or_default(),
    };
    reader.finish(advice);
    sampling
}

fn read_stop(field: &Field<'_>) -> Option<Vec<String>> {
    if field.value().is_some_and(Value::is_string) {
        return field.string(200).filter(|text| !text.is_empty()).map(|text| vec![text.to_owned()]);
    }
    let items = field.items()?;
    if items.len() > 16 {
        field.fail("out_of_range", format!("at most 16 stop strings, not {}", items.len()));
    }
    let mut stop = Vec::new();
    for item in items.iter().take(16) {
        match item.string(200) {
            Some("") => item.fail("invalid_value", "an empty stop string would end every completion at once"),
            Some(text) => stop.push(text.to_owned()),
            None => {}
        }
    }
    Some(stop)
}

fn read_lora(document: &Reader<'_>) -> LoraPlan {
    let full = document.has("lora") && document.field("lora").value().is_none_or(|value| value == &json!(false));
    if full {
        document.field("lora").fail(
            "unsupported",
            "full fine-tuning is not built yet: leave lora out for the default adapter, or give {r, alpha, target_modules}",
        );
    }
    let reader = if full { document.nothing() } else { document.section("lora") };
    let positive = |value: f64| value > 0.0;
    let lora = LoraPlan {
        r: reader.field("r").hint("the adapter's rank; 16 is usual").whole(1..=4096).unwrap_or(16),
        alpha: reader.field("alpha").number("greater than 0", positive).unwrap_or(32.0),
        dropout: reader
            .field("dropout")
            .hint("LoRA dropout is not built yet")
            .number("0", |value| value == 0.0)
            .unwrap_or(0.0),
        target_modules: read_target_modules(&reader.field("target_modules")),
        use_rslora: reader.field("use_rslora").bool().unwrap_or(false),
    };
    reader.finish(advice);
    lora
}

fn read_target_modules(field: &Field<'_>) -> Vec<String> {
    let all = || ALL_LINEAR.map(str::to_owned).to_vec();
    if field.value().is_some_and(Value::is_string) {
        field.choice(&[("all-linear", ())]);
        return all();
    }
    let Some(items) = field.items() else { return all() };
    if items.is_empty() {
        field.fail("invalid_value", "name at least one module, or \"all-linear\"");
    }
    let names = ALL_LINEAR.map(|name| (name, name));
    let chosen: Vec<_> = items.iter().filter_map(|item| item.choice(&names)).collect();
    ALL_LINEAR.into_iter().filter(|name| chosen.contains(name)).map(str::to_owned).collect()
}

fn read_optimizer(reader: Reader<'_>) -> OptimizerPlan {
    let decay = |value: f64| (0.0..1.0).contains(&value);
    let optimizer = OptimizerPlan {
        learning_rate: reader
            .field("learning_rate")
            .number("greater than 0 and at most 1", |value| value > 0.0 && value <= 1.0)
            .unwrap_or(1e-5),
        adam_beta1: reader.field("adam_beta1").number("at least 0 and less than 1", decay).unwrap_or(0.9),
        adam_beta2: reader.field("adam_beta2").number("at least 0 and less than 1", decay).unwrap_or(0.999),
        adam_epsilon: reader.field("adam_epsilon").number("greater than 0", |value| value > 0.0).unwrap_or(1e-8),
        weight_decay: reader.field("weight_decay").number("at least 0", |value| value >= 0.0).unwrap_or(0.0),
        max_grad_norm: reader
            .field("max_grad_norm")
            .number("at least 0 (0 = off)", |value| value >= 0.0)
            .unwrap_or(1.0),
        lr_scheduler_type: reader
            .field("lr_scheduler_type")
            .choice(&[
                ("constant", LrSchedulerType::Constant),
                ("linear", LrSchedulerType::Linear),
                ("cosine", LrSchedulerType::Cosine),
            ])
            .unwrap_or(LrSchedulerType::Constant),
        warmup_steps: reader.field("warmup_steps").whole(0..=MAX_STEPS).unwrap_or(0),
    };
    reader.only("kind", &json!("adamw"), "states of an adapter are small, so AdamW in 32 bits fits");
    reader.finish(advice);
    optimizer
}

fn read_training(reader: Reader<'_>) -> TrainingSpec {
    let epochs = reader.field("num_train_epochs");
    let training = TrainingSpec {
        prompts_per_step: reader.field("prompts_per_step").whole(1..=1_000_000).unwrap_or(8),
        max_steps: reader.field("max_steps").hint("leave it out for one pass over the dataset").whole(1..=MAX_STEPS),
        num_train_epochs: epochs.number("greater than 0 and at most 10000", |value| value > 0.0 && value <= 10_000.0),
        seed: reader.field("seed").whole(0..=MAX_SEED).unwrap_or(42),
        shuffle_dataset: reader.field("shuffle_dataset").bool().unwrap_or(true),
    };
    if training.max_steps.is_some() && training.num_train_epochs.is_some() {
        epochs.fail("conflict", "max_steps and num_train_epochs both say how long to train: give one of them");
    }
    reader.finish(advice);
    training
}

fn read_checkpoints(reader: Reader<'_>) -> CheckpointPlan {
    let checkpoints = CheckpointPlan {
        every_steps: reader.field("every_steps").whole(1..=MAX_STEPS).unwrap_or(20),
        keep_last: reader
            .field("keep_last")
            .hint("the newest one is what a job resumes from")
            .whole(1..=1000)
            .unwrap_or(3),
        keep_best: reader.field("keep_best").whole(0..=1000).unwrap_or(1),
    };
    reader.finish(advice);
    checkpoints
}
