//! Client for rewards over HTTP. Samples are packed into requests, requests are sent with retries (`delivery`), answers are
//! validated (`answer`), and samples without a result are requested again. The format of requests and answers is a `dialect`:
//! contract v1, or one of `adapters`.
//!
//! Two guarantees: a sample only gets a number that the service gave for it, and a service that hangs never blocks a job.

use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, try_join_all};
use reqwest::Url;
use reqwest::header::HeaderMap;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::cache::{self, CacheKey};
use super::client::{RewardClient, user_headers};
use super::journal::Journal;
use super::meter::Meter;
use super::redact::Redactor;
use super::secret_filter::SecretFilter;
use super::signature::Key;
use super::status::{Outage, Status};
use super::{BuildError, Counts, JobContext, Judged, Judgement, Limit, Reward, RewardFailure};
use crate::event::Event;
use crate::outgoing::OutgoingPolicy;
use crate::rollout::RewardSample;
use crate::spec::{RewardKind, RewardSecrets, ServicePlan, WebhookPlan};

mod account;
mod adapters;
pub mod answer;
mod asynchronous;
mod breaker;
mod cached;
mod concurrency;
mod delivery;
pub(super) mod dialect;
pub(super) mod endpoint;
pub mod environment_wire;
mod episodes;
mod record;
mod request;
mod scoring;
pub(crate) mod wait;
mod wire;

pub use delivery::{Ping, PingReply};
pub use environment_wire::MAX_ANSWER_BYTES;
pub use episodes::EnvironmentClient;
pub use record::{Exchange, Received, Sent};
pub use request::sample_json;

use delivery::Delivered;
use dialect::{Contract, Dialect};
use endpoint::{Endpoint, Endpoints};
use request::Room;
use scoring::ScoringRun;

/// A client for one reward service over HTTP.
pub struct Webhook {
    /// The word for the service in messages: `reward` or `environment`.
    noun: &'static str,
    name: String,
    plan: ServicePlan,
    dialect: Box<dyn Dialect>,
    url: Url,
    /// Keys that sign the requests; a request carries one signature for each key.
    keys: Vec<Key>,
    headers: HeaderMap,
    client: RewardClient,
    /// Redacts this reward's secrets in answers.
    secret_filter: SecretFilter,
    permits: Semaphore,
    /// Circuit breaker and concurrency limit, shared by all requests to this address.
    endpoint: Arc<Endpoint>,
    meter: Arc<Meter>,
    redactor: Redactor,
    /// Identifies this version of the reward in the cache of reward values; `None` when the cache is not used.
    revision: Option<CacheKey>,
    limit: Limit,
    /// Sends warnings about outages of the service.
    outage: Outage,
    status: Arc<Status>,
    journal: Option<Arc<dyn Journal>>,
    exchanges: Option<Mutex<Vec<Exchange>>>,
    /// Hints for the author of the reward about the service's answers, each reported once.
    remarks: Mutex<Vec<String>>,
}

impl Webhook {
    /// Creates a client for a service that speaks contract v1, with its own connections. The URL and a literal IP address in it
    /// are checked here, host names when they are resolved.
    pub fn new(
        name: &str,
        plan: &WebhookPlan,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        Self::of_kind(name, &RewardKind::Webhook(plan.clone()), secrets, outgoing)
    }

    /// Creates a client for any reward over HTTP, like [`Webhook::new`].
    pub fn of_kind(
        name: &str,
        kind: &RewardKind,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        Self::sharing(name, kind, secrets, &RewardClient::new(outgoing).map_err(error)?)
    }

    /// Like [`Webhook::of_kind`], with the connection pool of a worker.
    pub fn sharing(
        name: &str,
        kind: &RewardKind,
        secrets: &RewardSecrets,
        client: &RewardClient,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        let Some(service) = kind.service() else {
            return Err(error("a built-in reward is not a service".to_owned()));
        };
        let dialect: Box<dyn Dialect> = match kind {
            RewardKind::Webhook(plan) => Box::new(Contract(plan.clone())),
            RewardKind::Python(plan) => Box::new(Contract::of_python(plan)),
            kind => adapters::dialect(kind).map_err(error)?,
        };
        let revision = service.cache.then(|| match kind {
            // The cache must find values across attempts, but the address and the secret of the Python process differ in every
            // attempt. The hash of the file identifies the code.
            RewardKind::Python(plan) => {
                let lasting = (&plan.file, &plan.function, &plan.sha256);
                cache::revision(&client.cache_scope, &RewardSecrets::default(), name, &lasting)
            }
            kind => cache::revision(&client.cache_scope, secrets, name, kind),
        });
        Ok(Self { revision, ..Self::with_dialect(dialect, name, service, secrets, client)? })
    }

    fn with_dialect(
        dialect: Box<dyn Dialect>,
        name: &str,
        plan: &ServicePlan,
        secrets: &RewardSecrets,
        client: &RewardClient,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        let url = client.policy.check_url(&plan.url).map_err(|why| error(why.to_string()))?;
        let keys = [&secrets.secret, &secrets.previous_secret].into_iter().flatten().map(|secret| Key::parse(secret));
        let keys = keys.collect::<Result<_, _>>().map_err(|why| error(why.to_string()))?;
        let headers = user_headers(secrets).map_err(error)?;
        Ok(Self {
            noun: "reward",
            name: name.to_owned(),
            url,
            keys,
            secret_filter: SecretFilter::new(secrets),
            headers,
            permits: Semaphore::new((plan.max_concurrency.max(1)) as usize),
            endpoint: Endpoints::new(client.pace).at(&plan.url, plan.max_concurrency),
            meter: Arc::default(),
            redactor: Redactor::new(secrets),
            revision: None,
            limit: Limit::default(),
            client: client.clone(),
            plan: plan.clone(),
            dialect,
            outage: Outage::default(),
            status: Arc::new(Status::new().0),
            journal: None,
            exchanges: None,
            remarks: Mutex::default(),
        })
    }

    /// Sets the maximum absolute value of this reward.
    #[must_use]
    pub fn bounded(mut self, max_abs_reward: Option<f64>) -> Self {
        self.limit = Limit::of(max_abs_reward);
        self.revision = self.revision.map(|revision| cache::bounded(&revision, max_abs_reward));
        self
    }

    /// Sets the status, shared by the job's rewards, that receives the number of waiting requests and the warnings.
    #[must_use]
    pub(super) fn with_status(mut self, status: Arc<Status>) -> Self {
        self.status = status;
        self
    }

    /// Sets the circuit breaker and the meter that this reward shares with the job's other rewards of the same address.
    #[must_use]
    pub(super) fn with_endpoint(mut self, endpoint: Arc<Endpoint>, meter: Arc<Meter>) -> Self {
        self.endpoint = endpoint;
        self.meter = meter;
        self
    }

    /// Sets the journal that records requests before they are sent, and answers before they are used.
    #[must_use]
    pub fn with_journal(mut self, journal: Option<Arc<dyn Journal>>) -> Self {
        self.journal = journal;
        self
    }

    /// Turns on the recording of every request and response, for [`Webhook::exchanges`].
    #[must_use]
    pub fn recording(mut self) -> Self {
        self.exchanges = Some(Mutex::default());
        self
    }

    /// Returns the requests and responses recorded since the last call, in the order of the responses. Values of the
    /// user's headers are redacted.
    pub fn exchanges(&self) -> Vec<Exchange> {
        let Some(exchanges) = &self.exchanges else { return Vec::new() };
        std::mem::take(&mut exchanges.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the hints for the author of the reward about the answers so far.
    pub fn remarks(&self) -> Vec<String> {
        self.remarks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reports a hint for the author of the reward, unless it was reported before.
    fn remark(&self, remark: String) {
        let mut remarks = self.remarks.lock().unwrap_or_else(PoisonError::into_inner);
        if !remarks.contains(&remark) {
            self.status.notify(Event::Warning {
                code: format!("{}_remark", self.noun),
                message: format!("{} '{}': {remark}", self.noun, self.name),
                data: serde_json::json!({self.noun: self.name}),
            });
            remarks.push(remark);
        }
    }
}

impl Reward for Webhook {
    fn judge<'a>(
        &'a self,
        job: &'a JobContext,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Result<Judged, RewardFailure>> {
        Box::pin(async move {
            let mut judgements: Vec<Option<Judgement>> = vec![None; samples.len()];
            let mut indices = Vec::with_capacity(samples.len());
            let mut pieces = Vec::with_capacity(samples.len());
            let terms = self.journal.as_ref().and_then(|journal| journal.callbacks());
            for (index, sample) in samples.iter().enumerate() {
                // Rendering a sample's template may take long, so other async tasks may run between two samples.
                tokio::task::yield_now().await;
                match self.dialect.piece(sample) {
                    Ok(mut piece) => {
                        request::add_image_urls(&mut piece, terms.filter(|_| self.dialect.answers_later()), job.job);
                        indices.push(index);
                        pieces.push(piece);
                    }
                    Err(error) => {
                        judgements[index] = Some(Judgement::missing(error.code, error.message));
                        pieces.push(Value::Null);
                    }
                }
            }
            let wire = pieces.iter().map(Value::to_string).collect();
            let run = ScoringRun { webhook: self, job, samples, pieces, wire, counts: Mutex::default() };
            let known = run.find_known(&indices).await?;
            indices.retain(|index| !known.contains(*index));
            let room = Room {
                batching: self.dialect.batching(),
                max_samples: self.plan.max_batch_samples,
                max_bytes: self.plan.max_batch_bytes,
            };
            let batches = request::pack(&indices, samples, &run.wire, room);
            let answers = try_join_all(batches.into_iter().map(|batch| run.request_scores(batch, 0, 0))).await?;
            for (index, judgement) in answers.into_iter().flatten() {
                judgements[index] = Some(judgement);
            }
            run.count(Counts { cached: known.count(), ..Counts::default() });
            known.complete(&self.client.cache, &mut judgements);
            let not_requested =
                || Judgement::missing("not_asked", "the reward service returned no result for this sample");
            let judgements = judgements.into_iter().map(|judgement| judgement.unwrap_or_else(not_requested)).collect();
            let counts = *run.counts.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(Judged { judgements, counts })
        })
    }
}

/// Parses a service's answer in the same way as a job, and returns the number of samples with a result.
///
/// # Errors
/// Returns why the service's answer is not valid.
pub fn read_answer(kind: &RewardKind, body: &[u8], id: &str, samples: &[RewardSample]) -> Result<usize, String> {
    let dialect: Box<dyn Dialect> = match kind {
        RewardKind::Webhook(plan) => Box::new(Contract(plan.clone())),
        RewardKind::Python(plan) => Box::new(Contract::of_python(plan)),
        other => adapters::dialect(other)?,
    };
    Ok(dialect.read(body, id, &samples.iter().collect::<Vec<_>>())?.found.len())
}
