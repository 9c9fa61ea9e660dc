//! How the rewards of a job do: for people, and for Prometheus.

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

/// Rewards that `/metrics` speaks of: those told of last.
const IN_METRICS: u32 = 200;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_rewards))
}

/// How one reward of a job does.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = JobReward)]
struct View {
    /// Its name.
    name: String,
    /// Its type.
    #[serde(rename = "type")]
    kind: String,
    /// 0 = metric only.
    weight: f64,
    /// A missing value makes the sample unscorable, and an outage pauses the job.
    required: bool,
    /// It is one of the evaluation's own rewards.
    evaluation: bool,
    /// When the worker told last; null before the first time.
    updated_at: Option<Time>,
    /// The attempt that told last; 0 before the first time.
    attempt: u64,
    /// Of the samples, how many got no value; null before the first.
    missing_fraction: Option<f64>,
    /// Tries that brought nothing usable, in all.
    failed: u64,
    /// Counts since the job's first attempt.
    #[serde(flatten)]
    health: HealthView,
}

/// As in the worker's report, with times for people.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardCounts)]
struct HealthView {
    /// Samples it was asked about, cached ones included.
    samples: u64,
    /// Samples that got no value.
    missing: u64,
    /// Samples that it does not apply to.
    not_applicable: u64,
    /// Samples whose value was known (`cache: true`): nobody was asked.
    cached: u64,
    /// Tries over HTTP.
    requests: u64,
    /// Tries that repeat one that brought nothing usable.
    retries: u64,
    /// Requests whose answer stood in the journal of a former attempt.
    replayed: u64,
    /// Tries that brought an answer; for rewards computed by the worker, rollouts scored.
    answers: u64,
    /// Of the last 512 answers; null before the first.
    latency_ms: Option<RewardLatency>,
    /// Tries and samples that went wrong, by class: `timeout`, `connect`, `connection`, `rate_limited`, `busy`,
    /// `server_error`, `rejected`, `redirect`, `too_large`, `gone`, `address_refused`, `invalid_answer`, `sample`.
    errors: std::collections::BTreeMap<String, u64>,
    /// At least 3 of the last 20 tries brought nothing usable, and no 5 in a row were well since.
    degraded: bool,
    /// Null for rewards computed by the worker.
    breaker: Option<BreakerView>,
    /// Requests at once; null for rewards computed by the worker.
    concurrency: Option<crate::protocol::ConcurrencyReport>,
    /// The last tries that went wrong, latest first, at most 5.
    failures: Vec<FailureView>,
    /// The answer that took longest.
    slowest: Option<SlowestView>,
}

/// A reward's circuit breaker.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardBreaker)]
struct BreakerView {
    /// Whether requests are let through.
    state: BreakerState,
    /// How often it opened.
    opened: u64,
    /// Failures since the last answer.
    failures_in_a_row: u32,
    /// When the next request may go; null while it is closed.
    retry_at: Option<Time>,
}

/// A try that went wrong. Secrets are redacted, long texts are cut.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardTryFailed)]
struct FailureView {
    /// When.
    time: Time,
    /// As in `errors`.
    class: String,
    /// What happened, in words.
    message: String,
    /// From the first byte sent to the end, ms.
    latency_ms: f64,
    /// The optimizer step the samples are for.
    step: u64,
    /// Which samples, as `prompt_id/sample_id`, at most 64 of them.
    samples: Vec<String>,
    /// As sent.
    request: RawMessage,
    /// As received; null when nothing came.
    response: Option<RawMessage>,
}

/// The answer that took longest.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardTrySlowest)]
struct SlowestView {
    /// When.
    time: Time,
    /// From the first byte sent to the last received, ms.
    latency_ms: f64,
    /// The optimizer step the samples are for.
    step: u64,
    /// Which samples, as `prompt_id/sample_id`, at most 64 of them.
    samples: Vec<String>,
    /// As sent.
    request: RawMessage,
    /// As received.
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

/// Samples have errors of their own.
fn failed(health: &RewardHealth) -> u64 {
    health.errors.iter().filter(|(class, _)| *class != "sample").map(|(_, number)| number).sum()
}

/// How the rewards of a job do
///
/// Latency, errors, retries, missing values, the circuit breaker; the last failed requests with their answers (credentials are
/// redacted), and the slowest. Updated every other second while the job runs, and kept when it is over. The job's own rewards
/// come first, then the evaluation's.
#[utoipa::path(
    get, path = "/jobs/{id}/rewards", tag = "Rewards", operation_id = "list_job_rewards",
    params(("id" = JobId, Path, description = "The job")),
    responses(
        (status = 200, description = "All its rewards", body = List<View>),
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

/// One family of measurements: name, kind, help, and its value of a reward.
type Family = (&'static str, &'static str, &'static str, fn(&RewardHealth) -> Option<f64>);

const FAMILIES: [Family; 9] = [
    ("requests_total", "counter", "Tries over HTTP.", |health| Some(health.requests as f64)),
    ("retries_total", "counter", "Tries that repeat one that brought nothing usable.", |health| {
        Some(health.retries as f64)
    }),
    ("samples_total", "counter", "Samples it was asked about.", |health| Some(health.samples as f64)),
    ("missing_total", "counter", "Samples that got no value.", |health| Some(health.missing as f64)),
    ("cached_total", "counter", "Samples whose value was known.", |health| Some(health.cached as f64)),
    ("missing_fraction", "gauge", "Of the samples, how many got no value.", missing_fraction),
    ("degraded", "gauge", "1 while too many tries bring nothing usable.", |health| {
        Some(f64::from(u8::from(health.degraded)))
    }),
    ("breaker_opened_total", "counter", "How often its circuit breaker opened.", |health| {
        Some(health.breaker.as_ref()?.opened as f64)
    }),
    ("concurrency_limit", "gauge", "Requests at once, at present.", |health| {
        Some(f64::from(health.concurrency.as_ref()?.limit))
    }),
];

/// For `/metrics`: the rewards told of last, of the jobs that the caller sees.
pub(super) async fn write_metrics(state: &AppState, caller: &Caller, text: &mut String) -> Result<(), Problem> {
    let rows = state.store.reward_health_latest(caller.sees(), IN_METRICS).await?;
    // Ids and names of rewards have no character that a label would have to escape.
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
    family(text, "rlood_reward_errors_total", "counter", "Tries and samples that went wrong, by class.");
    for (labels, health) in &rows {
        for (class, number) in &health.errors {
            line(text, &format!("rlood_reward_errors_total{{{labels},class=\"{class}\"}}"), number);
        }
    }
    family(text, "rlood_reward_breaker_state", "gauge", "1 for the state its circuit breaker is in.");
    for (labels, health) in &rows {
        let Some(breaker) = &health.breaker else { continue };
        for state in BreakerState::ALL {
            let name = format!("rlood_reward_breaker_state{{{labels},state=\"{}\"}}", state.as_str());
            line(text, &name, u8::from(breaker.state == state));
        }
    }
    family(text, "rlood_reward_latency_seconds", "summary", "From a request to its answer; quantiles of the last 512.");
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
