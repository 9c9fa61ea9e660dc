//! The failures of the runtime, as the job reports them.

use super::environment::Environment;
use crate::engine::host::RunEnd;
use crate::job::{Failure, FailureClass};

pub(super) fn not_started(environment: &Environment, source: &std::io::Error) -> RunEnd {
    failure(
        "runtime_unavailable",
        format!(
            "the processes of the runtime trl could not be started with {}: {source}",
            environment.python.display()
        ),
        "run `rlood runtime install trl` on the worker's machine and restart the worker, then retry the job",
    )
}

/// Returns the end of a run whose ranks failed or did not keep to the protocol.
pub(super) fn failed(what: String) -> RunEnd {
    failure(
        "runtime_failed",
        format!("the runtime trl failed: {what}"),
        "see the warning runtime_failed in the job's events and the job's log; change the settings that it names, or report it",
    )
}

pub(super) fn failure(code: &str, message: String, suggestion: &str) -> RunEnd {
    Failure {
        class: FailureClass::Infra,
        code: code.to_owned(),
        message,
        phase: None,
        step: None,
        suggestion: Some(suggestion.to_owned()),
    }
    .into()
}
