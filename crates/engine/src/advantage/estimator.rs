//! The estimators: from rewards to advantages, one small function each (rloo.md, "Reward → advantage", 4 and 6).
//!
//! Those of whole completions take the rewards of one group, `None` = unscorable, KL already subtracted, and give one
//! [`Estimate`] a row, `None` where a row has no advantage. Those of tokens take a whole block, because they whiten.

use std::num::NonZeroUsize;

use super::{common_reward, mean, sample_std};
use crate::spec::TieRule;

/// Added to the std of a group, as TRL does.
pub const GROUP_EPSILON: f64 = 1e-4;
/// Added to the variance of a block's tokens.
const WHITEN_EPSILON: f64 = 1e-8;

/// The advantage of one completion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// What was subtracted.
    pub baseline: f64,
    /// What is left, perhaps scaled.
    pub advantage: f64,
}

/// A_i = r_i − (Σ_j r_j − r_i)/(n − 1), over the scorable rows of the group; none in a group of one.
/// Ahmadian et al. 2024 (arXiv 2402.14740); Kool et al. 2019.
pub fn rloo(rewards: &[Option<f64>], ties: TieRule) -> Vec<Option<Estimate>> {
    if let Some(tied) = all_zero(rewards, ties) {
        return tied;
    }
    let scorable: Vec<f64> = rewards.iter().flatten().copied().collect();
    let sum: f64 = scorable.iter().sum();
    let leave_one_out = |reward: f64| {
        let baseline = (sum - reward) / (scorable.len() - 1) as f64;
        Estimate { baseline, advantage: reward - baseline }
    };
    rewards.iter().map(|reward| reward.filter(|_| scorable.len() > 1).map(leave_one_out)).collect()
}

/// A_i = r_i − mean of the group, the row itself included; none in a group of one.
/// "Dr. GRPO": Liu et al. 2025 (arXiv 2503.20783).
pub fn dr_grpo(rewards: &[Option<f64>], ties: TieRule) -> Vec<Option<Estimate>> {
    if let Some(tied) = all_zero(rewards, ties) {
        return tied;
    }
    let scorable: Vec<f64> = rewards.iter().flatten().copied().collect();
    let Some(baseline) = mean(&scorable).filter(|_| scorable.len() > 1) else { return vec![None; rewards.len()] };
    let centred = |reward: f64| Estimate { baseline, advantage: reward - baseline };
    rewards.iter().map(|reward| reward.map(centred)).collect()
}

/// A_i = (r_i − mean)/(std + 1e-4) of the group, sample std; none in a group of one.
/// Shao et al. 2024 (arXiv 2402.03300), with TRL's epsilon.
pub fn grpo(rewards: &[Option<f64>], ties: TieRule) -> Vec<Option<Estimate>> {
    let scorable: Vec<f64> = rewards.iter().flatten().copied().collect();
    let std = sample_std(&scorable).unwrap_or(0.0);
    let scale = |estimate: Estimate| Estimate { advantage: estimate.advantage / (std + GROUP_EPSILON), ..estimate };
    dr_grpo(rewards, ties).into_iter().map(|estimate| estimate.map(scale)).collect()
}

/// Where all rewards of a group are equal every advantage is exactly 0, whatever rounding would leave of a mean.
fn all_zero(rewards: &[Option<f64>], ties: TieRule) -> Option<Vec<Option<Estimate>>> {
    let baseline = common_reward(rewards).filter(|_| ties == TieRule::Equal)?;
    Some(rewards.iter().map(|reward| reward.map(|_| Estimate { baseline, advantage: 0.0 })).collect())
}

/// A_i = r_i − the reward of the prompt's greedy completion, without KL; none when that is unscorable.
/// Li et al. 2023 (arXiv 2310.10505).
pub fn remax(rewards: &[Option<f64>], greedy: Option<f64>) -> Vec<Option<Estimate>> {
    let Some(baseline) = greedy else { return vec![None; rewards.len()] };
    let above = |reward: f64| Estimate { baseline, advantage: reward - baseline };
    rewards.iter().map(|reward| reward.map(above)).collect()
}

/// A_i = r_i: no baseline. Williams 1992.
pub fn reinforce(rewards: &[Option<f64>]) -> Vec<Option<Estimate>> {
    rewards.iter().map(|reward| reward.map(|reward| Estimate { baseline: 0.0, advantage: reward })).collect()
}

/// A_it = whitened return Σ_{s ≥ t} (−beta·kl_is) + r_i: the KL penalty falls token by token, the reward at the end, γ = 1;
/// whitened over the valid tokens of the block. Hu 2025, "REINFORCE++" (arXiv 2501.03262).
///
/// `token_kl` has one entry a token that trains; rows that are `None` in `rewards` get zeros and stay out of the whitening.
pub fn reinforce_pp(rewards: &[Option<f64>], token_kl: &[Vec<f64>], beta: f64) -> Vec<Vec<f64>> {
    let rows = rewards.iter().zip(token_kl);
    whiten(rows.map(|(reward, kl)| reward.map(|reward| returns(reward, kl, beta)).ok_or(kl.len())).collect())
}

/// As [`reinforce_pp`], with the mean of its group subtracted from each reward first; none in a group of one.
/// Hu 2025 (arXiv 2501.03262), the variant "w/ baseline".
pub fn reinforce_pp_baseline(
    rewards: &[Option<f64>],
    num_generations: NonZeroUsize,
    ties: TieRule,
    token_kl: &[Vec<f64>],
    beta: f64,
) -> Vec<Vec<f64>> {
    let centred: Vec<Option<f64>> = rewards
        .chunks(num_generations.get())
        .flat_map(|group| dr_grpo(group, ties))
        .map(|estimate| estimate.map(|estimate| estimate.advantage))
        .collect();
    reinforce_pp(&centred, token_kl, beta)
}

/// The undiscounted return from each token on.
fn returns(reward: f64, token_kl: &[f64], beta: f64) -> Vec<f64> {
    let mut rest = reward;
    let mut returns: Vec<f64> = token_kl
        .iter()
        .rev()
        .map(|kl| {
            // beta = 0 runs no reference pass, so there is no KL to multiply.
            rest -= if beta == 0.0 { 0.0 } else { beta * kl };
            rest
        })
        .collect();
    returns.reverse();
    returns
}

/// (x − mean)/√(variance + 1e-8) over all tokens, sample variance; a row of `Err(length)` takes no part and is all zeros.
fn whiten(rows: Vec<Result<Vec<f64>, usize>>) -> Vec<Vec<f64>> {
    let tokens: Vec<f64> = rows.iter().flatten().flatten().copied().collect();
    let centre = mean(&tokens).unwrap_or(0.0);
    let scale = sample_std(&tokens).map_or(0.0, |std| 1.0 / (std * std + WHITEN_EPSILON).sqrt());
    let whitened = |row: Vec<f64>| row.into_iter().map(|value| (value - centre) * scale).collect();
    rows.into_iter().map(|row| row.map_or_else(|length| vec![0.0; length], whitened)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(estimates: Vec<Option<Estimate>>) -> Vec<Option<f64>> {
        estimates.into_iter().map(|estimate| estimate.map(|estimate| estimate.advantage)).collect()
    }

    #[test]
    fn an_unscorable_row_has_no_advantage_and_no_part_in_the_baseline_of_any_estimator() {
        let rewards = [Some(1.0), None, Some(3.0)];
        assert_eq!(values(rloo(&rewards, TieRule::Equal)), [Some(-2.0), None, Some(2.0)]);
        assert_eq!(values(dr_grpo(&rewards, TieRule::Equal)), [Some(-1.0), None, Some(1.0)]);
        let scaled = 1.0 / (2f64.sqrt() + 1e-4);
        assert_eq!(values(grpo(&rewards, TieRule::Equal)), [Some(-scaled), None, Some(scaled)]);
        assert_eq!(values(remax(&rewards, Some(0.5))), [Some(0.5), None, Some(2.5)]);
        assert_eq!(values(remax(&rewards, None)), [None, None, None]);
        assert_eq!(values(reinforce(&rewards)), [Some(1.0), None, Some(3.0)]);
        let tokens = reinforce_pp(&rewards, &[vec![0.0], vec![0.0; 2], vec![0.0]], 0.0);
        assert_eq!(tokens[1], [0.0, 0.0]);
        assert!((tokens[0][0] + 0.5f64.sqrt()).abs() < 1e-6 && (tokens[2][0] - 0.5f64.sqrt()).abs() < 1e-6);
    }

    #[test]
    fn one_scorable_row_has_an_advantage_only_without_a_baseline_of_its_siblings() {
        let rewards = [Some(2.0), None];
        assert_eq!(values(rloo(&rewards, TieRule::Equal)), [None, None]);
        assert_eq!(values(grpo(&rewards, TieRule::Equal)), [None, None]);
        assert_eq!(values(dr_grpo(&rewards, TieRule::Equal)), [None, None]);
        assert_eq!(values(reinforce(&rewards)), [Some(2.0), None]);
        assert_eq!(values(remax(&rewards, Some(1.5))), [Some(0.5), None]);
        assert_eq!(
            reinforce_pp_baseline(
                &rewards,
                NonZeroUsize::new(2).unwrap(),
                TieRule::Equal,
                &[vec![0.0; 3], vec![0.0]],
                0.0
            ),
            [vec![0.0; 3], vec![0.0]]
        );
    }

    #[test]
    fn the_kl_of_a_token_burdens_it_and_those_before_it() {
        assert_eq!(returns(1.0, &[0.5, -1.0, 2.0], 0.1), [1.0 - 0.2 + 0.1 - 0.05, 1.0 - 0.2 + 0.1, 1.0 - 0.2]);
        // Without KL every token of a row has the same return.
        let rows = reinforce_pp(&[Some(1.0), Some(0.0)], &[vec![0.0; 2], vec![0.0; 3]], 0.0);
        assert!(rows.iter().all(|row| row.iter().all(|value| *value == row[0])));
    }
}
