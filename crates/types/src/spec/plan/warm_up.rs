//! The warm-up: supervised steps before RLOO's first one.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{DatasetPlan, Plan};

/// Supervised steps before RLOO's first one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WarmUpPlan {
    /// The rows to learn from.
    pub dataset: DatasetPlan,
    /// Optimizer steps; they are the first ones of the job.
    pub steps: u64,
    /// Rows of a step.
    pub batch_size: u32,
    /// Constant.
    pub learning_rate: f64,
    /// What the KL penalty is measured against.
    pub reference: WarmUpReference,
    /// Tokens of the longest row, answer included; null when the worker counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_row_tokens: Option<u64>,
}

/// The reference of a run with a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarmUpReference {
    /// The reference that the job would have without a warm-up.
    Base,
    /// A frozen copy of the weights at the end of the warm-up.
    Warmed,
}

impl Plan {
    /// Optimizer steps of the warm-up, the first ones of the job.
    pub fn warm_up_steps(&self) -> u64 {
        self.warm_up.as_ref().map_or(0, |warm_up| warm_up.steps)
    }

    /// Optimizer steps of the job: those of the warm-up, then RLOO's.
    pub fn total_steps(&self) -> u64 {
        self.warm_up_steps().saturating_add(self.training.max_steps)
    }

    /// How many of so many steps of the job are RLOO's own; `None` before the end of the warm-up.
    pub fn rloo_step(&self, step: u64) -> Option<u64> {
        step.checked_sub(self.warm_up_steps())
    }

    /// Whether the KL penalty is measured against the weights at the end of the warm-up.
    pub fn has_warmed_reference(&self) -> bool {
        let warmed = self.warm_up.as_ref().is_some_and(|warm_up| warm_up.reference == WarmUpReference::Warmed);
        warmed && self.rloo.needs_reference()
    }
}
