//! The worker protocol: all communication between server and worker, on one machine or over the network.
//!
//! All calls carry `Authorization: Bearer <worker token>`. Every call on a job carries the claim's `attempt`. The server rejects
//! (409 `lease_lost`) calls of an attempt that no longer owns the job.
//!
//! ```text
//! POST /worker/register                                   Register      → Registered
//! POST /worker/claim                                      ClaimRequest  → 200 Claim | 204
//! GET  /worker/jobs/{id}/datasets/{dataset_id}?attempt=N  → ndjson, one record per line
//! GET  /worker/jobs/{id}/datasets/{dataset_id}/images/{sha256}?attempt=N  → an image that rows name
//! GET  /worker/jobs/{id}/resume/{name}?attempt=N          → a file of the checkpoint named in the claim
//! GET  /worker/jobs/{id}/initial/{name}?attempt=N         → a file that the job starts from (warm start)
//! GET  /worker/jobs/{id}/models/{model}?attempt=N         → ModelFiles, long-polled while the server hashes them
//! GET  /worker/jobs/{id}/models/{model}/{name}?attempt=N  → a file of one of the job's models
//! POST /worker/jobs/{id}/damaged                          DamagedFile   → Inspection, long-polled while the server reads the file
//! POST /worker/jobs/{id}/heartbeat                        Heartbeat     → HeartbeatReply
//! POST /worker/jobs/{id}/events                           EventBatch    → 204
//! PUT  /worker/jobs/{id}/checkpoints/{step}/{name}?attempt=N   bytes    → 204
//! POST /worker/jobs/{id}/checkpoints/{step}               Publish       → Published
//! PUT  /worker/jobs/{id}/rollout-adapters/{adapter}/{name}?attempt=N  bytes → 204; of workers without a shared folder
//! GET  /worker/jobs/{id}/journal/{after}?attempt=N        → JournalPage
//! POST /worker/jobs/{id}/journal                          JournalBatch  → 204, durable
//! POST /worker/jobs/{id}/rewards                          RewardReports → 204
//! GET  /worker/jobs/{id}/callbacks/{after}?attempt=N      → CallbackUpdates, long-polled while there are none
//! POST /worker/jobs/{id}/finish                           Finish        → 204
//! ```
//!
//! Files are sent whole, or from the byte that the header `Range: bytes=N-` names. A server older than the `models` routes answers
//! 404 for them; its workers find the models at the same paths.
//!
//! # Protocol version
//!
//! Every addition to this protocol or to the plan (a field, a value, a changed meaning) increments [`PROTOCOL`] in the same commit.
//! Otherwise a worker that does not know a new setting would train without it and report success.
//!
//! - `Register`, `ClaimRequest` and `Registered` carry the version. A missing version means version 1. The server does not register
//!   a worker with another version and gives it no job (409 `protocol_mismatch`); a worker disconnects from a server with another
//!   version. Both report what to update. The server's own workers run the same binary, so they have the same version.
//! - A job that runs while its server is updated continues: its worker understood the plan when it claimed the job. Fields that are
//!   sent about a running attempt therefore have defaults and are never rejected.
//! - A forgotten version increment is detected: [`read_claim`] rejects unknown fields, and the worker returns the job and
//!   disconnects. Earlier still, `tests/it/protocol.rs` compares the fields of plan and claim with a recorded list.
//! - Plans in the database are exempt. Plans of older versions lack fields, each of which has a default that means the former
//!   behavior. Fields that no longer exist are dropped before a plan is sent.
//!
//! This file is longer than others: it lists every message between worker and server.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::callback::{Accepted, CallbackTerms, Entry, Later};
use crate::digest::Sha256Digest;
use crate::event::{Event, Phase};
use crate::id::{CheckpointId, JobId, WorkerId};
use crate::job::{Failure, Requested};
use crate::rollout::{RolloutId, SampledGroup};
use crate::spec::{Plan, RewardSecrets, RuntimeFacts};

mod claim;
mod models;
mod rewards;

pub use claim::{ClaimError, read_claim};
pub use models::ModelFiles;
pub use rewards::*;

/// Version of this protocol, including the plan. See "Protocol version" above for when to increment it.
pub const PROTOCOL: u32 = 13;

/// Idle timeout of a transfer between server and worker, on either side: the transfer ends when no byte has arrived for this long.
/// Its total duration is not limited.
pub const TRANSFER_STALL: Duration = Duration::from_secs(60);

/// Protocol version of a peer that does not send one.
const fn first_protocol() -> u32 {
    1
}

/// A worker registers with the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Register {
    /// Id of the worker, chosen by the worker.
    pub worker: WorkerId,
    /// Device of the worker: `cpu`, `cuda:0`, ….
    pub device: String,
    /// Process id on the worker's machine.
    pub pid: u32,
    /// Number of compute threads that the worker will use.
    pub threads: u32,
    /// Version of the worker's rlood.
    pub version: String,
    /// Whether the server started the worker as a child process; such a worker ends when the server does.
    #[serde(default)]
    pub child: bool,
    /// Version of this protocol ([`PROTOCOL`]) in the worker.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
    /// CPU kernels of the worker; null for a worker on a GPU, and for workers of versions before this field.
    #[serde(default)]
    pub kernels: Option<KernelFacts>,
    /// Runtimes beside rlood's own engine that the worker can start; none for workers of versions before this field.
    #[serde(default)]
    pub runtimes: Vec<RuntimeFacts>,
}

/// The CPU kernels of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KernelFacts {
    /// Name of the instruction set, as in `--isa`: the requested one, or with `auto` the fastest one.
    #[schema(example = "avx512_bf16")]
    pub isa: String,
    /// Speed of the bf16 instructions of AVX-512 (`avx512_bf16`) divided by the speed of `avx512` in f32, measured when the worker
    /// started; null if the CPU does not have them. `auto` chooses `avx512_bf16` if the quotient is at least 1.3.
    #[schema(example = 1.98)]
    pub avx512_bf16_gain: Option<f64>,
}

/// The server's response to a registration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Registered {
    /// Interval between heartbeats, in milliseconds.
    pub heartbeat_ms: u64,
    /// Lease of a claim without a heartbeat, in milliseconds.
    pub lease_ms: u64,
    /// Version of this protocol ([`PROTOCOL`]) in the server.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
}

/// A worker requests a job. The server may hold the call for up to `wait_ms`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClaimRequest {
    /// Id of the worker that requests a job.
    pub worker: WorkerId,
    /// Maximum time to wait for a job, in milliseconds.
    pub wait_ms: u64,
    /// [`PROTOCOL`] of the worker. It is sent again because the server may have been updated since the worker registered.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
}

/// A claim: the right to run a job and to write its results.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Claim {
    /// Id of the job.
    pub job: JobId,
    /// Id of the worker that holds the claim.
    pub worker: WorkerId,
    /// Number of the attempt, which all writes of this claim must carry.
    pub attempt: u64,
    /// The resolved plan of the job.
    pub plan: Plan,
    /// Secrets of the rewards, by reward name.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// Path of the model on the server. A worker uses the files at this path on its own machine if they are identical to the plan's
    /// model; otherwise it fetches the files from the server.
    pub model_path: String,
    /// Model name that is written as `base_model_name_or_path` of the adapter.
    pub model_name: String,
    /// Paths of the reward models on the server, by model id; used like `model_path`.
    #[serde(default)]
    pub reward_models: BTreeMap<String, String>,
    /// Newest published checkpoint of the job, to resume from; null = none.
    pub resume: Option<ResumePoint>,
    /// Files that the job starts from, if its plan has a warm start.
    #[serde(default)]
    pub initial: Vec<FileEntry>,
    /// Lease of the claim without a heartbeat, in milliseconds.
    pub lease_ms: u64,
    /// Addresses that outgoing requests may reach in addition to public ones.
    pub allow_outgoing: Vec<String>,
    /// Reward reports of former attempts, whose counts this attempt continues.
    #[serde(default)]
    pub reward_reports: Vec<RewardReport>,
    /// Where reward services may send late answers; null = nowhere.
    #[serde(default)]
    pub callbacks: Option<CallbackTerms>,
    /// Whether to save more often than the plan asks, because an earlier attempt was interrupted and the
    /// next one should repeat less.
    #[serde(default)]
    pub checkpoint_soon: bool,
    /// Scope of cached values of `cache: true` rewards. It is the same for all jobs of one owner, different between owners, and
    /// does not identify the owner. Null = the cache is limited to the job.
    #[serde(default)]
    pub cache_scope: Option<String>,
}

/// A checkpoint to resume from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResumePoint {
    /// Number of completed optimizer steps.
    pub step: u64,
    /// All files of the checkpoint.
    pub files: Vec<FileEntry>,
}

/// A file of a checkpoint that the worker could not fetch completely: its bytes do not match their hash, or the transfer breaks off
/// repeatedly. The server reads the file itself before it acts on the report.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DamagedFile {
    /// Number of the attempt.
    pub attempt: u64,
    /// The list in the claim that names the file.
    pub list: FileList,
    /// Step of the checkpoint to resume from, as completed optimizer steps; 0 for `initial`.
    pub step: u64,
    /// Name of the file in the list.
    pub file: String,
}

/// A list of files in a claim: `resume` or `initial`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileList {
    /// The list `resume`: the checkpoint to resume from.
    Resume,
    /// The list `initial`: the files that a job with a warm start begins with.
    Initial,
}

/// The server's result after reading a file that a worker reported.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Inspection {
    /// Whether the file is damaged.
    pub verdict: Verdict,
    /// Next older checkpoint to resume from, if the damaged file is in `resume`; null = start from the beginning.
    #[serde(default)]
    pub resume: Option<ResumePoint>,
}

/// Whether a reported file is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The server is still reading the file; ask again.
    Checking,
    /// The file on the server matches the list; the worker fetches it again.
    Whole,
    /// The file is damaged. A checkpoint to resume from has been discarded.
    Damaged,
}

/// The error for a name that is not a plain file name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a file name: 1 to 100 letters, digits, '.', '_' or '-', not beginning with '.'")]
pub struct BadFileName(String);

/// Checks that a name is a plain file name: `[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}`.
///
/// # Errors
/// Fails for a name that is not a plain file name.
pub fn check_file_name(name: &str) -> Result<(), BadFileName> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if (1..=100).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain) {
        Ok(())
    } else {
        Err(BadFileName(name.chars().take(100).collect()))
    }
}

/// A file with its size and hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FileEntry {
    /// File name, without path separators.
    pub name: String,
    /// Size of the data, in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the file's bytes, in lower-case hex.
    #[schema(value_type = String)]
    pub sha256: Sha256Digest,
}

/// Interval between a worker's heartbeats, in milliseconds. A cancel or pause request is sent in the reply and must be carried out
/// within 12 s. This leaves 7 s for the engine to stop and to save.
pub const HEARTBEAT_MS: u64 = 5_000;

/// A worker reports that it is alive, and its progress.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Number of the attempt.
    pub attempt: u64,
    /// Current phase of the training loop.
    pub phase: Phase,
    /// Reason for a wait, such as `waiting_for_reward`; null = none.
    pub status_reason: Option<String>,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Estimated seconds until the job ends; null = unknown.
    pub eta_s: Option<f64>,
    /// Resident memory of the worker process, in bytes; null = unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// The server's reply to a heartbeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// A user's request to cancel or pause the job; null = none.
    pub requested: Option<Requested>,
    /// Remaining lease, in milliseconds from now.
    pub lease_ms: u64,
    /// Bytes of uploads that this server has received from the attempt so far. They tell a worker with a slow upload that bytes are
    /// arriving, even if a proxy buffers them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub received_bytes: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Events, in the order in which they happened; appended in one transaction.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EventBatch {
    /// Number of the attempt.
    pub attempt: u64,
    /// Number of the batch within the attempt, from 0. A repeated batch is accepted and ignored.
    pub batch: u64,
    /// Events of the attempt since the last batch.
    pub events: Vec<Event>,
    /// Log lines of the attempt since the last batch.
    pub log: Vec<String>,
}

/// Publishes the uploaded files as a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Publish {
    /// Number of the attempt.
    pub attempt: u64,
    /// The uploaded files, including `manifest.json`.
    pub files: Vec<FileEntry>,
    /// Metrics of the checkpoint's step and of the last evaluation.
    pub metrics: crate::event::Metrics,
    /// Whether the checkpoint was saved only because of [`Claim::checkpoint_soon`]. The next checkpoint replaces it, and it is
    /// never the best one.
    #[serde(default)]
    pub temporary: bool,
}

/// The checkpoint that was published.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Published {
    /// Id of the checkpoint.
    pub checkpoint: CheckpointId,
}

/// An action that must not be repeated. It is recorded before it is carried out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "snake_case")]
pub enum JournalEntry {
    /// Completions that were sampled, and need not be sampled again.
    Rollout {
        /// Id of the rollout.
        rollout: RolloutId,
        /// Sampled groups, in block order.
        groups: Vec<SampledGroup>,
        /// State of each rank's sampler after the rollout, as the runtime gave it; empty for rlood's own engine, whose random
        /// numbers need no state.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        samplers: Vec<Value>,
    },
    /// A request is about to be sent. It is repeated until it is answered, always with this id and these bytes.
    Request {
        /// Id of the rollout.
        rollout: RolloutId,
        /// Name of the reward.
        reward: String,
        /// Digest of the samples, which identifies the request's content independently of its id.
        key: String,
        /// Id of the request, `rwr_…`.
        id: String,
        /// JSON body as sent, except for the token of its callback.
        body: String,
        /// Set if the answer may come later.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        later: Option<Later>,
    },
    /// The service accepted the request and will answer later, so the request is not sent again.
    Accepted {
        /// Id of the rollout.
        rollout: RolloutId,
        /// Digest of the samples in the request.
        key: String,
        /// Id of the request.
        id: String,
        /// The service's reply to the request.
        accepted: Accepted,
    },
    /// The request is answered and is never sent again.
    Answer {
        /// Id of the rollout.
        rollout: RolloutId,
        /// Digest of the samples in the request.
        key: String,
        /// Id of the request.
        id: String,
        /// Result of the reward request.
        answer: RewardAnswer,
    },
    /// The rollout's answers of this reward must not be used: they are invalid, and the job pauses until its user has fixed
    /// the service, or fails.
    Forget {
        /// Id of the rollout.
        rollout: RolloutId,
        /// Name of the reward.
        reward: String,
    },
}

/// The final result of a reward request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RewardAnswer {
    /// A response with a result for every sample, as received.
    Body {
        /// JSON body of the response.
        body: String,
    },
    /// The results received by the request's deadline. Missing samples are requested again.
    Expired {
        /// JSON body with the results received so far, in the same form as `Body`.
        body: String,
    },
    /// Status 413: the request is split in half and sent again.
    TooLarge,
    /// The service sent no usable response.
    Unusable {
        /// Stable error code in snake_case.
        code: String,
        /// Human-readable message in English.
        detail: String,
    },
}

/// Journal entries, in order. They are appended in one transaction and durable when the call returns. The call may be repeated.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JournalBatch {
    /// Number of the attempt.
    pub attempt: u64,
    /// Journal entries, in order.
    pub entries: Vec<JournalEntry>,
}

/// Journal entries that former attempts wrote since the newest checkpoint. An answered request is represented only by its answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JournalPage {
    /// Journal entries, oldest first.
    pub entries: Vec<JournalEntry>,
    /// `after` of the next page; null = this is the last page.
    pub next: Option<i64>,
}

/// Late results of reward services for requests of a job that are not answered yet.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CallbackUpdates {
    /// Late results, oldest first.
    #[serde(rename = "news")]
    pub updates: Vec<CallbackUpdate>,
    /// Value of `after` for the next call.
    pub next: i64,
}

/// One late result from a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallbackUpdate {
    /// Id of the request.
    pub request: String,
    /// Result for a sample; null = the service sends nothing more for this request.
    pub entry: Option<Entry>,
}

/// The end of an attempt.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Finish {
    /// Number of the attempt.
    pub attempt: u64,
    /// How the attempt ended.
    pub outcome: Outcome,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// All steps are done, and the last checkpoint is published.
    Succeeded,
    /// The job cannot continue.
    Failed {
        /// Why the job failed.
        failure: Failure,
    },
    /// The job was cancelled at a user's request.
    Cancelled,
    /// The job paused, at a user's request or for another reason.
    Paused {
        /// Reason: `reward_outage`, `disk_full`; null = a user's request.
        reason: Option<String>,
    },
    /// The worker shuts down. The job returns to the front of the queue, and the attempt does not count as failed.
    Requeued,
    /// Like `requeued`, because the machine is being reclaimed: a manually started worker received SIGTERM, as
    /// clouds and Kubernetes announce it.
    Preempted,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_accepted() {
        for good in ["manifest.json", "adapter_model.safetensors", "a", "_-.x"] {
            check_file_name(good).unwrap();
        }
        let long = "x".repeat(101);
        for bad in ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "ä", "a\0", long.as_str()] {
            assert!(check_file_name(bad).is_err(), "{bad:?}");
        }
    }
}
