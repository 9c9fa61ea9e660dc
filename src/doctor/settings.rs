//! What the rules must know of a job besides its metrics.

use std::collections::{BTreeMap, BTreeSet};

use super::{OnAlert, Rule};
use crate::spec::{Plan, RewardPlan};

/// The facts of a job that the rules depend on.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Prompts of one rollout: independent draws behind a mean reward.
    pub prompts_per_rollout: f64,
    /// Completions a prompt.
    pub num_generations: u32,
    /// KL coefficient.
    pub beta: f64,
    /// Peak.
    pub learning_rate: f64,
    /// Of sampling.
    pub temperature: f64,
    /// Tokens.
    pub max_completion_length: u32,
    /// 0 = off.
    pub max_grad_norm: f64,
    /// Optimizer steps of warm-up.
    pub warmup_steps: u64,
    /// Optimizer steps in all.
    pub max_steps: u64,
    /// Lowest and highest reward there can be; `None` where a reward does not say.
    pub reward_range: Option<(f64, f64)>,
    /// The same of the evaluation's reward.
    pub eval_range: Option<(f64, f64)>,
    /// Completions of one evaluation.
    pub eval_completions: f64,
    /// Rewards of weight 0, which training does not see, each with the width of its range.
    pub independent: Vec<(String, Option<f64>)>,
    /// What alerts do unless their rule says otherwise.
    pub default_on_alert: OnAlert,
    /// Per rule.
    pub on_alert: BTreeMap<Rule, OnAlert>,
    /// Rules that are switched off.
    pub off: BTreeSet<Rule>,
}

impl Settings {
    /// As the plan says.
    pub fn of_plan(plan: &Plan) -> Self {
        let prompts = f64::from(plan.training.prompts_per_step) * f64::from(plan.rloo.steps_per_generation);
        let eval = plan.eval.as_ref();
        let eval_rewards = eval.and_then(|eval| eval.rewards.as_deref()).unwrap_or(&plan.rewards);
        let independent = plan.rewards.iter().filter(|reward| reward.weight == 0.0);
        Self {
            prompts_per_rollout: prompts,
            num_generations: plan.rloo.num_generations,
            beta: plan.rloo.beta,
            learning_rate: plan.optimizer.learning_rate,
            temperature: plan.sampling.temperature,
            max_completion_length: plan.sampling.max_completion_length,
            max_grad_norm: plan.optimizer.max_grad_norm,
            warmup_steps: plan.optimizer.warmup_steps,
            max_steps: plan.training.max_steps,
            reward_range: range_of(&plan.rewards),
            eval_range: range_of(eval_rewards),
            eval_completions: eval.map_or(0.0, |eval| eval.num_prompts() as f64 * f64::from(eval.num_generations)),
            independent: independent
                .map(|reward| (reward.name.clone(), reward.kind.bounds().map(|(low, high)| high - low)))
                .collect(),
            default_on_alert: plan.doctor.on_alert,
            on_alert: plan.doctor.rules.iter().filter_map(|(rule, set)| Some((*rule, set.on_alert?))).collect(),
            off: plan.doctor.rules.iter().filter(|(_, set)| !set.enabled).map(|(rule, _)| *rule).collect(),
        }
    }

    /// What this rule's alert does; `None` = it is switched off.
    pub fn on_alert(&self, rule: Rule) -> Option<OnAlert> {
        let set = self.on_alert.get(&rule).copied().unwrap_or(self.default_on_alert);
        (!self.off.contains(&rule)).then_some(set)
    }
}

/// Σ over the rewards of the weighted bounds; `None` when one with a weight has none.
fn range_of(rewards: &[RewardPlan]) -> Option<(f64, f64)> {
    let mut range = (0.0, 0.0);
    for reward in rewards.iter().filter(|reward| reward.weight != 0.0) {
        let (low, high) = reward.kind.bounds()?;
        let (a, b) = (reward.weight * low, reward.weight * high);
        range = (range.0 + a.min(b), range.1 + a.max(b));
    }
    (range.1 > range.0).then_some(range)
}
