//! One rollout's samples asked of a service: requests go out, answers are read, what is left open is asked again.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, try_join_all};
use serde_json::Value;

use super::Webhook;
use super::answer::{Answer, Found};
use super::delivery::Delivered;
use super::dialect::Ask;
use super::later::{Obtained, Timing};
use super::request::Request;
use super::wait::jitter;
use crate::callback::Later;
use crate::id::RewardRequestId;
use crate::journal::{Journalled, key};
use crate::meter::About;
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::sample::{RewardSample, RewardValue};
use crate::spec::OnInvalid;
use crate::{Counts, JobContext, Judgement, RewardFailure, SampleError};

/// One rollout's samples on their way through a service.
pub(super) struct Asking<'a> {
    pub webhook: &'a Webhook,
    pub job: &'a JobContext,
    pub samples: &'a [RewardSample],
    /// What the dialect says of each sample.
    pub pieces: Vec<Value>,
    /// The same as text.
    pub wire: Vec<String>,
    pub counts: Mutex<Counts>,
}

pub(super) type Answers = Vec<(usize, Judgement)>;

impl Asking<'_> {
    /// Asks for the samples at `indices` until each has a judgement. `round` counts how often they were asked before,
    /// `silent` how many deadlines passed in a row meanwhile without any result.
    pub(super) fn ask(
        &self,
        indices: Vec<usize>,
        round: u32,
        silent: u32,
    ) -> BoxFuture<'_, Result<Answers, RewardFailure>> {
        Box::pin(async move {
            let webhook = self.webhook;
            let samples = || indices.iter().map(|&index| self.wire[index].as_str());
            let key = webhook.journal.as_ref().map(|_| key(self.job, &webhook.name, round, samples()));
            let (id, answer, is_new) = match self.journalled(key.as_deref()) {
                Some(Journalled::Answered { id, answer }) => {
                    self.count(Counts { replayed: 1, ..Counts::default() });
                    // Older versions wrote down what came to the callback address as it was.
                    let answer = self.cleaned(answer, &id, &indices);
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
                    let answer = self.cleaned(answer, &request.id, &indices);
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
    pub(super) async fn obtain(&self, request: &Request, indices: &[usize]) -> Result<Obtained, RewardFailure> {
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
    pub(super) fn written(&self, indices: &[usize]) -> Request {
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
    pub(super) fn sent_before(&self, id: String, body: String, later: Option<&Later>, indices: &[usize]) -> Request {
        self.request(id, body, later.map_or(self.webhook.plan.deadline_ms, |later| later.left_ms), indices)
    }

    pub(super) fn request(&self, id: String, body: String, left_ms: u64, indices: &[usize]) -> Request {
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

    pub(super) fn read(&self, body: &[u8], id: &str, indices: &[usize]) -> Result<Answer, String> {
        let samples: Vec<&RewardSample> = indices.iter().map(|&index| &self.samples[index]).collect();
        // A complaint may quote a key, which stays in the answer.
        let shown = |problem: String| self.webhook.hidden.shown(problem.into_bytes());
        let read = self.webhook.dialect.read(body, id, &samples);
        let mut answer = read.map_err(|problem| String::from_utf8_lossy(&shown(problem)).into_owned())?;
        for found in &mut answer.found {
            if let Found::Judged(judgement) = found
                && let Some(complaint) = judgement.value.number().and_then(|value| self.webhook.limit.complaint(value))
            {
                *found = Found::Invalid(complaint);
            }
        }
        Ok(answer)
    }

    /// An answer without the secrets that the service repeats, as it is written down and used: it says the same values.
    fn cleaned(&self, answer: RewardAnswer, id: &str, indices: &[usize]) -> RewardAnswer {
        let legible = || {
            let mut legible = self.webhook.dialect.legible();
            legible.words.push(id.to_owned());
            legible.words.extend(indices.iter().map(|&index| self.samples[index].sample_id.clone()));
            legible
        };
        let clean = |body: String| {
            let clean = self.webhook.hidden.answer(body.into_bytes(), legible);
            String::from_utf8_lossy(&clean).into_owned()
        };
        match answer {
            RewardAnswer::Body { body } => RewardAnswer::Body { body: clean(body) },
            RewardAnswer::Expired { body } => RewardAnswer::Expired { body: clean(body) },
            same @ (RewardAnswer::Unusable { .. } | RewardAnswer::TooLarge) => same,
        }
    }

    pub(super) fn journalled(&self, key: Option<&str>) -> Option<Journalled> {
        self.webhook.journal.as_ref()?.find(key?)
    }

    pub(super) fn entry_of(&self, key: String, request: &Request, indices: &[usize]) -> JournalEntry {
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
    pub(super) async fn write_down(
        &self,
        key: Option<&str>,
        entry: impl FnOnce(String) -> JournalEntry,
    ) -> Result<(), RewardFailure> {
        let (Some(journal), Some(key)) = (&self.webhook.journal, key) else { return Ok(()) };
        journal.append(entry(key.to_owned())).await.map_err(|unrecorded| unrecorded.of(&self.webhook.name))
    }

    /// Keeps what is answered, asks again for what is open, gives up on what was asked often enough.
    pub(super) async fn conclude(
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
    pub(super) fn settle(&self, indices: &[usize], code: &str, detail: &str) -> Result<Answers, RewardFailure> {
        let judgement = match self.webhook.plan.on_invalid {
            OnInvalid::Mask => Judgement::missing(code, detail),
            OnInvalid::Zero => Judgement { value: RewardValue::Number(0.0), ..Judgement::missing(code, detail) },
            OnInvalid::Fail => {
                return Err(RewardFailure::Invalid { reward: self.webhook.name.clone(), detail: detail.to_owned() });
            }
        };
        Ok(indices.iter().map(|&index| (index, judgement.clone())).collect())
    }

    pub(super) fn count(&self, counts: Counts) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner) += counts;
    }
}
