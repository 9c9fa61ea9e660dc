//! Client for the environment of a job: contract version 1, over the same signed requests as rewards, with their retries, circuit
//! breaker and rules for addresses.
//!
//! A question about an episode has the same id and bytes in every attempt at the job. It is recorded before it is sent, and its
//! answer before it is used, so an interrupted run asks nothing twice that was answered.

use futures::future::try_join_all;
use serde::Deserialize;
use serde_json::{Value, json};

use super::dialect::Contract;
use super::request::Request;
use super::wait::jitter;
use super::{Delivered, RewardClient, Webhook};
use crate::digest::Sha256Digest;
use crate::environment::{Ask, EpisodeCall, EpisodeId, Reply, ResetAnswer, StepAnswer};
use crate::event::SamplePhase;
use crate::id::JobId;
use crate::journal::{Journal, JournaledRequest};
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::questions::{episode_name, short_hash};
use crate::rollout::RolloutId;
use crate::secret_filter::Preserved;
use crate::spec::{EnvironmentPlan, RewardSecrets, WebhookPlan};
use crate::status::Status;
use crate::{BuildError, RewardFailure};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum size of an environment's answer, in bytes.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Asks the environment of one job.
pub struct EnvironmentClient {
    webhook: Webhook,
    plan: EnvironmentPlan,
    job: JobId,
}

/// The outcome of a request with all its tries.
enum Answered {
    Body(String),
    Lost,
    Failed { code: String, message: String },
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
        Ok(Self { webhook, plan: plan.clone(), job })
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

    /// Asks all these questions, as many at a time as the job's settings allow. Returns one reply for each, in order. Questions that
    /// close episodes are sent once and their answers ignored.
    ///
    /// # Errors
    /// Fails if the server is away for longer than the settings allow, or nothing can be recorded anymore.
    pub async fn ask(&self, rollout: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RewardFailure> {
        try_join_all(calls.iter().map(|call| self.ask_one(rollout, call))).await
    }

    /// Whether the server answers `env.ping`.
    ///
    /// # Errors
    /// Returns the reason for which it does not.
    pub async fn is_reachable(&self) -> Result<(), String> {
        let id = question_id(&format!("ping {}", self.job));
        let body = json!({"type": "env.ping", "version": "1", "id": id}).to_string();
        match self.webhook.send(&Request::new(id, body, Duration::ZERO), None).await {
            Ok((status, ..)) if status.is_success() || matches!(status.as_u16(), 400 | 404 | 405 | 422) => Ok(()),
            Ok((status, ..)) => Err(format!("the server answered {status}")),
            Err(error) => Err(error.0),
        }
    }

    async fn ask_one(&self, rollout: RolloutId, call: &EpisodeCall) -> Result<Reply, RewardFailure> {
        let EpisodeCall { episode, ask } = call;
        let key = self.key(rollout, episode, ask);
        let id = question_id(&key);
        let request = || {
            let body = self.body(&id, rollout, episode, ask).to_string();
            let limit = Duration::from_millis(self.plan.service.deadline_ms);
            Request::new(id.clone(), body, limit).of_episode(self.episode_name(rollout, episode))
        };
        let permit = self.webhook.permits.acquire().await;
        if let Ask::Close(_) = ask {
            // Best effort: an episode is over whatever the server says.
            let _ = self.webhook.send(&request(), None).await;
            return Ok(Reply::Closed);
        }
        let known = self.webhook.journal.as_ref().and_then(|journal| journal.find(&key));
        if let Some(JournaledRequest::Answered { answer, .. }) = known {
            return Ok(self.read_recorded(answer, &id, ask));
        }
        let request = request();
        if known.is_none() {
            let (reward, body) = (self.plan.name.clone(), request.body.clone());
            let entry = JournalEntry::Request { rollout, reward, key: key.clone(), id: id.clone(), body, later: None };
            self.append(entry).await?;
        }
        let asked_at = Instant::now();
        let answered = self.send_until_valid(&request, ask).await?;
        let latency_ms = u32::try_from(asked_at.elapsed().as_millis()).ok();
        drop(permit);
        let answer = match answered {
            Answered::Body(body) => RewardAnswer::Body { body },
            Answered::Lost => RewardAnswer::Unusable { code: LOST.to_owned(), detail: String::new() },
            Answered::Failed { code, message } => RewardAnswer::Unusable { code, detail: message },
        };
        self.append(JournalEntry::Answer { rollout, key, id: id.clone(), answer: answer.clone() }).await?;
        Ok(match self.read_recorded(answer, &id, ask) {
            Reply::Step(answer) => Reply::Step(StepAnswer { latency_ms, ..answer }),
            other => other,
        })
    }

    async fn append(&self, entry: JournalEntry) -> Result<(), RewardFailure> {
        let Some(journal) = &self.webhook.journal else { return Ok(()) };
        journal.append(entry).await.map_err(|closed| closed.of(&self.plan.name))
    }

    /// Sends a request until its answer is valid or there is no hope for one.
    async fn send_until_valid(&self, request: &Request, ask: &Ask) -> Result<Answered, RewardFailure> {
        let mut invalid = 0;
        loop {
            let delivered = match self.webhook.deliver(request).await {
                Ok((delivered, _)) => delivered,
                Err(RewardFailure::Gone { .. }) => return Ok(Answered::Lost),
                Err(failure) => return Err(failure),
            };
            let redacted = |body| self.webhook.secret_filter.redact_answer(body, Preserved::default);
            let problem = match delivered {
                Delivered::NotFound(_) => return Ok(Answered::Lost),
                Delivered::Permanent(message) => {
                    return Ok(Answered::Failed { code: "refused".to_owned(), message });
                }
                Delivered::TooLarge => {
                    let message = "the server answered 413 (too large)".to_owned();
                    return Ok(Answered::Failed { code: "too_large".to_owned(), message });
                }
                Delivered::Body(body) if body.len() > MAX_ANSWER_BYTES => {
                    format!("the answer has {} bytes: at most {MAX_ANSWER_BYTES} are allowed", body.len())
                }
                Delivered::Body(body) => {
                    let body = redacted(body);
                    match read(&body, &request.id, ask) {
                        Ok(_) => return Ok(Answered::Body(String::from_utf8_lossy(&body).into_owned())),
                        Err(Problem::Invalid(problem)) => problem,
                        Err(Problem::Reported { code, is_retryable: false }) => {
                            return Ok(Answered::Failed { message: format!("the server reported {code}"), code });
                        }
                        Err(Problem::Reported { code, is_retryable: true }) => format!("the server reported {code}"),
                    }
                }
                Delivered::Unusable(problem) => problem,
                Delivered::Accepted(_) => "the server answered 202, and environments must answer at once".to_owned(),
            };
            invalid += 1;
            if invalid > self.plan.service.max_invalid_tries {
                return Ok(Answered::Failed { code: "invalid_answer".to_owned(), message: problem });
            }
            tokio::time::sleep(self.webhook.client.pace.of(jitter(invalid))).await;
        }
    }

    fn read_recorded(&self, answer: RewardAnswer, id: &str, ask: &Ask) -> Reply {
        let failed = |code: &str, message: String| Reply::Failed { code: code.to_owned(), message };
        match answer {
            RewardAnswer::Body { body } | RewardAnswer::Expired { body } => match read(body.as_bytes(), id, ask) {
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

    fn body(&self, id: &str, rollout: RolloutId, episode: &EpisodeId, ask: &Ask) -> Value {
        let phase = match rollout.phase {
            SamplePhase::Train => "train",
            SamplePhase::Eval => "eval",
        };
        let name = self.episode_name(rollout, episode);
        let mut of_episode = json!({
            "id": name, "group_id": format!("row_{}", episode.row), "prompt_id": format!("row_{}", episode.row),
            "index": episode.index, "attempt": episode.attempt,
        });
        let mut body = json!({
            "type": "", "version": "1", "id": id, "job": {"id": self.job, "step": rollout.step, "phase": phase},
            "environment": {"name": self.plan.name, "params": self.plan.params},
            "deadline_ms": self.plan.service.deadline_ms,
        });
        match ask {
            Ask::Reset(reset) => {
                body["type"] = json!("env.reset.request");
                of_episode["seed"] = json!(reset.seed);
                body["messages"] = json!(reset.messages);
                body["columns"] = json!(reset.columns);
                body["limits"] = json!(reset.limits);
            }
            Ask::Step(step) => {
                body["type"] = json!("env.step.request");
                if let Value::Object(fields) = json!(step) {
                    fields.into_iter().for_each(|(name, value)| body[name] = value);
                }
            }
            Ask::Close(stop) => {
                body["type"] = json!("env.close.request");
                body["reason"] = json!(stop.name());
            }
        }
        body["episode"] = of_episode;
        body
    }
}

/// The code under which an episode that the server has forgotten is recorded.
const LOST: &str = "episode_lost";

/// Why an answer cannot be used.
enum Problem {
    Invalid(String),
    Reported { code: String, is_retryable: bool },
}

/// The fields that every answer may have.
#[derive(Deserialize)]
struct Common {
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    error: Option<Reported>,
}

#[derive(Deserialize)]
struct Reported {
    code: String,
    #[serde(default)]
    retryable: bool,
}

/// Reads an answer to a question with this id.
fn read(body: &[u8], id: &str, ask: &Ask) -> Result<Reply, Problem> {
    let invalid = |error: &dyn std::fmt::Display| Problem::Invalid(format!("the answer is not valid: {error}"));
    let value = crate::strict_json::read(body).map_err(|error| invalid(&error))?;
    let common: Common = serde_json::from_value(value.clone()).map_err(|error| invalid(&error))?;
    if common.version.as_deref().is_some_and(|version| version != "1") {
        return Err(invalid(&"version must be \"1\""));
    }
    if common.id.as_deref().is_some_and(|given| given != id) {
        return Err(invalid(&"it has the id of another request"));
    }
    if let Some(Reported { code, retryable }) = common.error {
        return Err(Problem::Reported { code: code.chars().take(64).collect(), is_retryable: retryable });
    }
    match ask {
        Ask::Reset(_) => {
            serde_json::from_value::<ResetAnswer>(value).map(Reply::Reset).map_err(|error| invalid(&error))
        }
        Ask::Step(_) => {
            let answer: StepAnswer = serde_json::from_value(value).map_err(|error| invalid(&error))?;
            answer.check_metrics().map_err(|error| invalid(&error))?;
            Ok(Reply::Step(answer))
        }
        Ask::Close(_) => Ok(Reply::Closed),
    }
}

fn question_id(key: &str) -> String {
    format!("env_{}", short_hash(key))
}
