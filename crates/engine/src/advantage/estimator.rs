//! The advantage estimators, one small function each (rloo.md, "Reward → advantage", 4 and 6).
//!
//! Estimators of whole completions take the rewards of one group, with KL already subtracted and `None` = unscorable.
//! They return one [`Estimate`] per row, `None` for a row without an advantage. Token-level estimators take a whole
//! block, because they whiten over it.

use std::num::NonZeroUsize;

use super::{common_reward, mean, sample_std};
use crate::spec::TieRule;

/// Epsilon added to the std of a group, as in TRL.
pub const GROUP_EPSILON: f64 = 1e-4;
/// Epsilon added to the variance of a block's tokens.
const WHITEN_EPSILON: f64 = 1e-8;

/// The advantage of one completion, and the baseline it was computed with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The baseline that was subtracted from the reward.
    pub baseline: f64,
    /// The advantage: the reward minus the baseline, scaled by some estimators.
    pub advantage: f64,
}

/// RLOO: A_i = r_i − (Σ_j r_j − r_i)/(n − 1), over the scorable rows of the group; no advantage in a group of one.
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

/// Dr. GRPO: A_i = r_i − mean of the group including the row itself; no advantage in a group of one. Liu et
/// al. 2025 (arXiv 2503.20783).
pub fn dr_grpo(rewards: &[Option<f64>], ties: TieRule) -> Vec<Option<Estimate>> {
    if let Some(tied) = all_zero(rewards, ties) {
        return tied;
    }
    let scorable: Vec<f64> = rewards.iter().flatten().copied().collect();
    let Some(baseline) = mean(&scorable).filter(|_| scorable.len() > 1) else { return vec![None; rewards.len()] };
    let centred = |reward: f64| Estimate { baseline, advantage: reward - baseline };
    rewards.iter().map(|reward| reward.map(centred)).collect()
}

/// GRPO: A_i = (r_i − mean)/(std + 1e-4) over the group, with the sample std; no advantage in a group of one. Shao et
/// al. 2024 (arXiv 2402.03300), with TRL's epsilon.
pub fn grpo(rewards: &[Option<f64>], ties: TieRule) -> Vec<Option<Estimate>> {
    let scorable: Vec<f64> = rewards.iter().flatten().copied().collect();
    let std = sample_std(&scorable).unwrap_or(0.0);
    let scale = |estimate: Estimate| Estimate { advantage: estimate.advantage / (std + GROUP_EPSILON), ..estimate };
    dr_grpo(rewards, ties).into_iter().map(|estimate| estimate.map(scale)).collect()
}

/// If all rewards of a group are equal, returns advantages of exactly 0, which the rounding of a mean might miss.
fn all_zero(rewards: &[Option<f64>], ties: TieRule) -> Option<Vec<Option<Estimate>>> {
    let baseline = common_reward(rewards).filter(|_| ties == TieRule::Equal)?;
    Some(rewards.iter().map(|reward| reward.map(|_| Estimate { baseline, advantage: 0.0 })).collect())
}

/// ReMax: A_i = r_i − the reward of the prompt's greedy completion, without KL; no advantage if the greedy completion
/// is unscorable. Li et al. 2023 (arXiv 2310.10505).
pub fn remax(rewards: &[Option<f64>], greedy: Option<f64>) -> Vec<Option<Estimate>> {
    let Some(baseline) = greedy else { return vec![None; rewards.len()] };
    let above = |reward: f64| Estimate { baseline, advantage: reward - baseline };
    rewards.iter().map(|reward| reward.map(above)).collect()
}

/// REINFORCE: A_i = r_i, without a baseline. Williams 1992.
pub fn reinforce(rewards: &[Option<f64>]) -> Vec<Option<Estimate>> {
    rewards.iter().map(|reward| reward.map(|reward| Estimate { baseline: 0.0, advantage: reward })).collect()
}

/// REINFORCE++: A_it = the whitened return Σ_{s ≥ t} (−beta·kl_is) + r_i. The KL penalty applies to each
/// token, the reward to the last one, γ = 1; the returns are whitened over the valid tokens of the block.
/// Hu 2025 (arXiv 2501.03262).
///
/// `token_kl` has one entry per trained token. Rows that are `None` in `rewards` get zeros and do not
/// count in the whitening.
pub fn reinforce_pp(rewards: &[Option<f64>], token_kl: &[Vec<f64>], beta: f64) -> Vec<Vec<f64>> {
    let rows = rewards.iter().zip(token_kl);
    whiten(rows.map(|(reward, kl)| reward.map(|reward| returns(reward, kl, beta)).ok_or(kl.len())).collect())
}

/// REINFORCE++ with baseline: like [`reinforce_pp`], but first subtracts the mean of its group from each reward; no
/// advantage in a group of one. Hu 2025 (arXiv 2501.03262), the variant "w/ baseline".
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

/// A turn of an episode: its tokens in the completion, and its part of the completion's shaped reward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn {
    /// Number of the model's tokens in the turn.
    pub num_tokens: usize,
    /// The part of the completion's reward that the turn earned; the rest of the reward is earned at the end.
    pub reward: f64,
}

/// RLOO by turns, for one group of episodes: A_ik = G_ik − Σ_{j≠i} G_jk/(n − 1) for all tokens of turn k of episode i. G_jk is the
/// reward that episode j earned from turn k to its end, minus beta times its KL from there on; 0 if it has no turn k. Only the n
/// scorable episodes count. The first turn's advantage is that of [`rloo`]. Unbiased, because G_jk does not depend on episode i
/// (arXiv 2505.11821 and 2510.01051 use returns of turns, with other baselines).
///
/// `rewards`, `turns` and `token_kl` have one entry per episode; `token_kl` one number per trained token. Returns one advantage per
/// trained token, zeros for an unscorable episode and in a group with fewer than two scorable ones.
pub fn rloo_turns(
    rewards: &[Option<f64>],
    turns: &[Vec<Turn>],
    token_kl: &[Vec<f64>],
    beta: f64,
    ties: TieRule,
) -> Vec<Vec<f64>> {
    let episodes = rewards.iter().zip(turns).zip(token_kl);
    let returns: Vec<Option<Vec<f64>>> =
        episodes.map(|((reward, turns), kl)| reward.map(|reward| turn_returns(reward, turns, kl, beta))).collect();
    let most = turns.iter().map(Vec::len).max().unwrap_or(0);
    let from_turn = |turn: usize| -> Vec<Option<Estimate>> {
        let rest = |returns: &Option<Vec<f64>>| Some(returns.as_ref()?.get(turn).copied().unwrap_or(0.0));
        rloo(&returns.iter().map(rest).collect::<Vec<_>>(), ties)
    };
    let of_turns: Vec<Vec<Option<Estimate>>> = (0..most).map(from_turn).collect();
    let row = |(row, (turns, kl)): (usize, (&Vec<Turn>, &Vec<f64>))| {
        let advantage = |turn: usize| of_turns[turn][row].map_or(0.0, |estimate| estimate.advantage);
        let tokens = turns.iter().enumerate().map(|(turn, of)| std::iter::repeat_n(advantage(turn), of.num_tokens));
        let mut tokens: Vec<f64> = tokens.flatten().collect();
        tokens.resize(kl.len(), 0.0);
        tokens
    };
    turns.iter().zip(token_kl).enumerate().map(row).collect()
}

/// Returns what an episode earned from each turn to its end. An episode without trained tokens has no KL.
fn turn_returns(reward: f64, turns: &[Turn], token_kl: &[f64], beta: f64) -> Vec<f64> {
    let (mut paid, mut first) = (0.0, 0);
    let from_turn = |turn: &Turn| {
        // If beta = 0, no reference pass runs, so there is no KL to multiply.
        let kl: f64 = if beta == 0.0 { 0.0 } else { token_kl.iter().skip(first).sum() };
        let rest = reward - paid - beta * kl;
        (paid, first) = (paid + turn.reward, first + turn.num_tokens);
        rest
    };
    turns.iter().map(from_turn).collect()
}

/// The undiscounted return from each token to the end.
fn returns(reward: f64, token_kl: &[f64], beta: f64) -> Vec<f64> {
    let mut rest = reward;
    let mut returns: Vec<f64> = token_kl
        .iter()
        .rev()
        .map(|kl| {
            // If beta = 0, no reference pass runs, so there is no KL to multiply.
            rest -= if beta == 0.0 { 0.0 } else { beta * kl };
            rest
        })
        .collect();
    returns.reverse();
    returns
}

/// Computes (x − mean)/√(variance + 1e-8) over all tokens, with the sample variance. A row of `Err(length)` is left
/// out and becomes zeros.
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
        // Without KL, every token of a row has the same return.
        let rows = reinforce_pp(&[Some(1.0), Some(0.0)], &[vec![0.0; 2], vec![0.0; 3]], 0.0);
        assert!(rows.iter().all(|row| row.iter().all(|value| *value == row[0])));
    }
}
