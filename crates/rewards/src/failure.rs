//! Why a job cannot go on with one of its rewards, or cannot have it at all.

use crate::event::Phase;
use crate::job::{Failure, FailureClass};

/// Why a job cannot go on with one of its rewards.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RewardFailure {
    /// The service was not reachable for `max_outage_s`: the job pauses until it is back.
    #[error("reward '{reward}': no answer{}; last: {cause}", waited(*.waited_s))]
    Outage {
        /// Its name.
        reward: String,
        /// Seconds since its first failure.
        waited_s: u64,
        /// The last failure.
        cause: String,
    },
    /// The service said 410 Gone: the job pauses until its user resumes it.
    #[error("reward '{reward}': the service answered 410 Gone")]
    Gone {
        /// Its name.
        reward: String,
    },
    /// Too few samples got a valid value: the job pauses until its user resumes it.
    #[error("reward '{reward}': {invalid} of the last {total} samples have no valid value; for example: {example}")]
    TooManyInvalid {
        /// Its name.
        reward: String,
        /// Samples without a value.
        invalid: u64,
        /// Samples in the window.
        total: u64,
        /// One of the errors.
        example: String,
    },
    /// An answer was invalid, and `on_invalid` is `fail`.
    #[error("reward '{reward}': {detail}")]
    Invalid {
        /// Its name.
        reward: String,
        /// What was wrong.
        detail: String,
    },
    /// The address may not be reached from this server.
    #[error("reward '{reward}': {detail}")]
    Refused {
        /// Its name.
        reward: String,
        /// Which address, and what to do.
        detail: String,
    },
    /// It cannot be computed on this machine.
    #[error("reward '{reward}': {detail}")]
    Unusable {
        /// Its name.
        reward: String,
        /// Why, and what to do.
        detail: String,
    },
    /// A built-in reward computes for too long.
    #[error("reward '{reward}': {detail}")]
    TooSlow {
        /// Its name.
        reward: String,
        /// What takes how long.
        detail: String,
    },
    /// Its requests cannot be written down: whoever keeps the journal knows why.
    #[error("reward '{reward}': its requests cannot be written down in the journal")]
    Unrecorded {
        /// Its name.
        reward: String,
    },
}

fn waited(seconds: u64) -> String {
    if seconds == 0 { String::new() } else { format!(" for {seconds} s") }
}

impl RewardFailure {
    /// The `status_reason` of the pause it leads to; `None`: the job fails.
    pub fn pause_reason(&self) -> Option<&'static str> {
        match self {
            RewardFailure::Outage { .. } => Some("reward_outage"),
            RewardFailure::Gone { .. } => Some("reward_gone"),
            RewardFailure::TooManyInvalid { .. } => Some("reward_invalid"),
            RewardFailure::Invalid { .. }
            | RewardFailure::Refused { .. }
            | RewardFailure::Unusable { .. }
            | RewardFailure::TooSlow { .. }
            | RewardFailure::Unrecorded { .. } => None,
        }
    }

    /// The failure of the job, where it fails.
    pub fn to_failure(&self, step: u64) -> Failure {
        let (class, code, suggestion) = match self {
            RewardFailure::Outage { .. } => {
                (FailureClass::Reward, "reward_outage", "bring the reward service back, then resume the job")
            }
            RewardFailure::Gone { .. } => (
                FailureClass::Reward,
                "reward_gone",
                "bring the service back at this url and resume the job; with another url, cancel it and submit a new one",
            ),
            RewardFailure::TooManyInvalid { .. } => (
                FailureClass::Reward,
                "reward_invalid",
                "try the service with POST /rewards/test, correct it, then resume the job",
            ),
            RewardFailure::Invalid { .. } => (
                FailureClass::Reward,
                "reward_invalid",
                "try the service with POST /rewards/test, or let on_invalid be \"mask\"",
            ),
            RewardFailure::Refused { .. } => (
                FailureClass::User,
                "reward_address_refused",
                "use another url, or ask the operator to add the address to --allow-outgoing",
            ),
            RewardFailure::Unusable { .. } => {
                (FailureClass::User, "reward_not_usable", "correct what the message names, then submit a new job")
            }
            RewardFailure::TooSlow { .. } => (
                FailureClass::User,
                "reward_too_slow",
                "use a simpler pattern, schema or formula, or shorter completions (sampling.max_completion_length); try it with POST /rewards/test, then submit a new job",
            ),
            RewardFailure::Unrecorded { .. } => {
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

/// A reward that cannot be made from its plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reward '{reward}': {detail}")]
pub struct BuildError {
    /// Its name.
    pub reward: String,
    /// What is wrong and what to do.
    pub detail: String,
}

impl BuildError {
    /// The failure of the job.
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
