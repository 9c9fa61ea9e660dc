//! Why a push failed.

use crate::push::PushError;
use crate::store::StoreError;

/// Why a push did not succeed.
pub(super) enum Failure {
    /// The database cannot be read or written: the push is run again.
    Store(StoreError),
    /// The push fails with this error.
    Push(PushError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { kind, id } => {
                failure("removed", format!("the {kind} {id} was removed in the meantime"))
            }
            error => Failure::Store(error),
        }
    }
}

pub(super) fn failure(code: &str, message: impl Into<String>) -> Failure {
    Failure::Push(PushError { code: code.to_owned(), message: message.into() })
}

pub(super) fn internal(cause: &str) -> Failure {
    tracing::error!(cause, "a push of a checkpoint failed");
    failure("internal", "the server could not read the checkpoint: try again, and see the server's log")
}
