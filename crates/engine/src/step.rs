//! One optimizer step, from top to bottom: sample → score → shape → advantages → loss → update.

use std::ops::Range;
use std::time::Instant;

use super::MAX_SKIPPED_IN_A_ROW;
use super::ahead;
use super::block::{Block, BlockValues, Logps};
use super::error::{EngineError, Result};
use super::host::{Rollout, RunEnd, StepTrace};
use super::loss::{LossConfig, LossRow, RowLoss, row_loss, total_loss};
use super::mismatch::{ImportanceWeight, Mismatch};
use super::model::RowScore;
use super::optim::learning_rate;
use super::random::{Key, Stream};
use super::relief;
use super::report;
use super::rollout::Cursor;
use super::run::Run;
use super::scoring::BlockLogps;
use super::update::{MicroBatching, StepGradient, step_gradient};
use super::watch;
use crate::event::{Event, Metrics, Phase, SamplePhase};
use crate::spec::{Plan, SumOrder};
use crate::trajectory::Trajectory;

/// The outcome of an optimizer step.
pub(super) struct Update {
    /// The range of the step's completions in the block.
    pub slice: Range<usize>,
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// The loss of the step; NaN if the forward pass was not finite.
    pub loss: f64,
    /// The step's gradient after clipping; `None` if the forward pass was not finite.
    pub step_gradient: Option<StepGradient>,
}

impl Update {
    /// Whether loss and gradient are finite, so that the optimizer applied the update.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

/// The index of a step among the RLOO steps, which follow those of a warm-up.
fn rloo_step(run: &Run<'_>, step: u64) -> u64 {
    run.plan.rloo_step(step).unwrap_or(0)
}

/// Trains one step. A block of completions is sampled once and trained several times, one slice per step.
pub(super) fn train_step(run: &mut Run<'_>) -> Result<(), RunEnd> {
    let started = Instant::now();
    let step = run.progress.state.step + 1;
    let cursor = run.schedule.batching.cursor(rloo_step(run, step));
    let mut block = match run.progress.block.take() {
        Some(block) if cursor.use_index > 0 => block,
        Some(_) | None => {
            run.host.poll()?;
            let (rollout, logps) = sample(run, step, cursor.block)?;
            let mut block = Block::new(cursor.block, rollout, run.plan)?;
            block.shape_rewards(run.progress.state.reward_stats, run.plan)?;
            score(run, &mut block, logps)?;
            fill_known_advantages(run, &mut block);
            block
        }
    };
    let slice = run.schedule.slice(cursor);
    let update = loss_gradient(run, &mut block, step, slice.clone())
        .and_then(|gradient| update_weights(run, step, slice, gradient));
    // Put the block back before a stop ends this step, because a checkpoint inside the block needs it.
    run.progress.block = Some(block);
    let update = update?;
    run.progress.seconds.total = started.elapsed().as_secs_f64();
    finish_step(run, step, cursor, &update)
}

/// Returns the completions of the block's prompts with their rewards; with overlap also their log-probs under the
/// policy that sampled them.
fn sample(run: &mut Run<'_>, step: u64, index: u64) -> Result<(Rollout, Option<BlockLogps>), RunEnd> {
    if let Some(recorded) = run.host.rollout(step) {
        return Ok((recorded, None));
    }
    if run.plan.rloo.overlap {
        let (rollout, logps) = ahead::next_block(run, step, index)?;
        return Ok((rollout, Some(logps)));
    }
    let position = run.schedule.position_of_block(index, &run.progress.state);
    let batching = run.schedule.batching.clone();
    Ok((run.rollouts().block(step, index, position, &batching)?, None))
}

/// Computes the old and the reference log-probs of a block, as far as they are needed before training.
fn score(run: &mut Run<'_>, block: &mut Block, known: Option<BlockLogps>) -> Result<(), RunEnd> {
    let BlockLogps { old, reference } = match known {
        Some(known) => known,
        None => {
            let needs_old = run.schedule.needs_old_pass(run.plan);
            let trajectories: Vec<Trajectory<'_>> = block.rollout.trajectories().collect();
            run.scorer().block_logps(&trajectories, block.rollout.recorded_logps(), needs_old)?
        }
    };
    (block.values.old_logps, block.values.ref_logps) = (old, reference);
    Ok(())
}

/// Computes the advantages, unless they include a KL penalty whose log-probs only the training forward provides.
fn fill_known_advantages(run: &Run<'_>, block: &mut Block) {
    let old_known = block.values.old_logps.len() == block.len();
    if old_known || !run.plan.rloo.penalizes_reward() {
        block.values.fill_advantages(0..block.len(), run.plan);
    }
}

/// Runs forward pass, loss and backward pass over one slice of the block; `None` if a log-prob is not finite. If the
/// GPU's memory is full, retries with smaller micro-batches.
fn loss_gradient(
    run: &mut Run<'_>,
    block: &mut Block,
    step: u64,
    slice: Range<usize>,
) -> Result<Option<StepGradient>, RunEnd> {
    run.host.poll()?;
    run.enter(Phase::Train)?;
    let started = Instant::now();
    let known: (usize, _) = (block.values.old_logps.len(), block.values.results.clone());
    let step_gradient = loop {
        match slice_gradient(run, block, step, slice.clone()) {
            Ok(Some(step_gradient)) => break Some(step_gradient),
            Ok(None) => return Err(run.host.stopped()),
            Err(EngineError::NonFinite { .. }) => break None,
            Err(error) => {
                relief::halve_batches(&mut run.model, error, run.plan, &run.data, run.host)?;
                block.values.old_logps.truncate(known.0);
                block.values.results = known.1.clone();
            }
        }
    };
    if let Some(step_gradient) = &step_gradient {
        check_first_scores(run, &step_gradient.scores)?;
    }
    run.progress.seconds.train += started.elapsed().as_secs_f64();
    Ok(step_gradient)
}

/// Computes the gradient of a slice of the block before clipping; `None` if the host requested a stop. Fills in values
/// of the block that were not known before.
fn slice_gradient(run: &Run<'_>, block: &mut Block, step: u64, slice: Range<usize>) -> Result<Option<StepGradient>> {
    let (plan, loss_config) = (run.plan, LossConfig::of_plan(run.plan));
    let denominators = block.values.denominators(slice.clone(), plan);
    let second_pass: Vec<bool> = match plan.arithmetic.sums {
        SumOrder::V1 => vec![true; slice.len()],
        SumOrder::V2 => slice.clone().map(|row| block.values.is_idle(row, &loss_config)).collect(),
    };
    let Block { rollout, values, .. } = block;
    let trajectories: Vec<Trajectory<'_>> = rollout.trajectories().skip(slice.start).take(slice.len()).collect();
    let sampled = plan.rollout.as_ref().and_then(|_| rollout.recorded_logps()).unwrap_or_default();
    let mut losses = |batch: Range<usize>, scores: &[RowScore]| -> Vec<RowLoss> {
        let batch = slice.start + batch.start..slice.start + batch.end;
        if values.old_logps.len() < batch.end {
            // The old log-probs were not recorded: this is the first use of the block, so the policy being trained is
            // the one that sampled.
            values.old_logps.extend(scores.iter().map(|score| score.logps.clone()));
        }
        if values.results.advantages.len() < batch.end {
            values.fill_advantages(batch.clone(), plan);
        }
        let weights: Vec<_> = batch.clone().map(|row| importance_weight(plan, values, &sampled, row)).collect();
        let rows = batch.zip(scores).zip(&weights).map(|((row, score), weight)| LossRow {
            weight: weight.as_ref(),
            new_logps: &score.logps,
            old_logps: &values.old_logps[row],
            ref_logps: values.ref_logps.get(row).map_or(&[], Vec::as_slice),
            included: values.included[row] && !values.dropped[row],
            advantage: values.advantage(row),
        });
        rows.map(|row| row_loss(&row, &loss_config, &denominators)).collect()
    };
    let stop = || run.host.stop().is_some();
    let dropout = Some(Key::new(plan.training.seed, Stream::Dropout).with(rloo_step(run, step)));
    let micro_batching = MicroBatching { dropout, ..run.model.micro_batching };
    step_gradient(&run.model.policy, &trajectories, &micro_batching, &second_pass, &mut losses, &stop)
}

/// The importance weight of a completion in a job with rollout servers; `None` = 1.
fn importance_weight(plan: &Plan, values: &BlockValues, sampled: &Logps, row: usize) -> Option<ImportanceWeight> {
    let correction = &plan.rollout.as_ref()?.correction;
    Some(ImportanceWeight::of(correction, values.old_logps.get(row)?, sampled.get(row)?))
}

/// Measures how far rollout servers are from the trained model in a block; `None` while old log-probs are unknown, or without servers.
fn mismatch_of(block: &Block, plan: &Plan) -> Option<Mismatch> {
    let correction = &plan.rollout.as_ref()?.correction;
    let sampled = block.rollout.recorded_logps()?;
    let values = &block.values;
    let is_known = values.old_logps.len() == block.len();
    let rows = values.old_logps.iter().zip(&sampled).zip(&values.included);
    let rows = rows.filter(|(_, included)| **included).map(|((old, sampled), _)| (&**old, &**sampled));
    is_known.then(|| Mismatch::of(correction, rows))
}

/// Log-probs of weights that were never updated belong to the base model: if they are not finite, training cannot help.
fn check_first_scores(run: &Run<'_>, scores: &[RowScore]) -> Result<()> {
    let fresh = run.model.optimizer.updates() == 0 && !run.model.is_warm_started;
    if !fresh || scores.iter().flat_map(|score| &score.logps).all(|logp| logp.is_finite()) {
        return Ok(());
    }
    let what = "the log-probs of the model's own completions are NaN or infinite".to_owned();
    Err(EngineError::ModelNotFinite { what })
}

/// Clips the gradient and applies it with AdamW, unless loss or gradient is not finite.
fn update_weights(
    run: &mut Run<'_>,
    step: u64,
    slice: Range<usize>,
    step_gradient: Option<StepGradient>,
) -> Result<Update, RunEnd> {
    let started = Instant::now();
    let plan = run.plan;
    let learning_rate = learning_rate(&plan.optimizer, rloo_step(run, step) - 1, plan.training.max_steps);
    let mut update = Update { slice, learning_rate, grad_norm: f64::NAN, loss: f64::NAN, step_gradient };
    if let Some(step_gradient) = &mut update.step_gradient {
        update.loss = total_loss(&step_gradient.losses);
        update.grad_norm = step_gradient.gradient.clip(plan.optimizer.max_grad_norm)?;
    }
    if let Some(step_gradient) = update.step_gradient.as_ref().filter(|_| update.is_finite()) {
        let gradient = &step_gradient.gradient;
        let optimizer = &mut run.model.optimizer;
        run.model.policy.update_parameters(|flat| optimizer.update(flat, gradient, learning_rate, &plan.optimizer))?;
    }
    run.progress.seconds.train += started.elapsed().as_secs_f64();
    Ok(update)
}

/// Counts and reports the optimizer step; fails if too many consecutive updates were skipped.
fn finish_step(run: &mut Run<'_>, step: u64, cursor: Cursor, update: &Update) -> Result<(), RunEnd> {
    count_step(run, step, cursor, update);
    let Some(block) = &run.progress.block else { return Ok(()) };
    let mismatch = if cursor.use_index == 0 { mismatch_of(block, run.plan) } else { None };
    let mut metrics = metrics(run, block, cursor, update)?;
    metrics.extend(mismatch.iter().flat_map(Mismatch::metrics));
    let samples = match cursor.use_index {
        0 => Some(report::train_samples(step, block, &run.data, run.plan)?),
        _ => None,
    };
    let refills = report::refill_warning(step, block, run.plan);
    run.progress.seconds = Default::default();
    run.progress.state.step_metrics = report::without_durations(&metrics);
    report_trace(run, step, update);
    run.host.event(Event::Step { step, kind: SamplePhase::Train, metrics: metrics.clone() })?;
    if let Some(samples) = samples {
        let warnings = [report::unscorable_warning(step, &samples), refills];
        run.host.event(Event::Samples { samples })?;
        for warning in warnings.into_iter().flatten() {
            run.host.event(warning)?;
        }
    }
    if let (Some(mismatch), Some(rollout)) = (mismatch, &run.plan.rollout) {
        mismatch.check(&rollout.correction, step)?;
    }
    let state = &run.progress.state;
    if !update.is_finite() {
        run.host.event(report::skipped_update_warning(step, (update.loss, update.grad_norm), state))?;
    }
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW {
        let updates = state.skipped_in_a_row;
        run.host.event(Event::Diverged { first_step: step + 1 - u64::from(updates), step })?;
        return Err(RunEnd::Failed(EngineError::Diverged { updates, step }));
    }
    watch::check_alert_rules(&mut run.progress, run.host, run.plan, step, &metrics)
}

fn count_step(run: &mut Run<'_>, step: u64, cursor: Cursor, update: &Update) {
    let Some(block) = &run.progress.block else { return };
    let (finite, rloo_step) = (update.is_finite(), rloo_step(run, step));
    let state = &mut run.progress.state;
    state.step = step;
    state.next_prompt = block.rollout.drawn.next_prompt;
    state.reward_stats = block.values.reward_stats;
    state.epoch = run.schedule.epochs(rloo_step, state, run.plan);
    state.num_tokens += if cursor.use_index == 0 { block.num_tokens() } else { 0 };
    state.updates = run.model.optimizer.updates();
    state.skipped_in_a_row = if finite { 0 } else { state.skipped_in_a_row + 1 };
    state.skipped_updates += u64::from(!finite);
    run.progress.ahead.retain(|ahead| ahead.index > block.index);
}

/// The step's metrics, including those that only the model can provide.
fn metrics(run: &Run<'_>, block: &Block, cursor: Cursor, update: &Update) -> Result<Metrics> {
    let mut metrics = report::step_metrics(&report::StepReport {
        plan: run.plan,
        block,
        update,
        state: &run.progress.state,
        first_use: cursor.use_index == 0,
        seconds: &run.progress.seconds,
    });
    let policy = &run.model.policy;
    report::memory_metrics(&mut metrics, policy);
    let delta_norm = match &run.model.delta_norm {
        Some(delta) => Some(delta.of(&policy.flat().values()?)),
        None => None,
    };
    if let Some(delta_norm) = delta_norm.filter(|norm| norm.is_finite()) {
        metrics.insert("adapter/delta_norm".into(), Some(delta_norm));
    }
    Ok(metrics)
}

/// Passes the internals of the optimizer step to the host.
fn report_trace(run: &mut Run<'_>, step: u64, update: &Update) {
    let (Some(block), Some(step_gradient)) = (&run.progress.block, &update.step_gradient) else { return };
    let slice = &update.slice;
    let in_slice = |logps: &Logps| logps.get(slice.clone()).unwrap_or_default().to_vec();
    let completions = || block.rollout.completions().skip(slice.start).take(slice.len());
    run.host.observe(&StepTrace {
        step,
        rows: &completions().map(|(group, _)| group.row).collect::<Vec<_>>(),
        completion_ids: &completions().map(|(_, completion)| completion.segments.ids()).collect::<Vec<_>>(),
        old_logps: &in_slice(&block.values.old_logps),
        ref_logps: &in_slice(&block.values.ref_logps),
        new_logps: &step_gradient.scores.iter().map(|score| score.logps.clone()).collect::<Vec<_>>(),
        advantages: &block.values.results.advantages[slice.clone()],
        gradient: &step_gradient.gradient,
        parameters: run.model.policy.flat(),
        parameter_info: &run.model.parameter_info,
    });
}

#[cfg(test)]
mod tests;
