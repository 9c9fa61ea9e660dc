//! Result types of one attempt to send an HTTP request to a reward service.

use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::HeaderMap;

use crate::signed_post::SendError;

/// Result of one attempt to send a request: status, headers, and the body, which may have been interrupted; or the reason why
/// there was no response.
pub(super) type Outcome = Result<(StatusCode, HeaderMap, Result<Vec<u8>, String>), NotSent>;

/// First words of the error message of a timeout.
pub(super) const TIMED_OUT: &str = "no answer within";

pub(super) type Answered = (StatusCode, Option<Duration>, Result<Vec<u8>, String>);

/// Reason why there was no response, and whether the policy for outgoing addresses forbids the address.
pub(super) struct NotSent(pub(super) String, pub(super) bool);

impl NotSent {
    pub(super) fn why(&self) -> &str {
        &self.0
    }

    pub(super) fn is_refused(&self) -> bool {
        self.1
    }
}

/// Error message for an answer that is too large and was discarded.
pub(super) const OVERSIZE: &str = "the answer is larger than 8 MiB";

impl From<SendError> for NotSent {
    fn from(error: SendError) -> Self {
        NotSent(error.text(), matches!(error, SendError::Refused(_)))
    }
}
