//! A generation block: the completions of U prompts with everything that stays the same while they are trained.

use std::ops::Range;

use super::advantage::{AdvantageConfig, Advantages, RewardWeight, advantages, combine_rewards, sequence_kl};
use super::error::{EngineError, Result};
use super::host::{Rollout, RolloutCompletion, RolloutGroup};
use super::model::Row;
use super::rollout::is_included;
use crate::event::FinishReason;
use crate::sample::Score;
use crate::spec::Plan;

/// A scored rollout and what was computed of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// Which block, from 0, over all epochs.
    pub index: u64,
    /// Prompts, completions, scores.
    pub rollout: Rollout,
    /// The rest, one entry a completion.
    pub values: BlockValues,
}

/// One entry a completion, in block order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BlockValues {
    /// The weighted reward; `None` = unscorable.
    pub weighted: Vec<Option<f64>>,
    /// False for truncated completions that are masked.
    pub included: Vec<bool>,
    /// Per-token log-probs of the policy that sampled; as many as are known yet.
    pub old_logps: Vec<Vec<f32>>,
    /// Per-token log-probs of the reference; empty when beta = 0.
    pub ref_logps: Vec<Vec<f32>>,
    /// As many whole groups as are known yet.
    pub results: Advantages,
}

impl Block {
    /// A block whose log-probs and advantages are not known yet. The rollout must hold whole groups.
    pub fn new(index: u64, rollout: Rollout, plan: &Plan) -> Result<Self> {
        let num_generations = plan.rloo.num_generations as usize;
        let prompts = plan.training.prompts_per_step as usize * plan.rloo.steps_per_generation as usize;
        let whole = |group: &RolloutGroup| group.completions.len() == num_generations && !group.prompt_ids.is_empty();
        if rollout.groups.len() != prompts || !rollout.groups.iter().all(whole) {
            return Err(EngineError::Input(format!(
                "a rollout must hold {prompts} prompts of at least one token with {num_generations} completions each; block {index} has {} prompts",
                rollout.groups.len()
            )));
        }
        let completions = || rollout.groups.iter().flat_map(|group| &group.completions);
        if completions().any(|completion| completion.score.values.len() != plan.rewards.len()) {
            return Err(EngineError::Input(format!("a score must hold {} values, one a reward", plan.rewards.len())));
        }
        let weights = RewardWeight::of_plan(&plan.rewards);
        let values = BlockValues {
            weighted: completions()
                .map(|completion| combine_rewards(&completion.score.values, &weights, plan.rloo.combine))
                .collect(),
            included: completions()
                .map(|completion| is_included(completion.finish_reason, plan.rloo.mask_truncated_completions))
                .collect(),
            ..BlockValues::default()
        };
        Ok(Self { index, rollout, values })
    }

    /// Completions.
    pub fn len(&self) -> usize {
        self.values.weighted.len()
    }

    /// True when it holds none.
    pub fn is_empty(&self) -> bool {
        self.values.weighted.is_empty()
    }

    /// Prompt and completion tokens, the prompt counted once a completion, as TRL counts.
    pub fn num_tokens(&self) -> u64 {
        self.rollout.rows().map(|row| (row.prompt.len() + row.completion.len()) as u64).sum()
    }

    /// Completion tokens.
    pub fn num_completion_tokens(&self) -> u64 {
        self.rollout.rows().map(|row| row.completion.len() as u64).sum()
    }
}

impl BlockValues {
    /// Advantages of the groups in `rows`, whose log-probs are known (unless beta = 0, where none are needed); in order.
    pub fn fill_advantages(&mut self, rows: Range<usize>, plan: &Plan) {
        let config = AdvantageConfig::of_plan(plan);
        let kl: Vec<f64> = rows.clone().map(|row| self.sequence_kl(row).unwrap_or(0.0)).collect();
        self.results.append(advantages(&self.weighted[rows], &kl, &config));
    }

    /// Σ (old − reference) of a completion; `None` without a reference or before the log-probs are known.
    pub fn sequence_kl(&self, row: usize) -> Option<f64> {
        let (old, reference) = (self.old_logps.get(row)?, self.ref_logps.get(row)?);
        Some(sequence_kl(old, reference, self.included[row]))
    }
}

impl Rollout {
    /// Prompt and completion of every completion, in block order.
    pub fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.groups.iter().flat_map(|group| {
            group.completions.iter().map(|completion| Row { prompt: &group.prompt_ids, completion: &completion.ids })
        })
    }

    /// Every completion with its group, in block order.
    pub fn completions(&self) -> impl Iterator<Item = (&RolloutGroup, &RolloutCompletion)> {
        self.groups.iter().flat_map(|group| group.completions.iter().map(move |completion| (group, completion)))
    }

    /// Scores, in block order.
    pub fn scores(&self) -> Vec<Score> {
        self.completions().map(|(_, completion)| completion.score.clone()).collect()
    }

    /// Completion lengths in tokens, in block order.
    pub fn lengths(&self) -> Vec<usize> {
        self.completions().map(|(_, completion)| completion.ids.len()).collect()
    }

    /// Why each completion ended, in block order.
    pub fn finish_reasons(&self) -> Vec<FinishReason> {
        self.completions().map(|(_, completion)| completion.finish_reason).collect()
    }
}
