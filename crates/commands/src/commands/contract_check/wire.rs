//! Sends the requests of a check: valid ones, and some that a job would never send.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION};
use reqwest::{Client, Url};

use crate::reward::signature::Key;
use crate::reward::signed_post::SendError;

/// Maximum size of a response in bytes, the same as in a job. Reading stops there.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// The connection to the service: client, URL, headers, signing key, time limit.
pub(in super::super) struct Wire {
    pub client: Client,
    pub url: Url,
    /// Headers given with `--header`.
    pub headers: HeaderMap,
    pub key: Option<Key>,
    pub timeout: Duration,
}

/// How a request to the service is signed. Without a key every request is unsigned and counts as `Right`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Signing {
    /// A valid signature, as in a job.
    Right,
    /// No signature headers at all.
    Missing,
    /// A signature by an unknown key.
    Stranger,
    /// A valid signature of another body.
    Tampered,
    /// A valid signature, but this many seconds old (negative: in the future).
    Aged(i64),
    /// A signature by an unknown key first, then a valid one.
    Rotating,
}

/// A response of the service.
#[derive(Debug)]
pub(in super::super) struct Got {
    pub status: u16,
    pub content_type: Option<String>,
    pub content_encoding: Option<String>,
    pub location: Option<String>,
    pub body: Vec<u8>,
    pub latency: Duration,
}

impl Got {
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Returns the beginning of the response body, to quote it in a finding.
    pub fn excerpt(&self) -> String {
        let text: String = String::from_utf8_lossy(&self.body).trim().chars().take(160).collect();
        if text.is_empty() { String::new() } else { format!(": {text}") }
    }
}

impl Wire {
    /// Sends one POST request to the service. The error says why there was no response.
    pub async fn post(&self, id: &str, body: &str, signing: Signing) -> Result<Got, String> {
        self.post_with(id, body, signing, HeaderMap::new()).await
    }

    /// Sends one POST request with more headers.
    pub async fn post_with(&self, id: &str, body: &str, signing: Signing, more: HeaderMap) -> Result<Got, String> {
        let headers = self.request_headers(id, body, signing);
        self.send(self.client.post(self.url.clone()).headers(headers).headers(more).body(body.to_owned())).await
    }

    /// The service's URL without its query, which may contain a key.
    pub fn shown_url(&self) -> String {
        let mut url = self.url.clone();
        if url.query().is_some() {
            url.set_query(Some("redacted"));
        }
        url.to_string()
    }

    /// Sends one GET request to the `status_url` of the request with this id, signed as in a job.
    pub async fn get_status(&self, id: &str, url: Url) -> Result<Got, String> {
        self.send(self.client.get(url).headers(self.request_headers(id, "", Signing::Right))).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Got, String> {
        let start = Instant::now();
        let exchange = async {
            let mut response = request.send().await.map_err(|error| SendError::new(&error).text())?;
            let text = |name: HeaderName| {
                response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
            };
            let (content_type, content_encoding) = (text(CONTENT_TYPE), text(CONTENT_ENCODING));
            let location = text(LOCATION);
            let mut body = Vec::new();
            while let Some(chunk) = response.chunk().await.map_err(|error| SendError::new(&error).text())? {
                if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
                    return Err("the service's answer is larger than 8 MiB, the maximum".to_owned());
                }
                body.extend_from_slice(&chunk);
            }
            let status = response.status().as_u16();
            Ok(Got { status, content_type, content_encoding, location, body, latency: start.elapsed() })
        };
        let late = || Err(format!("the service sent no complete answer within {} ms", self.timeout.as_millis()));
        tokio::time::timeout(self.timeout, exchange).await.unwrap_or_else(|_| late())
    }

    fn request_headers(&self, id: &str, body: &str, signing: Signing) -> HeaderMap {
        let mut headers = self.headers.clone();
        let mut set = |name: &'static str, value: &str| {
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.insert(HeaderName::from_static(name), value);
            }
        };
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let at = match signing {
            Signing::Aged(seconds) => now_s.saturating_add_signed(-seconds),
            _ => now_s,
        };
        set("webhook-id", id);
        set("webhook-timestamp", &at.to_string());
        set("idempotency-key", id);
        if let (Some(key), true) = (&self.key, signing != Signing::Missing) {
            let right = || key.sign(id, at, body.as_bytes());
            let strange = || stranger().map(|key| key.sign(id, at, body.as_bytes()));
            let signature = match signing {
                Signing::Right | Signing::Aged(_) | Signing::Missing => right(),
                Signing::Stranger => strange().unwrap_or_default(),
                Signing::Tampered => key.sign(id, at, format!("{body} ").as_bytes()),
                Signing::Rotating => format!("{} {}", strange().unwrap_or_default(), right()),
            };
            set("webhook-signature", &signature);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers
    }
}

fn stranger() -> Option<Key> {
    Key::parse(&Key::generate().ok()?).ok()
}
