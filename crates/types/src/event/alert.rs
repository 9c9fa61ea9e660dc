//! Alerts and phases of training: the words. The rules that raise them are the doctor's.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Phase;

/// What can be wrong with a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Gradient norms spike, or the mean reward jumps more than sampling explains.
    HighVariance,
    /// The policy leaves its reference.
    KlExplosion,
    /// Most groups have equal rewards: little is left to learn from.
    RewardCollapse,
    /// Completions grow until they are cut.
    LengthExplosion,
    /// Completions end at once.
    EmptyOutput,
    /// The reward rises while an independent measure falls.
    RewardHacking,
    /// The model never earns more than the lowest reward.
    ColdStart,
    /// The model earns nearly the highest reward from the start.
    NothingToLearn,
    /// Training does not change the weights to speak of.
    AdapterUnchanged,
    /// The policy always says the same.
    EntropyCollapse,
    /// Steps wait for rewards most of their time.
    SlowReward,
    /// Losses or gradients are not finite.
    NonFinite,
    /// Attempts end again and again before the job is over.
    ManyRestarts,
}

impl Rule {
    /// Every rule that reads metrics, and that a job can therefore configure.
    pub const ALL: [Rule; 12] = [
        Rule::HighVariance,
        Rule::KlExplosion,
        Rule::RewardCollapse,
        Rule::LengthExplosion,
        Rule::EmptyOutput,
        Rule::RewardHacking,
        Rule::ColdStart,
        Rule::NothingToLearn,
        Rule::AdapterUnchanged,
        Rule::EntropyCollapse,
        Rule::SlowReward,
        Rule::NonFinite,
    ];

    /// The name used in the API and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Rule::HighVariance => "high_variance",
            Rule::KlExplosion => "kl_explosion",
            Rule::RewardCollapse => "reward_collapse",
            Rule::LengthExplosion => "length_explosion",
            Rule::EmptyOutput => "empty_output",
            Rule::RewardHacking => "reward_hacking",
            Rule::ColdStart => "cold_start",
            Rule::NothingToLearn => "nothing_to_learn",
            Rule::AdapterUnchanged => "adapter_unchanged",
            Rule::EntropyCollapse => "entropy_collapse",
            Rule::SlowReward => "slow_reward",
            Rule::NonFinite => "non_finite",
            Rule::ManyRestarts => "many_restarts",
        }
    }

    /// How bad it is.
    pub fn severity(self) -> Severity {
        match self {
            Rule::KlExplosion | Rule::EmptyOutput | Rule::NonFinite => Severity::Critical,
            Rule::HighVariance
            | Rule::RewardCollapse
            | Rule::LengthExplosion
            | Rule::RewardHacking
            | Rule::ColdStart
            | Rule::AdapterUnchanged
            | Rule::EntropyCollapse
            | Rule::ManyRestarts => Severity::Warning,
            Rule::NothingToLearn | Rule::SlowReward => Severity::Info,
        }
    }
}

impl Rule {
    /// Whether weights from the time of its evidence are suspect: a run that it ends has an earlier checkpoint as its result.
    pub fn damages_weights(self) -> bool {
        match self {
            Rule::HighVariance
            | Rule::KlExplosion
            | Rule::RewardCollapse
            | Rule::LengthExplosion
            | Rule::EmptyOutput
            | Rule::RewardHacking
            | Rule::EntropyCollapse
            | Rule::NonFinite => true,
            Rule::ColdStart | Rule::NothingToLearn | Rule::AdapterUnchanged | Rule::SlowReward | Rule::ManyRestarts => {
                false
            }
        }
    }
}

/// How bad an alert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Worth knowing.
    Info,
    /// The run will probably not get better by itself.
    Warning,
    /// The run is being damaged.
    Critical,
}

/// What an alert does to the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnAlert {
    /// It is told; the run goes on.
    #[default]
    Note,
    /// The job pauses; `resume` goes on, and the same episode does not pause it again.
    Pause,
    /// The job ends, and its newest checkpoint from before the evidence is its result.
    Stop,
}

/// One number that speaks for an alert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Observation {
    /// The metric.
    pub metric: String,
    /// How the value was made of it: `mean`, `last`, ….
    pub statistic: String,
    /// The value.
    pub value: f64,
    /// The number it is held against; null where it only explains.
    pub limit: Option<f64>,
    /// First step of the window.
    pub from_step: u64,
    /// Last step of the window.
    pub to_step: u64,
}

/// Something is wrong: what, since when, by which numbers, and what to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Alert {
    /// The rule that raised it.
    pub rule: Rule,
    /// How bad it is.
    pub severity: Severity,
    /// The optimizer step it was raised at.
    pub step: u64,
    /// The first step of its evidence: what was saved before it is not touched by it.
    pub since_step: u64,
    /// For people.
    pub message: String,
    /// The numbers.
    pub evidence: Vec<Observation>,
    /// What to change, by the names of the settings.
    pub fix: String,
    /// What it does to the run.
    pub on_alert: OnAlert,
    /// Of `many_restarts`: the ends it is about, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub ends: Vec<AttemptEnd>,
}

/// How one attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttemptEnd {
    /// Counts the claims of a job, from 1.
    pub attempt: u64,
    /// Unix ms.
    pub time_ms: i64,
    /// `worker_lost`, `lease_expired`, `claim_abandoned`, `worker_shutdown`, `preempted`, `server_restart`, …
    pub reason: String,
    /// The phase the run was in; null = unknown.
    pub phase: Option<Phase>,
    /// Optimizer steps done.
    pub step: u64,
    /// Resident memory of the worker process, as its last heartbeat said; null = the worker did not say.
    pub memory_bytes: Option<u64>,
    /// How the process ended (`signal: 9 (SIGKILL)`); null = the server did not see it.
    pub detail: Option<String>,
}

impl AttemptEnd {
    /// `attempt 3: worker_lost (signal: 9 (SIGKILL)) in rollout at step 12, 310 MiB`
    pub fn describe(&self) -> String {
        let AttemptEnd { attempt, time_ms: _, reason, phase, step, memory_bytes, detail } = self;
        let detail = detail.as_ref().map_or_else(String::new, |detail| format!(" ({detail})"));
        let phase = phase.map_or("an unknown phase", Phase::as_str);
        let memory = memory_bytes.map_or_else(|| "memory unknown".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
        format!("attempt {attempt}: {reason}{detail} in {phase} at step {step}, {memory}")
    }
}

/// What a run is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainingPhase {
    /// The reward is where it began, and varies.
    Exploration,
    /// The reward rises.
    Exploitation,
    /// The reward has risen and is flat, the KL is stable.
    Convergence,
}

/// The run entered a phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PhaseChange {
    /// The new one.
    pub phase: TrainingPhase,
    /// The one before; null at first.
    pub from: Option<TrainingPhase>,
    /// The optimizer step it was seen at.
    pub step: u64,
    /// The numbers.
    pub evidence: Vec<Observation>,
}
