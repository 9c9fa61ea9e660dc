//! The body of a lifecycle message. `detail` is the data of the job event that it reports; the store writes the
//! types below into its events.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::id::{CheckpointId, JobId, WebhookId, WorkerId};
use crate::job::{Ending, Failure, State};

/// The body of a message. Every delivery attempt sends the same bytes.
#[derive(Debug, Serialize)]
pub struct Message<'a, D> {
    /// Type of the lifecycle message, such as `job.queued`.
    #[serde(rename = "type")]
    pub kind: &'a str,
    /// Time of the event, in UTC (RFC 3339).
    pub timestamp: String,
    /// Data of the message, depending on its type.
    pub data: D,
}

/// A job's event, and the job at that time.
#[derive(Debug, Serialize, ToSchema)]
pub struct LifecycleData<D> {
    /// Id of the job.
    #[schema(value_type = JobId)]
    pub job_id: String,
    /// Display name of the job; null = none.
    pub job_name: Option<String>,
    /// State of the job at the time of the event.
    #[schema(value_type = State)]
    pub job_state: String,
    /// Base model of the job.
    #[schema(example = "org/name")]
    pub model: String,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Total number of optimizer steps.
    pub total_steps: u64,
    /// The client's own labels, as key-value pairs.
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub metadata: Value,
    /// Type of the event in `/jobs/{id}/events`.
    #[schema(example = "job.created")]
    pub event: String,
    /// Sequence number of the event. Of two messages about a job, the one with the higher number is later.
    #[schema(minimum = 1)]
    pub seq: i64,
    /// Attempt that the event belongs to; 0 before the first claim.
    pub attempt: u64,
    /// Data of the event.
    pub detail: D,
}

/// Data of a `webhook.test` message.
#[derive(Debug, Serialize, ToSchema)]
pub struct TestData {
    /// Id of the webhook that is tested.
    pub webhook_id: WebhookId,
}

/// Data of `job.queued`: why a job waits for a worker.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct QueuedDetail {
    /// Base model of a new job.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub model: Option<String>,
    /// Job that a new job was created from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub parent: Option<JobId>,
    /// Step of a retry that resumes: the step of the parent's checkpoint that it starts from; 0 = without a checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub from_step: Option<u64>,
    /// `server` if the server resumed the job; absent if a user did.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub by: Option<String>,
    /// Why the job was returned to the queue, or what it no longer waits for: `worker_lost`, `worker_shutdown`, `preempted`,
    /// `server_error`, `disk_full`, `reward_outage`, ….
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reason: Option<String>,
    /// Number of consecutive attempts that failed without progress, for a job that returned to the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub failed_attempts: Option<u32>,
    /// Phase in which the job was when it returned to the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub phase: Option<crate::event::Phase>,
    /// Number of completed optimizer steps when the job returned to the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub step: Option<u64>,
    /// Last reported resident memory of its worker, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub memory_bytes: Option<u64>,
}

/// Data of `job.started`: which worker runs the job, and from which step.
#[derive(Debug, Serialize, ToSchema)]
pub struct StartedDetail {
    /// Id of the worker.
    pub worker: WorkerId,
    /// Number of the attempt: counts the claims of a job, from 1.
    pub attempt: u64,
    /// Step of the checkpoint that the job resumes from; null = from the start.
    pub resume_step: Option<u64>,
    /// Version of the worker's rlood.
    pub version: String,
    /// Version of the rlood that ran the previous attempt, if it was different.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_version: Option<String>,
}

/// Data of `job.paused`: why a job paused.
#[derive(Debug, Serialize, ToSchema)]
pub struct PausedDetail {
    /// Reason: `reward_outage`, `disk_full`, `alert`, …; null = a user paused the job.
    pub reason: Option<String>,
}

/// Data of `job.succeeded`: how a job ended.
#[derive(Debug, Serialize, ToSchema)]
pub struct SucceededDetail {
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Why the job ended before its last step; null = it completed all steps.
    pub ending: Option<Ending>,
}

/// Data of `job.failed`: why a job failed.
#[derive(Debug, Serialize, ToSchema)]
pub struct FailedDetail {
    /// The failure's class and code, and how to fix it.
    pub failure: Failure,
}

/// Data of `job.cancelled`, which has no fields.
#[derive(Debug, Serialize, ToSchema)]
pub struct CancelledDetail {}

/// Data of `checkpoint.created`: a checkpoint that can be downloaded.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointDetail {
    /// Id of the checkpoint, for `/checkpoints/{id}`.
    pub checkpoint: CheckpointId,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Whether the checkpoint is the job's best one so far.
    pub best: bool,
}

/// Data of `reward.degraded` and `reward.recovered`: the state of a reward service.
#[derive(Debug, Serialize, ToSchema)]
pub struct RewardDetail {
    /// Name of the reward in the job.
    pub reward: String,
    /// Human-readable message in English.
    pub message: String,
    /// Figures behind the message, by name.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    pub data: Value,
}
