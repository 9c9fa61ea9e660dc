//! What one try on the wire brought.

use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::HeaderMap;

use crate::signed_post::SendError;

/// What one try brought: status, headers and body, which may have broken off; or why nothing.
pub(super) type Outcome = Result<(StatusCode, HeaderMap, Result<Vec<u8>, String>), NotSent>;

/// How a timeout's words begin.
pub(super) const TIMED_OUT: &str = "no answer within";

pub(super) type Answered = (StatusCode, Option<Duration>, Result<Vec<u8>, String>);

/// Why nothing was received, and whether that is because the address is refused.
pub(super) struct NotSent(pub(super) String, pub(super) bool);

impl NotSent {
    pub(super) fn why(&self) -> &str {
        &self.0
    }

    pub(super) fn is_refused(&self) -> bool {
        self.1
    }
}

/// Why nothing is kept of an answer that is too large.
pub(super) const OVERSIZE: &str = "the answer is larger than 8 MiB";

impl From<SendError> for NotSent {
    fn from(error: SendError) -> Self {
        NotSent(error.text(), matches!(error, SendError::Refused(_)))
    }
}
