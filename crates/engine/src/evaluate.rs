//! Evaluation: the current policy samples the evaluation prompts, and the rewards score them.

use std::time::Instant;

use super::host::{RolloutId, RunEnd};
use super::random::{Key, Stream};
use super::report;
use super::run::Run;
use super::sampling::Sampler;
use super::watch;
use crate::event::{Event, Phase, SamplePhase};
use crate::trajectory::Trajectory;

/// Whether an evaluation is due after the last completed step.
pub(super) fn is_due(run: &Run<'_>) -> bool {
    let Some(eval) = &run.plan.eval else { return false };
    let step = run.progress.state.step;
    // An evaluation before the first training step runs twice if there is a warm-up: before the warm-up and after it.
    let due = match (step, run.plan.rloo_step(step)) {
        (0, _) | (_, Some(0)) => eval.before_start,
        (_, Some(done)) => done.is_multiple_of(eval.every_steps.max(1)) || done == run.plan.training.max_steps,
        (_, None) => false,
    };
    due && !run.data.evaluated_rows.is_empty() && run.progress.state.evaluated_step != Some(step)
}

/// Samples and scores the evaluation prompts, reports the metrics, and counts the evaluation.
pub(super) fn evaluate(run: &mut Run<'_>) -> Result<(), RunEnd> {
    let Some(eval) = &run.plan.eval else { return Ok(()) };
    let step = run.progress.state.step;
    run.host.poll()?;
    run.enter(Phase::Eval)?;
    let started = Instant::now();
    let rows = run.data.evaluated_rows.clone();
    let key = Key::new(run.plan.training.seed, Stream::Eval).with(run.plan.rloo_step(step).unwrap_or(0));
    let sampler = Sampler::for_evaluation(&run.plan.sampling, eval);
    let rollout = run.rollouts().evaluation(RolloutId::eval(step), &rows, key, sampler)?;
    let trajectories: Vec<Trajectory<'_>> = rollout.trajectories().collect();
    let scores = run.scorer().policy_scores(&trajectories)?;
    let reference = run.scorer().reference_logps(&trajectories)?;
    let evaluation = report::Evaluation { rollout: &rollout, scores: &scores, reference: &reference };
    let (mut metrics, samples) = report::evaluation(step, evaluation, run.plan, &run.data)?;
    if let Some(trained) = run.progress.state.doctor.recent_reward().filter(|_| eval.rewards.is_none())
        && let Some(Some(reward)) = metrics.get("eval_reward")
    {
        metrics.insert("eval_gap".into(), Some(trained - reward));
    }
    run.progress.state.eval_metrics = metrics.clone();
    run.progress.state.evaluated_step = Some(step);
    watch::judge_evaluation(&mut run.progress, run.plan, &metrics);
    metrics.insert("eval_step_time".into(), Some(started.elapsed().as_secs_f64()));
    run.host.event(Event::Step { step, kind: SamplePhase::Eval, metrics: metrics.clone() })?;
    run.host.event(Event::Samples { samples })?;
    watch::check_alert_rules(&mut run.progress, run.host, run.plan, step, &metrics)
}
