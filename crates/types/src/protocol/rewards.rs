//! Reward statistics of a job: counted by the worker, stored and shown by the server, also after the job has ended.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A worker's report on all rewards of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RewardReports {
    /// Number of the attempt.
    pub attempt: u64,
    /// One report per reward.
    pub rewards: Vec<RewardReport>,
}

/// The report on one reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewardReport {
    /// Name of the reward.
    pub name: String,
    /// Whether it is a separate reward of the evaluation, which may have the same name as one of the job's rewards.
    pub evaluation: bool,
    /// Statistics since the job's first attempt.
    pub health: RewardHealth,
}

/// Statistics of one reward since the job's first attempt.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RewardHealth {
    /// Number of samples, including cached ones.
    pub samples: u64,
    /// Number of samples without a value.
    pub missing: u64,
    /// Number of samples to which the reward does not apply.
    pub not_applicable: u64,
    /// Number of samples whose value came from the cache (`cache: true`), without a request.
    pub cached: u64,
    /// Number of HTTP requests, including retries.
    pub requests: u64,
    /// Number of requests that repeat a failed one.
    pub retries: u64,
    /// Number of requests whose answer was in the journal of a former attempt.
    pub replayed: u64,
    /// Number of requests with a usable response; for rewards that the worker computes itself, the number of scored rollouts.
    pub answers: u64,
    /// Total duration of the requests with a usable response, in milliseconds.
    pub answers_ms: f64,
    /// Latency of the last 512 requests with a usable response; null before the first.
    pub latency_ms: Option<RewardLatency>,
    /// Number of failed requests and samples by class: `timeout`, `connect`, `connection`, `rate_limited`, `busy`, `server_error`,
    /// `rejected`, `redirect`, `too_large`, `gone`, `address_refused`, `invalid_answer`, `sample`.
    pub errors: BTreeMap<String, u64>,
    /// Whether the reward is degraded: at least 3 of the last 20 requests failed, and there have not been 5
    /// successes in a row since.
    pub degraded: bool,
    /// State of the circuit breaker; null for rewards that the worker computes.
    pub breaker: Option<BreakerReport>,
    /// Limit of concurrent requests; null for rewards that the worker computes.
    pub concurrency: Option<ConcurrencyReport>,
    /// The last failed requests, latest first, at most 5.
    pub failures: Vec<FailedTry>,
    /// The slowest request with a response; null = none.
    pub slowest: Option<SlowTry>,
}

/// Latency of responses, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardLatency {
    /// Median latency, in milliseconds.
    pub p50: f64,
    /// 95th percentile of the latency, in milliseconds.
    pub p95: f64,
    /// Maximum latency, in milliseconds.
    pub max: f64,
}

/// State of an endpoint's circuit breaker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BreakerState {
    /// Requests are sent normally.
    #[default]
    Closed,
    /// No requests are sent until `retry_at`.
    Open,
    /// One test request is in flight; its result closes or reopens the circuit breaker.
    HalfOpen,
}

impl BreakerState {
    /// All states of a circuit breaker, in order of severity.
    pub const ALL: [BreakerState; 3] = [BreakerState::Closed, BreakerState::HalfOpen, BreakerState::Open];

    /// Returns the name used in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half_open",
        }
    }
}

/// The circuit breaker of a reward's endpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BreakerReport {
    /// State of the circuit breaker.
    pub state: BreakerState,
    /// Number of times that the circuit breaker opened.
    pub opened: u64,
    /// Number of failures in a row since the last response.
    pub failures_in_a_row: u32,
    /// Earliest time of the next request, Unix time in milliseconds; null while the breaker is closed.
    pub retry_at_ms: Option<i64>,
}

/// The limit of concurrent requests to an endpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConcurrencyReport {
    /// Current limit. It falls when the service is overloaded (429, 503, timeouts, latency) and rises with every response.
    pub limit: u32,
    /// Maximum of the limit (`max_concurrency`).
    pub max: u32,
}

/// A failed request. Secrets are redacted, and long texts are truncated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FailedTry {
    /// Time of the request, Unix time in milliseconds.
    pub time_ms: i64,
    /// Class of the failure, as in `errors`.
    pub class: String,
    /// Human-readable description of the failure.
    pub message: String,
    /// Duration from the first byte sent to the failure, in milliseconds.
    pub latency_ms: f64,
    /// Optimizer step that the samples belong to.
    pub step: u64,
    /// The samples, as `prompt_id/sample_id`, at most 64.
    pub samples: Vec<String>,
    /// The request as sent.
    pub request: RawMessage,
    /// The response as received; null = none arrived.
    pub response: Option<RawMessage>,
}

/// A slow request that got a response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowTry {
    /// Time of the request, Unix time in milliseconds.
    pub time_ms: i64,
    /// Duration from the first byte sent to the last byte received, in milliseconds.
    pub latency_ms: f64,
    /// Optimizer step that the samples belong to.
    pub step: u64,
    /// The samples, as `prompt_id/sample_id`, at most 64.
    pub samples: Vec<String>,
    /// The request as sent.
    pub request: RawMessage,
    /// The response as received.
    pub response: Option<RawMessage>,
}

/// A request or a response for display. Secrets, credentials and tokens are replaced by `(redacted)`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RawMessage {
    /// URL of a request; null for responses.
    pub url: Option<String>,
    /// HTTP status of a response; null for requests.
    pub status: Option<u16>,
    /// Headers of the message.
    pub headers: BTreeMap<String, String>,
    /// Body of the message, truncated at 4 KiB.
    pub body: String,
}
