//! The algorithm's part of a plan (`rloo.md`).

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How missing and inapplicable rewards combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Combine {
    /// Weights of applicable rewards are scaled up; a missing required reward makes the sample unscorable.
    Renormalize,
    /// As TRL: missing contributes 0, nothing is scaled, unscorable only when all are missing.
    Nansum,
}

/// The algorithm (`rloo.md`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RlooPlan {
    /// Completions a prompt, ≥ 2; the estimators reinforce and remax allow 1.
    #[schema(value_type = u32)]
    pub num_generations: NonZeroU32,
    /// KL coefficient; 0 = no reference pass.
    pub beta: f64,
    /// Lower clip: ratio ≥ 1 − epsilon.
    pub epsilon: f64,
    /// Upper clip: ratio ≤ 1 + epsilon_high.
    pub epsilon_high: f64,
    /// Passes over a block (μ).
    pub num_iterations: u32,
    /// Optimizer steps a block (S).
    pub steps_per_generation: u32,
    /// (A − mean)/(std + 1e-4) over the block.
    pub normalize_advantages: bool,
    /// On the weighted reward, before KL.
    pub reward_clip_range: Option<(f64, f64)>,
    /// Truncated completions get mask 0.
    pub mask_truncated_completions: bool,
    /// How several rewards become one.
    pub combine: Combine,
    /// From rewards to advantages.
    #[serde(default)]
    pub estimator: Estimator,
    /// From ratios and advantages to a number.
    #[serde(default)]
    pub loss: Loss,
    /// Where the KL penalty is: subtracted from the reward, or a term of the loss.
    #[serde(default)]
    pub kl_in: KlIn,
    /// k1 in the reward; k3 or k2 in the loss.
    #[serde(default)]
    pub kl_estimator: KlEstimator,
    /// Leave out groups of equal rewards (before length terms and KL); they would train on KL alone.
    #[serde(default)]
    pub drop_tied_groups: bool,
    /// Tokens before max_completion_length over which a penalty grows from 0 to 1 (DAPO); null = off.
    #[serde(default)]
    pub soft_overlong: Option<u32>,
    /// λ of the length penalty λ·num_tokens/max_completion_length, subtracted after the clip.
    #[serde(default)]
    pub length_penalty: f64,
    /// Groups of a block whose rewards must not be tied: tied ones are replaced by new prompts until then; 0 = off.
    #[serde(default)]
    pub min_informative_groups: u32,
    /// The most rounds of such replacements a block.
    #[serde(default = "default_max_refills")]
    pub max_refills: u32,
    /// (r − mean)/(std + 1e-4) of the weighted reward, before the clip.
    #[serde(default)]
    pub reward_normalization: RewardNormalization,
    /// Sample the next block while the rewards of this one are outstanding: off-policy by one block.
    #[serde(default)]
    pub overlap: bool,
}

/// Rounds of refills unless told otherwise.
pub const MAX_REFILLS: u32 = 4;

fn default_max_refills() -> u32 {
    MAX_REFILLS
}

impl RlooPlan {
    /// Whether there is a KL penalty, for which the reference's probabilities are computed.
    pub fn needs_reference(&self) -> bool {
        self.beta != 0.0
    }

    /// Whether the KL penalty is part of the reward; with beta = 0 there is none.
    pub fn penalizes_reward(&self) -> bool {
        self.needs_reference() && self.kl_in == KlIn::Reward
    }

    /// Whether advantages depend on the whole block, and not on their group alone.
    pub fn whitens_advantages(&self) -> bool {
        self.normalize_advantages || self.estimator.has_token_advantages()
    }
}

/// How a reward becomes an advantage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// Minus the mean of the other completions of the prompt.
    #[default]
    Rloo,
    /// Minus the mean of the group, over its std.
    Grpo,
    /// Minus the mean of the group.
    DrGrpo,
    /// Return of each token with its KL, whitened over the block.
    ReinforcePp,
    /// The same, minus the mean of the group first.
    ReinforcePpBaseline,
    /// Minus the reward of the prompt's greedy completion.
    Remax,
    /// The reward itself.
    Reinforce,
}

impl Estimator {
    /// Whether every token has an advantage of its own.
    pub fn has_token_advantages(self) -> bool {
        matches!(self, Estimator::ReinforcePp | Estimator::ReinforcePpBaseline)
    }

    /// Whether one completion a prompt is enough.
    pub fn allows_one_generation(self) -> bool {
        matches!(self, Estimator::Reinforce | Estimator::Remax)
    }
}

/// What is clipped, and what its sum is divided by.
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
    /// Ratio of each token, sum over completions · max_completion_length (Dr. GRPO).
    DrGrpo,
    /// Ratio of the completion to the power of 1/length, mean over completions.
    Gspo,
}

impl Loss {
    /// Whether a completion has one ratio.
    pub fn has_sequence_ratio(self) -> bool {
        matches!(self, Loss::Sequence | Loss::Gspo)
    }
}

/// Where the KL penalty is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlIn {
    /// Subtracted from the reward: of the sequence, or of each token where the estimator has token advantages.
    #[default]
    Reward,
    /// A term of the loss, of each token (GRPO).
    Loss,
}

/// How KL is estimated from sampled tokens (Schulman).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// log π − log π_ref.
    #[default]
    K1,
    /// Half its square.
    K2,
    /// π_ref/π − 1 − log(π_ref/π).
    K3,
}

/// By what rewards are normalised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardNormalization {
    /// Nothing.
    #[default]
    None,
    /// Mean and std of the block.
    Batch,
    /// Mean and std of all rewards so far; they are part of the checkpoint.
    Running,
}
