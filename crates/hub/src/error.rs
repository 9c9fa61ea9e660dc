//! Errors of the Hub client. Each message says what to do.

use std::path::PathBuf;

use rlood_types::outgoing::OutgoingError;

/// Reason why a repository or a file of the Hub is not available. No message contains a token or the query of a signed URL.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Offline mode forbids all requests.
    #[error(
        "offline mode is on (HF_HUB_OFFLINE), so {repo} cannot be downloaded, and the local cache does not have all its files: register a local folder or upload a file, or turn offline mode off"
    )]
    Offline {
        /// Id of the repository.
        repo: String,
    },
    /// The connection to the Hub could not be opened, or repeatedly broke without progress.
    #[error("{host} cannot be reached: {detail}")]
    Unreachable {
        /// Host and port of the server.
        host: String,
        /// Error message of the last attempt.
        detail: String,
    },
    /// The policy for outgoing addresses forbids the target of a redirect.
    #[error("the hub redirects to an address that is not permitted: {source}")]
    Redirect {
        /// The rule of the policy that forbids the address.
        #[source]
        source: OutgoingError,
    },
    /// The Hub's answer is a redirect that is not safe to follow; the text says why.
    #[error("the hub's redirect is refused: {0}")]
    BadRedirect(&'static str),
    /// The repository is gated, and the user has not accepted its license.
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
    #[error("the hub has no {kind} {repo}, or it is private: check the name{}", if *with_token { " and the token's permissions; a dataset cannot be used as a model, or a model as a dataset" } else { ", or provide a token (HF_TOKEN, or the header x-hub-token)" })]
    NoRepository {
        /// Id of the repository.
        repo: String,
        /// Kind of the repository: model or dataset.
        kind: &'static str,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The repository exists, but its kind is not the requested one.
    #[error("{repo} is a {found}, not a {wanted}: {}", advice(found))]
    WrongKind {
        /// Id of the repository.
        repo: String,
        /// Kind of the repository that has this id: model or dataset.
        found: &'static str,
        /// Kind that was requested.
        wanted: &'static str,
    },
    /// The Hub's access token is wrong or expired.
    #[error("the hub rejects the token: it is wrong or has expired; create a new one in the hub's settings")]
    BadToken,
    /// The repository has no such branch, tag or commit.
    #[error("{repo} has no revision {revision:?}: must be a branch, a tag or a commit listed on its page")]
    NoRevision {
        /// Id of the repository.
        repo: String,
        /// The revision as it was requested.
        revision: String,
    },
    /// The repository has no such file at this revision.
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
    /// Any other error answer of the Hub that a retry would not fix.
    #[error("the hub answers {status}: {detail}")]
    Refused {
        /// HTTP status code of the response.
        status: u16,
        /// The Hub's message and request id.
        detail: String,
    },
    /// The Hub's answer does not follow its API.
    #[error("cannot parse the hub's answer: {0}")]
    NotUnderstood(String),
    /// The Hub answered with another commit than requested: a branch moved between two requests, or a mirror mixes revisions.
    #[error("the hub answered with commit {found} instead of {expected}: try again, or use the commit as the revision")]
    CommitMoved {
        /// The commit that was requested.
        expected: String,
        /// The commit that the Hub's answer names.
        found: String,
    },
    /// The repository has a file name that would lead outside of the download folder.
    #[error("{repo} contains the file name {path:?}, which is rejected because it may lead outside the model's folder")]
    BadPath {
        /// Id of the repository.
        repo: String,
        /// The rejected file name.
        path: String,
    },
    /// The repository contains no model that can be trained.
    #[error("{repo} cannot be used: {why}")]
    Unusable {
        /// Id of the repository.
        repo: String,
        /// Why the repository cannot be used, and what to use instead.
        why: String,
    },
    /// The disk has too little space for the download.
    #[error("{repo} needs {needed_bytes} more bytes and {} has {free_bytes} free: free up disk space, or choose a smaller model", path.display())]
    NoSpace {
        /// Id of the repository.
        repo: String,
        /// Bytes that are still to be downloaded.
        needed_bytes: u64,
        /// Free bytes on the disk.
        free_bytes: u64,
        /// Download folder on that disk.
        path: PathBuf,
    },
    /// A file was downloaded twice with a wrong hash.
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
    /// Offline mode forbids a push.
    #[error("offline mode is on (HF_HUB_OFFLINE), so nothing can be pushed to {repo}: turn offline mode off")]
    OfflinePush {
        /// Id of the repository.
        repo: String,
    },
    /// A push has no token.
    #[error(
        "a push to {repo} needs a token of the hub with write permission: set HF_TOKEN, or send the header x-hub-token"
    )]
    NoToken {
        /// Id of the repository.
        repo: String,
    },
    /// The token may not create the repository or write to it.
    #[error("{} (the hub says: {detail})", refused_write(repo, *exists))]
    MayNotWrite {
        /// Id of the repository.
        repo: String,
        /// Whether the repository exists.
        exists: bool,
        /// The Hub's message.
        detail: String,
    },
    /// The account has no storage left on the Hub.
    #[error(
        "the hub has no room for {repo}: free up or buy storage there, or push to another account (the hub says: {detail})"
    )]
    NoRoom {
        /// Id of the repository.
        repo: String,
        /// The Hub's message.
        detail: String,
    },
    /// The repository holds something else than what is pushed.
    #[error(
        "{repo} already holds another kind of model (it has the file {path}): push to another repository or revision"
    )]
    OtherContent {
        /// Id of the repository.
        repo: String,
        /// The file that shows it.
        path: String,
    },
    /// The repository is public, but a private one was requested.
    #[error(
        "{repo} exists and is public, but a private repository was requested: make it private in its settings, or choose another name"
    )]
    Public {
        /// Id of the repository.
        repo: String,
    },
    /// A file on this machine changed during the push.
    #[error("{path} changed during the push: push again")]
    Changed {
        /// Path in the repository.
        path: String,
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

/// Returns where a repository of this kind can be used.
fn advice(found: &str) -> &'static str {
    match found {
        "dataset" => "give a model here, and this id as a dataset, {\"hub\": \"org/name\"}",
        _ => "give a dataset here, and this id as the model",
    }
}

/// Returns why a repository cannot be written to, and what to do.
fn refused_write(repo: &str, exists: bool) -> String {
    match exists {
        true => format!(
            "the token may not write to {repo}: use a token with write permission, or another name if the repository belongs to another account"
        ),
        false => format!(
            "the token may not create {repo}: use a token with write permission, of an account that may create repositories in {}",
            repo.split('/').next().unwrap_or(repo)
        ),
    }
}

impl HubError {
    /// Returns whether the download or push may succeed later, because the Hub is unreachable or overloaded.
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
