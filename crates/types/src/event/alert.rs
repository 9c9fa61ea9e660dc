//! Types of alerts and training phases. The rules that raise them are in `doctor`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Phase;

/// A rule that can raise an alert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Gradient norms spike, or the mean reward jumps more than sampling explains.
    HighVariance,
    /// The policy moves too far from its reference.
    KlExplosion,
    /// Most groups have equal rewards, so there is little to learn from.
    RewardCollapse,
    /// Completions grow until they are truncated.
    LengthExplosion,
    /// Completions end with their first token.
    EmptyOutput,
    /// The reward rises while an independent measure falls.
    RewardHacking,
    /// The model never earns more than the lowest reward.
    ColdStart,
    /// The model earns nearly the highest reward from the start.
    NothingToLearn,
    /// Training changes the weights by next to nothing.
    AdapterUnchanged,
    /// The policy always gives the same completion.
    EntropyCollapse,
    /// Steps spend most of their time waiting for rewards.
    SlowReward,
    /// Losses or gradients are not finite.
    NonFinite,
    /// The log-probs of rollout servers differ from those of the trained model.
    RolloutMismatch,
    /// Many turns of episodes call tools in a way that is not valid.
    InvalidCalls,
    /// Nearly all tokens of episodes come from the environment.
    MostlyContext,
    /// All episodes end at a limit.
    EpisodesAtLimits,
    /// Episodes offer tools, and the model calls none.
    NoToolCalls,
    /// The environment forgets episodes, which begin again.
    ForgottenEpisodes,
    /// Attempts keep ending before the job is over.
    ManyRestarts,
}

impl Rule {
    /// Every rule that reads metrics, and can therefore be configured in a job.
    pub const ALL: [Rule; 18] = [
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
        Rule::RolloutMismatch,
        Rule::InvalidCalls,
        Rule::MostlyContext,
        Rule::EpisodesAtLimits,
        Rule::NoToolCalls,
        Rule::ForgottenEpisodes,
    ];

    /// Returns the name used in the API and in the database.
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
            Rule::RolloutMismatch => "rollout_mismatch",
            Rule::InvalidCalls => "invalid_calls",
            Rule::MostlyContext => "mostly_context",
            Rule::EpisodesAtLimits => "episodes_at_limits",
            Rule::NoToolCalls => "no_tool_calls",
            Rule::ForgottenEpisodes => "forgotten_episodes",
            Rule::ManyRestarts => "many_restarts",
        }
    }

    /// Returns the severity of the rule's alerts.
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
            | Rule::RolloutMismatch
            | Rule::InvalidCalls
            | Rule::EpisodesAtLimits
            | Rule::NoToolCalls
            | Rule::ForgottenEpisodes
            | Rule::ManyRestarts => Severity::Warning,
            Rule::NothingToLearn | Rule::SlowReward | Rule::MostlyContext => Severity::Info,
        }
    }
}

impl Rule {
    /// Whether the weights may be damaged since the alert's evidence began. A run that such an alert ends has an earlier
    /// checkpoint as its result.
    pub fn damages_weights(self) -> bool {
        match self {
            Rule::HighVariance
            | Rule::KlExplosion
            | Rule::RewardCollapse
            | Rule::LengthExplosion
            | Rule::EmptyOutput
            | Rule::RewardHacking
            | Rule::EntropyCollapse
            | Rule::RolloutMismatch
            | Rule::NonFinite => true,
            Rule::ColdStart
            | Rule::NothingToLearn
            | Rule::AdapterUnchanged
            | Rule::SlowReward
            | Rule::InvalidCalls
            | Rule::MostlyContext
            | Rule::EpisodesAtLimits
            | Rule::NoToolCalls
            | Rule::ForgottenEpisodes
            | Rule::ManyRestarts => false,
        }
    }
}

/// Severity of an alert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The alert only informs the user.
    Info,
    /// The run will probably not improve without a change.
    Warning,
    /// The run is being damaged.
    Critical,
}

/// Effect of an alert on the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnAlert {
    /// The alert is recorded, and the run continues.
    #[default]
    Note,
    /// The job pauses. After `resume` it continues, and the same episode does not pause it again.
    Pause,
    /// The job ends, and its newest checkpoint from before the evidence is its result.
    Stop,
}

/// A measured value that supports an alert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Observation {
    /// Name of the metric.
    pub metric: String,
    /// How the value was computed from the metric: `mean`, `last`, ….
    pub statistic: String,
    /// Value that was measured.
    pub value: f64,
    /// The threshold that the value is compared with; null = the value is only explanatory.
    pub limit: Option<f64>,
    /// First step of the values that the observation covers.
    pub from_step: u64,
    /// Last step of the values that the observation covers.
    pub to_step: u64,
}

/// An alert: the problem, its first step, the evidence, and how to fix it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Alert {
    /// The rule that raised the alert.
    pub rule: Rule,
    /// Severity of the alert.
    pub severity: Severity,
    /// The optimizer step at which the alert was raised.
    pub step: u64,
    /// The first step of the evidence. Checkpoints saved before this step are not affected.
    pub since_step: u64,
    /// Human-readable message in English.
    pub message: String,
    /// The measured values that support the alert.
    pub evidence: Vec<Observation>,
    /// Suggested changes, with the names of the settings.
    pub fix: String,
    /// Effect of the alert on the run.
    pub on_alert: OnAlert,
    /// Ends of attempts that an alert of the rule `many_restarts` is about, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub ends: Vec<AttemptEnd>,
}

/// How one attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttemptEnd {
    /// Number of the attempt: counts the claims of a job, from 1.
    pub attempt: u64,
    /// Time at which the attempt ended, Unix time in milliseconds.
    pub time_ms: i64,
    /// Reason for the end: `worker_lost`, `lease_expired`, `claim_abandoned`, `worker_shutdown`, `preempted`, `server_restart`, ….
    pub reason: String,
    /// The phase that the run was in when the attempt ended; null = unknown.
    pub phase: Option<Phase>,
    /// Number of completed optimizer steps when the attempt ended.
    pub step: u64,
    /// Resident memory of the worker process at its last heartbeat, in bytes; null = not reported.
    pub memory_bytes: Option<u64>,
    /// How the process ended (`signal: 9 (SIGKILL)`); null = the server did not see it.
    pub detail: Option<String>,
}

impl AttemptEnd {
    /// Formats the end: `attempt 3: worker_lost (signal: 9 (SIGKILL)) in rollout at step 12, 310 MiB`.
    pub fn describe(&self) -> String {
        let AttemptEnd { attempt, time_ms: _, reason, phase, step, memory_bytes, detail } = self;
        let detail = detail.as_ref().map_or_else(String::new, |detail| format!(" ({detail})"));
        let phase = phase.map_or("an unknown phase", Phase::as_str);
        let memory = memory_bytes.map_or_else(|| "memory unknown".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
        format!("attempt {attempt}: {reason}{detail} in {phase} at step {step}, {memory}")
    }
}

/// A training phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainingPhase {
    /// The reward is close to its first values, and varies.
    Exploration,
    /// The mean reward is rising.
    Exploitation,
    /// The reward has risen and is flat, and the KL is stable.
    Convergence,
}

/// A change of the training phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PhaseChange {
    /// The phase that the run entered.
    pub phase: TrainingPhase,
    /// The previous phase; null = this is the first.
    pub from: Option<TrainingPhase>,
    /// The optimizer step at which the phase was detected.
    pub step: u64,
    /// The measured values that support the change.
    pub evidence: Vec<Observation>,
}
