//! Why a call of the worker protocol failed, and which of these are worth another try.

use std::time::Duration;

use super::held::Held;
use crate::protocol::ClaimError;

/// Why the server did not do what a worker asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Another attempt owns the job, or nobody.
    #[error("the claim is lost")]
    LeaseLost,
    /// The token is not the server's.
    #[error("the server refuses the worker token; set RLOOD_WORKER_TOKEN to the server's")]
    Unauthorized,
    /// The server's disk is full, or a limit of the server's is reached.
    #[error("the server stores nothing more: {detail}")]
    StorageFull {
        /// The problem's text.
        detail: String,
    },
    /// Another try makes no difference.
    #[error("the server refuses the call ({status} {code}): {detail}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// The problem's code.
        code: String,
        /// The problem's text.
        detail: String,
    },
    /// The server is busy or in trouble.
    #[error("the server answers {0}")]
    Unavailable(u16),
    /// No answer.
    #[error("the server cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    /// The answer broke off before its end.
    #[error("the server's answer broke off")]
    Interrupted(#[source] reqwest::Error),
    /// Nothing moved for too long.
    #[error("no byte has flowed for {} s", .limit.as_secs())]
    Stalled {
        /// For how long.
        limit: Duration,
    },
    /// The answer is not what the protocol says.
    #[error("the server's answer is not understood; are both of the same version?")]
    Protocol(#[source] serde_json::Error),
    /// One of the two is of another version.
    #[error("{0}")]
    OtherProtocol(String),
    /// A job was handed out that this version does not understand.
    #[error("the job is not understood; update this worker to the rlood of the server")]
    Claim {
        /// The claim, as far as it can be read.
        held: Option<Box<Held>>,
        /// What is not understood.
        #[source]
        source: ClaimError,
    },
    /// The local disk.
    #[error("cannot {doing}")]
    Disk {
        /// What was tried.
        doing: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// What arrived is not what was announced.
    #[error("{name} arrived damaged: its sha256 differs")]
    Damaged {
        /// The file.
        name: String,
    },
}

impl ClientError {
    /// The same call may succeed later.
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
