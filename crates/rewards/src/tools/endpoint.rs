//! One address that answers calls of tools, under the rules of rewards: the policy for outgoing addresses, no redirects, no proxies,
//! write-only headers.

use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Response, StatusCode, Url};

use crate::BuildError;
use crate::client::{RewardClient, user_headers};
use crate::secret_filter::{Preserved, SecretFilter};
use crate::signed_post::{self, SendError, retry_after, set_header};
use crate::spec::RewardSecrets;

/// Maximum size of a call and of its answer, in bytes.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// The address of a tool or of an MCP server.
pub(super) struct Endpoint {
    /// Name of the entry in the job.
    pub name: String,
    pub url: Url,
    headers: HeaderMap,
    http: reqwest::Client,
    filter: SecretFilter,
    timeout: Duration,
}

/// Why a request has no usable answer.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The policy for outgoing addresses forbids the address.
    Refused(String),
    /// There is no connection: the service is away.
    Away(String),
    /// A retry may succeed: 408, 425, 429, 5xx, a timeout, or an answer that is not valid.
    Transient { why: String, wait: Option<Duration> },
    /// A retry would not help.
    Permanent(String),
    /// An MCP server has forgotten the session.
    SessionGone,
}

impl Trouble {
    pub fn transient(why: impl Into<String>) -> Self {
        Trouble::Transient { why: why.into(), wait: None }
    }
}

impl From<SendError> for Trouble {
    fn from(error: SendError) -> Self {
        match &error {
            SendError::Refused(why) => Trouble::Refused(why.clone()),
            // The server may have received the call, so this counts as a try: a call that ends the server must not be repeated for ever.
            SendError::Failed { is_connect: false, .. } => Trouble::transient(error.text()),
            SendError::Failed { .. } => Trouble::Away(error.text()),
        }
    }
}

impl Endpoint {
    pub fn new(
        name: &str,
        url: &str,
        secrets: &RewardSecrets,
        (client, timeout_ms): (&RewardClient, u64),
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        let url = client.policy.check_url(url).map_err(|why| error(why.to_string()))?;
        Ok(Self {
            name: name.to_owned(),
            url,
            headers: user_headers(secrets).map_err(error)?,
            http: client.http.clone(),
            filter: SecretFilter::new(secrets),
            timeout: Duration::from_millis(timeout_ms.max(1)),
        })
    }

    /// Sends JSON, and reads the response with `read`, all within the time limit. The headers of the job cannot replace `more`.
    pub async fn post<T>(
        &self,
        (id, body): (&str, &str),
        more: &[(&'static str, &str)],
        read: impl AsyncFnOnce(&Self, Response) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        let mut headers = self.headers.clone();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.entry(ACCEPT).or_insert(HeaderValue::from_static("application/json"));
        set_header(&mut headers, "idempotency-key", id);
        more.iter().for_each(|(name, value)| set_header(&mut headers, name, value));
        let request = self.http.post(self.url.clone()).body(body.to_owned());
        let exchange = async {
            let response = signed_post::send(request, headers).await?;
            read(self, response).await
        };
        let late = || Trouble::transient(format!("no answer within {} ms", self.timeout.as_millis()));
        tokio::time::timeout(self.timeout, exchange).await.unwrap_or_else(|_| Err(late()))
    }

    /// Sends a DELETE without waiting long for the answer, which is ignored.
    pub async fn delete(&self, more: &[(&'static str, &str)]) {
        let mut headers = self.headers.clone();
        more.iter().for_each(|(name, value)| set_header(&mut headers, name, value));
        let request = self.http.delete(self.url.clone());
        let _ = tokio::time::timeout(Duration::from_secs(2), signed_post::send(request, headers)).await;
    }

    /// Reads a body of at most [`MAX_BYTES`] without the job's secrets; `None` if it is larger.
    pub async fn body(&self, mut response: Response) -> Result<Option<Vec<u8>>, Trouble> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| SendError::new(&error))? {
            if body.len() + chunk.len() > MAX_BYTES {
                return Ok(None);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Some(self.redacted(body)))
    }

    pub fn redacted(&self, body: Vec<u8>) -> Vec<u8> {
        self.filter.redact_answer(body, Preserved::default)
    }
}

/// Returns why a status has no answer, for statuses that tell the same about every service.
pub(super) fn trouble_of(status: StatusCode, headers: &HeaderMap) -> Option<Trouble> {
    let why = || format!("the service answered {status}");
    match status.as_u16() {
        408 | 425 | 429 | 500..=599 => Some(Trouble::Transient { why: why(), wait: retry_after(headers) }),
        300..=399 => Some(Trouble::Permanent(format!("{}: redirects are not followed", why()))),
        _ => None,
    }
}
