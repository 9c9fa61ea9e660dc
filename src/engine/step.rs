//! The two computations of a step: log-probs of a block without gradient, and one optimizer update of a slice of it.

use std::ops::Range;
use std::time::Instant;

use super::block::{Block, Logps};
use super::error::{EngineError, Result};
use super::loss::{LossConfig, LossRow, RowLoss, row_loss, total_loss};
use super::model::{Adapter, Policy, Row, RowScore};
use super::optim::learning_rate;
use super::random::{Key, Stream};
use super::rollout::Cursor;
use super::update::{MicroBatching, StepGradient, score_rows, step_gradient};
use super::{Halt, Run};
use crate::event::Phase;

/// What an optimizer step came to.
pub(super) struct Update {
    /// Its completions in the block.
    pub slice: Range<usize>,
    /// Used in this step.
    pub learning_rate: f64,
    /// Before clipping.
    pub grad_norm: f64,
    /// NaN when the forward pass was not finite.
    pub loss: f64,
    /// Clipped; `None` when the forward pass was not finite.
    pub step_gradient: Option<StepGradient>,
}

impl Update {
    /// Whether the optimizer took it.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

impl Run<'_> {
    /// Whether the old log-probs, not recorded at sampling, must be known before training: the block is trained more than
    /// once, or its advantages are whitened together and hold a KL penalty, or the training forward drops what sampling did
    /// not. Otherwise the training forward itself gives them: old = new, ratio 1.
    pub(super) fn needs_old_pass(&self) -> bool {
        let rloo = &self.plan.rloo;
        let drops = self.plan.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        drops || self.batching.uses_per_block() > 1 || (rloo.penalizes_reward() && rloo.whitens_advantages())
    }

    /// The log-probs of a block whose policy is the one that sampled.
    pub(super) fn score_block(&mut self, block: &mut Block) -> Result<(), Halt> {
        let recorded = block.rollout.recorded_logps();
        let recorded = recorded.map(|logps| logps.into_iter().map(<[f32]>::to_vec).collect());
        let needs_old = self.needs_old_pass();
        let rows: Vec<Row<'_>> = block.rollout.rows().collect();
        let (old_logps, ref_logps) = self.logps_of(&rows, recorded, needs_old)?;
        (block.values.old_logps, block.values.ref_logps) = (old_logps, ref_logps);
        Ok(())
    }

    /// The old log-probs: those recorded at sampling where sampler and training agree bit for bit, else by a pass without
    /// gradient if need be; and the reference's unless beta = 0. Passes are cut slice by slice, as training will be, so that
    /// equal weights give equal bits.
    pub(super) fn logps_of(
        &mut self,
        rows: &[Row<'_>],
        recorded: Option<Logps>,
        needs_old: bool,
    ) -> Result<(Logps, Logps), Halt> {
        let recorded = recorded.filter(|_| self.samples_exactly);
        let needs_old = needs_old && recorded.is_none();
        let needs_reference = self.plan.rloo.beta != 0.0;
        if !needs_old && !needs_reference {
            return Ok((recorded.unwrap_or_default(), Vec::new()));
        }
        self.phase(Phase::Train)?;
        let started = Instant::now();
        let old_logps = match recorded {
            Some(recorded) => recorded,
            None if needs_old => logps(self.scores(rows, |run| (&run.policy, Adapter::On))?),
            None => Vec::new(),
        };
        let ref_logps =
            if needs_reference { logps(self.scores(rows, |run| run.reference.of(&run.policy))?) } else { Vec::new() };
        self.seconds.reference += started.elapsed().as_secs_f64();
        Ok((old_logps, ref_logps))
    }

    /// How likely completions of an evaluation are: by the policy as it is, and by the reference unless beta = 0.
    pub(super) fn score_evaluated(&mut self, rows: &[Row<'_>]) -> Result<(Vec<RowScore>, Logps), Halt> {
        let scores = self.scores(rows, |run| (&run.policy, Adapter::On))?;
        let needs_reference = self.plan.rloo.beta != 0.0;
        let reference =
            if needs_reference { logps(self.scores(rows, |run| run.reference.of(&run.policy))?) } else { Vec::new() };
        Ok((scores, reference))
    }

    /// What one of the run's models says of every completion.
    fn scores(&mut self, rows: &[Row<'_>], of: fn(&Self) -> (&Policy, Adapter)) -> Result<Vec<RowScore>, Halt> {
        loop {
            let (policy, adapter) = of(self);
            let stop = || self.host.stop().is_some();
            let slices = rows.chunks(self.completions_per_step());
            let scores: Result<Option<Vec<Vec<RowScore>>>> =
                slices.map(|slice| score_rows(policy, slice, &self.micro_batching, adapter, &stop)).collect();
            match scores {
                Ok(Some(scores)) => return Ok(scores.into_iter().flatten().collect()),
                Ok(None) => return Err(self.halt()),
                Err(error) => self.relieve(error)?,
            }
        }
    }

    /// Forward, backward, clip, AdamW over one slice of the block.
    pub(super) fn update(&mut self, block: &mut Block, step: u64, cursor: Cursor) -> Result<Update, Halt> {
        self.poll()?;
        self.phase(Phase::Train)?;
        let started = Instant::now();
        let slice = self.slice(cursor);
        let known = (block.values.old_logps.len(), block.values.results.clone());
        let step_gradient = loop {
            match self.gradient(block, step, slice.clone()) {
                Ok(Some(step_gradient)) => break Some(step_gradient),
                Ok(None) => return Err(self.halt()),
                Err(EngineError::NonFinite { .. }) => break None,
                Err(error) => {
                    self.relieve(error)?;
                    block.values.old_logps.truncate(known.0);
                    block.values.results = known.1.clone();
                }
            }
        };
        if let Some(step_gradient) = &step_gradient {
            self.check_first_scores(&step_gradient.scores)?;
        }
        let plan = self.plan;
        let learning_rate = learning_rate(&plan.optimizer, step - 1, plan.training.max_steps);
        let mut update = Update { slice, learning_rate, grad_norm: f64::NAN, loss: f64::NAN, step_gradient };
        if let Some(step_gradient) = &mut update.step_gradient {
            update.loss = total_loss(&step_gradient.losses);
            update.grad_norm = step_gradient.gradient.clip(plan.optimizer.max_grad_norm)?;
        }
        if let Some(step_gradient) = update.step_gradient.as_ref().filter(|_| update.is_finite()) {
            let gradient = &step_gradient.gradient;
            let optimizer = &mut self.optimizer;
            self.policy.update_parameters(|flat| optimizer.update(flat, gradient, learning_rate, &plan.optimizer))?;
        }
        self.seconds.train += started.elapsed().as_secs_f64();
        Ok(update)
    }

    /// The gradient of a slice of the block, not yet clipped; `None` when the host said stop. What the block did not know
    /// of its completions before, it learns.
    fn gradient(&self, block: &mut Block, step: u64, slice: Range<usize>) -> Result<Option<StepGradient>> {
        let (plan, loss_config) = (self.plan, LossConfig::of_plan(self.plan));
        let denominators = block.values.denominators(slice.clone(), plan);
        let Block { rollout, values, .. } = block;
        let rows: Vec<Row<'_>> = rollout.rows().skip(slice.start).take(slice.len()).collect();
        let mut losses = |batch: Range<usize>, scores: &[RowScore]| -> Vec<RowLoss> {
            let batch = slice.start + batch.start..slice.start + batch.end;
            if values.old_logps.len() < batch.end {
                // Not recorded, and their only use: the policy that trains is the one that sampled.
                values.old_logps.extend(scores.iter().map(|score| score.logps.clone()));
            }
            if values.results.advantages.len() < batch.end {
                values.fill_advantages(batch.clone(), plan);
            }
            let rows = batch.zip(scores).map(|(row, score)| LossRow {
                new_logps: &score.logps,
                old_logps: &values.old_logps[row],
                ref_logps: values.ref_logps.get(row).map_or(&[], Vec::as_slice),
                included: values.included[row] && !values.dropped[row],
                advantage: values.advantage(row),
            });
            rows.map(|row| row_loss(&row, &loss_config, &denominators)).collect()
        };
        let host = &*self.host;
        let stop = || host.stop().is_some();
        let dropout = Some(Key::new(plan.training.seed, Stream::Dropout).with(step));
        let micro_batching = MicroBatching { dropout, ..self.micro_batching };
        step_gradient(&self.policy, &rows, &micro_batching, &mut losses, &stop)
    }

    /// Log-probs of weights that were never updated are the model's own: if they are not finite, no step can help.
    fn check_first_scores(&self, scores: &[RowScore]) -> Result<()> {
        let fresh = self.optimizer.updates() == 0 && self.input.initial_adapter.is_none();
        if !fresh || scores.iter().flat_map(|score| &score.logps).all(|logp| logp.is_finite()) {
            return Ok(());
        }
        let what = "its log-probs of its own completions are NaN or infinite".to_owned();
        Err(EngineError::ModelNotFinite { what })
    }

    fn slice(&self, cursor: Cursor) -> Range<usize> {
        let start = cursor.slice as usize * self.completions_per_step();
        start..start + self.completions_per_step()
    }

    fn completions_per_step(&self) -> usize {
        self.plan.training.prompts_per_step as usize * self.plan.rloo.num_generations as usize
    }
}

fn logps(scores: Vec<RowScore>) -> Logps {
    scores.into_iter().map(|score| score.logps).collect()
}

#[cfg(test)]
mod tests;
