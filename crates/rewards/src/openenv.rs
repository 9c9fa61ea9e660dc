//! Client of OpenEnv servers. An episode lives on one WebSocket (`/ws`): OpenEnv's HTTP form forgets its state, and a connection that
//! breaks takes its episode with it. So a lost connection is a lost episode, which begins again as another attempt.
//!
//! Answers are recorded before they are used. A resumed run finds them in the journal; an episode that goes on after them is lost,
//! because its connection ended with the worker before.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use reqwest::Url;
use reqwest::header::HeaderMap;
use serde_json::{Value, json};
use tokio::sync::{OnceCell, Semaphore};

use crate::client::{RewardClient, user_headers};
use crate::environment::{Ask, EpisodeCall, EpisodeId, Reply, Reset, ResetAnswer, Step, StepAnswer};
use crate::event::Event;
use crate::protocol::RewardAnswer;
use crate::questions::{Questions, episode_name};
use crate::rollout::RolloutId;
use crate::secret_filter::{Preserved, SecretFilter};
use crate::signed_post;
use crate::spec::{EnvironmentPlan, RewardSecrets};
use crate::status::{Outage, Status, Waiting};
use crate::webhook::wait::jitter;
use crate::{BuildError, RewardFailure};

mod socket;
mod wire;

use socket::{ConnectError, Socket};
use wire::{ActionForm, Observation, Problem};

/// Code under which an episode without a connection is recorded.
const LOST: &str = "episode_lost";
/// Code under which an episode is recorded that the server broke off.
const FAILED: &str = "environment_failed";
/// Longest wait between two tries to begin an episode on a full server.
const MAX_CAPACITY_WAIT: Duration = Duration::from_secs(1);
/// Time after which a server of unknown capacity counts as full with this job's own episodes.
const CAPACITY_PATIENCE: Duration = Duration::from_secs(60);

type EpisodeKey = (RolloutId, EpisodeId);

/// The OpenEnv server of one job.
pub(crate) struct OpenenvClient {
    questions: Questions,
    plan: EnvironmentPlan,
    /// The address without a slash at the end.
    base: String,
    headers: HeaderMap,
    filter: SecretFilter,
    client: RewardClient,
    permits: Semaphore,
    status: Arc<Status>,
    outage: Outage,
    form: OnceCell<ActionForm>,
    /// The connections of the episodes that are open.
    sockets: Mutex<HashMap<EpisodeKey, Arc<Socket>>>,
    /// The rollouts whose losses were reported.
    reported: Mutex<HashSet<RolloutId>>,
}

/// Why an episode has no further answer.
enum End {
    Lost(String),
    Failed(String),
}

/// Why an episode has not begun.
enum Hurdle {
    Fatal(RewardFailure),
    /// The server is away.
    Away(String),
    /// The connection broke, or the server could not make an environment. A reset that ends the server must not be repeated for ever.
    Broke(String),
    Answer(Problem),
}

impl OpenenvClient {
    /// Creates the client of a job's OpenEnv server.
    ///
    /// # Errors
    /// Fails if the address is not allowed, or a header cannot be used.
    pub fn new(
        plan: &EnvironmentPlan,
        secrets: &RewardSecrets,
        client: &RewardClient,
        (questions, status): (Questions, Arc<Status>),
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: plan.name.clone(), detail };
        client.policy.check_url(&plan.service.url).map_err(|why| error(why.to_string()))?;
        let url = plan.service.url.trim_end_matches('/');
        Ok(Self {
            base: url.strip_suffix("/ws").unwrap_or(url).to_owned(),
            headers: user_headers(secrets).map_err(error)?,
            filter: SecretFilter::new(secrets),
            permits: Semaphore::new(plan.service.max_concurrency.max(1) as usize),
            client: client.clone(),
            plan: plan.clone(),
            questions,
            status,
            outage: Outage::default(),
            form: OnceCell::new(),
            sockets: Mutex::default(),
            reported: Mutex::default(),
        })
    }

    /// Answers questions about episodes, in order.
    ///
    /// # Errors
    /// Fails if the server is away for longer than the settings allow, has too little room for the job, or nothing
    /// can be recorded anymore.
    pub async fn ask(&self, rollout: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RewardFailure> {
        try_join_all(calls.iter().map(|EpisodeCall { episode, ask }| async move {
            let key = (rollout, episode.clone());
            let (what, body) = match ask {
                Ask::Reset(reset) => ("reset".to_owned(), json!({"seed": reset.seed}).to_string()),
                Ask::Step(step) => (step.turn.to_string(), step.message.to_string()),
                Ask::Close(_) => {
                    self.close_episode(rollout, episode);
                    return Ok(Reply::Closed);
                }
            };
            let question = self.questions.about(rollout, episode, "env", &format!("openenv {what}"));
            let asking = async {
                let answer = match ask {
                    Ask::Reset(reset) => self.begin(&key, reset).await?.map(|answer| json!(answer)),
                    Ask::Step(step) => self.step(&key, step).await.map(|answer| json!(answer)),
                    Ask::Close(_) => Ok(Value::Null),
                };
                Ok(match answer {
                    Ok(answer) => RewardAnswer::Body { body: answer.to_string() },
                    Err(End::Lost(why)) => {
                        self.lose(&key, &why);
                        RewardAnswer::Unusable { code: LOST.to_owned(), detail: why }
                    }
                    Err(End::Failed(why)) => {
                        self.sockets().remove(&key);
                        self.warn(FAILED, format!("the environment broke off an episode of row {}: {why}", key.1.row));
                        RewardAnswer::Unusable { code: FAILED.to_owned(), detail: why }
                    }
                })
            };
            let (is_recorded, asked_at) = (self.questions.recorded(&question).is_some(), Instant::now());
            let answer = self.questions.ask(&question, body, asking).await?;
            let latency_ms = u32::try_from(asked_at.elapsed().as_millis()).ok().filter(|_| !is_recorded);
            Ok(match read_recorded(answer, matches!(ask, Ask::Reset(_))) {
                Reply::Step(answer) => Reply::Step(StepAnswer { latency_ms, ..answer }),
                other => other,
            })
        }))
        .await
    }

    /// Closes the connection of an episode.
    pub fn close_episode(&self, rollout: RolloutId, episode: &EpisodeId) {
        self.sockets().remove(&(rollout, episode.clone()));
    }

    /// Closes the connections of all episodes.
    pub fn close(&self) {
        self.sockets().clear();
    }

    fn sockets(&self) -> MutexGuard<'_, HashMap<EpisodeKey, Arc<Socket>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn limit(&self) -> Duration {
        Duration::from_millis(self.plan.service.timeout_ms.min(self.plan.service.deadline_ms).max(1))
    }

    fn warn(&self, code: &str, message: String) {
        let data = json!({"environment": self.plan.name});
        self.status.notify(Event::Warning { code: code.to_owned(), message, data });
    }

    /// Forgets the connection of a lost episode, and tells the job so, once a rollout.
    fn lose(&self, key: &EpisodeKey, why: &str) {
        self.sockets().remove(key);
        if self.reported.lock().unwrap_or_else(PoisonError::into_inner).insert(key.0) {
            let message = format!(
                "an episode was lost ({why}) and begins again up to {} times: the result has not the bytes of a run without the loss",
                self.plan.max_restarts
            );
            self.warn("environment_lost", message);
        }
    }

    fn url(&self, path: &str) -> Result<Url, RewardFailure> {
        self.client
            .policy
            .check_url(&format!("{}{path}", self.base))
            .map_err(|error| RewardFailure::Refused { reward: self.plan.name.clone(), detail: error.to_string() })
    }

    fn unusable(&self, detail: String) -> RewardFailure {
        RewardFailure::Unusable { reward: self.plan.name.clone(), detail }
    }

    /// Opens a connection and begins an episode on it. Waits while the server is away or has no room.
    async fn begin(&self, key: &EpisodeKey, reset: &Reset) -> Result<Result<ResetAnswer, End>, RewardFailure> {
        let form = self.form.get_or_try_init(|| self.find_form()).await?;
        let name = episode_name(self.questions.job, key.0, &key.1);
        let message = wire::reset(reset, &self.plan.params, &name, &key.1);
        let url = self.url("/ws")?;
        let (mut trouble, mut breaks) = (Trouble::new(self), 0);
        let (socket, first) = loop {
            let permit = self.permits.acquire().await;
            let begun = self.try_begin(&url, message.clone()).await;
            drop(permit);
            match begun {
                Ok(begun) => break begun,
                Err(Hurdle::Fatal(failure)) => return Err(failure),
                Err(Hurdle::Away(why)) => trouble.wait(&why, None).await?,
                Err(Hurdle::Broke(why)) => {
                    breaks += 1;
                    if breaks >= self.plan.service.max_tries {
                        return Ok(Err(End::Failed(why)));
                    }
                    trouble.wait(&why, None).await?;
                }
                Err(Hurdle::Answer(Problem::Full { max_sessions })) => {
                    self.check_room(max_sessions, trouble.since.elapsed())?;
                    trouble.wait("the server has no room for another episode", Some(MAX_CAPACITY_WAIT)).await?;
                }
                Err(Hurdle::Answer(problem)) => return Ok(Err(End::Failed(shown(problem)))),
            }
        };
        self.outage.end();
        let tools = match form {
            ActionForm::Text(_) => Ok(Vec::new()),
            ActionForm::Tools => self.list_tools(&socket).await,
        };
        Ok(tools.map(|tools| {
            self.sockets().insert(key.clone(), Arc::new(socket));
            self.opening(&first, tools)
        }))
    }

    async fn try_begin(&self, url: &Url, message: String) -> Result<(Socket, Observation), Hurdle> {
        let connected = Socket::connect(&self.client.http, url, &self.headers, self.limit()).await;
        let socket = connected.map_err(|error| match error {
            ConnectError::Refused(detail) => {
                Hurdle::Fatal(RewardFailure::Refused { reward: self.plan.name.clone(), detail })
            }
            ConnectError::Permanent(why) => Hurdle::Fatal(self.unusable(why)),
            ConnectError::Away(why) => Hurdle::Away(why),
        })?;
        match self.exchange(&socket, message).await {
            Ok(Ok(first)) => Ok((socket, first)),
            Ok(Err(Problem::Reported { code, message }))
                if matches!(code.as_str(), "FACTORY_ERROR" | "SESSION_ERROR") =>
            {
                Err(Hurdle::Broke(format!("{code}: {message}")))
            }
            Ok(Err(problem)) => Err(Hurdle::Answer(problem)),
            Err(why) => Err(Hurdle::Broke(why)),
        }
    }

    /// Fails if the server is full with episodes of this job, which end only after this one has begun.
    fn check_room(&self, max_sessions: Option<u64>, waited: Duration) -> Result<(), RewardFailure> {
        let own = self.sockets().len() as u64;
        let patience = self.client.pace.of(CAPACITY_PATIENCE);
        let is_own = max_sessions.map_or(own > 0 && waited >= patience, |most| own >= most);
        if !is_own {
            return Ok(());
        }
        let most = max_sessions.unwrap_or(own);
        Err(self.unusable(format!(
            "the OpenEnv server allows {most} episodes at a time, and the job opens more: set environment.max_open_episodes to {most}, or raise max_concurrent_envs of the server"
        )))
    }

    /// Returns what begins the episode for the model: the first observation as a message, and the tools.
    fn opening(&self, first: &Observation, tools: Vec<Value>) -> ResetAnswer {
        let text = wire::observation_text(&first.observation, self.observation_field());
        let messages = if text.is_empty() { Vec::new() } else { vec![json!({"role": "user", "content": text})] };
        ResetAnswer { session: None, messages, tools }
    }

    fn observation_field(&self) -> Option<&str> {
        self.plan.params.get("observation_field").and_then(Value::as_str)
    }

    async fn list_tools(&self, socket: &Socket) -> Result<Vec<Value>, End> {
        match self.exchange(socket, wire::step(&json!({"type": "list_tools"}))).await {
            Ok(Ok(listed)) => Ok(wire::tools(&listed.observation)),
            Ok(Err(problem)) => Err(End::Failed(shown(problem))),
            Err(why) => Err(End::Lost(why)),
        }
    }

    /// Finds out what the environment's actions are.
    async fn find_form(&self) -> Result<ActionForm, RewardFailure> {
        if let Some(field) = self.plan.params.get("action_field").and_then(Value::as_str) {
            return Ok(ActionForm::Text(field.to_owned()));
        }
        let url = self.url("/schema")?;
        let mut trouble = Trouble::new(self);
        loop {
            let asking = async {
                let response = signed_post::send(self.client.http.get(url.clone()), self.headers.clone()).await;
                let response = response.map_err(|error| error.text())?;
                let status = response.status();
                let body = response.bytes().await.map_err(|error| signed_post::SendError::new(&error).text())?;
                Ok::<_, String>((status, body))
            };
            let late = || Err(format!("no answer within {} ms", self.limit().as_millis()));
            match tokio::time::timeout(self.limit(), asking).await.unwrap_or_else(|_| late()) {
                Ok((status, body)) if status.is_success() => {
                    let schema: Value = serde_json::from_slice(&body)
                        .map_err(|error| self.unusable(format!("GET /schema of the server is not JSON: {error}")))?;
                    return wire::action_form(&schema).map_err(|detail| self.unusable(detail));
                }
                Ok((status, _)) if status.is_server_error() || matches!(status.as_u16(), 408 | 429) => {
                    trouble.wait(&format!("the server answered {status} to GET /schema"), None).await?;
                }
                Ok((status, _)) => {
                    let detail = format!(
                        "the server answered {status} to GET /schema: it is no OpenEnv server, or name environment.params.action_field"
                    );
                    return Err(self.unusable(detail));
                }
                Err(why) => trouble.wait(&why, None).await?,
            }
        }
    }

    /// Carries out a turn on the connection of its episode.
    async fn step(&self, key: &EpisodeKey, step: &Step) -> Result<StepAnswer, End> {
        let socket = self.sockets().get(key).cloned();
        let socket = socket.ok_or_else(|| End::Lost("its connection ended with the worker before".to_owned()))?;
        let _permit = self.permits.acquire().await;
        let Some(ActionForm::Text(field)) = self.form.get() else {
            return self.call_tools(&socket, step).await;
        };
        let text = step.message["content"].as_str().unwrap_or(&step.text);
        let Observation { observation, reward, done } = self.act(&socket, &json!({ field: text })).await?;
        let text = wire::observation_text(&observation, self.observation_field());
        Ok(StepAnswer {
            messages: vec![json!({"role": "user", "content": text})],
            reward,
            done,
            ..StepAnswer::default()
        })
    }

    /// Carries out the calls of a turn, one after another, until the episode is over. The turn's reward is the sum.
    async fn call_tools(&self, socket: &Socket, step: &Step) -> Result<StepAnswer, End> {
        let mut answer = StepAnswer::default();
        for call in step.message["tool_calls"].as_array().into_iter().flatten() {
            let Observation { observation, reward, done } = self.act(socket, &wire::call(call)).await?;
            answer.messages.push(json!({
                "role": "tool", "tool_call_id": call["id"], "content": wire::call_text(&observation),
            }));
            answer.reward = reward.map(|reward| reward + answer.reward.unwrap_or(0.0)).or(answer.reward);
            answer.done = done;
            if done {
                break;
            }
        }
        Ok(answer)
    }

    async fn act(&self, socket: &Socket, action: &Value) -> Result<Observation, End> {
        match self.exchange(socket, wire::step(action)).await {
            Ok(Ok(observation)) => Ok(observation),
            Ok(Err(problem)) => Err(End::Failed(shown(problem))),
            Err(why) => Err(End::Lost(why)),
        }
    }

    /// Sends a message, and reads the answer without the job's secrets. Fails if the connection is lost.
    async fn exchange(&self, socket: &Socket, message: String) -> Result<Result<Observation, Problem>, String> {
        let answer = socket.ask(message, self.limit()).await?;
        Ok(wire::read(&self.filter.redact_answer(answer.into_bytes(), Preserved::default)))
    }
}

fn shown(problem: Problem) -> String {
    match problem {
        Problem::Full { .. } => "the server has no room".to_owned(),
        Problem::Reported { code, message } => format!("{code}: {message}"),
        Problem::Invalid(why) => why,
    }
}

fn read_recorded(answer: RewardAnswer, is_reset: bool) -> Reply {
    let failed = |code: &str, message: String| Reply::Failed { code: code.to_owned(), message };
    match answer {
        RewardAnswer::Body { body } | RewardAnswer::Expired { body } => {
            let read = match is_reset {
                true => serde_json::from_str(&body).map(Reply::Reset),
                false => serde_json::from_str(&body).map(Reply::Step),
            };
            read.unwrap_or_else(|error| failed("invalid_answer", error.to_string()))
        }
        RewardAnswer::Unusable { code, .. } if code == LOST => Reply::Lost,
        RewardAnswer::Unusable { code, detail } => failed(&code, detail),
        RewardAnswer::TooLarge => failed("too_large", String::new()),
    }
}

/// The failures of a server in a row, and the waits between tries.
struct Trouble<'a> {
    of: &'a OpenenvClient,
    since: Instant,
    failures: u32,
    _waiting: Option<Waiting<'a>>,
}

impl<'a> Trouble<'a> {
    fn new(of: &'a OpenenvClient) -> Self {
        Self { of, since: Instant::now(), failures: 0, _waiting: None }
    }

    /// Waits for the next try. Fails after `max_outage_s`.
    async fn wait(&mut self, why: &str, longest: Option<Duration>) -> Result<(), RewardFailure> {
        let OpenenvClient { plan, status, client, outage, .. } = self.of;
        let most = Duration::from_secs(plan.service.max_outage_s);
        self._waiting.get_or_insert_with(|| Waiting::new(status));
        outage.failed(status, &plan.name, why, plan.service.max_outage_s);
        let waited = self.since.elapsed();
        if waited >= most {
            let (reward, waited_s) = (plan.name.clone(), waited.as_secs());
            return Err(RewardFailure::Outage { reward, waited_s, cause: why.to_owned() });
        }
        self.failures += 1;
        let wait = jitter(self.failures).min(longest.unwrap_or(Duration::MAX));
        tokio::time::sleep(client.pace.of(wait).min(most)).await;
        Ok(())
    }
}
