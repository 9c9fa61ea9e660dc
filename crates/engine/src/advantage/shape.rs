//! Shapes rewards between the weighted sum and the KL penalty: normalization, clip, length terms (rloo.md, "Reward →
//! advantage", 2 and 6).

use serde::{Deserialize, Serialize};

use super::estimator::GROUP_EPSILON;
use crate::spec::{Plan, RewardNormalization};

/// Count, mean and squared deviations of all rewards so far (Welford 1962); stored in the checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardStats {
    /// Number of scorable rewards.
    pub count: u64,
    /// Mean of the scorable rewards so far.
    pub mean: f64,
    /// Sum of the rewards' squared deviations from the mean, Σ (r − mean)².
    pub squares: f64,
}

impl RewardStats {
    /// Adds the scorable rewards of a block to the statistics, in order.
    pub fn with(mut self, rewards: impl IntoIterator<Item = f64>) -> Self {
        for reward in rewards {
            self.count += 1;
            let difference = reward - self.mean;
            self.mean += difference / self.count as f64;
            self.squares += difference * (reward - self.mean);
        }
        self
    }

    /// Whether mean and squared deviations are finite, so that JSON can represent them.
    pub fn is_finite(&self) -> bool {
        self.mean.is_finite() && self.squares.is_finite()
    }

    /// Sample standard deviation of the rewards; 0 below two rewards.
    pub fn std(&self) -> f64 {
        if self.count < 2 { 0.0 } else { (self.squares / (self.count - 1) as f64).sqrt() }
    }
}

/// The reward-shaping steps, in the order in which they apply.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RewardShape {
    /// The reward normalization, which is applied first.
    pub normalization: RewardNormalization,
    /// The range that rewards are clipped to, after the normalization.
    pub clip_range: Option<(f64, f64)>,
    /// The last tokens before the completion limit, over which DAPO's length penalty grows; applied after the clip.
    pub soft_overlong: Option<u32>,
    /// Factor λ of the linear length penalty.
    pub length_penalty: f64,
    /// The maximum completion length, in tokens, to which both length terms refer.
    pub max_completion_length: u32,
}

/// Shaped rewards, one entry per row (B); `None` = unscorable.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ShapedRewards {
    /// Rewards after normalization and clip: a group in which these are equal is tied.
    pub task: Vec<Option<f64>>,
    /// Rewards after the length terms; the KL penalty is subtracted next.
    pub shaped: Vec<Option<f64>>,
}

impl RewardShape {
    /// The reward-shaping settings of a job's plan.
    pub fn of_plan(plan: &Plan) -> Self {
        let rloo = &plan.rloo;
        Self {
            normalization: rloo.reward_normalization,
            clip_range: rloo.reward_clip_range,
            soft_overlong: rloo.soft_overlong,
            length_penalty: rloo.length_penalty,
            max_completion_length: plan.sampling.max_completion_length,
        }
    }

    /// The statistics that normalize a block: of its own rewards, or of these and all earlier ones.
    pub fn stats(&self, before: RewardStats, weighted: &[Option<f64>]) -> RewardStats {
        let rewards = weighted.iter().flatten().copied();
        match self.normalization {
            RewardNormalization::None => RewardStats::default(),
            RewardNormalization::Batch => RewardStats::default().with(rewards),
            RewardNormalization::Running => before.with(rewards),
        }
    }

    /// Normalizes and clips one weighted reward: (r − mean)/(std + 1e-4), then the range.
    pub fn task_reward(&self, weighted: f64, stats: &RewardStats) -> f64 {
        let normalized = match self.normalization {
            RewardNormalization::None => weighted,
            RewardNormalization::Batch | RewardNormalization::Running => {
                (weighted - stats.mean) / (stats.std() + GROUP_EPSILON)
            }
        };
        match self.clip_range {
            Some((low, high)) => normalized.max(low).min(high),
            None => normalized,
        }
    }

    /// The sum of the length terms for a completion of `num_tokens` tokens; at most 0.
    pub fn length_term(&self, num_tokens: usize) -> f64 {
        let limit = self.max_completion_length;
        let overlong = self.soft_overlong.map_or(0.0, |cache| soft_overlong(num_tokens, limit, cache));
        overlong + length_penalty(num_tokens, limit, self.length_penalty)
    }

    /// Shapes all rewards of a block, with the statistics from [`RewardShape::stats`].
    pub fn shape(&self, weighted: &[Option<f64>], lengths: &[usize], stats: &RewardStats) -> ShapedRewards {
        let task: Vec<Option<f64>> =
            weighted.iter().map(|reward| reward.map(|reward| self.task_reward(reward, stats))).collect();
        let rows = task.iter().zip(lengths);
        let shaped = rows.map(|(task, &length)| task.map(|task| task + self.length_term(length))).collect();
        ShapedRewards { task, shaped }
    }
}

/// Returns 0 up to `limit` − `cache` tokens, falls linearly to −1 at `limit`, and stays −1 beyond.
/// This is DAPO's "soft overlong punishment": Yu et al. 2025 (arXiv 2503.14476), equation 13; the
/// same as TRL's `get_soft_overlong_punishment`.
pub fn soft_overlong(num_tokens: usize, limit: u32, cache: u32) -> f64 {
    let (tokens, limit, cache) = (num_tokens as f64, f64::from(limit), f64::from(cache));
    if tokens <= limit - cache {
        0.0
    } else if tokens <= limit {
        (limit - cache - tokens) / cache
    } else {
        -1.0
    }
}

/// Linear length penalty: −λ·num_tokens/max_completion_length (rloo.md, length regularization).
pub fn length_penalty(num_tokens: usize, limit: u32, lambda: f64) -> f64 {
    // Avoids a penalty of −0 if λ is 0.
    if lambda == 0.0 { 0.0 } else { -lambda * num_tokens as f64 / f64::from(limit.max(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: RewardShape = RewardShape {
        normalization: RewardNormalization::None,
        clip_range: None,
        soft_overlong: None,
        length_penalty: 0.0,
        max_completion_length: 10,
    };

    #[test]
    fn running_statistics_are_those_of_all_rewards_at_once() {
        let rewards = [0.25, -1.5, 3.0, 3.0, 0.0, 7.5];
        let (first, rest) = rewards.split_at(2);
        let stats = RewardStats::default().with(first.iter().copied()).with(rest.iter().copied());
        let std = super::super::sample_std(&rewards).unwrap_or_default();
        assert!((stats.mean - rewards.iter().sum::<f64>() / 6.0).abs() < 1e-12 && (stats.std() - std).abs() < 1e-12);
        assert_eq!(stats.count, 6);
    }

    #[test]
    fn batch_normalization_uses_only_the_block_and_running_normalization_all_rewards_so_far() {
        let weighted = [Some(2.0), None, Some(4.0)];
        let before = RewardStats::default().with([10.0, 12.0]);
        let batch = RewardShape { normalization: RewardNormalization::Batch, ..SHAPE };
        let stats = batch.stats(before, &weighted);
        let scaled = 1.0 / (2f64.sqrt() + 1e-4);
        assert_eq!(batch.shape(&weighted, &[1; 3], &stats).shaped, [Some(-scaled), None, Some(scaled)]);
        let running = RewardShape { normalization: RewardNormalization::Running, ..SHAPE };
        let stats = running.stats(before, &weighted);
        assert_eq!((stats.count, stats.mean), (4, 7.0));
        assert_eq!(running.task_reward(7.0, &stats), 0.0);
    }

    #[test]
    fn the_clip_comes_after_the_normalization_and_the_length_terms_after_the_clip() {
        let shape = RewardShape {
            normalization: RewardNormalization::Batch,
            clip_range: Some((-0.5, 0.5)),
            length_penalty: 0.2,
            soft_overlong: Some(4),
            ..SHAPE
        };
        let weighted = [Some(-3.0), Some(3.0)];
        let shaped = shape.shape(&weighted, &[5, 8], &shape.stats(RewardStats::default(), &weighted));
        assert_eq!(shaped.task, [Some(-0.5), Some(0.5)]);
        assert_eq!(shaped.shaped, [Some(-0.5 - 0.1), Some(0.5 + (-0.5 - 0.16))]);
    }

    #[test]
    fn equal_rewards_normalize_to_zero() {
        let shape = RewardShape { normalization: RewardNormalization::Batch, ..SHAPE };
        let weighted = [Some(0.3), Some(0.3)];
        let stats = shape.stats(RewardStats::default(), &weighted);
        assert_eq!(shape.shape(&weighted, &[1, 2], &stats).shaped, [Some(0.0), Some(0.0)]);
    }
}
