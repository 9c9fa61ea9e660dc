//! Preflight: what a short look at the base model, the prompts and the rewards says of a job before it is submitted.
//!
//! The server hands a [`ProbeTask`] to a process of its own (`crate::prober`), which samples the base model on some
//! prompts, calls the rewards, times a step and answers with a [`ProbeReport`]. What the figures mean is decided by
//! [`verdict::verdict`], a pure function with documented thresholds.

pub mod verdict;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::event::FinishReason;
use crate::sample::RewardValue;
use crate::spec::{Plan, RewardSecrets};

/// What a probe needs; goes to its standard input as one line of JSON.
#[derive(Serialize, Deserialize)]
pub struct ProbeTask {
    /// The job as resolved.
    pub plan: Plan,
    /// By reward name.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// What the rewards' requests may reach, beside public addresses.
    pub allow_outgoing: Vec<String>,
    /// The model's directory.
    pub model_dir: PathBuf,
    /// Where reward models lie, by their ids.
    #[serde(default)]
    pub reward_models: BTreeMap<String, String>,
    /// The checkpoint that the job starts from, if it is a warm start.
    pub initial: Option<PathBuf>,
    /// The chosen rows, with their numbers in the dataset.
    pub rows: Vec<(u64, Map<String, Value>)>,
    /// From the start of the process on, ms.
    pub limit_ms: u64,
}

/// What a probe found; figures that were not measured are null.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProbeReport {
    /// Everything was measured; false: the time limit or a failure ended it early, and the rest is what was known by then.
    pub complete: bool,
    /// What ended it early, if it was no time limit.
    pub error: Option<ProbeError>,
    /// Prompts that were sampled and scored, spread over the dataset.
    pub prompts: u64,
    /// Completions that were sampled and scored.
    pub completions: u64,
    /// Mean of the weighted reward, before clip and KL.
    pub reward: Option<f64>,
    /// Its sample standard deviation over all completions.
    pub reward_std: Option<f64>,
    /// Smallest and largest weighted reward that can be, as far as the rewards say: built-in ones do, services do by the
    /// `range` of their answer to `reward.ping`.
    pub reward_range: Option<(f64, f64)>,
    /// Each reward by its name.
    pub rewards: BTreeMap<String, ProbedReward>,
    /// Of the completions, those without a reward to train on.
    pub missing_fraction: Option<f64>,
    /// Of the groups, those whose rewards are all equal: they train nothing.
    pub tied_groups_fraction: Option<f64>,
    /// Of the groups, those that are tied and whose completions are all the same text.
    pub identical_groups_fraction: Option<f64>,
    /// Of the completions, those that reached `max_completion_length`.
    pub truncated_fraction: Option<f64>,
    /// Tokens.
    pub mean_completion_length: Option<f64>,
    /// Wall-clock time of one optimizer step on this server's first device, from what was measured, scaled to the job's batch.
    pub step_seconds: Option<StepSeconds>,
    /// The instruction set of the processor's kernels that took this time, as `--isa` names it; null on a GPU. Workers of this
    /// server choose alike.
    #[serde(default)]
    #[schema(example = "avx512_bf16")]
    pub isa: Option<String>,
    /// Of the whole job without its evaluations and checkpoints, s; null unless a step could be measured to its end.
    pub eta_s: Option<f64>,
    /// Width of the model's residual stream.
    #[serde(default)]
    pub hidden_size: Option<u64>,
    /// Largest resident size of the probe's process, bytes; a lower bound where the probed batch is smaller than the job's.
    pub peak_memory_bytes: Option<u64>,
    /// Checkpoints that stay when the job is done, bytes.
    pub checkpoints_bytes: Option<u64>,
    /// Free on the server's disk, bytes.
    pub free_disk_bytes: Option<u64>,
    /// Some completions.
    pub samples: Vec<ProbedSample>,
    /// What the rewards complained of.
    pub warnings: Vec<String>,
    /// What it means and what to do; never empty.
    pub verdict: Vec<Finding>,
}

/// Why a probe ended early.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProbeError {
    /// Stable, snake_case.
    pub code: String,
    /// For people.
    pub message: String,
}

/// What a probe saw of one reward.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProbedReward {
    /// Over the completions that have a value.
    pub mean: Option<f64>,
    /// Sample standard deviation.
    pub std: Option<f64>,
    /// Of the completions, those whose value is missing.
    pub missing_fraction: Option<f64>,
    /// Median time for the completions of a batch of prompts, s.
    pub latency_p50_s: Option<f64>,
    /// Longest time, s.
    pub latency_max_s: Option<f64>,
}

/// The parts of an optimizer step, s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StepSeconds {
    /// Sampling.
    pub generate: f64,
    /// Waiting for rewards.
    pub reward: f64,
    /// Log-probs, forward, backward, optimizer; null when the time limit came first.
    pub train: Option<f64>,
    /// All of them; null when one is not known.
    pub total: Option<f64>,
}

/// One completion of a probe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProbedSample {
    /// The dataset row: `row_N`, N counted from 0.
    pub prompt_id: String,
    /// The prompt as text, as the model saw it.
    pub prompt: String,
    /// The completion as text.
    pub completion: String,
    /// The weighted reward; null = without one.
    pub reward: Option<f64>,
    /// Value of each reward by name.
    pub rewards: BTreeMap<String, Option<f64>>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens.
    pub num_tokens: u32,
}

/// One thing that the figures say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// What it is.
    pub code: FindingCode,
    /// The evidence.
    pub detail: String,
    /// What to do.
    pub fix: String,
}

/// What a probe can find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FindingCode {
    /// Nothing was measured.
    NotMeasured,
    /// A reward that the job depends on has no value for many completions.
    RewardNotUsable,
    /// The base model never scores: there is nothing to reinforce.
    SftFirst,
    /// The base model scores nearly all there is to score.
    NothingToLearn,
    /// Groups are tied because their completions are the same.
    RaiseTemperature,
    /// Groups are tied although their completions differ.
    TiedGroups,
    /// Many completions are cut off.
    RaiseMaxCompletionLength,
    /// Most of a step is spent waiting for rewards.
    RewardIsTheBottleneck,
    /// The adapter learns next to nothing at this learning rate.
    LearningRateLowForLora,
    /// Nothing speaks against the job.
    Ready,
}

/// One scored completion, as the figures need it.
#[derive(Debug, Clone)]
pub struct Observed {
    /// What each reward said, in the plan's order.
    pub values: Vec<RewardValue>,
    /// As shown in the report.
    pub sample: ProbedSample,
}

impl ProbeReport {
    /// Fills in what follows from the completions, in groups of `num_generations`.
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

/// All rewards that there are in the group are equal; a group without two of them trains nothing either.
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

/// With n − 1 in the denominator; None below two values.
fn sample_std(values: &[f64]) -> Option<f64> {
    let mean = mean(values.iter().copied()).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

/// The value that half of the others do not exceed; None of none.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(text: &str, reward: Option<f64>, finish_reason: FinishReason) -> Observed {
        let sample = ProbedSample {
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
        let mut report = ProbeReport::default();
        report.observe(&["r".to_owned()], NonZeroUsize::new(2).unwrap(), &all);
        assert_eq!((report.prompts, report.completions), (4, 8));
        assert_eq!(report.reward, Some(4.0 / 7.0));
        assert!((report.reward_std.unwrap() - (12.0f64 / 7.0 / 6.0).sqrt()).abs() < 1e-12);
        assert_eq!((report.missing_fraction, report.truncated_fraction), (Some(0.125), Some(0.25)));
        // The first is tied with one text, the second with two, the last has one reward only.
        assert_eq!((report.tied_groups_fraction, report.identical_groups_fraction), (Some(0.75), Some(0.25)));
        assert_eq!(report.mean_completion_length, Some(2.0));
        assert_eq!(report.rewards["r"].missing_fraction, Some(0.125));
    }

    #[test]
    fn nothing_gives_no_figures() {
        let mut report = ProbeReport::default();
        report.observe(&["r".to_owned()], NonZeroUsize::new(4).unwrap(), &[]);
        assert_eq!((report.reward, report.tied_groups_fraction, report.rewards["r"].mean), (None, None, None));
        assert_eq!((median(vec![]), median(vec![3.0, 1.0, 2.0]), median(vec![2.0, 1.0])), (None, Some(2.0), Some(1.0)));
    }
}
