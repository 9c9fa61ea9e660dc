//! Identifies a claim: a job that the server has assigned to a worker for one attempt.

use serde_json::Value;

use crate::id::JobId;

/// The job and the number of the attempt, which together identify a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimRef {
    /// Id of the job.
    pub(super) job: JobId,
    /// Number of the attempt, by which the server rejects calls of earlier attempts (a fencing token).
    pub(super) attempt: u64,
}

impl ClaimRef {
    pub(super) fn named_in(claim: &Value) -> Option<Self> {
        Some(Self { job: claim.get("job")?.as_str()?.parse().ok()?, attempt: claim.get("attempt")?.as_u64()? })
    }
}
