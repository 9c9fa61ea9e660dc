//! Decides when a run writes a checkpoint, and writes it.

use std::time::Instant;

use super::certificate;
use super::checkpoint::{self, Snapshot};
use super::error::EngineError;
use super::host::{RunEnd, SavedCheckpoint, StopReason};
use super::run::Run;
use super::watch;
use crate::event::{Metrics, Phase};
use rlood_types::certificate::Certificate;

/// Whether a checkpoint of the last completed step is due.
pub(super) fn is_due(run: &Run<'_>) -> bool {
    let progress = &run.progress;
    let step = progress.state.step;
    if is_last(run) {
        // After the last step, write a checkpoint if there is a new step, evaluation or alert since the last one.
        return step > progress.saved_step || progress.unsaved_verdict;
    }
    if watch::best_is_unsaved(progress, run.plan) {
        return true;
    }
    let wanted = || run.host.wants_checkpoint();
    // Weights after a skipped update are not worth a checkpoint.
    let good = progress.state.skipped_in_a_row == 0;
    let is_warmed = run.plan.warm_up.is_some() && run.plan.rloo_step(step) == Some(0);
    let planned = is_warmed || step.is_multiple_of(run.plan.checkpoints.every_steps.max(1));
    good && step > progress.saved_step && (planned || wanted())
}

fn is_last(run: &Run<'_>) -> bool {
    run.progress.state.step == run.plan.total_steps() || run.progress.state.evaluations.stopped
}

/// Writes a checkpoint of the last completed step and publishes it.
pub(super) fn save(run: &mut Run<'_>) -> Result<(), RunEnd> {
    run.enter(Phase::Checkpoint)?;
    let started = Instant::now();
    let certificate = certificate(run)?;
    let step = run.progress.state.step;
    let own_steps = run.plan.rloo_step(step).unwrap_or(0);
    let inside_block = !own_steps.is_multiple_of(run.schedule.batching.uses_per_block().max(1));
    let adam = run.model.optimizer.state()?;
    let (state, last) = (&run.progress.state, is_last(run));
    let snapshot = Snapshot {
        policy: &run.model.policy,
        model_dir: run.files.model_dir,
        model_name: run.files.model_name,
        adam: &adam,
        state,
        block: run.progress.block.as_ref().filter(|_| inside_block),
        ahead: run.progress.ahead.front(),
        reference: run.files.reference.as_deref().filter(|_| own_steps > 0),
        certificate,
    };
    let (dir, files) = checkpoint::write(run.files.scratch_dir, &snapshot)?;
    let mut metrics: Metrics = state.step_metrics.clone();
    // Leave out the metrics of an earlier evaluation, which belong to other weights.
    if state.evaluated_step == Some(step) {
        metrics.extend(state.eval_metrics.clone());
    }
    let published = run.host.saved(&SavedCheckpoint { dir: &dir, step, files: &files, metrics: &metrics, last });
    let removed = std::fs::remove_dir_all(&dir).map_err(|source| EngineError::Io { path: dir, source });
    published?;
    removed?;
    run.progress.saved_step = step;
    run.progress.unsaved_verdict = false;
    run.progress.seconds.checkpoint += started.elapsed().as_secs_f64();
    Ok(())
}

/// Writes the certificate of the current weights. If that is not possible, the checkpoint has none, and the first time the host gets
/// a warning: a job does not fail because of it.
fn certificate(run: &mut Run<'_>) -> Result<Option<Certificate>, RunEnd> {
    let (host, last) = (&*run.host, is_last(run));
    let Some(certifier) = &mut run.certifier else { return Ok(None) };
    let (plan, model) = (run.plan, &mut run.model);
    let had_adapter = model.policy.lora_config().is_some();
    let subject = (plan, run.files.model_name, run.progress.state.step);
    // A process that has to end has no time for it, except for the job's result. The server can compute it later.
    let stop = || !last && !matches!(host.stop(), None | Some(StopReason::Pause { .. }));
    match certifier.certify(&mut model.policy, &run.data.text, subject, &stop) {
        Ok(certificate) => Ok(Some(certificate)),
        Err(_) if stop() && model.policy.lora_config().is_some() == had_adapter => Ok(None),
        Err(error) if model.policy.lora_config().is_some() == had_adapter => {
            run.certifier = None;
            run.host.event(certificate::warning(&error))?;
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Stops the run: saves steps that no checkpoint holds yet, unless the reason discards them. Returns how the run ends.
pub(super) fn stop(run: &mut Run<'_>, reason: StopReason) -> RunEnd {
    let progress = &run.progress;
    let wanted = match reason {
        StopReason::Cancel | StopReason::LeaseLost => false,
        StopReason::Pause { .. } | StopReason::Shutdown => {
            progress.state.step > progress.saved_step || (progress.unsaved_verdict && progress.state.step > 0)
        }
    };
    let saved = if wanted { save(run) } else { Ok(()) };
    match saved {
        Ok(()) => RunEnd::Stopped(reason),
        // Saving failed, or a stronger stop arrived meanwhile (such as a lost lease).
        Err(end) => end,
    }
}
