//! The input of the rules, in addition to a job's metrics.

use super::{OnAlert, Rule};
use crate::spec::{Plan, RewardPlan};

/// The plan of a job, and the values that the rules derive from it.
#[derive(Debug, Clone, PartialEq)]
pub struct RuleInput<'a> {
    /// The job's resolved plan.
    pub plan: &'a Plan,
    /// Prompts per rollout, which is the number of independent samples behind a mean reward.
    pub prompts_per_rollout: f64,
    /// Lowest and highest possible reward; `None` if a reward does not declare them.
    pub reward_range: Option<(f64, f64)>,
    /// Lowest and highest possible reward of an evaluation; `None` if a reward does not declare them.
    pub eval_range: Option<(f64, f64)>,
    /// Number of completions per evaluation.
    pub eval_completions: f64,
    /// Rewards of weight 0, which training does not see, each with the width of its range (`None` = unknown).
    pub independent: Vec<(&'a str, Option<f64>)>,
}

impl<'a> RuleInput<'a> {
    /// Derives the input from a plan.
    pub fn of_plan(plan: &'a Plan) -> Self {
        let eval = plan.eval.as_ref();
        let eval_rewards = eval.and_then(|eval| eval.rewards.as_deref()).unwrap_or(&plan.rewards);
        let independent = plan.rewards.iter().filter(|reward| reward.weight == 0.0);
        Self {
            plan,
            prompts_per_rollout: f64::from(plan.training.prompts_per_step) * f64::from(plan.rloo.steps_per_generation),
            reward_range: range_of(&plan.rewards),
            eval_range: range_of(eval_rewards),
            eval_completions: eval.map_or(0.0, |eval| eval.num_prompts() as f64 * f64::from(eval.num_generations)),
            independent: independent
                .map(|reward| (reward.name.as_str(), reward.kind.bounds().map(|(low, high)| high - low)))
                .collect(),
        }
    }

    /// Returns the number of completions per prompt.
    pub(super) fn num_generations(&self) -> u32 {
        self.plan.rloo.num_generations.get()
    }

    /// Returns what an alert of this rule does (note, pause or stop); `None` = the rule is off.
    pub fn on_alert(&self, rule: Rule) -> Option<OnAlert> {
        let doctor = &self.plan.doctor;
        match doctor.rules.get(&rule) {
            Some(set) => set.enabled.then(|| set.on_alert.unwrap_or(doctor.on_alert)),
            None => Some(doctor.on_alert),
        }
    }
}

/// Returns the bounds of the weighted reward: the sums of the weighted bounds of all rewards. `None` if a reward with a
/// weight has no bounds.
fn range_of(rewards: &[RewardPlan]) -> Option<(f64, f64)> {
    let mut range = (0.0, 0.0);
    for reward in rewards.iter().filter(|reward| reward.weight != 0.0) {
        let (low, high) = reward.kind.bounds()?;
        let (a, b) = (reward.weight * low, reward.weight * high);
        range = (range.0 + a.min(b), range.1 + a.max(b));
    }
    (range.1 > range.0).then_some(range)
}
