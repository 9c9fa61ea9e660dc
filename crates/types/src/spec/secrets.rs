//! The names that the secrets of rewards are kept under: a reward of the job by its name, one of the evaluation's own
//! rewards by `eval:NAME`, one of the guard's own by `guard:NAME`. Whoever copies, renews or lends secrets walks both lists with the functions here.

use super::{JobSpec, Plan, RewardPlan};

/// The name that the secrets of an evaluation's own reward are kept under, beside those of the job's rewards.
pub fn eval_secret_name(reward: &str) -> String {
    format!("eval:{reward}")
}

/// The name that the secrets of a guard's own reward are kept under.
pub fn guard_secret_name(reward: &str) -> String {
    format!("guard:{reward}")
}

impl Plan {
    /// The rewards of the guard alone; `None` where it uses those of the evaluation.
    pub fn guard_rewards(&self) -> Option<&[RewardPlan]> {
        self.eval.as_ref()?.guard.as_ref()?.rewards.as_deref()
    }

    /// The rewards of the evaluation alone; `None` where it uses the job's.
    pub fn eval_rewards(&self) -> Option<&[RewardPlan]> {
        self.eval.as_ref().and_then(|eval| eval.rewards.as_deref())
    }

    /// The job's rewards, then the evaluation's own, then the guard's, each with the name its secrets are kept under.
    pub fn rewards_by_secret_name(&self) -> impl Iterator<Item = (String, &RewardPlan)> {
        by_secret_name(&self.rewards, self.eval_rewards(), self.guard_rewards())
    }

    /// The reward that a user means by a name, and the name its secrets are kept under: `NAME` is the job's reward of that
    /// name, or the evaluation's where the job has none; `eval:NAME` is always the evaluation's.
    pub fn reward_of_secret(&self, given: &str) -> Option<(String, &RewardPlan)> {
        let find = |wanted: &str| self.rewards_by_secret_name().find(|(name, _)| name == wanted);
        find(given).or_else(|| find(&eval_secret_name(given)))
    }
}

impl JobSpec {
    /// As [`Plan::rewards_by_secret_name`].
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
