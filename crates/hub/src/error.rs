//! What can go wrong, each with what to do about it.

use std::path::PathBuf;

use rlood_types::outgoing::OutgoingError;

/// Why the hub gave no repository, no plan or no file. No message holds a token, or the query of a signed address.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Nothing may be asked.
    #[error(
        "offline mode is on (HF_HUB_OFFLINE), so {repo} cannot be downloaded: register a local folder, or switch it off"
    )]
    Offline {
        /// The repository.
        repo: String,
    },
    /// No connection, or it broke again and again without progress.
    #[error("{host} cannot be reached: {detail}")]
    Unreachable {
        /// Host and port.
        host: String,
        /// The last failure.
        detail: String,
    },
    /// The operator's rules forbid an address that the hub redirects to.
    #[error("the hub redirects to an address that is not permitted: {source}")]
    Redirect {
        /// Which rule.
        #[source]
        source: OutgoingError,
    },
    /// A redirect that no client should follow.
    #[error("the hub's redirect is refused: {0}")]
    BadRedirect(&'static str),
    /// The licence was not accepted.
    #[error("{repo} is gated: accept its licence at {page} with the account of the token{}", if *with_token { "" } else { ", and give a token (HF_TOKEN, or the header x-hub-token)" })]
    Gated {
        /// The repository.
        repo: String,
        /// Where the licence is accepted.
        page: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// Missing, or not visible without a token: the hub does not tell which.
    #[error("the hub has no {kind} {repo}, or it is private: check the name{}", if *with_token { " and what the token may read; a data set is no model and the other way round" } else { ", or give a token (HF_TOKEN, or the header x-hub-token)" })]
    NoRepository {
        /// The repository.
        repo: String,
        /// Model or data set.
        kind: &'static str,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The token is wrong or expired.
    #[error("the hub refuses the token: it is wrong or has expired; make another one in the hub's settings")]
    BadToken,
    /// No such branch, tag or commit.
    #[error("{repo} has no revision {revision:?}: give a branch, a tag or a commit that its page lists")]
    NoRevision {
        /// The repository.
        repo: String,
        /// As asked for.
        revision: String,
    },
    /// No such file.
    #[error("{repo} has no file {path:?} at this revision")]
    NoFile {
        /// The repository.
        repo: String,
        /// In the repository.
        path: String,
    },
    /// The hub took it down.
    #[error("the hub has disabled access to {repo}: use another copy of it")]
    Disabled {
        /// The repository.
        repo: String,
    },
    /// Another answer that no repetition mends.
    #[error("the hub answers {status}: {detail}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Its message, and its request id.
        detail: String,
    },
    /// The answer is not what the protocol says.
    #[error("the hub's answer is not understood: {0}")]
    NotUnderstood(String),
    /// A branch moved between two requests, or a mirror mixes revisions.
    #[error(
        "the hub answered for commit {found} when asked for {expected}: try again, or name the commit as the revision"
    )]
    CommitMoved {
        /// The commit of the plan.
        expected: String,
        /// That of the answer.
        found: String,
    },
    /// A file name that would lie outside the folder.
    #[error("{repo} holds the file name {path:?}, which is refused: it may lie outside the model's folder")]
    BadPath {
        /// The repository.
        repo: String,
        /// The name.
        path: String,
    },
    /// Nothing of it can be trained here.
    #[error("{repo} cannot be used: {why}")]
    Unusable {
        /// The repository.
        repo: String,
        /// What is wrong, and what would work.
        why: String,
    },
    /// More than the disk holds.
    #[error("{repo} needs {needed_bytes} more bytes and {} has {free_bytes} free: make room, or choose a smaller model", path.display())]
    NoSpace {
        /// The repository.
        repo: String,
        /// What is still to be downloaded.
        needed_bytes: u64,
        /// What the disk has.
        free_bytes: u64,
        /// Where.
        path: PathBuf,
    },
    /// Twice the wrong bytes.
    #[error(
        "{path} arrives damaged: its hash is {found}, the hub announces {expected}; try again later, or another mirror"
    )]
    Damaged {
        /// In the repository.
        path: String,
        /// Announced.
        expected: String,
        /// Of what came.
        found: String,
    },
    /// This machine's disk.
    #[error("cannot {doing} {}: {source}", path.display())]
    Disk {
        /// What was tried.
        doing: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl HubError {
    /// Whether the same may succeed later: the hub is not reached, or is not well.
    pub fn may_pass(&self) -> bool {
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
