//! The worker protocol: the only thing between server and worker, on one machine or over the network.
//!
//! All calls carry `Authorization: Bearer <worker token>`. Every call on a job carries the claim's `attempt`: the server
//! refuses (409 `lease_lost`) whatever comes from an attempt that no longer owns the job.
//!
//! ```text
//! POST /worker/register                                   Register      → Registered
//! POST /worker/claim                                      ClaimRequest  → 200 Claim | 204
//! GET  /worker/jobs/{id}/datasets/{dataset_id}?attempt=N  → ndjson, one record a line
//! GET  /worker/jobs/{id}/resume/{name}?attempt=N          → a file of the checkpoint named in the claim
//! GET  /worker/jobs/{id}/initial/{name}?attempt=N         → a file that the job begins with (warm start)
//! GET  /worker/jobs/{id}/models/{model}?attempt=N         → ModelFiles, held while the server hashes them
//! GET  /worker/jobs/{id}/models/{model}/{name}?attempt=N  → a file of one of the job's models
//! POST /worker/jobs/{id}/damaged                          DamagedFile   → Inspection, held while the server reads the file
//! POST /worker/jobs/{id}/heartbeat                        Heartbeat     → HeartbeatReply
//! POST /worker/jobs/{id}/events                           EventBatch    → 204
//! PUT  /worker/jobs/{id}/checkpoints/{step}/{name}?attempt=N   bytes    → 204
//! POST /worker/jobs/{id}/checkpoints/{step}               Publish       → Published
//! GET  /worker/jobs/{id}/journal/{after}?attempt=N        → JournalPage
//! POST /worker/jobs/{id}/journal                          JournalBatch  → 204, durable
//! POST /worker/jobs/{id}/rewards                          RewardReports → 204
//! GET  /worker/jobs/{id}/callbacks/{after}?attempt=N      → CallbackNews, held while there are none
//! POST /worker/jobs/{id}/finish                           Finish        → 204
//! ```
//!
//! Files are sent whole, or from the byte that the header `Range: bytes=N-` names. A server from before `models` answers 404:
//! its workers find the models at the same paths.
//!
//! # Its number
//!
//! The rule: what is new here or in the plan (a field, a value, another meaning) comes with a new [`PROTOCOL`], in the same
//! commit. A worker that does not know a setting would train without it and call that a success.
//!
//! - `Register`, `ClaimRequest` and `Registered` carry the number. Whoever says none says 1, the first one.
//!   The server registers no worker of another number and hands it no job (409 `protocol_mismatch`); a worker leaves a server
//!   of another number. Both say what to update. The server's own workers are its own binary, and have its number.
//! - A job that runs while its server is updated goes on: its worker understood the plan when it took the job. Fields that are
//!   sent about a running attempt therefore keep a default, and are refused for nothing.
//! - A number that somebody forgot to raise shows: [`read_claim`] refuses what it does not know, and the worker gives the job
//!   back and leaves; before that, `tests/it/protocol.rs` compares the fields of plan and claim with those on record.
//! - A database is not a peer: plans of older versions lack fields (each has a default that means what was done before it),
//!   and what they hold that is gone since is dropped before they are sent.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::callback::{Accepted, CallbackTerms, Entry, Later};
use crate::digest::Sha256Digest;
use crate::event::{Event, Phase};
use crate::id::{CheckpointId, JobId, WorkerId};
use crate::job::{Failure, Requested};
use crate::sample::{RolloutId, SampledGroup};
use crate::spec::{Plan, RewardSecrets};

mod claim;
mod models;
mod rewards;

pub use claim::{ClaimError, read_claim};
pub use models::ModelFiles;
pub use rewards::*;

/// The number of this protocol, the plan included; see the rule above.
pub const PROTOCOL: u32 = 5;

/// How long a transfer between server and worker may stand still, on either side: it ends when no byte has flowed for this
/// long, however long it takes in all.
pub const TRANSFER_STALL: Duration = Duration::from_secs(60);

/// Of whoever says none.
const fn first_protocol() -> u32 {
    1
}

/// A worker introduces itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Register {
    /// Chosen by the worker.
    pub worker: WorkerId,
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// Process id on its machine.
    pub pid: u32,
    /// Compute threads it will use.
    pub threads: u32,
    /// Its rlood version.
    pub version: String,
    /// Started by the server itself: it ends when the server does.
    #[serde(default)]
    pub child: bool,
    /// [`PROTOCOL`], as it knows it.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
    /// The processor's kernels; null of a worker on a GPU, and of a worker that is older than this field.
    #[serde(default)]
    pub kernels: Option<KernelFacts>,
}

/// Which kernels a worker on the processor uses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KernelFacts {
    /// The instruction set, as `--isa` names it: the one that was asked for, or the fastest by what was measured.
    #[schema(example = "avx512_bf16")]
    pub isa: String,
    /// How many times the rate of avx512 the bf16 instructions of AVX-512 reached when the worker started; null where the
    /// processor has none. `auto` takes them from 1.3 on.
    #[schema(example = 1.98)]
    pub avx512_bf16_gain: Option<f64>,
}

/// What the server tells a new worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Registered {
    /// Between heartbeats, ms.
    pub heartbeat_ms: u64,
    /// Of a claim without heartbeat, ms.
    pub lease_ms: u64,
    /// [`PROTOCOL`], as the server knows it.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
}

/// Asks for work; the server may hold the call for up to `wait_ms`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClaimRequest {
    /// Who asks.
    pub worker: WorkerId,
    /// Longest wait, ms.
    pub wait_ms: u64,
    /// [`PROTOCOL`], as the worker knows it: its server may be another one since it registered.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
}

/// The right to run a job and to write about it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Claim {
    /// The job.
    pub job: JobId,
    /// Who holds it.
    pub worker: WorkerId,
    /// The fence.
    pub attempt: u64,
    /// What to do.
    pub plan: Plan,
    /// By reward name.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// Where the model lies on the server. A worker uses what lies there on its own machine when it is the plan's model, byte
    /// for byte; else it fetches the files from the server.
    pub model_path: String,
    /// `base_model_name_or_path` of the adapter.
    pub model_name: String,
    /// Where reward models lie on the server, by their ids; as `model_path`.
    #[serde(default)]
    pub reward_models: BTreeMap<String, String>,
    /// Newest published checkpoint, if any.
    pub resume: Option<ResumePoint>,
    /// What the job begins with, when its plan has a warm start.
    #[serde(default)]
    pub initial: Vec<FileEntry>,
    /// Of the claim without heartbeat, ms.
    pub lease_ms: u64,
    /// Which addresses outgoing requests may reach.
    pub allow_outgoing: Vec<String>,
    /// What former attempts told of the rewards: the counts go on from there.
    #[serde(default)]
    pub reward_reports: Vec<RewardReport>,
    /// Where reward services may answer later.
    #[serde(default)]
    pub callbacks: Option<CallbackTerms>,
    /// An earlier attempt was interrupted: save more often than the plan asks, so that the next one repeats less.
    #[serde(default)]
    pub checkpoint_soon: bool,
    /// Jobs of one owner have the same one, those of others another: values of `cache: true` rewards are used again within it
    /// only. It names nobody. Null = within the job only.
    #[serde(default)]
    pub cache_scope: Option<String>,
}

/// A checkpoint to go on from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResumePoint {
    /// Optimizer steps done.
    pub step: u64,
    /// All its files.
    pub files: Vec<FileEntry>,
}

/// A file of a checkpoint that the worker could not fetch whole: its bytes do not match their hash, or the transfer breaks off
/// again and again. The server reads the file itself before it believes that.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DamagedFile {
    /// The fence.
    pub attempt: u64,
    /// Which of the claim's lists the file stands in.
    pub list: FileList,
    /// Optimizer steps of the checkpoint to go on from; 0 for `initial`.
    pub step: u64,
    /// The file's name in the list.
    pub file: String,
}

/// A list of files in a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileList {
    /// `resume`: the checkpoint to go on from.
    Resume,
    /// `initial`: what a job with a warm start begins with.
    Initial,
}

/// What the server found when it read a file that a worker reported.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Inspection {
    /// What was found.
    pub verdict: Verdict,
    /// Of a damaged file in `resume`: the next older checkpoint to go on from; null = from the beginning.
    #[serde(default)]
    pub resume: Option<ResumePoint>,
}

/// What the server found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The server is still reading the file: ask again.
    Checking,
    /// The file is as listed: fetch it again.
    Whole,
    /// The file is damaged. A checkpoint to go on from is discarded by now.
    Damaged,
}

/// A name that is not a plain file name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a file name: 1 to 100 letters, digits, '.', '_' or '-', not beginning with '.'")]
pub struct BadFileName(String);

/// Accepts a plain file name: `[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}`.
///
/// # Errors
/// It is another.
pub fn check_file_name(name: &str) -> Result<(), BadFileName> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if (1..=100).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain) {
        Ok(())
    } else {
        Err(BadFileName(name.chars().take(100).collect()))
    }
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FileEntry {
    /// No path separators.
    pub name: String,
    /// Bytes.
    pub size_bytes: u64,
    /// Lower-case hex.
    #[schema(value_type = String)]
    pub sha256: Sha256Digest,
}

/// Between a worker's heartbeats, ms. A cancel or pause travels in the reply and is honoured within 12 s of the request:
/// this leaves 7 s for the engine to stop and to save.
pub const HEARTBEAT_MS: u64 = 5_000;

/// I am alive, and this is where I am.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The fence.
    pub attempt: u64,
    /// Where the loop is.
    pub phase: Phase,
    /// `waiting_for_reward`, say; null = nothing special.
    pub status_reason: Option<String>,
    /// Optimizer steps done.
    pub step: u64,
    /// Seconds to go, if known.
    pub eta_s: Option<f64>,
    /// Resident memory of the worker process, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// What the owner must know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// A user's wish.
    pub requested: Option<Requested>,
    /// From now, ms.
    pub lease_ms: u64,
    /// Bytes of uploads that this server has received from the attempt so far: a worker whose upload is slow sees by it that
    /// the bytes flow, wherever on the way they are buffered.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub received_bytes: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Events, in the order they happened; appended in one transaction.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EventBatch {
    /// The fence.
    pub attempt: u64,
    /// Counts batches of this attempt from 0: a repeated batch is accepted and ignored.
    pub batch: u64,
    /// The events.
    pub events: Vec<Event>,
    /// Log lines since the last batch.
    pub log: Vec<String>,
}

/// All files are uploaded: make them a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Publish {
    /// The fence.
    pub attempt: u64,
    /// The uploaded files, `manifest.json` among them.
    pub files: Vec<FileEntry>,
    /// Metrics of its step (and the last evaluation's).
    pub metrics: crate::event::Metrics,
    /// Saved only because of [`Claim::checkpoint_soon`]: the next checkpoint replaces it, and it is never the best.
    #[serde(default)]
    pub temporary: bool,
}

/// The published checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Published {
    /// Its id.
    pub checkpoint: CheckpointId,
}

/// One thing that must not happen twice, written down before it is acted on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "snake_case")]
pub enum JournalEntry {
    /// These completions were sampled.
    Rollout {
        /// Which sampling.
        rollout: RolloutId,
        /// In block order.
        groups: Vec<SampledGroup>,
    },
    /// This is sent next, until it is answered: always under this id, always these bytes.
    Request {
        /// For which sampling.
        rollout: RolloutId,
        /// Of which reward.
        reward: String,
        /// What is asked, whatever the id: a digest of the samples.
        key: String,
        /// `rwr_…`
        id: String,
        /// JSON, as sent, but for the token of its callback.
        body: String,
        /// Its answer may come later.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        later: Option<Later>,
    },
    /// The service took the request and answers later: it is not sent again.
    Accepted {
        /// For which sampling.
        rollout: RolloutId,
        /// The request's.
        key: String,
        /// The request's.
        id: String,
        /// What it said.
        accepted: Accepted,
    },
    /// The request is answered: it is never sent again.
    Answer {
        /// For which sampling.
        rollout: RolloutId,
        /// The request's.
        key: String,
        /// The request's.
        id: String,
        /// What came of it.
        answer: RewardAnswer,
    },
    /// The rollout's answers of this reward are not used: invalid ones pause the job until its user has seen to the service, or
    /// fail it.
    Forget {
        /// Which sampling.
        rollout: RolloutId,
        /// Which reward.
        reward: String,
    },
}

/// What came of a reward request, for good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RewardAnswer {
    /// An answer that says something of every sample, as received.
    Body {
        /// JSON.
        body: String,
    },
    /// What had come by the request's deadline: what is missing is asked for again.
    Expired {
        /// JSON, as `Body`.
        body: String,
    },
    /// 413: asked for in halves.
    TooLarge,
    /// No answer that can be used.
    Unusable {
        /// Stable, snake_case.
        code: String,
        /// For people.
        detail: String,
    },
}

/// Entries, in order; appended in one transaction and durable when the call returns. May be repeated.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JournalBatch {
    /// The fence.
    pub attempt: u64,
    /// The entries.
    pub entries: Vec<JournalEntry>,
}

/// What former attempts wrote since the newest checkpoint; an answered request only with its answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JournalPage {
    /// In the order they came.
    pub entries: Vec<JournalEntry>,
    /// `after` of the next page; null = this is the last one.
    pub next: Option<i64>,
}

/// What reward services sent for requests of a job that are not answered yet.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CallbackNews {
    /// In the order they came.
    pub news: Vec<News>,
    /// `after` of the next call.
    pub next: i64,
}

/// One thing that a service sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct News {
    /// For which request.
    pub request: String,
    /// What; null = that nothing else comes.
    pub entry: Option<Entry>,
}

/// How an attempt ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Finish {
    /// The fence.
    pub attempt: u64,
    /// How.
    pub outcome: Outcome,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// All steps done, the last checkpoint published.
    Succeeded,
    /// It cannot go on.
    Failed {
        /// Why.
        failure: Failure,
    },
    /// As the user asked.
    Cancelled,
    /// As the user asked, or for a reason of its own.
    Paused {
        /// `reward_outage`, `disk_full`; null = the user's wish.
        reason: Option<String>,
    },
    /// The worker goes away; the job goes back to the front of the queue, no attempt charged.
    Requeued,
    /// The same, because the machine is taken away: SIGTERM to a worker started by hand, as clouds and Kubernetes announce it.
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
