//! Preflight: a short test of a job's base model, prompts and rewards before the job is submitted.
//!
//! The server passes a [`PreflightTask`] to a child process (`rlood_worker::preflight`), which samples the base model on some
//! prompts, calls the rewards, times a step and answers with a [`PreflightReport`]. [`verdict::verdict`], a pure function with
//! documented thresholds, interprets the figures.

pub mod verdict;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::event::FinishReason;
use crate::rollout::RewardValue;
use crate::spec::{Plan, RewardSecrets};

/// The task of a preflight process, sent to its standard input as one line of JSON.
#[derive(Serialize, Deserialize)]
pub struct PreflightTask {
    /// The job's resolved plan.
    pub plan: Plan,
    /// Secrets of the rewards, by reward name.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// Addresses that reward requests may reach in addition to public ones.
    pub allow_outgoing: Vec<String>,
    /// Directory of the base model.
    pub model_dir: PathBuf,
    /// Directories of the reward models, by model id.
    #[serde(default)]
    pub reward_models: BTreeMap<String, String>,
    /// Directory of the checkpoint that the job starts from; null without a warm start.
    pub initial: Option<PathBuf>,
    /// The selected rows, with their numbers in the dataset.
    pub rows: Vec<(u64, Map<String, Value>)>,
    /// Time limit from the start of the process, in milliseconds.
    pub limit_ms: u64,
}

/// The result of a preflight. Figures that were not measured are null.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = ProbeReport)]
pub struct PreflightReport {
    /// Whether everything was measured. If false, the time limit or a failure ended the preflight early, and the figures cover what
    /// was done by then.
    pub complete: bool,
    /// The failure that ended the preflight early; null = none, or the time limit was reached.
    pub error: Option<PreflightError>,
    /// Number of prompts that were sampled and scored, spread over the dataset.
    pub prompts: u64,
    /// Number of completions that were sampled and scored.
    pub completions: u64,
    /// Mean of the weighted reward, before clipping and KL penalty.
    pub reward: Option<f64>,
    /// Sample standard deviation of the weighted reward over all completions.
    pub reward_std: Option<f64>,
    /// Lowest and highest possible weighted reward, as [lowest, highest]; null = unknown. Built-in rewards declare their range;
    /// services declare it in the `range` of their answer to `reward.ping`.
    pub reward_range: Option<(f64, f64)>,
    /// Results of each reward, by the reward's name.
    pub rewards: BTreeMap<String, PreflightReward>,
    /// Fraction of completions without a reward to train on.
    pub missing_fraction: Option<f64>,
    /// Fraction of groups whose rewards are all equal. Such groups train nothing.
    pub tied_groups_fraction: Option<f64>,
    /// Fraction of groups that are tied and whose completions are all the same text.
    pub identical_groups_fraction: Option<f64>,
    /// Fraction of completions that reached `max_completion_length`.
    pub truncated_fraction: Option<f64>,
    /// Mean length of a completion, in tokens.
    pub mean_completion_length: Option<f64>,
    /// Wall-clock time of one optimizer step on this server's first device, measured and scaled to the job's batch size.
    pub step_seconds: Option<StepSeconds>,
    /// Instruction set of the CPU kernels that `step_seconds` was measured with, as in `--isa`; null on a GPU. The workers of
    /// this server choose the same one.
    #[serde(default)]
    #[schema(example = "avx512_bf16")]
    pub isa: Option<String>,
    /// Estimated time of the whole job without its evaluations and checkpoints, in seconds; null unless a full step was measured.
    pub eta_s: Option<f64>,
    /// Width of the model's residual stream; null = unknown.
    #[serde(default)]
    pub hidden_size: Option<u64>,
    /// Peak resident memory of the preflight process, in bytes. It is a lower bound if the tested batch is smaller than the job's.
    pub peak_memory_bytes: Option<u64>,
    /// Size of the checkpoints that are kept when the job is done, in bytes.
    pub checkpoints_bytes: Option<u64>,
    /// Free space on the server's disk, in bytes.
    pub free_disk_bytes: Option<u64>,
    /// Some of the sampled completions, as examples.
    pub samples: Vec<PreflightSample>,
    /// Warnings from the rewards.
    pub warnings: Vec<String>,
    /// Conclusions from the figures, and what to do; never empty.
    pub verdict: Vec<Finding>,
}

/// Why a preflight ended early.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ProbeError)]
pub struct PreflightError {
    /// Stable error code in snake_case.
    pub code: String,
    /// Human-readable message in English.
    pub message: String,
}

/// Preflight results for one reward.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = ProbedReward)]
pub struct PreflightReward {
    /// Mean over the completions that have a value.
    pub mean: Option<f64>,
    /// Sample standard deviation over the completions that have a value.
    pub std: Option<f64>,
    /// Fraction of completions without a value.
    pub missing_fraction: Option<f64>,
    /// Median time to score the completions of a batch of prompts, in seconds.
    pub latency_p50_s: Option<f64>,
    /// Longest time to score a batch, in seconds.
    pub latency_max_s: Option<f64>,
}

/// Time of an optimizer step by stage, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StepSeconds {
    /// Time that the step spends on sampling, in seconds.
    pub generate: f64,
    /// Time that the step waits for rewards, in seconds.
    pub reward: f64,
    /// Time spent on log-probabilities, forward and backward passes and the optimizer, in seconds; null = the time
    /// limit was reached first.
    pub train: Option<f64>,
    /// Total time, in seconds; null = one of the stages is unknown.
    pub total: Option<f64>,
}

/// One completion of a preflight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = ProbedSample)]
pub struct PreflightSample {
    /// Dataset row of the prompt: `row_N`, with N counted from 0.
    pub prompt_id: String,
    /// The prompt as text, as the model saw it.
    pub prompt: String,
    /// The completion as text, without special tokens.
    pub completion: String,
    /// Weighted reward of the completion; null = none.
    pub reward: Option<f64>,
    /// Value of each reward, by name; null = missing or not applicable.
    pub rewards: BTreeMap<String, Option<f64>>,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// Length of the completion, in tokens.
    pub num_tokens: u32,
}

/// One conclusion from the preflight's figures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Type of the finding.
    pub code: FindingCode,
    /// The evidence for the finding.
    pub detail: String,
    /// How to fix the problem.
    pub fix: String,
}

/// Type of a preflight finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FindingCode {
    /// The preflight could not measure anything.
    NotMeasured,
    /// A required reward has no value for many completions.
    RewardNotUsable,
    /// The base model never earns a reward, so there is nothing to reinforce.
    SftFirst,
    /// The base model already earns nearly the highest reward.
    NothingToLearn,
    /// Groups are tied because their completions are the same.
    RaiseTemperature,
    /// Groups are tied although their completions differ.
    TiedGroups,
    /// Many completions are truncated.
    RaiseMaxCompletionLength,
    /// Most of a step is spent waiting for rewards.
    RewardIsTheBottleneck,
    /// The learning rate is too low for the adapter to learn much.
    LearningRateLowForLora,
    /// No problem was found.
    Ready,
}

/// One scored completion, from which the preflight's figures are computed.
#[derive(Debug, Clone)]
pub struct Observed {
    /// Value of each reward, in the plan's order.
    pub values: Vec<RewardValue>,
    /// The completion as shown in the report.
    pub sample: PreflightSample,
}

impl PreflightReport {
    /// Computes the preflight's figures from the completions, in groups of `num_generations`.
    pub fn observe(&mut self, reward_names: &[String], num_generations: NonZeroUsize, observed: &[Observed]) {
        let groups: Vec<&[Observed]> = observed.chunks(num_generations.get()).collect();
        let rewards: Vec<f64> = observed.iter().filter_map(|one| one.sample.reward).collect();
        self.prompts = groups.len() as u64;
        self.completions = observed.len() as u64;
        self.reward = mean(rewards.iter().copied());
        self.reward_std = sample_std(&rewards);
        for (index, name) in reward_names.iter().enumerate() {
            let values = || observed.iter().filter_map(|one| one.values.get(index).copied());
            let numbers: Vec<f64> = values().filter_map(RewardValue::number).collect();
            let reward = self.rewards.entry(name.clone()).or_default();
            reward.mean = mean(numbers.iter().copied());
            reward.std = sample_std(&numbers);
            reward.missing_fraction = fraction(values(), |value| *value == RewardValue::Missing);
        }
        self.missing_fraction = fraction(observed.iter(), |one| one.sample.reward.is_none());
        self.tied_groups_fraction = fraction(groups.iter(), |group| is_tied(group));
        self.identical_groups_fraction = fraction(groups.iter(), |group| is_tied(group) && is_one_text(group));
        self.truncated_fraction = fraction(observed.iter(), |one| one.sample.finish_reason == FinishReason::Length);
        self.mean_completion_length = mean(observed.iter().map(|one| f64::from(one.sample.num_tokens)));
    }
}

/// Whether all known rewards of the group are equal. A group with fewer than two rewards also trains nothing.
fn is_tied(group: &[Observed]) -> bool {
    let rewards = || group.iter().filter_map(|one| one.sample.reward);
    let (low, high) = rewards().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), r| (low.min(r), high.max(r)));
    rewards().count() < 2 || high == low
}

fn is_one_text(group: &[Observed]) -> bool {
    group.windows(2).all(|pair| pair[0].sample.completion == pair[1].sample.completion)
}

fn fraction<T>(all: impl Iterator<Item = T>, holds: impl Fn(&T) -> bool) -> Option<f64> {
    mean(all.map(|one| f64::from(u8::from(holds(&one)))))
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

/// Returns the standard deviation with n − 1 in the denominator; `None` below two values.
fn sample_std(values: &[f64]) -> Option<f64> {
    let mean = mean(values.iter().copied()).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

/// Returns the median (the upper of two middle values); `None` without values.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(text: &str, reward: Option<f64>, finish_reason: FinishReason) -> Observed {
        let sample = PreflightSample {
            prompt_id: "row_0".into(),
            prompt: "p".into(),
            completion: text.into(),
            reward,
            rewards: BTreeMap::new(),
            finish_reason,
            num_tokens: text.len() as u32,
        };
        Observed { values: vec![reward.map_or(RewardValue::Missing, RewardValue::Number)], sample }
    }

    #[test]
    fn figures_follow_from_the_completions() {
        use FinishReason::{Length, Stop};
        let all = [
            observed("a", Some(1.0), Stop),
            observed("a", Some(1.0), Stop),
            observed("ab", Some(0.0), Length),
            observed("ac", Some(0.0), Stop),
            observed("a", Some(1.0), Stop),
            observed("abc", Some(0.0), Stop),
            observed("abcd", None, Length),
            observed("ab", Some(1.0), Stop),
        ];
        let mut report = PreflightReport::default();
        report.observe(&["r".to_owned()], NonZeroUsize::new(2).unwrap(), &all);
        assert_eq!((report.prompts, report.completions), (4, 8));
        assert_eq!(report.reward, Some(4.0 / 7.0));
        assert!((report.reward_std.unwrap() - (12.0f64 / 7.0 / 6.0).sqrt()).abs() < 1e-12);
        assert_eq!((report.missing_fraction, report.truncated_fraction), (Some(0.125), Some(0.25)));
        // The first group is tied with one text, the second with two texts, and the last has only one reward.
        assert_eq!((report.tied_groups_fraction, report.identical_groups_fraction), (Some(0.75), Some(0.25)));
        assert_eq!(report.mean_completion_length, Some(2.0));
        assert_eq!(report.rewards["r"].missing_fraction, Some(0.125));
    }

    #[test]
    fn nothing_gives_no_figures() {
        let mut report = PreflightReport::default();
        report.observe(&["r".to_owned()], NonZeroUsize::new(4).unwrap(), &[]);
        assert_eq!((report.reward, report.tied_groups_fraction, report.rewards["r"].mean), (None, None, None));
        assert_eq!((median(vec![]), median(vec![3.0, 1.0, 2.0]), median(vec![2.0, 1.0])), (None, Some(2.0), Some(1.0)));
    }
}
