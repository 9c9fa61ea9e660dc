//! Errors: [`Error`], the reason why a call failed, and [`Problem`], the server's error document.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use rlood_types::spec::FieldError;
use serde::Deserialize;

/// Maximum number of characters shown of a body that is not a problem document.
const MAX_SHOWN_CHARACTERS: usize = 200;

/// Why a call failed. `request` is its method and path.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address of the server, or a setting of the client, cannot be used.
    #[error("{0}")]
    Settings(String),
    /// The server answered with an error.
    #[error("{request}: {problem}")]
    Refused {
        /// Method and path of the request.
        request: String,
        /// The server's error document.
        problem: Box<Problem>,
    },
    /// The request was not answered.
    #[error("{request}: no response")]
    Unreachable {
        /// Method and path of the request.
        request: String,
        /// The cause of the error.
        #[source]
        source: reqwest::Error,
    },
    /// The response broke off before its end.
    #[error("{request}: the response ended early")]
    Interrupted {
        /// Method and path of the request.
        request: String,
        /// The cause of the error, if the connection reported one.
        #[source]
        source: Option<reqwest::Error>,
    },
    /// No byte arrived for too long.
    #[error("{request}: no data arrived from the server for {} s", .limit.as_secs_f64())]
    Stalled {
        /// Method and path of the request.
        request: String,
        /// The time limit that was exceeded.
        limit: Duration,
    },
    /// The response does not match the API: another version, or a different server.
    #[error("{request}: the response does not match the API: {detail}")]
    NotUnderstood {
        /// Method and path of the request.
        request: String,
        /// How the response differs.
        detail: String,
    },
    /// The data differed from its announced size or hash, several times.
    #[error("{request}: the downloaded data is damaged: {detail}")]
    Damaged {
        /// Method and path of the request.
        request: String,
        /// How the data differs.
        detail: String,
    },
    /// An operation on the local disk failed.
    #[error("cannot {doing}")]
    Disk {
        /// The operation, as in "cannot …".
        doing: String,
        /// The cause of the error.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// Returns the server's error document, if it answered with an error.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Error::Refused { problem, .. } => Some(problem),
            Error::Settings(_)
            | Error::Unreachable { .. }
            | Error::Interrupted { .. }
            | Error::Stalled { .. }
            | Error::NotUnderstood { .. }
            | Error::Damaged { .. }
            | Error::Disk { .. } => None,
        }
    }

    /// Returns the code of the server's problem document; empty if there is none.
    pub fn code(&self) -> &str {
        self.problem().map_or("", |problem| &problem.code)
    }

    /// Returns the HTTP status, if the server answered with an error.
    pub fn status(&self) -> Option<u16> {
        self.problem().map(|problem| problem.status)
    }

    /// Whether the same call may succeed later without a change. The client has already retried it several times.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Refused { problem, .. } => problem.retryable,
            Error::Unreachable { .. } | Error::Interrupted { .. } | Error::Stalled { .. } => true,
            Error::Settings(_) | Error::NotUnderstood { .. } | Error::Damaged { .. } | Error::Disk { .. } => false,
        }
    }

    pub(crate) fn disk(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let doing = doing.into();
        move |source| Error::Disk { doing, source }
    }
}

/// The server's error document for a rejected request (RFC 9457).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Problem {
    /// HTTP status of the response.
    pub status: u16,
    /// Stable error code from the server's table; empty if another server answered.
    pub code: String,
    /// Human-readable title, the same for every occurrence of the code.
    pub title: String,
    /// Human-readable explanation of this occurrence, and what to do.
    pub detail: String,
    /// Id of the request in the server's log.
    pub request_id: String,
    /// Whether the same request may succeed later without a change.
    pub retryable: bool,
    /// All errors, each with its location in the request.
    pub errors: Vec<FieldError>,
    /// Delay that the server requests before a retry.
    #[serde(skip)]
    pub retry_after: Option<Duration>,
}

impl Problem {
    /// Reads the body of an error. A body that is not a problem document (such as a proxy's page) is shown in part.
    pub(crate) fn read(status: u16, headers: &HeaderMap, body: &[u8]) -> Self {
        let problem = serde_json::from_slice::<Problem>(body).ok().filter(|problem| !problem.code.is_empty());
        let problem = problem.or_else(|| OpenAiError::read(status, body));
        let mut problem = problem.unwrap_or_else(|| {
            let detail = String::from_utf8_lossy(body).chars().take(MAX_SHOWN_CHARACTERS).collect();
            let retryable = matches!(status, 408 | 425 | 429 | 500 | 502..=504);
            Problem { detail, retryable, ..Problem::default() }
        });
        problem.status = status;
        problem.retry_after = headers.get(RETRY_AFTER).and_then(|value| parse_retry_after(value.to_str().ok()?));
        problem
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status, self.detail)?;
        self.errors.iter().try_for_each(|error| write!(f, "\n  {}: {}", error.pointer, error.detail))
    }
}

/// An error of a route under `/v1`, in OpenAI's form.
#[derive(Deserialize)]
struct OpenAiError {
    error: OpenAiErrorBody,
}

#[derive(Deserialize)]
struct OpenAiErrorBody {
    message: String,
    #[serde(default)]
    param: Option<String>,
    #[serde(default)]
    code: Option<String>,
}

impl OpenAiError {
    fn read(status: u16, body: &[u8]) -> Option<Problem> {
        let OpenAiError { error: OpenAiErrorBody { message, param, code } } = serde_json::from_slice(body).ok()?;
        let code = code.unwrap_or_default();
        let pointer = param.map(|param| format!("/{}", param.replace('.', "/")));
        let errors = pointer.map(|pointer| FieldError { pointer, code: code.clone(), detail: message.clone() });
        let retryable = matches!(status, 408 | 425 | 429 | 500 | 502..=504);
        let errors = errors.into_iter().collect();
        Some(Problem { status, code, detail: message, retryable, errors, ..Problem::default() })
    }
}

/// Parses `Retry-After`: seconds, or a date (RFC 9110, 10.2.3).
fn parse_retry_after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(text.trim()).ok()?.timestamp();
    Some(Duration::try_from(date.duration_since(Timestamp::now())).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_shown_with_all_its_errors() {
        let body = br#"{"code": "invalid_spec", "detail": "not valid", "new_field": 1,
            "errors": [{"pointer": "/rloo/beta", "code": "out_of_range", "detail": "must be at least 0"}]}"#;
        let problem = Problem::read(422, &HeaderMap::new(), body);
        let error = Error::Refused { request: "POST /jobs".to_owned(), problem: Box::new(problem) };
        assert_eq!(error.to_string(), "POST /jobs: 422: not valid\n  /rloo/beta: must be at least 0");
        assert_eq!((error.code(), error.status(), error.is_retryable()), ("invalid_spec", Some(422), false));
    }

    #[test]
    fn a_page_of_a_proxy_is_an_error_too() {
        let headers = HeaderMap::from_iter([(RETRY_AFTER, "7".parse().unwrap())]);
        let problem = Problem::read(502, &headers, "x".repeat(1000).as_bytes());
        assert_eq!((problem.detail.len(), problem.code.as_str(), problem.retryable), (MAX_SHOWN_CHARACTERS, "", true));
        assert_eq!(problem.retry_after, Some(Duration::from_secs(7)));
        assert!(!Problem::read(404, &headers, b"{}").retryable);
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        assert_eq!(parse_retry_after(" 12 "), Some(Duration::from_secs(12)));
        assert_eq!(parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        let later = Timestamp::now() + Duration::from_secs(90);
        let text = jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&later).unwrap();
        let pause = parse_retry_after(&text).unwrap();
        assert!((85..=90).contains(&pause.as_secs()), "{pause:?}");
        assert_eq!(parse_retry_after("soon"), None);
    }
}
