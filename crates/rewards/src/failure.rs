//! Errors that stop a job because of one of its rewards, and errors in a reward's plan.

use crate::event::Phase;
use crate::job::{Failure, FailureClass};

/// Reason why a job cannot continue with one of its rewards.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RewardFailure {
    /// The service was unreachable for `max_outage_s`. The job pauses until the service is back.
    #[error("reward '{reward}': the service gave no answer{}; last error: {cause}", waited(*.waited_s))]
    Outage {
        /// Name of the reward.
        reward: String,
        /// Seconds since the service's first failed request in the outage.
        waited_s: u64,
        /// Error of the service's last failed request.
        cause: String,
    },
    /// The service answered 410 Gone. The job pauses until the user resumes it.
    #[error("reward '{reward}': the service answered 410 Gone")]
    Gone {
        /// Name of the reward.
        reward: String,
    },
    /// Too few samples of the recent rollouts got a valid reward. The job pauses until the user resumes it.
    #[error("reward '{reward}': {invalid} of the last {total} samples have no valid value; for example: {example}")]
    TooManyInvalid {
        /// Name of the reward.
        reward: String,
        /// Number of samples of these rollouts without a valid reward.
        invalid: u64,
        /// Number of samples in these rollouts.
        total: u64,
        /// The error of one of the samples, as an example.
        example: String,
    },
    /// A reward service gave an invalid answer, and the reward's `on_invalid` is `fail`.
    #[error("reward '{reward}': {detail}")]
    Invalid {
        /// Name of the reward.
        reward: String,
        /// Why the answer is invalid.
        detail: String,
    },
    /// The policy for outgoing addresses forbids the address of the reward service.
    #[error("reward '{reward}': {detail}")]
    Refused {
        /// Name of the reward.
        reward: String,
        /// The forbidden address, and what the user can do.
        detail: String,
    },
    /// The reward needs something that this machine lacks, such as its model or Python.
    #[error("reward '{reward}': {detail}")]
    Unusable {
        /// Name of the reward.
        reward: String,
        /// Why the reward cannot be computed, and what the user can do.
        detail: String,
    },
    /// A built-in reward takes too long to compute.
    #[error("reward '{reward}': {detail}")]
    TooSlow {
        /// Name of the reward.
        reward: String,
        /// The computation that took too long, and its time limit.
        detail: String,
    },
    /// The reward's requests cannot be recorded in the journal. The journal's implementation logs the reason.
    #[error("reward '{reward}': its requests cannot be recorded in the job's journal")]
    JournalClosed {
        /// Name of the reward.
        reward: String,
    },
}

fn waited(seconds: u64) -> String {
    if seconds == 0 { String::new() } else { format!(" for {seconds} s") }
}

impl RewardFailure {
    /// Returns the job's `status_reason` for errors that pause the job; `None` for errors that fail it.
    pub fn pause_reason(&self) -> Option<&'static str> {
        match self {
            RewardFailure::Outage { .. } => Some("reward_outage"),
            RewardFailure::Gone { .. } => Some("reward_gone"),
            RewardFailure::TooManyInvalid { .. } => Some("reward_invalid"),
            RewardFailure::Invalid { .. }
            | RewardFailure::Refused { .. }
            | RewardFailure::Unusable { .. }
            | RewardFailure::TooSlow { .. }
            | RewardFailure::JournalClosed { .. } => None,
        }
    }

    /// Converts this error into the failure of the job, for errors that do not pause the job.
    pub fn to_failure(&self, step: u64) -> Failure {
        let (class, code, suggestion) = match self {
            RewardFailure::Outage { .. } => {
                (FailureClass::Reward, "reward_outage", "bring the reward service back, then resume the job")
            }
            RewardFailure::Gone { .. } => (
                FailureClass::Reward,
                "reward_gone",
                "bring the service back at this url and resume the job; if the url has changed, cancel the job and submit a new one",
            ),
            RewardFailure::TooManyInvalid { .. } => (
                FailureClass::Reward,
                "reward_invalid",
                "test the service with POST /rewards/test, fix it, then resume the job",
            ),
            RewardFailure::Invalid { .. } => (
                FailureClass::Reward,
                "reward_invalid",
                "test the service with POST /rewards/test, or set on_invalid to \"mask\"",
            ),
            RewardFailure::Refused { .. } => (
                FailureClass::User,
                "reward_address_refused",
                "use another url, or ask the operator to add the address to --allow-outgoing",
            ),
            RewardFailure::Unusable { .. } => {
                (FailureClass::User, "reward_not_usable", "fix the problem in the message, then submit a new job")
            }
            RewardFailure::TooSlow { .. } => (
                FailureClass::User,
                "reward_too_slow",
                "use a simpler pattern, schema or formula, or shorter completions (sampling.max_completion_length); test it with POST /rewards/test, then submit a new job",
            ),
            RewardFailure::JournalClosed { .. } => {
                (FailureClass::Infra, "journal_refused", "see the server's and the worker's log, then retry the job")
            }
        };
        Failure {
            class,
            code: code.to_owned(),
            message: self.to_string(),
            phase: Some(Phase::Reward),
            step: Some(step),
            suggestion: Some(suggestion.to_owned()),
        }
    }
}

/// Error for a reward that cannot be created from its plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reward '{reward}': {detail}")]
pub struct BuildError {
    /// Name of the reward.
    pub reward: String,
    /// Why the reward cannot be created, and what the user can do.
    pub detail: String,
}

impl BuildError {
    /// Converts this error into the failure of the job.
    pub fn to_failure(&self) -> Failure {
        Failure {
            class: FailureClass::User,
            code: "reward_not_usable".to_owned(),
            message: self.to_string(),
            phase: Some(Phase::Loading),
            step: None,
            suggestion: None,
        }
    }
}
