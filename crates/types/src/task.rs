//! The state and the progress of a task: a verdict or an export.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of a verdict or an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// Waits for its turn.
    Queued,
    /// Under way.
    Running,
    /// Done.
    Succeeded,
    /// Ended by an error.
    Failed,
    /// Ended by a user.
    Cancelled,
}

impl TaskState {
    /// The name in the API, in the database and in event types.
    pub fn as_str(self) -> &'static str {
        match self {
            TaskState::Queued => "queued",
            TaskState::Running => "running",
            TaskState::Succeeded => "succeeded",
            TaskState::Failed => "failed",
            TaskState::Cancelled => "cancelled",
        }
    }

    /// Whether a task never leaves this state.
    pub fn is_final(self) -> bool {
        match self {
            TaskState::Queued | TaskState::Running => false,
            TaskState::Succeeded | TaskState::Failed | TaskState::Cancelled => true,
        }
    }
}

/// How far a verdict or an export is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskProgress {
    /// Parts done.
    pub done: u64,
    /// Parts in all; 0 = not known yet.
    pub total: u64,
}
