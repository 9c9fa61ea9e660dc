//! Asynchronous answers: a reward service or an environment accepts a request (202) and later sends the results to the callback
//! address, or publishes them at its status address. Both are watched, and the first result of each part of the answer is used.
//! The parts of a reward service's answer are its samples: results that arrive by the deadline are kept, and missing ones are
//! requested again. The answer of an environment has one part.
//!
//! Longer than 500 lines: polls, callbacks, repeats and deadlines change the state of one wait.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::{StatusCode, Url};
use serde_json::{Value, json};

use super::answer::{self, name};
use super::environment_wire::{self, AnswerKind, MAX_ANSWER_BYTES, Problem};
use super::request::Request;
use super::wait::jitter;
use super::{Counts, RewardFailure, ScoringRun, Webhook};
use crate::callback::{Accepted, Chunk, Entry, Later};
use crate::event::Event;
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::rollout::RolloutId;
use crate::secret_filter::Preserved;
use crate::status::Waiting;

/// Interval before the first poll of a status address and between polls. It doubles up to the maximum, unless the service
/// requests another interval, which is limited too.
const FIRST_POLL_INTERVAL: Duration = Duration::from_secs(1);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(30);
const MIN_REQUESTED_INTERVAL: Duration = Duration::from_millis(500);
const MAX_REQUESTED_INTERVAL: Duration = Duration::from_secs(300);
/// Delay after which the worker checks for callback results of a request although the service's 202 has not arrived.
const EARLY_CALLBACK_DELAY: Duration = Duration::from_secs(5);
/// Time limit for fetching callback results that reached the server just before the deadline.
const FINAL_FETCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of consecutive requests whose deadline passes without a single result, after which the job pauses.
pub(super) const MAX_SILENT_DEADLINES: u32 = 2;

/// Outcome of sending a request to a service that may answer later.
pub(super) enum SendOutcome {
    /// A final answer from the service.
    Answer(RewardAnswer),
    /// The service accepted the request (202) and will answer later, at the latest by the deadline.
    Later(Accepted, Instant),
}

/// Outcome of waiting for the results of an accepted request.
enum WaitOutcome {
    Answer(RewardAnswer),
    /// The service no longer knows the request, or cannot report its state; the text says why.
    Lost(String),
}

/// Outcome of one poll of a service's status address.
enum StatusPoll {
    Results(Chunk),
    /// No results yet; the duration is the wait that the service requested.
    Pending(Option<Duration>),
    Lost(String),
    /// An unexpected answer of the status address; the text describes it.
    Odd(String),
}

/// Whether all results of a request arrived before its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timing {
    InTime,
    /// The deadline passed. The number counts the consecutive deadlines without a single result, in this attempt at the job.
    Late(u32),
}

/// Parses the body and the `Retry-After` of a 202 answer. The body and all its fields are optional.
pub(super) fn accepted(body: &[u8], retry_after: Option<Duration>) -> Accepted {
    let value = answer::parse(body).unwrap_or(Value::Null);
    let status_url = value["status_url"].as_str().filter(|url| !url.is_empty()).map(str::to_owned);
    let asked = retry_after.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    Accepted { status_url, eta_ms: asked.or_else(|| milliseconds(&value["eta_ms"])) }
}

fn milliseconds(value: &Value) -> Option<u64> {
    value.as_f64().filter(|ms| *ms >= 0.0).map(|ms| ms as u64)
}

impl Webhook {
    /// Resolves a status address, which may be relative to the service's URL, and checks it against the
    /// policy for outgoing addresses.
    fn status_address(&self, status_url: &str) -> Result<Url, String> {
        let url =
            self.url.join(status_url).map_err(|why| format!("the status_url in the answer is not a URL ({why})"))?;
        self.client
            .policy
            .check_url(url.as_str())
            .map_err(|why| format!("the status_url in the answer is not permitted: {why}"))
    }

    /// Returns why the service cannot send results to this server by callback; `None` if it can.
    fn callback_obstacle(&self) -> Option<&'static str> {
        match self.journal.as_ref().and_then(|journal| journal.callbacks()) {
            Some(terms) if terms.public_url.is_some() => None,
            Some(_) => Some("the rlood server has no --public-url for callbacks"),
            None => Some("a preflight or test cannot receive callbacks"),
        }
    }

    /// Checks how the results of an accepted request (202) can arrive: by callback or at a status address. Returns an
    /// error if they cannot.
    pub(super) fn check_accepted(&self, mut accepted: Accepted) -> Result<Accepted, String> {
        if !self.dialect.answers_later() {
            return Err("the service answered 202, but only synchronous answers are read".to_owned());
        }
        let Some(status_url) = &accepted.status_url else {
            return match self.callback_obstacle() {
                None => Ok(accepted),
                Some(why) => Err(format!("the service answered 202 without a status_url, and {why}")),
            };
        };
        match self.status_address(status_url) {
            Ok(_) => Ok(accepted),
            Err(why) if self.callback_obstacle().is_none() => {
                self.remark(format!("{why}; only callbacks are accepted"));
                accepted.status_url = None;
                Ok(accepted)
            }
            Err(why) => Err(format!("the service answered 202, but {why}")),
        }
    }

    /// Requests a service's status address once.
    async fn poll_status(&self, url: &Url, late: &LateAnswer<'_>) -> StatusPoll {
        let (id, ids) = (late.request.id.as_str(), late.parts.as_slice());
        let mut request = Request::bare(id);
        request.episode.clone_from(&late.request.episode);
        let (status, retry_after, body) = match self.send(&request, Some(url.clone())).await {
            Ok(answered) => answered,
            Err(failed) if failed.is_refused() => {
                return StatusPoll::Odd(format!("the status_url is not permitted: {}", failed.why()));
            }
            Err(_) => return StatusPoll::Pending(None),
        };
        match status.as_u16() {
            202 | 204 => {
                let eta = body.ok().and_then(|body| milliseconds(&answer::parse(&body).ok()?["eta_ms"]));
                StatusPoll::Pending(retry_after.or(eta.map(Duration::from_millis)))
            }
            200..=299 => match body.map(|body| late.form.read_status(&self.clean_status(body, id, ids), id, ids)) {
                Ok(StatusPoll::Pending(_)) => StatusPoll::Pending(retry_after),
                Ok(StatusPoll::Odd(why)) | Err(why) => {
                    StatusPoll::Odd(format!("the answer of the status_url cannot be read: {why}"))
                }
                Ok(read @ (StatusPoll::Results(_) | StatusPoll::Lost(_))) => read,
            },
            404 | 410 => StatusPoll::Lost(format!("the status_url answered {status}")),
            408 | 425 | 429 | 500..=599 => StatusPoll::Pending(retry_after),
            300..=399 => StatusPoll::Odd(format!("the status_url answered {status}: redirects are not followed")),
            _ => StatusPoll::Odd(format!("the status_url answered {}", StatusCode::as_str(&status))),
        }
    }

    fn clean_status(&self, body: Vec<u8>, id: &str, ids: &[&str]) -> Vec<u8> {
        let words = || [id].iter().chain(ids).map(|word| (*word).to_owned()).collect();
        self.secret_filter.redact_answer(body, || Preserved { words: words(), ..self.dialect.preserved() })
    }
}

/// The form of a late answer: samples of a reward, or the answer of an environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LateForm {
    /// The results of a reward service, one for each sample.
    Rewards,
    /// The answer of an environment, as a whole.
    Environment(AnswerKind),
}

impl LateForm {
    /// Reads the body of a status address that answered 200.
    fn read_status(self, body: &[u8], id: &str, parts: &[&str]) -> StatusPoll {
        match self {
            Self::Rewards => match read_status(body, id, parts) {
                Ok(Some(chunk)) => StatusPoll::Results(chunk),
                Ok(None) => StatusPoll::Pending(None),
                Err(why) => StatusPoll::Odd(why),
            },
            Self::Environment(_) if body.len() > MAX_ANSWER_BYTES => {
                StatusPoll::Odd(format!("it has {} bytes: at most {MAX_ANSWER_BYTES} are allowed", body.len()))
            }
            Self::Environment(kind) => match environment_wire::read(body, id, kind) {
                Ok(_) | Err(Problem::Reported { is_retryable: false, .. }) => StatusPoll::Results(kind.chunk(body)),
                Err(Problem::Reported { code, is_retryable: true }) => {
                    StatusPoll::Lost(format!("the status_url reported {code}"))
                }
                Err(Problem::Invalid(why)) => StatusPoll::Odd(why),
            },
        }
    }

    /// Formats results like the body of a synchronous answer.
    fn body(self, id: &str, results: &[&str]) -> String {
        match self {
            Self::Rewards => format!(r#"{{"version":"1","id":"{id}","results":[{}]}}"#, results.join(",")),
            Self::Environment(_) => results.concat(),
        }
    }
}

/// Parses the answer of a status address; `Ok(None)` means no results yet. The short forms of a
/// synchronous answer are complete results.
fn read_status(body: &[u8], id: &str, ids: &[&str]) -> Result<Option<Chunk>, String> {
    let value = answer::parse(body)?;
    if let Some(Value::String(other)) = value.get("id")
        && other.starts_with("rwr_")
        && other != id
    {
        return Err("the 'id' in the answer is that of another request".to_owned());
    }
    if let Some(results) = value.get("results").filter(|results| !results.is_null()) {
        let Value::Array(results) = results else {
            return Err(format!("the answer's 'results' is {}, not a list", name(results)));
        };
        let entry = |result: &Value| {
            Some(Entry { sample_id: result.get("sample_id")?.as_str()?.to_owned(), result: result.to_string() })
        };
        let done = value.get("done") == Some(&Value::Bool(true));
        return Ok(Some(Chunk { entries: results.iter().filter_map(entry).collect(), done }));
    }
    let rewards = match &value {
        Value::Array(rewards) => Some(rewards.clone()),
        value => ["rewards", "scores"].iter().find_map(|key| value.get(key)?.as_array().cloned()),
    };
    let rewards = match (rewards, value.get("reward")) {
        (Some(rewards), _) => rewards,
        (None, Some(reward)) if ids.len() == 1 => vec![reward.clone()],
        (None, _) => {
            let done = value.get("done") == Some(&Value::Bool(true));
            return Ok(done.then(|| Chunk { entries: Vec::new(), done }));
        }
    };
    if rewards.len() != ids.len() {
        return Err(format!("the answer has {} rewards for {} samples", rewards.len(), ids.len()));
    }
    let entry = |(id, reward): (&&str, Value)| Entry {
        sample_id: (*id).to_owned(),
        result: json!({"sample_id": id, "reward": reward}).to_string(),
    };
    Ok(Some(Chunk { entries: ids.iter().zip(rewards).map(entry).collect(), done: true }))
}

/// Results of an accepted request, collected from callbacks and polls; the first result of each sample is used.
struct CollectedResults<'a> {
    positions: HashMap<&'a str, usize>,
    results: Vec<Option<String>>,
    done: bool,
}

impl<'a> CollectedResults<'a> {
    fn new(ids: &[&'a str]) -> Self {
        let positions = ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        Self { positions, results: vec![None; ids.len()], done: false }
    }

    fn add(&mut self, chunk: Chunk) {
        self.done |= chunk.done;
        for Entry { sample_id, result } in chunk.entries {
            // Sample ids that were not requested were counted when the callback arrived.
            if let Some(&at) = self.positions.get(sample_id.as_str()) {
                self.results[at].get_or_insert(result);
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.done || self.results.iter().all(Option::is_some)
    }

    /// Formats the collected results like the body of a synchronous answer.
    fn body(&self, late: &LateAnswer<'_>) -> String {
        let results: Vec<&str> = self.results.iter().flatten().map(String::as_str).collect();
        late.form.body(&late.request.id, &results)
    }
}

/// Schedule for polling a service's status address.
struct PollSchedule {
    next: Instant,
    own: Duration,
}

impl PollSchedule {
    fn new(eta_ms: Option<u64>) -> Self {
        let mut schedule = Self { next: Instant::now(), own: FIRST_POLL_INTERVAL };
        schedule.wait(eta_ms.map(Duration::from_millis));
        schedule
    }

    /// Schedules the next poll of the status address: at the time that the service requested, or after a growing interval.
    fn wait(&mut self, asked: Option<Duration>) {
        let wait = asked.map_or(self.own, |asked| asked.clamp(MIN_REQUESTED_INTERVAL, MAX_REQUESTED_INTERVAL));
        self.next = Instant::now() + wait;
        self.own = (self.own * 2).min(MAX_POLL_INTERVAL);
    }
}

/// The wait for the answer to one request, which may come late.
pub(super) struct LateAnswer<'a> {
    pub webhook: &'a Webhook,
    pub request: &'a Request,
    /// Names of the parts of the answer: sample ids, or one name for the answer of an environment.
    pub parts: Vec<&'a str>,
    pub form: LateForm,
    pub rollout: RolloutId,
    /// Key of the request in the journal.
    pub key: Option<&'a str>,
    /// Receives the number of retries.
    pub counts: Option<&'a Mutex<Counts>>,
}

impl LateAnswer<'_> {
    /// Sends a request, unless the service has `accepted` it in a previous attempt (with the deadline for its answer), and waits until there
    /// is a final answer. The caller's concurrency permit is dropped when the service has accepted the request.
    pub(super) async fn await_answer<P, F>(
        &self,
        send: impl Fn() -> F,
        mut accepted: Option<(Accepted, Instant)>,
        permit: P,
    ) -> Result<RewardAnswer, RewardFailure>
    where
        F: Future<Output = Result<SendOutcome, RewardFailure>>,
    {
        let Self { webhook, request, .. } = self;
        let mut permit = Some(permit);
        let mut lost = 0;
        loop {
            let (promise, deadline) = match accepted.take() {
                Some(accepted) => accepted,
                None => {
                    let obtained = tokio::select! {
                        obtained = send() => obtained?,
                        answer = self.await_early_callback() => return answer,
                    };
                    let (accepted, deadline) = match obtained {
                        SendOutcome::Answer(answer) => return Ok(answer),
                        SendOutcome::Later(accepted, deadline) => (accepted, deadline),
                    };
                    self.record_accepted(&accepted).await?;
                    (accepted, deadline)
                }
            };
            drop(permit.take());
            tracing::info!(
                request = request.id,
                reward = webhook.name,
                "the service accepted the request (202) and will answer later"
            );
            match self.await_results(&promise, deadline).await? {
                WaitOutcome::Answer(answer) => return Ok(answer),
                WaitOutcome::Lost(why) if lost >= webhook.plan.max_invalid_tries => {
                    let detail = format!("the service accepted the request (202) and lost it: {why}");
                    return Ok(RewardAnswer::Unusable { code: "invalid_answer".to_owned(), detail });
                }
                WaitOutcome::Lost(why) => {
                    lost += 1;
                    tracing::info!(request = request.id, why, "the service lost the request; it is sent again");
                    if let Some(counts) = self.counts {
                        *counts.lock().unwrap_or_else(PoisonError::into_inner) +=
                            Counts { retries: 1, ..Counts::default() };
                    }
                    tokio::time::sleep(jitter(lost)).await;
                }
            }
        }
    }

    /// Records that the service has accepted the request. Does nothing without a journal.
    async fn record_accepted(&self, accepted: &Accepted) -> Result<(), RewardFailure> {
        let Self { webhook, request, rollout, .. } = self;
        let (Some(journal), Some(key)) = (&webhook.journal, self.key) else { return Ok(()) };
        let (key, id, accepted) = (key.to_owned(), request.id.clone(), accepted.clone());
        let entry = JournalEntry::Accepted { rollout: *rollout, key, id, accepted };
        journal.append(entry).await.map_err(|closed| closed.of(&webhook.name))
    }

    /// Waits for a complete answer by callback while the HTTP request itself is slow or fails, because a service may send callbacks
    /// before its 202 arrives.
    async fn await_early_callback(&self) -> Result<RewardAnswer, RewardFailure> {
        let Self { webhook, request, .. } = self;
        let (Some(journal), true) = (&webhook.journal, request.has_callback()) else {
            return std::future::pending().await;
        };
        tokio::time::sleep(EARLY_CALLBACK_DELAY).await;
        let mut collected = CollectedResults::new(&self.parts);
        let mut seen = 0;
        while !collected.is_complete() {
            let chunk = journal.arrived(&request.id, seen).await.map_err(|why| why.of(&webhook.name))?;
            seen += chunk.entries.len();
            collected.add(chunk);
        }
        Ok(RewardAnswer::Body { body: collected.body(self) })
    }

    /// Waits for the results of an accepted request until the deadline.
    async fn await_results(&self, promise: &Accepted, deadline: Instant) -> Result<WaitOutcome, RewardFailure> {
        let Self { webhook, request, .. } = self;
        let _waiting = Waiting::new(&webhook.status);
        let mut collected = CollectedResults::new(&self.parts);
        let mut seen = 0;
        let mut status = promise.status_url.as_deref().and_then(|url| webhook.status_address(url).ok());
        let mut schedule = PollSchedule::new(promise.eta_ms);
        let mut odd = 0;
        let unrecorded = |why: crate::journal::JournalClosed| why.of(&webhook.name);
        let arrived = async |seen| match &webhook.journal {
            Some(journal) => journal.arrived(&request.id, seen).await,
            None => std::future::pending().await,
        };
        while !collected.is_complete() {
            let next = status.as_ref().map(|_| schedule.next);
            tokio::select! {
                biased;
                chunk = arrived(seen) => {
                    let chunk = chunk.map_err(unrecorded)?;
                    seen += chunk.entries.len();
                    collected.add(chunk);
                }
                () = until(Some(deadline)) => {
                    if let Ok(chunk) = tokio::time::timeout(FINAL_FETCH_TIMEOUT, arrived(seen)).await {
                        collected.add(chunk.map_err(unrecorded)?);
                    }
                    if let Some(url) = status.as_ref().filter(|_| !collected.is_complete())
                        && let Ok(StatusPoll::Results(chunk)) =
                            tokio::time::timeout(FINAL_FETCH_TIMEOUT, webhook.poll_status(url, self)).await
                    {
                        collected.add(chunk);
                    }
                    if !collected.is_complete() {
                        return Ok(WaitOutcome::Answer(RewardAnswer::Expired { body: collected.body(self) }));
                    }
                }
                () = until(next) => {
                    let Some(url) = &status else { continue };
                    let left = deadline.saturating_duration_since(Instant::now());
                    let polled = tokio::time::timeout(left, webhook.poll_status(url, self)).await;
                    match polled.unwrap_or(StatusPoll::Pending(None)) {
                        StatusPoll::Results(chunk) => {
                            collected.add(chunk);
                            schedule.wait(None);
                        }
                        StatusPoll::Pending(asked) => schedule.wait(asked),
                        StatusPoll::Lost(why) => return Ok(WaitOutcome::Lost(why)),
                        StatusPoll::Odd(why) => {
                            odd += 1;
                            webhook.remark(why.clone());
                            schedule.wait(None);
                            if odd > webhook.plan.max_invalid_tries {
                                if !request.has_callback() {
                                    return Ok(WaitOutcome::Lost(why));
                                }
                                status = None;
                            }
                        }
                    }
                }
            }
        }
        Ok(WaitOutcome::Answer(RewardAnswer::Body { body: collected.body(self) }))
    }
}

impl ScoringRun<'_> {
    /// Returns the state of a request that may be answered later; `None` if the dialect has no asynchronous answers.
    pub(super) fn asynchronous_state(&self, indices: &[usize]) -> Option<Later> {
        let sample_ids = self.ids(indices).into_iter().map(str::to_owned).collect();
        let left_ms = self.webhook.plan.deadline_ms;
        self.webhook.dialect.answers_later().then_some(Later { left_ms, sample_ids, accepted: None })
    }

    pub(super) fn ids(&self, indices: &[usize]) -> Vec<&str> {
        indices.iter().map(|&index| self.samples[index].sample_id.as_str()).collect()
    }

    /// Sends a warning that the deadline of a request passed. Returns an error, which pauses the job, after several
    /// consecutive deadlines without results.
    pub(super) fn expired(&self, indices: &[usize], body: &str, silent: u32) -> Result<Timing, RewardFailure> {
        let webhook = self.webhook;
        let deadline_ms = webhook.plan.deadline_ms;
        let came = answer::parse(body.as_bytes()).ok().and_then(|body| Some(body["results"].as_array()?.len()));
        let came = came.unwrap_or(0);
        if self.job.probe && came > 0 {
            // A test of the reward sends each request once, so missing results are not requested again.
            return Ok(Timing::InTime);
        }
        let silent = if came > 0 { 0 } else { silent + 1 };
        let cause = format!(
            "the service accepted the request (202), but only {came} of {} results arrived within deadline_ms ({deadline_ms})",
            indices.len()
        );
        if silent >= MAX_SILENT_DEADLINES.min(webhook.plan.max_tries) {
            let waited_s = deadline_ms / 1000 * u64::from(silent);
            return Err(RewardFailure::Outage { reward: webhook.name.clone(), waited_s, cause });
        }
        webhook.status.notify(Event::Warning {
            code: "reward_late".to_owned(),
            message: format!("reward '{}': {cause}; missing results are requested again", webhook.name),
            data: json!({"reward": webhook.name, "came": came, "asked": indices.len(), "deadline_ms": deadline_ms}),
        });
        Ok(Timing::Late(silent))
    }
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant.into()).await,
        None => std::future::pending().await,
    }
}
