//! How a job's rewards do: counted by the worker, kept and shown by the server, also when the job is over.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a worker tells of a job's rewards, all of them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RewardReports {
    /// The fence.
    pub attempt: u64,
    /// One a reward.
    pub rewards: Vec<RewardReport>,
}

/// What there is to tell of one reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewardReport {
    /// Its name.
    pub name: String,
    /// It is one of the evaluation's own rewards, which may have the names of the job's.
    pub evaluation: bool,
    /// Since the job's first attempt.
    pub health: RewardHealth,
}

/// How one reward has done since the job's first attempt.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RewardHealth {
    /// Samples it was asked about, cached ones included.
    pub samples: u64,
    /// Samples that got no value.
    pub missing: u64,
    /// Samples that it does not apply to.
    pub not_applicable: u64,
    /// Samples whose value was known (`cache: true`): nobody was asked.
    pub cached: u64,
    /// Tries over HTTP.
    pub requests: u64,
    /// Tries that repeat one that brought nothing usable.
    pub retries: u64,
    /// Requests whose answer stood in the journal of a former attempt.
    pub replayed: u64,
    /// Tries that brought an answer; for rewards computed by the worker, rollouts scored.
    pub answers: u64,
    /// Of all these together, ms.
    pub answers_ms: f64,
    /// Of the last 512 of them; null before the first.
    pub latency_ms: Option<RewardLatency>,
    /// Tries and samples that went wrong, by class: `timeout`, `connect`, `connection`, `rate_limited`, `busy`,
    /// `server_error`, `rejected`, `redirect`, `too_large`, `gone`, `address_refused`, `invalid_answer`, `sample`.
    pub errors: BTreeMap<String, u64>,
    /// At least 3 of the last 20 tries brought nothing usable, and no 5 in a row were well since.
    pub degraded: bool,
    /// Null for rewards computed by the worker.
    pub breaker: Option<BreakerReport>,
    /// Null for rewards computed by the worker.
    pub concurrency: Option<ConcurrencyReport>,
    /// The last tries that went wrong, latest first, at most 5.
    pub failures: Vec<FailedTry>,
    /// The try with an answer that took longest.
    pub slowest: Option<SlowTry>,
}

/// How long answers take, ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardLatency {
    /// The median.
    pub p50: f64,
    /// All but the slowest twentieth.
    pub p95: f64,
    /// The slowest.
    pub max: f64,
}

/// Whether requests are let through to an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BreakerState {
    /// They are.
    #[default]
    Closed,
    /// None is, until `retry_at`.
    Open,
    /// One is under way: its answer decides.
    HalfOpen,
}

impl BreakerState {
    /// All, in the order of trouble.
    pub const ALL: [BreakerState; 3] = [BreakerState::Closed, BreakerState::HalfOpen, BreakerState::Open];

    /// The name used in the API.
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
    /// Whether requests are let through.
    pub state: BreakerState,
    /// How often it opened.
    pub opened: u64,
    /// Failures since the last answer.
    pub failures_in_a_row: u32,
    /// When the next request may go, Unix ms; null while it is closed.
    pub retry_at_ms: Option<i64>,
}

/// How many requests an endpoint gets at once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConcurrencyReport {
    /// At present: falls when the service is overloaded (429, 503, timeouts, latency), rises again with every answer.
    pub limit: u32,
    /// `max_concurrency`.
    pub max: u32,
}

/// A try that went wrong. Secrets are redacted, long texts are cut.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FailedTry {
    /// Unix ms.
    pub time_ms: i64,
    /// As in `errors`.
    pub class: String,
    /// What happened, in words.
    pub message: String,
    /// From the first byte sent to the end, ms.
    pub latency_ms: f64,
    /// The optimizer step the samples are for.
    pub step: u64,
    /// Which samples, as `prompt_id/sample_id`, at most 64 of them.
    pub samples: Vec<String>,
    /// As sent.
    pub request: RawMessage,
    /// As received; null when nothing came.
    pub response: Option<RawMessage>,
}

/// An answer that took long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowTry {
    /// Unix ms.
    pub time_ms: i64,
    /// From the first byte sent to the last received, ms.
    pub latency_ms: f64,
    /// The optimizer step the samples are for.
    pub step: u64,
    /// Which samples, as `prompt_id/sample_id`, at most 64 of them.
    pub samples: Vec<String>,
    /// As sent.
    pub request: RawMessage,
    /// As received.
    pub response: Option<RawMessage>,
}

/// A request or a response, for people. Secrets, credentials and tokens are replaced by `(redacted)`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RawMessage {
    /// Where a request went; null for responses.
    pub url: Option<String>,
    /// The HTTP status of a response; null for requests.
    pub status: Option<u16>,
    /// The headers.
    pub headers: BTreeMap<String, String>,
    /// The body, cut at 4 KiB.
    pub body: String,
}
