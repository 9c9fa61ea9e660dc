//! The recent values of the metrics that the rules examine.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{Observation, RuleInput};
use crate::event::Metrics;

/// Number of recent values kept of each metric.
const MAX_RECENT: usize = 24;
/// Number of values from the beginning of a run that are kept permanently.
pub(super) const EARLY: usize = 5;

/// Metrics that some rule examines, in addition to the rewards of weight 0.
const WATCHED: [&str; 22] = [
    "reward",
    "reward_std",
    "grad_norm",
    "kl",
    "frac_reward_zero_std_pre_kl",
    "completions/clipped_ratio",
    "completions/mean_length",
    "clip_ratio/region_mean",
    "entropy",
    "adapter/delta_norm",
    "skipped_updates",
    "eval_reward",
    "eval_reward_std",
    "eval_gap",
    "reward_at_eval",
    "sampling/mismatch_kl",
    "environment/parse_error_fraction",
    "environment/masked_fraction",
    "environment/at_limit_fraction",
    "environment/restart_fraction",
    "tools/call_frequency",
    "tools/offered",
];
/// Metrics that are durations. They depend on the machine and not on the run, so they are left out of the trainer state.
const DURATIONS: [&str; 2] = ["step_time", "step_time/reward"];

/// The recent and first values of one metric, as `(step, value)` in order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Series {
    /// Number of values that the metric ever had.
    count: u64,
    /// The first [`EARLY`] values of the metric.
    early: Vec<(u64, f64)>,
    /// The last [`MAX_RECENT`] values of the metric.
    recent: VecDeque<(u64, f64)>,
}

impl Series {
    fn push(&mut self, step: u64, value: f64) {
        self.count += 1;
        if self.early.len() < EARLY {
            self.early.push((step, value));
        }
        if self.recent.len() == MAX_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((step, value));
    }
}

/// The metrics of a run that the alert rules remember.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct History {
    series: BTreeMap<String, Series>,
    #[serde(skip)]
    times: BTreeMap<String, Series>,
    /// The lowest and the highest reward of any completion so far.
    seen: Option<(f64, f64)>,
    /// The highest mean reward of a rollout so far.
    best_reward: Option<f64>,
}

/// Consecutive values of one metric; never empty.
#[derive(Debug, Clone)]
pub(super) struct Window {
    metric: String,
    points: Vec<(u64, f64)>,
}

impl History {
    pub(super) fn push(&mut self, step: u64, metrics: &Metrics, input: &RuleInput<'_>) {
        let value = |name: &str| metrics.get(name).copied().flatten().filter(|value| value.is_finite());
        // Stores the training reward at the time of an evaluation, so that the two can be compared later.
        if value("eval_reward").is_some()
            && let Some(reward) = self.up_to("reward", super::rules::RECENT)
        {
            self.series.entry("reward_at_eval".into()).or_default().push(step, reward.mean());
        }
        let independent = input
            .independent
            .iter()
            .flat_map(|(name, _)| [format!("rewards/{name}/mean"), format!("eval_rewards/{name}/mean")]);
        for name in WATCHED.map(str::to_owned).into_iter().chain(independent) {
            if let Some(value) = value(&name) {
                self.series.entry(name).or_default().push(step, value);
            }
        }
        for name in DURATIONS {
            if let Some(value) = value(name) {
                self.times.entry(name.to_owned()).or_default().push(step, value);
            }
        }
        for reward in [value("reward_min"), value("reward_max")].into_iter().flatten() {
            let (low, high) = self.seen.unwrap_or((reward, reward));
            self.seen = Some((low.min(reward), high.max(reward)));
        }
        if let Some(reward) = value("reward") {
            self.best_reward = Some(self.best_reward.map_or(reward, |best| best.max(reward)));
        }
    }

    fn of(&self, metric: &str) -> Option<&Series> {
        self.series.get(metric).or_else(|| self.times.get(metric))
    }

    /// Returns the last `length` values of a metric; `None` if there are fewer.
    pub(super) fn last(&self, metric: &str, length: usize) -> Option<Window> {
        self.before(metric, length, 0)
    }

    /// Returns the last values of a metric, at most `length`; `None` if there are none.
    pub(super) fn up_to(&self, metric: &str, length: usize) -> Option<Window> {
        let known = self.of(metric)?.recent.len();
        self.before(metric, length.min(known), 0)
    }

    /// Returns the `length` values of a metric that precede its last `skip` values; `None` if there are fewer.
    pub(super) fn before(&self, metric: &str, length: usize, skip: usize) -> Option<Window> {
        let recent = &self.of(metric)?.recent;
        let end = recent.len().checked_sub(skip)?;
        let start = end.checked_sub(length).filter(|_| length > 0)?;
        Some(Window { metric: metric.to_owned(), points: recent.range(start..end).copied().collect() })
    }

    /// Returns the first [`EARLY`] values of a metric; `None` if there are fewer.
    pub(super) fn early(&self, metric: &str) -> Option<Window> {
        let early = &self.of(metric)?.early;
        (early.len() == EARLY).then(|| Window { metric: metric.to_owned(), points: early.clone() })
    }

    /// Returns the number of values that a metric ever had.
    pub(super) fn count(&self, metric: &str) -> u64 {
        self.of(metric).map_or(0, |series| series.count)
    }

    /// Returns the lowest and the highest reward of any completion so far.
    pub(super) fn seen(&self) -> Option<(f64, f64)> {
        self.seen
    }

    /// Returns the highest mean reward of a rollout.
    pub(super) fn best_reward(&self) -> Option<f64> {
        self.best_reward
    }
}

impl Window {
    pub(super) fn values(&self) -> impl Iterator<Item = f64> + '_ {
        self.points.iter().map(|(_, value)| *value)
    }

    /// Returns a metric's remembered values as `(step, value)`, in order.
    pub(super) fn points(&self) -> &[(u64, f64)] {
        &self.points
    }

    pub(super) fn mean(&self) -> f64 {
        self.values().sum::<f64>() / self.points.len().max(1) as f64
    }

    pub(super) fn latest(&self) -> f64 {
        self.points.last().map_or(f64::NAN, |(_, value)| *value)
    }

    pub(super) fn median(&self) -> f64 {
        let mut values: Vec<f64> = self.values().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        match values.len() {
            0 => f64::NAN,
            even if even % 2 == 0 => (values[middle - 1] + values[middle]) / 2.0,
            _ => values[middle],
        }
    }

    /// Returns the noise of the values around a slow trend: the root of half the mean squared difference of neighbors (von Neumann
    /// 1941, the mean square successive difference).
    pub(super) fn jitter(&self) -> f64 {
        let squares: Vec<f64> = self.points.windows(2).map(|pair| (pair[1].1 - pair[0].1).powi(2)).collect();
        (squares.iter().sum::<f64>() / (2 * squares.len().max(1)) as f64).sqrt()
    }

    /// Returns a statistic of this window as evidence for an alert.
    pub(super) fn observe(&self, statistic: &str, value: f64, limit: Option<f64>) -> Observation {
        let step = |point: Option<&(u64, f64)>| point.map_or(0, |(step, _)| *step);
        Observation {
            metric: self.metric.clone(),
            statistic: statistic.to_owned(),
            value,
            limit,
            from_step: step(self.points.first()),
            to_step: step(self.points.last()),
        }
    }

    /// Returns the mean of the window as evidence.
    pub(super) fn observe_mean(&self, limit: Option<f64>) -> Observation {
        self.observe("mean", self.mean(), limit)
    }
}
