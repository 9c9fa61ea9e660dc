//! Health of a job's rewards, as JSON and as Prometheus metrics.

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Problem, ProblemBody};
use super::extract::{Json, Path};
use super::list::{List, Time};
use super::prometheus::{family, line};
use crate::id::JobId;
use crate::protocol::{BreakerState, FailedTry, RawMessage, RewardHealth, RewardLatency};
use crate::spec::RewardPlan;
use crate::store::RewardHealthRow;

/// Maximum number of rewards in `/metrics`: the most recently updated ones.
const IN_METRICS: u32 = 200;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_rewards))
}

/// Health of one reward of a job.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = JobReward)]
struct View {
    /// The name of the reward.
    name: String,
    /// The type of the reward.
    #[serde(rename = "type")]
    kind: String,
    /// Weight of the reward; 0 = logged but not trained on.
    weight: f64,
    /// Whether a missing value makes the sample unscorable, and an outage pauses the job.
    required: bool,
    /// Whether this is one of the evaluation's own rewards.
    evaluation: bool,
    /// When the worker last reported; null before the first report.
    updated_at: Option<Time>,
    /// Attempt of the last report; 0 before the first report.
    attempt: u64,
    /// Fraction of samples without a value; null before the first sample.
    missing_fraction: Option<f64>,
    /// Total number of failed requests.
    failed: u64,
    /// Counters since the job's first attempt.
    #[serde(flatten)]
    health: HealthView,
}

/// The worker's report, with times as RFC 3339.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardCounts)]
struct HealthView {
    /// Samples that the reward was requested for, including cached ones.
    samples: u64,
    /// Samples without a value.
    missing: u64,
    /// Samples that the reward does not apply to.
    not_applicable: u64,
    /// Samples whose value came from the cache (`cache: true`), without a request.
    cached: u64,
    /// HTTP requests, including retries.
    requests: u64,
    /// Requests that repeat a failed one.
    retries: u64,
    /// Requests that were answered from the journal of an earlier attempt.
    replayed: u64,
    /// Requests with an answer; for rewards computed by the worker, scored rollouts.
    answers: u64,
    /// Latency of the last 512 answers; null before the first one.
    latency_ms: Option<RewardLatency>,
    /// Failed requests and samples by class: `timeout`, `connect`, `connection`, `rate_limited`, `busy`, `server_error`,
    /// `rejected`, `redirect`, `too_large`, `gone`, `address_refused`, `invalid_answer`, `sample`.
    errors: std::collections::BTreeMap<String, u64>,
    /// True from 3 failures in the last 20 requests until 5 consecutive requests succeed.
    degraded: bool,
    /// The circuit breaker; null for rewards computed by the worker.
    breaker: Option<BreakerView>,
    /// Concurrent requests; null for rewards computed by the worker.
    concurrency: Option<crate::protocol::ConcurrencyReport>,
    /// The last failed requests, latest first, at most 5.
    failures: Vec<FailureView>,
    /// The slowest answer; null before the first one.
    slowest: Option<SlowestView>,
}

/// A reward's circuit breaker.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardBreaker)]
struct BreakerView {
    /// Whether requests are allowed.
    state: BreakerState,
    /// Number of times that the breaker opened.
    opened: u64,
    /// Consecutive failures since the last answer.
    failures_in_a_row: u32,
    /// When the next request may be sent; null while the breaker is closed.
    retry_at: Option<Time>,
}

/// A failed request. Secrets are redacted, long texts are truncated.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardTryFailed)]
struct FailureView {
    /// When the request failed.
    time: Time,
    /// Failure class, as in `errors`.
    class: String,
    /// Description of the failure.
    message: String,
    /// Time from the first byte sent to the failure, in ms.
    latency_ms: f64,
    /// Optimizer step of the samples.
    step: u64,
    /// The samples as `prompt_id/sample_id`, at most 64 of them.
    samples: Vec<String>,
    /// The request as sent.
    request: RawMessage,
    /// The response as received; null if there was none.
    response: Option<RawMessage>,
}

/// The slowest answer of a reward.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardTrySlowest)]
struct SlowestView {
    /// When the answer arrived.
    time: Time,
    /// Time from the first byte sent to the last byte received, in ms.
    latency_ms: f64,
    /// Optimizer step of the samples.
    step: u64,
    /// The samples as `prompt_id/sample_id`, at most 64 of them.
    samples: Vec<String>,
    /// The request as sent.
    request: RawMessage,
    /// The response as received.
    response: Option<RawMessage>,
}

impl View {
    fn of(plan: &RewardPlan, evaluation: bool, row: Option<RewardHealthRow>) -> Self {
        let kind = serde_json::to_value(&plan.kind).unwrap_or_default();
        let (updated_at, attempt) = row.as_ref().map_or((None, 0), |row| (Some(Time(row.time)), row.attempt));
        let health = row.map(|row| row.report.health).unwrap_or_default();
        Self {
            name: plan.name.clone(),
            kind: kind["type"].as_str().unwrap_or_default().to_owned(),
            weight: plan.weight,
            required: plan.required,
            evaluation,
            updated_at,
            attempt,
            missing_fraction: missing_fraction(&health),
            failed: failed(&health),
            health: HealthView::from(health),
        }
    }
}

impl From<RewardHealth> for HealthView {
    fn from(health: RewardHealth) -> Self {
        let RewardHealth {
            samples,
            missing,
            not_applicable,
            cached,
            requests,
            retries,
            replayed,
            answers,
            answers_ms: _,
            latency_ms,
            errors,
            degraded,
            breaker,
            concurrency,
            failures,
            slowest,
        } = health;
        let breaker = breaker.map(|breaker| BreakerView {
            state: breaker.state,
            opened: breaker.opened,
            failures_in_a_row: breaker.failures_in_a_row,
            retry_at: breaker.retry_at_ms.map(Time),
        });
        let failure = |failure: FailedTry| {
            let FailedTry { time_ms, class, message, latency_ms, step, samples, request, response } = failure;
            FailureView { time: Time(time_ms), class, message, latency_ms, step, samples, request, response }
        };
        let slowest = slowest.map(|slowest| SlowestView {
            time: Time(slowest.time_ms),
            latency_ms: slowest.latency_ms,
            step: slowest.step,
            samples: slowest.samples,
            request: slowest.request,
            response: slowest.response,
        });
        Self {
            samples,
            missing,
            not_applicable,
            cached,
            requests,
            retries,
            replayed,
            answers,
            latency_ms,
            errors,
            degraded,
            breaker,
            concurrency,
            failures: failures.into_iter().map(failure).collect(),
            slowest,
        }
    }
}

fn missing_fraction(health: &RewardHealth) -> Option<f64> {
    (health.samples > 0).then(|| health.missing as f64 / health.samples as f64)
}

/// Returns the number of failed requests: all errors except those of single samples.
fn failed(health: &RewardHealth) -> u64 {
    health.errors.iter().filter(|(class, _)| *class != "sample").map(|(_, number)| number).sum()
}

/// Get the health of a job's rewards.
///
/// Latency, errors, retries, missing values, the circuit breaker; the last failed requests with their answers (credentials are
/// redacted), and the slowest. Updated every other second while the job runs, and kept after its end. The job's own rewards come
/// first, then the evaluation's.
#[utoipa::path(
    get, path = "/jobs/{id}/rewards", tag = "Rewards", operation_id = "list_job_rewards",
    params(("id" = JobId, Path, description = "The job")),
    responses(
        (status = 200, description = "All rewards of the job", body = List<View>),
        (status = 404, description = "There is no such job", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
async fn list_rewards(State(state): State<AppState>, Path(id): Path<JobId>) -> Result<Json<List<View>>, Problem> {
    let plan = state.store.job_get(id).await?.plan()?;
    let mut rows = state.store.reward_health(id).await?;
    let mut view = |reward: &RewardPlan, evaluation: bool| {
        let at = rows.iter().position(|row| row.report.name == reward.name && row.report.evaluation == evaluation);
        View::of(reward, evaluation, at.map(|at| rows.swap_remove(at)))
    };
    let of_eval = plan.eval.iter().filter_map(|eval| eval.rewards.as_ref()).flatten();
    let mut data: Vec<View> = plan.rewards.iter().map(|reward| view(reward, false)).collect();
    data.extend(of_eval.map(|reward| view(reward, true)));
    Ok(Json(List { data, next: None }))
}

/// A Prometheus metric: name, type, help text, and the function that returns its value for a reward.
type Family = (&'static str, &'static str, &'static str, fn(&RewardHealth) -> Option<f64>);

const FAMILIES: [Family; 9] = [
    ("requests_total", "counter", "HTTP requests to the reward service, including retries.", |health| {
        Some(health.requests as f64)
    }),
    ("retries_total", "counter", "Requests to the reward service that repeat a failed one.", |health| {
        Some(health.retries as f64)
    }),
    ("samples_total", "counter", "Samples that the reward was requested for.", |health| Some(health.samples as f64)),
    ("missing_total", "counter", "Samples for which the reward returned no value.", |health| {
        Some(health.missing as f64)
    }),
    ("cached_total", "counter", "Samples whose reward came from the cache.", |health| Some(health.cached as f64)),
    ("missing_fraction", "gauge", "Fraction of samples for which the reward returned no value.", missing_fraction),
    ("degraded", "gauge", "1 while too many requests to the reward service fail.", |health| {
        Some(f64::from(u8::from(health.degraded)))
    }),
    ("breaker_opened_total", "counter", "Number of times that the reward's circuit breaker opened.", |health| {
        Some(health.breaker.as_ref()?.opened as f64)
    }),
    ("concurrency_limit", "gauge", "Current limit of concurrent requests to the reward service.", |health| {
        Some(f64::from(health.concurrency.as_ref()?.limit))
    }),
];

/// Writes the metrics of the most recently updated rewards, for the jobs that the caller sees.
pub(super) async fn write_metrics(state: &AppState, caller: &Caller, text: &mut String) -> Result<(), Problem> {
    let rows = state.store.reward_health_latest(caller.sees(), IN_METRICS).await?;
    // Job ids and reward names contain no character that must be escaped in a Prometheus label.
    let labels = |row: &RewardHealthRow| {
        let of = if row.report.evaluation { "eval" } else { "train" };
        format!("job=\"{}\",reward=\"{}\",rewards_of=\"{of}\"", row.job, row.report.name)
    };
    let rows: Vec<(String, RewardHealth)> = rows.into_iter().map(|row| (labels(&row), row.report.health)).collect();
    for (name, kind, help, value) in FAMILIES {
        family(text, &format!("rlood_reward_{name}"), kind, help);
        for (labels, health) in &rows {
            if let Some(value) = value(health) {
                line(text, &format!("rlood_reward_{name}{{{labels}}}"), value);
            }
        }
    }
    family(
        text,
        "rlood_reward_errors_total",
        "counter",
        "Failed requests and samples of the reward, by class of error.",
    );
    for (labels, health) in &rows {
        for (class, number) in &health.errors {
            line(text, &format!("rlood_reward_errors_total{{{labels},class=\"{class}\"}}"), number);
        }
    }
    family(text, "rlood_reward_breaker_state", "gauge", "1 for the current state of the reward's circuit breaker.");
    for (labels, health) in &rows {
        let Some(breaker) = &health.breaker else { continue };
        for state in BreakerState::ALL {
            let name = format!("rlood_reward_breaker_state{{{labels},state=\"{}\"}}", state.as_str());
            line(text, &name, u8::from(breaker.state == state));
        }
    }
    family(
        text,
        "rlood_reward_latency_seconds",
        "summary",
        "Time from a request to its answer; quantiles of the last 512 requests.",
    );
    for (labels, health) in &rows {
        if let Some(RewardLatency { p50, p95, max: _ }) = health.latency_ms {
            for (quantile, ms) in [("0.5", p50), ("0.95", p95)] {
                line(text, &format!("rlood_reward_latency_seconds{{{labels},quantile=\"{quantile}\"}}"), ms / 1e3);
            }
        }
        line(text, &format!("rlood_reward_latency_seconds_sum{{{labels}}}"), health.answers_ms / 1e3);
        line(text, &format!("rlood_reward_latency_seconds_count{{{labels}}}"), health.answers);
    }
    Ok(())
}
