//! What went over the wire, for people who test a reward service. Secrets never get in here.

use std::collections::BTreeMap;

use reqwest::header::HeaderMap;
use serde::Serialize;
use utoipa::ToSchema;

/// Longest body that is kept, characters.
const LONGEST_BODY: usize = 16 * 1024;

/// One try: a request and what came of it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Exchange {
    /// As sent.
    pub request: Sent,
    /// As received; null when nothing came.
    pub response: Option<Received>,
    /// Why nothing usable came.
    pub error: Option<String>,
    /// From the first byte sent to the last received, ms.
    pub latency_ms: f64,
}

/// A request as sent; values of the user's own headers are redacted.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Sent {
    /// The URL.
    pub url: String,
    /// The headers.
    pub headers: BTreeMap<String, String>,
    /// The body, cut at 16 KiB.
    pub body: String,
}

/// A response as received.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Received {
    /// The HTTP status.
    pub status: u16,
    /// The headers.
    pub headers: BTreeMap<String, String>,
    /// The body, cut at 16 KiB.
    pub body: String,
}

/// Headers for people: sensitive values are replaced.
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

/// A body for people.
pub(super) fn readable_body(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    match text.char_indices().nth(LONGEST_BODY) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}
