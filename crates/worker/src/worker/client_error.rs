//! Errors of calls to the server by the worker protocol, and which of them can be retried.

use std::time::Duration;

use super::claim_ref::ClaimRef;
use crate::protocol::ClaimError;

/// Reason why a call of the worker protocol failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// This worker's claim on the job is lost: another attempt has the job, or the job has ended.
    #[error("the worker has lost its claim on the job")]
    LeaseLost,
    /// The worker token is wrong.
    #[error("the server rejects the worker token; set RLOOD_WORKER_TOKEN to the server's token")]
    Unauthorized,
    /// The server's disk is full, or a storage limit of the server is reached.
    #[error("the server's storage is full: {detail}")]
    StorageFull {
        /// Detail of the error response.
        detail: String,
    },
    /// The server rejected the call, and a retry would not help.
    #[error("the server rejected the worker's call ({status} {code}): {detail}")]
    Refused {
        /// HTTP status code of the response.
        status: u16,
        /// Error code of the response.
        code: String,
        /// Detail of the error response.
        detail: String,
    },
    /// The server is overloaded or failing.
    #[error("the server answered with status {0}")]
    Unavailable(u16),
    /// The server did not answer.
    #[error("the server cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    /// The server's answer was interrupted.
    #[error("the server's answer was interrupted")]
    Interrupted(#[source] reqwest::Error),
    /// During a transfer, no byte arrived for too long.
    #[error("no byte was transferred for {} s", .limit.as_secs())]
    Stalled {
        /// Time without a byte, after which the transfer was given up.
        limit: Duration,
    },
    /// The server's answer does not follow the worker protocol.
    #[error("cannot parse the server's answer; check that worker and server have the same version")]
    Protocol(#[source] serde_json::Error),
    /// Worker and server have different protocol versions.
    #[error("{0}")]
    OtherProtocol(String),
    /// The claimed job uses features that this version does not know.
    #[error("cannot parse the job; update this worker to the server's version")]
    Claim {
        /// Job and attempt, if they can be parsed, so that the job can be returned to the queue.
        claim_ref: Option<Box<ClaimRef>>,
        /// Error about the part of the job that cannot be parsed.
        #[source]
        source: ClaimError,
    },
    /// A file operation on the worker's disk failed.
    #[error("cannot {doing}")]
    Disk {
        /// Name of the operation that failed.
        doing: &'static str,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The hash of a downloaded file is wrong.
    #[error("{name} is corrupted after download: its sha256 differs")]
    Damaged {
        /// Name of the damaged file.
        name: String,
    },
}

impl ClientError {
    /// Returns whether a retry of the call may succeed.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            ClientError::Unavailable(_)
            | ClientError::Unreachable(_)
            | ClientError::Interrupted(_)
            | ClientError::Stalled { .. }
            | ClientError::StorageFull { .. } => true,
            ClientError::Damaged { .. }
            | ClientError::LeaseLost
            | ClientError::Unauthorized
            | ClientError::Refused { .. }
            | ClientError::Protocol(_)
            | ClientError::OtherProtocol(_)
            | ClientError::Claim { .. }
            | ClientError::Disk { .. } => false,
        }
    }
}
