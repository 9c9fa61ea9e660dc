//! The identity of a claim.

use serde_json::Value;

use crate::id::JobId;

/// A claim, as the calls name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The job.
    pub(super) job: JobId,
    /// The fence.
    pub(super) attempt: u64,
}

impl Held {
    pub(super) fn named_in(claim: &Value) -> Option<Self> {
        Some(Self { job: claim.get("job")?.as_str()?.parse().ok()?, attempt: claim.get("attempt")?.as_u64()? })
    }
}
