//! Samples in, one value or one error each out.
//!
//! The rest of rlood sees rewards through [`Rewards`]: built once from a job's plan, asked once a rollout. One reward is
//! a [`Reward`]: a built-in function or a service over HTTP. Everything here is async and knows nothing of jobs' storage
//! or the engine: the worker calls it from its runtime, and dropping the future stops it. How several rewards become one
//! number is the engine's business (`engine::advantage`).
//!
//! A missing value is never 0: whoever cannot say a finite number says [`RewardValue::Missing`] and why.

use rlood_types::{callback, digest, event, id, job, outgoing, protocol, sample, spec};

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures::future::{BoxFuture, try_join_all};
use tokio::sync::{mpsc, watch};

use crate::event::{Event, Metrics};
use crate::id::JobId;
use crate::outgoing::OutgoingPolicy;
use crate::protocol::{JournalEntry, RewardReport};
use crate::sample::{RewardSample, RewardValue, RolloutId, Score};
use crate::spec::{RewardKind, RewardPlan, RewardSecrets};

pub mod builtin;
pub mod cache;
pub mod client;
mod failure;
pub mod health;
mod hidden;
pub mod http_client;
pub mod journal;
pub mod local;
mod meter;
pub mod python;
mod redact;
pub mod signature;
pub mod signed_post;
mod status;
pub mod trial;
pub mod webhook;

use client::RewardClient;
pub use failure::{BuildError, RewardFailure};
use health::{Health, Verdict};
use journal::Journal;
use local::LocalModels;
use meter::Meter;
use python::{PythonFunction, PythonFunctions};
use status::Status;
use webhook::endpoint::{Endpoint, Endpoints};

/// One reward: samples in, one [`Judgement`] each out, in order.
pub trait Reward: Send + Sync {
    /// Judges every sample. Retries are its own business; it returns an error only when the job cannot go on with it.
    fn judge<'a>(
        &'a self,
        job: &'a JobContext,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Result<Judged, RewardFailure>>;

    /// Whether a thread of this process still computes its values, though nobody may wait for them any more.
    fn is_grading(&self) -> bool {
        false
    }

    /// Gets ready before the first samples come (loads a model, say); not needed for [`Reward::judge`] to work.
    fn prepare(&self) -> BoxFuture<'_, Result<(), RewardFailure>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// For which run samples are scored; sent to services as it is.
#[derive(Debug, Clone)]
pub struct JobContext {
    /// The job.
    pub job: JobId,
    /// Which rollout of it; a service sees the step and the phase.
    pub rollout: RolloutId,
    /// Asked before there is a job (a probe, a test of the reward): services see the phase `probe`.
    pub probe: bool,
}

/// What one reward said of all samples.
#[derive(Debug, Clone, Default)]
pub struct Judged {
    /// One a sample, in order.
    pub judgements: Vec<Judgement>,
    /// What else happened.
    pub counts: Counts,
}

/// What one reward said of one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The value.
    pub value: RewardValue,
    /// Why there is no number, for `Missing` (and for a 0 that stands for an invalid answer).
    pub error: Option<SampleError>,
    /// The service's own words, if it gave any.
    pub reason: Option<String>,
    /// The service's own figures, if it gave any.
    pub metrics: serde_json::Map<String, serde_json::Value>,
}

impl Judgement {
    /// A value without a story.
    pub fn value(value: RewardValue) -> Self {
        Self { value, error: None, reason: None, metrics: serde_json::Map::new() }
    }

    /// No value, and why.
    pub fn missing(code: impl Into<String>, message: impl Into<String>) -> Self {
        let error = SampleError { code: code.into(), message: message.into() };
        Self { error: Some(error), ..Self::value(RewardValue::Missing) }
    }
}

/// How far from 0 a value may be; by default anywhere.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Limit(Option<f64>);

impl Limit {
    fn of(max_abs_reward: Option<f64>) -> Self {
        Self(max_abs_reward)
    }

    /// Why a value is invalid; `None`: it is not.
    fn complaint(self, value: f64) -> Option<String> {
        match self.0 {
            _ if !value.is_finite() => Some(format!("the reward {value} is not finite")),
            // Debug writes large numbers short.
            Some(limit) if value.abs() > limit => {
                Some(format!("the reward {value:?} is beyond \u{b1}{limit} (max_abs_reward)"))
            }
            Some(_) | None => None,
        }
    }

    /// The judgement, or that its value is invalid.
    fn hold(self, judgement: Judgement) -> Judgement {
        match judgement.value.number().and_then(|value| self.complaint(value)) {
            Some(complaint) => Judgement::missing("invalid_value", complaint),
            None => judgement,
        }
    }
}

/// Why a sample has no value.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct SampleError {
    /// Stable, snake_case; a service's own code is passed on.
    pub code: String,
    /// For people.
    pub message: String,
}

/// What happened while one reward was asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// HTTP tries.
    pub requests: u64,
    /// Tries that were repeats.
    pub retries: u64,
    /// Results for sample ids that were not asked for.
    pub unknown_ids: u64,
    /// Results for sample ids that had one already.
    pub duplicate_ids: u64,
    /// Requests whose answer stood in the journal.
    pub replayed: u64,
    /// Samples whose value was known, so that nobody was asked.
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

/// All rewards of one job. Built once an attempt; asked once a rollout.
pub struct Rewards {
    entries: Vec<Entry>,
    notices: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
    around: Around,
    /// These are the evaluation's own.
    evaluation: bool,
}

/// What the rewards of one job share.
#[derive(Clone)]
struct Around {
    client: RewardClient,
    status: Arc<Status>,
    journal: Option<Arc<dyn Journal>>,
    models: Option<Arc<dyn LocalModels>>,
    files: Arc<PythonFunctions>,
    endpoints: Arc<Endpoints>,
    /// What former attempts told.
    former: Arc<[RewardReport]>,
}

/// What a job's worker gives to its rewards.
pub struct Surroundings {
    /// Connections, the rules on addresses, the cache.
    pub client: RewardClient,
    /// Where requests and answers are written down.
    pub journal: Option<Arc<dyn Journal>>,
    /// Runs reward models.
    pub models: Option<Arc<dyn LocalModels>>,
    /// What former attempts told of the rewards: counts go on from there.
    pub former: Vec<RewardReport>,
}

struct Entry {
    name: String,
    required: bool,
    /// The sources whose rows it judges; None = all.
    applies_to: Option<Vec<String>>,
    reward: Box<dyn Reward>,
    health: Mutex<Health>,
    meter: Arc<Meter>,
    /// Of a reward over HTTP.
    endpoint: Option<Arc<Endpoint>>,
    min_valid_per_group: usize,
}

impl Entry {
    fn judges(&self, sample: &RewardSample) -> bool {
        let Some(sources) = &self.applies_to else { return true };
        sample.source.as_ref().is_some_and(|source| sources.contains(source))
    }

    /// The samples that it judges. Groups stay whole: a group has one prompt, and a prompt one source.
    fn judged_of<'s>(&self, samples: &'s [RewardSample]) -> Cow<'s, [RewardSample]> {
        match samples.iter().all(|sample| self.judges(sample)) {
            true => Cow::Borrowed(samples),
            false => Cow::Owned(samples.iter().filter(|sample| self.judges(sample)).cloned().collect()),
        }
    }
}

/// What all rewards said of one rollout.
#[derive(Debug, Clone, Default)]
pub struct Scored {
    /// One a sample, in order; each with one value a reward, in the plan's order.
    pub scores: Vec<Score>,
    /// `rewards/{name}/latency`, s: from the first request of the rollout to its last answer.
    pub metrics: Metrics,
    /// [`Event::Warning`]s for the job's events.
    pub warnings: Vec<Event>,
}

impl Rewards {
    /// Makes the rewards of a plan. `secrets` go by reward name; addresses are held to `outgoing`.
    pub fn build(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        Self::journalled(plans, secrets, outgoing, None)
    }

    /// As [`Rewards::build`]; requests and answers go through the journal.
    pub fn journalled(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        outgoing: &OutgoingPolicy,
        journal: Option<Arc<dyn Journal>>,
    ) -> Result<Self, BuildError> {
        Self::with_models(plans, secrets, outgoing, journal, None)
    }

    /// As [`Rewards::journalled`], where reward models can be run.
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
        Self::within(plans, secrets, Surroundings { client, journal, models, former: Vec::new() })
    }

    /// The rewards of a job in its worker.
    pub fn within(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        surroundings: Surroundings,
    ) -> Result<Self, BuildError> {
        let Surroundings { client, journal, models, former } = surroundings;
        let (status, notices) = Status::new();
        let endpoints = Arc::new(Endpoints::new(client.pace));
        let (status, files) = (Arc::new(status), Arc::default());
        let around = Around { client, status, journal, models, files, endpoints, former: former.into() };
        let rewards = Self::around(plans, secrets, around, false)?;
        Ok(Self { notices: Mutex::new(Some(notices)), ..rewards })
    }

    /// The evaluation's own rewards of the same job: what they tell and write down goes where these do.
    pub fn beside(&self, plans: &[RewardPlan], secrets: &BTreeMap<String, RewardSecrets>) -> Result<Self, BuildError> {
        Self::around(plans, secrets, self.around.clone(), true)
    }

    fn around(
        plans: &[RewardPlan],
        secrets: &BTreeMap<String, RewardSecrets>,
        around: Around,
        evaluation: bool,
    ) -> Result<Self, BuildError> {
        let mut entries = Vec::with_capacity(plans.len());
        for plan in plans {
            let former =
                around.former.iter().find(|former| former.name == plan.name && former.evaluation == evaluation);
            let meter = Arc::new(Meter::new(former.map(|former| former.health.clone())));
            let mut endpoint = None;
            let none = RewardSecrets::default();
            let reward: Box<dyn Reward> = match (&plan.kind, plan.kind.service()) {
                (RewardKind::Python(python), _) => {
                    let share = |webhook: webhook::Webhook, url: &str| {
                        let shared = around.endpoints.at(url, python.service.max_concurrency);
                        endpoint = Some(shared.clone());
                        webhook
                            .with_status(around.status.clone())
                            .with_endpoint(shared, meter.clone())
                            .with_journal(around.journal.clone())
                    };
                    Box::new(PythonFunction::new(plan, python, &around.files, &around.client, share)?)
                }
                (kind, Some(service)) => {
                    let secrets = secrets.get(&plan.name).unwrap_or(&none);
                    let webhook = webhook::Webhook::sharing(&plan.name, kind, secrets, &around.client)?;
                    let shared = around.endpoints.at(&service.url, service.max_concurrency);
                    endpoint = Some(shared.clone());
                    Box::new(
                        webhook
                            .bounded(plan.max_abs_reward)
                            .with_status(around.status.clone())
                            .with_endpoint(shared, meter.clone())
                            .with_journal(around.journal.clone()),
                    )
                }
                (RewardKind::RewardModel(model), None) => {
                    let local = local::Local::new(&plan.name, model, around.models.clone())?;
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
        Ok(Self { entries, notices: Mutex::new(None), around, evaluation })
    }

    /// How each of them does.
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

    /// Gets every reward ready; what one of them cannot do is found before anything is sampled.
    pub async fn prepare(&self) -> Result<(), RewardFailure> {
        for entry in &self.entries {
            entry.reward.prepare().await?;
        }
        Ok(())
    }

    /// Whether a thread of this process still computes values, though nobody may wait for them any more.
    pub fn is_grading(&self) -> bool {
        self.entries.iter().any(|entry| entry.reward.is_grading())
    }

    /// True while a service fails and is being retried, or takes its time: the job's `status_reason` is then
    /// `waiting_for_reward`.
    pub fn waiting(&self) -> bool {
        *self.around.status.waiting().borrow() > 0
    }

    /// How many requests wait so; changes wake.
    pub fn waiting_changes(&self) -> watch::Receiver<usize> {
        self.around.status.waiting()
    }

    /// Warnings that cannot wait until a rollout is scored (a service that does not answer). The first call gets them.
    pub fn notices(&self) -> Option<mpsc::UnboundedReceiver<Event>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Scores samples (whole groups, in block order) by every reward at once. Dropping the future stops everything.
    pub async fn score(&self, job: &JobContext, samples: &[RewardSample]) -> Result<Scored, RewardFailure> {
        let asked = self.entries.iter().map(|entry| async move {
            let start = Instant::now();
            let theirs = entry.judged_of(samples);
            if theirs.is_empty() {
                return Ok((entry, None, start.elapsed()));
            }
            let judged = match entry.reward.judge(job, &theirs).await {
                // An optional reward does not hold up the job: its values are missing, which its plan permits.
                Err(failure @ RewardFailure::Outage { .. }) if !entry.required => Judged {
                    judgements: vec![Judgement::missing("reward_outage", failure.to_string()); theirs.len()],
                    counts: Counts::default(),
                },
                Err(failure @ RewardFailure::Invalid { .. }) => {
                    self.forget(job, &entry.name).await?;
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
                // Nothing of this rollout comes from its sources.
                scored.scores.iter_mut().for_each(|score| score.values.push(RewardValue::NotApplicable));
                continue;
            };
            entry.meter.judged(&judged, entry.endpoint.is_none().then_some(latency));
            scored.metrics.insert(format!("rewards/{}/latency", entry.name), Some(latency.as_secs_f64()));
            // What stood in the journal was weighed by the attempt that got it.
            let verdict = match judged.counts.replayed {
                0 => entry.health.lock().unwrap_or_else(PoisonError::into_inner).take(&entry.name, &judged),
                _ => Verdict::Good,
            };
            match verdict {
                Verdict::Good => {}
                Verdict::Warn(warning) => scored.warnings.push(warning),
                Verdict::Stop(failure) if entry.required => {
                    self.forget(job, &entry.name).await?;
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
                    RewardValue::NotApplicable
                }
            };
            let mut values: Vec<RewardValue> = samples.iter().map(value).collect();
            if job.rollout.is_trained() {
                leave_out_thin_groups(&mut values, samples, entry.min_valid_per_group);
            }
            for (score, value) in scored.scores.iter_mut().zip(values) {
                score.values.push(value);
            }
        }
        Ok(scored)
    }

    /// Takes a reward's answers to a rollout out of the journal: they end the attempt unused, and when the user has seen to the
    /// service, it is asked anew.
    async fn forget(&self, job: &JobContext, reward: &str) -> Result<(), RewardFailure> {
        let Some(journal) = &self.around.journal else { return Ok(()) };
        let entry = JournalEntry::Forget { rollout: job.rollout, reward: reward.to_owned() };
        journal.append(entry).await.map_err(|unrecorded| unrecorded.of(reward))
    }
}

/// A group that lacks values and has fewer than `min_valid` loses them all: the rest says little of its prompt. Up to 2 there
/// is nothing to do: the estimators leave one alone out by themselves.
fn leave_out_thin_groups(values: &mut [RewardValue], samples: &[RewardSample], min_valid: usize) {
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
