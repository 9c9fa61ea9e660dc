//! Result types of one HTTP attempt.

use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::HeaderMap;

use crate::signed_post::SendError;

/// Result of one attempt: status, headers, and the body, which may have been interrupted; or the reason
/// why there was no response.
pub(super) type Outcome = Result<(StatusCode, HeaderMap, Result<Vec<u8>, String>), NotSent>;

/// Prefix of a timeout's message.
pub(super) const TIMED_OUT: &str = "no answer within";

pub(super) type Answered = (StatusCode, Option<Duration>, Result<Vec<u8>, String>);

/// Reason why there was no response, and whether the address was refused by the policy.
pub(super) struct NotSent(pub(super) String, pub(super) bool);

impl NotSent {
    pub(super) fn why(&self) -> &str {
        &self.0
    }

    pub(super) fn is_refused(&self) -> bool {
        self.1
    }
}

/// Message for an answer that is too large and was discarded.
pub(super) const OVERSIZE: &str = "the answer is larger than 8 MiB";

impl From<SendError> for NotSent {
    fn from(error: SendError) -> Self {
        NotSent(error.text(), matches!(error, SendError::Refused(_)))
    }
}
