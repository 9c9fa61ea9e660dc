//! The reward test endpoint: tests a reward before a job depends on it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use axum::extract::State;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody};
use super::extract::Json;
use super::heavy;
use super::python_rewards;
use super::reach;
use super::reward_test_journal::TestJournal;
use crate::id::JobId;
use crate::outgoing::OutgoingPolicy;
use crate::reward::builtin::Builtin;
use crate::reward::client::RewardClient;
use crate::reward::journal::Journal;
use crate::reward::local::Local;
use crate::reward::python::{PythonFunction, PythonFunctions};
use crate::reward::trial::read_samples;
use crate::reward::webhook::{Exchange, Ping, Webhook};
use crate::reward::{BuildError, JobContext, Judged, Judgement, Reward, RewardFailure, SampleError};
use crate::rollout::{RewardSample, RewardValue, RolloutId};
use crate::spec::{FieldError, OnInvalid, RewardKind, RewardPlan, RewardSecrets, ServicePlan, read_single_reward};

/// Maximum timeout of a test in ms, both per attempt and for an answer that comes later.
const MAX_TIMEOUT_MS: u64 = 30_000;

/// Time limit for reading a reward and its samples.
const READ_WITHIN: Duration = Duration::from_secs(20);
/// Time limit for built-in rewards. Samples that are not graded by then have no value.
const GRADE_WITHIN: Duration = Duration::from_secs(20);
/// Extra time after the limit in which a built-in reward can finish its current sample.
const LAST_SAMPLE: Duration = Duration::from_secs(5);

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(test_reward))
}

/// The result of a reward test.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardTest)]
struct Report {
    /// Whether every sample has a value or is not applicable.
    ok: bool,
    /// One result per sample, in order.
    results: Vec<TestResult>,
    /// Total time of scoring, in ms.
    latency_ms: f64,
    /// The answer to `reward.ping`; null for built-in rewards.
    ping: Option<Ping>,
    /// The HTTP requests and responses, the ping first. Values of the reward's headers are redacted. Empty for built-in rewards.
    exchanges: Vec<Exchange>,
    /// Problems that do not prevent use but should be fixed.
    warnings: Vec<String>,
}

/// The result of one sample.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardTestResult)]
struct TestResult {
    /// Id of the sample, as sent to the service.
    sample_id: String,
    /// The value; null if there is none.
    reward: Option<f64>,
    /// Whether the reward does not apply to this sample (null without an error).
    not_applicable: bool,
    /// Why there is no value; null otherwise.
    error: Option<SampleError>,
    /// An explanation from the service; null if none.
    reason: Option<String>,
    /// Additional figures from the service.
    #[schema(value_type = Object)]
    metrics: Map<String, Value>,
}

/// Test a reward on samples.
///
/// Sends one request without retries, so the response shows exactly what the service answers. `reward` has the same form as in a
/// job. A sample is `{prompt, completion, columns}`; other fields of a sample count as columns too. If a service answers later
/// (202), the test waits up to 30 s; a job waits until `deadline_ms`. Built-in rewards compute for up to 20 s: a sample that is not
/// reached by then has the error `not_in_time`.
#[utoipa::path(
    post, path = "/rewards/test", tag = "Rewards", operation_id = "test_reward",
    request_body(content = Object, example = json!({
        "reward": {"type": "webhook", "url": "https://rm.example/score", "secret": "whsec_…"},
        "samples": [{"prompt": "What is 2 + 2?", "completion": "4", "columns": {"answer": "4"}}]
    })),
    responses(
        (status = 200, description = "The result of the test, also if the reward returned no valid value", body = Report),
        (status = 422, description = "The reward or the samples are not valid", body = ProblemBody, content_type = "application/problem+json"),
        (status = 429, description = "Too many requests with this API key wait for expensive work", body = ProblemBody, content_type = "application/problem+json"),
        (status = 503, description = "The server is busy or is shutting down", body = ProblemBody, content_type = "application/problem+json"),
        (status = 504, description = "Scoring a single sample takes too much work", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
async fn test_reward(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<Value>,
) -> Result<Json<Report>, Problem> {
    let (mut plan, secrets, samples) = heavy::run(&state, &caller, READ_WITHIN, move |_| read_test(&body)).await??;
    if is_built_in(&plan.kind) {
        let limit = GRADE_WITHIN + LAST_SAMPLE;
        let graded = heavy::run(&state, &caller, limit, move |stop| grade(&plan, &samples, stop)).await?;
        return graded.map(Json).map_err(unusable);
    }
    if let Some(error) = python_rewards::resolve_one(&state, &caller, &mut plan, "/reward").await? {
        return Err(Problem::new(Code::InvalidBody, "the reward cannot be tested; see 'errors'").items(vec![error]));
    }
    let outgoing = reach::outgoing(&state).await?;
    let journal: Arc<dyn Journal> = Arc::new(TestJournal::new(&state).await?);
    let slot = heavy::slot(&state, &state.service_tests, &caller).await?;
    let trying = async move { try_reward(&plan, &secrets, &outgoing, &samples, Some(journal)).await };
    heavy::drive(&state, slot, trying).await?.map(Json).map_err(unusable)
}

fn unusable(error: BuildError) -> Problem {
    Problem::new(Code::InvalidBody, error.to_string()).item("/reward", "unusable", error.detail)
}

/// Whether a reward is built in, that is computed in this process.
pub(super) fn is_built_in(kind: &RewardKind) -> bool {
    kind.service().is_none() && !matches!(kind, RewardKind::RewardModel(_))
}

/// Tests a built-in reward on this thread.
fn grade(plan: &RewardPlan, samples: &[RewardSample], stop: &AtomicBool) -> Result<Report, BuildError> {
    let builtin = Builtin::of_plan(plan)?;
    let start = Instant::now();
    let mut judgements = builtin.judge_until(samples, stop, start + GRADE_WITHIN);
    let late = format!("the sample was not scored within {} s: send fewer or shorter samples", GRADE_WITHIN.as_secs());
    judgements.resize_with(samples.len(), || Judgement::missing("not_in_time", late.clone()));
    let judged = Judged { judgements, ..Judged::default() };
    let warnings = columns_missing(plan, samples);
    Ok(report_of(samples, Tried { judged, start, ping: None, exchanges: Vec::new(), warnings }))
}

type Test = (RewardPlan, RewardSecrets, Vec<RewardSample>);

/// Parses the request for a reward test and reports all errors together.
fn read_test(body: &Value) -> Result<Test, Problem> {
    let mut errors = Vec::new();
    let mut refuse = |found: Vec<FieldError>| {
        errors.extend(found);
    };
    let reward = read_single_reward(body).map_err(&mut refuse);
    let samples = read_samples(body.get("samples")).map_err(&mut refuse);
    if let Some(object) = body.as_object() {
        for name in object.keys().filter(|name| !matches!(name.as_str(), "reward" | "samples")) {
            errors.push(item(format!("/{name}"), "unknown_field", "unknown field; known fields: reward, samples"));
        }
    }
    let (Ok((plan, secrets)), Ok(samples), true) = (reward, samples, errors.is_empty()) else {
        return Err(Problem::new(Code::InvalidBody, "the reward cannot be tested; see 'errors'").items(errors));
    };
    Ok((plan, secrets, samples))
}

/// Tests a reward that is a service, or a model that runs elsewhere.
async fn try_reward(
    plan: &RewardPlan,
    secrets: &RewardSecrets,
    outgoing: &OutgoingPolicy,
    samples: &[RewardSample],
    journal: Option<Arc<dyn Journal>>,
) -> Result<Report, BuildError> {
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(0), probe: true };
    let (mut ping, mut exchanges, mut warnings) = (None, Vec::new(), Vec::new());
    let judged;
    let start;
    if plan.kind.service().is_some() {
        if matches!(plan.kind, RewardKind::Webhook(_)) && secrets.secret.is_none() {
            warnings.push(
                "without 'secret' the requests are not signed: the reward service cannot verify who sends them"
                    .to_owned(),
            );
        }
        let patient = RewardPlan { kind: plan.kind.with_service(once), ..plan.clone() };
        let asked = Asked::of(&patient, secrets, outgoing, journal)?;
        let webhook = asked.webhook();
        if let Err(failure) = asked.prepare().await {
            let detail = failure.to_string();
            return Err(BuildError { reward: plan.name.clone(), detail: without_name(&detail, &plan.name) });
        }
        ping = webhook.check_health().await;
        start = Instant::now();
        judged = webhook.judge(&job, samples).await;
        exchanges = webhook.exchanges();
        warnings.extend(webhook.remarks());
        if exchanges.iter().any(|exchange| exchange.response.as_ref().is_some_and(|response| response.status == 202)) {
            let deadline_ms = plan.kind.service().map_or(0, |service| service.deadline_ms);
            warnings.push(format!(
                "the service answers later (202): this test waits {} s for it, a job {} s (deadline_ms)",
                deadline_ms.min(MAX_TIMEOUT_MS) / 1000,
                deadline_ms / 1000
            ));
        }
    } else {
        let RewardKind::RewardModel(model) = &plan.kind else {
            let detail = "a built-in reward has no reward service that the test could call".to_owned();
            return Err(BuildError { reward: plan.name.clone(), detail });
        };
        // Fails for a reward that this process cannot compute; the error says where to test it instead.
        let local = Local::new(&plan.name, model, None)?;
        start = Instant::now();
        judged = local.judge(&job, samples).await;
    }
    if let Some((most, service)) =
        ping.as_ref().and_then(|ping: &Ping| ping.reply.as_ref()?.max_batch_samples).zip(plan.kind.service())
        && most < service.max_batch_samples
    {
        warnings.push(format!(
            "the service accepts {most} samples in one request, less than max_batch_samples ({}): set it to {most}",
            service.max_batch_samples
        ));
    }
    let judged = judged.unwrap_or_else(|failure| {
        let failure = failure.to_failure(0);
        Judged {
            judgements: vec![Judgement::missing(failure.code, failure.message); samples.len()],
            ..Judged::default()
        }
    });
    Ok(report_of(samples, Tried { judged, start, ping, exchanges, warnings }))
}

/// The reward under test: a service, or a Python function in a process that runs only for this test.
enum Asked {
    Service(Box<Webhook>),
    Python(Box<PythonFunction>),
}

impl Asked {
    fn of(
        plan: &RewardPlan,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
        journal: Option<Arc<dyn Journal>>,
    ) -> Result<Self, BuildError> {
        let watched = |webhook: Webhook| webhook.with_journal(journal).recording();
        if let RewardKind::Python(python) = &plan.kind {
            let client = RewardClient::new(outgoing);
            let client = client.map_err(|detail| BuildError { reward: plan.name.clone(), detail })?;
            let files = PythonFunctions::default();
            let function = PythonFunction::new(plan, python, &files, &client, |webhook, _| watched(webhook))?;
            return Ok(Self::Python(Box::new(function)));
        }
        let webhook = Webhook::of_kind(&plan.name, &plan.kind, secrets, outgoing)?.bounded(plan.max_abs_reward);
        Ok(Self::Service(Box::new(watched(webhook))))
    }

    fn webhook(&self) -> &Webhook {
        match self {
            Self::Service(webhook) => webhook,
            Self::Python(function) => function.webhook(),
        }
    }

    async fn prepare(&self) -> Result<(), RewardFailure> {
        match self {
            Self::Service(_) => Ok(()),
            Self::Python(function) => function.prepare().await,
        }
    }
}

/// Removes the reward's name from an error message, because the response shows the name next to it.
fn without_name(detail: &str, name: &str) -> String {
    detail.strip_prefix(&format!("reward '{name}': ")).unwrap_or(detail).to_owned()
}

/// The results of a reward test, before they become the response.
struct Tried {
    judged: Judged,
    start: Instant,
    ping: Option<Ping>,
    exchanges: Vec<Exchange>,
    warnings: Vec<String>,
}

fn report_of(samples: &[RewardSample], tried: Tried) -> Report {
    let Tried { judged, start, ping, exchanges, mut warnings } = tried;
    let latency_ms = (start.elapsed().as_secs_f64() * 1e6).round() / 1e3;
    let counts = judged.counts;
    if counts.unknown_ids > 0 {
        warnings.push(format!("{} results in the answer have an unknown sample id", counts.unknown_ids));
    }
    if counts.duplicate_ids > 0 {
        warnings.push(format!(
            "{} results in the answer are for samples that already have a result; the first one counts",
            counts.duplicate_ids
        ));
    }
    let results: Vec<TestResult> = samples.iter().zip(judged.judgements).map(test_result).collect();
    let ok = results.iter().all(|result| result.error.is_none());
    Report { ok, results, latency_ms, ping, exchanges, warnings }
}

/// Checks the samples for the columns that a built-in reward names, as a job checks its dataset. A row without the column is only
/// not applicable, so a mistyped name would go unnoticed.
fn columns_missing(plan: &RewardPlan, samples: &[RewardSample]) -> Vec<String> {
    let missing = |(field, column): (String, &str)| {
        let sample = samples.iter().find(|sample| !sample.columns.contains_key(column))?;
        let there = sample.columns.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        Some(format!(
            "sample '{}' has no column '{column}' ({field}); its columns are: {}",
            sample.sample_id,
            if there.is_empty() { "none" } else { &there }
        ))
    };
    plan.kind.columns().into_iter().filter_map(missing).collect()
}

/// Limits the settings of a reward under test to one attempt, whatever the result.
fn once(service: &mut ServicePlan) {
    service.max_tries = 1;
    service.max_invalid_tries = 0;
    service.max_outage_s = 0;
    service.on_invalid = OnInvalid::Mask;
    service.timeout_ms = service.timeout_ms.min(MAX_TIMEOUT_MS);
    service.deadline_ms = service.deadline_ms.min(MAX_TIMEOUT_MS);
}

fn test_result((sample, judgement): (&RewardSample, Judgement)) -> TestResult {
    let Judgement { value, error, reason, metrics } = judgement;
    TestResult {
        sample_id: sample.sample_id.clone(),
        reward: value.number(),
        not_applicable: value == RewardValue::NotApplicable,
        error,
        reason,
        metrics,
    }
}

fn item(pointer: String, code: &str, detail: impl Into<String>) -> FieldError {
    FieldError { pointer, code: code.to_owned(), detail: detail.into() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::demo::reward_service::ExampleService;
    use crate::reward::signature::Key;

    async fn report(reward: Value, samples: Value) -> Report {
        let body = json!({"reward": reward, "samples": samples});
        let (plan, secrets) = read_single_reward(&body).unwrap();
        let samples = read_samples(body.get("samples")).unwrap();
        if is_built_in(&plan.kind) {
            return grade(&plan, &samples, &AtomicBool::new(false)).unwrap();
        }
        let outgoing = OutgoingPolicy::parse(&["loopback"]).unwrap();
        try_reward(&plan, &secrets, &outgoing, &samples, None).await.unwrap()
    }

    #[tokio::test]
    async fn a_built_in_reward_is_tried_without_a_wire() {
        let samples = json!([{"prompt": "p", "completion": "4", "answer": 4}, {"prompt": "p", "completion": "5"}]);
        let report = report(json!({"type": "exact_match", "column": "answer", "weight": 0}), samples).await;
        assert_eq!(report.results[0].reward, Some(1.0));
        assert!(report.results[1].not_applicable && report.results[1].error.is_none());
        assert_eq!(report.warnings, ["sample 's_1' has no column 'answer' (column); its columns are: none"]);
        assert!(report.ok && report.ping.is_none() && report.exchanges.is_empty());
    }

    #[tokio::test]
    async fn a_webhook_shows_what_went_over_the_wire_without_secrets() {
        let secret = Key::generate().unwrap();
        let service = ExampleService::start(&secret).await.unwrap();
        let reward = json!({"type": "webhook", "url": service.url(), "secret": secret,
                            "headers": {"authorization": "Bearer hidden-token"}});
        let samples = json!([{"prompt": "2+2?", "completion": " 4 ", "columns": {"answer": "4"}}]);
        let report = report(reward, samples).await;
        assert!(report.ok && report.ping.as_ref().unwrap().ok);
        assert_eq!(report.ping.as_ref().unwrap().reply.as_ref().unwrap().max_batch_samples, Some(256));
        assert_eq!(report.results[0].reward, Some(1.0));
        assert_eq!(report.exchanges.len(), 2);
        assert_eq!(report.exchanges[1].request.headers["authorization"], "(redacted)");
        let text = serde_json::to_string(&report).unwrap();
        assert!(!text.contains("hidden-token") && !text.contains(&secret));
    }

    #[tokio::test]
    async fn a_service_that_is_not_there_is_reported_at_once() {
        let report =
            report(json!({"type": "webhook", "url": "http://127.0.0.1:9/"}), json!([{"completion": "x"}])).await;
        assert!(!report.ok);
        assert!(!report.ping.unwrap().ok);
        assert_eq!(report.results[0].error.as_ref().unwrap().code, "reward_outage");
        assert!(report.warnings[0].contains("not signed"));
    }
}
