//! Monitors a run: alert rules after each step and evaluation, the best evaluation so far, early stopping.

use serde::{Deserialize, Serialize};

use super::error::EngineError;
use super::host::{Host, RunEnd, StopReason};
use super::run::Progress;
use crate::doctor::{Alert, Doctor, Finding, OnAlert, RuleInput};
use crate::event::{Event, Metrics};
use crate::spec::Plan;

/// The best value of an evaluation metric, and its step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The optimizer step that reached the value.
    pub step: u64,
    /// The best value of the metric.
    pub value: f64,
}

/// The record of a run's evaluations.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Evaluations {
    /// The best evaluation by `checkpoints.metric_for_best`.
    pub best: Option<Best>,
    /// The best evaluation by `early_stopping.metric`.
    pub stopping_best: Option<Best>,
    /// Number of consecutive evaluations without a new best value of that metric.
    pub without_progress: u32,
    /// Whether early stopping ends the run at this evaluation.
    pub stopped: bool,
}

impl Evaluations {
    /// Records an evaluation, with the metrics of the same step.
    fn record(&mut self, step: u64, metrics: &Metrics, plan: &Plan) {
        let value = |name: &str| metrics.get(name).copied().flatten().filter(|value| value.is_finite());
        let checkpoints = &plan.checkpoints;
        if let Some(value) = checkpoints.metric_for_best.as_deref().and_then(value)
            && self
                .best
                .is_none_or(|best| is_better(value, best.value, 0.0, checkpoints.greater_is_better.unwrap_or(true)))
        {
            self.best = Some(Best { step, value });
        }
        let Some(stopping) = &plan.early_stopping else { return };
        let progress = value(&stopping.metric).filter(|value| {
            self.stopping_best
                .is_none_or(|best| is_better(*value, best.value, stopping.min_delta, stopping.greater_is_better))
        });
        match progress {
            Some(value) => {
                self.stopping_best = Some(Best { step, value });
                self.without_progress = 0;
            }
            // An evaluation without a value for the metric counts as one without progress.
            None => self.without_progress += 1,
        }
        // No early stop at the last step, where the run ends anyway.
        self.stopped = self.without_progress >= stopping.patience && step < plan.total_steps();
    }
}

fn is_better(value: f64, best: f64, min_delta: f64, greater_is_better: bool) -> bool {
    let gain = if greater_is_better { value - best } else { best - value };
    gain > min_delta
}

/// Checks the alert rules against the metrics of a step or an evaluation, and reports what is new. Returns the new alert that pauses or
/// ends the run, if there is one: one that ends it outweighs one that pauses it, and of two equal ones the first counts.
///
/// # Errors
/// Fails if the host ends the run.
pub fn report_findings(
    doctor: &mut Doctor,
    host: &mut dyn Host,
    plan: &Plan,
    (step, metrics): (u64, &Metrics),
) -> Result<Option<Alert>, RunEnd> {
    let mut ends: Option<Alert> = None;
    for finding in doctor.observe(step, metrics, &RuleInput::of_plan(plan)) {
        let event = match finding {
            Finding::Raised(alert) => {
                if strength(alert.on_alert) > ends.as_ref().map_or(0, |alert| strength(alert.on_alert)) {
                    ends = Some(alert.clone());
                }
                Event::Alert { alert }
            }
            Finding::Cleared { rule, raised_step } => Event::AlertCleared { rule, raised_step, step },
            Finding::Phase(change) => Event::TrainingPhase { change },
        };
        host.event(event)?;
    }
    Ok(ends)
}

/// Checks the alert rules as [`report_findings`] does, and acts on the alerts.
pub(super) fn check_alert_rules(
    progress: &mut Progress,
    host: &mut dyn Host,
    plan: &Plan,
    step: u64,
    metrics: &Metrics,
) -> Result<(), RunEnd> {
    let ends = report_findings(&mut progress.state.doctor, host, plan, (step, metrics))?;
    let Some(Alert { rule, on_alert, message, fix, .. }) = ends else { return Ok(()) };
    match on_alert {
        OnAlert::Note => Ok(()),
        OnAlert::Pause => {
            // The checkpoint of the pause must include the alert, or resuming would raise it again.
            progress.unsaved_verdict = true;
            Err(RunEnd::Stopped(StopReason::Pause { reason: Some(format!("alert:{}", rule.as_str())) }))
        }
        OnAlert::Stop => Err(RunEnd::Failed(EngineError::Alert { rule, step, message, fix })),
    }
}

/// Records an evaluation: whether it is the best so far, and whether to stop early.
pub(super) fn judge_evaluation(progress: &mut Progress, plan: &Plan, metrics: &Metrics) {
    let mut all = progress.state.step_metrics.clone();
    all.extend(metrics.iter().map(|(name, value)| (name.clone(), *value)));
    progress.state.evaluations.record(progress.state.step, &all, plan);
    progress.unsaved_verdict = true;
}

/// Whether the last evaluation is the best so far and not saved: the best weights must not be
/// lost between two checkpoints.
pub(super) fn best_is_unsaved(progress: &Progress, plan: &Plan) -> bool {
    let step = progress.state.step;
    let by_evaluation = plan.checkpoints.metric_for_best.as_ref().is_some_and(|name| name.starts_with("eval_"));
    let is_best = progress.state.evaluations.best.is_some_and(|best| best.step == step);
    by_evaluation
        && is_best
        && step > 0
        && plan.checkpoints.keep_best > 0
        && (step > progress.saved_step || progress.unsaved_verdict)
}

/// Reports an early stop: why the run ends before its last step.
pub(super) fn report_early_stop(progress: &Progress, host: &mut dyn Host, plan: &Plan) -> Result<(), RunEnd> {
    let Some(stopping) = &plan.early_stopping else { return Ok(()) };
    let best = progress.state.evaluations.stopping_best;
    host.event(Event::EarlyStopping {
        step: progress.state.step,
        metric: stopping.metric.clone(),
        best: best.map(|best| best.value),
        best_step: best.map(|best| best.step),
        evaluations: progress.state.evaluations.without_progress,
    })
}

fn strength(on_alert: OnAlert) -> u8 {
    match on_alert {
        OnAlert::Note => 0,
        OnAlert::Pause => 1,
        OnAlert::Stop => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_must_exceed_min_delta_in_the_right_direction() {
        assert!(is_better(0.52, 0.5, 0.0, true) && !is_better(0.5, 0.5, 0.0, true));
        assert!(!is_better(0.75, 0.5, 0.25, true) && is_better(0.76, 0.5, 0.25, true));
        assert!(is_better(0.4, 0.5, 0.0, false) && !is_better(0.6, 0.5, 0.0, false));
    }
}
