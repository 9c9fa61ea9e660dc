//! The algorithm's section of a plan (see `rloo.md`).

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How several rewards combine when some are missing or not applicable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Combine {
    /// The weights of the applicable rewards are scaled up. A sample without a required reward is unscorable.
    Renormalize,
    /// TRL's rule: a missing reward contributes 0 and weights are not scaled. A sample is unscorable only if all
    /// its rewards are missing.
    Nansum,
}

/// Settings of the algorithm (see `rloo.md`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RlooPlan {
    /// Completions per prompt, at least 2. The estimators `reinforce` and `remax` allow 1.
    #[schema(value_type = u32)]
    pub num_generations: NonZeroU32,
    /// Coefficient of the KL penalty; 0 = no reference model.
    pub beta: f64,
    /// Lower clip range: the ratio is clipped below 1 − epsilon.
    pub epsilon: f64,
    /// Upper clip range: the ratio is clipped above 1 + epsilon_high.
    pub epsilon_high: f64,
    /// Passes over each generation block (μ).
    pub num_iterations: u32,
    /// Optimizer steps per generation block (S).
    pub steps_per_generation: u32,
    /// Whether to normalize advantages over the block: (A − mean)/(std + 1e-4).
    pub normalize_advantages: bool,
    /// Minimum and maximum of the weighted reward, applied before the KL penalty; null = no clipping.
    pub reward_clip_range: Option<(f64, f64)>,
    /// Whether to exclude truncated completions from the loss.
    pub mask_truncated_completions: bool,
    /// How several rewards become one.
    pub combine: Combine,
    /// How rewards become advantages.
    #[serde(default)]
    pub estimator: Estimator,
    /// The loss: which ratio is clipped, and what the sum over tokens is divided by.
    #[serde(default)]
    pub loss: Loss,
    /// Where the KL penalty goes: subtracted from the reward, or added as a term of the loss.
    #[serde(default)]
    pub kl_in: KlIn,
    /// KL estimator: k1 in the reward; k3 or k2 in the loss.
    #[serde(default)]
    pub kl_estimator: KlEstimator,
    /// Whether to leave out groups whose rewards are all equal (before length terms and KL). Such groups would
    /// train on the KL penalty alone.
    #[serde(default)]
    pub drop_tied_groups: bool,
    /// Tokens before max_completion_length over which a penalty grows from 0 to 1 (DAPO); null = off.
    #[serde(default)]
    pub soft_overlong: Option<u32>,
    /// Coefficient λ of the length penalty λ·num_tokens/max_completion_length, which is subtracted after clipping; 0 = off.
    #[serde(default)]
    pub length_penalty: f64,
    /// Number of groups per block whose rewards must differ. Tied groups are replaced by new prompts until there are that
    /// many; 0 = off.
    #[serde(default)]
    pub min_informative_groups: u32,
    /// Maximum number of rounds per block in which tied groups are replaced by new prompts.
    #[serde(default = "default_max_refills")]
    pub max_refills: u32,
    /// Statistics by which the weighted reward is normalized, before clipping: (r − mean)/(std + 1e-4).
    #[serde(default)]
    pub reward_normalization: RewardNormalization,
    /// Whether to sample the next block while the rewards of this one are outstanding. Training is then off-policy by one block.
    #[serde(default)]
    pub overlap: bool,
}

/// Default maximum number of rounds per block in which tied groups are replaced.
pub const MAX_REFILLS: u32 = 4;

fn default_max_refills() -> u32 {
    MAX_REFILLS
}

impl RlooPlan {
    /// Whether there is a KL penalty, which needs the reference model's probabilities.
    pub fn needs_reference(&self) -> bool {
        self.beta != 0.0
    }

    /// Whether the KL penalty is part of the reward; false with beta 0, which has no penalty.
    pub fn penalizes_reward(&self) -> bool {
        self.needs_reference() && self.kl_in == KlIn::Reward
    }

    /// Whether advantages depend on the whole block rather than on their group alone.
    pub fn whitens_advantages(&self) -> bool {
        self.normalize_advantages || self.estimator.whitens()
    }
}

/// How a reward becomes an advantage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// The reward minus the mean of the prompt's other completions.
    #[default]
    Rloo,
    /// The reward minus the mean of the group, divided by its standard deviation.
    Grpo,
    /// The reward minus the mean of the group.
    DrGrpo,
    /// The return of each token including its KL penalty, whitened over the block.
    ReinforcePp,
    /// Like `reinforce_pp`, after subtracting the mean of the group.
    ReinforcePpBaseline,
    /// The reward minus the reward of the prompt's greedy completion.
    Remax,
    /// The reward without a baseline.
    Reinforce,
    /// The rewards of a turn of an episode and of the turns after it, minus the mean of the same for the prompt's other
    /// episodes. It needs an environment.
    RlooTurns,
}

impl Estimator {
    /// Whether every token has its own advantage.
    pub fn has_token_advantages(self) -> bool {
        self.whitens() || self == Estimator::RlooTurns
    }

    /// Whether the estimator normalizes its advantages over the whole block.
    pub fn whitens(self) -> bool {
        matches!(self, Estimator::ReinforcePp | Estimator::ReinforcePpBaseline)
    }

    /// Whether the estimator works with one completion per prompt.
    pub fn allows_one_generation(self) -> bool {
        matches!(self, Estimator::Reinforce | Estimator::Remax)
    }
}

/// A loss: which ratio is clipped, and what the sum is divided by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Ratio of the whole completion, mean over completions.
    #[default]
    Sequence,
    /// Ratio of each token, mean over the tokens of the step (PPO, DAPO).
    TokenMean,
    /// Ratio of each token, mean over a completion's tokens, then over completions (GRPO).
    SeqMeanTokenMean,
    /// Ratio of each token, sum divided by (completions · max_completion_length) (Dr. GRPO).
    DrGrpo,
    /// Ratio of the completion to the power of 1/length, mean over completions.
    Gspo,
}

impl Loss {
    /// Whether there is one ratio per completion instead of one per token.
    pub fn has_sequence_ratio(self) -> bool {
        matches!(self, Loss::Sequence | Loss::Gspo)
    }
}

/// Where the KL penalty goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlIn {
    /// Subtracted from the reward: the sequence's penalty, or each token's if the estimator has token advantages.
    #[default]
    Reward,
    /// Added to the loss, for each token (GRPO).
    Loss,
}

/// How KL is estimated from sampled tokens (Schulman).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// The estimator k1: log π − log π_ref.
    #[default]
    K1,
    /// The estimator k2: half the square of k1.
    K2,
    /// The estimator k3: π_ref/π − 1 − log(π_ref/π).
    K3,
}

/// Statistics by which rewards are normalized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardNormalization {
    /// Rewards are not normalized.
    #[default]
    None,
    /// Mean and standard deviation of the block.
    Batch,
    /// Mean and standard deviation of all rewards so far, which are part of the checkpoint.
    Running,
}
