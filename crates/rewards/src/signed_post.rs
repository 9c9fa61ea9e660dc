//! POST requests signed according to Standard Webhooks, used for reward requests and for lifecycle webhooks.

use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{RequestBuilder, Response};

use crate::http_client::refusal;
use crate::signature::Key;

/// The parts of a POST request that its signature covers.
pub struct Signed<'a> {
    /// Value of the header `webhook-id`, the same for all attempts to send this request.
    pub id: &'a str,
    /// Time of this attempt to send the request, in seconds since 1970.
    pub timestamp: u64,
    /// The request body as sent.
    pub body: &'a [u8],
}

impl Signed<'_> {
    /// Sets the webhook headers of a request, with one signature for each signing key: during a key rotation there are several.
    /// Without keys the request is not signed.
    pub fn set_headers<'k>(&self, keys: impl IntoIterator<Item = &'k Key>, headers: &mut HeaderMap) {
        set_header(headers, "webhook-id", self.id);
        set_header(headers, "webhook-timestamp", &self.timestamp.to_string());
        let signed = keys.into_iter().map(|key| key.sign(self.id, self.timestamp, self.body));
        let signatures: Vec<String> = signed.collect();
        if !signatures.is_empty() {
            set_header(headers, "webhook-signature", &signatures.join(" "));
        }
    }
}

/// Sets a header of a request, or omits it if the value is not valid for a header.
pub(crate) fn set_header(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(HeaderName::from_static(name), value);
    }
}

/// Sends a signed request and returns the response before its body is read.
///
/// # Errors
/// Fails when the receiver sends no response.
pub async fn send(request: RequestBuilder, headers: HeaderMap) -> Result<Response, SendError> {
    request.headers(headers).send().await.map_err(|error| SendError::new(&error))
}

/// Reason why a request or the rest of its answer failed. Never contains the URL, which may contain a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SendError {
    /// The policy for outgoing addresses forbids the receiver's address; the text names the rule.
    Refused(String),
    /// The connection to the receiver could not be opened, or it broke.
    Failed {
        /// Whether the failure was before a connection was established.
        is_connect: bool,
        /// Whether the request timed out.
        is_timeout: bool,
        /// The innermost cause of the HTTP client's error, such as "Connection refused". The outer causes repeat the URL.
        cause: Option<String>,
    },
}

impl SendError {
    /// Converts an error of the HTTP client.
    pub fn new(error: &reqwest::Error) -> Self {
        if let Some(refused) = refusal(error) {
            return Self::Refused(refused.to_string());
        }
        let mut cause = std::error::Error::source(error);
        while let Some(inner) = cause.and_then(std::error::Error::source) {
            cause = Some(inner);
        }
        let cause = cause.map(ToString::to_string);
        Self::Failed { is_connect: error.is_connect(), is_timeout: error.is_timeout(), cause }
    }

    /// Describes the error for the operator of the service that was called.
    pub fn text(&self) -> String {
        match self {
            Self::Refused(why) => why.clone(),
            Self::Failed { is_connect, is_timeout: _, cause } => {
                let kind = if *is_connect { "cannot connect" } else { "the connection to the service broke" };
                format!("{kind}: {}", cause.as_deref().unwrap_or("unknown cause"))
            }
        }
    }
}

/// Returns the wait that the header `Retry-After` requests, as a number of seconds or an HTTP date.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?;
    Some(Duration::try_from(at.duration_since(jiff::Timestamp::now())).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_requests_have_three_headers_and_unsigned_ones_two() {
        let signed = Signed { id: "msg_1", timestamp: 1_767_225_600, body: b"{}" };
        let key = |letter: &str| Key::parse(&format!("whsec_{}", letter.repeat(32))).unwrap();
        let keys = [key("A"), key("B")];
        let mut headers = HeaderMap::new();
        signed.set_headers(&keys, &mut headers);
        let names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["webhook-id", "webhook-timestamp", "webhook-signature"]);
        let signatures = headers["webhook-signature"].to_str().unwrap();
        assert_eq!(signatures.split(' ').count(), 2);
        for key in &keys {
            assert_eq!(key.verify("msg_1", "1767225600", signatures, b"{}", 1_767_225_600), Ok(()));
        }
        let mut headers = HeaderMap::new();
        signed.set_headers(&[], &mut headers);
        assert!(headers.len() == 2 && !headers.contains_key("webhook-signature"), "{headers:?}");
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let parse = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, HeaderValue::from_str(value).unwrap());
            retry_after(&headers)
        };
        assert_eq!(parse("7"), Some(Duration::from_secs(7)));
        assert_eq!(parse("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert!(parse("Wed, 21 Oct 2065 07:28:00 GMT").unwrap() > Duration::from_secs(1_000_000));
        assert_eq!(parse("soon"), None);
    }

    #[tokio::test]
    async fn an_error_names_its_cause_and_not_the_url() {
        // The listener is closed, so connections to its port are refused.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let client = crate::http_client::client_builder().build().unwrap();
        let url = format!("http://127.0.0.1:{port}/hook?token=hidden");
        let error = send(client.post(url), HeaderMap::new()).await.unwrap_err();
        let text = error.text();
        assert!(text.starts_with("cannot connect: ") && text.contains("refused"), "{text}");
        assert!(!format!("{error:?} {text}").contains("hidden"), "{error:?}");
    }
}
