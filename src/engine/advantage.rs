//! Rewards to advantages, in f64, without tensors (rloo.md, "Reward → advantage").
//!
//! Σ w·r → clip → − beta·KL → leave-one-out within the group → optional normalisation over the block.
//! Sources: Ahmadian et al. 2024 (arXiv 2402.14740) for the estimator; TRL's RLOOTrainer for the order of operations.

use crate::sample::RewardValue;
use crate::spec::{Combine, Plan, RewardPlan};

/// What one reward is worth in the sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RewardWeight {
    /// 0 = metric only.
    pub weight: f64,
    /// A missing value makes the sample unscorable; otherwise it counts as not applicable.
    pub required: bool,
}

impl RewardWeight {
    /// The weights of a plan, in its order.
    pub fn of_plan(rewards: &[RewardPlan]) -> Vec<Self> {
        rewards.iter().map(|reward| Self { weight: reward.weight, required: reward.required }).collect()
    }
}

/// One number from what the rewards said of a sample; `None` = unscorable.
///
/// `Renormalize` scales the applicable weights by Σ|w| / Σ_applicable|w|. `Nansum` is TRL: a missing reward contributes 0,
/// nothing is scaled, and only a sample without any value is unscorable.
pub fn combine_rewards(values: &[RewardValue], weights: &[RewardWeight], combine: Combine) -> Option<f64> {
    let pairs = || values.iter().zip(weights);
    let applicable = || pairs().filter_map(|(value, weight)| value.number().map(|number| (number, weight.weight)));
    let sum: f64 = applicable().map(|(number, weight)| number * weight).sum();
    match combine {
        Combine::Nansum => applicable().next().map(|_| sum),
        Combine::Renormalize => {
            let lost = |(value, weight): (&RewardValue, &RewardWeight)| {
                *value == RewardValue::Missing && weight.required && weight.weight != 0.0
            };
            let all: f64 = weights.iter().map(|weight| weight.weight.abs()).sum();
            let present: f64 = applicable().map(|(_, weight)| weight.abs()).sum();
            if pairs().any(lost) || present == 0.0 {
                return None;
            }
            // Equal sums stay exactly as they are: no rounding where nothing is left out.
            Some(if present == all { sum } else { sum * (all / present) })
        }
    }
}

/// Σ_t (old − reference) of one completion: k1, per sequence, may be negative. A masked completion has none.
pub fn sequence_kl(old_logps: &[f32], ref_logps: &[f32], included: bool) -> f64 {
    if !included {
        return 0.0;
    }
    old_logps.iter().zip(ref_logps).map(|(&old, &reference)| f64::from(old) - f64::from(reference)).sum()
}

/// How rewards become advantages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdvantageConfig {
    /// Rows of a group (G), contiguous.
    pub num_generations: usize,
    /// Weight of the KL penalty in the reward.
    pub beta: f64,
    /// On the weighted reward, before the penalty.
    pub reward_clip_range: Option<(f64, f64)>,
    /// (A − mean)/(std + 1e-4) over the block.
    pub normalize_advantages: bool,
}

impl AdvantageConfig {
    /// As the plan says.
    pub fn of_plan(plan: &Plan) -> Self {
        Self {
            num_generations: plan.rloo.num_generations as usize,
            beta: plan.rloo.beta,
            reward_clip_range: plan.rloo.reward_clip_range,
            normalize_advantages: plan.rloo.normalize_advantages,
        }
    }
}

/// Every intermediate of the way from reward to advantage; one entry a row (B), or a group (P).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Advantages {
    /// Clipped and KL-penalised reward (B); `None` = unscorable.
    pub penalized_rewards: Vec<Option<f64>>,
    /// Mean of the scorable siblings (B); `None` without one.
    pub baselines: Vec<Option<f64>>,
    /// Before normalisation (B); 0 for unscorable rows and for rows without a scorable sibling.
    pub unnormalized: Vec<f64>,
    /// Final (B).
    pub advantages: Vec<f64>,
    /// Sample std of the penalised rewards of each group (P); `None` below two scorable rows, 0 when G = 1.
    pub group_std: Vec<Option<f64>>,
    /// The same before clip and KL (P).
    pub group_std_pre_kl: Vec<Option<f64>>,
}

impl Advantages {
    /// Add the groups that follow. What is whitened over a block must be computed over the block at once.
    pub fn append(&mut self, next: Advantages) {
        let Advantages { penalized_rewards, baselines, unnormalized, advantages, group_std, group_std_pre_kl } = next;
        self.penalized_rewards.extend(penalized_rewards);
        self.baselines.extend(baselines);
        self.unnormalized.extend(unnormalized);
        self.advantages.extend(advantages);
        self.group_std.extend(group_std);
        self.group_std_pre_kl.extend(group_std_pre_kl);
    }
}

/// Added to the std in the normalisation, as TRL does.
const NORMALIZE_EPSILON: f64 = 1e-4;

/// Leave-one-out advantages of whole groups; `weighted` and `kl` have one entry a row, groups contiguous.
pub fn advantages(weighted: &[Option<f64>], kl: &[f64], config: &AdvantageConfig) -> Advantages {
    let group_size = config.num_generations.max(1);
    let mut out = Advantages::default();
    for (rewards, kl) in weighted.chunks(group_size).zip(kl.chunks(group_size)) {
        let penalized: Vec<Option<f64>> =
            rewards.iter().zip(kl).map(|(reward, kl)| reward.map(|reward| penalize(reward, *kl, config))).collect();
        let scorable: Vec<f64> = penalized.iter().flatten().copied().collect();
        let sum: f64 = scorable.iter().sum();
        for reward in &penalized {
            // A_i = r_i − (Σ_j r_j − r_i)/(n_g − 1), over the scorable rows of the group.
            let baseline =
                reward.filter(|_| scorable.len() > 1).map(|reward| (sum - reward) / (scorable.len() - 1) as f64);
            out.baselines.push(baseline);
            out.unnormalized.push(reward.zip(baseline).map_or(0.0, |(reward, baseline)| reward - baseline));
        }
        out.group_std.push(group_std(&scorable, group_size));
        out.group_std_pre_kl.push(group_std(&rewards.iter().flatten().copied().collect::<Vec<_>>(), group_size));
        out.penalized_rewards.extend(penalized);
    }
    out.advantages = if config.normalize_advantages { normalize(&out) } else { out.unnormalized.clone() };
    out
}

fn penalize(reward: f64, kl: f64, config: &AdvantageConfig) -> f64 {
    let clipped = match config.reward_clip_range {
        Some((low, high)) => reward.max(low).min(high),
        None => reward,
    };
    // beta = 0 runs no reference pass, so there is no KL to multiply.
    if config.beta == 0.0 { clipped } else { clipped - config.beta * kl }
}

/// Whitened over the rows that have a baseline; the others stay 0. One such row alone has no std: 0.
fn normalize(raw: &Advantages) -> Vec<f64> {
    let with_baseline = || raw.unnormalized.iter().zip(&raw.baselines).filter(|(_, baseline)| baseline.is_some());
    let values: Vec<f64> = with_baseline().map(|(advantage, _)| *advantage).collect();
    let (Some(mean), Some(std)) = (mean(&values), sample_std(&values)) else {
        return vec![0.0; raw.unnormalized.len()];
    };
    let whiten = |advantage: f64| (advantage - mean) / (std + NORMALIZE_EPSILON);
    let rows = raw.unnormalized.iter().zip(&raw.baselines);
    rows.map(|(advantage, baseline)| if baseline.is_some() { whiten(*advantage) } else { 0.0 }).collect()
}

/// A group of one has no spread by definition; a group left with one scorable row has none that can be known.
fn group_std(scorable: &[f64], group_size: usize) -> Option<f64> {
    if group_size == 1 { Some(0.0) } else { sample_std(scorable) }
}

/// Arithmetic mean; `None` of nothing.
pub fn mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() { None } else { Some(values.iter().sum::<f64>() / values.len() as f64) }
}

/// Standard deviation with Bessel's correction; `None` below two values. Equal values give exactly 0.
pub fn sample_std(values: &[f64]) -> Option<f64> {
    let first = *values.first()?;
    if values.len() < 2 {
        return None;
    }
    if values.iter().all(|value| *value == first) {
        return Some(0.0);
    }
    let mean = mean(values)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use RewardValue::{Missing, NotApplicable, Number};

    const TWO: [RewardWeight; 2] =
        [RewardWeight { weight: 3.0, required: true }, RewardWeight { weight: -1.0, required: false }];

    #[test]
    fn weights_of_applicable_rewards_are_scaled_up() {
        let combine = |values: [RewardValue; 2]| combine_rewards(&values, &TWO, Combine::Renormalize);
        assert_eq!(combine([Number(2.0), Number(1.0)]), Some(5.0));
        assert_eq!(combine([Number(2.0), NotApplicable]), Some(8.0));
        assert_eq!(combine([Number(2.0), Missing]), Some(8.0));
        assert_eq!(combine([NotApplicable, Number(1.0)]), Some(-4.0));
        assert_eq!(combine([Missing, Number(1.0)]), None);
        assert_eq!(combine([NotApplicable, NotApplicable]), None);
    }

    #[test]
    fn a_reward_of_weight_zero_never_decides() {
        let weights = [RewardWeight { weight: 1.0, required: true }, RewardWeight { weight: 0.0, required: true }];
        assert_eq!(combine_rewards(&[Number(2.0), Missing], &weights, Combine::Renormalize), Some(2.0));
        assert_eq!(combine_rewards(&[Missing, Number(2.0)], &weights, Combine::Renormalize), None);
    }

    #[test]
    fn nansum_scales_nothing() {
        let combine = |values: [RewardValue; 2]| combine_rewards(&values, &TWO, Combine::Nansum);
        assert_eq!(combine([Number(2.0), Missing]), Some(6.0));
        assert_eq!(combine([Missing, Number(1.0)]), Some(-1.0));
        assert_eq!(combine([Missing, NotApplicable]), None);
    }

    #[test]
    fn a_missing_reward_leaves_the_baseline_and_is_masked() {
        let config =
            AdvantageConfig { num_generations: 4, beta: 0.0, reward_clip_range: None, normalize_advantages: false };
        let result = advantages(&[Some(1.0), Some(3.0), Some(2.0), None], &[0.0; 4], &config);
        assert_eq!(result.advantages, [-1.5, 1.5, 0.0, 0.0]);
        assert_eq!(result.baselines[3], None);
    }

    #[test]
    fn one_scorable_row_has_advantage_zero_and_stays_out_of_the_normalisation() {
        let config =
            AdvantageConfig { num_generations: 2, beta: 0.0, reward_clip_range: None, normalize_advantages: true };
        let result = advantages(&[Some(5.0), None, Some(1.0), Some(0.0)], &[0.0; 4], &config);
        assert_eq!(result.advantages[..2], [0.0, 0.0]);
        let expected = 1.0 / (2f64.sqrt() + 1e-4);
        assert!((result.advantages[2] - expected).abs() < 1e-12 && (result.advantages[3] + expected).abs() < 1e-12);
    }
}
