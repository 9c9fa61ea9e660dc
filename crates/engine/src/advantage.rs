//! Turns rewards into advantages, in f64 and without tensors (rloo.md, "Reward → advantage").
//!
//! Σ w·r → [`shape`]: normalization, clip, length terms → − beta·KL → [`estimator`] → optional
//! normalization over the block.
//! The order of operations is that of TRL's RLOOTrainer; each estimator names its own source.

pub mod estimator;
pub mod shape;

use std::num::NonZeroUsize;

use rlood_types::rollout::RewardValue;

use self::estimator::{Estimate, Turn};
use super::rollout::num_generations;
use crate::spec::{Combine, Estimator, Plan, RewardPlan, TieRule};

/// The weight of one reward in the sum, and whether it is required.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RewardWeight {
    /// The reward's factor in the weighted sum; 0 = metric only.
    pub weight: f64,
    /// If true, a missing value makes the sample unscorable; otherwise the reward counts as not applicable.
    pub required: bool,
}

impl RewardWeight {
    /// The weights of a plan's rewards, in the plan's order.
    pub fn of_plan(rewards: &[RewardPlan]) -> Vec<Self> {
        rewards.iter().map(|reward| Self { weight: reward.weight, required: reward.required }).collect()
    }
}

/// Combines the values of all rewards for one sample; `None` = unscorable.
///
/// `Renormalize` scales the applicable weights by Σ|w| / Σ_applicable|w|. `Nansum` is the rule of TRL: a missing reward
/// contributes 0, nothing is scaled, and only a sample without any value is unscorable.
pub fn combine_rewards(values: &[RewardValue], weights: &[RewardWeight], combine: Combine) -> Option<f64> {
    weighted_sum(values, weights, combine).map(|(sum, scale)| sum * scale)
}

/// The factor that [`combine_rewards`] multiplies one reward's values with; 0 if the sample is unscorable.
pub fn reward_factor(values: &[RewardValue], weights: &[RewardWeight], combine: Combine, reward: usize) -> f64 {
    let weight = weights.get(reward).map_or(0.0, |weight| weight.weight);
    weighted_sum(values, weights, combine).map_or(0.0, |(_, scale)| weight * scale)
}

/// The weighted sum of the applicable rewards, and the factor that makes up for the others; `None` = unscorable.
fn weighted_sum(values: &[RewardValue], weights: &[RewardWeight], combine: Combine) -> Option<(f64, f64)> {
    let pairs = || values.iter().zip(weights);
    let applicable = || pairs().filter_map(|(value, weight)| value.number().map(|number| (number, weight.weight)));
    let sum: f64 = applicable().map(|(number, weight)| number * weight).sum();
    match combine {
        Combine::Nansum => applicable().next().map(|_| (sum, 1.0)),
        Combine::Renormalize => {
            let lost = |(value, weight): (&RewardValue, &RewardWeight)| {
                *value == RewardValue::Missing && weight.required && weight.weight != 0.0
            };
            let all: f64 = weights.iter().map(|weight| weight.weight.abs()).sum();
            let present: f64 = applicable().map(|(_, weight)| weight.abs()).sum();
            if pairs().any(lost) || present == 0.0 {
                return None;
            }
            // If all rewards are present the sum is not scaled, so that equal sums stay exactly equal.
            Some((sum, if present == all { 1.0 } else { all / present }))
        }
    }
}

/// The KL estimate k1 (old − reference) of each trained token. Empty for a masked completion; all
/// 0 without a reference.
pub fn token_kl(old_logps: &[f32], ref_logps: &[f32], included: bool) -> Vec<f64> {
    if !included {
        return Vec::new();
    }
    old_logps.iter().zip(ref_logps).map(|(&old, &reference)| f64::from(old) - f64::from(reference)).collect()
}

/// The KL estimate k1 of one completion: Σ_t (old − reference). It may be negative; a masked completion has 0.
pub fn sequence_kl(old_logps: &[f32], ref_logps: &[f32], included: bool) -> f64 {
    token_kl(old_logps, ref_logps, included).iter().sum()
}

/// Settings that turn rewards into advantages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdvantageConfig {
    /// The estimator, which determines the baseline of a completion or of its tokens.
    pub estimator: Estimator,
    /// Number of rows in a group (G); they are contiguous.
    pub num_generations: NonZeroUsize,
    /// Weight of the KL penalty in the reward; 0 if the penalty is in the loss.
    pub beta: f64,
    /// Whether to apply (A − mean)/(std + 1e-4) over the block. Has no effect for estimators that whiten.
    pub normalize_advantages: bool,
    /// The rule that decides when the rewards of a group are tied.
    pub ties: TieRule,
}

impl AdvantageConfig {
    /// The advantage settings of a job's plan.
    pub fn of_plan(plan: &Plan) -> Self {
        Self {
            estimator: plan.rloo.estimator,
            num_generations: num_generations(plan),
            beta: if plan.rloo.penalizes_reward() { plan.rloo.beta } else { 0.0 },
            normalize_advantages: plan.rloo.normalize_advantages,
            ties: plan.arithmetic.ties,
        }
    }
}

/// The input of the estimators: whole groups, with one entry per row (B) unless noted otherwise.
#[derive(Debug, Clone, Copy)]
pub struct AdvantageRows<'a> {
    /// Shaped rewards before KL; `None` = unscorable.
    pub rewards: &'a [Option<f64>],
    /// Rewards after normalization and clip, before length terms and KL penalty; a group in which all of these
    /// are equal is tied.
    pub task_rewards: &'a [Option<f64>],
    /// k1 of each trained token (B, T): zeros without a reference, empty for masked rows.
    pub token_kl: &'a [Vec<f64>],
    /// True for rows of tied groups that are dropped: they have advantage 0 and do not count in the normalization.
    pub dropped: &'a [bool],
    /// Shaped reward of each group's greedy completion (P); empty unless the estimator is remax.
    pub greedy: &'a [Option<f64>],
    /// The turns of each episode; empty unless the estimator is rloo_turns.
    pub turns: &'a [Vec<Turn>],
}

/// All intermediate values between reward and advantage: one entry per row (B) or per group (P).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Advantages {
    /// Reward after shaping and KL penalty (B); `None` = unscorable.
    pub penalized_rewards: Vec<Option<f64>>,
    /// The baseline that the estimator subtracts (B); `None` for a row without an advantage.
    pub baselines: Vec<Option<f64>>,
    /// Advantage before normalization (B), and before the KL of tokens; 0 for a row without an advantage.
    pub unnormalized: Vec<f64>,
    /// Final advantage (B); for token-level estimators, the mean over the row's tokens.
    pub advantages: Vec<f64>,
    /// Final advantages of token-level estimators (B, T), one per trained token; empty for other estimators.
    pub token_advantages: Vec<Vec<f64>>,
    /// Sample std of each group's penalized rewards (P); `None` below two scorable rows, 0 when G = 1.
    pub group_std: Vec<Option<f64>>,
    /// Sample std of each group's task rewards, before length terms and KL (P).
    pub group_std_pre_kl: Vec<Option<f64>>,
    /// Whether the penalized rewards of each group are tied (P).
    pub tied: Vec<bool>,
    /// Whether the task rewards of each group are tied (P).
    pub tied_pre_kl: Vec<bool>,
}

impl Advantages {
    /// Appends the next groups. Advantages that are whitened over a block must be computed for the whole
    /// block in one call.
    pub fn append(&mut self, next: Advantages) {
        let Advantages {
            penalized_rewards,
            baselines,
            unnormalized,
            advantages,
            token_advantages,
            group_std,
            group_std_pre_kl,
            tied,
            tied_pre_kl,
        } = next;
        self.penalized_rewards.extend(penalized_rewards);
        self.baselines.extend(baselines);
        self.unnormalized.extend(unnormalized);
        self.advantages.extend(advantages);
        self.token_advantages.extend(token_advantages);
        self.group_std.extend(group_std);
        self.group_std_pre_kl.extend(group_std_pre_kl);
        self.tied.extend(tied);
        self.tied_pre_kl.extend(tied_pre_kl);
    }
}

/// Epsilon added to the std in the normalization, as in TRL.
const NORMALIZE_EPSILON: f64 = 1e-4;
/// The bound of [`TieRule::Std`]: a group whose std is at most this is tied (TRL's bound).
const TIED_STD: f64 = 1e-8;

/// Computes the advantages of whole groups.
pub fn advantages(rows: &AdvantageRows<'_>, config: &AdvantageConfig) -> Advantages {
    let AdvantageRows { rewards, task_rewards, token_kl, dropped, greedy, turns } = *rows;
    let num_generations = config.num_generations.get();
    let penalized: Vec<Option<f64>> = rewards
        .iter()
        .zip(token_kl)
        .map(|(reward, kl)| reward.map(|reward| penalize(reward, kl, config.beta)))
        .collect();
    let mut estimates: Vec<Option<Estimate>> = Vec::with_capacity(rewards.len());
    for (index, (before_kl, penalized)) in
        rewards.chunks(num_generations).zip(penalized.chunks(num_generations)).enumerate()
    {
        estimates.extend(match config.estimator {
            Estimator::Rloo | Estimator::RlooTurns => estimator::rloo(penalized, config.ties),
            Estimator::Grpo => estimator::grpo(penalized, config.ties),
            Estimator::DrGrpo => estimator::dr_grpo(penalized, config.ties),
            Estimator::Remax => estimator::remax(penalized, greedy.get(index).copied().flatten()),
            Estimator::Reinforce => estimator::reinforce(penalized),
            // Both REINFORCE++ estimators subtract the KL penalty token by token, below.
            Estimator::ReinforcePp => estimator::reinforce(before_kl),
            Estimator::ReinforcePpBaseline => estimator::dr_grpo(before_kl, config.ties),
        });
    }
    let takes_part: Vec<bool> = estimates.iter().zip(dropped).map(|(row, dropped)| row.is_some() && !dropped).collect();
    let unnormalized: Vec<f64> = estimates.iter().map(|row| row.map_or(0.0, |row| row.advantage)).collect();
    let kept: Vec<Option<f64>> =
        rewards.iter().zip(dropped).map(|(reward, dropped)| reward.filter(|_| !dropped)).collect();
    let token_advantages = match config.estimator {
        Estimator::ReinforcePp => estimator::reinforce_pp(&kept, token_kl, config.beta),
        Estimator::ReinforcePpBaseline => {
            estimator::reinforce_pp_baseline(&kept, config.num_generations, config.ties, token_kl, config.beta)
        }
        Estimator::RlooTurns => {
            let groups = kept.chunks(num_generations).zip(turns.chunks(num_generations));
            let groups = groups.zip(token_kl.chunks(num_generations));
            let of_group = |((rewards, turns), kl)| estimator::rloo_turns(rewards, turns, kl, config.beta, config.ties);
            groups.flat_map(of_group).collect()
        }
        Estimator::Rloo | Estimator::Grpo | Estimator::DrGrpo | Estimator::Remax | Estimator::Reinforce => Vec::new(),
    };
    let advantages = if config.estimator.has_token_advantages() {
        token_advantages.iter().map(|tokens| mean(tokens).unwrap_or(0.0)).collect()
    } else if config.normalize_advantages {
        normalize(&unnormalized, &takes_part)
    } else {
        unnormalized.iter().zip(dropped).map(|(advantage, dropped)| if *dropped { 0.0 } else { *advantage }).collect()
    };
    let tied = |rewards: &[Option<f64>]| -> Vec<bool> {
        rewards.chunks(num_generations).map(|group| is_tied(group, num_generations, config.ties)).collect()
    };
    Advantages {
        tied: tied(&penalized),
        tied_pre_kl: tied(task_rewards),
        group_std: penalized.chunks(num_generations).map(|group| group_std(group, num_generations)).collect(),
        group_std_pre_kl: task_rewards.chunks(num_generations).map(|group| group_std(group, num_generations)).collect(),
        penalized_rewards: penalized,
        baselines: estimates.iter().map(|row| row.map(|row| row.baseline)).collect(),
        unnormalized,
        advantages,
        token_advantages,
    }
}

fn penalize(reward: f64, token_kl: &[f64], beta: f64) -> f64 {
    // If beta = 0, no reference pass runs, so there is no KL to multiply.
    if beta == 0.0 { reward } else { reward - beta * token_kl.iter().sum::<f64>() }
}

/// Normalizes the advantages of the rows that have one; the other rows stay 0. A single row has no std:
/// its advantage is 0.
fn normalize(unnormalized: &[f64], takes_part: &[bool]) -> Vec<f64> {
    let rows = || unnormalized.iter().zip(takes_part);
    let values: Vec<f64> = rows().filter(|(_, part)| **part).map(|(advantage, _)| *advantage).collect();
    let (Some(mean), Some(std)) = (mean(&values), sample_std(&values)) else {
        return vec![0.0; unnormalized.len()];
    };
    let whiten = |advantage: f64| (advantage - mean) / (std + NORMALIZE_EPSILON);
    rows().map(|(advantage, part)| if *part { whiten(*advantage) } else { 0.0 }).collect()
}

/// Sample std of a group's scorable rewards; `None` below two of them. A group of one has spread 0 by definition.
pub fn group_std(rewards: &[Option<f64>], num_generations: usize) -> Option<f64> {
    if num_generations == 1 { Some(0.0) } else { sample_std(&rewards.iter().flatten().copied().collect::<Vec<_>>()) }
}

/// Whether the scorable rewards of a whole group are tied, by the plan's rule. A group with fewer than two scorable
/// rewards is not tied, because there is nothing to compare. A group of one always is.
pub fn is_tied(rewards: &[Option<f64>], num_generations: usize, rule: TieRule) -> bool {
    match rule {
        _ if num_generations == 1 => true,
        TieRule::Std => group_std(rewards, num_generations).is_some_and(|std| std <= TIED_STD),
        TieRule::Equal => common_reward(rewards).is_some(),
    }
}

/// Whether at least two scorable rewards of a group differ, by the plan's rule.
pub fn is_informative(rewards: &[Option<f64>], num_generations: usize, rule: TieRule) -> bool {
    rewards.iter().flatten().count() > 1 && !is_tied(rewards, num_generations, rule)
}

/// The reward that all scorable rows of a group share; `None` if two differ, or fewer than two are scorable.
fn common_reward(rewards: &[Option<f64>]) -> Option<f64> {
    let mut scorable = rewards.iter().flatten();
    let first = *scorable.next()?;
    let second = *scorable.next()?;
    (second == first && scorable.all(|reward| *reward == first)).then_some(first)
}

/// Arithmetic mean; `None` for an empty slice.
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

    fn of(rewards: &[Option<f64>], dropped: &[bool], config: &AdvantageConfig) -> Advantages {
        let token_kl = vec![vec![0.0]; rewards.len()];
        let rows =
            AdvantageRows { rewards, task_rewards: rewards, token_kl: &token_kl, dropped, greedy: &[], turns: &[] };
        advantages(&rows, config)
    }

    const G: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1);
    const CONFIG: AdvantageConfig = AdvantageConfig {
        estimator: Estimator::Rloo,
        num_generations: G,
        beta: 0.0,
        normalize_advantages: false,
        ties: TieRule::Equal,
    };

    #[test]
    fn a_missing_reward_leaves_the_baseline_and_is_masked() {
        let config = AdvantageConfig { num_generations: NonZeroUsize::new(4).unwrap(), ..CONFIG };
        let result = of(&[Some(1.0), Some(3.0), Some(2.0), None], &[false; 4], &config);
        assert_eq!(result.advantages, [-1.5, 1.5, 0.0, 0.0]);
        assert_eq!(result.baselines[3], None);
    }

    #[test]
    fn one_scorable_row_has_advantage_zero_and_stays_out_of_the_normalization() {
        let config = AdvantageConfig { normalize_advantages: true, ..CONFIG };
        let result = of(&[Some(5.0), None, Some(1.0), Some(0.0)], &[false; 4], &config);
        assert_eq!(result.advantages[..2], [0.0, 0.0]);
        let expected = 1.0 / (2f64.sqrt() + 1e-4);
        assert!((result.advantages[2] - expected).abs() < 1e-12 && (result.advantages[3] + expected).abs() < 1e-12);
    }

    #[test]
    fn dropped_rows_have_advantage_zero_and_leave_every_normalization() {
        let rewards = [Some(5.0), Some(5.0), Some(1.0), Some(0.0)];
        let dropped = [true, true, false, false];
        for estimator in [Estimator::Rloo, Estimator::ReinforcePp, Estimator::ReinforcePpBaseline] {
            let config = AdvantageConfig { estimator, normalize_advantages: true, ..CONFIG };
            let (with, without) = (of(&rewards, &dropped, &config), of(&rewards[2..], &dropped[2..], &config));
            assert_eq!(with.advantages[..2], [0.0, 0.0], "{estimator:?}");
            assert_eq!(with.advantages[2..], without.advantages, "{estimator:?}");
            assert_ne!(with.advantages[2], of(&rewards, &[false; 4], &config).advantages[2], "{estimator:?}");
        }
    }

    #[test]
    fn ties_are_decided_on_whole_groups_and_never_by_what_is_left_when_one_row_is_taken_out() {
        let group = |first: f64, rest: f64| -> Vec<Option<f64>> {
            std::iter::once(first).chain(std::iter::repeat_n(rest, 7)).map(Some).collect()
        };
        let config = AdvantageConfig { num_generations: NonZeroUsize::new(8).unwrap(), ..CONFIG };
        // One reward differs and the other seven are equal: the group is not tied, neither with one winner
        // nor with one loser.
        for (first, rest) in [(1.0, 0.0), (0.0, 0.95), (0.3, 0.1 + 0.2)] {
            let rewards = group(first, rest);
            for ties in [TieRule::Equal, TieRule::Std] {
                let result = of(&rewards, &[false; 8], &AdvantageConfig { ties, ..config });
                let by_std = ties == TieRule::Std && (first - rest).abs() < 1e-8;
                assert_eq!((&result.tied[..], is_tied(&rewards, 8, ties)), (&[by_std][..], by_std), "{first} {ties:?}");
            }
            let result = of(&rewards, &[false; 8], &config);
            assert!((result.advantages[0] - (first - rest)).abs() < 1e-15, "{:?}", result.advantages);
            let loser = rest - (first + 6.0 * rest) / 7.0;
            assert!(result.advantages[1..].iter().all(|advantage| (advantage - loser).abs() < 1e-15));
            assert!(result.advantages.iter().all(|advantage| *advantage != 0.0) || first == 0.3);
        }
        // The sum of seven times 0.95 divided by seven is not 0.95; equal rewards must still have an
        // advantage of exactly 0.
        let tied = group(0.95, 0.95);
        assert!(is_tied(&tied, 8, TieRule::Equal) && !is_informative(&tied, 8, TieRule::Equal));
        for estimator in [Estimator::Rloo, Estimator::Grpo, Estimator::DrGrpo] {
            let config = AdvantageConfig { estimator, ..config };
            assert_eq!(of(&tied, &[false; 8], &config).advantages, [0.0; 8], "{estimator:?}");
        }
        let by_std = of(&tied, &[false; 8], &AdvantageConfig { ties: TieRule::Std, ..config });
        assert!(by_std.advantages.iter().any(|advantage| *advantage != 0.0), "rlood 0.1 trained what rounding left");
    }

    #[test]
    fn a_group_without_two_scorable_rewards_is_neither_tied_nor_informative() {
        for rewards in [[None, None], [Some(1.0), None]] {
            assert!(!is_tied(&rewards, 2, TieRule::Equal) && !is_informative(&rewards, 2, TieRule::Equal));
        }
        assert!(is_tied(&[Some(1.0)], 1, TieRule::Equal) && !is_informative(&[Some(1.0)], 1, TieRule::Equal));
    }
}
