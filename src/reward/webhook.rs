//! Rewards over HTTP, the client's side: samples are packed into requests, requests are delivered with retries
//! (`delivery`), answers are read with suspicion (`answer`), and what is left open is asked again. How a service is spoken
//! to is its `dialect`: contract v1, or one of `reward::adapters`.
//!
//! Two promises: a sample only gets a number that the service gave to it, and a service that hangs never hangs us.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, try_join_all};
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::cache::{self, CacheKey};
use super::client::RewardClient;
use super::journal::{Journal, Journalled, key};
use super::meter::{About, Meter};
use super::redact::Redactor;
use super::signature::Key;
use super::status::{Outage, Status};
use super::{BuildError, Counts, JobContext, Judged, Judgement, Reward, RewardFailure, SampleError};
use crate::callback::Later;
use crate::event::Event;
use crate::id::RewardRequestId;
use crate::outgoing::OutgoingPolicy;
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::sample::{RewardSample, RewardValue};
use crate::spec::{OnInvalid, RewardKind, RewardSecrets, ServicePlan, WebhookPlan};

mod account;
pub(super) mod answer;
mod breaker;
mod concurrency;
mod delivery;
pub(super) mod dialect;
pub(super) mod endpoint;
mod hidden;
mod known;
mod later;
mod record;
mod request;

pub use delivery::{Ping, PingReply};
pub use record::{Exchange, Received, Sent};
pub(super) use request::sample_json;

use answer::{Answer, Found};
use delivery::{Delivered, jitter};
use dialect::{Ask, Contract, Dialect};
use endpoint::{Endpoint, Endpoints};
use hidden::Hidden;
use later::{Obtained, Timing};
use request::{Request, Room};

/// A reward service.
pub struct Webhook {
    name: String,
    plan: ServicePlan,
    dialect: Box<dyn Dialect>,
    url: Url,
    /// One signature each.
    keys: Vec<Key>,
    headers: HeaderMap,
    client: RewardClient,
    /// Taken out of all that a service answers.
    hidden: Hidden,
    permits: Semaphore,
    /// Shared by all that asks there.
    endpoint: Arc<Endpoint>,
    meter: Arc<Meter>,
    redactor: Redactor,
    /// For the cache; `None`: it is not used.
    revision: Option<CacheKey>,
    /// Told of since it answered last.
    outage: Outage,
    status: Arc<Status>,
    journal: Option<Arc<dyn Journal>>,
    exchanges: Option<Mutex<Vec<Exchange>>>,
    /// What the answers showed that whoever set the reward up should know, once each.
    remarks: Mutex<Vec<String>>,
}

impl Webhook {
    /// Makes a client for a service that speaks contract v1, with connections of its own. The URL and a literal address in it
    /// are checked here, names when they resolve.
    pub fn new(
        name: &str,
        plan: &WebhookPlan,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        Self::of_kind(name, &RewardKind::Webhook(plan.clone()), secrets, outgoing)
    }

    /// Makes a client for any reward over HTTP, as [`Webhook::new`].
    pub fn of_kind(
        name: &str,
        kind: &RewardKind,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        Self::sharing(name, kind, secrets, &RewardClient::new(outgoing).map_err(error)?)
    }

    /// As [`Webhook::of_kind`], with the connections of a worker.
    pub fn sharing(
        name: &str,
        kind: &RewardKind,
        secrets: &RewardSecrets,
        client: &RewardClient,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        let Some(service) = kind.service() else {
            return Err(error("a built-in reward is not asked over HTTP".to_owned()));
        };
        let dialect: Box<dyn Dialect> = match kind {
            RewardKind::Webhook(plan) => Box::new(Contract(plan.clone())),
            kind => super::adapters::dialect(kind).map_err(error)?,
        };
        let revision = service.cache.then(|| cache::revision(name, kind));
        Ok(Self { revision, ..Self::speaking(dialect, name, service, secrets, client)? })
    }

    fn speaking(
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
        let mut headers = HeaderMap::new();
        for (header, value) in &secrets.headers {
            let header_name =
                HeaderName::try_from(header.as_str()).map_err(|_| error(format!("'{header}' is not a header name")))?;
            let mut value = HeaderValue::try_from(value.as_str()).map_err(|_| {
                error(format!("the value of the header '{header}' has characters a header cannot carry"))
            })?;
            value.set_sensitive(true);
            headers.insert(header_name, value);
        }
        Ok(Self {
            name: name.to_owned(),
            url,
            keys,
            hidden: Hidden::new(secrets),
            headers,
            permits: Semaphore::new((plan.max_concurrency.max(1)) as usize),
            endpoint: Endpoints::new(client.pace).at(&plan.url, plan.max_concurrency),
            meter: Arc::default(),
            redactor: Redactor::new(secrets),
            revision: None,
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

    /// Tells that it waits, and why, by what it shares with the job's other rewards.
    #[must_use]
    pub(super) fn with_status(mut self, status: Arc<Status>) -> Self {
        self.status = status;
        self
    }

    /// Shares its endpoint with the job's other rewards, and counts there.
    #[must_use]
    pub(super) fn with_endpoint(mut self, endpoint: Arc<Endpoint>, meter: Arc<Meter>) -> Self {
        self.endpoint = endpoint;
        self.meter = meter;
        self
    }

    /// Writes requests down before they are sent, and answers before they are used.
    #[must_use]
    pub fn with_journal(mut self, journal: Option<Arc<dyn Journal>>) -> Self {
        self.journal = journal;
        self
    }

    /// Keeps every request and response, for [`Webhook::exchanges`].
    #[must_use]
    pub fn recording(mut self) -> Self {
        self.exchanges = Some(Mutex::default());
        self
    }

    /// What was sent and received since the last call, in the order of the answers; header values of the user's are redacted.
    pub fn exchanges(&self) -> Vec<Exchange> {
        let Some(exchanges) = &self.exchanges else { return Vec::new() };
        std::mem::take(&mut exchanges.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What the answers showed so far that whoever set the reward up should know.
    pub fn remarks(&self) -> Vec<String> {
        self.remarks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells of a remark, once.
    fn remark(&self, remark: String) {
        let mut remarks = self.remarks.lock().unwrap_or_else(PoisonError::into_inner);
        if !remarks.contains(&remark) {
            self.status.tell(Event::Warning {
                code: "reward_remark".to_owned(),
                message: format!("reward '{}': {remark}", self.name),
                data: serde_json::json!({"reward": self.name}),
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
            for (index, sample) in samples.iter().enumerate() {
                match self.dialect.piece(sample) {
                    Ok(piece) => {
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
            let asking = Asking { webhook: self, job, samples, pieces, wire, counts: Mutex::default() };
            let known = asking.known(&indices).await?;
            indices.retain(|index| !known.contains(*index));
            let room = Room {
                batching: self.dialect.batching(),
                max_samples: self.plan.max_batch_samples,
                max_bytes: self.plan.max_batch_bytes,
            };
            let batches = request::pack(&indices, samples, &asking.wire, room);
            let answers = try_join_all(batches.into_iter().map(|batch| asking.ask(batch, 0, 0))).await?;
            for (index, judgement) in answers.into_iter().flatten() {
                judgements[index] = Some(judgement);
            }
            asking.count(Counts { cached: known.number(), ..Counts::default() });
            known.complete(&self.client.cache, &mut judgements);
            let unasked = || Judgement::missing("not_asked", "this sample was not asked for");
            let judgements = judgements.into_iter().map(|judgement| judgement.unwrap_or_else(unasked)).collect();
            let counts = *asking.counts.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(Judged { judgements, counts })
        })
    }
}

/// Reads a service's answer as a run does: of how many samples it says something.
///
/// # Errors
/// Why the whole is no answer.
pub fn read_answer(kind: &RewardKind, body: &[u8], id: &str, samples: &[RewardSample]) -> Result<usize, String> {
    let dialect: Box<dyn Dialect> = match kind {
        RewardKind::Webhook(plan) => Box::new(Contract(plan.clone())),
        other => super::adapters::dialect(other)?,
    };
    Ok(dialect.read(body, id, &samples.iter().collect::<Vec<_>>())?.found.len())
}

/// One rollout's samples on their way through a service.
struct Asking<'a> {
    webhook: &'a Webhook,
    job: &'a JobContext,
    samples: &'a [RewardSample],
    /// What the dialect says of each sample.
    pieces: Vec<Value>,
    /// The same as text.
    wire: Vec<String>,
    counts: Mutex<Counts>,
}

type Answers = Vec<(usize, Judgement)>;

impl Asking<'_> {
    /// Asks for the samples at `indices` until each has a judgement. `round` counts how often they were asked before,
    /// `silent` how many deadlines passed in a row meanwhile without any result.
    fn ask(&self, indices: Vec<usize>, round: u32, silent: u32) -> BoxFuture<'_, Result<Answers, RewardFailure>> {
        Box::pin(async move {
            let webhook = self.webhook;
            let samples = || indices.iter().map(|&index| self.wire[index].as_str());
            let key = webhook.journal.as_ref().map(|_| key(self.job, &webhook.name, round, samples()));
            let (id, answer, is_new) = match self.journalled(key.as_deref()) {
                Some(Journalled::Answered { id, answer }) => {
                    self.count(Counts { replayed: 1, ..Counts::default() });
                    (id, answer, false)
                }
                known => {
                    let accepted = match &known {
                        Some(Journalled::Sent { later: Some(later), .. }) => later.accepted.clone(),
                        _ => None,
                    };
                    // A request that the service has taken is not in flight.
                    let permit = match &accepted {
                        Some(_) => None,
                        None => Some(webhook.permits.acquire().await),
                    };
                    let request = match known {
                        Some(Journalled::Sent { id, body, later }) => {
                            self.sent_before(id, body, later.as_ref(), &indices)
                        }
                        _ => {
                            let request = self.written(&indices);
                            self.write_down(key.as_deref(), |key| self.entry_of(key, &request, &indices)).await?;
                            request
                        }
                    };
                    let answer = self.answered(&request, &indices, key.as_deref(), accepted, permit).await?;
                    let entry = |key| JournalEntry::Answer {
                        rollout: self.job.rollout,
                        key,
                        id: request.id.clone(),
                        answer: answer.clone(),
                    };
                    self.write_down(key.as_deref(), entry).await?;
                    (request.id, answer, true)
                }
            };
            let mut timing = Timing::InTime;
            let body = match answer {
                RewardAnswer::Body { body } => body,
                RewardAnswer::Expired { body } => {
                    timing = if is_new { self.expired(&indices, &body, silent)? } else { Timing::Late(0) };
                    body
                }
                RewardAnswer::Unusable { code, detail } => return self.settle(&indices, &code, &detail),
                RewardAnswer::TooLarge if indices.len() == 1 => {
                    return self.settle(&indices, "too_large", "the service answered 413 to a single sample");
                }
                RewardAnswer::TooLarge => {
                    let (left, right) = indices.split_at(indices.len() / 2);
                    let halves = [self.ask(left.to_vec(), round, silent), self.ask(right.to_vec(), round, silent)];
                    return Ok(try_join_all(halves).await?.concat());
                }
            };
            match self.read(body.as_bytes(), &id, &indices) {
                Ok(answer) => {
                    if let Some(remark) = answer.remark {
                        webhook.remark(remark);
                    }
                    let counts =
                        Counts { unknown_ids: answer.unknown, duplicate_ids: answer.duplicates, ..Counts::default() };
                    self.count(counts);
                    self.conclude(indices, answer.found, round, timing).await
                }
                // It could be read when it came: another version wrote the journal.
                Err(problem) => self.settle(&indices, "invalid_answer", &problem),
            }
        })
    }

    /// Sends a request until there is an answer that stays: one that can be read, the promise of one, or the end of the tries.
    async fn obtain(&self, request: &Request, indices: &[usize]) -> Result<Obtained, RewardFailure> {
        let webhook = self.webhook;
        let deadline = Instant::now() + Duration::from_millis(webhook.plan.deadline_ms);
        let unusable = |code: &str, detail| Obtained::Answer(RewardAnswer::Unusable { code: code.to_owned(), detail });
        let mut invalid_answers = 0;
        loop {
            let (delivered, counts) = webhook.deliver(request).await?;
            self.count(counts);
            let problem = match delivered {
                Delivered::Body(body) => match self.read(&body, &request.id, indices) {
                    // What can be read is UTF-8.
                    Ok(_) => {
                        let body = String::from_utf8_lossy(&body).into_owned();
                        return Ok(Obtained::Answer(RewardAnswer::Body { body }));
                    }
                    Err(problem) => {
                        webhook.account_unusable(request, &body, &problem);
                        problem
                    }
                },
                Delivered::Unusable(problem) => {
                    webhook.account_unusable(request, &[], &problem);
                    problem
                }
                Delivered::Permanent(problem) => return Ok(unusable("refused", problem)),
                Delivered::TooLarge => return Ok(Obtained::Answer(RewardAnswer::TooLarge)),
                Delivered::Accepted(accepted) => match webhook.promised(accepted) {
                    Ok(accepted) => return Ok(Obtained::Later(accepted)),
                    Err(problem) => {
                        webhook.account_unusable(request, &[], &problem);
                        problem
                    }
                },
            };
            invalid_answers += 1;
            if invalid_answers > webhook.plan.max_invalid_tries || Instant::now() >= deadline {
                return Ok(unusable("invalid_answer", problem));
            }
            self.count(Counts { retries: 1, ..Counts::default() });
            webhook.meter.retried();
            tokio::time::sleep(webhook.client.pace.of(jitter(invalid_answers))).await;
        }
    }

    /// A new request about the samples at `indices`.
    fn written(&self, indices: &[usize]) -> Request {
        let id = RewardRequestId::new().to_string();
        let pieces: Vec<&Value> = indices.iter().map(|&index| &self.pieces[index]).collect();
        let webhook = self.webhook;
        let terms = webhook.journal.as_ref().and_then(|journal| journal.callbacks());
        let callback_url = terms.filter(|_| webhook.dialect.answers_later()).and_then(|terms| terms.address(&id));
        let callback_url = callback_url.as_deref();
        let ask = Ask { id: &id, reward: &webhook.name, job: self.job, callback_url, pieces: &pieces };
        let body = webhook.dialect.body(&ask);
        self.request(id, body, webhook.plan.deadline_ms, indices)
    }

    /// A request of a former attempt.
    fn sent_before(&self, id: String, body: String, later: Option<&Later>, indices: &[usize]) -> Request {
        self.request(id, body, later.map_or(self.webhook.plan.deadline_ms, |later| later.left_ms), indices)
    }

    fn request(&self, id: String, body: String, left_ms: u64, indices: &[usize]) -> Request {
        let name = |sample: &RewardSample| format!("{}/{}", sample.prompt_id, sample.sample_id);
        let samples = indices.iter().map(|&index| name(&self.samples[index])).collect();
        let about = About { step: self.job.rollout.step, samples };
        let request = Request::new(id, body, Duration::from_millis(left_ms)).about(about);
        let journal = self.webhook.journal.as_ref().filter(|_| self.webhook.dialect.answers_later());
        match journal.and_then(|journal| journal.callbacks()) {
            Some(terms) => request.with_token(|id| terms.token(id)),
            None => request,
        }
    }

    fn read(&self, body: &[u8], id: &str, indices: &[usize]) -> Result<Answer, String> {
        let samples: Vec<&RewardSample> = indices.iter().map(|&index| &self.samples[index]).collect();
        self.webhook.dialect.read(body, id, &samples)
    }

    fn journalled(&self, key: Option<&str>) -> Option<Journalled> {
        self.webhook.journal.as_ref()?.find(key?)
    }

    fn entry_of(&self, key: String, request: &Request, indices: &[usize]) -> JournalEntry {
        JournalEntry::Request {
            rollout: self.job.rollout,
            reward: self.webhook.name.clone(),
            key,
            id: request.id.clone(),
            body: request.body.clone(),
            later: self.later(indices),
        }
    }

    /// Returns when the entry is durable, at once without a journal.
    async fn write_down(
        &self,
        key: Option<&str>,
        entry: impl FnOnce(String) -> JournalEntry,
    ) -> Result<(), RewardFailure> {
        let (Some(journal), Some(key)) = (&self.webhook.journal, key) else { return Ok(()) };
        journal.append(entry(key.to_owned())).await.map_err(|unrecorded| unrecorded.of(&self.webhook.name))
    }

    /// Keeps what is answered, asks again for what is open, gives up on what was asked often enough.
    async fn conclude(
        &self,
        indices: Vec<usize>,
        found: Vec<Found>,
        round: u32,
        timing: Timing,
    ) -> Result<Answers, RewardFailure> {
        let plan = &self.webhook.plan;
        let mut answers = Vec::with_capacity(indices.len());
        let mut again = Vec::new();
        for (position, (index, found)) in indices.into_iter().zip(found).enumerate() {
            match found {
                Found::Judged(judgement) => answers.push((index, judgement)),
                Found::Retryable(_) if round + 1 < plan.max_tries => again.push(index),
                // The service itself said that it has no value: missing, whatever `on_invalid` says.
                Found::Retryable(SampleError { code, message }) => {
                    answers.push((index, Judgement::missing(code, format!("{message} ({} tries)", round + 1))));
                }
                // A deadline that passes is no answer: it masks nothing.
                Found::Absent if timing != Timing::InTime => again.push(index),
                Found::Absent | Found::Invalid(_) if round < plan.max_invalid_tries => again.push(index),
                Found::Absent => {
                    answers.extend(self.settle(&[index], "no_result", "the service gave no result for it")?)
                }
                Found::Invalid(what) => {
                    let detail = format!("{what} at index {position} ({})", self.samples[index].sample_id);
                    answers.extend(self.settle(&[index], "invalid_value", &detail)?);
                }
            }
        }
        if !again.is_empty() {
            self.count(Counts { retries: 1, ..Counts::default() });
            self.webhook.meter.retried();
            tokio::time::sleep(self.webhook.client.pace.of(jitter(round + 1))).await;
            let silent = match timing {
                Timing::InTime => 0,
                Timing::Late(silent) => silent,
            };
            answers.extend(self.ask(again, round + 1, silent).await?);
        }
        Ok(answers)
    }

    /// What invalid answers mean, by the plan's `on_invalid`.
    fn settle(&self, indices: &[usize], code: &str, detail: &str) -> Result<Answers, RewardFailure> {
        let judgement = match self.webhook.plan.on_invalid {
            OnInvalid::Mask => Judgement::missing(code, detail),
            OnInvalid::Zero => Judgement { value: RewardValue::Number(0.0), ..Judgement::missing(code, detail) },
            OnInvalid::Fail => {
                return Err(RewardFailure::Invalid { reward: self.webhook.name.clone(), detail: detail.to_owned() });
            }
        };
        Ok(indices.iter().map(|&index| (index, judgement.clone())).collect())
    }

    fn count(&self, counts: Counts) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner) += counts;
    }
}
