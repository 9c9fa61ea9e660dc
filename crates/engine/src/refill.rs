//! Dynamic sampling: groups whose rewards are tied have no gradient, so they are replaced by groups of the next prompts
//! (DAPO: Yu et al. 2025, arXiv 2503.14476, section 3.2).

use super::advantage::shape::{RewardShape, RewardStats};
use super::advantage::{self, RewardWeight, combine_rewards};
use super::host::{BlockSampling, Rollout, RolloutCompletion, RolloutGroup, RolloutId, RunEnd};
use super::random::{Key, Stream};
use super::rollout::Batching;
use super::rollouts::Rollouts;
use crate::spec::{Plan, RewardNormalization};
use crate::trajectory::Trajectory;

/// Replaces tied groups until at least `min_informative_groups` groups are not tied, for at most `max_refills` rounds.
/// Each round samples as many new prompts as there are tied groups; a new group that is tied too is dropped. The
/// samples of a round are a function of (seed, block, round).
pub(super) fn refill(
    rollouts: &mut Rollouts<'_>,
    batching: &Batching,
    step: u64,
    index: u64,
    rollout: &mut Rollout,
) -> Result<(), RunEnd> {
    let plan = rollouts.plan;
    let is_empty = |group: &RolloutGroup| !is_informative(group, plan);
    let Rollout { groups, drawn } = rollout;
    drawn.sampled_groups = groups.len() as u64;
    drawn.informative_groups = (groups.len() - groups.iter().filter(|group| is_empty(group)).count()) as u64;
    let wanted = plan.rloo.min_informative_groups as usize;
    while drawn.refills < plan.rloo.max_refills
        && let Some(next) = drawn.next_prompt
    {
        let places: Vec<usize> = (0..groups.len()).filter(|&place| is_empty(&groups[place])).collect();
        if groups.len() - places.len() >= wanted {
            break;
        }
        drawn.refills += 1;
        let (rows, after) = batching.prompts_at(next, places.len() as u64);
        drawn.next_prompt = Some(after);
        let rows = rollouts.data.dataset_rows(rows);
        let key = Key::new(plan.training.seed, Stream::Refill).with(index).with(u64::from(drawn.refills));
        let fresh = rollouts.groups(RolloutId::train(step).round(drawn.refills), &rows, key)?;
        drawn.sampled_groups += fresh.len() as u64;
        let mut places = places.into_iter();
        for group in fresh {
            let place = if is_empty(&group) { None } else { places.next() };
            let left_out = match place {
                Some(place) => {
                    drawn.informative_groups += 1;
                    std::mem::replace(&mut groups[place], group)
                }
                None => group,
            };
            left_out.completions.iter().for_each(|completion| count_extra_tokens(&left_out, completion, drawn));
            left_out.greedy.iter().for_each(|greedy| count_extra_tokens(&left_out, greedy, drawn));
        }
    }
    for group in groups.iter() {
        group.greedy.iter().for_each(|greedy| count_extra_tokens(group, greedy, drawn));
    }
    Ok(())
}

/// Adds the tokens of a completion outside of the block, and of its prompt, to the counts of extra tokens.
fn count_extra_tokens(group: &RolloutGroup, completion: &RolloutCompletion, drawn: &mut BlockSampling) {
    drawn.extra_tokens += Trajectory::new(&group.prompt_ids, &completion.segments).num_tokens() as u64;
    drawn.extra_completion_tokens += completion.segments.num_model_tokens() as u64;
}

/// Whether two scorable completions of a group differ in their reward, before length terms and KL. The block's
/// statistics are not known yet, but normalization never makes unequal rewards equal. A clip after normalization can;
/// the advantages handle that case.
pub fn is_informative(group: &RolloutGroup, plan: &Plan) -> bool {
    let weights = RewardWeight::of_plan(&plan.rewards);
    let shape = RewardShape {
        normalization: RewardNormalization::None,
        clip_range: match plan.rloo.reward_normalization {
            RewardNormalization::None => plan.rloo.reward_clip_range,
            RewardNormalization::Batch | RewardNormalization::Running => None,
        },
        ..RewardShape::of_plan(plan)
    };
    let reward = |completion: &RolloutCompletion| {
        let weighted = combine_rewards(&completion.score.values, &weights, plan.rloo.combine)?;
        Some(shape.task_reward(weighted, &RewardStats::default()))
    };
    let rewards: Vec<Option<f64>> = group.completions.iter().map(reward).collect();
    advantage::is_informative(&rewards, rewards.len(), plan.arithmetic.ties)
}
