//! Errors of rollout servers, and the failure or the pause of the job that follows.

use crate::event::Phase;
use crate::job::{Failure, FailureClass};

/// Why the servers cannot sample.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FleetError {
    /// No server was usable for the whole timeout.
    #[error("no rollout server is usable{}; {cause}", waited(*.waited_s))]
    Outage {
        /// Seconds without a usable server.
        waited_s: u64,
        /// The error of each server.
        cause: String,
    },
    /// No server can serve this job.
    #[error("no rollout server can be used for this job: {0}")]
    Unfit(String),
    /// The adapter cannot be written to the shared folder.
    #[error("the adapter cannot be written to the folder {folder}")]
    Publish {
        /// Path of the folder that worker and servers share.
        folder: String,
        /// Error of the file system.
        #[source]
        source: std::io::Error,
    },
    /// The adapter cannot be uploaded to the server of rlood.
    #[error("the adapter cannot be uploaded to the server: {0}")]
    Upload(String),
}

fn waited(seconds: u64) -> String {
    if seconds == 0 { String::new() } else { format!(" for {seconds} s") }
}

pub(super) fn failure(class: FailureClass, code: &str, message: String, suggestion: Option<&str>) -> Failure {
    Failure {
        class,
        code: code.to_owned(),
        message,
        phase: Some(Phase::Rollout),
        step: None,
        suggestion: suggestion.map(str::to_owned),
    }
}

impl FleetError {
    /// Returns the job's `status_reason` for errors that pause the job; `None` for errors that fail it.
    pub(crate) fn pause_reason(&self) -> Option<&'static str> {
        match self {
            FleetError::Outage { .. } => Some("rollout_outage"),
            FleetError::Unfit(_) | FleetError::Publish { .. } | FleetError::Upload(_) => None,
        }
    }

    /// Converts this error into the failure of the job.
    pub(crate) fn to_failure(&self, step: u64) -> Failure {
        let message = crate::error_text::with_causes(self);
        let (class, code, suggestion) = match self {
            FleetError::Outage { .. } => {
                (FailureClass::Infra, "rollout_outage", "bring a rollout server back, then resume the job")
            }
            FleetError::Unfit(_) => (
                FailureClass::User,
                "rollout_servers_unfit",
                "correct what the message names on each server, then retry the job",
            ),
            FleetError::Publish { .. } => (
                FailureClass::Infra,
                "rollout_publish",
                "give the worker a folder that it can write to with --adapter-dir, then retry the job",
            ),
            FleetError::Upload(_) => (
                FailureClass::Infra,
                "rollout_publish",
                "look at the server's log, or give the worker and the rollout servers a shared folder with --adapter-dir, then retry the job",
            ),
        };
        Failure { step: Some(step), ..failure(class, code, message, Some(suggestion)) }
    }
}
