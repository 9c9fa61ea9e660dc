//! Rewards over HTTP, the client's side: samples are packed into requests, requests are delivered with retries
//! (`delivery`), answers are read with suspicion (`answer`), and what is left open is asked again. How a service is spoken
//! to is its `dialect`: contract v1, or one of `reward::adapters`.
//!
//! Two promises: a sample only gets a number that the service gave to it, and a service that hangs never hangs us.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, try_join_all};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Url};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::journal::{Journal, Journalled, key};
use super::signature::Key;
use super::status::{Outage, Status};
use super::{BuildError, Counts, JobContext, Judged, Judgement, Reward, RewardFailure, SampleError};
use crate::event::Event;
use crate::id::RewardRequestId;
use crate::outgoing::OutgoingPolicy;
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::sample::{RewardSample, RewardValue};
use crate::spec::{OnInvalid, RewardKind, RewardSecrets, ServicePlan, WebhookPlan};

pub(super) mod answer;
mod delivery;
pub(super) mod dialect;
mod hidden;
mod record;
mod request;

pub use delivery::{Ping, PingReply};
pub use record::{Exchange, Received, Sent};

use answer::{Answer, Found};
use delivery::{Delivered, jitter};
use dialect::{Ask, Contract, Dialect};
use hidden::Hidden;
use request::{Request, Room};

/// A reward service.
pub struct Webhook {
    name: String,
    plan: ServicePlan,
    dialect: Box<dyn Dialect>,
    url: Url,
    key: Option<Key>,
    headers: HeaderMap,
    /// Taken out of all that a service answers.
    hidden: Hidden,
    client: Client,
    permits: Semaphore,
    /// It was down for `max_outage_s` and has not answered since.
    down: AtomicBool,
    /// Told of since it answered last.
    outage: Outage,
    status: Arc<Status>,
    journal: Option<Arc<dyn Journal>>,
    exchanges: Option<Mutex<Vec<Exchange>>>,
    /// What the answers showed that whoever set the reward up should know, once each.
    remarks: Mutex<Vec<String>>,
}

impl Webhook {
    /// Makes a client for a service that speaks contract v1. The URL and a literal address in it are checked here, names
    /// when they resolve.
    pub fn new(
        name: &str,
        plan: &WebhookPlan,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        Self::speaking(Box::new(Contract(plan.clone())), name, &plan.service, secrets, outgoing)
    }

    /// Makes a client for any reward over HTTP, as [`Webhook::new`].
    pub fn of_kind(
        name: &str,
        kind: &RewardKind,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        match (kind, kind.service()) {
            (RewardKind::Webhook(plan), _) => Self::new(name, plan, secrets, outgoing),
            (_, Some(service)) => {
                let dialect = super::adapters::dialect(kind).map_err(error)?;
                Self::speaking(dialect, name, service, secrets, outgoing)
            }
            (_, None) => Err(error("a built-in reward is not asked over HTTP".to_owned())),
        }
    }

    fn speaking(
        dialect: Box<dyn Dialect>,
        name: &str,
        plan: &ServicePlan,
        secrets: &RewardSecrets,
        outgoing: &OutgoingPolicy,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        let url = outgoing.check_url(&plan.url).map_err(|why| error(why.to_string()))?;
        let key = secrets.secret.as_deref().map(Key::parse).transpose().map_err(|why| error(why.to_string()))?;
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
        let client = outgoing
            .client_builder()
            .http1_only()
            .connect_timeout(Duration::from_millis(plan.timeout_ms.clamp(1, 10_000)))
            .build()
            .map_err(|why| error(format!("no HTTP client: {why}")))?;
        Ok(Self {
            name: name.to_owned(),
            url,
            key,
            hidden: Hidden::new(secrets),
            headers,
            client,
            permits: Semaphore::new((plan.max_concurrency.max(1)) as usize),
            plan: plan.clone(),
            dialect,
            down: AtomicBool::new(false),
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
            let room = Room {
                batching: self.dialect.batching(),
                max_samples: self.plan.max_batch_samples,
                max_bytes: self.plan.max_batch_bytes,
            };
            let batches = request::pack(&indices, samples, &asking.wire, room);
            let answers = try_join_all(batches.into_iter().map(|batch| asking.ask(batch, 0))).await?;
            for (index, judgement) in answers.into_iter().flatten() {
                judgements[index] = Some(judgement);
            }
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
    /// Asks for the samples at `indices` until each has a judgement. `round` counts how often they were asked before.
    fn ask(&self, indices: Vec<usize>, round: u32) -> BoxFuture<'_, Result<Answers, RewardFailure>> {
        Box::pin(async move {
            let webhook = self.webhook;
            let samples = || indices.iter().map(|&index| self.wire[index].as_str());
            let key = webhook.journal.as_ref().map(|_| key(self.job, &webhook.name, round, samples()));
            let (id, answer) = match self.journalled(key.as_deref()) {
                Some(Journalled::Answered { id, answer }) => {
                    self.count(Counts { replayed: 1, ..Counts::default() });
                    (id, answer)
                }
                known => {
                    let permit = webhook.permits.acquire().await;
                    let request = match known {
                        Some(Journalled::Sent { id, body }) => Request { id, body },
                        _ => {
                            let request = self.written(&indices);
                            self.write_down(key.as_deref(), |key| self.entry_of(key, &request)).await?;
                            request
                        }
                    };
                    let answer = self.obtain(&request, &indices).await?;
                    drop(permit);
                    let entry = |key| JournalEntry::Answer {
                        rollout: self.job.rollout,
                        key,
                        id: request.id.clone(),
                        answer: answer.clone(),
                    };
                    self.write_down(key.as_deref(), entry).await?;
                    (request.id, answer)
                }
            };
            let body = match answer {
                RewardAnswer::Body { body } => body,
                RewardAnswer::Unusable { code, detail } => return self.settle(&indices, &code, &detail),
                RewardAnswer::TooLarge if indices.len() == 1 => {
                    return self.settle(&indices, "too_large", "the service answered 413 to a single sample");
                }
                RewardAnswer::TooLarge => {
                    let (left, right) = indices.split_at(indices.len() / 2);
                    let halves = [self.ask(left.to_vec(), round), self.ask(right.to_vec(), round)];
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
                    self.conclude(indices, answer.found, round).await
                }
                // It could be read when it came: another version wrote the journal.
                Err(problem) => self.settle(&indices, "invalid_answer", &problem),
            }
        })
    }

    /// Sends a request until there is an answer that stays: one that can be read, or the end of the tries.
    async fn obtain(&self, request: &Request, indices: &[usize]) -> Result<RewardAnswer, RewardFailure> {
        let webhook = self.webhook;
        let deadline = Instant::now() + Duration::from_millis(webhook.plan.deadline_ms);
        let unusable = |code: &str, detail| RewardAnswer::Unusable { code: code.to_owned(), detail };
        let mut invalid_answers = 0;
        loop {
            let (delivered, counts) = webhook.deliver(request).await?;
            self.count(counts);
            let problem = match delivered {
                Delivered::Body(body) => match self.read(&body, &request.id, indices) {
                    // What can be read is UTF-8.
                    Ok(_) => return Ok(RewardAnswer::Body { body: String::from_utf8_lossy(&body).into_owned() }),
                    Err(problem) => problem,
                },
                Delivered::Unusable(problem) => problem,
                Delivered::Permanent(problem) => return Ok(unusable("refused", problem)),
                Delivered::TooLarge => return Ok(RewardAnswer::TooLarge),
            };
            invalid_answers += 1;
            if invalid_answers > webhook.plan.max_invalid_tries || Instant::now() >= deadline {
                return Ok(unusable("invalid_answer", problem));
            }
            self.count(Counts { retries: 1, ..Counts::default() });
            tokio::time::sleep(jitter(invalid_answers)).await;
        }
    }

    /// A new request about the samples at `indices`.
    fn written(&self, indices: &[usize]) -> Request {
        let id = RewardRequestId::new().to_string();
        let pieces: Vec<&Value> = indices.iter().map(|&index| &self.pieces[index]).collect();
        let ask = Ask { id: &id, reward: &self.webhook.name, job: self.job, pieces: &pieces };
        let body = self.webhook.dialect.body(&ask);
        Request { id, body }
    }

    fn read(&self, body: &[u8], id: &str, indices: &[usize]) -> Result<Answer, String> {
        let samples: Vec<&RewardSample> = indices.iter().map(|&index| &self.samples[index]).collect();
        self.webhook.dialect.read(body, id, &samples)
    }

    fn journalled(&self, key: Option<&str>) -> Option<Journalled> {
        self.webhook.journal.as_ref()?.find(key?)
    }

    fn entry_of(&self, key: String, request: &Request) -> JournalEntry {
        JournalEntry::Request {
            rollout: self.job.rollout,
            reward: self.webhook.name.clone(),
            key,
            id: request.id.clone(),
            body: request.body.clone(),
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
    async fn conclude(&self, indices: Vec<usize>, found: Vec<Found>, round: u32) -> Result<Answers, RewardFailure> {
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
            tokio::time::sleep(jitter(round + 1)).await;
            answers.extend(self.ask(again, round + 1).await?);
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
