//! Dynamic sampling: groups whose rewards are tied teach nothing, so they are replaced by groups of the prompts that come
//! next (DAPO: Yu et al. 2025, arXiv 2503.14476, section 3.2).

use super::advantage::shape::{RewardShape, RewardStats};
use super::advantage::{self, RewardWeight, combine_rewards};
use super::host::{Rollout, RolloutCompletion, RolloutGroup, RolloutId};
use super::random::{Key, Stream};
use super::{Halt, Run};
use crate::spec::{Plan, RewardNormalization};

impl Run<'_> {
    /// Replace groups without information until `min_informative_groups` have some, for at most `max_refills` rounds. Each
    /// round draws as many new prompts from the cursor as there are such groups; a new group that has none either is not
    /// taken. What a round samples is a function of (seed, block, round).
    pub(super) fn refill(&mut self, step: u64, index: u64, next: u64, rollout: &mut Rollout) -> Result<(), Halt> {
        let plan = self.plan;
        let is_empty = |group: &RolloutGroup| !is_informative(group, plan);
        let Rollout { groups, drawn } = rollout;
        let mut next = next;
        drawn.sampled_groups = groups.len() as u64;
        drawn.informative_groups = (groups.len() - groups.iter().filter(|group| is_empty(group)).count()) as u64;
        let wanted = plan.rloo.min_informative_groups as usize;
        while drawn.refills < plan.rloo.max_refills {
            let places: Vec<usize> = (0..groups.len()).filter(|&place| is_empty(&groups[place])).collect();
            if groups.len() - places.len() >= wanted {
                break;
            }
            drawn.refills += 1;
            let (rows, after) = self.batching.prompts_at(next, places.len() as u64);
            next = after;
            let rows = self.dataset_rows(rows);
            let key = Key::new(plan.training.seed, Stream::Refill).with(index).with(u64::from(drawn.refills));
            let fresh = self.sample_groups(RolloutId::train(step).round(drawn.refills), &rows, key)?;
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
                let (prompt, completions) = tokens(&left_out.prompt_ids, &left_out.completions);
                drawn.extra_tokens += prompt + completions;
                drawn.extra_completion_tokens += completions;
                count_greedy(&left_out, &mut drawn.extra_tokens, &mut drawn.extra_completion_tokens);
            }
        }
        for group in groups.iter() {
            count_greedy(group, &mut drawn.extra_tokens, &mut drawn.extra_completion_tokens);
        }
        drawn.next_prompt = Some(next);
        Ok(())
    }
}

/// Tokens of a group's prompts, counted once a completion, and of its completions.
fn tokens(prompt: &[u32], completions: &[RolloutCompletion]) -> (u64, u64) {
    let sampled = completions.iter().map(|completion| completion.ids.len() as u64).sum();
    ((prompt.len() * completions.len()) as u64, sampled)
}

fn count_greedy(group: &RolloutGroup, all: &mut u64, of_completions: &mut u64) {
    if let Some(greedy) = &group.greedy {
        *all += (group.prompt_ids.len() + greedy.ids.len()) as u64;
        *of_completions += greedy.ids.len() as u64;
    }
}

/// Whether two scorable completions of a group differ in their reward, before length terms and KL. The block's statistics
/// are not known yet, and no normalisation makes unequal rewards equal; a clip behind one is left to the advantages.
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
