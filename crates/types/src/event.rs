//! The output of a run: events, the metrics of a step, and samples.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::environment::SampleEpisode;
pub use crate::finish_reason::FinishReason;

mod alert;

pub use alert::{Alert, AttemptEnd, Observation, OnAlert, PhaseChange, Rule, Severity, TrainingPhase};

/// The stage of the training loop that a running job is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Loading the model and tokenizing the prompts.
    Loading,
    /// Sampling completions from the policy.
    Rollout,
    /// Waiting for reward services.
    Reward,
    /// Forward pass, backward pass and optimizer update.
    Train,
    /// Sampling and scoring the evaluation prompts.
    Eval,
    /// Writing and publishing a checkpoint.
    Checkpoint,
}

impl Phase {
    /// Returns the name used in the API and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Loading => "loading",
            Phase::Rollout => "rollout",
            Phase::Reward => "reward",
            Phase::Train => "train",
            Phase::Eval => "eval",
            Phase::Checkpoint => "checkpoint",
        }
    }
}

/// Whether a sample or a reward request belongs to training or to evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SamplePhase {
    /// The sample or request is part of a training rollout.
    Train,
    /// The sample or request is part of an evaluation.
    Eval,
}

/// The metrics of one optimizer step or one evaluation, with TRL's names; `None` = undefined (for example, the standard deviation
/// of a single value).
pub type Metrics = BTreeMap<String, Option<f64>>;

/// One completion with its rewards and its advantage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Optimizer step (from 1) that first used the completion. For an evaluation, the step that it follows (0 =
    /// before the first step).
    pub step: u64,
    /// Whether the completion belongs to training or to evaluation.
    pub phase: SamplePhase,
    /// Id of the completion's group: all completions of one prompt in one rollout.
    pub group_id: String,
    /// Dataset row of the prompt: `row_N`, with N counted from 0.
    pub prompt_id: String,
    /// The prompt as text, as the model saw it (chat template applied).
    pub prompt: String,
    /// The completion as text, without special tokens. In a job with an environment, the whole episode with special tokens.
    pub completion: String,
    /// Value of each reward, by name; null = missing or not applicable.
    pub rewards: BTreeMap<String, Option<f64>>,
    /// Weighted sum of the rewards, before clipping and KL penalty; null = unscorable.
    pub reward: Option<f64>,
    /// Sum over the completion's tokens of old − ref log-probability under the policy that sampled it, in nats; null
    /// without a reference model.
    pub kl: Option<f64>,
    /// The advantage used in training; null in an evaluation.
    pub advantage: Option<f64>,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// Length of the completion in tokens, including the end-of-sequence token.
    pub num_tokens: u32,
    /// The turns of the episode; only in a job with an environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<Box<SampleEpisode>>,
}

/// A change in the state of a reward's service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardChange {
    /// Too many requests to the reward's service fail.
    Degraded,
    /// Requests to the service succeed again.
    Recovered,
    /// The circuit breaker opened: no requests are sent for a while, because too many failed.
    BreakerOpened,
    /// The circuit breaker closed: the service answers again.
    BreakerClosed,
}

impl RewardChange {
    /// Returns the type of the event that reports the change.
    pub fn event(self) -> &'static str {
        match self {
            RewardChange::Degraded => "reward.degraded",
            RewardChange::Recovered => "reward.recovered",
            RewardChange::BreakerOpened => "reward.breaker_opened",
            RewardChange::BreakerClosed => "reward.breaker_closed",
        }
    }
}

/// An event that the engine reports to its host. Events are reported in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// The training loop entered a phase.
    Phase {
        /// The phase that the run entered.
        phase: Phase,
        /// Number of completed optimizer steps.
        step: u64,
    },
    /// One optimizer step (`kind: train`) or one evaluation (`kind: eval`, keys prefixed `eval_`) has completed.
    Step {
        /// Optimizer step, from 1. For an evaluation, the step that it follows (0 = before the first step).
        step: u64,
        /// Whether the metrics belong to training or to evaluation.
        kind: SamplePhase,
        /// Metrics of the step or evaluation, with TRL's names.
        metrics: Metrics,
    },
    /// Completions with their rewards and advantages.
    Samples {
        /// Samples, in the order of the generation block.
        samples: Vec<Sample>,
    },
    /// A warning for the user; the run continues.
    Warning {
        /// Stable warning code in snake_case.
        code: String,
        /// Human-readable message in English.
        message: String,
        /// Figures behind the warning, by name.
        data: serde_json::Value,
    },
    /// The state of a reward's service changed.
    Reward {
        /// Name of the reward.
        reward: String,
        /// How the state of the reward's service changed.
        change: RewardChange,
        /// Human-readable message in English.
        message: String,
        /// Figures behind the change of the service's state, by name.
        data: serde_json::Value,
    },
    /// An alert was raised.
    Alert {
        /// The alert with its rule, evidence and fix.
        alert: Alert,
    },
    /// An alert has ended.
    AlertCleared {
        /// Rule of the ended alert.
        rule: Rule,
        /// The step at which the alert was raised.
        raised_step: u64,
        /// The step at which the alert ended.
        step: u64,
    },
    /// The run entered another training phase.
    TrainingPhase {
        /// The new phase, and the evidence for it.
        change: PhaseChange,
    },
    /// The run ends because too many updates in a row had a non-finite loss or gradient.
    Diverged {
        /// First step with a skipped update.
        first_step: u64,
        /// Last step with a skipped update.
        step: u64,
    },
    /// The run ends before its last step because its evaluations no longer improve.
    EarlyStopping {
        /// Number of completed optimizer steps.
        step: u64,
        /// The metric of early stopping, which did not improve.
        metric: String,
        /// Best value of the metric of early stopping; null = none.
        best: Option<f64>,
        /// Step of the best value of the metric of early stopping; null = none.
        best_step: Option<u64>,
        /// Number of evaluations in a row without a new best value of the metric.
        evaluations: u32,
    },
}
