//! Reads the sections of a job that stand alone: rollouts, adapter, optimizer, training, checkpoints.

use serde_json::{Value, json};

use super::document::TrainingSpec;
use super::foreign::advice;
use super::reader::{Field, Reader};
use super::{
    CheckpointPlan, ComputeDtype, FULL_LEARNING_RATE, LORA_LEARNING_RATE, LoraPlan, LrSchedulerType, OptimizerKind,
    OptimizerPlan, Reference, SamplingPlan, WarmStartPlan,
};

/// The most optimizer steps a job may have.
pub(super) const MAX_STEPS: u64 = 10_000_000;
/// No time between checkpoints is longer: about a year.
const MAX_SECONDS: u64 = 31_622_400;
/// JSON numbers beyond this lose digits in many clients.
pub(super) const MAX_SEED: u64 = (1 << 53) - 1;
const ALL_LINEAR: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

pub(super) fn read_sampling(reader: Reader<'_>) -> SamplingPlan {
    let defaults = SamplingPlan {
        max_completion_length: 256,
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        stop: Vec::new(),
        chat_template_kwargs: serde_json::Map::new(),
    };
    let temperature = reader
        .field("temperature")
        .hint("at 0 all completions of a prompt are equal and every advantage is 0; evaluation may be greedy: eval.temperature 0")
        .number("greater than 0 and at most 100", |value| value > 0.0 && value <= 100.0);
    read_sampling_over(reader, &SamplingPlan { temperature: temperature.unwrap_or(defaults.temperature), ..defaults })
}

/// What is not given is as in `defaults`; the temperature, which has been read, always is.
fn read_sampling_over(reader: Reader<'_>, defaults: &SamplingPlan) -> SamplingPlan {
    let sampling = SamplingPlan {
        max_completion_length: reader
            .field("max_completion_length")
            .whole(1..=1_000_000)
            .unwrap_or(defaults.max_completion_length),
        temperature: defaults.temperature,
        top_p: reader
            .field("top_p")
            .number("greater than 0 and at most 1 (1 = off)", |value| value > 0.0 && value <= 1.0)
            .unwrap_or(defaults.top_p),
        top_k: reader.field("top_k").whole(0..=u64::from(u32::MAX)).unwrap_or(defaults.top_k),
        min_p: reader
            .field("min_p")
            .number("at least 0 (0 = off) and less than 1", |value| (0.0..1.0).contains(&value))
            .unwrap_or(defaults.min_p),
        repetition_penalty: reader
            .field("repetition_penalty")
            .number("greater than 0 (1 = off) and at most 10", |value| value > 0.0 && value <= 10.0)
            .unwrap_or(defaults.repetition_penalty),
        stop: read_stop(&reader.field("stop")).unwrap_or_else(|| defaults.stop.clone()),
        chat_template_kwargs: reader
            .field("chat_template_kwargs")
            .map()
            .unwrap_or(&defaults.chat_template_kwargs)
            .clone(),
    };
    reader.finish(advice);
    sampling
}

/// Sampling that may be greedy: what is not given is as in `defaults`.
pub(super) fn read_greedy_sampling(reader: Reader<'_>, defaults: &SamplingPlan) -> SamplingPlan {
    let temperature = reader
        .field("temperature")
        .number("at least 0 (0 = greedy) and at most 100", |value| (0.0..=100.0).contains(&value));
    let temperature = temperature.unwrap_or(defaults.temperature);
    read_sampling_over(reader, &SamplingPlan { temperature, ..defaults.clone() })
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

/// None = full fine-tuning, asked for by `"lora": null` (or false).
pub(super) fn read_lora(document: &Reader<'_>) -> Option<LoraPlan> {
    let full = document.has("lora") && document.field("lora").value().is_none_or(|value| value == &json!(false));
    if full {
        return None;
    }
    let reader = document.section("lora");
    let positive = |value: f64| value > 0.0;
    let lora = LoraPlan {
        r: reader.field("r").hint("the adapter's rank; 16 is usual").whole(1..=4096).unwrap_or(16),
        alpha: reader.field("alpha").number("greater than 0", positive).unwrap_or(32.0),
        dropout: reader
            .field("dropout")
            .number("at least 0 (0 = off) and less than 1", |value| (0.0..1.0).contains(&value))
            .unwrap_or(0.0),
        target_modules: read_target_modules(&reader.field("target_modules")),
        use_rslora: reader.field("use_rslora").bool().unwrap_or(false),
    };
    reader.finish(advice);
    Some(lora)
}

pub(super) fn read_warm_start(reader: Reader<'_>) -> Option<WarmStartPlan> {
    let field = reader.required("checkpoint", "the id of a checkpoint; GET /jobs/{id}/checkpoints lists a job's");
    let checkpoint = field.string(64).and_then(|text| match text.parse() {
        Ok(id) => Some(id),
        Err(error) => {
            field.fail("invalid_value", format!("{error}"));
            None
        }
    });
    let reference = reader
        .required(
            "reference",
            "say what the KL penalty is measured against: \"base\" (the base model) or \"initial\" (the checkpoint's weights)",
        )
        .choice(&[("base", Reference::Base), ("initial", Reference::Initial)]);
    reader.finish(advice);
    Some(WarmStartPlan { checkpoint: checkpoint?, reference: reference? })
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

/// `full`: every weight is trained, at a fiftieth of an adapter's default rate.
pub(super) fn read_optimizer(reader: Reader<'_>, full: bool) -> OptimizerPlan {
    let decay = |value: f64| (0.0..1.0).contains(&value);
    let optimizer = OptimizerPlan {
        kind: reader
            .field("kind")
            .choice(&[("adamw", OptimizerKind::Adamw), ("adamw_8bit", OptimizerKind::Adamw8bit)])
            .unwrap_or_default(),
        learning_rate: reader
            .field("learning_rate")
            .number("greater than 0 and at most 1", |value| value > 0.0 && value <= 1.0)
            .unwrap_or(if full { FULL_LEARNING_RATE } else { LORA_LEARNING_RATE }),
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
    reader.finish(advice);
    optimizer
}

pub(super) fn read_training(reader: Reader<'_>) -> TrainingSpec {
    let epochs = reader.field("num_train_epochs");
    let training = TrainingSpec {
        prompts_per_step: reader.field("prompts_per_step").whole(1..=1_000_000).unwrap_or(8),
        max_steps: reader.field("max_steps").hint("leave it out for one pass over the dataset").whole(1..=MAX_STEPS),
        num_train_epochs: epochs.number("greater than 0 and at most 10000", |value| value > 0.0 && value <= 10_000.0),
        seed: reader.field("seed").whole(0..=MAX_SEED).unwrap_or(42),
        shuffle_dataset: reader.field("shuffle_dataset").bool().unwrap_or(true),
        dtype: reader
            .field("dtype")
            .choice(&[("f32", ComputeDtype::F32), ("bf16", ComputeDtype::Bf16)])
            .unwrap_or_default(),
        micro_batch_tokens: reader
            .field("micro_batch_tokens")
            .hint("leave it out: it follows from the memory there is, and changes no result but by rounding")
            .whole(16..=1_000_000),
        gradient_checkpointing: reader.field("gradient_checkpointing").bool(),
        max_attempts: reader.field("max_attempts").hint("leave it out for no limit").whole(1..=10_000),
    };
    if training.max_steps.is_some() && training.num_train_epochs.is_some() {
        epochs.fail("conflict", "max_steps and num_train_epochs both say how long to train: give one of them");
    }
    reader.finish(advice);
    training
}

pub(super) fn read_checkpoints(reader: Reader<'_>) -> CheckpointPlan {
    let checkpoints = CheckpointPlan {
        every_steps: reader.field("every_steps").whole(1..=MAX_STEPS).unwrap_or(20),
        every_seconds: reader
            .field("every_seconds")
            .hint("leave it out for checkpoints by steps only")
            .whole(1..=MAX_SECONDS),
        keep_last: reader
            .field("keep_last")
            .hint("the newest one is what a job resumes from")
            .whole(1..=1000)
            .unwrap_or(3),
        keep_best: reader.field("keep_best").whole(0..=1000).unwrap_or(1),
        metric_for_best: reader.field("metric_for_best").nonempty(200).map(str::to_owned),
        greater_is_better: reader.field("greater_is_better").bool(),
    };
    reader.finish(advice);
    checkpoints
}
