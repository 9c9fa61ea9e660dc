//! Statistics that compare two rewards on the same samples: their similarity, and the effect on the advantages. Pure functions.

use serde::Serialize;
use utoipa::ToSchema;

/// The distribution of one list of values.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = RescoreSpread)]
pub(super) struct Spread {
    /// Number of values in the list.
    pub count: usize,
    /// Mean; null without values.
    pub mean: Option<f64>,
    /// Sample standard deviation; null below two values.
    pub std: Option<f64>,
    /// Lowest value; null without values.
    pub min: Option<f64>,
    /// Highest value; null without values.
    pub max: Option<f64>,
}

impl Spread {
    pub fn of(values: &[f64]) -> Self {
        let mean = mean(values);
        let squares = mean.map(|mean| values.iter().map(|value| (value - mean).powi(2)).sum::<f64>());
        let std = squares.filter(|_| values.len() > 1).map(|squares| (squares / (values.len() - 1) as f64).sqrt());
        let fold = |of: fn(f64, f64) -> f64| values.iter().copied().reduce(of);
        Self { count: values.len(), mean, std, min: fold(f64::min), max: fold(f64::max) }
    }
}

/// How similarly two rewards rank the same samples, over all samples that have both.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = RescoreCorrelation)]
pub(super) struct Correlation {
    /// Number of samples with both values.
    pub pairs: usize,
    /// Pearson correlation of the values; null below two pairs, or if one side is constant.
    pub pearson: Option<f64>,
    /// Spearman correlation of the ranks (ties share theirs); null under the same conditions.
    pub spearman: Option<f64>,
}

impl Correlation {
    pub fn of(pairs: &[(f64, f64)]) -> Self {
        let ranked: Vec<(f64, f64)> = {
            let ranks = |of: fn(&(f64, f64)) -> f64| ranks(&pairs.iter().map(of).collect::<Vec<_>>());
            ranks(|pair| pair.0).into_iter().zip(ranks(|pair| pair.1)).collect()
        };
        Self { pairs: pairs.len(), pearson: pearson(pairs), spearman: pearson(&ranked) }
    }
}

fn pearson(pairs: &[(f64, f64)]) -> Option<f64> {
    let (left, right): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let constant = |values: &[f64]| values.iter().all(|value| *value == values[0]);
    if pairs.len() < 2 || constant(&left) || constant(&right) {
        return None;
    }
    let (mean_left, mean_right) = (mean(&left)?, mean(&right)?);
    let sum = |of: &dyn Fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>();
    let both = sum(&|(x, y)| (x - mean_left) * (y - mean_right));
    let each = sum(&|(x, _)| (x - mean_left).powi(2)) * sum(&|(_, y)| (y - mean_right).powi(2));
    let value = both / each.sqrt();
    value.is_finite().then(|| value.clamp(-1.0, 1.0))
}

/// Returns the ranks of values, from 1; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for run in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let rank = first as f64 + (run.len() as f64 + 1.0) / 2.0;
        run.iter().for_each(|&at| ranks[at] = rank);
        first += run.len();
    }
    ranks
}

/// Differences between old and new leave-one-out advantages, computed the same way.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = RescoreAdvantages)]
pub(super) struct AdvantageChange {
    /// Number of completions with both advantages.
    pub pairs: usize,
    /// Number of completions whose advantage changed its sign.
    pub sign_changes: usize,
    /// Fraction of pairs with a sign change; null without pairs.
    pub sign_change_fraction: Option<f64>,
    /// Number of completions with an advantage before, but 0 now.
    pub vanished: usize,
    /// Number of completions with an advantage now, but 0 before.
    pub appeared: usize,
    /// Mean |new − old|, in units of the rewards.
    pub mean_abs_delta: Option<f64>,
    /// Mean |old|, in units of the rewards.
    pub mean_abs_old: Option<f64>,
    /// Mean |new|, in units of the rewards.
    pub mean_abs_new: Option<f64>,
    /// Cosine of the two lists as vectors, independent of scale: 1 = the same update, 0 = unrelated, −1 = opposite; null if
    /// one is all 0.
    pub cosine: Option<f64>,
}

impl AdvantageChange {
    pub fn of(pairs: &[(f64, f64)]) -> Self {
        let count = |of: &dyn Fn(f64, f64) -> bool| pairs.iter().filter(|(old, new)| of(*old, *new)).count();
        let average = |of: &dyn Fn(f64, f64) -> f64| mean(&pairs.iter().map(|(o, n)| of(*o, *n)).collect::<Vec<_>>());
        let sign_changes = count(&|old, new| old * new < 0.0);
        let sum = |of: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|(old, new)| of(*old, *new)).sum::<f64>();
        let norms = (sum(&|old, _| old * old) * sum(&|_, new| new * new)).sqrt();
        Self {
            pairs: pairs.len(),
            sign_changes,
            sign_change_fraction: (!pairs.is_empty()).then(|| sign_changes as f64 / pairs.len() as f64),
            vanished: count(&|old, new| old != 0.0 && new == 0.0),
            appeared: count(&|old, new| old == 0.0 && new != 0.0),
            mean_abs_delta: average(&|old, new| (new - old).abs()),
            mean_abs_old: average(&|old, _| old.abs()),
            mean_abs_new: average(&|_, new| new.abs()),
            cosine: (norms > 0.0).then(|| (sum(&|old, new| old * new) / norms).clamp(-1.0, 1.0)),
        }
    }
}

/// Whether both rewards rank the completions of a prompt in the same order.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = RescoreGroups)]
pub(super) struct GroupAgreement {
    /// Groups with at least two completions that have both values.
    pub groups: usize,
    /// Fraction of pairs of completions that both rewards put in the same order (or both tie); the mean over groups.
    pub rank_agreement: Option<f64>,
    /// Groups whose best completion stays among the best.
    pub same_best: usize,
    /// Groups with equal old values, which give no training signal.
    pub tied_old: usize,
    /// Groups with equal new values.
    pub tied_new: usize,
}

impl GroupAgreement {
    /// Computes the agreement of both rewards from each group's pairs of (old, new) values.
    pub fn of(groups: &[Vec<(f64, f64)>]) -> Self {
        let groups: Vec<&Vec<(f64, f64)>> = groups.iter().filter(|group| group.len() > 1).collect();
        let agreement: Vec<f64> = groups.iter().map(|group| agreement(group)).collect();
        let tied = |of: fn(&(f64, f64)) -> f64| groups.iter().filter(|g| g.iter().all(|p| of(p) == of(&g[0]))).count();
        let same_best = |group: &&&Vec<(f64, f64)>| {
            let best = |of: fn(&(f64, f64)) -> f64| group.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
            let (old, new) = (best(|pair| pair.0), best(|pair| pair.1));
            group.iter().any(|pair| pair.0 == old && pair.1 == new)
        };
        Self {
            groups: groups.len(),
            rank_agreement: mean(&agreement),
            same_best: groups.iter().filter(same_best).count(),
            tied_old: tied(|pair| pair.0),
            tied_new: tied(|pair| pair.1),
        }
    }
}

fn agreement(group: &[(f64, f64)]) -> f64 {
    let (mut same, mut all) = (0, 0);
    for (at, left) in group.iter().enumerate() {
        for right in &group[at + 1..] {
            all += 1;
            same += usize::from(left.0.partial_cmp(&right.0) == left.1.partial_cmp(&right.1));
        }
    }
    f64::from(u32::try_from(same).unwrap_or(u32::MAX)) / f64::from(u32::try_from(all).unwrap_or(u32::MAX))
}

/// Computes leave-one-out advantages over the completions of one group that have a reward. A single such
/// completion has advantage 0.
pub(super) fn leave_one_out(rewards: &[Option<f64>]) -> Vec<Option<f64>> {
    let count = rewards.iter().flatten().count() as f64;
    let sum: f64 = rewards.iter().flatten().sum();
    let advantage = |reward: f64| if count < 2.0 { 0.0 } else { reward - (sum - reward) / (count - 1.0) };
    rewards.iter().map(|reward| reward.map(advantage)).collect()
}

fn mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() { None } else { Some(values.iter().sum::<f64>() / values.len() as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correlations_are_those_of_the_textbook() {
        // Expected values computed in Python: sum((x-mx)*(y-my))/sqrt(sum((x-mx)**2)*sum((y-my)**2)) over the values (Pearson)
        // and over their ranks (Spearman).
        let pairs = [(1.0, 2.0), (2.0, 1.0), (3.0, 4.0), (4.0, 3.0), (5.0, 7.0), (5.0, 9.0)];
        let found = Correlation::of(&pairs);
        assert!((found.pearson.unwrap() - 0.849_191_827_894_840_4).abs() < 1e-12, "{found:?}");
        assert!((found.spearman.unwrap() - 0.869_656_553_478_672_7).abs() < 1e-9, "{found:?}");
        assert_eq!(Correlation::of(&[(1.0, 2.0)]).pearson, None);
        assert_eq!(Correlation::of(&[(1.0, 2.0), (1.0, 3.0)]).spearman, None, "a constant side has none");
        let monotone = Correlation::of(&[(1.0, 1.0), (2.0, 10.0), (3.0, 1000.0)]);
        assert!(monotone.spearman == Some(1.0) && monotone.pearson.unwrap() < 0.9, "{monotone:?}");
    }

    #[test]
    fn ties_share_their_rank() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [3.5, 1.0, 3.5, 2.0]);
        assert_eq!(ranks(&[]), Vec::<f64>::new());
    }

    #[test]
    fn an_advantage_leaves_its_own_reward_and_missing_ones_out() {
        let found = leave_one_out(&[Some(1.0), Some(3.0), Some(2.0), None]);
        assert_eq!(found, [Some(-1.5), Some(1.5), Some(0.0), None]);
        assert_eq!(leave_one_out(&[Some(7.0), None]), [Some(0.0), None]);
    }

    #[test]
    fn a_change_of_advantages_is_counted_by_sign_size_and_direction() {
        let found = AdvantageChange::of(&[(1.0, -2.0), (-1.0, 2.0), (0.5, 0.0), (0.0, 1.0)]);
        assert_eq!((found.sign_changes, found.vanished, found.appeared), (2, 1, 1));
        assert_eq!((found.sign_change_fraction, found.mean_abs_delta), (Some(0.5), Some(7.5 / 4.0)));
        assert_eq!(AdvantageChange::of(&[(1.0, 10.0), (-1.0, -10.0)]).cosine, Some(1.0), "whatever the scale");
        assert_eq!(AdvantageChange::of(&[(1.0, 0.0)]).cosine, None);
        assert_eq!(AdvantageChange::of(&[]).sign_change_fraction, None);
    }

    #[test]
    fn agreement_within_groups_is_of_pairs() {
        let same = vec![(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)];
        let opposite = vec![(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)];
        let tied = vec![(1.0, 5.0), (2.0, 5.0)];
        let found = GroupAgreement::of(&[same, opposite, tied, vec![(1.0, 1.0)]]);
        assert_eq!((found.groups, found.same_best, found.tied_old, found.tied_new), (3, 2, 0, 1));
        assert_eq!(found.rank_agreement, Some(1.0 / 3.0));
    }

    #[test]
    fn a_spread_of_one_has_no_std() {
        let found = Spread::of(&[2.0]);
        assert_eq!((found.mean, found.std, found.min), (Some(2.0), None, Some(2.0)));
        assert_eq!(Spread::of(&[1.0, 3.0]).std, Some(2f64.sqrt()));
        assert_eq!(Spread::of(&[]).max, None);
    }
}
