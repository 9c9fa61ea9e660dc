//! The state and the progress of a task: a verdict, an export or a push.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of a verdict, an export or a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// The task waits for the tasks of its kind that were requested before it.
    Queued,
    /// A process of the server works on the task.
    Running,
    /// The task ended with a result.
    Succeeded,
    /// The task ended with an error, which `error` describes.
    Failed,
    /// A user ended the task before it was done.
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

/// Progress of a verdict, an export or a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskProgress {
    /// Number of completed units of work: weights of an export, rows of a verdict that were sampled or scored, bytes of a push.
    pub done: u64,
    /// Total number of units of work; 0 = not known yet.
    pub total: u64,
}
