//! Reads the sections of a job that do not depend on other sections, by their tables of settings.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::document::TrainingSpec;
use super::foreign::advice;
use super::reader::Reader;
use super::settings::{CERTIFICATE, GREEDY_TEMPERATURE, LORA, OPTIMIZER, SAMPLING, Section, TRAINING, WARM_START};
use super::{CertificatePlan, FULL_LEARNING_RATE, LoraPlan, OptimizerPlan, SamplingPlan, WarmStartPlan};

/// Reads a section that consists only of the settings in its table.
pub(super) fn read_section<T: DeserializeOwned>(section: &Section, reader: Reader<'_>) -> T {
    let values = section.read(&reader);
    reader.finish(advice);
    values.into_plan()
}

/// Reads sampling settings that may be greedy. Missing settings are taken from `defaults`.
pub(super) fn read_greedy_sampling(reader: Reader<'_>, defaults: &SamplingPlan) -> SamplingPlan {
    let defaults = json!(defaults).as_object().cloned().unwrap_or_default();
    let values = SAMPLING.read_over(&reader, &defaults, &GREEDY_TEMPERATURE);
    reader.finish(advice);
    values.into_plan()
}

/// Reads the adapter's settings. `None` = full fine-tuning, requested by `"lora": null` (or false).
pub(super) fn read_lora(document: &Reader<'_>) -> Option<LoraPlan> {
    let full = document.has("lora") && document.field("lora").value().is_none_or(|value| value == &json!(false));
    (!full).then(|| read_section(&LORA, document.section("lora")))
}

/// Reads the settings of certificates; `None` if the required one is missing, which is reported.
pub(super) fn read_certificate(reader: Reader<'_>) -> Option<CertificatePlan> {
    let values = CERTIFICATE.read(&reader);
    reader.finish(advice);
    values.into_section()
}

pub(super) fn read_warm_start(reader: Reader<'_>) -> Option<WarmStartPlan> {
    let mut values = WARM_START.read(&reader);
    reader.finish(advice);
    // A checkpoint can be named in either of two fields.
    let mut adapter: Value = values.get("adapter");
    let of_adapter = adapter.as_object_mut().and_then(|adapter| adapter.remove("checkpoint"));
    if let Some(checkpoint) = of_adapter {
        values.set("adapter", Value::Null);
        if values.is_default("checkpoint") {
            values.set("checkpoint", checkpoint);
        } else {
            reader.entry("adapter").fail("conflict", "the checkpoint is named twice: give it once");
            return None;
        }
    } else if !values.is_default("adapter") && !values.is_default("checkpoint") {
        reader
            .entry("adapter")
            .fail("conflict", "checkpoint and adapter both set the starting weights: give one of them");
        return None;
    }
    let warm_start: WarmStartPlan = values.into_section()?;
    if warm_start.checkpoint.is_none()
        && warm_start.adapter.is_none()
        && !reader.has("checkpoint")
        && !reader.has("adapter")
    {
        let detail = "the id of a checkpoint (GET /jobs/{id}/checkpoints lists a job's), or an adapter";
        reader.entry("checkpoint").fail("required", detail);
    }
    (warm_start.checkpoint.is_some() || warm_start.adapter.is_some()).then_some(warm_start)
}

/// Reads the optimizer. With `full`, every weight is trained, and the default learning rate is one fiftieth of an adapter's.
pub(super) fn read_optimizer(reader: Reader<'_>, full: bool) -> OptimizerPlan {
    let mut values = OPTIMIZER.read(&reader);
    if full && values.is_default("learning_rate") {
        values.set("learning_rate", FULL_LEARNING_RATE);
    }
    reader.finish(advice);
    values.into_plan()
}

pub(super) fn read_training(reader: Reader<'_>) -> TrainingSpec {
    let training: TrainingSpec = TRAINING.read(&reader).into_plan();
    if training.max_steps.is_some() && training.num_train_epochs.is_some() {
        let detail = "max_steps and num_train_epochs both set how long to train: give one of them";
        reader.entry("num_train_epochs").fail("conflict", detail);
    }
    reader.finish(advice);
    training
}
