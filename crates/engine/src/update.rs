//! Forward and backward passes over the completions of one optimizer step, in micro-batches of whole groups.

use std::num::NonZeroUsize;
use std::ops::Range;

use super::error::Result;
use super::loss::RowLoss;
use super::memory::micro_batches;
use super::model::pass::{RowDropout, TrainedRows};
use super::model::{Adapter, Flat, Policy, RowScore};
use super::random::Key;
use crate::trajectory::Trajectory;

/// How a step's completions are split into micro-batches. Old log-probs and the update use the same split, so that
/// equal weights give equal bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MicroBatching {
    /// Number of rows of a group; they are contiguous and never split.
    pub num_generations: NonZeroUsize,
    /// Maximum number of tokens of a micro-batch, which holds at least one group.
    pub max_tokens: usize,
    /// The temperature that the logits are divided by.
    pub temperature: f64,
    /// Random key of the step's LoRA dropout; only the training forward uses it.
    pub dropout: Option<Key>,
}

impl MicroBatching {
    fn cut(&self, rows: &[Trajectory<'_>]) -> Vec<Range<usize>> {
        let tokens: Vec<usize> = rows.iter().map(Trajectory::num_tokens).collect();
        micro_batches(&tokens, self.num_generations, self.max_tokens)
    }
}

/// Computes log-probs and entropies of every trajectory's model tokens, without gradient; `None` if `stop` requested
/// a stop between micro-batches.
pub fn score_trajectories(
    policy: &Policy,
    rows: &[Trajectory<'_>],
    batching: &MicroBatching,
    adapter: Adapter,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Vec<RowScore>>> {
    let mut scores = Vec::with_capacity(rows.len());
    for batch in batching.cut(rows) {
        if stop() {
            return Ok(None);
        }
        scores.extend(policy.score(&rows[batch], batching.temperature, adapter)?);
    }
    Ok(Some(scores))
}

/// The gradient of one optimizer step, with its losses and scores.
#[derive(Debug)]
pub struct StepGradient {
    /// Gradient dL/dparameter of the step, before clipping.
    pub gradient: Flat,
    /// The loss of each completion.
    pub losses: Vec<RowLoss>,
    /// The policy's log-probs and entropies, one entry per completion.
    pub scores: Vec<RowScore>,
}

/// A function that computes the losses of a range of rows from their current scores.
pub type RowLosses<'a> = dyn FnMut(Range<usize>, &[RowScore]) -> Vec<RowLoss> + 'a;

/// Computes the gradient of the whole step. `losses` already include the step's single denominator, so the split changes
/// results only by the rounding of the sum. `second_pass` is that of [`TrainedRows`]. `None` if `stop` requested a stop between
/// micro-batches: then the step begins again later.
pub fn step_gradient(
    policy: &Policy,
    rows: &[Trajectory<'_>],
    batching: &MicroBatching,
    second_pass: &[bool],
    losses: &mut RowLosses<'_>,
    stop: &dyn Fn() -> bool,
) -> Result<Option<StepGradient>> {
    let mut step =
        StepGradient { gradient: policy.zero_gradient()?, losses: Vec::with_capacity(rows.len()), scores: Vec::new() };
    for batch in batching.cut(rows) {
        if stop() {
            return Ok(None);
        }
        let StepGradient { gradient, losses: all, scores } = &mut step;
        let range = batch.clone();
        let mut backward = |batch_scores: &[RowScore]| {
            let batch_losses = losses(range.clone(), batch_scores);
            let gradients = batch_losses.iter().map(RowLoss::token_gradient).collect();
            all.extend(batch_losses);
            Ok(gradients)
        };
        let dropout = batching.dropout.map(|key| RowDropout { key, first_row: batch.start });
        let options = TrainedRows { dropout, second_pass: second_pass.get(batch.clone()).unwrap_or_default() };
        let rows = &rows[batch];
        scores.extend(policy.forward_backward_with(rows, batching.temperature, &options, &mut backward, gradient)?);
    }
    Ok(Some(step))
}
