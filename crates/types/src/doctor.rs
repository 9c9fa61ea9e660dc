//! Alert rules ("the doctor"): rules over the metrics of a run, as pure functions without I/O.
//!
//! [`Doctor::observe`] takes the metrics of each step and each evaluation and returns what is new: an alert begins, an alert ends,
//! or the training phase changes. An alert is reported once per episode. A rule raises at one threshold and clears at another, so
//! that alerts do not flicker, and it can raise again only after it has cleared. The doctor's state is part of the trainer state,
//! so a resumed run continues with the same state.
//!
//! # The rules
//!
//! Windows count the values of a metric (a rollout that is used for several steps reports its rewards once). *Position* is where
//! the mean reward is between the lowest (0) and the highest (1) possible reward: known for built-in rewards, otherwise the lowest
//! and highest one seen. *Rising*: the last five means exceed the five before by 0.02 of that range. Symptoms and fixes come from
//! the troubleshooting sections of this project's sources (TRL's RLOO page and three RLOO guides) and from rloo.md. If no source is
//! named, the threshold was chosen between the recorded healthy and unhealthy runs in `tests/fixtures/doctor`.
//!
//! | rule | window | raises when | clears when | source of the number |
//! |---|---|---|---|---|
//! | `high_variance` | 20 | 3 gradient norms > 5 × the median and > max_grad_norm, one of them in the last 5; or (10) the mean reward jumps by > 3 × what sampling explains, reward_std/√prompts | no such norm; jumps < 2 × | standard error of a mean of independent groups |
//! | `kl_explosion` | 3 | `kl` > 1 nat per token and > 3 × the ten before, or > 3 nats | < 0.5 | recorded runs |
//! | `reward_collapse` | 5 | > 60 % of the groups tied before KL, and more than halfway from the share that independent draws of 0 or 1 tie (pᴳ + (1−p)ᴳ) to all, position < 0.9, not rising | 10 points below, or position ≥ 0.9 | rloo.md (60 %) |
//! | `length_explosion` | 5 | ≥ 50 % of the completions truncated, 25 points more than in the first five, ≥ 1.25 × as long | < 35 % truncated | recorded runs |
//! | `empty_output` | 5 | ≤ 1.2 tokens per completion (including the end-of-sequence token), fewer than half truncated | > 1.5 tokens | an empty completion is one token |
//! | `reward_hacking` | 5 | the reward rose and an evaluation or a reward of weight 0 fell by > 0.05 of its range, beyond twice its standard error; the gap between them grew by > 0.10 | grew by < 0.05 | rloo.md (0.10) |
//! | `cold_start` | first 10 | position never above 0.05 | > 0.10 (3) | the sources: near-zero probability of a reward |
//! | `nothing_to_learn` | first 5 | position > 0.95 | < 0.9 (5) | rloo.md (95 %) |
//! | `adapter_unchanged` | 20 steps after warm-up | `adapter/delta_norm` < 5e-5 and the reward not above the first five by more than chance (twice the standard error) | ≥ 1e-4 | recorded runs; rloo.md (LoRA at 1e-6) |
//! | `entropy_collapse` | 5 | `entropy` < 0.02 nats, or < 0.1 and a tenth of the first five; position < 0.9, not rising | ≥ 0.05, or position ≥ 0.9 | recorded runs |
//! | `slow_reward` | 5 | rewards take > half of the step and > 1 s | < 30 % | rloo.md |
//! | `non_finite` | 1 | an update was skipped | 10 steps without | rloo.md |
//! | `rollout_mismatch` | 3 | `sampling/mismatch_kl` > 0.01 nats per token (jobs with rollout servers) | < 0.005 | start values of the measurements with vLLM on a CPU |
//! | `invalid_calls` | 5 | `environment/parse_error_fraction` > 20 % | < 10 % | chosen: start value |
//! | `mostly_context` | 5 | `environment/masked_fraction` > 90 % | < 85 % | chosen: start value |
//! | `episodes_at_limits` | 5 | every episode ends at its limit of turns or tokens, or with a turn at its maximum length | < 90 % | chosen: start value |
//! | `no_tool_calls` | 10 | `tools/call_frequency` is 0, although every episode offers tools (`tools/offered`) | a call (1) | chosen: start value |
//! | `forgotten_episodes` | 5 | > 5 % of the episodes began again, because the environment had forgotten them | < 2 % | leaving out episodes biases the gradient if an action was the cause |
//! | `many_restarts` | 10 ends | ten more attempts ended before the job was over ([`restarts`]: raised by the server, from no metric) | never | – |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::event::Metrics;
pub use crate::event::{Alert, AttemptEnd, Observation, OnAlert, PhaseChange, Rule, Severity, TrainingPhase};

mod history;
mod input;
mod phase;
pub mod restarts;
mod rules;

use history::History;
pub use input::RuleInput;

/// A change after a step or an evaluation: an alert begins or ends, or the training phase changes.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding {
    /// A rule raised an alert.
    Raised(Alert),
    /// An alert has ended; its rule can raise again.
    Cleared {
        /// Rule of the ended alert.
        rule: Rule,
        /// The step at which the alert was raised.
        raised_step: u64,
    },
    /// The run entered another training phase.
    Phase(PhaseChange),
}

/// Result of a rule for the current metrics.
enum Verdict {
    /// The metrics are beyond the threshold at which the rule raises an alert.
    Raise(Symptom),
    /// The metrics are between the two thresholds, or too few: an active alert stays, and no alert is raised.
    Hold,
    /// The metrics are beyond the threshold at which the rule's alert ends.
    Clear,
}

/// The message, evidence and fix of an alert.
struct Symptom {
    message: String,
    evidence: Vec<Observation>,
    fix: String,
}

/// The state of the alert rules for one run. It must observe every step and evaluation, in order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Doctor {
    history: History,
    /// Active alerts, with the step at which each was raised.
    active: BTreeMap<Rule, u64>,
    phase: phase::Current,
}

impl Doctor {
    /// Processes the metrics of a step, or of an evaluation (keys prefixed `eval_`; `step` is the one that it follows), and
    /// returns what is new.
    pub fn observe(&mut self, step: u64, metrics: &Metrics, input: &RuleInput<'_>) -> Vec<Finding> {
        self.history.push(step, metrics, input);
        let case = Case { history: &self.history, input, step };
        let mut findings = Vec::new();
        for rule in Rule::ALL {
            let on_alert = match input.on_alert(rule) {
                Some(on_alert) => on_alert,
                None => continue, // Switched off.
            };
            match (rules::examine(rule, &case), self.active.get(&rule).copied()) {
                (Verdict::Raise(Symptom { message, evidence, fix }), None) => {
                    self.active.insert(rule, step);
                    // The first piece of evidence is the one that raised the alert, so its first step counts.
                    let since_step = evidence.first().map_or(step, |seen| seen.from_step);
                    let severity = rule.severity();
                    let alert =
                        Alert { rule, severity, step, since_step, message, evidence, fix, on_alert, ends: Vec::new() };
                    findings.push(Finding::Raised(alert));
                }
                (Verdict::Clear, Some(raised_step)) => {
                    self.active.remove(&rule);
                    findings.push(Finding::Cleared { rule, raised_step });
                }
                (Verdict::Raise(_), Some(_)) | (Verdict::Clear, None) | (Verdict::Hold, _) => {}
            }
        }
        findings.extend(self.phase.follow(&case).map(Finding::Phase));
        findings
    }

    /// Returns the mean training reward of the last few rollouts, with which an evaluation is compared; `None`
    /// before the first rollout.
    pub fn recent_reward(&self) -> Option<f64> {
        self.history.up_to("reward", rules::RECENT).map(|window| window.mean())
    }
}

/// The metrics and settings that a rule examines.
struct Case<'a> {
    history: &'a History,
    input: &'a RuleInput<'a>,
    step: u64,
}

#[cfg(test)]
mod tests;
