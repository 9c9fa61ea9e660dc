//! One-shot child processes, such as `rlood probe` and `rlood judge`. Each answers one request: it reads a task from standard
//! input and writes one report to standard output. The server's side is `supervisor::one_shot`, the child's is `worker::one_shot`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a one-shot child process gave no report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OneShotError {
    /// The maximum number of children of this kind is running already.
    #[error("the maximum number of child processes of this kind is running already")]
    Busy,
    /// The server is shutting down.
    #[error("the server is shutting down")]
    Stopping,
    /// The child did not end within this time and was killed.
    #[error("the child process sent no report within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// The child was killed or ran out of memory; the text is its exit status.
    #[error("the child process was killed ({0})")]
    Killed(String),
    /// The child ended without a report; the text is its exit status.
    #[error("the child process ended without a report ({0})")]
    Ended(String),
    /// The child could not be started, or a pipe to it failed; the text is the cause.
    #[error("{0}")]
    Failed(String),
}

/// A line of output from a child that reports progress: its progress, an intermediate result, or, as the last line, its report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChildLine<Item, Report> {
    /// The progress of the child process.
    Progress {
        /// Number of completed units of work.
        done: u64,
        /// Total number of units of work.
        total: u64,
    },
    /// An intermediate result of the child.
    Item(Item),
    /// The report, which is the last line.
    Report(Report),
}
