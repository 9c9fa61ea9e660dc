//! Errors of the Hub client. Each message says what to do.

use std::path::PathBuf;

use rlood_types::outgoing::OutgoingError;

/// Reason why a repository, a plan or a file is not available. No message contains a token or the query of a signed URL.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Offline mode forbids all requests.
    #[error(
        "offline mode is on (HF_HUB_OFFLINE), so {repo} cannot be downloaded: register a local folder, or turn offline mode off"
    )]
    Offline {
        /// Id of the repository.
        repo: String,
    },
    /// The connection could not be opened, or repeatedly broke without progress.
    #[error("{host} cannot be reached: {detail}")]
    Unreachable {
        /// Host and port of the server.
        host: String,
        /// Message of the last failure.
        detail: String,
    },
    /// The outgoing address policy forbids the target of a redirect.
    #[error("the hub redirects to an address that is not permitted: {source}")]
    Redirect {
        /// The rule that forbids the address.
        #[source]
        source: OutgoingError,
    },
    /// A redirect that no client should follow.
    #[error("the hub's redirect is refused: {0}")]
    BadRedirect(&'static str),
    /// The license was not accepted.
    #[error("{repo} is gated: accept its license at {page} with the account of the token{}", if *with_token { "" } else { ", and provide a token (HF_TOKEN, or the header x-hub-token)" })]
    Gated {
        /// Id of the repository.
        repo: String,
        /// Page on which the license can be accepted.
        page: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The repository does not exist, or is not visible without a token. The Hub does not distinguish the two.
    #[error("the hub has no {kind} {repo}, or it is private: check the name{}", if *with_token { " and the token's permissions; a dataset is not a model and vice versa" } else { ", or provide a token (HF_TOKEN, or the header x-hub-token)" })]
    NoRepository {
        /// Id of the repository.
        repo: String,
        /// Kind of the repository: model or dataset.
        kind: &'static str,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The token is wrong or expired.
    #[error("the hub rejects the token: it is wrong or has expired; create a new one in the hub's settings")]
    BadToken,
    /// The branch, tag or commit does not exist.
    #[error("{repo} has no revision {revision:?}: must be a branch, a tag or a commit listed on its page")]
    NoRevision {
        /// Id of the repository.
        repo: String,
        /// The revision as it was requested.
        revision: String,
    },
    /// The file does not exist.
    #[error("{repo} has no file {path:?} at this revision")]
    NoFile {
        /// Id of the repository.
        repo: String,
        /// Path in the repository.
        path: String,
    },
    /// The Hub disabled access to the repository.
    #[error("the hub has disabled access to {repo}: use another copy of it")]
    Disabled {
        /// Id of the repository.
        repo: String,
    },
    /// Any other error that a retry would not fix.
    #[error("the hub answers {status}: {detail}")]
    Refused {
        /// HTTP status code of the response.
        status: u16,
        /// The Hub's message and request id.
        detail: String,
    },
    /// The answer does not follow the protocol.
    #[error("cannot parse the hub's answer: {0}")]
    NotUnderstood(String),
    /// A branch moved between two requests, or a mirror mixes revisions.
    #[error("the hub answered with commit {found} instead of {expected}: try again, or use the commit as the revision")]
    CommitMoved {
        /// Commit of the plan.
        expected: String,
        /// Commit of the answer.
        found: String,
    },
    /// A file name that leads outside of the folder.
    #[error("{repo} contains the file name {path:?}, which is rejected because it may lead outside the model's folder")]
    BadPath {
        /// Id of the repository.
        repo: String,
        /// The rejected file name.
        path: String,
    },
    /// The repository contains nothing that can be trained.
    #[error("{repo} cannot be used: {why}")]
    Unusable {
        /// Id of the repository.
        repo: String,
        /// The problem, and what to use instead.
        why: String,
    },
    /// The disk has too little space.
    #[error("{repo} needs {needed_bytes} more bytes and {} has {free_bytes} free: free up disk space, or choose a smaller model", path.display())]
    NoSpace {
        /// Id of the repository.
        repo: String,
        /// Bytes that are still to be downloaded.
        needed_bytes: u64,
        /// Free bytes on the disk.
        free_bytes: u64,
        /// Folder on that disk.
        path: PathBuf,
    },
    /// The file arrived with a wrong hash twice.
    #[error(
        "{path} is corrupted after download: its hash is {found}, expected {expected}; try again later, or use another mirror"
    )]
    Damaged {
        /// Path in the repository.
        path: String,
        /// Hash that the Hub announced.
        expected: String,
        /// Hash of the downloaded bytes.
        found: String,
    },
    /// A file operation on this machine failed.
    #[error("cannot {doing} {}: {source}", path.display())]
    Disk {
        /// Name of the operation that failed.
        doing: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
}

impl HubError {
    /// Returns whether a retry may succeed later: the Hub is unreachable or overloaded.
    pub fn is_transient(&self) -> bool {
        match self {
            HubError::Unreachable { .. } => true,
            HubError::Refused { status, .. } => matches!(status, 408 | 429 | 500..),
            _ => false,
        }
    }

    pub(crate) fn disk(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> HubError {
        let path = path.into();
        move |source| HubError::Disk { doing, path, source }
    }
}
