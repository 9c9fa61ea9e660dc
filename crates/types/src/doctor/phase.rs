//! The training phase: exploration, exploitation or convergence.
//!
//! The phases follow this project's sources. At first, rewards vary widely and few ratios are clipped; then the reward rises while
//! its standard deviation falls; at the end the reward is flat and the KL stable. The sources define phases by shares of the run
//! (0–20 %, 20–80 %, 80–100 %). Here the phase is derived from the metrics, and the share is reported as evidence.

use serde::{Deserialize, Serialize};

use super::Case;
use super::rules::RECENT;
use crate::event::{Observation, PhaseChange, TrainingPhase};

/// The current phase and its history.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Current {
    phase: Option<TrainingPhase>,
    /// A different phase that the latest rollout indicated, and the number of rollouts judged by then. A single rollout does
    /// not change the phase.
    candidate: Option<(TrainingPhase, u64)>,
    /// Number of rollouts from which the phase was judged.
    judged: u64,
}

impl Current {
    /// Judges the training phase after each new rollout, and returns a change of phase.
    pub(super) fn follow(&mut self, case: &Case<'_>) -> Option<PhaseChange> {
        let rollouts = case.history.count("reward");
        if rollouts == self.judged {
            return None;
        }
        self.judged = rollouts;
        let (phase, evidence) = judge(case, self.phase)?;
        if self.phase == Some(phase) {
            self.candidate = None;
            return None;
        }
        let confirmed = self.phase.is_none() || self.candidate.is_some_and(|(seen, _)| seen == phase);
        if !confirmed {
            self.candidate = Some((phase, rollouts));
            return None;
        }
        self.candidate = None;
        let from = self.phase.replace(phase);
        Some(PhaseChange { phase, from, step: case.step, evidence })
    }
}

fn judge(case: &Case<'_>, current: Option<TrainingPhase>) -> Option<(TrainingPhase, Vec<Observation>)> {
    let history = case.history;
    let recent = history.last("reward", RECENT)?;
    let stds = history.last("reward_std", RECENT);
    let mut evidence = vec![recent.observe_mean(None)];
    evidence.extend(stds.as_ref().map(|stds| stds.observe_mean(None)));
    evidence.extend(history.last("clip_ratio/region_mean", RECENT).map(|clipped| clipped.observe_mean(None)));
    let done = case.input.plan.rloo_step(case.step).unwrap_or(0);
    let share = done as f64 / case.input.plan.training.max_steps.max(1) as f64;
    evidence.push(recent.observe("share of the run's optimizer steps that are done", share, None));
    let (Some(before), Some(first), Some((low, high))) =
        (history.before("reward", RECENT, RECENT), history.early("reward"), case.range())
    else {
        return Some((TrainingPhase::Exploration, evidence));
    };
    // A run in convergence leaves that phase only at twice the usual change of the reward.
    let slack = if current == Some(TrainingPhase::Convergence) { 2.0 } else { 1.0 };
    let flat = slack * case.chance_difference().unwrap_or(0.0);
    let trend = recent.mean() - before.mean();
    let gain = recent.mean() - first.mean();
    evidence.push(recent.observe("change of the mean from the five rollouts before", trend, Some(flat)));
    evidence.push(recent.observe(
        "change of the mean from the run's first five rollouts",
        gain,
        Some((flat / slack).max(0.05 * (high - low))),
    ));
    let stable_kl = match (history.last("kl", RECENT), history.before("kl", RECENT, RECENT)) {
        (Some(kl), Some(kl_before)) => {
            let change = kl.mean() - kl_before.mean();
            let limit = slack * 0.25 * kl_before.mean().max(0.02);
            evidence.push(kl.observe("change of the mean from the five rollouts before", change, Some(limit)));
            change.abs() <= limit
        }
        _ => true, // No reference, no KL.
    };
    let risen = gain > (flat / slack).max(0.05 * (high - low));
    let phase = match () {
        () if trend > flat => TrainingPhase::Exploitation,
        () if risen && trend.abs() <= flat && stable_kl => TrainingPhase::Convergence,
        // The policy is still moving away from its reference, so this is not convergence, whatever the reward does.
        () if risen && trend >= -flat => TrainingPhase::Exploitation,
        () => TrainingPhase::Exploration,
    };
    Some((phase, evidence))
}
