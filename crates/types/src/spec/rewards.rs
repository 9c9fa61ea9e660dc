//! Reads the list of rewards. Secrets and header values are returned separately.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde_json::Value;

pub(super) use service::{read_headers, read_secrets, read_url};

use super::foreign::advice;
use super::reader::{Errors, Field, FieldError, Reader, shown};
use super::{BlankReference, MAX_ABS_REWARD, RewardKind, RewardPlan, RewardSecrets};

mod adapters;
mod builtins;
mod formula;
mod json_schema;
mod python;
mod reward_model;
mod service;
mod template;

pub use formula::Formula;
pub use json_schema::JsonSchema;
pub use template::SampleTemplate;

/// Maximum number of rewards per job.
const MAX_REWARDS: usize = 32;
/// Maximum weight and limit. They keep sums and squares of rewards far from the range of a 64-bit float.
const MAX_WEIGHT: f64 = 1e6;
const MAX_LIMIT: f64 = 1e12;

/// The function that reads the settings of a reward type.
type ReadKind = fn(&Reader<'_>) -> RewardKind;

/// All reward types: services, then the built-in ones, then those that a worker runs.
static KINDS: LazyLock<Vec<(&'static str, ReadKind)>> =
    LazyLock::new(|| [SERVICES, builtins::READERS, RUN_BY_WORKERS].concat());
const SERVICES: &[(&str, ReadKind)] = &[
    ("webhook", |reader| RewardKind::Webhook(service::read_webhook(reader))),
    ("openrlhf", adapters::read_openrlhf),
    ("slime", adapters::read_slime),
    ("llamafactory", adapters::read_llamafactory),
    ("tei_predict", adapters::read_tei_predict),
    ("tei_rerank", adapters::read_tei_rerank),
    ("vllm_classify", adapters::read_vllm_classify),
    ("vllm_score", adapters::read_vllm_score),
    ("vllm_pooling", adapters::read_vllm_pooling),
    ("sglang_classify", adapters::read_sglang_classify),
    ("hf_text_classification", adapters::read_hf_text_classification),
    ("openai_judge", adapters::read_openai_judge),
    ("http_template", adapters::read_http_template),
];
const RUN_BY_WORKERS: &[(&str, ReadKind)] = &[
    ("environment", |_| RewardKind::Environment),
    ("reward_model", |reader| RewardKind::RewardModel(reward_model::read_reward_model(reader))),
    ("python", |reader| RewardKind::Python(python::read_python(reader))),
];

/// Reward types that are planned but not implemented yet.
const UNIMPLEMENTED: [&str; 1] = ["judge"];

/// Reads all rewards, and the secrets of the rewards that have some.
pub(super) fn read_rewards(field: &Field<'_>) -> (Vec<RewardPlan>, BTreeMap<String, RewardSecrets>) {
    let (mut rewards, mut secrets) = (Vec::new(), BTreeMap::new());
    let Some(items) = field.items() else { return (rewards, secrets) };
    if items.is_empty() {
        field.fail("required", "give at least one reward, such as {\"type\": \"length\"}");
    }
    if items.len() > MAX_REWARDS {
        field.fail("out_of_range", format!("a job may have at most {MAX_REWARDS} rewards, not {}", items.len()));
    }
    let mut names = BTreeSet::new();
    let mut all_read = true;
    for item in items.iter().take(MAX_REWARDS) {
        let Some((reward, secret)) = item.object().and_then(|reader| read_reward(&reader)) else {
            all_read = false;
            continue;
        };
        if !names.insert(reward.name.clone()) {
            let detail = format!(
                "two rewards are named '{0}': give each a different name (metrics are rewards/{0}/…)",
                reward.name
            );
            item.fail_at("name", "duplicate", detail);
        }
        if secret != RewardSecrets::default() {
            secrets.insert(reward.name.clone(), secret);
        }
        rewards.push(reward);
    }
    if all_read && !rewards.is_empty() && rewards.iter().all(|reward| reward.weight == 0.0) {
        field.fail(
            "invalid_value",
            "every weight is 0 (metric only), so there is nothing to learn: give one reward a weight",
        );
    }
    (rewards, secrets)
}

/// Reads new secrets and headers of rewards over HTTP, by reward name.
pub(super) fn read_reward_secrets(field: &Field<'_>) -> BTreeMap<String, RewardSecrets> {
    let mut secrets = BTreeMap::new();
    let Some(rewards) = field.object() else { return secrets };
    for (name, value) in field.map().into_iter().flatten() {
        let of_reward = rewards.entry(name);
        if value.is_null() {
            of_reward.fail("invalid_type", "must not be null: leave it out to keep the current value");
        }
        let Some(reader) = of_reward.object() else { continue };
        secrets.insert(name.clone(), service::read_secrets(&reader));
        reader.finish(|key, _| {
            let detail = format!(
                "the field '{}' is not a secret of a reward: known are secret, previous_secret and headers",
                shown(key)
            );
            Some(("unknown_field", detail))
        });
    }
    secrets
}

/// Reads the single reward in the field `reward` of a document; its weight is ignored.
///
/// # Errors
/// Returns all errors, with pointers into the document.
pub fn read_single_reward(document: &Value) -> Result<(RewardPlan, RewardSecrets), Vec<FieldError>> {
    let errors = Errors::default();
    let field = Reader::document(document, &errors)
        .required("reward", "give the reward as in a job, such as {\"type\": \"webhook\", \"url\": \"…\"}");
    let reward = field.object().and_then(|reader| read_reward(&reader));
    let errors = errors.into_vec();
    match reward {
        Some(reward) if errors.is_empty() => Ok(reward),
        _ => Err(errors),
    }
}

fn read_reward(reader: &Reader<'_>) -> Option<(RewardPlan, RewardSecrets)> {
    let kind_field = reader.required(
        "type",
        "name the reward's type: webhook, openai_judge, length, math_equal, python, … (docs/concepts/rewards.md)",
    );
    let type_name = kind_field.value().and_then(|value| value.as_str()).unwrap_or_default();
    if UNIMPLEMENTED.contains(&type_name) {
        kind_field.fail(
            "unsupported",
            format!("the reward type '{type_name}' is not supported yet; a webhook can compute any reward"),
        );
        return None;
    }
    let read = kind_field.choice(&KINDS)?;
    let weight = reader.field("weight").number("between -1000000 and 1000000", |weight| weight.abs() <= MAX_WEIGHT);
    let weight = weight.unwrap_or(1.0);
    let required = reader.field("required");
    if required.bool() == Some(true) && weight == 0.0 {
        required.fail("conflict", "a reward of weight 0 is a metric only and cannot be required");
    }
    let required = required.value().and_then(|value| value.as_bool()).unwrap_or(weight != 0.0);
    let kind = read(reader);
    let default_name = match &kind {
        RewardKind::Python(plan) if !plan.function.is_empty() => &plan.function,
        _ => type_name,
    };
    let name = read_name(&reader.field("name"), default_name);
    let limit = reader.field("max_abs_reward");
    let range = "greater than 0 and at most 1000000000000";
    let max_abs_reward = limit.number(range, |limit| limit > 0.0 && limit <= MAX_LIMIT).unwrap_or(MAX_ABS_REWARD);
    if let Some((low, high)) = kind.bounds().filter(|(low, high)| low.abs().max(high.abs()) > max_abs_reward) {
        let detail = format!(
            "the values of this reward reach from {low:?} to {high:?}, beyond \u{b1}{max_abs_reward}, where they are invalid: raise max_abs_reward, or lower the values"
        );
        limit.fail("conflict", detail);
    }
    let blank_reference = kind.has_reference().then(|| read_blank_reference(&reader.field("blank_reference")));
    let applies_to = read_applies_to(&reader.field("applies_to"));
    let secrets = match &kind {
        RewardKind::Webhook(_) => service::read_secrets(reader),
        RewardKind::Python(_) => RewardSecrets::default(),
        kind if kind.service().is_some() => RewardSecrets {
            headers: service::read_headers(&reader.field("headers")).unwrap_or_default(),
            ..RewardSecrets::default()
        },
        _ => RewardSecrets::default(),
    };
    reader.finish(advice);
    let max_abs_reward = Some(max_abs_reward);
    Some((RewardPlan { name, weight, required, max_abs_reward, blank_reference, applies_to, kind }, secrets))
}

/// Reads `applies_to`: one source name or a list of them.
fn read_applies_to(field: &Field<'_>) -> Option<Vec<String>> {
    if let Some(name) = field.value()?.as_str() {
        return Some(vec![name.to_owned()]);
    }
    let names = field.items()?.iter().map(|item| item.nonempty(64).map(str::to_owned)).collect::<Option<Vec<_>>>()?;
    if names.is_empty() {
        field.fail("invalid_value", "name the sources whose rows this reward judges, or leave it out: it judges all");
    }
    Some(names)
}

fn read_blank_reference(field: &Field<'_>) -> BlankReference {
    field.variant().unwrap_or(BlankReference::NotApplicable)
}

fn read_name(field: &Field<'_>, type_name: &str) -> String {
    let Some(name) = field.nonempty(64) else { return type_name.to_owned() };
    check_metric_name(field, name);
    name.to_owned()
}

/// Rejects a name that cannot be part of a metric name.
pub(super) fn check_metric_name(field: &Field<'_>, name: &str) {
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')) {
        field.fail(
            "invalid_value",
            "a name has letters, digits, '_', '-' and '.' only: it becomes part of metric names",
        );
    }
}
