//! What a run says to the outside: events, the metrics of a step, samples.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

mod alert;

pub use alert::{Alert, AttemptEnd, Observation, OnAlert, PhaseChange, Rule, Severity, TrainingPhase};

/// Which part of the loop a running job is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Reading the model, tokenising the prompts.
    Loading,
    /// Sampling completions.
    Rollout,
    /// Waiting for reward services.
    Reward,
    /// Forward, backward, optimizer.
    Train,
    /// Sampling and scoring the evaluation prompts.
    Eval,
    /// Writing and publishing a checkpoint.
    Checkpoint,
}

impl Phase {
    /// The name used in the API and in the database.
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
    /// Part of a training rollout.
    Train,
    /// Part of an evaluation.
    Eval,
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string.
    Stop,
    /// `max_completion_length` was reached: the completion is truncated.
    Length,
}

/// The metrics of one optimizer step (or one evaluation), by TRL's names; `None` = undefined (the std of one value, say).
pub type Metrics = BTreeMap<String, Option<f64>>;

/// One completion with everything that is known of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Optimizer step (1-based) the completion was first used in; evaluations carry the step they follow (0 = before the start).
    pub step: u64,
    /// Training or evaluation.
    pub phase: SamplePhase,
    /// All completions of one prompt in one rollout share it.
    pub group_id: String,
    /// The dataset row: `row_N`, N counted from 0.
    pub prompt_id: String,
    /// The prompt as text, as the model saw it (chat template applied).
    pub prompt: String,
    /// The completion as text, without special tokens.
    pub completion: String,
    /// Value of each reward by name; null = missing or not applicable.
    pub rewards: BTreeMap<String, Option<f64>>,
    /// The weighted sum, before clip and KL; null = unscorable.
    pub reward: Option<f64>,
    /// Summed over the completion, from the policy that sampled it: Σ (old − ref), nats; null without a reference.
    pub kl: Option<f64>,
    /// The advantage it trained with; null in an evaluation.
    pub advantage: Option<f64>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens, including the end-of-sequence token.
    pub num_tokens: u32,
}

/// What changed about a reward's service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardChange {
    /// Too many tries bring nothing usable.
    Degraded,
    /// They go well again.
    Recovered,
    /// No requests for a while: it failed too often.
    BreakerOpened,
    /// It answers again.
    BreakerClosed,
}

impl RewardChange {
    /// The type of the event that tells of it.
    pub fn event(self) -> &'static str {
        match self {
            RewardChange::Degraded => "reward.degraded",
            RewardChange::Recovered => "reward.recovered",
            RewardChange::BreakerOpened => "reward.breaker_opened",
            RewardChange::BreakerClosed => "reward.breaker_closed",
        }
    }
}

/// What the engine tells its host, in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// The loop entered a phase.
    Phase {
        /// The phase.
        phase: Phase,
        /// Optimizer steps done so far.
        step: u64,
    },
    /// One optimizer step is done (`kind: train`), or one evaluation (`kind: eval`, keys prefixed `eval_`).
    Step {
        /// Optimizer step, from 1; an evaluation carries the step it follows (0 = before the start).
        step: u64,
        /// Training or evaluation.
        kind: SamplePhase,
        /// TRL's names.
        metrics: Metrics,
    },
    /// Completions with their rewards and advantages.
    Samples {
        /// In block order.
        samples: Vec<Sample>,
    },
    /// Something a user should know; the run goes on.
    Warning {
        /// Stable, snake_case.
        code: String,
        /// For people.
        message: String,
        /// Evidence.
        data: serde_json::Value,
    },
    /// A reward's service does worse or better.
    Reward {
        /// Its name.
        reward: String,
        /// What changed.
        change: RewardChange,
        /// For people.
        message: String,
        /// Evidence.
        data: serde_json::Value,
    },
    /// The doctor raised an alert.
    Alert {
        /// Rule, evidence, fix.
        alert: Alert,
    },
    /// An alert is over.
    AlertCleared {
        /// Its rule.
        rule: Rule,
        /// The step it had been raised at.
        raised_step: u64,
        /// The step it was over at.
        step: u64,
    },
    /// The run entered another training phase.
    TrainingPhase {
        /// Which, and why.
        change: PhaseChange,
    },
    /// The run ends, because too many updates in a row had a loss or gradient that was not finite.
    Diverged {
        /// The first of them.
        first_step: u64,
        /// The last of them.
        step: u64,
    },
    /// The run ends before its last step, because its evaluations do not get better.
    EarlyStopping {
        /// Optimizer steps done.
        step: u64,
        /// The metric that did not get better.
        metric: String,
        /// Its best value.
        best: Option<f64>,
        /// Where it was best.
        best_step: Option<u64>,
        /// Evaluations in a row without a new best.
        evaluations: u32,
    },
}
