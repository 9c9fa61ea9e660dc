//! Resources shared by all rewards of a worker: one connection pool, the policy for outgoing addresses, the cache of reward values,
//! and the factor on waits (for tests).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, StatusCode};

use super::cache::Cache;
use crate::http_client::restricted_client_builder;
use crate::outgoing::OutgoingPolicy;
use crate::spec::RewardSecrets;
use rlood_types::error_text::with_causes;

/// The shared resources of a worker's rewards. Cheap to clone.
#[derive(Clone)]
pub struct RewardClient {
    pub(super) policy: OutgoingPolicy,
    pub(super) http: Client,
    pub(super) cache: Arc<Cache>,
    /// Owner of the jobs whose cached reward values this client can read.
    pub(super) cache_scope: Arc<str>,
    pub(super) pace: Pace,
}

impl RewardClient {
    /// Creates reward resources with their own connection pool, which connects only to addresses that the policy permits.
    ///
    /// # Errors
    /// Returns a message when the HTTP client cannot be created.
    pub fn new(policy: &OutgoingPolicy) -> Result<Self, String> {
        let http = restricted_client_builder(policy)
            .http1_only()
            .build()
            .map_err(|why| format!("cannot create an HTTP client: {why}"))?;
        Ok(Self {
            policy: policy.clone(),
            http,
            cache: Arc::default(),
            cache_scope: Arc::from(""),
            pace: Pace::default(),
        })
    }

    /// Sets the factor on waits (see [`Pace`]).
    #[must_use]
    pub fn with_pace(self, pace: Pace) -> Self {
        Self { pace, ..self }
    }

    /// Limits the cache of reward values to those that were stored for the same owner (`scope`).
    #[must_use]
    pub fn with_cache_scope(self, scope: &str) -> Self {
        Self { cache_scope: Arc::from(scope), ..self }
    }

    /// Checks that a GET request to `url` is answered with a 2xx status within `timeout`.
    ///
    /// # Errors
    /// Returns why not: the policy refuses the address, no answer, or another status.
    pub async fn check_answer(
        &self,
        url: &str,
        headers: &BTreeMap<String, String>,
        timeout: Duration,
    ) -> Result<(), String> {
        let status = self.status_of(url, headers, timeout).await?;
        if status.is_success() { Ok(()) } else { Err(format!("it answered {status}")) }
    }

    /// Checks that a GET request to `url` is answered within `timeout` by anything but 408, 429 and 5xx: the service is there, though it
    /// may not answer GET.
    ///
    /// # Errors
    /// Returns why not: the policy refuses the address, no answer, or another status.
    pub async fn check_presence(
        &self,
        url: &str,
        headers: &BTreeMap<String, String>,
        timeout: Duration,
    ) -> Result<(), String> {
        let status = self.status_of(url, headers, timeout).await?;
        let is_away = matches!(status.as_u16(), 408 | 429 | 500..=599);
        if is_away { Err(format!("it answered {status}")) } else { Ok(()) }
    }

    /// Sends a GET request and returns the status of the answer.
    async fn status_of(
        &self,
        url: &str,
        headers: &BTreeMap<String, String>,
        timeout: Duration,
    ) -> Result<StatusCode, String> {
        let url = self.policy.check_url(url).map_err(|error| error.to_string())?;
        let request = headers.iter().fold(self.http.get(url), |request, (name, value)| request.header(name, value));
        let answer = request.timeout(timeout).send().await;
        answer.map(|response| response.status()).map_err(|error| with_causes(&error))
    }

    /// Returns the factor on waits (see [`Pace`]).
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// Returns the policy for outgoing addresses.
    pub fn policy(&self) -> &OutgoingPolicy {
        &self.policy
    }
}

/// Converts the headers of a job's service.
pub(crate) fn user_headers(secrets: &RewardSecrets) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (header, value) in &secrets.headers {
        let name = HeaderName::try_from(header.as_str()).map_err(|_| format!("'{header}' is not a header name"))?;
        let mut value = HeaderValue::try_from(value.as_str())
            .map_err(|_| format!("the value of the header '{header}' has characters that are not valid in a header"))?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

/// A factor on every wait that rlood chooses itself: between attempts, while a circuit breaker is open, between pings. The
/// factor is 1 except in tests, which use less to run faster. Waits that a service or a user asks for (`Retry-After`,
/// `timeout_ms`, `max_outage_s`) are never scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace(f64);

impl Default for Pace {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Pace {
    /// Creates a factor on waits, which must be above 0 and at most 1.
    ///
    /// # Errors
    /// Returns a message when the factor is out of range.
    pub fn new(factor: f64) -> Result<Self, String> {
        if factor > 0.0 && factor <= 1.0 { Ok(Self(factor)) } else { Err("must be above 0 and at most 1".to_owned()) }
    }

    /// Multiplies the length of a wait by the factor.
    pub fn of(self, wait: Duration) -> Duration {
        wait.mul_f64(self.0)
    }
}
