//! `POST /jobs/{id}/rescore`: scores a job's stored samples with another reward and compares it with the job's own. Nothing is
//! trained or stored: the response is the result (cached for a day under its `Idempotency-Key`, if there is one). Samples and time
//! are limited. The request ends when the client disconnects, unless it has an `Idempotency-Key`.

mod figures;
mod request;
mod stored;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, FieldError, Problem, ProblemBody};
use super::extract::{HashedJson, Path};
use super::heavy;
use super::idempotency::{Answer, identity, once};
use super::python_rewards;
use super::reach;
use super::rewards::is_built_in;
use crate::event::{Sample, SamplePhase};
use crate::id::JobId;
use crate::reward::builtin::Builtin;
use crate::reward::trial::build_reward;
use crate::reward::{BuildError, JobContext, Judgement, Reward, SampleError};
use crate::rollout::{RewardSample, RewardValue, RolloutId};
use crate::spec::{Combine, Plan, RewardKind, RewardPlan, RewardSecrets, ServicePlan};
use figures::{AdvantageChange, Correlation, GroupAgreement, Spread, leave_one_out};
use request::{Wanted, invalid, read, rewards_of};
use stored::{newest_groups, with_columns};

/// Number of samples scored together as a chunk. Chunks that finish before the time limit are kept.
const CHUNK: usize = 256;
/// Maximum number of concurrent re-scores. Further requests are refused.
pub(super) const MAX_CONCURRENT: usize = 4;
/// Time limit for reading the request, and for comparing old and new values.
const COMPUTE_WITHIN: Duration = Duration::from_secs(20);
/// Extra time after the limit in which a built-in reward can finish its current sample.
const LAST_SAMPLE: Duration = Duration::from_secs(2);
/// Maximum number of different errors in a response.
const MAX_ERRORS: usize = 10;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(rescore_job))
}

/// A comparison of another reward with the job's own.
#[derive(Debug, Serialize, ToSchema)]
struct Rescore {
    /// The name of the new reward.
    reward: String,
    /// The job's reward that the new one replaces; null = all of them together.
    replaces: Option<String>,
    /// Phase of the samples.
    phase: SamplePhase,
    /// The first step among the samples.
    from_step: u64,
    /// The last step among the samples.
    to_step: u64,
    /// Number of samples: the newest ones that match, in whole groups.
    samples: usize,
    /// Whether the reward scored all samples in time.
    complete: bool,
    /// Number of samples without a value: errors, invalid answers, no answer in time.
    missing: usize,
    /// Number of samples that the new reward does not apply to.
    not_applicable: usize,
    /// Why values are missing, most frequent first.
    errors: Vec<RescoreError>,
    /// Limitations of the comparison.
    warnings: Vec<String>,
    /// Time that scoring took, in ms.
    latency_ms: f64,
    /// Distribution of the old values.
    old: Spread,
    /// Distribution of the new values.
    new: Spread,
    /// Correlation over all samples that have both values.
    correlation: Correlation,
    /// Leave-one-out advantages within groups, from the weighted sum (clipped as in the job) minus beta ·
    /// kl, before any normalization.
    advantages: AdvantageChange,
    /// Agreement of both rewards within groups.
    groups: GroupAgreement,
    /// One result per sample, oldest first.
    results: Vec<RescoredSample>,
}

/// One reason for missing values.
#[derive(Debug, Serialize, ToSchema)]
struct RescoreError {
    /// Stable error code in snake_case. A service's own code is passed on.
    code: String,
    /// Message of the first such error.
    message: String,
    /// Number of samples with this error.
    count: usize,
}

/// Old and new values of one sample.
#[derive(Debug, Serialize, ToSchema)]
struct RescoredSample {
    /// Optimizer step of the sample.
    step: u64,
    /// Group of the sample.
    group_id: String,
    /// Dataset row of the sample.
    prompt_id: String,
    /// Index of the completion in its group among these samples, from 0.
    index: usize,
    /// The stored value; null = missing or not applicable.
    old: Option<f64>,
    /// The new reward's value; null = missing or not applicable.
    new: Option<f64>,
    /// Advantage with the old value.
    old_advantage: Option<f64>,
    /// Advantage with the new value.
    new_advantage: Option<f64>,
    /// Why there is no new value; null otherwise.
    error: Option<SampleError>,
    /// An explanation from the service; null if none.
    reason: Option<String>,
}

/// Re-score stored samples with another reward.
///
/// `reward` has the same form as in a job, and is not stored. Optional: `replaces` (the job's reward that it replaces; default: the
/// one with the same name, or the only one, else all of them together), `phase` (`train` or `eval`), `step` or `min_step` and
/// `max_step`, `limit` (maximum number of samples, newest first, in whole groups; 1000), `max_wait_s` (60: samples without an
/// answer by then are missing, and `complete` is false). If the request has no secret or headers, those of a job's reward with the
/// same url are used, including the evaluation's rewards. Services see the phase `probe`; the columns come from the job's dataset.
#[utoipa::path(
    post, path = "/jobs/{id}/rescore", tag = "Jobs", operation_id = "rescore_job", 
    params(("id" = JobId, Path), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours")),
    request_body(content = Object, example = json!({
        "reward": {"type": "webhook", "url": "https://rm.example/v2/score", "secret": "whsec_…"}, "replaces": "helpful",
        "min_step": 100, "limit": 400
    })),
    responses(
        (status = 200, description = "The comparison", body = Rescore),
        (status = 404, description = "There is no such job, or it has no stored samples that match", body = ProblemBody),
        (status = 422, description = "The reward or the choice of samples is not valid", body = ProblemBody),
        (status = 429, description = "The limit of concurrent re-scores is reached: four, or two per key", body = ProblemBody),
        (status = 503, description = "The server is busy or is shutting down", body = ProblemBody),
    )
)]
async fn rescore_job(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
    HashedJson(body, sha256): HashedJson<Value>,
) -> Result<Response, Problem> {
    let work = rescore(state.clone(), caller.clone(), id, body);
    let identity = identity(format_args!("{id} {sha256}"));
    once(&state, &caller, &headers, "POST /jobs/{id}/rescore", &identity, work).await
}

async fn rescore(state: AppState, caller: Caller, id: JobId, body: Value) -> Result<Answer, Problem> {
    let plan = state.store.job_get(id).await?.plan()?;
    let reading = move |_: &AtomicBool| read(&body, &plan).map(|wanted| (wanted, plan));
    let (mut wanted, plan) = heavy::run(&state, &caller, COMPUTE_WITHIN, reading).await??;
    lend_secrets(&mut wanted, &plan, state.store.job_secrets(id).await?);
    if let Some(error) = python_rewards::resolve_one(&state, &caller, &mut wanted.plan, "/reward").await? {
        return Err(invalid(vec![error]));
    }
    let service = match &wanted.plan.kind {
        kind if is_built_in(kind) => None,
        kind => {
            let outgoing = reach::outgoing(&state).await?;
            let plan = RewardPlan { kind: kind.with_service(patient), ..wanted.plan.clone() };
            Some(build_reward(&plan, &wanted.secrets, &outgoing).map_err(unusable)?)
        }
    };
    let Some(place) = state.rescores.try_acquire(&caller.audit_name()) else {
        let detail = "the limit of concurrent re-scores is reached (four, or two per key); try again later";
        return Err(Problem::new(Code::TooManyRequests, detail).retry_after(5));
    };
    let stored = newest_groups(&state, &caller, id, &wanted).await?;
    if stored.is_empty() {
        let detail = "no stored samples of this job match: GET /jobs/{id}/samples lists the stored samples";
        return Err(Problem::new(Code::NotFound, detail));
    }
    let mut warnings = Vec::new();
    let samples = with_columns(&state, &plan, wanted.phase, &stored, &mut warnings).await?;
    let start = Instant::now();
    let (judged, complete) = match service {
        Some(reward) => {
            let until = start + wanted.wait;
            let job = JobContext { job: id, rollout: RolloutId::train(0), probe: true };
            let judging = async move { judge(&*reward, &job, &samples, until).await };
            heavy::drive(&state, place, judging).await?
        }
        None => {
            let _place = place;
            grade(&state, &caller, &wanted, samples).await?
        }
    };
    let latency_ms = (start.elapsed().as_secs_f64() * 1e6).round() / 1e3;
    let comparing = move |_: &AtomicBool| {
        let compared = compare(&wanted, &plan, rewards_of(&plan, wanted.phase), &stored, judged);
        Answer::new(StatusCode::OK, None, &Rescore { complete, warnings, latency_ms, ..compared })
    };
    heavy::run(&state, &caller, COMPUTE_WITHIN, comparing).await?
}

fn unusable(error: BuildError) -> Problem {
    invalid(vec![FieldError { pointer: "/reward".to_owned(), code: "unusable".to_owned(), detail: error.detail }])
}

/// Scores samples with a built-in reward. Returns one result per sample, and whether all were scored in time.
async fn grade(
    state: &AppState,
    caller: &Caller,
    wanted: &Wanted,
    samples: Vec<RewardSample>,
) -> Result<(Vec<Judgement>, bool), Problem> {
    let (plan, wait, count) = (wanted.plan.clone(), wanted.wait, samples.len());
    let grading = move |stop: &AtomicBool| {
        let until = Instant::now() + wait;
        Ok::<_, BuildError>(Builtin::of_plan(&plan)?.judge_until(&samples, stop, until))
    };
    let mut judged = match heavy::run(state, caller, wait + LAST_SAMPLE, grading).await {
        Ok(graded) => graded.map_err(unusable)?,
        // The first sample alone took longer than the time limit for all samples.
        Err(problem) if problem.code() == Code::WorkTimeout => Vec::new(),
        Err(problem) => return Err(problem),
    };
    let complete = judged.len() == count;
    judged.resize(count, Judgement::missing("not_in_time", "the sample was not scored within max_wait_s"));
    Ok((judged, complete))
}

/// Copies the secret of a reward of the job with the same URL to the new reward, because clients cannot read secrets back. Of
/// several rewards it prefers the one with the same name, then the one that scored the samples of this phase.
fn lend_secrets(wanted: &mut Wanted, plan: &Plan, mut secrets: BTreeMap<String, RewardSecrets>) {
    let url = |kind: &RewardKind| kind.service().map(|service| service.url.clone());
    let Some(asked) = url(&wanted.plan.kind).filter(|_| wanted.secrets == RewardSecrets::default()) else { return };
    let scored: Vec<&RewardPlan> = rewards_of(plan, wanted.phase).iter().collect();
    let preference = |reward: &RewardPlan| {
        let of_phase = scored.iter().any(|scored| std::ptr::eq(*scored, reward));
        (reward.name == wanted.plan.name, of_phase)
    };
    let there = plan
        .rewards_by_secret_name()
        .filter(|(name, reward)| url(&reward.kind).as_ref() == Some(&asked) && secrets.contains_key(name));
    // Among equally good rewards the first one lends its secret.
    let lender = there.reduce(|best, next| if preference(next.1) > preference(best.1) { next } else { best });
    if let Some(secret) = lender.and_then(|(name, _)| secrets.remove(&name)) {
        wanted.secrets = secret;
    }
}

/// Limits the retry settings of a reward for a re-score: at most three tries and ten seconds of outage.
fn patient(service: &mut ServicePlan) {
    service.max_tries = service.max_tries.min(3);
    service.max_outage_s = service.max_outage_s.min(10);
}

/// Scores samples with a reward service. Returns one result per sample, and whether all were requested in time. Groups are
/// never split between chunks.
async fn judge(
    reward: &dyn Reward,
    job: &JobContext,
    samples: &[RewardSample],
    until: Instant,
) -> (Vec<Judgement>, bool) {
    let mut judged: Vec<Judgement> = Vec::with_capacity(samples.len());
    let groups: Vec<&[RewardSample]> = samples.chunk_by(|left, right| left.group_id == right.group_id).collect();
    let mut at = 0;
    let mut why = None;
    while at < groups.len() && why.is_none() {
        let begin = judged.len();
        let mut end = begin;
        while at < groups.len() && (end == begin || end - begin + groups[at].len() <= CHUNK) {
            end += groups[at].len();
            at += 1;
        }
        match tokio::time::timeout_at(until.into(), reward.judge(job, &samples[begin..end])).await {
            Ok(Ok(answered)) => judged.extend(answered.judgements),
            Ok(Err(failure)) => {
                let failure = failure.to_failure(0);
                why = Some(Judgement::missing(failure.code, failure.message));
            }
            Err(_) => why = Some(Judgement::missing("not_in_time", "the reward gave no answer within max_wait_s")),
        }
    }
    let complete = judged.len() == samples.len();
    judged.resize(
        samples.len(),
        why.unwrap_or_else(|| Judgement::missing("not_asked", "the reward was not requested for this sample")),
    );
    (judged, complete)
}

fn compare(wanted: &Wanted, plan: &Plan, own: &[RewardPlan], stored: &[Sample], judged: Vec<Judgement>) -> Rescore {
    let old = |sample: &Sample| match &wanted.replaces {
        Some(name) => sample.rewards.get(name).copied().flatten(),
        None => sample.reward,
    };
    let penalized = |weighted: Option<f64>, sample: &Sample| {
        let (low, high) = plan.rloo.reward_clip_range.unwrap_or((f64::NEG_INFINITY, f64::INFINITY));
        let kl = if plan.rloo.penalizes_reward() { plan.rloo.beta * sample.kl.unwrap_or(0.0) } else { 0.0 };
        weighted.map(|weighted| weighted.clamp(low, high) - kl)
    };
    let mut results: Vec<RescoredSample> = Vec::with_capacity(stored.len());
    let (mut advantages, mut groups) = (Vec::new(), Vec::new());
    let mut errors: Vec<RescoreError> = Vec::new();
    let (mut missing, mut not_applicable) = (0, 0);
    let mut judged = judged.into_iter();
    for group in stored.chunk_by(|left, right| (left.step, &left.group_id) == (right.step, &right.group_id)) {
        let judgements: Vec<Judgement> = judged.by_ref().take(group.len()).collect();
        let weighted = |(sample, judgement): (&Sample, &Judgement)| {
            penalized(new_weighted(wanted, plan.rloo.combine, own, sample, judgement.value), sample)
        };
        let new: Vec<Option<f64>> = group.iter().zip(&judgements).map(weighted).collect();
        let before: Vec<Option<f64>> = group.iter().map(|sample| penalized(sample.reward, sample)).collect();
        let (old_advantages, new_advantages) = (leave_one_out(&before), leave_one_out(&new));
        if group.len() > 1 {
            advantages.extend(old_advantages.iter().zip(&new_advantages).filter_map(|(old, new)| old.zip(*new)));
        }
        let both = group.iter().zip(&judgements).filter_map(|(sample, new)| old(sample).zip(new.value.number()));
        groups.push(both.collect::<Vec<(f64, f64)>>());
        let figures = old_advantages.into_iter().zip(new_advantages);
        for (index, ((sample, judgement), (old_advantage, new_advantage))) in
            group.iter().zip(judgements).zip(figures).enumerate()
        {
            let Judgement { value, error, reason, metrics: _ } = judgement;
            not_applicable += usize::from(value == RewardValue::NotApplicable);
            missing += usize::from(value == RewardValue::Missing);
            if let Some(error) = &error {
                match errors.iter_mut().find(|known| known.code == error.code) {
                    Some(known) => known.count += 1,
                    None => {
                        errors.push(RescoreError { code: error.code.clone(), message: error.message.clone(), count: 1 })
                    }
                }
            }
            results.push(RescoredSample {
                step: sample.step,
                group_id: sample.group_id.clone(),
                prompt_id: sample.prompt_id.clone(),
                index,
                old: old(sample),
                new: value.number(),
                old_advantage,
                new_advantage,
                error,
                reason,
            });
        }
    }
    errors.sort_by_key(|error| std::cmp::Reverse(error.count));
    errors.truncate(MAX_ERRORS);
    let values = |of: fn(&RescoredSample) -> Option<f64>| results.iter().filter_map(of).collect::<Vec<f64>>();
    let (old_values, new_values) = (values(|result| result.old), values(|result| result.new));
    Rescore {
        reward: wanted.plan.name.clone(),
        replaces: wanted.replaces.clone(),
        phase: wanted.phase,
        from_step: stored.iter().map(|sample| sample.step).min().unwrap_or_default(),
        to_step: stored.iter().map(|sample| sample.step).max().unwrap_or_default(),
        samples: stored.len(),
        complete: true,
        missing,
        not_applicable,
        errors,
        warnings: Vec::new(),
        latency_ms: 0.0,
        old: Spread::of(&old_values),
        new: Spread::of(&new_values),
        correlation: Correlation::of(&groups.concat()),
        advantages: AdvantageChange::of(&advantages),
        groups: GroupAgreement::of(&groups),
        results,
    }
}

/// Returns a sample's weighted sum of rewards with the new value in place of the replaced one; `None` = the
/// sample has no reward.
fn new_weighted(
    wanted: &Wanted,
    combine: Combine,
    own: &[RewardPlan],
    sample: &Sample,
    new: RewardValue,
) -> Option<f64> {
    let Some(replaced) = &wanted.replaces else {
        return new.number().map(|value| value * wanted.plan.weight);
    };
    let stored = |name: &str| sample.rewards.get(name).copied().flatten();
    // The sample had no combined reward although the replaced reward had a value: the value of another reward is missing, so
    // there is no combined reward now either.
    if combine == Combine::Renormalize && sample.reward.is_none() && stored(replaced).is_some() {
        return None;
    }
    let (mut sum, mut present, mut all) = (0.0, 0.0, 0.0);
    let mut any = false;
    for reward in own {
        let is_replaced = reward.name == *replaced;
        let weight = if is_replaced && wanted.weight_given { wanted.plan.weight } else { reward.weight };
        let value = if is_replaced { new.number() } else { stored(&reward.name) };
        if is_replaced && new == RewardValue::Missing && reward.required && combine == Combine::Renormalize {
            return None;
        }
        all += weight.abs();
        if let Some(value) = value {
            any = true;
            present += weight.abs();
            sum += weight * value;
        }
    }
    match combine {
        Combine::Nansum => any.then_some(sum),
        Combine::Renormalize if present == 0.0 => None,
        Combine::Renormalize if present == all => Some(sum),
        Combine::Renormalize => Some(sum * (all / present)),
    }
}
