//! Translates TRL's optimizer, length, evaluation and checkpoints.

use serde_json::{Map, Value, json};

use super::batching::Batches;
use super::reading::Keys;
use crate::spec::LORA_LEARNING_RATE;
use crate::spec::settings::OPTIMIZER;

/// Quantities that the length of a run depends on; unknown if the dataset or the batches are.
pub(super) struct Length {
    /// Optimizer steps in one pass over the dataset.
    steps_per_epoch: Option<u64>,
    /// Total number of optimizer steps.
    total: Option<u64>,
}

/// Writes the length of `training` and returns what is known about it. As in transformers: max_steps if above 0, otherwise
/// ⌈num_train_epochs · steps per epoch⌉.
pub(super) fn length(
    keys: &Keys<'_>,
    batches: Option<Batches>,
    num_rows: Option<u64>,
    num_iterations: u64,
    training: &mut Map<String, Value>,
) -> Length {
    let steps_per_epoch = batches.zip(num_rows).map(|(batches, rows)| {
        let block = batches.prompts_per_step.saturating_mul(batches.steps_per_generation).max(1);
        (rows / block).saturating_mul(batches.steps_per_generation).saturating_mul(num_iterations)
    });
    let epochs = keys.number("num_train_epochs").unwrap_or(3.0);
    let max_steps = keys.number("max_steps").filter(|steps| *steps > 0.0);
    if let Some(steps) = max_steps {
        training.insert("max_steps".to_owned(), number(steps));
        keys.origin("/training/max_steps", "max_steps");
        return Length { steps_per_epoch, total: Some(steps as u64) };
    }
    training.insert("num_train_epochs".to_owned(), json!(epochs));
    keys.origin("/training/num_train_epochs", "num_train_epochs");
    let total = steps_per_epoch.map(|steps| (epochs.max(0.0) * steps as f64).ceil() as u64);
    Length { steps_per_epoch, total }
}

/// Converts a number without a fraction to an integer.
pub(super) fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 9e15 { json!(value as i64) } else { json!(value) }
}

/// Translates the optimizer and its schedule.
pub(super) fn optimizer(keys: &Keys<'_>, length: &Length) -> Map<String, Value> {
    let mut optimizer = Map::new();
    super::write_settings(keys, &OPTIMIZER, &mut optimizer);
    optimizer.insert("kind".to_owned(), json!(optimizer_kind(keys)));
    keys.origin("/optimizer/kind", "optim");
    let schedule = keys.lowercase("lr_scheduler_type").unwrap_or_else(|| "linear".to_owned());
    let (name, warms) = match schedule.as_str() {
        "linear" => ("linear", true),
        "cosine" => ("cosine", true),
        "constant_with_warmup" => ("constant", true),
        "constant" => ("constant", false),
        other => {
            let reason = format!(
                "the schedule '{}' is not supported: use linear, cosine, constant or constant_with_warmup",
                crate::spec::reader::shown(other)
            );
            keys.refuse("lr_scheduler_type", reason);
            ("linear", true)
        }
    };
    optimizer.insert("lr_scheduler_type".to_owned(), json!(name));
    if keys.object("lr_scheduler_kwargs").is_some_and(|kwargs| !kwargs.is_empty()) {
        keys.refuse("lr_scheduler_kwargs", "learning-rate schedules have no further settings here: remove this key");
    }
    let warmup = warmup_steps(keys, length);
    if !warms && warmup.is_some_and(|steps| steps > 0) {
        let key = if keys.has("warmup_steps") { "warmup_steps" } else { "warmup_ratio" };
        keys.ignore(key, "transformers' constant schedule does not warm up; constant_with_warmup does");
    }
    if let Some(steps) = warmup.filter(|_| warms) {
        optimizer.insert("warmup_steps".to_owned(), json!(steps));
        keys.origin("/optimizer/warmup_steps", "warmup_steps");
    }
    optimizer
}

/// Warns about TRL's default learning rate, which is meant for full fine-tuning and is kept with an adapter too.
pub(super) fn warn_of_low_rate(keys: &Keys<'_>, optimizer: &Map<String, Value>) {
    let Some(rate) =
        optimizer["learning_rate"].as_f64().filter(|rate| *rate > 0.0 && *rate <= LORA_LEARNING_RATE / 4.0)
    else {
        return;
    };
    let whose = if keys.has("learning_rate") { "the run's" } else { "TRL's default" };
    let detail = format!(
        "{whose} learning rate of {rate:e} is kept, at which a LoRA adapter learns next to nothing: rlood's default with LoRA is {LORA_LEARNING_RATE:e}, published recipes use 4e-5 to 1e-4"
    );
    keys.warn("learning_rate", "learning_rate_low_for_lora", detail);
}

fn optimizer_kind(keys: &Keys<'_>) -> &'static str {
    let Some(name) = keys.lowercase("optim") else { return "adamw" };
    match name.as_str() {
        "adamw_torch"
        | "adamw_torch_fused"
        | "adamw_hf"
        | "adamw"
        | "adamw_apex_fused"
        | "adamw_torch_xla"
        | "adamw_torch_npu_fused"
        | "adamw_anyprecision"
        | "paged_adamw"
        | "paged_adamw_32bit" => "adamw",
        "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit" | "adamw_torch_8bit" => "adamw_8bit",
        other => {
            let reason = format!(
                "the optimizer '{}' is not supported: use adamw_torch (AdamW with moments in 32 bits) or adamw_8bit",
                crate::spec::reader::shown(other)
            );
            keys.refuse("optim", reason);
            "adamw"
        }
    }
}

/// Reads the warm-up. As in transformers: a number of steps, or below 1 a fraction of all steps, rounded up. `warmup_ratio` is the
/// older name of the fraction and has lower precedence.
fn warmup_steps(keys: &Keys<'_>, length: &Length) -> Option<u64> {
    let steps = keys.number("warmup_steps").filter(|steps| *steps != 0.0);
    let ratio = keys.number("warmup_ratio");
    let (key, given) = match (steps, ratio) {
        (Some(steps), _) => ("warmup_steps", steps),
        (None, Some(ratio)) => ("warmup_ratio", ratio),
        (None, None) => return Some(0),
    };
    match given {
        given if given < 0.0 || (key == "warmup_ratio" && given > 1.0) => {
            keys.fail(
                key,
                "out_of_range",
                format!("the warm-up must not be {given}: give a number of steps from 0, or a fraction of all steps"),
            );
            None
        }
        given if key == "warmup_steps" && given >= 1.0 => Some(given as u64),
        given => fraction(keys, key, given, length),
    }
}

/// Returns ⌈fraction · all steps⌉, if the number of steps is known.
fn fraction(keys: &Keys<'_>, key: &str, fraction: f64, length: &Length) -> Option<u64> {
    if fraction == 0.0 {
        return Some(0);
    }
    if let Some(total) = length.total {
        return Some((total as f64 * fraction).ceil() as u64);
    }
    let reason = format!(
        "{fraction} is a fraction of all optimizer steps, whose number is not known: give max_steps, or the dataset, or a number of steps"
    );
    keys.refuse(key, reason);
    None
}

/// Whether the configuration requests evaluation.
pub(super) fn evaluates(keys: &Keys<'_>) -> bool {
    eval_strategy(keys) != "no"
}

fn eval_strategy(keys: &Keys<'_>) -> String {
    let key = if keys.has("eval_strategy") { "eval_strategy" } else { "evaluation_strategy" };
    // `do_eval` alone does not evaluate during training.
    keys.lowercase(key).unwrap_or_else(|| "no".to_owned())
}

/// Returns the evaluation section without its dataset; `None` = no evaluation. `generations` and `temperature` are those of
/// training, because TRL evaluates with the same sampling.
pub(super) fn evaluation(
    keys: &Keys<'_>,
    length: &Length,
    generations: u64,
    temperature: f64,
) -> Option<Map<String, Value>> {
    let strategy = eval_strategy(keys);
    let (steps, on_start) = (keys.number("eval_steps"), keys.flag("eval_on_start").unwrap_or(false));
    let generations_eval = keys.count("num_generations_eval", 1).unwrap_or(generations);
    let every = match strategy.as_str() {
        "no" => {
            for key in ["eval_steps", "eval_on_start", "num_generations_eval"] {
                if keys.value(key).is_some_and(|value| !super::keys::is_off_value(value)) {
                    keys.ignore(key, "eval_strategy is no, so nothing is evaluated");
                }
            }
            return None;
        }
        // transformers' default of eval_steps is logging_steps, which TRL sets to 10.
        "steps" => {
            interval(keys, "eval_steps", steps.unwrap_or_else(|| keys.number("logging_steps").unwrap_or(10.0)), length)
        }
        "epoch" => epoch(keys, "eval_strategy", length),
        other => {
            keys.refuse(
                "eval_strategy",
                format!("the value '{}' is not one of no, steps, epoch", crate::spec::reader::shown(other)),
            );
            None
        }
    };
    let mut eval = Map::new();
    if let Some(every) = every {
        eval.insert("every_steps".to_owned(), json!(every));
        keys.origin("/eval/every_steps", "eval_steps");
    }
    eval.insert("before_start".to_owned(), json!(on_start));
    eval.insert("num_generations".to_owned(), json!(generations_eval));
    eval.insert("temperature".to_owned(), json!(temperature));
    keys.origin("/eval/num_generations", "num_generations_eval");
    Some(eval)
}

/// Reads a number of steps, or below 1 a fraction of all steps.
fn interval(keys: &Keys<'_>, key: &str, steps: f64, length: &Length) -> Option<u64> {
    match steps {
        steps if steps >= 1.0 => Some(steps as u64),
        steps if steps > 0.0 => fraction(keys, key, steps, length).map(|steps| steps.max(1)),
        _ => {
            keys.fail(key, "out_of_range", format!("the number of steps must be greater than 0, not {steps}"));
            None
        }
    }
}

fn epoch(keys: &Keys<'_>, key: &str, length: &Length) -> Option<u64> {
    if let Some(steps) = length.steps_per_epoch.filter(|steps| *steps > 0) {
        return Some(steps);
    }
    keys.refuse(key, "intervals are counted in optimizer steps here, and without the dataset the steps of an epoch are not known: use steps");
    None
}

/// Translates when checkpoints are saved and how many are kept.
pub(super) fn checkpoints(keys: &Keys<'_>, length: &Length, eval_every: Option<&Value>) -> Map<String, Value> {
    let mut checkpoints = Map::new();
    let strategy = keys.lowercase("save_strategy").unwrap_or_else(|| "steps".to_owned());
    // The default of transformers is every 500 steps.
    let steps = keys.number("save_steps");
    let every = match strategy.as_str() {
        "steps" => interval(keys, "save_steps", steps.unwrap_or(500.0), length).map(|steps| json!(steps)),
        "epoch" => epoch(keys, "save_strategy", length).map(|steps| json!(steps)),
        "best" => eval_every.cloned(),
        "no" => {
            keys.ignore(
                "save_strategy",
                "interrupted and paused jobs resume from checkpoints, so they are always saved; keep_last 1 keeps one",
            );
            None
        }
        other => {
            keys.refuse(
                "save_strategy",
                format!("the value '{}' is not one of no, steps, epoch, best", crate::spec::reader::shown(other)),
            );
            None
        }
    };
    if let Some(every) = every {
        checkpoints.insert("every_steps".to_owned(), every);
        keys.origin("/checkpoints/every_steps", "save_steps");
    }
    // transformers keeps every checkpoint by default; 1000 is the maximum here.
    let keep = if strategy == "no" { 1 } else { keys.count("save_total_limit", 1).unwrap_or(1000).min(1000) };
    checkpoints.insert("keep_last".to_owned(), json!(keep));
    keys.origin("/checkpoints/keep_last", "save_total_limit");
    let (load_best, metric) =
        (keys.flag("load_best_model_at_end").unwrap_or(false), keys.value("metric_for_best_model"));
    let greater = keys.flag("greater_is_better");
    if load_best {
        keys.ignore(
            "load_best_model_at_end",
            "the best checkpoint is kept in addition to the last ones: /jobs/{id}/adapter?which=best",
        );
    }
    if let Some(metric) = metric.and_then(Value::as_str) {
        checkpoints.insert("metric_for_best".to_owned(), json!(metric_name(metric)));
        keys.origin("/checkpoints/metric_for_best", "metric_for_best_model");
        if let Some(greater) = greater {
            checkpoints.insert("greater_is_better".to_owned(), json!(greater));
            keys.origin("/checkpoints/greater_is_better", "greater_is_better");
        }
    } else if greater.is_some() {
        keys.ignore("greater_is_better", "without metric_for_best_model this key has no effect");
    }
    checkpoints
}

/// Returns the metric's name. As transformers does, adds the prefix `eval_` if it is missing.
fn metric_name(metric: &str) -> String {
    if metric.starts_with("eval_") { metric.to_owned() } else { format!("eval_{metric}") }
}
