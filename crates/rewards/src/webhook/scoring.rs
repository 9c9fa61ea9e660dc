//! Scores the samples of one rollout with a service: sends requests, reads answers, and requests missing results again.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, try_join_all};
use serde_json::Value;

use super::Webhook;
use super::answer::{Answer, Found};
use super::asynchronous::{LateAnswer, LateForm, SendOutcome, Timing};
use super::delivery::Delivered;
use super::dialect::Batch;
use super::request::Request;
use super::wait::jitter;
use crate::callback::Later;
use crate::id::RewardRequestId;
use crate::journal::{JournaledRequest, key};
use crate::meter::About;
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::rollout::{RewardSample, RewardValue};
use crate::spec::OnInvalid;
use crate::{Counts, JobContext, Judgement, RewardFailure, SampleError};

/// State while one reward service scores the samples of one rollout.
pub(super) struct ScoringRun<'a> {
    pub webhook: &'a Webhook,
    pub job: &'a JobContext,
    pub samples: &'a [RewardSample],
    /// The samples, converted to the JSON of the service's dialect.
    pub pieces: Vec<Value>,
    /// The samples as serialized JSON.
    pub wire: Vec<String>,
    pub counts: Mutex<Counts>,
}

pub(super) type Answers = Vec<(usize, Judgement)>;

impl ScoringRun<'_> {
    /// Requests scores for the samples at `indices` until each has a judgement. `round` is the number of earlier requests for these
    /// samples, `silent` the number of consecutive deadlines that passed without any result.
    pub(super) fn request_scores(
        &self,
        indices: Vec<usize>,
        round: u32,
        silent: u32,
    ) -> BoxFuture<'_, Result<Answers, RewardFailure>> {
        Box::pin(async move {
            let webhook = self.webhook;
            let samples = || indices.iter().map(|&index| self.wire[index].as_str());
            let key = webhook.journal.as_ref().map(|_| key(self.job, &webhook.name, round, samples()));
            let (id, answer, is_new) = match self.journaled(key.as_deref()) {
                Some(JournaledRequest::Answered { id, answer }) => {
                    self.count(Counts { replayed: 1, ..Counts::default() });
                    // Older versions recorded callback results in the journal without redacting them.
                    let answer = self.redacted(answer, &id, &indices);
                    (id, answer, false)
                }
                known => {
                    let (id, answer) = self.request_answer(known, &indices, key.as_deref()).await?;
                    (id, answer, true)
                }
            };
            let mut timing = Timing::InTime;
            let body = match answer {
                RewardAnswer::Body { body } => body,
                RewardAnswer::Expired { body } => {
                    timing = if is_new { self.expired(&indices, &body, silent)? } else { Timing::Late(0) };
                    body
                }
                RewardAnswer::Unusable { code, detail } => return self.apply_on_invalid(&indices, &code, &detail),
                RewardAnswer::TooLarge if indices.len() == 1 => {
                    return self.apply_on_invalid(
                        &indices,
                        "too_large",
                        "the service answered 413 (too large) to a request with a single sample",
                    );
                }
                RewardAnswer::TooLarge => {
                    let (left, right) = indices.split_at(indices.len() / 2);
                    let halves = [
                        self.request_scores(left.to_vec(), round, silent),
                        self.request_scores(right.to_vec(), round, silent),
                    ];
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
                    self.apply_results(indices, answer.found, round, timing).await
                }
                // Answers in the journal were valid when they were recorded, so another version of rlood with other rules wrote
                // this one.
                Err(problem) => self.apply_on_invalid(&indices, "invalid_answer", &problem),
            }
        })
    }

    /// Sends a request, or waits for the answer to one that a previous attempt at the job sent (`known`). Returns the request's id and its
    /// answer, which is in the journal then.
    async fn request_answer(
        &self,
        known: Option<JournaledRequest>,
        indices: &[usize],
        key: Option<&str>,
    ) -> Result<(String, RewardAnswer), RewardFailure> {
        let webhook = self.webhook;
        let accepted = match &known {
            Some(JournaledRequest::Sent { later: Some(later), .. }) => later.accepted.clone(),
            _ => None,
        };
        // A request that the service has accepted (202) does not count toward the concurrency limit.
        let permit = match &accepted {
            Some(_) => None,
            None => Some(webhook.permits.acquire().await),
        };
        let request = match known {
            Some(JournaledRequest::Sent { id, body, later }) => {
                self.recreated_request(id, body, later.as_ref(), indices)
            }
            _ => {
                let request = self.new_request(indices);
                self.append_to_journal(key, |key| self.request_entry(key, &request, indices)).await?;
                request
            }
        };
        let late = LateAnswer {
            webhook,
            request: &request,
            parts: self.ids(indices),
            form: LateForm::Rewards,
            rollout: self.job.rollout,
            key,
            counts: Some(&self.counts),
        };
        let accepted = accepted.map(|accepted| (accepted, request.deadline));
        let answer = late.await_answer(|| self.send_until_final(&request, indices), accepted, permit).await?;
        let answer = self.redacted(answer, &request.id, indices);
        let entry = |key| JournalEntry::Answer {
            rollout: self.job.rollout,
            key,
            id: request.id.clone(),
            answer: answer.clone(),
        };
        self.append_to_journal(key, entry).await?;
        Ok((request.id, answer))
    }

    /// Sends a request until the outcome is final: a valid answer, the service's promise to answer later (202), or
    /// the last permitted attempt.
    pub(super) async fn send_until_final(
        &self,
        request: &Request,
        indices: &[usize],
    ) -> Result<SendOutcome, RewardFailure> {
        let webhook = self.webhook;
        let deadline = Instant::now() + Duration::from_millis(webhook.plan.deadline_ms);
        let unusable =
            |code: &str, detail| SendOutcome::Answer(RewardAnswer::Unusable { code: code.to_owned(), detail });
        let mut invalid_answers = 0;
        loop {
            let (delivered, counts) = webhook.deliver(request).await?;
            self.count(counts);
            let problem = match delivered {
                Delivered::Body(body) => match self.read(&body, &request.id, indices) {
                    // A body that was parsed as JSON is UTF-8, so nothing is lost here.
                    Ok(_) => {
                        let body = String::from_utf8_lossy(&body).into_owned();
                        return Ok(SendOutcome::Answer(RewardAnswer::Body { body }));
                    }
                    Err(problem) => {
                        webhook.record_unusable(request, &body, &problem);
                        problem
                    }
                },
                Delivered::Unusable(problem) => {
                    webhook.record_unusable(request, &[], &problem);
                    problem
                }
                Delivered::Permanent(problem) | Delivered::NotFound(problem) => {
                    return Ok(unusable("refused", problem));
                }
                Delivered::TooLarge => return Ok(SendOutcome::Answer(RewardAnswer::TooLarge)),
                Delivered::Accepted(accepted) => match webhook.check_accepted(accepted) {
                    Ok(accepted) => return Ok(SendOutcome::Later(accepted, request.deadline)),
                    Err(problem) => {
                        webhook.record_unusable(request, &[], &problem);
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

    /// Creates a new request to the service for the samples at `indices`.
    pub(super) fn new_request(&self, indices: &[usize]) -> Request {
        let id = RewardRequestId::new().to_string();
        let pieces: Vec<&Value> = indices.iter().map(|&index| &self.pieces[index]).collect();
        let webhook = self.webhook;
        let terms = webhook.journal.as_ref().and_then(|journal| journal.callbacks());
        let callback_url = terms.filter(|_| webhook.dialect.answers_later()).and_then(|terms| terms.address(&id));
        let callback_url = callback_url.as_deref();
        let batch = Batch { id: &id, reward: &webhook.name, job: self.job, callback_url, pieces: &pieces };
        let body = webhook.dialect.body(&batch);
        self.request(id, body, webhook.plan.deadline_ms, indices)
    }

    /// Recreates a request that a previous attempt at the job recorded in the journal.
    pub(super) fn recreated_request(
        &self,
        id: String,
        body: String,
        later: Option<&Later>,
        indices: &[usize],
    ) -> Request {
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
        // Redacting an answer keeps the keys of its JSON, and the error message may quote such a key, so the message is redacted
        // too.
        let shown = |problem: String| self.webhook.secret_filter.redact_text(problem.into_bytes());
        let read = self.webhook.dialect.read(body, id, &samples);
        let mut answer = read.map_err(|problem| String::from_utf8_lossy(&shown(problem)).into_owned())?;
        for found in &mut answer.found {
            if let Found::Judged(judgement) = found
                && let Some(violation) = judgement.value.number().and_then(|value| self.webhook.limit.violation(value))
            {
                *found = Found::Invalid(violation);
            }
        }
        Ok(answer)
    }

    /// Redacts the secrets in a service's answer before the answer is recorded and used. Rewards and sample ids do not change.
    fn redacted(&self, answer: RewardAnswer, id: &str, indices: &[usize]) -> RewardAnswer {
        let preserved = || {
            let mut preserved = self.webhook.dialect.preserved();
            preserved.words.push(id.to_owned());
            preserved.words.extend(indices.iter().map(|&index| self.samples[index].sample_id.clone()));
            preserved
        };
        let clean = |body: String| {
            let clean = self.webhook.secret_filter.redact_answer(body.into_bytes(), preserved);
            String::from_utf8_lossy(&clean).into_owned()
        };
        match answer {
            RewardAnswer::Body { body } => RewardAnswer::Body { body: clean(body) },
            RewardAnswer::Expired { body } => RewardAnswer::Expired { body: clean(body) },
            same @ (RewardAnswer::Unusable { .. } | RewardAnswer::TooLarge) => same,
        }
    }

    pub(super) fn journaled(&self, key: Option<&str>) -> Option<JournaledRequest> {
        self.webhook.journal.as_ref()?.find(key?)
    }

    pub(super) fn request_entry(&self, key: String, request: &Request, indices: &[usize]) -> JournalEntry {
        JournalEntry::Request {
            rollout: self.job.rollout,
            reward: self.webhook.name.clone(),
            key,
            id: request.id.clone(),
            body: request.body.clone(),
            later: self.asynchronous_state(indices),
        }
    }

    /// Appends an entry to the journal and waits until the entry is durable. Does nothing without a journal.
    pub(super) async fn append_to_journal(
        &self,
        key: Option<&str>,
        entry: impl FnOnce(String) -> JournalEntry,
    ) -> Result<(), RewardFailure> {
        let (Some(journal), Some(key)) = (&self.webhook.journal, key) else { return Ok(()) };
        journal.append(entry(key.to_owned())).await.map_err(|unrecorded| unrecorded.of(&self.webhook.name))
    }

    /// Stores the results of an answer, requests missing ones again, and gives up on samples that were requested too often.
    pub(super) async fn apply_results(
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
                // The service reported an error for this sample, so its value is missing regardless of `on_invalid`.
                Found::Retryable(SampleError { code, message }) => {
                    answers.push((index, Judgement::missing(code, format!("{message} ({} tries)", round + 1))));
                }
                // A result that did not arrive before the deadline is not an invalid answer, so `on_invalid` does not apply.
                Found::Absent if timing != Timing::InTime => again.push(index),
                Found::Absent | Found::Invalid(_) if round < plan.max_invalid_tries => again.push(index),
                Found::Absent => answers.extend(self.apply_on_invalid(
                    &[index],
                    "no_result",
                    "the answer has no result for this sample",
                )?),
                Found::Invalid(what) => {
                    let detail = format!("{what} at index {position} ({})", self.samples[index].sample_id);
                    answers.extend(self.apply_on_invalid(&[index], "invalid_value", &detail)?);
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
            answers.extend(self.request_scores(again, round + 1, silent).await?);
        }
        Ok(answers)
    }

    /// Applies the reward's `on_invalid` setting (missing, 0, or failure of the job) to samples without a valid answer.
    pub(super) fn apply_on_invalid(
        &self,
        indices: &[usize],
        code: &str,
        detail: &str,
    ) -> Result<Answers, RewardFailure> {
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
