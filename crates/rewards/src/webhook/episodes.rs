//! Client for the environment of a job: contract version 1, over the same signed requests as rewards, with their retries, circuit
//! breaker and rules for addresses.
//!
//! A question about an episode has the same id and bytes in every attempt at the job. It is recorded before it is sent, and its
//! answer before it is used, so an interrupted run asks nothing twice that was answered. An environment may accept a question (202) and
//! answer it later, like a reward service.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use serde_json::json;

use super::asynchronous::{LateAnswer, LateForm, MAX_SILENT_DEADLINES, SendOutcome};
use super::dialect::Contract;
use super::environment_wire::{
    AnswerKind, MAX_ANSWER_BYTES, Problem, RequestEnvironment, RequestEpisode, RequestHeader, RequestJob, RequestReply,
    VERSION, ping_body, read, request_body,
};
use super::request::Request;
use super::wait::jitter;
use super::{Delivered, Exchange, RewardClient, Webhook};
use crate::callback::Later;
use crate::digest::Sha256Digest;
use crate::environment::{Ask, EpisodeCall, EpisodeId, Reply, StepAnswer};
use crate::event::Event;
use crate::id::JobId;
use crate::journal::{Journal, JournaledRequest};
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::questions::{episode_name, short_hash};
use crate::rollout::RolloutId;
use crate::secret_filter::Preserved;
use crate::spec::{EnvironmentPlan, RewardSecrets, ServicePlan, WebhookPlan};
use crate::status::Status;
use crate::{BuildError, RewardFailure};

/// Asks the environment of one job.
pub struct EnvironmentClient {
    webhook: Webhook,
    plan: EnvironmentPlan,
    job: JobId,
    /// Number of rounds of questions in a row that brought no answer before the deadline, in this attempt at the job.
    silent_rounds: AtomicU32,
}

/// A question that may be answered later.
struct Question {
    rollout: RolloutId,
    /// Key in the journal.
    key: String,
    request: Request,
    kind: AnswerKind,
    /// Time until which the answer may come after a 202. It is counted from the first 202.
    deadline: OnceLock<Instant>,
}

/// The reply to a question.
struct Answered {
    reply: Reply,
    /// Whether the answer was in the journal of an earlier attempt at the job.
    is_recorded: bool,
    /// Whether the server accepted the question (202), and then the deadline passed without an answer.
    is_late: bool,
}

impl EnvironmentClient {
    /// Creates the client of a job's environment.
    ///
    /// # Errors
    /// Fails if the address is not allowed, or a header or secret cannot be used.
    pub fn new(
        plan: &EnvironmentPlan,
        secrets: &RewardSecrets,
        client: &RewardClient,
        job: JobId,
    ) -> Result<Self, BuildError> {
        let contract = WebhookPlan { service: plan.service.clone(), params: Default::default(), completion_ids: false };
        let webhook = Webhook::with_dialect(Box::new(Contract(contract)), &plan.name, &plan.service, secrets, client)?;
        let webhook = Webhook { noun: "environment", ..webhook };
        Ok(Self { webhook, plan: plan.clone(), job, silent_rounds: AtomicU32::new(0) })
    }

    /// Sets the journal that records questions and answers.
    #[must_use]
    pub fn with_journal(mut self, journal: Option<Arc<dyn Journal>>) -> Self {
        self.webhook = self.webhook.with_journal(journal);
        self
    }

    /// Sets the status that receives warnings and the number of waiting requests.
    #[must_use]
    pub(crate) fn with_status(mut self, status: Arc<Status>) -> Self {
        self.webhook = self.webhook.with_status(status);
        self
    }

    /// Records requests and responses, for [`EnvironmentClient::exchanges`].
    #[must_use]
    pub fn recording(mut self) -> Self {
        self.webhook = self.webhook.recording();
        self
    }

    /// Returns the requests and responses recorded since the last call. Values of the user's headers are redacted.
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.webhook.exchanges()
    }

    /// Asks all these questions, as many at a time as the job's settings allow. Returns one reply for each, in order. Questions that
    /// close episodes are sent once and their answers ignored.
    ///
    /// # Errors
    /// Fails if the server is away for longer than the settings allow, if it accepted questions (202) and answered none of them twice in a
    /// row, or if nothing can be recorded anymore.
    pub async fn ask(&self, rollout: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RewardFailure> {
        let answered = try_join_all(calls.iter().map(|call| self.ask_one(rollout, call))).await?;
        self.check_deadlines(&answered)?;
        Ok(answered.into_iter().map(|answered| answered.reply).collect())
    }

    /// Sends a warning if deadlines have passed without an answer. Fails, which pauses the job, after several rounds of questions in a row
    /// without any answer.
    fn check_deadlines(&self, answered: &[Answered]) -> Result<(), RewardFailure> {
        let asked = answered.iter().filter(|answered| !answered.is_recorded && answered.reply != Reply::Closed).count();
        let late = answered.iter().filter(|answered| answered.is_late).count();
        if asked > late {
            self.silent_rounds.store(0, Ordering::Relaxed);
        }
        if late == 0 {
            return Ok(());
        }
        let ServicePlan { deadline_ms, max_tries, .. } = self.plan.service;
        let cause = format!(
            "the server accepted {late} of {asked} requests (202), but did not answer them within deadline_ms ({deadline_ms})"
        );
        let silent = if asked > late { 0 } else { self.silent_rounds.fetch_add(1, Ordering::Relaxed) + 1 };
        if silent >= MAX_SILENT_DEADLINES.min(max_tries) {
            let waited_s = deadline_ms.saturating_mul(u64::from(silent)) / 1000;
            return Err(RewardFailure::Outage { reward: self.plan.name.clone(), waited_s, cause });
        }
        self.webhook.status.notify(Event::Warning {
            code: "environment_late".to_owned(),
            message: format!("environment '{}': {cause}; their episodes have no reward", self.plan.name),
            data: json!({"environment": self.plan.name, "late": late, "asked": asked, "deadline_ms": deadline_ms}),
        });
        Ok(())
    }

    /// Whether the server answers `env.ping`.
    ///
    /// # Errors
    /// Returns the reason for which it does not.
    pub async fn is_reachable(&self) -> Result<(), String> {
        let id = question_id(&format!("ping {}", self.job));
        let body = ping_body(&id);
        match self.webhook.send(&Request::new(id, body, Duration::ZERO), None).await {
            Ok((status, ..)) if status.is_success() || matches!(status.as_u16(), 400 | 404 | 405 | 422) => Ok(()),
            Ok((status, ..)) => Err(format!("the server answered {status}")),
            Err(error) => Err(error.0),
        }
    }

    async fn ask_one(&self, rollout: RolloutId, call: &EpisodeCall) -> Result<Answered, RewardFailure> {
        let EpisodeCall { episode, ask } = call;
        let key = self.key(rollout, episode, ask);
        let id = question_id(&key);
        let Some(kind) = AnswerKind::of(ask) else {
            let _permit = self.webhook.permits.acquire().await;
            let request = self.request(id.clone(), self.body(&id, rollout, call, None), rollout, episode);
            // Best effort: an episode is over whatever the server says.
            let _ = self.webhook.send(&request, None).await;
            return Ok(Answered { reply: Reply::Closed, is_recorded: false, is_late: false });
        };
        let (body, later) = match self.webhook.journal.as_ref().and_then(|journal| journal.find(&key)) {
            Some(JournaledRequest::Answered { answer, .. }) => {
                let reply = self.read_recorded(answer, &id, kind);
                return Ok(Answered { reply, is_recorded: true, is_late: false });
            }
            Some(JournaledRequest::Sent { body, later, .. }) => (body, later),
            None => {
                let terms = self.webhook.journal.as_ref().and_then(|journal| journal.callbacks());
                let reply = RequestReply::new(terms.and_then(|terms| terms.environment_address(&id)));
                (self.body(&id, rollout, call, Some(reply)), None)
            }
        };
        let request = self.request(id.clone(), body, rollout, episode);
        let question = Question { rollout, key, request, kind, deadline: OnceLock::new() };
        let (answer, latency_ms) = self.answer_to(&question, later).await?;
        let is_late = matches!(&answer, RewardAnswer::Unusable { code, .. } if code == LATE);
        let Question { key, .. } = question;
        self.append(JournalEntry::Answer { rollout, key, id: id.clone(), answer: answer.clone() }).await?;
        let reply = match self.read_recorded(answer, &id, kind) {
            Reply::Step(answer) => Reply::Step(StepAnswer { latency_ms, ..answer }),
            other => other,
        };
        Ok(Answered { reply, is_recorded: false, is_late })
    }

    /// Asks a question, unless the server has accepted it in an earlier attempt at the job, and waits for its answer. Returns it with the time
    /// that it took, in milliseconds.
    async fn answer_to(
        &self,
        question: &Question,
        later: Option<Later>,
    ) -> Result<(RewardAnswer, Option<u32>), RewardFailure> {
        let webhook = &self.webhook;
        let accepted = match later {
            Some(Later { accepted: Some(accepted), left_ms, .. }) => {
                Some((accepted, *question.deadline.get_or_init(|| deadline_in(left_ms))))
            }
            _ => None,
        };
        // A question that the server has accepted (202) does not count toward the concurrency limit.
        let permit = match &accepted {
            Some(_) => None,
            None => {
                let permit = webhook.permits.acquire().await;
                self.record_question(question).await?;
                Some(permit)
            }
        };
        let asked_at = Instant::now();
        let late = LateAnswer {
            webhook,
            request: &question.request,
            parts: vec![question.kind.part()],
            form: LateForm::Environment(question.kind),
            rollout: question.rollout,
            key: Some(&question.key),
            counts: None,
        };
        let answer = late.await_answer(|| self.send_until_final(question), accepted, permit).await?;
        let latency_ms = u32::try_from(asked_at.elapsed().as_millis()).ok();
        Ok((self.settled(answer, question), latency_ms))
    }

    /// Records a question before it is sent. If it was recorded before, the server has the whole time for a late answer again.
    async fn record_question(&self, question: &Question) -> Result<(), RewardFailure> {
        let Question { rollout, key, request, kind, .. } = question;
        let later =
            Later { left_ms: self.plan.service.deadline_ms, sample_ids: vec![kind.part().to_owned()], accepted: None };
        self.append(JournalEntry::Request {
            rollout: *rollout,
            reward: self.plan.name.clone(),
            key: key.clone(),
            id: request.id.clone(),
            body: request.body.clone(),
            later: Some(later),
        })
        .await
    }

    async fn append(&self, entry: JournalEntry) -> Result<(), RewardFailure> {
        let Some(journal) = &self.webhook.journal else { return Ok(()) };
        journal.append(entry).await.map_err(|closed| closed.of(&self.plan.name))
    }

    /// Sends a request until its answer is valid, the server promises an answer (202), or there is no hope for one.
    async fn send_until_final(&self, question: &Question) -> Result<SendOutcome, RewardFailure> {
        let Question { request, kind, deadline, .. } = question;
        let unusable = |code: &str, detail| {
            let code = code.to_owned();
            Ok(SendOutcome::Answer(RewardAnswer::Unusable { code, detail }))
        };
        let mut invalid = 0;
        loop {
            let delivered = match self.webhook.deliver(request).await {
                Ok((delivered, _)) => delivered,
                Err(RewardFailure::Gone { .. }) => return unusable(LOST, String::new()),
                Err(failure) => return Err(failure),
            };
            let problem = match delivered {
                Delivered::NotFound(_) => return unusable(LOST, String::new()),
                Delivered::Permanent(message) => return unusable("refused", message),
                Delivered::TooLarge => {
                    return unusable("too_large", "the server answered 413 (too large)".to_owned());
                }
                Delivered::Body(body) if body.len() > MAX_ANSWER_BYTES => {
                    format!("the answer has {} bytes: at most {MAX_ANSWER_BYTES} are allowed", body.len())
                }
                Delivered::Body(body) => {
                    let body = self.webhook.secret_filter.redact_answer(body, Preserved::default);
                    match read(&body, &request.id, *kind) {
                        Ok(_) | Err(Problem::Reported { is_retryable: false, .. }) => {
                            let body = String::from_utf8_lossy(&body).into_owned();
                            return Ok(SendOutcome::Answer(RewardAnswer::Body { body }));
                        }
                        Err(Problem::Invalid(problem)) => problem,
                        Err(Problem::Reported { code, is_retryable: true }) => format!("the server reported {code}"),
                    }
                }
                Delivered::Unusable(problem) => problem,
                Delivered::Accepted(accepted) => match self.webhook.check_accepted(accepted) {
                    Ok(accepted) => {
                        if deadline.get().is_none() {
                            self.record_question(question).await?;
                        }
                        let deadline = deadline.get_or_init(|| deadline_in(self.plan.service.deadline_ms));
                        return Ok(SendOutcome::Later(accepted, *deadline));
                    }
                    Err(problem) => problem,
                },
            };
            invalid += 1;
            if invalid > self.plan.service.max_invalid_tries {
                return unusable("invalid_answer", problem);
            }
            tokio::time::sleep(self.webhook.client.pace.of(jitter(invalid))).await;
        }
    }

    /// Redacts an answer and decides whether it is one, before it is recorded.
    fn settled(&self, answer: RewardAnswer, question: &Question) -> RewardAnswer {
        let unusable = |code: &str, detail| RewardAnswer::Unusable { code: code.to_owned(), detail };
        match answer {
            RewardAnswer::Body { body } => {
                let body = self.webhook.secret_filter.redact_answer(body.into_bytes(), Preserved::default);
                match read(&body, &question.request.id, question.kind) {
                    Ok(_) => RewardAnswer::Body { body: String::from_utf8_lossy(&body).into_owned() },
                    Err(Problem::Invalid(problem)) => unusable("invalid_answer", problem),
                    Err(Problem::Reported { code, .. }) => unusable(&code, format!("the server reported {code}")),
                }
            }
            RewardAnswer::Expired { .. } => {
                let deadline_ms = self.plan.service.deadline_ms;
                unusable(
                    LATE,
                    format!(
                        "the server accepted the request (202), but no answer arrived within deadline_ms ({deadline_ms})"
                    ),
                )
            }
            same @ (RewardAnswer::Unusable { .. } | RewardAnswer::TooLarge) => same,
        }
    }

    fn read_recorded(&self, answer: RewardAnswer, id: &str, kind: AnswerKind) -> Reply {
        let failed = |code: &str, message: String| Reply::Failed { code: code.to_owned(), message };
        match answer {
            RewardAnswer::Body { body } | RewardAnswer::Expired { body } => match read(body.as_bytes(), id, kind) {
                Ok(reply) => reply,
                // Another version of rlood, with other rules, recorded this one.
                Err(Problem::Invalid(problem)) => failed("invalid_answer", problem),
                Err(Problem::Reported { code, .. }) => failed(&code, String::new()),
            },
            RewardAnswer::Unusable { code, .. } if code == LOST => Reply::Lost,
            RewardAnswer::Unusable { code, detail } => failed(&code, detail),
            RewardAnswer::TooLarge => failed("too_large", String::new()),
        }
    }

    /// The key of a question in the journal: the same in every attempt at the job, and different for every other question.
    fn key(&self, rollout: RolloutId, episode: &EpisodeId, ask: &Ask) -> String {
        let turn = match ask {
            Ask::Reset(_) => "reset".to_owned(),
            Ask::Step(step) => step.turn.to_string(),
            Ask::Close(_) => "close".to_owned(),
        };
        let of = format!("environment {} {} {turn}", self.job, self.episode_name(rollout, episode));
        Sha256Digest::of(format!("{of} {}", episode.attempt).as_bytes()).to_string()
    }

    fn episode_name(&self, rollout: RolloutId, episode: &EpisodeId) -> String {
        episode_name(self.job, rollout, episode)
    }

    fn body(&self, id: &str, rollout: RolloutId, call: &EpisodeCall, reply: Option<RequestReply>) -> String {
        let EpisodeCall { episode, ask } = call;
        let EpisodeId { row, index, attempt } = *episode;
        let header = RequestHeader {
            version: VERSION.to_owned(),
            id: id.to_owned(),
            job: RequestJob { id: self.job, step: rollout.step, phase: rollout.phase },
            reply,
            environment: RequestEnvironment { name: self.plan.name.clone(), params: self.plan.params.clone() },
            deadline_ms: self.plan.service.deadline_ms,
            episode: RequestEpisode {
                id: self.episode_name(rollout, episode),
                group_id: format!("row_{row}"),
                prompt_id: format!("row_{row}"),
                index,
                attempt,
                seed: None,
            },
        };
        request_body(header, ask)
    }

    fn request(&self, id: String, body: String, rollout: RolloutId, episode: &EpisodeId) -> Request {
        let limit = Duration::from_millis(self.plan.service.deadline_ms);
        let request = Request::new(id, body, limit).of_episode(self.episode_name(rollout, episode));
        match self.webhook.journal.as_ref().and_then(|journal| journal.callbacks()) {
            Some(terms) => request.with_token(|id| terms.token(id)),
            None => request,
        }
    }
}

/// The code under which an episode that the server has forgotten is recorded.
const LOST: &str = "episode_lost";

/// The code under which a question is recorded whose answer did not come in time.
const LATE: &str = "deadline";

/// Returns the time `left_ms` milliseconds from now. More than a year counts as a year, so that the clock does not overflow.
fn deadline_in(left_ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(left_ms).min(Duration::from_secs(365 * 86_400))
}

fn question_id(key: &str) -> String {
    format!("env_{}", short_hash(key))
}
