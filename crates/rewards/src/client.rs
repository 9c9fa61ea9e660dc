//! What all rewards of a worker share: one pool of connections, the rules on addresses, the answers that may be used
//! again, and how long they wait.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;

use super::cache::Cache;
use crate::http_client::restricted_client_builder;
use crate::outgoing::OutgoingPolicy;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct RewardClient {
    pub(super) policy: OutgoingPolicy,
    pub(super) http: Client,
    pub(super) cache: Arc<Cache>,
    /// Whose values are found in the cache.
    pub(super) cache_scope: Arc<str>,
    pub(super) pace: Pace,
}

impl RewardClient {
    /// A client with connections of its own, which reach only what the policy permits.
    ///
    /// # Errors
    /// When the system gives no HTTP client; in words.
    pub fn new(policy: &OutgoingPolicy) -> Result<Self, String> {
        let http =
            restricted_client_builder(policy).http1_only().build().map_err(|why| format!("no HTTP client: {why}"))?;
        Ok(Self {
            policy: policy.clone(),
            http,
            cache: Arc::default(),
            cache_scope: Arc::from(""),
            pace: Pace::default(),
        })
    }

    /// Waits at another pace.
    #[must_use]
    pub fn with_pace(self, pace: Pace) -> Self {
        Self { pace, ..self }
    }

    /// Finds in the cache only what was put there in the same scope.
    #[must_use]
    pub fn with_cache_scope(self, scope: &str) -> Self {
        Self { cache_scope: Arc::from(scope), ..self }
    }

    /// How long it waits.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// The addresses it reaches.
    pub fn policy(&self) -> &OutgoingPolicy {
        &self.policy
    }
}

/// The factor on every wait that rlood chooses itself: between tries, while a breaker is open, between pings. 1 but in tests,
/// which then see the same course of things in less time. What a service or a user asks for (`Retry-After`, `timeout_ms`,
/// `max_outage_s`) is never scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace(f64);

impl Default for Pace {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Pace {
    /// Above 0, at most 1.
    ///
    /// # Errors
    /// Outside of that; in words.
    pub fn new(factor: f64) -> Result<Self, String> {
        if factor > 0.0 && factor <= 1.0 { Ok(Self(factor)) } else { Err("must be above 0 and at most 1".to_owned()) }
    }

    /// A wait at this pace.
    pub fn of(self, wait: Duration) -> Duration {
        wait.mul_f64(self.0)
    }
}
