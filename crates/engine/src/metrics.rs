//! The metrics of a rollout and of an optimizer step, under TRL's names (rloo.md, "Metrics").

use std::collections::BTreeMap;

use rlood_types::rollout::{RewardValue, Score};

use super::advantage::{Advantages, mean, sample_std};
use super::host::Rollout;
use super::loss::{RowLoss, total_loss};
use crate::environment::{Episode, EpisodeStop, EpisodeTurn, StepAnswer};
use crate::event::{FinishReason, Metrics};
use crate::spec::EnvironmentKind;

/// A scored rollout, with one entry per completion.
#[derive(Debug, Clone, Copy)]
pub struct RolloutRows<'a> {
    /// Names of the rewards, in the plan's order.
    pub reward_names: &'a [String],
    /// The values of all rewards.
    pub scores: &'a [Score],
    /// The weighted sum; `None` = unscorable.
    pub weighted: &'a [Option<f64>],
    /// Number of completion tokens, including the EOS token.
    pub lengths: &'a [usize],
    /// The reason why each completion ended.
    pub finish_reasons: &'a [FinishReason],
}

/// Computes reward, reward_std, reward_min, reward_max, rewards/{name}/…, completions/…
pub fn rollout_metrics(rows: &RolloutRows<'_>) -> Metrics {
    let RolloutRows { reward_names, scores, weighted, lengths, finish_reasons } = *rows;
    let mut metrics = Metrics::new();
    for (index, name) in reward_names.iter().enumerate() {
        let values: Vec<RewardValue> = scores.iter().filter_map(|score| score.values.get(index).copied()).collect();
        let numbers: Vec<f64> = values.iter().filter_map(|value| value.number()).collect();
        let missing: Vec<f64> =
            values.iter().map(|value| f64::from(u8::from(*value == RewardValue::Missing))).collect();
        metrics.insert(format!("rewards/{name}/mean"), mean(&numbers));
        metrics.insert(format!("rewards/{name}/std"), sample_std(&numbers));
        metrics.insert(format!("rewards/{name}/missing_fraction"), mean(&missing));
    }
    let scorable: Vec<f64> = weighted.iter().flatten().copied().collect();
    metrics.insert("reward".into(), mean(&scorable));
    metrics.insert("reward_std".into(), sample_std(&scorable));
    metrics.insert("reward_min".into(), scorable.iter().copied().reduce(f64::min));
    metrics.insert("reward_max".into(), scorable.iter().copied().reduce(f64::max));
    length_metrics(&mut metrics, "length", lengths.iter().copied());
    let terminated = lengths.iter().zip(finish_reasons).filter(|(_, reason)| **reason == FinishReason::Stop);
    length_metrics(&mut metrics, "terminated_length", terminated.map(|(length, _)| *length));
    let truncated: Vec<f64> =
        finish_reasons.iter().map(|reason| f64::from(u8::from(*reason == FinishReason::Length))).collect();
    metrics.insert("completions/clipped_ratio".into(), mean(&truncated));
    metrics
}

/// Computes environment/… of a rollout's episodes; empty without an environment. Lengths are in tokens. With tools alone no episode
/// has a reward of its own, and those are missing that a failed tool has broken off.
pub fn episode_metrics(rollout: &Rollout, kind: Option<EnvironmentKind>) -> Metrics {
    let completions: Vec<_> = rollout.completions().map(|(_, completion)| completion).collect();
    let episodes: Vec<&Episode> = completions.iter().filter_map(|completion| completion.episode.as_deref()).collect();
    if episodes.is_empty() {
        return Metrics::new();
    }
    let mut metrics = Metrics::new();
    let mut insert = |name: &str, value: Option<f64>| metrics.insert(format!("environment/{name}"), value);
    let of = |value: &dyn Fn(&Episode) -> f64| episodes.iter().map(|episode| value(episode)).collect::<Vec<_>>();
    let turns = of(&|episode| episode.turns.len() as f64);
    insert("turns/mean", mean(&turns));
    insert("turns/min", turns.iter().copied().reduce(f64::min));
    insert("turns/max", turns.iter().copied().reduce(f64::max));
    let returns: Vec<f64> = episodes.iter().filter_map(|episode| episode.total).collect();
    insert("return_mean", mean(&returns));
    insert("return_std", sample_std(&returns));
    let is_missing = |episode: &Episode| match kind {
        Some(EnvironmentKind::Tools) => episode.stop == EpisodeStop::Failed,
        Some(EnvironmentKind::Http | EnvironmentKind::Openenv) | None => episode.total.is_none(),
    };
    insert("missing_fraction", mean(&of(&|episode| f64::from(u8::from(is_missing(episode))))));
    insert("restart_fraction", mean(&of(&|episode| f64::from(u8::from(episode.restarts > 0)))));
    insert("restarts", Some(of(&|episode| f64::from(episode.restarts)).iter().sum()));
    let escaped = of(&|episode| f64::from(episode.special_tokens_escaped));
    insert("special_tokens_escaped", Some(escaped.iter().sum()));
    let of_turns = |value: &dyn Fn(&EpisodeTurn) -> f64| -> f64 {
        episodes.iter().flat_map(|episode| &episode.turns).map(value).sum()
    };
    let all_turns: f64 = turns.iter().sum();
    let share = |part: f64, whole: f64| (whole > 0.0).then(|| part / whole);
    insert("observation_cut", Some(of_turns(&|turn| f64::from(turn.observations_cut))));
    let errors = of_turns(&|turn| f64::from(u8::from(turn.parse_error.is_some())));
    insert("parse_error_fraction", share(errors, all_turns));
    let model: usize = completions.iter().map(|completion| completion.segments.num_model_tokens()).sum();
    let all: usize = completions.iter().map(|completion| completion.segments.num_tokens()).sum();
    let number = episodes.len() as f64;
    insert("model_tokens", Some(model as f64 / number));
    insert("masked_tokens", Some((all - model) as f64 / number));
    insert("masked_fraction", share((all - model) as f64, all as f64));
    insert("at_limit_fraction", mean(&of(&|episode| f64::from(u8::from(episode.stop.is_limit())))));
    for stop in EpisodeStop::ALL {
        let ended = of(&|episode| f64::from(u8::from(episode.stop == stop)));
        insert(&format!("stop/{}", stop.name()), mean(&ended));
    }
    let calls = of_turns(&|turn| turn.tool_calls.len() as f64);
    let latencies = episodes.iter().flat_map(|episode| &episode.turns).filter_map(|turn| turn.latency_ms);
    let mut latencies: Vec<f64> = latencies.map(|latency| f64::from(latency) / 1000.0).collect();
    latencies.sort_by(f64::total_cmp);
    for (name, share) in [("p50", 0.5), ("p95", 0.95)] {
        // The smallest value that at least this share of the values does not exceed.
        let at = (share * latencies.len() as f64).ceil() as usize;
        if let Some(latency) = latencies.get(at.saturating_sub(1)) {
            metrics.insert(format!("environment/latency_{name}"), Some(*latency));
        }
    }
    metrics.extend(own_metrics(&episodes));
    let offers = of(&|episode| f64::from(u8::from(episode.num_tools > 0)));
    metrics.insert("tools/offered".to_owned(), mean(&offers));
    metrics.insert("tools/call_frequency".to_owned(), Some(calls / number));
    metrics.insert("tools/failure_frequency".to_owned(), share(errors, errors + calls).or(Some(0.0)));
    metrics
}

/// The environment's own numbers: the mean over the turns that have one, for at most [`StepAnswer::MAX_METRICS`] names.
fn own_metrics(episodes: &[&Episode]) -> Metrics {
    let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, value) in episodes.iter().flat_map(|episode| &episode.turns).flat_map(|turn| &turn.metrics) {
        values.entry(name).or_default().push(*value);
    }
    let named = values.into_iter().take(StepAnswer::MAX_METRICS);
    named.map(|(name, values)| (format!("environment/metrics/{name}"), mean(&values))).collect()
}

/// Inserts mean, min and max of completion lengths; all 0 if there are no completions, as in TRL.
fn length_metrics(metrics: &mut Metrics, name: &str, lengths: impl Iterator<Item = usize>) {
    let lengths: Vec<f64> = lengths.map(|length| length as f64).collect();
    let (smallest, largest) = lengths.iter().fold((f64::INFINITY, 0.0f64), |(a, b), &x| (a.min(x), b.max(x)));
    let smallest = if lengths.is_empty() { 0.0 } else { smallest };
    metrics.insert(format!("completions/mean_{name}"), Some(mean(&lengths).unwrap_or(0.0)));
    metrics.insert(format!("completions/min_{name}"), Some(smallest));
    metrics.insert(format!("completions/max_{name}"), Some(largest));
}

/// Computes frac_reward_zero_std (after length terms and KL, as in TRL), frac_reward_zero_std_pre_kl (before),
/// advantage_std.
pub fn advantage_metrics(advantages: &Advantages) -> Metrics {
    let share = |tied: &[bool]| mean(&tied.iter().map(|tied| f64::from(u8::from(*tied))).collect::<Vec<_>>());
    Metrics::from([
        ("frac_reward_zero_std".into(), share(&advantages.tied)),
        ("frac_reward_zero_std_pre_kl".into(), share(&advantages.tied_pre_kl)),
        ("advantage_std".into(), sample_std(&advantages.advantages)),
    ])
}

/// Per-token log-probs of the sampling policy and of the reference; masked completions do not count.
#[derive(Debug, Clone, Copy)]
pub struct KlRow<'a> {
    /// Log-probs of the sampling policy.
    pub old_logps: &'a [f32],
    /// Log-probs of the reference.
    pub ref_logps: &'a [f32],
    /// False for a masked completion.
    pub included: bool,
}

/// Computes kl (token mean of k1, as in TRL), kl_sequence (mean over completions of the sum, which the penalty uses),
/// kl_k3 (token mean of Schulman's always positive estimator, <http://joschu.net/blog/kl-approx.html>).
pub fn kl_metrics(rows: &[KlRow<'_>]) -> Metrics {
    let (mut k1, mut k3, mut tokens, mut completions) = (0.0, 0.0, 0u64, 0u64);
    for row in rows.iter().filter(|row| row.included) {
        completions += 1;
        for (&old, &reference) in row.old_logps.iter().zip(row.ref_logps) {
            let log_ratio = f64::from(old) - f64::from(reference);
            k1 += log_ratio;
            k3 += (-log_ratio).exp_m1() + log_ratio;
            tokens += 1;
        }
    }
    Metrics::from([
        ("kl".into(), Some(k1 / tokens.max(1) as f64)),
        ("kl_sequence".into(), Some(k1 / completions.max(1) as f64)),
        ("kl_k3".into(), Some(k3 / tokens.max(1) as f64)),
    ])
}

/// Computes loss and clip_ratio/… over the completions of one optimizer step, each counted once. Means are over ratios:
/// one per completion, or one per token if the loss clips each token. Extremes are over completions.
pub fn loss_metrics(rows: &[RowLoss]) -> Metrics {
    let ratios = rows.iter().map(|row| row.num_ratios).sum::<usize>().max(1) as f64;
    let fraction = |clipped: &dyn Fn(&RowLoss) -> usize| Some(rows.iter().map(clipped).sum::<usize>() as f64 / ratios);
    let of_row = |clipped: usize, row: &RowLoss| clipped as f64 / row.num_ratios.max(1) as f64;
    let lowest = rows.iter().map(|row| of_row(row.clipped_low, row)).fold(1.0, f64::min);
    let highest = rows.iter().map(|row| of_row(row.clipped_high, row)).fold(0.0, f64::max);
    Metrics::from([
        ("loss".into(), Some(total_loss(rows))),
        ("clip_ratio/low_mean".into(), fraction(&|row| row.clipped_low)),
        ("clip_ratio/low_min".into(), Some(lowest)),
        ("clip_ratio/high_mean".into(), fraction(&|row| row.clipped_high)),
        ("clip_ratio/high_max".into(), Some(highest)),
        ("clip_ratio/region_mean".into(), fraction(&|row| row.clipped_low + row.clipped_high)),
    ])
}

/// Computes sampling/sampling_logp_difference/mean and /max: the absolute difference between the log-probs recorded by
/// the sampler (first argument) and those of the training forward, over the tokens of unmasked completions; 0
/// if all are masked.
pub fn sampling_metrics<'a>(rows: impl Iterator<Item = (&'a [f32], &'a [f32])>) -> Metrics {
    let (mut sum, mut largest, mut tokens) = (0.0, 0.0f64, 0u64);
    for (sampled, trained) in rows {
        for (&sampled, &trained) in sampled.iter().zip(trained) {
            let difference = (f64::from(sampled) - f64::from(trained)).abs();
            sum += difference;
            largest = largest.max(difference);
            tokens += 1;
        }
    }
    Metrics::from([
        ("sampling/sampling_logp_difference/mean".into(), Some(sum / tokens.max(1) as f64)),
        ("sampling/sampling_logp_difference/max".into(), Some(largest)),
    ])
}

/// Token mean of the entropies of unmasked completions, in nats; 0 if all are masked.
pub fn entropy<'a>(rows: impl Iterator<Item = (&'a [f32], bool)>) -> f64 {
    let (mut sum, mut tokens) = (0.0, 0u64);
    for (entropies, included) in rows {
        if included {
            sum += entropies.iter().map(|&entropy| f64::from(entropy)).sum::<f64>();
            tokens += entropies.len() as u64;
        }
    }
    sum / tokens.max(1) as f64
}
