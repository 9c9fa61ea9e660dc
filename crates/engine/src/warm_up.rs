//! The warm-up: supervised steps before the first RLOO step, with cross-entropy on the rows' answers. Packing,
//! micro-batches, head, optimizer and checkpoints are those of RLOO steps; only the loss differs.

use std::ops::Range;
use std::time::Instant;

use super::MAX_SKIPPED_IN_A_ROW;
use super::backend::Optimizer;
use super::error::{EngineError, Result};
use super::host::RunEnd;
use super::loss::{RowLoss, cross_entropy, total_loss};
use super::model::RowScore;
use super::optim::AdamW;
use super::random::{Key, Stream, shuffled};
use super::relief;
use super::report;
use super::run::Run;
use super::start;
use super::update::{MicroBatching, StepGradient, step_gradient};
use crate::event::{Event, Metrics, Phase, SamplePhase};
use crate::spec::{SumOrder, WarmUpPlan};
use crate::trajectory::Trajectory;

/// The rows of a warm-up step (from 1): batches follow one another through the dataset, in another order each epoch.
/// The next epoch fills up the last batch of an epoch.
pub fn batch(step: u64, batch_size: u32, num_rows: u64, seed: u64, shuffle: bool) -> Vec<u64> {
    let (size, num_rows) = (u64::from(batch_size), num_rows.max(1));
    let (mut at, end) = (step.saturating_sub(1) * size, step * size);
    let mut rows = Vec::with_capacity(batch_size as usize);
    while at < end {
        let (epoch, within) = (at / num_rows, at % num_rows);
        let taken = (num_rows - within).min(end - at);
        match shuffle {
            true => {
                let order = shuffled(Key::new(seed, Stream::WarmUp).with(epoch), num_rows);
                rows.extend_from_slice(&order[within as usize..(within + taken) as usize]);
            }
            false => rows.extend(within..within + taken),
        }
        at += taken;
    }
    rows
}

/// The outcome of a warm-up step.
struct Update {
    /// The loss; NaN if the forward pass was not finite.
    loss: f64,
    /// Norm of the gradient before clipping.
    grad_norm: f64,
    learning_rate: f64,
    entropy: Option<f64>,
    /// Number of tokens that contribute to the loss.
    tokens: usize,
    /// Number of these tokens that are the model's greedy choice.
    top_tokens: usize,
}

impl Update {
    fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

/// Trains one step of the warm-up; the last one starts RLOO.
pub(super) fn train_step(run: &mut Run<'_>, warm_up: &WarmUpPlan) -> Result<(), RunEnd> {
    let started = Instant::now();
    let step = run.progress.state.step + 1;
    run.host.poll()?;
    run.enter(Phase::Train)?;
    let (training, num_rows) = (&run.plan.training, run.data.answered.len() as u64);
    let rows = batch(step, warm_up.batch_size, num_rows, training.seed, training.shuffle_dataset);
    let gradient = loop {
        match gradient_of(run, step, &rows) {
            Ok(Some(gradient)) => break Some(gradient),
            Ok(None) => return Err(run.host.stopped()),
            Err(EngineError::NonFinite { .. }) => break None,
            Err(error) => relief::halve_batches(&mut run.model, error, run.plan, &run.data, run.host)?,
        }
    };
    let update = update_weights(run, warm_up, gradient)?;
    count_step(run, step, &update);
    if step == warm_up.steps {
        hand_over(run)?;
    }
    run.progress.seconds.train = started.elapsed().as_secs_f64();
    run.progress.seconds.total = run.progress.seconds.train;
    report_step(run, step, &update)
}

fn trajectories<'r>(run: &'r Run<'_>, rows: &[u64]) -> Vec<Trajectory<'r>> {
    let rows = rows.iter().filter_map(|row| run.data.answered.get(*row as usize));
    rows.map(|row| Trajectory::new(&row.prompt, &row.answer)).collect()
}

/// Computes the gradient of the mean cross-entropy over the step's answer tokens, before clipping; `None` if the
/// host requested a stop.
fn gradient_of(run: &Run<'_>, step: u64, rows: &[u64]) -> Result<Option<StepGradient>> {
    let trajectories = trajectories(run, rows);
    let tokens: usize = trajectories.iter().map(Trajectory::num_model_tokens).sum();
    let mut losses = |_: Range<usize>, scores: &[RowScore]| -> Vec<RowLoss> {
        scores.iter().map(|score| cross_entropy(&score.logps, tokens)).collect()
    };
    let stop = || run.host.stop().is_some();
    let micro_batching = MicroBatching {
        num_generations: std::num::NonZeroUsize::MIN,
        temperature: 1.0,
        dropout: Some(Key::new(run.plan.training.seed, Stream::WarmUp).with(u64::MAX).with(step)),
        ..run.model.micro_batching
    };
    let second_pass = vec![run.plan.arithmetic.sums == SumOrder::V1; trajectories.len()];
    step_gradient(&run.model.policy, &trajectories, &micro_batching, &second_pass, &mut losses, &stop)
}

/// Clips the gradient and applies it with AdamW, unless loss or gradient is not finite.
fn update_weights(run: &mut Run<'_>, warm_up: &WarmUpPlan, gradient: Option<StepGradient>) -> Result<Update> {
    let (optimizer_plan, learning_rate) = (&run.plan.optimizer, warm_up.learning_rate);
    let mut update =
        Update { loss: f64::NAN, grad_norm: f64::NAN, learning_rate, entropy: None, tokens: 0, top_tokens: 0 };
    let Some(StepGradient { mut gradient, losses, scores }) = gradient else { return Ok(update) };
    update.loss = total_loss(&losses);
    update.grad_norm = gradient.clip(optimizer_plan.max_grad_norm)?;
    let entropies = scores.iter().map(|score| (score.entropies.as_slice(), true));
    update.entropy = Some(super::metrics::entropy(entropies));
    update.tokens = scores.iter().map(|score| score.logps.len()).sum();
    update.top_tokens = scores.iter().map(|score| score.num_top).sum();
    if update.is_finite() {
        let optimizer = &mut run.model.optimizer;
        let take = |flat: &mut _| optimizer.update(flat, &gradient, learning_rate, optimizer_plan);
        run.model.policy.update_parameters(take)?;
    }
    Ok(update)
}

fn count_step(run: &mut Run<'_>, step: u64, update: &Update) {
    let state = &mut run.progress.state;
    state.step = step;
    state.updates = run.model.optimizer.updates();
    state.skipped_in_a_row = if update.is_finite() { 0 } else { state.skipped_in_a_row + 1 };
    state.skipped_updates += u64::from(!update.is_finite());
}

/// Ends the warm-up: RLOO begins with these weights and a new optimizer, because the moments of a cross-entropy do not
/// describe the gradients of RLOO. RLOO thus continues exactly like a new job that starts from the warmed weights.
fn hand_over(run: &mut Run<'_>) -> Result<()> {
    let (policy, plan) = (&run.model.policy, run.plan);
    let fresh = AdamW { decayed: policy.decayed(), ..AdamW::of_kind(plan.optimizer.kind, policy.flat().len()) };
    // Free the old moments first: both sets may not fit into memory.
    run.model.optimizer = Optimizer::Host(AdamW::of_kind(plan.optimizer.kind, 0));
    run.model.optimizer = Optimizer::from_state(policy.flat(), fresh)?;
    run.progress.state.updates = 0;
    run.data.answered = Vec::new();
    if plan.has_warmed_reference() {
        run.model.reference = start::warmed_reference(policy);
        run.files.reference = Some(start::save_reference(policy, run.files.scratch_dir)?);
    }
    Ok(())
}

/// Reports the warm-up step; fails if too many consecutive updates were skipped.
fn report_step(run: &mut Run<'_>, step: u64, update: &Update) -> Result<(), RunEnd> {
    let metrics = metrics(run, update);
    run.progress.seconds = Default::default();
    run.progress.state.step_metrics = report::without_durations(&metrics);
    run.host.event(Event::Step { step, kind: SamplePhase::Train, metrics })?;
    let state = &run.progress.state;
    if !update.is_finite() {
        let found = (update.loss, update.grad_norm);
        run.host.event(report::skipped_update_warning(step, found, state))?;
    }
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW {
        let updates = state.skipped_in_a_row;
        run.host.event(Event::Diverged { first_step: step + 1 - u64::from(updates), step })?;
        return Err(RunEnd::Failed(EngineError::Diverged { updates, step }));
    }
    Ok(())
}

fn metrics(run: &Run<'_>, update: &Update) -> Metrics {
    let (state, seconds) = (&run.progress.state, &run.progress.seconds);
    let mut metrics = Metrics::from([
        ("warm_up/loss".into(), Some(update.loss)),
        ("warm_up/perplexity".into(), Some(update.loss.exp())),
        ("warm_up/entropy".into(), update.entropy),
        ("warm_up/token_accuracy".into(), Some(update.top_tokens as f64 / update.tokens as f64)),
        ("warm_up/grad_norm".into(), Some(update.grad_norm)),
        ("warm_up/learning_rate".into(), Some(update.learning_rate)),
        ("warm_up/tokens".into(), Some(update.tokens as f64)),
        ("skipped_updates".into(), Some(state.skipped_updates as f64)),
        ("step_time".into(), Some(seconds.total)),
        ("step_time/train".into(), Some(seconds.train)),
        ("step_time/checkpoint".into(), Some(seconds.checkpoint)),
    ]);
    report::memory_metrics(&mut metrics, &run.model.policy);
    metrics.values_mut().for_each(|value| *value = value.filter(|value| value.is_finite()));
    metrics
}

#[cfg(test)]
mod tests {
    use super::batch;

    #[test]
    fn every_epoch_holds_each_row_once_and_has_an_order_of_its_own() {
        let rows: Vec<u64> = (1..=10).flat_map(|step| batch(step, 3, 10, 42, true)).collect();
        assert_eq!(rows.len(), 30);
        for epoch in rows.chunks(10) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(rows[..10], rows[10..20]);
        let other: Vec<u64> = (1..=10).flat_map(|step| batch(step, 3, 10, 43, true)).collect();
        assert_ne!(rows, other);
    }

    #[test]
    fn a_batch_larger_than_the_dataset_goes_through_it_again() {
        assert_eq!(batch(1, 5, 2, 42, false), [0, 1, 0, 1, 0]);
        assert_eq!(batch(2, 5, 2, 42, false), [1, 0, 1, 0, 1]);
    }
}
