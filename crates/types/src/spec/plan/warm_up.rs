//! The warm-up: supervised steps before the first RLOO step.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{DatasetPlan, Plan, WarmUpRule};

/// Supervised steps before the first RLOO step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WarmUpPlan {
    /// The rows that the warm-up trains on.
    pub dataset: DatasetPlan,
    /// Number of optimizer steps of the warm-up. They are the first steps of the job.
    pub steps: u64,
    /// Number of rows per step of the warm-up.
    pub batch_size: u32,
    /// Learning rate, constant over the warm-up.
    pub learning_rate: f64,
    /// The reference model of the KL penalty.
    pub reference: WarmUpReference,
    /// Length of the longest row including its answer, in tokens; null = the worker counts the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_row_tokens: Option<u64>,
}

/// The KL reference of a run with a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarmUpReference {
    /// The reference that the job would have without a warm-up.
    Base,
    /// A frozen copy of the weights at the end of the warm-up.
    Warmed,
}

impl Plan {
    /// Returns the number of optimizer steps of the warm-up, which are the first steps of the job.
    pub fn warm_up_steps(&self) -> u64 {
        self.warm_up.as_ref().map_or(0, |warm_up| warm_up.steps)
    }

    /// Returns the number of optimizer steps of the job: those of the warm-up, then the RLOO steps.
    pub fn total_steps(&self) -> u64 {
        self.warm_up_steps().saturating_add(self.training.max_steps)
    }

    /// Converts a step of the job to an RLOO step; `None` before the end of the warm-up.
    pub fn rloo_step(&self, step: u64) -> Option<u64> {
        step.checked_sub(self.warm_up_steps())
    }

    /// Iterates over the datasets whose prompts the warm-up leaves out because only the verdict reads them: the test dataset and the
    /// guard set. Empty without a warm-up, and under the rule of earlier versions.
    pub fn datasets_left_out_of_warm_up(&self) -> impl Iterator<Item = &DatasetPlan> {
        let leaves_out = self.warm_up.is_some() && self.arithmetic.warm_up == WarmUpRule::EvaluatedAndJudged;
        let eval = self.eval.as_ref().filter(|_| leaves_out);
        eval.into_iter().flat_map(|eval| {
            let of_guard = eval.guard.as_ref().map(|guard| &guard.dataset);
            eval.test_dataset.iter().chain(of_guard)
        })
    }

    /// Whether the KL penalty is measured against the weights at the end of the warm-up.
    pub fn has_warmed_reference(&self) -> bool {
        let warmed = self.warm_up.as_ref().is_some_and(|warm_up| warm_up.reference == WarmUpReference::Warmed);
        warmed && self.rloo.needs_reference()
    }
}
