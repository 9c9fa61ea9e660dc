//! The body of a lifecycle message. `detail` is the data of the event it tells of: the store writes these types into its events.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::id::{CheckpointId, JobId, WebhookId, WorkerId};
use crate::job::{Ending, Failure, State};

/// A message: what every try sends, in the same bytes.
#[derive(Debug, Serialize)]
pub struct Message<'a, D> {
    /// Its word.
    #[serde(rename = "type")]
    pub kind: &'a str,
    /// When it happened, RFC 3339 in UTC.
    pub timestamp: String,
    /// By type.
    pub data: D,
}

/// A job's event, and the job as it was then.
#[derive(Debug, Serialize, ToSchema)]
pub struct LifecycleData<D> {
    /// The job.
    #[schema(value_type = JobId)]
    pub job_id: String,
    /// For people.
    pub job_name: Option<String>,
    /// Where it stood.
    #[schema(value_type = State)]
    pub job_state: String,
    /// Its model.
    #[schema(example = "org/name")]
    pub model: String,
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps in all.
    pub total_steps: u64,
    /// The client's own labels.
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub metadata: Value,
    /// The type of the event in `/jobs/{id}/events`.
    #[schema(example = "job.created")]
    pub event: String,
    /// Its number there: messages of a job with a higher one are later.
    #[schema(minimum = 1)]
    pub seq: i64,
    /// The attempt it belongs to; 0 before the first claim.
    pub attempt: u64,
    /// The event's data.
    pub detail: D,
}

/// Of `webhook.test`.
#[derive(Debug, Serialize, ToSchema)]
pub struct TestData {
    /// The subscription that is tested.
    pub webhook_id: WebhookId,
}

/// Why a job waits for a worker.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct QueuedDetail {
    /// Of a new job: its model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub model: Option<String>,
    /// Of a new job: the one it was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub parent: Option<JobId>,
    /// Of a retry that resumes: the step of the parent's checkpoint that it begins with, 0 without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub from_step: Option<u64>,
    /// Who resumed it, if not a user: `server`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub by: Option<String>,
    /// Why it was taken back from its worker, or what it no longer waits for: `worker_lost`, `worker_shutdown`, `preempted`,
    /// `server_error`,
    /// `disk_full`, `reward_outage`, ….
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reason: Option<String>,
    /// Of one that was taken back: attempts in a row that failed without progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub failed_attempts: Option<u32>,
    /// Of one that was taken back: the phase it was in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub phase: Option<crate::event::Phase>,
    /// Of one that was taken back: optimizer steps done.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub step: Option<u64>,
    /// Of one that was taken back: resident memory of its worker, as last said, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub memory_bytes: Option<u64>,
}

/// Who works on a job, and from where.
#[derive(Debug, Serialize, ToSchema)]
pub struct StartedDetail {
    /// The worker.
    pub worker: WorkerId,
    /// Counts the claims of a job, from 1.
    pub attempt: u64,
    /// The step of the checkpoint it goes on from; null = from the start.
    pub resume_step: Option<u64>,
    /// The worker's rlood.
    pub version: String,
    /// The rlood that ran the attempt before, where it was another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_version: Option<String>,
}

/// Why a job paused.
#[derive(Debug, Serialize, ToSchema)]
pub struct PausedDetail {
    /// `reward_outage`, `disk_full`, `alert`, …; null = a user wanted it.
    pub reason: Option<String>,
}

/// How a job came to its end.
#[derive(Debug, Serialize, ToSchema)]
pub struct SucceededDetail {
    /// Optimizer steps done.
    pub step: u64,
    /// Why it ended before its last step; null = it did not.
    pub ending: Option<Ending>,
}

/// Why a job failed.
#[derive(Debug, Serialize, ToSchema)]
pub struct FailedDetail {
    /// Class, code, and what to do.
    pub failure: Failure,
}

/// Nothing more.
#[derive(Debug, Serialize, ToSchema)]
pub struct CancelledDetail {}

/// A checkpoint that can be downloaded.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointDetail {
    /// Its id: `/checkpoints/{id}`.
    pub checkpoint: CheckpointId,
    /// Optimizer steps done.
    pub step: u64,
    /// Whether it is the best so far.
    pub best: bool,
}

/// How a reward does.
#[derive(Debug, Serialize, ToSchema)]
pub struct RewardDetail {
    /// Its name in the job.
    pub reward: String,
    /// For people.
    pub message: String,
    /// Evidence: figures by name.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    pub data: Value,
}
