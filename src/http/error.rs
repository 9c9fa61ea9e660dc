//! Problem responses (RFC 9457): the table of codes, and the one error type of all handlers.
//!
//! A client sees `title`, `detail` and `errors`; the log contains `cause`. No SQL, path, key or `Debug` output reaches a client.

use std::fmt;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use crate::error_text::with_causes as chain;
use crate::files::FilesError;
pub use crate::spec::FieldError;
use crate::store::StoreError;
use crate::store::publish::PublishError;

tokio::task_local! {
    /// The id of the request that this task answers. The outermost layer sets the id, and problem responses contain it.
    pub(super) static REQUEST_ID: String;
}

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $status:literal, $retryable:literal, $title:literal;)+) => {
        /// A stable error code. Each is one line of the table below.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code {
            $($(#[$doc])* #[doc = concat!("`", $code, "`: ", $title, ".")] $variant,)+
        }

        impl Code {
            pub const ALL: &'static [Code] = &[$(Code::$variant),+];

            /// The stable code in snake_case.
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $code,)+ }
            }

            fn row(self) -> (u16, bool, &'static str) {
                match self { $(Code::$variant => ($status, $retryable, $title),)+ }
            }
        }
    };
}

// Columns: code, HTTP status, whether the same request may succeed later, title.
codes! {
    InvalidJson = "invalid_json", 400, false, "The body is not JSON";
    InvalidDocument = "invalid_document", 400, false, "The body cannot be parsed";
    InvalidRequest = "invalid_request", 400, false, "The request cannot be read";
    InvalidQuery = "invalid_query", 400, false, "A query parameter is not valid";
    InvalidCursor = "invalid_cursor", 400, false, "The cursor is not valid";
    InvalidEncoding = "invalid_encoding", 400, false, "The body cannot be decompressed";
    BodyInterrupted = "body_interrupted", 400, true, "The body ended early";
    Unauthorized = "unauthorized", 401, false, "A valid API key is required";
    Forbidden = "forbidden", 403, false, "The request is not permitted";
    InvalidCsrfToken = "invalid_csrf_token", 403, false, "The session's CSRF token is missing or wrong";
    NotFound = "not_found", 404, false, "Not found";
    NoCheckpoint = "no_checkpoint", 404, true, "There is no checkpoint yet";
    NoSuchCheckpoint = "no_such_checkpoint", 404, false, "There is no such checkpoint";
    NoVerdict = "no_verdict", 404, true, "There is no verdict yet";
    MethodNotAllowed = "method_not_allowed", 405, false, "This path does not accept the method";
    NotAcceptable = "not_acceptable", 406, false, "The requested format is not available";
    RequestTimeout = "request_timeout", 408, true, "The request took too long to arrive";
    Conflict = "conflict", 409, false, "The request conflicts with an existing object";
    NoAdapter = "no_adapter", 409, false, "The job trains no adapter";
    NoEvaluation = "no_evaluation", 409, false, "The job has no evaluation";
    IllegalMove = "illegal_move", 409, false, "The job's state does not permit this request";
    InUse = "in_use", 409, false, "The resource is in use";
    IdempotencyInFlight = "idempotency_in_flight", 409, true, "A request with this Idempotency-Key is being answered";
    LeaseLost = "lease_lost", 409, false, "Another attempt owns the job";
    ProtocolMismatch = "protocol_mismatch", 409, false, "Worker and server versions do not match";
    Gone = "gone", 410, false, "The requested object is no longer available";
    PreconditionFailed = "precondition_failed", 412, false, "A precondition of the request does not hold";
    BodyTooLarge = "body_too_large", 413, false, "The body is too large";
    UnsupportedMediaType = "unsupported_media_type", 415, false, "The content type is not supported";
    UnsupportedEncoding = "unsupported_encoding", 415, false, "The content encoding is not supported";
    RangeNotSatisfiable = "range_not_satisfiable", 416, false, "The range is outside the file";
    WrongHost = "wrong_host", 421, false, "This server does not answer for that host";
    InvalidBody = "invalid_body", 422, false, "The body is not valid";
    InvalidSpec = "invalid_spec", 422, false, "The job is not valid";
    InvalidDataset = "invalid_dataset", 422, false, "The dataset is not valid";
    InvalidModel = "invalid_model", 422, false, "The model cannot be used";
    InvalidAdapter = "invalid_adapter", 422, false, "The adapter cannot be used";
    NoHubToken = "no_hub_token", 422, false, "The model hub needs a token";
    Unsupported = "unsupported", 422, false, "The request is not supported yet";
    IdempotencyMismatch = "idempotency_mismatch", 422, false, "The Idempotency-Key was used with another body";
    TooManyRequests = "too_many_requests", 429, true, "Too many requests";
    Internal = "internal", 500, true, "The server failed";
    NotImplemented = "not_implemented", 501, false, "The request is not supported";
    HubUnreachable = "hub_unreachable", 502, true, "The hub cannot be reached";
    Overloaded = "overloaded", 503, true, "The server is busy";
    GenerationFailed = "generation_failed", 503, true, "The completions could not be generated";
    NotReady = "not_ready", 503, true, "The server is not ready";
    WorkTimeout = "work_timeout", 504, false, "The request takes too much work";
    GenerationTimeout = "generation_timeout", 504, false, "The completions took too long";
    StorageFull = "storage_full", 507, true, "The disk is full";
}

impl Code {
    /// The HTTP status of the code.
    pub fn status(self) -> StatusCode {
        StatusCode::from_u16(self.row().0).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// Whether the same request may succeed later without a change.
    pub fn retryable(self) -> bool {
        self.row().1
    }

    /// A short text for people, the same for every occurrence.
    pub fn title(self) -> &'static str {
        self.row().2
    }

    /// Returns the error code for an HTTP status that came without one, for example from a layer of axum.
    pub fn of_status(status: StatusCode) -> Code {
        match status.as_u16() {
            401 => Code::Unauthorized,
            403 => Code::Forbidden,
            404 => Code::NotFound,
            405 => Code::MethodNotAllowed,
            406 => Code::NotAcceptable,
            408 => Code::RequestTimeout,
            409 => Code::Conflict,
            410 => Code::Gone,
            412 => Code::PreconditionFailed,
            413 => Code::BodyTooLarge,
            415 => Code::UnsupportedMediaType,
            416 => Code::RangeNotSatisfiable,
            422 => Code::InvalidBody,
            429 => Code::TooManyRequests,
            501 => Code::NotImplemented,
            503 => Code::Overloaded,
            other if other < 500 => Code::InvalidRequest,
            _ => Code::Internal,
        }
    }
}

/// The body of every error response: `application/problem+json` (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Problem)]
pub struct ProblemBody {
    /// `urn:rlood:problem:` followed by the code.
    #[serde(rename = "type")]
    #[schema(example = "urn:rlood:problem:not_found")]
    pub kind: String,
    /// A short text for people, the same for every occurrence of the code.
    pub title: String,
    /// The HTTP status of the response.
    #[schema(example = 404, minimum = 400, maximum = 599)]
    pub status: u16,
    /// The error that occurred this time, and the next action to take.
    pub detail: String,
    /// Stable error code in snake_case, for programs to check.
    #[schema(example = "not_found")]
    pub code: String,
    /// Id of the request, also in the `x-request-id` header and in the server's log.
    pub request_id: String,
    /// Whether the same request may succeed later without a change.
    pub retryable: bool,
    /// All errors, if there are details beyond `detail`.
    pub errors: Vec<FieldError>,
}

/// The reason why a request failed: the `Err` type of all handlers.
#[derive(Debug)]
pub struct Problem {
    inner: Box<Inner>,
}

#[derive(Debug)]
struct Inner {
    code: Code,
    detail: String,
    errors: Vec<FieldError>,
    headers: Vec<(HeaderName, HeaderValue)>,
    cause: Option<String>,
}

impl Problem {
    /// Creates a problem with a detail text for the client.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self {
            inner: Box::new(Inner {
                code,
                detail: detail.into(),
                errors: Vec::new(),
                headers: Vec::new(),
                cause: None,
            }),
        }
    }

    /// A problem for a resource that does not exist: `Problem::not_found("dataset", id)`.
    pub fn not_found(kind: &str, id: impl fmt::Display) -> Self {
        Self::new(Code::NotFound, format!("there is no {kind} '{}'", shortened(&id.to_string())))
    }

    /// Creates a problem for an error of the server. The client gets only the request id, the log gets the cause.
    pub fn internal(cause: impl fmt::Display) -> Self {
        Self::new(Code::Internal, "an unexpected error occurred; see the server's log for this request_id")
            .because(cause)
    }

    /// Adds one item to `errors`.
    #[must_use]
    pub fn item(mut self, pointer: impl Into<String>, code: impl Into<String>, detail: impl Into<String>) -> Self {
        self.inner.errors.push(FieldError { pointer: pointer.into(), code: code.into(), detail: detail.into() });
        self
    }

    /// Replaces the code of the problem and keeps everything else.
    #[must_use]
    pub fn with_code(mut self, code: Code) -> Self {
        self.inner.code = code;
        self
    }

    /// Sets the list of `errors`.
    #[must_use]
    pub fn items(mut self, errors: Vec<FieldError>) -> Self {
        self.inner.errors = errors;
        self
    }

    /// Adds a response header.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: impl AsRef<str>) -> Self {
        if let Ok(value) = HeaderValue::from_str(value.as_ref()) {
            self.inner.headers.push((name, value));
        }
        self
    }

    /// Adds `Retry-After`, in seconds.
    #[must_use]
    pub fn retry_after(self, seconds: u64) -> Self {
        self.header(header::RETRY_AFTER, seconds.to_string())
    }

    /// Sets the cause for the log, which is never shown to a client.
    #[must_use]
    pub fn because(mut self, cause: impl fmt::Display) -> Self {
        self.inner.cause = Some(cause.to_string());
        self
    }

    pub fn code(&self) -> Code {
        self.inner.code
    }

    /// The detail text for the client.
    pub fn detail(&self) -> &str {
        &self.inner.detail
    }

    /// The cause for the log.
    pub fn cause(&self) -> &str {
        self.inner.cause.as_deref().unwrap_or(&self.inner.detail)
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { kind, id } => Problem::not_found(kind, id),
            StoreError::Exists { kind, id } => Problem::new(
                Code::Conflict,
                format!(
                    "a different {kind} '{}' already exists; delete it first, or choose another id",
                    shortened(&id)
                ),
            ),
            StoreError::InUse { kind, id, jobs } => {
                let named: Vec<String> = jobs.iter().map(ToString::to_string).collect();
                let detail = format!(
                    "the {kind} '{}' is in use by unfinished jobs ({}); cancel them, or wait until they end",
                    shortened(&id),
                    named.join(", ")
                );
                Problem::new(Code::InUse, detail)
            }
            StoreError::IllegalMove { state, action } => {
                let allowed: Vec<&str> = state.actions().iter().map(|action| action.as_str()).collect();
                let allowed = if allowed.is_empty() { "nothing".to_owned() } else { allowed.join(", ") };
                let detail =
                    format!("cannot {} a job that is {}; its state allows: {allowed}", action.as_str(), state.as_str());
                Problem::new(Code::IllegalMove, detail)
            }
            error @ StoreError::NoPlan { .. } => Problem::new(Code::Conflict, error.to_string()),
            StoreError::LeaseLost => Problem::new(
                Code::LeaseLost,
                "this attempt of the job no longer owns it: the job has ended, or a newer attempt runs it",
            ),
            StoreError::BadCursor => {
                let detail = "the cursor in 'after' does not belong to this list: start again without it";
                Problem::new(Code::InvalidCursor, detail).item("?after", "invalid_cursor", detail)
            }
            error if error.is_disk_full() => {
                Problem::new(Code::StorageFull, "the server's disk is full; free some space, then try again")
                    .because(chain(&error))
            }
            error @ (StoreError::Open { .. }
            | StoreError::SqliteTooOld { .. }
            | StoreError::Migrate { .. }
            | StoreError::Newer { .. }
            | StoreError::Older { .. }
            | StoreError::Database { .. }
            | StoreError::Corrupt { .. }) => Problem::internal(chain(&error)),
        }
    }
}

impl From<PublishError> for Problem {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Store(error) => error.into(),
            PublishError::Files(error) => error.into(),
            PublishError::Stopped(error) => Problem::internal(error),
        }
    }
}

impl From<FilesError> for Problem {
    fn from(error: FilesError) -> Self {
        match error {
            FilesError::TooLarge { limit_bytes } => {
                Problem::new(Code::BodyTooLarge, format!("the body is larger than {limit_bytes} bytes, the maximum"))
            }
            error @ (FilesError::BadName(_) | FilesError::Mismatch { .. }) => {
                Problem::new(Code::InvalidBody, error.to_string())
            }
            FilesError::Io { ref source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                Problem::new(Code::StorageFull, "the server's disk is full; free some space, then try again")
                    .because(chain(&error))
            }
            error @ (FilesError::Io { .. } | FilesError::Locked { .. }) => Problem::internal(chain(&error)),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Inner { code, detail, errors, headers, cause } = *self.inner;
        let request_id = REQUEST_ID.try_with(String::clone).unwrap_or_default();
        let status = code.status();
        // Errors of requests are logged only here, because every one becomes a response here.
        let cause = cause.as_deref().unwrap_or("");
        if matches!(code, Code::Overloaded | Code::NotReady | Code::StorageFull) {
            tracing::warn!(%request_id, code = code.as_str(), cause, "{detail}");
        } else if status.is_server_error() {
            tracing::error!(%request_id, code = code.as_str(), cause, "{detail}");
        } else {
            tracing::debug!(%request_id, code = code.as_str(), cause, "{detail}");
        }
        let body = ProblemBody {
            kind: format!("urn:rlood:problem:{}", code.as_str()),
            title: code.title().to_owned(),
            status: status.as_u16(),
            detail,
            code: code.as_str().to_owned(),
            request_id,
            retryable: code.retryable(),
            errors,
        };
        let bytes = serde_json::to_vec(&body).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, "application/problem+json")], bytes).into_response();
        for (name, value) in headers {
            response.headers_mut().append(name, value);
        }
        response.extensions_mut().insert(IsProblem);
        response
    }
}

/// Marks a response that is already a problem document, so that the outermost layer leaves it unchanged.
#[derive(Debug, Clone, Copy)]
pub(super) struct IsProblem;

/// Shortens a text that a client sent to a length that a response can repeat.
pub fn shortened(text: &str) -> String {
    const LONGEST: usize = 120;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_words_with_an_error_status() {
        let mut seen = std::collections::BTreeSet::new();
        for code in Code::ALL {
            assert!(seen.insert(code.as_str()), "{} twice", code.as_str());
            assert!(code.as_str().chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{}", code.as_str());
            assert!(code.status().is_client_error() || code.status().is_server_error());
        }
    }

    #[test]
    fn the_cause_stays_out_of_the_body() {
        let problem = Problem::internal("SELECT secret FROM /var/lib/rlood");
        let response = problem.into_response();
        assert_eq!(response.status(), 500);
        let body = futures::executor::block_on(axum::body::to_bytes(response.into_body(), 10_000)).unwrap();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert!(!text.contains("secret") && !text.contains("/var"), "{text}");
    }
}
