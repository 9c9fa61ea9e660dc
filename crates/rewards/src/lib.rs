//! Computes rewards: for each sample, one value or one error.
//!
//! The rest of rlood uses [`Rewards`], which is built once from a job's plan and called once for each rollout. One reward is a
//! [`Reward`]: a built-in function or a service over HTTP. The code is async and does not access the job store or the engine.
//! The worker calls it from its runtime; dropping the future stops it. The engine combines several
//! rewards into one number (`engine::advantage`).
//!
//! A missing value is never 0: a reward without a finite number returns [`RewardValue::Missing`] and a reason.
//!
//! This file is longer than others: the public types of a scored sample and the function that scores are read together.

use rlood_types::{
    callback, dataset, digest, environment, event, id, job, outgoing, protocol, rollout, spec, strict_json,
};

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures::future::{BoxFuture, try_join_all};
use tokio::sync::{mpsc, watch};

use crate::environment::EpisodeStop;
use crate::event::{Event, Metrics};
use crate::id::JobId;
use crate::outgoing::OutgoingPolicy;
use crate::protocol::{JournalEntry, RewardReport};
use crate::rollout::{RewardSample, RewardValue, RolloutId, Score};
use crate::spec::{EnvironmentPlan, RewardKind, RewardPlan, RewardSecrets};

pub mod builtin;
pub mod cache;
pub mod client;
pub mod episodes;
mod failure;
pub mod health;
pub mod http_client;
pub mod journal;
pub mod local;
mod meter;
mod openenv;
pub mod python;
mod questions;
mod redact;
mod secret_filter;
pub mod signature;
pub mod signed_post;
mod status;
mod tools;
pub mod trial;
pub mod webhook;

use client::RewardClient;
use episodes::{EpisodeDeps, EpisodeServer};
pub use failure::{BuildError, RewardFailure};
use health::{Health, Verdict};
use journal::Journal;
use local::LocalModels;
use meter::Meter;
use python::{PythonFunction, PythonFunctions};
use status::Status;
use webhook::endpoint::{Endpoint, Endpoints};

/// A reward function of a job: computes one [`Judgement`] for each sample, in order.
pub trait Reward: Send + Sync {
    /// Computes this reward for every sample; a reward service is called with retries. Returns an error only when the job cannot
    /// continue with this reward.
    fn judge<'a>(
        &'a self,
        job: &'a JobContext,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Result<Judged, RewardFailure>>;

    /// Returns whether a thread of this process still computes values of this reward, possibly for a caller
    /// that has stopped waiting.
    fn is_grading(&self) -> bool {
        false
    }

    /// Prepares the reward before the first samples, for example loads a model. Optional: [`Reward::judge`] works without it.
    fn prepare(&self) -> BoxFuture<'_, Result<(), RewardFailure>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The job and the rollout that samples belong to; sent to reward services.
#[derive(Debug, Clone)]
pub struct JobContext {
    /// Id of the job.
    pub job: JobId,
    /// The rollout that the samples belong to. Requests to services contain its step and its phase.
    pub rollout: RolloutId,
    /// Whether no job exists yet (preflight or test of the reward). Services then see the phase `probe`.
    pub probe: bool,
}

/// The values of one reward for all samples of a rollout.
#[derive(Debug, Clone, Default)]
pub struct Judged {
    /// One judgement for each sample, in order.
    pub judgements: Vec<Judgement>,
    /// Counts of the requests that were sent for these samples.
    pub counts: Counts,
}

/// The value of one reward for one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The value: a number, not applicable, or missing.
    pub value: RewardValue,
    /// The reason for a missing value, or for a 0 that replaces an invalid answer.
    pub error: Option<SampleError>,
    /// The reward service's explanation of the value, if it gave one.
    pub reason: Option<String>,
    /// Metrics that the reward service reported for this sample.
    pub metrics: serde_json::Map<String, serde_json::Value>,
}

impl Judgement {
    /// Creates a judgement from a value only, without error, explanation and metrics.
    pub fn value(value: RewardValue) -> Self {
        Self { value, error: None, reason: None, metrics: serde_json::Map::new() }
    }

    /// Creates a judgement for a missing value, with the error that explains it.
    pub fn missing(code: impl Into<String>, message: impl Into<String>) -> Self {
        let error = SampleError { code: code.into(), message: message.into() };
        Self { error: Some(error), ..Self::value(RewardValue::Missing) }
    }
}

/// Maximum absolute value of a reward; `None` means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Limit(Option<f64>);

impl Limit {
    fn of(max_abs_reward: Option<f64>) -> Self {
        Self(max_abs_reward)
    }

    /// Returns why a reward is invalid (not finite, or above the limit); `None` if it is valid.
    fn violation(self, value: f64) -> Option<String> {
        match self.0 {
            _ if !value.is_finite() => Some(format!("the reward {value} is not finite")),
            // Rust's debug format writes large numbers in scientific notation, its display format does not.
            Some(limit) if value.abs() > limit => {
                Some(format!("the reward {value:?} is beyond \u{b1}{limit} (max_abs_reward)"))
            }
            Some(_) | None => None,
        }
    }

    /// Replaces a judgement whose value exceeds the limit by a missing value with an error.
    fn apply(self, judgement: Judgement) -> Judgement {
        match judgement.value.number().and_then(|value| self.violation(value)) {
            Some(violation) => Judgement::missing("invalid_value", violation),
            None => judgement,
        }
    }
}

/// Reason why a sample has no value.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct SampleError {
    /// Stable error code in snake_case. A code that the reward service returned is kept.
    pub code: String,
    /// Human-readable description of the error.
    pub message: String,
}

/// Counts of one reward's requests for a rollout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of HTTP requests, including retries.
    pub requests: u64,
    /// Number of requests that were retries.
    pub retries: u64,
    /// Number of results in the service's answers for sample ids that were not in the request.
    pub unknown_ids: u64,
    /// Number of repeated results for a sample id; the first one is used.
    pub duplicate_ids: u64,
    /// Number of requests that were not sent again, because the journal has their answer.
    pub replayed: u64,
    /// Number of samples whose value came from the cache.
    pub cached: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        let Counts { requests, retries, unknown_ids, duplicate_ids, replayed, cached } = other;
        self.requests += requests;
        self.retries += retries;
        self.unknown_ids += unknown_ids;
        self.duplicate_ids += duplicate_ids;
        self.replayed += replayed;
        self.cached += cached;
    }
}

/// All rewards of one job. A worker builds them once per attempt at the job, and calls them once per rollout.
pub struct Rewards {
    entries: Vec<Entry>,
    notices: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
    shared: SharedDeps,
    /// Whether these rewards are only for evaluation rollouts.
    evaluation: bool,
}

/// State shared by the training rewards and the evaluation rewards of one job.
#[derive(Clone)]
struct SharedDeps {
    client: RewardClient,
    status: Arc<Status>,
    journal: Option<Arc<dyn Journal>>,
    models: Option<Arc<dyn LocalModels>>,
    files: Arc<PythonFunctions>,
    endpoints: Arc<Endpoints>,
    /// Health reports of the rewards from previous attempts at the job.
    previous_reports: Arc<[RewardReport]>,
}

/// Dependencies that the worker provides to a job's rewards.
pub struct RewardDeps {
    /// Connection pool, policy for outgoing addresses, and cache of reward values.
    pub client: RewardClient,
    /// Journal of reward requests and answers; `None` records nothing.
    pub journal: Option<Arc<dyn Journal>>,
    /// Loader of reward models; `None` when models cannot run here.
    pub models: Option<Arc<dyn LocalModels>>,
    /// Health reports of the rewards from previous attempts at the job; their counts are continued.
    pub previous_reports: Vec<RewardReport>,
}

struct Entry {
    name: String,
    required: bool,
    /// Data sources of the dataset to whose rows this reward applies; `None` means all.
    applies_to: Option<Vec<String>>,
    reward: Box<dyn Reward>,
    health: Mutex<Health>,
    meter: Arc<Meter>,
    /// The address of the reward's service; `None` for a reward that sends no requests.
    endpoint: Option<Arc<Endpoint>>,
    min_valid_per_group: usize,
}

impl Entry {
    fn judges(&self, sample: &RewardSample) -> bool {
        !is_failed(sample) && self.applies_to(sample)
    }

    /// Whether the reward applies to the data source of the sample.
    fn applies_to(&self, sample: &RewardSample) -> bool {
        let Some(sources) = &self.applies_to else { return true };
        sample.source.as_ref().is_some_and(|source| sources.contains(source))
    }

    /// Returns the value of a sample that this reward does not judge.
    fn value_unjudged(&self, sample: &RewardSample) -> RewardValue {
        if self.applies_to(sample) { RewardValue::Missing } else { RewardValue::NotApplicable }
    }

    /// Returns the samples that this reward judges: those whose data source it applies to, without failed episodes.
    fn judged_samples<'s>(&self, samples: &'s [RewardSample]) -> Cow<'s, [RewardSample]> {
        match samples.iter().all(|sample| self.judges(sample)) {
            true => Cow::Borrowed(samples),
            false => Cow::Owned(samples.iter().filter(|sample| self.judges(sample)).cloned().collect()),
        }
    }
}

/// Whether the sample is an episode that its environment or a tool has broken off. No reward judges it, and its values are missing.
fn is_failed(sample: &RewardSample) -> bool {
    sample.episode.as_ref().is_some_and(|episode| episode.stop == EpisodeStop::Failed)
}

/// The values of all rewards for one rollout.
#[derive(Debug, Clone, Default)]
pub struct Scored {
    /// One score for each sample, in order. Each score has one value per reward, in the plan's order.
    pub scores: Vec<Score>,
    /// The metric `rewards/{name}/latency` of each reward: seconds from the first request of the rollout to the last answer.
    pub metrics: Metrics,
    /// [`Event::Warning`]s for the job's events.
    pub warnings: Vec<Event>,
}

impl Rewards {
    /// Creates the rewards of a plan. `secrets` are keyed by reward name; `outgoing` restricts the addresses.
    pub fn build(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        Self::with_journal(plans, secrets, outgoing, None)
    }

    /// Like [`Rewards::build`], with a journal for requests and answers.
    pub fn with_journal(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        outgoing: &OutgoingPolicy,
        journal: Option<Arc<dyn Journal>>,
    ) -> Result<Self, BuildError> {
        Self::with_models(plans, secrets, outgoing, journal, None)
    }

    /// Like [`Rewards::with_journal`], with a loader of reward models.
    pub fn with_models(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        outgoing: &OutgoingPolicy,
        journal: Option<Arc<dyn Journal>>,
        models: Option<Arc<dyn LocalModels>>,
    ) -> Result<Self, BuildError> {
        let first = || plans.first().map(|plan| plan.name.clone()).unwrap_or_default();
        let refused = |detail| BuildError { reward: first(), detail };
        let client = RewardClient::new(outgoing).map_err(refused)?;
        Self::with_deps(plans, secrets, RewardDeps { client, journal, models, previous_reports: Vec::new() })
    }

    /// Creates the rewards of a job in its worker.
    pub fn with_deps(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        deps: RewardDeps,
    ) -> Result<Self, BuildError> {
        let RewardDeps { client, journal, models, previous_reports } = deps;
        let (status, notices) = Status::new();
        let endpoints = Arc::new(Endpoints::new(client.pace));
        let (status, files) = (Arc::new(status), Arc::default());
        let shared =
            SharedDeps { client, status, journal, models, files, endpoints, previous_reports: previous_reports.into() };
        let rewards = Self::build_with(plans, secrets, shared, false)?;
        Ok(Self { notices: Mutex::new(Some(notices)), ..rewards })
    }

    /// Creates the rewards of the same job's evaluation, which share connections, reports and journal with these.
    pub fn for_evaluation(
        &self,
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
    ) -> Result<Self, BuildError> {
        Self::build_with(plans, secrets, self.shared.clone(), true)
    }

    fn build_with(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        shared: SharedDeps,
        evaluation: bool,
    ) -> Result<Self, BuildError> {
        let mut entries = Vec::with_capacity(plans.len());
        for plan in plans {
            let previous = shared
                .previous_reports
                .iter()
                .find(|report| report.name == plan.name && report.evaluation == evaluation);
            let meter = Arc::new(Meter::new(previous.map(|report| report.health.clone())));
            let mut endpoint = None;
            let none = RewardSecrets::default();
            let reward: Box<dyn Reward> = match (&plan.kind, plan.kind.service()) {
                (RewardKind::Python(python), _) => {
                    let share = |webhook: webhook::Webhook, url: &str| {
                        let shared_endpoint = shared.endpoints.at(url, python.service.max_concurrency);
                        endpoint = Some(shared_endpoint.clone());
                        webhook
                            .with_status(shared.status.clone())
                            .with_endpoint(shared_endpoint, meter.clone())
                            .with_journal(shared.journal.clone())
                    };
                    Box::new(PythonFunction::new(plan, python, &shared.files, &shared.client, share)?)
                }
                (kind, Some(service)) => {
                    let secrets = secrets.get(&plan.name).unwrap_or(&none);
                    let webhook = webhook::Webhook::sharing(&plan.name, kind, secrets, &shared.client)?;
                    let shared_endpoint = shared.endpoints.at(&service.url, service.max_concurrency);
                    endpoint = Some(shared_endpoint.clone());
                    Box::new(
                        webhook
                            .bounded(plan.max_abs_reward)
                            .with_status(shared.status.clone())
                            .with_endpoint(shared_endpoint, meter.clone())
                            .with_journal(shared.journal.clone()),
                    )
                }
                (RewardKind::RewardModel(model), None) => {
                    let local = local::Local::new(&plan.name, model, shared.models.clone())?;
                    Box::new(local.bounded(plan.max_abs_reward))
                }
                (_, None) => Box::new(builtin::Builtin::of_plan(plan)?),
            };
            entries.push(Entry {
                name: plan.name.clone(),
                required: plan.required,
                applies_to: plan.applies_to.clone(),
                reward,
                meter,
                endpoint,
                health: Mutex::new(Health::pausing_at(plan.kind.service().map(|service| service.max_invalid_fraction))),
                min_valid_per_group: plan.kind.service().map_or(2, |service| service.min_valid_per_group as usize),
            });
        }
        Ok(Self { entries, notices: Mutex::new(None), shared, evaluation })
    }

    /// Returns a health report for each reward.
    pub fn reports(&self) -> Vec<RewardReport> {
        let report = |entry: &Entry| {
            let mut health = entry.meter.health();
            if let Some(endpoint) = &entry.endpoint {
                let (mut breaker, concurrency) = endpoint.report();
                breaker.opened += entry.meter.opened_before();
                health.breaker = Some(breaker);
                health.concurrency = Some(concurrency);
            }
            RewardReport { name: entry.name.clone(), evaluation: self.evaluation, health }
        };
        self.entries.iter().map(report).collect()
    }

    /// Prepares every reward, so that problems are found before sampling starts.
    pub async fn prepare(&self) -> Result<(), RewardFailure> {
        for entry in &self.entries {
            entry.reward.prepare().await?;
        }
        Ok(())
    }

    /// Returns whether a thread of this process still computes rewards, possibly for a caller that has stopped waiting.
    pub fn is_grading(&self) -> bool {
        self.entries.iter().any(|entry| entry.reward.is_grading())
    }

    /// Returns whether a request is being retried or is slow. The job's `status_reason` is then `waiting_for_reward`.
    pub fn waiting(&self) -> bool {
        *self.shared.status.waiting().borrow() > 0
    }

    /// Creates the client of the job's environment or tools, which reports its warnings and its waiting requests as these rewards
    /// do. `secrets` are all secrets of the job.
    ///
    /// # Errors
    /// Fails if an address is not allowed, or a header or secret cannot be used.
    pub fn environment(
        &self,
        plan: &EnvironmentPlan,
        secrets: &BTreeMap<String, RewardSecrets>,
        (client, journal): (&RewardClient, Option<Arc<dyn Journal>>),
        job: JobId,
    ) -> Result<EpisodeServer, BuildError> {
        let deps = EpisodeDeps { job, journal, status: self.shared.status.clone() };
        EpisodeServer::new(plan, secrets, client, deps)
    }

    /// Watches the number of requests that are being retried or are slow.
    pub fn waiting_changes(&self) -> watch::Receiver<usize> {
        self.shared.status.waiting()
    }

    /// Returns the channel of warnings that are sent while a rollout is still being scored, for example about a service that does
    /// not answer. Only the first call returns the channel.
    pub fn notices(&self) -> Option<mpsc::UnboundedReceiver<Event>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Computes all rewards of the samples of one rollout (complete groups, in order), concurrently. Dropping the
    /// future stops the computation.
    pub async fn score(&self, job: &JobContext, samples: &[RewardSample]) -> Result<Scored, RewardFailure> {
        let asked = self.entries.iter().map(|entry| async move {
            let start = Instant::now();
            let theirs = entry.judged_samples(samples);
            if theirs.is_empty() {
                return Ok((entry, None, start.elapsed()));
            }
            let judged = match entry.reward.judge(job, &theirs).await {
                // An outage of an optional reward's service does not stop the job. The reward's values are missing, as its plan
                // permits.
                Err(failure @ RewardFailure::Outage { .. }) if !entry.required => Judged {
                    judgements: vec![Judgement::missing("reward_outage", failure.to_string()); theirs.len()],
                    counts: Counts::default(),
                },
                Err(failure @ RewardFailure::Invalid { .. }) => {
                    self.forget_answers(job, &entry.name).await?;
                    return Err(failure);
                }
                other => other?,
            };
            Ok((entry, Some(judged), start.elapsed()))
        });
        let answers = try_join_all(asked).await?;

        let mut scored = Scored {
            scores: samples.iter().map(|_| Score { values: Vec::with_capacity(answers.len()) }).collect(),
            ..Scored::default()
        };
        for (entry, judged, latency) in answers {
            let Some(judged) = judged else {
                // The reward judges no sample of this rollout: it is limited to other data sources, or all episodes have failed.
                for (score, sample) in scored.scores.iter_mut().zip(samples) {
                    score.values.push(entry.value_unjudged(sample));
                }
                continue;
            };
            entry.meter.judged(&judged, entry.endpoint.is_none().then_some(latency));
            scored.metrics.insert(format!("rewards/{}/latency", entry.name), Some(latency.as_secs_f64()));
            // Answers that are replayed from the journal were counted by the attempt that received them.
            let verdict = match judged.counts.replayed {
                0 => entry.health.lock().unwrap_or_else(PoisonError::into_inner).record(&entry.name, &judged),
                _ => Verdict::Good,
            };
            match verdict {
                Verdict::Good => {}
                Verdict::Warn(warning) => scored.warnings.push(warning),
                Verdict::Stop(failure) if entry.required => {
                    self.forget_answers(job, &entry.name).await?;
                    return Err(failure);
                }
                Verdict::Stop(failure) => scored.warnings.push(Event::Warning {
                    code: "reward_invalid".to_owned(),
                    message: failure.to_string(),
                    data: serde_json::json!({"reward": entry.name}),
                }),
            }
            let mut judged = judged.judgements.iter().map(|judgement| judgement.value);
            let value = |sample| {
                if entry.judges(sample) {
                    judged.next().unwrap_or(RewardValue::Missing)
                } else {
                    entry.value_unjudged(sample)
                }
            };
            let mut values: Vec<RewardValue> = samples.iter().map(value).collect();
            if job.rollout.is_trained() {
                drop_incomplete_groups(&mut values, samples, entry.min_valid_per_group);
            }
            for (score, value) in scored.scores.iter_mut().zip(values) {
                score.values.push(value);
            }
        }
        Ok(scored)
    }

    /// Removes a reward's answers for a rollout from the journal. These answers paused the job and were not used. The service is
    /// asked again after the user has fixed it.
    async fn forget_answers(&self, job: &JobContext, reward: &str) -> Result<(), RewardFailure> {
        let Some(journal) = &self.shared.journal else { return Ok(()) };
        let entry = JournalEntry::Forget { rollout: job.rollout, reward: reward.to_owned() };
        journal.append(entry).await.map_err(|unrecorded| unrecorded.of(reward))
    }
}

/// Drops all rewards of a group in which some are missing and fewer than `min_valid` are left, because these say little about the
/// prompt. Limits up to 2 need no action here, because the advantage estimators ignore a single value.
fn drop_incomplete_groups(values: &mut [RewardValue], samples: &[RewardSample], min_valid: usize) {
    if min_valid <= 2 {
        return;
    }
    let mut rest = values;
    for group in samples.chunk_by(|left, right| left.group_id == right.group_id) {
        let (of_group, others) = rest.split_at_mut(group.len().min(rest.len()));
        rest = others;
        let missing = of_group.iter().filter(|value| **value == RewardValue::Missing).count();
        if missing > 0 && of_group.len() - missing < min_valid {
            of_group.fill(RewardValue::Missing);
        }
    }
}
