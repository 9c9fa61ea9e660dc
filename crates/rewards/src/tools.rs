//! Plays the part of an environment for a job with tools alone: the model's calls go to MCP servers and to HTTP tools, and their
//! answers are what the model reads next. There is no reward: the job's rewards score the episode.
//!
//! A call has the same id and bytes in every attempt at the job. It is recorded before it is sent, and its answer before it is used.
//! A call whose answer was lost is sent again under the same id.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::client::RewardClient;
use crate::environment::{Ask, EpisodeCall, EpisodeId, Reply, ResetAnswer, Step, StepAnswer};
use crate::event::Event;
use crate::protocol::RewardAnswer;
use crate::questions::{Question, Questions, episode_name};
use crate::rollout::RolloutId;
use crate::spec::{EnvironmentPlan, HttpToolPlan, RewardSecrets, ToolPlan};
use crate::status::{Outage, Status, Waiting};
use crate::webhook::wait::jitter;
use crate::{BuildError, RewardFailure};

mod endpoint;
mod http;
mod mcp;

use endpoint::{Endpoint, Trouble};
use mcp::McpServer;

/// Code under which a call without an answer is recorded.
const FAILED: &str = "tool_failed";
/// Maximum number of different failures of calls that the job's events show.
const MAX_SHOWN_FAILURES: usize = 20;

/// The tools of one job.
pub(crate) struct ToolsClient {
    questions: Questions,
    plan: EnvironmentPlan,
    servers: Vec<Server>,
    permits: Semaphore,
    client: RewardClient,
    status: Arc<Status>,
    outage: Outage,
    /// The schemas of all tools, as of the current rollout.
    listed: tokio::sync::Mutex<Option<(RolloutId, Vec<Value>)>>,
    /// The dataset rows of the episodes that are played.
    rows: Mutex<HashMap<(RolloutId, u64), Value>>,
    shown_failures: Mutex<BTreeSet<String>>,
}

enum Server {
    Mcp(McpServer),
    Http(Endpoint, HttpToolPlan),
}

/// The calls of a turn that go to one server, with their places in the turn; `None` = no server has the tool.
type CallsOfServer<'a> = (Option<&'a Server>, Vec<(usize, &'a Value)>);

/// A call of a tool.
pub(crate) struct Call<'a> {
    /// Id of the call, the same in every try and every attempt at the job.
    id: &'a str,
    name: &'a str,
    /// The arguments as JSON text.
    arguments: &'a str,
    /// Name of the episode.
    trace: &'a str,
    /// The dataset row of the episode.
    item: &'a Value,
}

impl Server {
    fn endpoint(&self) -> &Endpoint {
        match self {
            Server::Mcp(server) => &server.endpoint,
            Server::Http(endpoint, _) => endpoint,
        }
    }

    fn answers(&self, name: &str) -> bool {
        match self {
            Server::Mcp(server) => server.allow.iter().any(|allowed| allowed == name),
            Server::Http(_, plan) => plan.name == name,
        }
    }

    async fn call(&self, call: &Call<'_>) -> Result<String, Trouble> {
        match self {
            Server::Mcp(server) => server.call(call).await,
            Server::Http(endpoint, _) => http::call(endpoint, call).await,
        }
    }
}

impl ToolsClient {
    /// Creates the client of a job's tools. `secrets` are all secrets of the job.
    ///
    /// # Errors
    /// Fails if an address is not allowed, or a header cannot be used.
    pub fn new(
        plan: &EnvironmentPlan,
        secrets: &std::collections::BTreeMap<String, RewardSecrets>,
        client: &RewardClient,
        (questions, status): (Questions, Arc<Status>),
    ) -> Result<Self, BuildError> {
        let server = |tool: &ToolPlan| {
            let none = RewardSecrets::default();
            let secrets = secrets.get(&tool.secret_name()).unwrap_or(&none);
            let timeout_ms = plan.service.timeout_ms.min(plan.service.deadline_ms);
            let endpoint = Endpoint::new(tool.name(), tool.url(), secrets, (client, timeout_ms))?;
            Ok(match tool {
                ToolPlan::Mcp(plan) => Server::Mcp(McpServer::new(endpoint, plan.allow.clone())),
                ToolPlan::Http(plan) => Server::Http(endpoint, plan.clone()),
            })
        };
        Ok(Self {
            questions,
            servers: plan.tools.iter().map(server).collect::<Result<_, _>>()?,
            permits: Semaphore::new(plan.service.max_concurrency.max(1) as usize),
            client: client.clone(),
            plan: plan.clone(),
            status,
            outage: Outage::default(),
            listed: tokio::sync::Mutex::default(),
            rows: Mutex::default(),
            shown_failures: Mutex::default(),
        })
    }

    /// Answers questions about episodes, in order.
    ///
    /// # Errors
    /// Fails if a server is away for longer than the settings allow, an MCP server lacks a tool, or nothing can be recorded anymore.
    pub async fn ask(&self, rollout: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RewardFailure> {
        try_join_all(calls.iter().map(|EpisodeCall { episode, ask }| async move {
            match ask {
                Ask::Reset(reset) => {
                    let mut item = Value::Object(reset.columns.clone());
                    item["messages"] = json!(reset.messages);
                    self.rows().insert((rollout, episode.row), item);
                    let tools = self.list(rollout).await?;
                    Ok(Reply::Reset(ResetAnswer { tools, ..ResetAnswer::default() }))
                }
                Ask::Step(step) => self.step(rollout, episode, step).await,
                Ask::Close(_) => {
                    self.close_episode(rollout, episode);
                    Ok(Reply::Closed)
                }
            }
        }))
        .await
    }

    /// Forgets an episode that is over.
    pub fn close_episode(&self, rollout: RolloutId, episode: &EpisodeId) {
        self.rows().remove(&(rollout, episode.row));
    }

    /// Ends the sessions of MCP servers.
    pub async fn close(&self) {
        let closing = self.servers.iter().map(|server| async move {
            if let Server::Mcp(server) = server {
                server.close().await;
            }
        });
        futures::future::join_all(closing).await;
    }

    fn rows(&self) -> std::sync::MutexGuard<'_, HashMap<(RolloutId, u64), Value>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the schemas of all tools. MCP servers are asked once a rollout, and their answers are recorded.
    async fn list(&self, rollout: RolloutId) -> Result<Vec<Value>, RewardFailure> {
        let mut listed = self.listed.lock().await;
        if let Some((_, tools)) = listed.as_ref().filter(|(of, _)| *of == rollout) {
            return Ok(tools.clone());
        }
        let lists = try_join_all(self.servers.iter().map(|server| async move {
            match server {
                Server::Http(_, plan) => Ok(vec![http::schema(plan)]),
                Server::Mcp(mcp) => self.list_of(rollout, mcp).await,
            }
        }));
        let tools: Vec<Value> = lists.await?.concat();
        *listed = Some((rollout, tools.clone()));
        Ok(tools)
    }

    async fn list_of(&self, rollout: RolloutId, server: &McpServer) -> Result<Vec<Value>, RewardFailure> {
        let name = &server.endpoint.name;
        let question = self.questions.question(rollout, "tools", &format!("list {name}"));
        let asking = async {
            let start = Instant::now();
            match self.until_answered(&server.endpoint, async || server.tools(&question.id).await).await? {
                Ok(tools) => Ok(RewardAnswer::Body { body: Value::Array(tools).to_string() }),
                Err((true, cause)) => {
                    let waited_s = start.elapsed().as_secs();
                    Err(RewardFailure::Outage { reward: name.clone(), waited_s, cause })
                }
                Err((false, detail)) => Err(RewardFailure::Unusable { reward: name.clone(), detail }),
            }
        };
        let answer = self.questions.ask(&question, "tools/list".to_owned(), asking).await?;
        let RewardAnswer::Body { body } = answer else { return Ok(Vec::new()) };
        serde_json::from_str(&body).map_err(|error| {
            let detail = format!("the recorded list of tools cannot be read: {error}");
            RewardFailure::Unusable { reward: name.clone(), detail }
        })
    }

    /// Carries out the calls of a turn. Calls of one server follow each other, in the order of the turn.
    async fn step(&self, rollout: RolloutId, episode: &EpisodeId, step: &Step) -> Result<Reply, RewardFailure> {
        let calls = step.message["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
        // The model reads no answer after its last turn, so the calls of that turn are not carried out.
        if step.is_final || calls.is_empty() {
            return Ok(Reply::Step(StepAnswer::default()));
        }
        let mut by_server: Vec<CallsOfServer<'_>> = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            let name = call["function"]["name"].as_str().unwrap_or_default();
            let server = self.servers.iter().find(|server| server.answers(name));
            let is_same = |other: &Option<&Server>| match (other, server) {
                (Some(one), Some(other)) => std::ptr::eq(*one, other),
                (one, other) => one.is_none() && other.is_none(),
            };
            match by_server.iter_mut().find(|(other, _)| is_same(other)) {
                Some((_, list)) => list.push((index, call)),
                None => by_server.push((server, vec![(index, call)])),
            }
        }
        let asked_at = Instant::now();
        let answered = try_join_all(by_server.iter().map(|(server, calls)| async move {
            let mut answers = Vec::with_capacity(calls.len());
            for (index, call) in calls {
                let answer = match server {
                    Some(server) => self.call(rollout, (episode, step.turn), server, call).await?,
                    None => (Ok("error: there is no tool of this name".to_owned()), false),
                };
                answers.push((*index, answer));
            }
            Ok::<_, RewardFailure>(answers)
        }));
        let mut answered = answered.await?.concat();
        let is_replayed = answered.iter().all(|(_, (_, is_recorded))| *is_recorded);
        answered.sort_by_key(|(index, _)| *index);
        let mut messages = Vec::with_capacity(calls.len());
        for ((_, (answer, _)), call) in answered.into_iter().zip(calls) {
            match answer {
                Ok(content) => messages.push(json!({
                    "role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content,
                })),
                Err(message) => return Ok(Reply::Failed { code: FAILED.to_owned(), message }),
            }
        }
        let latency_ms = u32::try_from(asked_at.elapsed().as_millis()).ok().filter(|_| !is_replayed);
        Ok(Reply::Step(StepAnswer { messages, latency_ms, ..StepAnswer::default() }))
    }

    /// Carries out one call. The inner error is the reason for which there is no answer; the flag says whether the answer was recorded
    /// by an earlier attempt.
    async fn call(
        &self,
        rollout: RolloutId,
        (episode, turn): (&EpisodeId, u32),
        server: &Server,
        call: &Value,
    ) -> Result<(Result<String, String>, bool), RewardFailure> {
        let in_turn = call["id"].as_str().unwrap_or_default();
        let question: Question = self.questions.about(rollout, episode, "call", &format!("{turn} {in_turn}"));
        let trace = episode_name(self.questions.job, rollout, episode);
        let item = self.rows().get(&(rollout, episode.row)).cloned().unwrap_or_default();
        let call = Call {
            id: &question.id,
            name: call["function"]["name"].as_str().unwrap_or_default(),
            arguments: call["function"]["arguments"].as_str().unwrap_or("{}"),
            trace: &trace,
            item: &item,
        };
        let asking = async {
            Ok(match self.until_answered(server.endpoint(), async || server.call(&call).await).await? {
                Ok(text) => RewardAnswer::Body { body: text },
                Err((_, detail)) => {
                    self.show_failure(call.name, &detail);
                    RewardAnswer::Unusable { code: FAILED.to_owned(), detail }
                }
            })
        };
        let is_recorded = self.questions.recorded(&question).is_some();
        let answer = match self.questions.ask(&question, http::body(&call), asking).await? {
            RewardAnswer::Body { body } | RewardAnswer::Expired { body } => Ok(body),
            RewardAnswer::Unusable { detail, .. } => Err(detail),
            RewardAnswer::TooLarge => Err(String::new()),
        };
        Ok((answer, is_recorded))
    }

    /// Tries until there is an answer. The inner error says why there is none, and whether a later try may succeed.
    async fn until_answered<T>(
        &self,
        endpoint: &Endpoint,
        mut attempt: impl AsyncFnMut() -> Result<T, Trouble>,
    ) -> Result<Result<T, (bool, String)>, RewardFailure> {
        let permit = self.permits.acquire().await;
        let max_outage = Duration::from_secs(self.plan.service.max_outage_s);
        let (mut failures, mut tries, mut since, mut waiting) = (0, 0, None, None);
        let reward = || endpoint.name.clone();
        loop {
            let start = Instant::now();
            let wait = match attempt().await {
                Ok(answer) => {
                    self.outage.end();
                    drop(permit);
                    return Ok(Ok(answer));
                }
                Err(Trouble::Refused(detail)) => return Err(RewardFailure::Refused { reward: reward(), detail }),
                Err(Trouble::Permanent(why)) => return Ok(Err((false, why))),
                Err(Trouble::SessionGone) => return Ok(Err((false, "the service answered 404 Not Found".to_owned()))),
                Err(Trouble::Transient { why, wait }) => {
                    tries += 1;
                    if tries >= self.plan.service.max_tries {
                        return Ok(Err((true, why)));
                    }
                    wait
                }
                Err(Trouble::Away(cause)) => {
                    let since = *since.get_or_insert(start);
                    let waited = since.elapsed();
                    self.outage.failed(&self.status, &endpoint.name, &cause, self.plan.service.max_outage_s);
                    if waited >= max_outage {
                        return Err(RewardFailure::Outage { reward: reward(), waited_s: waited.as_secs(), cause });
                    }
                    None
                }
            };
            failures += 1;
            waiting.get_or_insert_with(|| Waiting::new(&self.status));
            let wait = wait.map_or_else(|| self.client.pace.of(jitter(failures)), |asked| asked.min(max_outage));
            tokio::time::sleep(wait).await;
        }
    }

    /// Adds a warning to the job's events about a call without an answer, once for each reason.
    fn show_failure(&self, tool: &str, why: &str) {
        let message = format!("tool '{tool}': {why}; the episode has no reward");
        let mut shown = self.shown_failures.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.len() < MAX_SHOWN_FAILURES && shown.insert(message.clone()) {
            let data = json!({"tool": tool, "cause": why});
            self.status.notify(Event::Warning { code: FAILED.to_owned(), message, data });
        }
    }
}

/// Returns an answer as the model reads it: a text as it is, anything else as JSON.
pub(crate) fn answer_text(answer: &Value) -> String {
    match answer {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the text of a tool's result. Parts that are no text are named, because the model reads text.
pub(crate) fn content_text(result: &Value) -> String {
    let parts = result["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    if parts.is_empty() {
        let structured = result.get("structuredContent").or_else(|| result.get("structured_content"));
        return structured.map(answer_text).unwrap_or_default();
    }
    let text = |part: &Value| match part["type"].as_str() {
        Some("text") => part["text"].as_str().unwrap_or_default().to_owned(),
        Some("resource") if part["resource"]["text"].is_string() => answer_text(&part["resource"]["text"]),
        Some("resource" | "resource_link") => {
            let uri = part["uri"].as_str().or(part["resource"]["uri"].as_str()).unwrap_or_default();
            format!("(resource {uri})")
        }
        Some(kind) => format!("({kind} left out)"),
        None => String::new(),
    };
    parts.iter().map(text).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_result_is_its_text_parts_and_names_the_others() {
        let text = |parts: Value| content_text(&json!({"content": parts, "structuredContent": {"a": 1}}));
        assert_eq!(text(json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])), "one\ntwo");
        assert_eq!(text(json!([{"type": "image", "data": "…", "mimeType": "image/png"}])), "(image left out)");
        assert_eq!(text(json!([{"type": "resource_link", "uri": "file:///a"}])), "(resource file:///a)");
        assert_eq!(text(json!([])), r#"{"a":1}"#);
        assert_eq!(content_text(&json!({})), "");
    }
}
