//! Monitoring of a run: the metric that decides which checkpoint is best, early stopping, and alerts.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::foreign::advice;
use super::reader::{Reader, nearest, shown};
use super::sections::read_section;
use super::settings::{DOCTOR, EARLY_STOPPING};
use super::{CheckpointPlan, DoctorPlan, EarlyStoppingPlan, FieldError, JobSpec, RewardPlan, RulePlan};
use crate::event::Rule;

/// Early stopping, as requested.
#[derive(Debug, Clone, Deserialize)]
pub struct EarlyStoppingSpec {
    /// The metric that early stopping checks; `None` = `checkpoints.metric_for_best`.
    pub metric: Option<String>,
    /// Whether a higher value of the metric is better; `None` = by the metric's name.
    pub greater_is_better: Option<bool>,
    /// Number of evaluations in a row without a new best value after which the run ends.
    pub patience: u32,
    /// Minimum improvement of the metric that counts as a new best value.
    pub min_delta: f64,
}

pub(super) fn read_early_stopping(reader: Reader<'_>) -> EarlyStoppingSpec {
    read_section(&EARLY_STOPPING, reader)
}

pub(super) fn read_doctor(reader: Reader<'_>) -> DoctorPlan {
    let on_alert = DOCTOR.read(&reader).get("on_alert");
    let section = reader.section("rules");
    let mut rules = BTreeMap::new();
    for rule in Rule::ALL {
        let field = section.field(rule.as_str());
        // `"rule": false` is the short form of `{"enabled": false}`.
        if field.value().is_some_and(serde_json::Value::is_boolean) {
            let enabled = field.bool().unwrap_or(true);
            rules.insert(rule, RulePlan { enabled, on_alert: None });
            continue;
        }
        let Some(own) = field.object() else { continue };
        let enabled = own.field("enabled").bool().unwrap_or(true);
        rules.insert(rule, RulePlan { enabled, on_alert: own.field("on_alert").variant() });
        own.finish(advice);
    }
    section.finish(advice);
    reader.finish(advice);
    DoctorPlan { on_alert, rules }
}

/// Whether a higher value of a metric is better, by its name.
pub fn greater_is_better(metric: &str) -> bool {
    let name = metric.strip_prefix("eval_").unwrap_or(metric);
    let low = ["loss", "grad_norm", "skipped_updates", "gap", "learning_rate"].contains(&name)
        || ["kl", "clip_ratio/", "frac_reward_zero_std", "sampling/"].iter().any(|prefix| name.starts_with(prefix))
        || ["_std", "/std", "/missing_fraction", "clipped_ratio"].iter().any(|suffix| name.ends_with(suffix));
    !low
}

/// Returns the metrics by which a job's checkpoints can be compared: all metrics of its steps and evaluations except durations and
/// memory, which depend on the machine.
pub fn metric_names(rewards: &[RewardPlan], eval_rewards: Option<&[RewardPlan]>, needs_reference: bool) -> Vec<String> {
    const OF_A_STEP: [&str; 17] = [
        "loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
        "epoch",
        "skipped_updates",
        "entropy",
        "adapter/delta_norm",
        "sampling/log_ratio_max",
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
        "clip_ratio/low_mean",
        "clip_ratio/low_min",
        "clip_ratio/high_mean",
        "clip_ratio/high_max",
        "clip_ratio/region_mean",
        "advantage_std",
    ];
    const OF_A_ROLLOUT: [&str; 11] = [
        "reward",
        "reward_std",
        "reward_min",
        "reward_max",
        "completions/mean_length",
        "completions/min_length",
        "completions/max_length",
        "completions/mean_terminated_length",
        "completions/min_terminated_length",
        "completions/max_terminated_length",
        "completions/clipped_ratio",
    ];
    let of_rewards = |prefix: &str, rewards: &[RewardPlan]| -> Vec<String> {
        let parts =
            |name: &str| ["mean", "std", "missing_fraction"].map(|part| format!("{prefix}rewards/{name}/{part}"));
        rewards.iter().flat_map(|reward| parts(&reward.name)).collect()
    };
    let mut names: Vec<String> = OF_A_ROLLOUT.iter().chain(&OF_A_STEP).map(|&name| name.to_owned()).collect();
    names.extend(["frac_reward_zero_std", "frac_reward_zero_std_pre_kl"].map(str::to_owned));
    if needs_reference {
        names.extend(["kl", "kl_sequence", "kl_k3"].map(str::to_owned));
    }
    names.extend(of_rewards("", rewards));
    if let Some(own) = eval_rewards {
        names.extend(OF_A_ROLLOUT.map(|name| format!("eval_{name}")));
        names.extend(["eval_gap", "eval_entropy"].map(str::to_owned));
        if needs_reference {
            names.extend(["eval_kl", "eval_kl_sequence", "eval_kl_k3"].map(str::to_owned));
        }
        names.extend(of_rewards("eval_", own));
    }
    names
}

/// Checks the metrics that a job names.
pub fn check_metrics(spec: &JobSpec) -> Vec<FieldError> {
    let mut errors = Vec::new();
    resolve_metrics(spec, &mut errors);
    errors
}

/// Resolves the metrics that a job names, and the settings that depend on them.
pub(super) fn resolve_metrics(
    spec: &JobSpec,
    errors: &mut Vec<FieldError>,
) -> (CheckpointPlan, Option<EarlyStoppingPlan>) {
    let eval = spec.eval.as_ref();
    let eval_rewards = eval.map(|eval| eval.rewards.as_deref().unwrap_or(&spec.rewards));
    let mut known = metric_names(&spec.rewards, eval_rewards, spec.rloo.needs_reference());
    if eval.is_some_and(|eval| eval.rewards.is_some()) {
        known.retain(|name| name != "eval_gap"); // Two different rewards have no gap.
    }
    if spec.lora.is_none() {
        known.retain(|name| !name.starts_with("adapter/"));
    }
    let mut check = |metric: &str, pointer: &str| {
        if known.iter().any(|name| name == metric) {
            return;
        }
        let metric_shown = shown(metric);
        let detail = match nearest(metric, known.iter().map(String::as_str)) {
            _ if metric.starts_with("eval_") && eval.is_none() => {
                format!(
                    "this job has no metric '{metric_shown}', because it has no evaluation: give eval {{dataset}} or eval {{fraction}}"
                )
            }
            _ if metric.starts_with("kl") && !spec.rloo.needs_reference() => {
                format!("this job has no metric '{metric_shown}', because rloo.beta is 0 and there is no reference")
            }
            Some(near) => format!("this job has no metric '{metric_shown}': did you mean '{near}'?"),
            None => {
                format!("this job has no metric '{metric_shown}'; usual are eval_reward, reward, rewards/NAME/mean, kl")
            }
        };
        errors.push(FieldError::new(pointer, "unknown_metric", detail));
    };
    let mut checkpoints = spec.checkpoints.clone();
    let default = if eval.is_some() { "eval_reward" } else { "reward" };
    let metric = checkpoints.metric_for_best.take().unwrap_or_else(|| default.to_owned());
    check(&metric, "/checkpoints/metric_for_best");
    let early_stopping = spec.early_stopping.as_ref().map(|asked| {
        let metric = asked.metric.clone().unwrap_or_else(|| metric.clone());
        if asked.metric.is_some() {
            check(&metric, "/early_stopping/metric");
        }
        let same = spec.checkpoints.greater_is_better.filter(|_| asked.metric.is_none());
        EarlyStoppingPlan {
            greater_is_better: asked.greater_is_better.or(same).unwrap_or_else(|| greater_is_better(&metric)),
            metric,
            patience: asked.patience,
            min_delta: asked.min_delta,
        }
    });
    if early_stopping.is_some() && eval.is_none() {
        let detail = "patience counts evaluations, and this job has none: give eval {dataset} or eval {fraction}";
        errors.push(FieldError::new("/early_stopping", "needs_eval", detail));
    }
    checkpoints.greater_is_better.get_or_insert_with(|| greater_is_better(&metric));
    checkpoints.metric_for_best = Some(metric);
    (checkpoints, early_stopping)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_direction_follows_from_the_name() {
        for high in
            ["reward", "eval_reward", "rewards/a/mean", "entropy", "completions/mean_length", "eval_rewards/b/mean"]
        {
            assert!(greater_is_better(high), "{high}");
        }
        for low in [
            "loss",
            "kl",
            "kl_sequence",
            "eval_gap",
            "grad_norm",
            "reward_std",
            "eval_rewards/a/std",
            "rewards/a/missing_fraction",
            "eval_completions/clipped_ratio",
            "frac_reward_zero_std",
        ] {
            assert!(!greater_is_better(low), "{low}");
        }
    }
}
