//! Recorded HTTP exchanges for users who test a reward service. Secrets are redacted before recording.

use std::collections::BTreeMap;

use reqwest::header::HeaderMap;
use serde::Serialize;
use utoipa::ToSchema;

/// Maximum length of a recorded request or response body, in characters.
const MAX_BODY_CHARS: usize = 16 * 1024;

/// One HTTP request and its outcome.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Exchange {
    /// The request as sent.
    pub request: Sent,
    /// The response as received; null when there was none.
    pub response: Option<Received>,
    /// Error message; null when the response is usable.
    pub error: Option<String>,
    /// Time from the first byte sent to the last byte received, in milliseconds.
    pub latency_ms: f64,
}

/// A request as sent. Values of the user's own headers are redacted.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Sent {
    /// URL of the request.
    pub url: String,
    /// Headers of the request; sensitive values are redacted.
    pub headers: BTreeMap<String, String>,
    /// Body of the request, truncated to 16 KiB.
    pub body: String,
}

/// A response as received.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Received {
    /// HTTP status code of the response.
    pub status: u16,
    /// Headers of the response; sensitive values are redacted.
    pub headers: BTreeMap<String, String>,
    /// Body of the response, truncated to 16 KiB.
    pub body: String,
}

/// Formats HTTP headers for display, and redacts sensitive values.
pub(super) fn readable_headers(headers: &HeaderMap) -> BTreeMap<String, String> {
    let text = |value: &reqwest::header::HeaderValue| {
        if value.is_sensitive() {
            "(redacted)".to_owned()
        } else {
            String::from_utf8_lossy(value.as_bytes()).into_owned()
        }
    };
    headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

/// Formats a request or response body as text, truncated to the maximum length.
pub(super) fn readable_body(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    match text.char_indices().nth(MAX_BODY_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}
