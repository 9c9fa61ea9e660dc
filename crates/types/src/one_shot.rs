//! A one-shot child: a process that answers one request, `rlood probe` or `rlood generator`. It reads a task from standard
//! input and writes one report to standard output. The server's side is `supervisor::one_shot`, the child's `worker::one_shot`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why there is no report of a one-shot child.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OneShotError {
    /// As many children of this kind as may run at once do.
    #[error("as many children of this kind as may run at once do")]
    Busy,
    /// The server stops.
    #[error("the server stops")]
    Stopping,
    /// The child did not end within this time and was killed.
    #[error("no report within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// Somebody killed the child, or it ran out of memory: how it ended.
    #[error("the child was killed ({0})")]
    Killed(String),
    /// The child ended without a report: how it ended.
    #[error("the child ended without a report ({0})")]
    Ended(String),
    /// The child cannot be started, or one side cannot read or write: what failed.
    #[error("{0}")]
    Failed(String),
}

/// A line of a child that reports on its way: how far it is, something that it found, and last of all its report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChildLine<Item, Report> {
    /// How far it is.
    Progress {
        /// Parts done.
        done: u64,
        /// Parts in all.
        total: u64,
    },
    /// Something that it found.
    Item(Item),
    /// The last line.
    Report(Report),
}
