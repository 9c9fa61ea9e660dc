//! The names under which secrets of rewards are stored: the reward's name for a reward of the job, `eval:NAME` for a reward of the
//! evaluation, `guard:NAME` for a reward of the guard set, and `rollout:N` for the nth rollout server. Code that copies, renews or lends secrets must cover all lists and
//! uses the functions below.

use super::{JobSpec, Plan, RewardPlan};

/// Returns the name under which the secrets of an evaluation's own reward are stored, distinct from those of the job's rewards.
pub fn eval_secret_name(reward: &str) -> String {
    format!("eval:{reward}")
}

/// Returns the name under which the secrets of a guard set's own reward are stored.
pub fn guard_secret_name(reward: &str) -> String {
    format!("guard:{reward}")
}

impl Plan {
    /// Returns the guard set's own rewards; `None` if it uses those of the evaluation.
    pub fn guard_rewards(&self) -> Option<&[RewardPlan]> {
        self.eval.as_ref()?.guard.as_ref()?.rewards.as_deref()
    }

    /// Returns the evaluation's own rewards; `None` if it uses the job's rewards.
    pub fn eval_rewards(&self) -> Option<&[RewardPlan]> {
        self.eval.as_ref().and_then(|eval| eval.rewards.as_deref())
    }

    /// Iterates over the job's rewards, then the evaluation's own, then the guard set's, each with the name under
    /// which its secrets are stored.
    pub fn rewards_by_secret_name(&self) -> impl Iterator<Item = (String, &RewardPlan)> {
        by_secret_name(&self.rewards, self.eval_rewards(), self.guard_rewards())
    }

    /// Returns the reward for a name that a user gave, and the name under which its secrets are stored. `NAME` is the job's reward
    /// of that name, or the evaluation's if the job has none; `eval:NAME` is always the evaluation's.
    pub fn reward_of_secret(&self, given: &str) -> Option<(String, &RewardPlan)> {
        let find = |wanted: &str| self.rewards_by_secret_name().find(|(name, _)| name == wanted);
        find(given).or_else(|| find(&eval_secret_name(given)))
    }
}

impl JobSpec {
    /// Iterates with mutable access in the same way as [`Plan::rewards_by_secret_name`].
    pub fn rewards_by_secret_name(&self) -> impl Iterator<Item = (String, &RewardPlan)> {
        let eval = self.eval.as_ref();
        let guard = eval.and_then(|eval| eval.guard.as_ref()?.rewards.as_deref());
        by_secret_name(&self.rewards, eval.and_then(|eval| eval.rewards.as_deref()), guard)
    }
}

fn by_secret_name<'a>(
    job: &'a [RewardPlan],
    eval: Option<&'a [RewardPlan]>,
    guard: Option<&'a [RewardPlan]>,
) -> impl Iterator<Item = (String, &'a RewardPlan)> {
    let of_job = job.iter().map(|reward| (reward.name.clone(), reward));
    let of_eval = eval.into_iter().flatten().map(|reward| (eval_secret_name(&reward.name), reward));
    let of_guard = guard.into_iter().flatten().map(|reward| (guard_secret_name(&reward.name), reward));
    of_job.chain(of_eval).chain(of_guard)
}
