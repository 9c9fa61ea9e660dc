//! A small client of the public API.

use std::time::Duration;

use reqwest::{RequestBuilder, header};
use serde_json::Value;

use crate::reward::outgoing;

/// Longer than any answer of the API takes, waiting calls included.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the API did not do.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No answer.
    #[error("{request}: no answer")]
    Transport {
        /// Method and path.
        request: String,
        /// Why.
        #[source]
        source: reqwest::Error,
    },
    /// A problem document.
    #[error("{request}: {status}: {detail}")]
    Refused {
        /// Method and path.
        request: String,
        /// The HTTP status.
        status: u16,
        /// What the server said.
        detail: String,
    },
}

/// The server, as a client sees it.
pub struct Api {
    base: String,
    client: reqwest::Client,
}

impl Api {
    /// A client for `http://HOST:PORT`.
    pub fn new(base: String) -> Result<Self, ApiError> {
        let client = outgoing::client_builder()
            .timeout(TIMEOUT)
            .build()
            .map_err(|source| ApiError::Transport { request: "an HTTP client".to_owned(), source })?;
        Ok(Self { base, client })
    }

    /// `http://HOST:PORT`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// GET, JSON.
    pub async fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<Value, ApiError> {
        let mut url = format!("{}{path}", self.base);
        for (at, (name, value)) in query.iter().enumerate() {
            url.push_str(&format!("{}{name}={}", if at == 0 { '?' } else { '&' }, percent_encoded(value)));
        }
        json(path, self.send(path, self.client.get(url)).await?)
    }

    /// GET, bytes.
    pub async fn download(&self, path: &str) -> Result<Vec<u8>, ApiError> {
        self.send(path, self.client.get(format!("{}{path}", self.base))).await
    }

    /// POST, JSON.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        let request = self.client.post(format!("{}{path}", self.base));
        json(
            path,
            self.send(path, request.header(header::CONTENT_TYPE, "application/json").body(body.to_string())).await?,
        )
    }

    /// POST, one JSON record a line.
    pub async fn upload(&self, path: &str, lines: &'static [u8]) -> Result<Value, ApiError> {
        let request = self.client.post(format!("{}{path}", self.base));
        json(path, self.send(path, request.header(header::CONTENT_TYPE, "application/x-ndjson").body(lines)).await?)
    }

    async fn send(&self, path: &str, request: RequestBuilder) -> Result<Vec<u8>, ApiError> {
        let transport = |source| ApiError::Transport { request: path.to_owned(), source };
        let response = request.send().await.map_err(transport)?;
        let status = response.status();
        let body = response.bytes().await.map_err(transport)?.to_vec();
        if status.is_success() { Ok(body) } else { Err(refused(path, status.as_u16(), &body)) }
    }
}

fn json(path: &str, body: Vec<u8>) -> Result<Value, ApiError> {
    serde_json::from_slice(&body).map_err(|_| refused(path, 200, b"not JSON"))
}

/// The detail of a problem document, and everything it lists.
fn refused(path: &str, status: u16, body: &[u8]) -> ApiError {
    let problem: Value = serde_json::from_slice(body).unwrap_or_default();
    let mut detail = match problem["detail"].as_str() {
        Some(detail) => detail.to_owned(),
        None => String::from_utf8_lossy(body).chars().take(200).collect(),
    };
    for error in problem["errors"].as_array().into_iter().flatten() {
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        detail.push_str(&format!("\n  {}: {}", text("pointer"), text("detail")));
    }
    ApiError::Refused { request: path.to_owned(), status, detail }
}

fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_shown_with_all_its_errors() {
        let body = br#"{"detail": "not valid", "errors": [{"pointer": "/rloo/beta", "detail": "must be at least 0"}]}"#;
        let text = refused("/jobs", 422, body).to_string();
        assert_eq!(text, "/jobs: 422: not valid\n  /rloo/beta: must be at least 0");
    }

    #[test]
    fn queries_are_percent_encoded() {
        assert_eq!(percent_encoded("What is 1 + 2?"), "What%20is%201%20%2B%202%3F");
    }
}
