//! Translates a TRL configuration (RLOOConfig, with a PEFT LoraConfig) into a job.
//!
//! [`convert`] never fails: it translates as much of the job as possible. It reports every key that TRL would reject too
//! (`errors`), that requests something unsupported (`unsupported`), or that makes no difference (`ignored`); all other keys are in
//! the job. TRL's defaults (release 1.16) are written explicitly, so that the job is equivalent even where defaults differ. Names
//! and defaults are in the tables of `super::settings`. The batch arithmetic is in `batching`, and `rloo.md` explains it.
//!
//! This file is longer than others: it has a short function for each part of a job, which together cover all of TRL's keys.

mod batching;
mod keys;
mod peft;
mod reading;
mod rewards;
mod runtime;
mod schedule;
mod vllm;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use self::batching::read_batches;
use self::keys::{IGNORED, NO_QUANTIZATION, READ, REFUSED, VLLM_PREFIX, is_off_value};
use self::reading::{Findings, Keys};
use super::foreign::advice;
use super::reader::{FieldError, nearest, shown};
use super::resolve::Warning;
use super::settings::{Form, RLOO, SAMPLING, SECTIONS, Section, TRAINING, Trl, Values};

pub use reading::Remark;

/// A translated TRL configuration.
#[derive(Debug, Clone, Default)]
pub struct Conversion {
    /// The job, ready for [`super::JobSpec::read`]. It lacks model, dataset or rewards if none were sent.
    pub spec: Value,
    /// Errors that TRL would report too, with pointers into the submitted configuration.
    pub errors: Vec<FieldError>,
    /// Warnings about legal but probably unintended settings, with pointers into the submitted configuration.
    pub warnings: Vec<Warning>,
    /// Keys that request something unsupported.
    pub unsupported: Vec<Remark>,
    /// Keys that make no difference.
    pub ignored: Vec<Remark>,
    origins: BTreeMap<String, String>,
}

impl Conversion {
    /// Translates an error in the job that the translation produced: a pointer to a setting becomes a pointer to the TRL key that
    /// the setting came from.
    pub fn at_submitted_key(&self, mut error: FieldError) -> FieldError {
        let mut at = error.pointer.as_str();
        loop {
            if let Some(origin) = self.origins.get(at) {
                error.pointer = format!("{origin}{}", &error.pointer[at.len()..]);
                return error;
            }
            match at.rfind('/') {
                Some(end) => at = &at[..end],
                None => return error,
            }
        }
    }
}

/// Top-level keys next to an RLOOConfig: other arguments of TRL's script, with this API's names.
const SIBLING_KEYS: [&str; 12] = [
    "config",
    "peft_config",
    "model",
    "dataset",
    "train_dataset",
    "eval_dataset",
    "rewards",
    "name",
    "metadata",
    "priority",
    "rloo_config",
    "lora_config",
];

/// The submitted configuration, in either of its two forms: `{config, peft_config, model, dataset, eval_dataset, rewards, …}`, or
/// the keys of an RLOOConfig together with the others.
struct Sent<'v> {
    config: Map<String, Value>,
    config_pointer: String,
    siblings: BTreeMap<&'static str, &'v Value>,
}

fn sent<'v>(document: &'v Value, findings: &Findings) -> Sent<'v> {
    let nothing = || Sent { config: Map::new(), config_pointer: String::new(), siblings: BTreeMap::new() };
    let fail = |pointer: &str, detail: &str| {
        findings.errors.borrow_mut().push(FieldError::new(pointer, "invalid_type", detail));
    };
    let Some(map) = document.as_object() else {
        fail(
            "",
            "an RLOOConfig is an object: {\"learning_rate\": 1e-6, …}, or {\"config\": {…}, \"model\": …, \"dataset\": …, \"rewards\": …}",
        );
        return nothing();
    };
    let siblings: BTreeMap<_, _> =
        SIBLING_KEYS.iter().filter_map(|key| Some((*key, map.get(*key).filter(|value| !value.is_null())?))).collect();
    let wrapped = ["config", "rloo_config"].into_iter().find(|key| map.contains_key(*key));
    let mut config: Map<String, Value> = map
        .iter()
        .filter(|(key, _)| !SIBLING_KEYS.contains(&key.as_str()))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    let mut config_pointer = String::new();
    if let Some(key) = wrapped {
        for stray in config.keys() {
            let detail = format!(
                "only {} are allowed next to '{key}': move this key into {key}",
                SIBLING_KEYS[1..10].join(", ")
            );
            findings.errors.borrow_mut().push(FieldError::new(format!("/{stray}"), "unknown_field", detail));
        }
        config_pointer = format!("/{key}");
        config = match &map[key] {
            Value::Object(config) => config.clone(),
            Value::Null => Map::new(),
            _ => {
                fail(&config_pointer, "the configuration must be an RLOOConfig: an object");
                Map::new()
            }
        };
    }
    Sent { config, config_pointer, siblings }
}

/// Translates a configuration. `num_rows` is the dataset's number of rows, if known; it converts epochs and
/// fractions of a run to steps.
pub fn convert(document: &Value, num_rows: Option<u64>) -> Conversion {
    let findings = Findings::default();
    let Sent { config, config_pointer, siblings } = sent(document, &findings);
    let keys = Keys::new(&config, config_pointer, &findings);
    let mut spec = Map::new();
    let lora = read_adapter(&keys, &siblings, &findings, &mut spec);
    write_sibling_settings(&keys, &siblings, &mut spec);

    let evaluates = schedule::evaluates(&keys);
    let batches = read_batches(&keys, evaluates);
    let rloo = rloo(&keys);
    let generations = rloo["num_generations"].as_u64().unwrap_or(2);
    let num_iterations = rloo["num_iterations"].as_u64().unwrap_or(1).max(1);
    let mut training = Map::new();
    if let Some(batches) = batches {
        training.insert("prompts_per_step".to_owned(), json!(batches.prompts_per_step));
    }
    let rows = num_rows
        .or_else(|| siblings.get("dataset").or(siblings.get("train_dataset")).and_then(|dataset| inline_rows(dataset)));
    let length = schedule::length(&keys, batches, rows, num_iterations, &mut training);
    write_settings(&keys, &TRAINING, &mut training);
    let mut runtime = Map::new();
    read_precision(&keys, &mut training, &mut runtime);
    runtime::read_runtime(&keys, &mut runtime);
    if let Some(rollout) = vllm::read_vllm(&keys) {
        spec.insert("rollout".to_owned(), rollout);
    }
    if !runtime.is_empty() {
        let ranks = keys.value("world_size").or_else(|| keys.value("num_processes")).and_then(Value::as_u64);
        if let Some(ranks) = ranks.filter(|ranks| *ranks > 1) {
            spec.insert("resources".to_owned(), json!({ "devices": ranks }));
        }
        spec.insert("runtime".to_owned(), Value::Object(runtime));
    }
    let sampling = sampling(&keys);
    let temperature = sampling["temperature"].as_f64().unwrap_or(1.0);
    let eval = schedule::evaluation(&keys, &length, generations, temperature);
    let checkpoints = schedule::checkpoints(&keys, &length, eval.as_ref().and_then(|eval| eval.get("every_steps")));

    let mut rloo = rloo;
    if let Some(batches) = batches {
        rloo.insert("steps_per_generation".to_owned(), json!(batches.steps_per_generation));
        keys.origin("/rloo/steps_per_generation", "steps_per_generation");
    }
    spec.insert("rloo".to_owned(), Value::Object(rloo));
    spec.insert("sampling".to_owned(), Value::Object(sampling));
    let optimizer = schedule::optimizer(&keys, &length);
    if !lora.is_null() {
        schedule::warn_of_low_rate(&keys, &optimizer);
    }
    spec.insert("lora".to_owned(), lora);
    spec.insert("optimizer".to_owned(), Value::Object(optimizer));
    spec.insert("training".to_owned(), Value::Object(training));
    write_eval(&keys, eval, siblings.get("eval_dataset").copied(), &mut spec);
    spec.insert("checkpoints".to_owned(), Value::Object(checkpoints));
    report_remaining_keys(&keys);

    let Findings { errors, warnings, unsupported, ignored, origins } = findings;
    Conversion {
        spec: Value::Object(spec),
        errors: errors.into_inner(),
        warnings: warnings.into_inner(),
        unsupported: unsupported.into_inner(),
        ignored: ignored.into_inner(),
        origins: origins.into_inner(),
    }
}

fn inline_rows(dataset: &Value) -> Option<u64> {
    let rows = dataset.as_array().or_else(|| dataset.get("records")?.as_array())?;
    Some(rows.len() as u64)
}

/// Returns the dataset id in the configuration, so that a caller can look up its rows.
pub fn named_dataset(document: &Value) -> Option<&str> {
    let dataset = document.get("dataset").or_else(|| document.get("train_dataset"))?;
    dataset.as_str().or_else(|| dataset.get("id")?.as_str())
}

/// Reads the job's `lora` from a LoraConfig, from flat keys, or as null (TRL without PEFT trains every weight).
fn read_adapter<'v>(
    keys: &Keys<'v>,
    siblings: &BTreeMap<&'static str, &'v Value>,
    findings: &'v Findings,
    spec: &mut Map<String, Value>,
) -> Value {
    let outside =
        ["peft_config", "lora_config"].iter().filter_map(|key| Some((format!("/{key}"), *siblings.get(key)?)));
    let inside = ["peft_config", "lora_config"].iter().filter_map(|key| Some((keys.pointer_to(key), keys.value(key)?)));
    let given: Vec<_> = outside.chain(inside).collect();
    let flat = peft::has_flat_keys(keys);
    // Without an adapter there is no dropout to turn off, because no supported model has dropout.
    let _ = keys.flag("disable_dropout");
    let use_peft = keys.flag("use_peft");
    if let Some((second, _)) = given.get(1) {
        let detail = "there are two LoRA configurations: give one";
        findings.errors.borrow_mut().push(FieldError::new(second, "conflict", detail));
    }
    if let Some((pointer, value)) = given.first() {
        if flat {
            let reason = format!("{pointer} describes the adapter: other lora_* keys are ignored");
            findings.ignored.borrow_mut().push(Remark { key: "lora_*".to_owned(), reason });
        }
        mark_flat_keys_read(keys);
        let Some(map) = value.as_object() else {
            let detail = "the adapter's configuration must be a LoraConfig: {\"r\": 16, \"lora_alpha\": 32, \"target_modules\": \"all-linear\"}";
            findings.errors.borrow_mut().push(FieldError::new(pointer, "invalid_type", detail));
            return Value::Null;
        };
        let (lora, base) = peft::of_peft_config(map, pointer, findings);
        if let Some(base) = base {
            spec.insert("model".to_owned(), json!(base));
        }
        return without_dropout(keys, lora);
    }
    match (use_peft, flat) {
        (Some(true), _) | (None, true) => {
            if use_peft.is_none() {
                let detail = "lora_* keys are read as a request for an adapter; in TRL they have this effect only with use_peft true";
                keys.warn("use_peft", "peft_assumed", detail);
            }
            without_dropout(keys, peft::of_flat_keys(keys))
        }
        (Some(false), true) => {
            mark_flat_keys_read(keys);
            findings.ignored.borrow_mut().push(Remark {
                key: "lora_*".to_owned(),
                reason: "use_peft is false, so every weight is trained".to_owned(),
            });
            Value::Null
        }
        (Some(false) | None, false) => Value::Null,
    }
}

/// Marks the flat `lora_*` keys as read, because they have been handled together.
fn mark_flat_keys_read(keys: &Keys<'_>) {
    for key in peft::flat_keys() {
        let _ = keys.value(key);
    }
}

fn without_dropout(keys: &Keys<'_>, mut lora: Map<String, Value>) -> Value {
    if keys.flag("disable_dropout") == Some(true) {
        lora.insert("dropout".to_owned(), json!(0.0));
    }
    Value::Object(lora)
}

/// Writes the settings that are given next to an RLOOConfig: model, data, rewards, labels.
fn write_sibling_settings(keys: &Keys<'_>, siblings: &BTreeMap<&'static str, &Value>, spec: &mut Map<String, Value>) {
    let mut first = Map::new();
    let name = siblings.get("name").copied().or(keys.value("run_name"));
    if let Some(name) = name {
        first.insert("name".to_owned(), name.clone());
        keys.origin("/name", "run_name");
    }
    let named = keys.value("model_name_or_path");
    if let Some(model) = siblings.get("model").copied().or(named).cloned().or_else(|| spec.remove("model")) {
        first.insert("model".to_owned(), model);
        if !siblings.contains_key("model") {
            keys.origin("/model", "model_name_or_path");
        }
    }
    let train = siblings.get("dataset").or(siblings.get("train_dataset"));
    if let Some(dataset) = train {
        first.insert("dataset".to_owned(), as_dataset(dataset));
        if !siblings.contains_key("dataset") {
            keys.findings.origins.borrow_mut().insert("/dataset".to_owned(), "/train_dataset".to_owned());
        }
    }
    if let Some(name) = keys.value("dataset_name") {
        match name.as_str().filter(|name| name.starts_with("ds_") && train.is_none()) {
            Some(id) => {
                first.insert("dataset".to_owned(), json!({"id": id}));
                keys.origin("/dataset/id", "dataset_name");
            }
            None if train.is_some() => keys.ignore("dataset_name", "the field 'dataset' says which rows are used"),
            None => keys.refuse("dataset_name", "datasets are not downloaded by name: upload the rows with POST /datasets and give dataset {\"id\": \"ds_…\"}"),
        }
    }
    write_rewards(keys, siblings.get("rewards").copied(), &mut first);
    for key in ["metadata", "priority"] {
        if let Some(value) = siblings.get(key) {
            first.insert(key.to_owned(), (*value).clone());
        }
    }
    first.append(spec);
    *spec = first;
}

/// Accepts a dataset's id or its rows alone, in addition to {"id"} and {"records"}.
fn as_dataset(dataset: &Value) -> Value {
    match dataset {
        Value::String(id) => json!({ "id": id }),
        Value::Array(records) => json!({ "records": records }),
        other => other.clone(),
    }
}

/// Writes the rewards. As in TRL, there is one weight per reward, in order; without reward_weights every weight is 1.
fn write_rewards(keys: &Keys<'_>, rewards: Option<&Value>, spec: &mut Map<String, Value>) {
    let mut rewards = rewards.cloned().or(self::rewards::named_rewards(keys, rewards.is_some()));
    if let Some(weights) = keys.value("reward_weights") {
        match (weights.as_array(), rewards.as_mut().map(Value::as_array_mut)) {
            (None, _) => {
                keys.fail("reward_weights", "invalid_type", "reward_weights must be a list of numbers, one per reward")
            }
            (Some(weights), Some(Some(rewards))) if weights.len() != rewards.len() => {
                let detail = format!(
                    "{} weights for {} rewards: give one weight per reward, in their order",
                    weights.len(),
                    rewards.len()
                );
                keys.fail("reward_weights", "invalid_value", detail);
            }
            (Some(weights), Some(Some(rewards))) => {
                for (index, (reward, weight)) in rewards.iter_mut().zip(weights).enumerate() {
                    let Some(reward) = reward.as_object_mut() else { continue };
                    if reward.get("weight").is_some_and(|own| own.as_f64() != weight.as_f64()) {
                        let detail =
                            format!("reward {index} has a different weight of its own: give the weight in one place");
                        keys.fail("reward_weights", "conflict", detail);
                    }
                    reward.insert("weight".to_owned(), weight.clone());
                }
            }
            (Some(weights), _) => {
                let list = Value::Array(weights.clone());
                let detail = format!(
                    "give the rewards the weights {} in this order: rewards[].weight",
                    shown(&list.to_string())
                );
                keys.warn("reward_weights", "weights_to_be_added", detail);
            }
        }
    }
    if let Some(rewards) = rewards {
        spec.insert("rewards".to_owned(), rewards);
    }
}

/// Writes the settings of a section that have a TRL key, in the order of the table.
fn write_settings(keys: &Keys<'_>, section: &Section, into: &mut Map<String, Value>) {
    let nothing = Values::default();
    for setting in section.settings {
        let (spellings, value): (&[&'static str], _) = match setting.trl {
            Trl::Absent | Trl::Own(_) | Trl::Adapter(..) => continue,
            Trl::Always(value) => (std::slice::from_ref(&setting.name), Some(value.value(&nothing))),
            Trl::Key(spellings, form, default) => {
                let default = Some(default.value(&nothing)).filter(|default| !default.is_null());
                (spellings, read_spellings(keys, spellings, form).or(default))
            }
        };
        let Some(value) = value else { continue };
        into.insert(setting.name.to_owned(), value);
        let key = spellings.iter().find(|key| keys.has(key)).unwrap_or(&spellings[0]);
        keys.origin(&format!("/{}/{}", section.name, setting.name), key);
    }
}

/// Reads a key with several spellings. Two spellings at once are an error.
fn read_spellings(keys: &Keys<'_>, spellings: &[&'static str], form: Form) -> Option<Value> {
    let given: Vec<_> = spellings.iter().filter(|key| keys.has(key)).collect();
    if let ([_, second, ..], [others @ .., last]) = (given.as_slice(), spellings) {
        let detail = format!("{} and {last} are spellings of one setting: give one of them", others.join(", "));
        keys.fail(second, "conflict", detail);
    }
    // Reads every spelling, so that none is reported as unknown.
    let values: Vec<_> = spellings.iter().filter_map(|key| keys.read(key, form)).collect();
    values.into_iter().next()
}

fn rloo(keys: &Keys<'_>) -> Map<String, Value> {
    let mut rloo = Map::new();
    let generations = keys.number("num_generations").map_or(2, |number| number.clamp(0.0, 1e6) as u64);
    rloo.insert("num_generations".to_owned(), json!(generations));
    keys.origin("/rloo/num_generations", "num_generations");
    write_settings(keys, &RLOO, &mut rloo);
    rloo
}

/// Reads the sampling keys; in TRL, generation_kwargs overrides them.
fn sampling(keys: &Keys<'_>) -> Map<String, Value> {
    let mut sampling = Map::new();
    write_settings(keys, &SAMPLING, &mut sampling);
    let kwargs = keys.object("chat_template_kwargs").unwrap_or_default();
    if !kwargs.is_empty() {
        sampling.insert("chat_template_kwargs".to_owned(), Value::Object(kwargs));
    }
    for (key, value) in keys.object("generation_kwargs").unwrap_or_default() {
        let named = format!("generation_kwargs.{key}");
        match key.as_str() {
            _ if value.is_null() => {}
            // Here a single temperature applies to sampling and log-probabilities; in TRL this one applies to sampling only.
            "temperature" if value.as_f64() != sampling["temperature"].as_f64() => keys.refuse(
                &named,
                "this key would change how completions are sampled, but not their log-probabilities, which use 'temperature': give 'temperature' alone",
            ),
            "temperature" | "top_p" | "top_k" | "min_p" | "repetition_penalty" => {
                sampling.insert(key, value);
            }
            "max_new_tokens" => {
                sampling.insert("max_completion_length".to_owned(), value);
            }
            "stop_strings" => {
                sampling.insert("stop".to_owned(), value);
            }
            "do_sample" if value == json!(true) => {}
            "do_sample" => keys.refuse(&named, "greedy completions of a prompt are all equal, and every advantage is 0: remove this key"),
            "num_beams" | "num_return_sequences" if value == json!(1) => {}
            "use_cache" | "cache_implementation" => keys.ignore(&named, "the worker manages its own key-value cache"),
            _ => keys.refuse(
                &named,
                "sampling has temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens and stop_strings: remove this key",
            ),
        }
    }
    sampling
}

/// Reads bf16 or f32 if requested. The default is the server's, because TRL's default of bf16 assumes a GPU.
fn read_precision(keys: &Keys<'_>, training: &mut Map<String, Value>, runtime: &mut Map<String, Value>) {
    let init = keys.object("model_init_kwargs").unwrap_or_default();
    for (key, value) in &init {
        match key.as_str() {
            "dtype"
            | "torch_dtype"
            | "attn_implementation"
            | "use_cache"
            | "device_map"
            | "low_cpu_mem_usage"
            | "trust_remote_code" => {
                keys.ignore(
                    &format!("model_init_kwargs.{key}"),
                    "weights are read in their stored precision; training.dtype sets the precision of the computation",
                );
            }
            _ if value.is_null() => {}
            // transformers then uses the defaults of BitsAndBytesConfig.
            "load_in_4bit" => {
                read_quantization(keys, &format!("model_init_kwargs.{key}"), &json!({key: value}), (training, runtime))
            }
            "load_in_8bit" if *value == json!(false) => {}
            "load_in_8bit" => runtime::load_in_8bit(keys, &format!("model_init_kwargs.{key}"), runtime),
            "quantization_config" => {
                read_quantization(keys, &format!("model_init_kwargs.{key}"), value, (training, runtime))
            }
            _ => keys.refuse(
                &format!("model_init_kwargs.{key}"),
                "models are described by their config.json alone: remove this key",
            ),
        }
    }
    if let Some(config) = keys.value("quantization_config") {
        read_quantization(keys, "quantization_config", config, (training, runtime));
    }
    for key in ["dtype", "torch_dtype"] {
        if keys.value(key).is_some() {
            keys.ignore(key, "weights are read in their stored precision; training.dtype sets the precision of the computation (bf16 here)");
        }
    }
    let (bf16, fp16) = (keys.flag("bf16"), keys.flag("fp16"));
    if fp16 == Some(true) {
        keys.refuse(
            "fp16",
            "float16 overflows easily and is not supported: use bf16 true (training.dtype \"bf16\"), or neither",
        );
    }
    if let Some(bf16) = bf16.filter(|_| fp16 != Some(true)) {
        training.insert("dtype".to_owned(), json!(if bf16 { "bf16" } else { "f32" }));
        keys.origin("/training/dtype", "bf16");
    }
}

/// Reads transformers' BitsAndBytesConfig, whose defaults are fp4 without double quantization.
fn read_quantization(
    keys: &Keys<'_>,
    key: &str,
    config: &Value,
    (training, runtime): (&mut Map<String, Value>, &mut Map<String, Value>),
) {
    let is_set = |name: &str| config.get(name).and_then(Value::as_bool) == Some(true);
    let method = config.get("quant_method").and_then(Value::as_str).unwrap_or("bitsandbytes");
    if config.is_null() || *config == json!({}) || *config == json!({"load_in_4bit": false}) {
        return;
    }
    if method == "bitsandbytes" && is_set("load_in_8bit") && !is_set("load_in_4bit") {
        return runtime::load_in_8bit(keys, key, runtime);
    }
    let quant_type = config.get("bnb_4bit_quant_type").and_then(Value::as_str).unwrap_or("fp4");
    if method != "bitsandbytes"
        || !is_set("load_in_4bit")
        || is_set("load_in_8bit")
        || !matches!(quant_type, "nf4" | "fp4")
    {
        return keys.refuse(key, NO_QUANTIZATION);
    }
    let is_nested = is_set("bnb_4bit_use_double_quant");
    for (name, value) in [
        ("load_in_4bit", json!(true)),
        ("bnb_4bit_quant_type", json!(quant_type)),
        ("use_bnb_nested_quant", json!(is_nested)),
    ] {
        training.insert(name.to_owned(), value);
        keys.origin(&format!("/training/{name}"), key);
    }
}

fn write_eval(
    keys: &Keys<'_>,
    eval: Option<Map<String, Value>>,
    dataset: Option<&Value>,
    spec: &mut Map<String, Value>,
) {
    let Some(mut eval) = eval else {
        if dataset.is_some() {
            keys.findings.ignored.borrow_mut().push(Remark {
                key: "eval_dataset".to_owned(),
                reason: "eval_strategy is no, so nothing is evaluated: set it to steps".to_owned(),
            });
        }
        return;
    };
    if let Some(dataset) = dataset {
        eval.insert("dataset".to_owned(), as_dataset(dataset));
    }
    keys.findings.origins.borrow_mut().insert("/eval/dataset".to_owned(), "/eval_dataset".to_owned());
    spec.insert("eval".to_owned(), Value::Object(eval));
}

/// Reports every key that no section read as harmless, unsupported or unknown.
fn report_remaining_keys(keys: &Keys<'_>) {
    // A dump of a whole RLOOConfig has vLLM's settings too; without use_vllm they have no effect.
    let uses_vllm = keys.flag("use_vllm") == Some(true);
    let moves_reference = keys.value("sync_ref_model").is_some_and(|value| value != &json!(false));
    if moves_reference {
        let entry = REFUSED.iter().find(|entry| entry.keys.contains(&"sync_ref_model"));
        keys.refuse("sync_ref_model", entry.map_or("not supported", |entry| entry.reason));
    }
    if keys.flag("remove_unused_columns") == Some(true) {
        let detail = "TRL would hide every column but the prompt from the rewards; here all columns are sent to them: remove columns that they must not see from the dataset";
        keys.warn("remove_unused_columns", "columns_travel", detail);
    }
    for (key, value) in keys.rest() {
        let name = key.as_str();
        if let Some(entry) = IGNORED.iter().find(|entry| entry.keys.contains(&name)) {
            if !is_off_value(value) {
                keys.ignore(key, entry.reason);
            }
        } else if let Some(entry) = REFUSED.iter().find(|entry| entry.keys.contains(&name)) {
            if !entry.is_off(value) {
                keys.refuse(key, entry.reason);
            }
        } else if name.starts_with(VLLM_PREFIX) {
            match uses_vllm {
                false if is_off_value(value) => {}
                false => keys.ignore(key, "without use_vllm this key has no effect"),
                true => keys.refuse(
                    key,
                    "RLOOConfig has no such key: use rollout {engine, servers, colocate, memory_share, correction}",
                ),
            }
        } else if matches!(name, "ref_model_mixup_alpha" | "ref_model_sync_steps") {
            match moves_reference {
                true => keys.refuse(
                    key,
                    "the reference model does not change during a run: remove this key together with sync_ref_model",
                ),
                false => keys.ignore(key, "without sync_ref_model this key has no effect"),
            }
        } else {
            keys.refuse(key, unknown(name));
        }
    }
}

fn unknown(key: &str) -> String {
    if let Some((_, text)) = advice(key, "") {
        // The text begins with the key, which is already shown next to the reason.
        let prefix = format!("'{key}': ");
        return text.strip_prefix(&prefix).unwrap_or(&text).to_owned();
    }
    let ignored = IGNORED.iter().flat_map(|entry| entry.keys);
    let refused = REFUSED.iter().flat_map(|entry| entry.keys);
    let of_settings = SECTIONS.iter().flat_map(|section| section.settings).flat_map(|setting| setting.trl.keys());
    let known =
        of_settings.chain(READ.iter().chain(&self::rewards::REWARD_FUNCS).chain(ignored).chain(refused).copied());
    match nearest(key, known) {
        Some(meant) => format!("this is not a key of RLOOConfig (TRL 1.16): did you mean '{meant}'?"),
        None => {
            "this is not a key of RLOOConfig (TRL 1.16), nor of the arguments around it: remove this key".to_owned()
        }
    }
}
