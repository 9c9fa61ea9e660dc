//! `rlood env check URL`: checks a server against the environment contract v1. It plays short episodes as a job does, sends requests
//! that a job would never send, and prints each problem with a fix.

mod episodes;
mod later;
mod rejections;
mod turns;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures::future::LocalBoxFuture;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value, json};

use super::contract_check::wire::{Got, Signing, Wire};
use super::contract_check::{CheckError, Findings, Outcome, Report, columns, hidden, read_headers, refused, wire};
use crate::config::EnvCheckArgs;
use crate::environment::{Ask, EpisodeLimits, EpisodeStop, Reply, Reset, ResetAnswer, Step, StepAnswer};
use crate::event::{FinishReason, SamplePhase};
use crate::id::JobId;
use crate::reward::webhook::MAX_ANSWER_BYTES;
use crate::reward::webhook::environment_wire::{
    AnswerKind, Problem, RequestEnvironment, RequestEpisode, RequestHeader, RequestJob, RequestReply, VERSION,
    ping_body, read, request_body,
};
use crate::spec::{EnvironmentPlan, read_single_environment};

/// Limits of the episodes that the check plays.
const MAX_TURNS: u32 = 8;
const MAX_TOKENS: u32 = 4096;
/// Interval between two requests to a `status_url`.
const ASK_STATUS: Duration = Duration::from_millis(200);
/// The text of the model in the check's turns, if nothing else is tested.
const PLAIN: &str = "I do not know.";

/// `rlood env check`: returns 0 if there are no failures, otherwise 1.
///
/// # Errors
/// Fails when a flag is invalid.
pub fn run(args: EnvCheckArgs) -> LocalBoxFuture<'static, Result<ExitCode, CheckError>> {
    Box::pin(async move { examine(&args, !args.json).await?.finish(args.json, args.strict) })
}

/// Runs all checks against a server. Findings are printed as they occur if `show` is set.
///
/// # Errors
/// Fails when a flag is invalid.
pub async fn examine(args: &EnvCheckArgs, show: bool) -> Result<Report<Value>, CheckError> {
    let mut check = Check::new(args)?;
    check.findings.show = show;
    Ok(check.all().await)
}

/// The state of a running check.
struct Check {
    wire: Wire,
    plan: EnvironmentPlan,
    prompt: String,
    /// Columns of the row that the episodes are about.
    columns: Map<String, Value>,
    /// The job that the requests name.
    job: JobId,
    /// Number of episodes so far.
    num_episodes: u32,
    /// The tools of the first episode.
    tools: Vec<Value>,
    ping: Option<Value>,
    /// Latencies of valid answers, in ms.
    latencies: Vec<f64>,
    findings: Findings,
}

/// An episode of the check.
#[derive(Debug, Clone)]
struct Play {
    id: String,
    attempt: u32,
    session: Option<String>,
    /// Number of the next turn.
    turn: u32,
}

/// A question with its id and body.
struct Question {
    id: String,
    body: String,
    ask: Ask,
    episode: String,
}

impl Check {
    fn new(args: &EnvCheckArgs) -> Result<Self, CheckError> {
        let mut environment = json!({"url": args.url, "timeout_ms": args.timeout_ms, "deadline_ms": args.timeout_ms,
            "headers": read_headers(&args.headers)?});
        if let Some(secret) = &args.secret {
            environment["secret"] = json!(secret);
        }
        if let Some(params) = &args.params {
            environment["params"] =
                serde_json::from_str(params).map_err(|error| CheckError(format!("--params: {error}")))?;
        }
        let (plan, secrets) = read_single_environment(&json!({ "environment": environment }))
            .map_err(|errors| refused(&errors, "/environment/"))?;
        Ok(Self {
            wire: wire(&plan.service.url, &secrets, args.timeout_ms)?,
            plan,
            prompt: args.prompt.clone(),
            columns: columns(&args.columns)?,
            job: JobId::new(),
            num_episodes: 0,
            tools: Vec::new(),
            ping: None,
            latencies: Vec::new(),
            findings: Findings { secrets: hidden(&secrets), ..Findings::default() },
        })
    }

    /// Runs all checks in order. The later ones are skipped if the server does not answer at all.
    async fn all(mut self) -> Report<Value> {
        if self.wire.key.is_none() {
            let detail = "no --secret was given: the requests are unsigned, so this check cannot tell whether the server verifies signatures";
            self.find(
                "secret",
                Outcome::Skipped,
                detail,
                "give --secret whsec_… (the same as in the job's environment)",
            );
        }
        if self.is_reachable().await {
            let begins = self.resets().await;
            if begins && self.steps().await {
                self.order().await;
                self.end().await;
                self.last_turn().await;
                self.tool_calls().await;
                self.texts().await;
                self.tolerance().await;
                self.unknown_episode().await;
                self.concurrency().await;
                self.asynchronous().await;
                self.close().await;
            }
            self.signatures(begins).await;
            self.malformed().await;
            self.latency();
        }
        Report::new("environment", self.wire.shown_url(), self.findings.list, self.ping, &self.latencies)
    }

    fn find(&mut self, check: &'static str, outcome: Outcome, detail: impl Into<String>, fix: &str) {
        self.findings.add(check, outcome, detail.into(), fix);
    }

    /// Names a new episode. All are about the same row with the same seed, as the episodes of a group.
    fn new_play(&mut self) -> Play {
        self.num_episodes += 1;
        Play { id: format!("ep_{}_{}", unique(&self.job), self.num_episodes), attempt: 0, session: None, turn: 0 }
    }

    /// Makes a question with a new id.
    fn question(&self, play: &Play, ask: Ask) -> Question {
        let id = format!("env_{}", unique(&JobId::new()));
        let header = RequestHeader {
            version: VERSION.to_owned(),
            id: id.clone(),
            job: RequestJob { id: self.job, step: 0, phase: SamplePhase::Train },
            reply: AnswerKind::of(&ask).map(|_| RequestReply::new(None)),
            environment: RequestEnvironment { name: self.plan.name.clone(), params: self.plan.params.clone() },
            deadline_ms: self.plan.service.deadline_ms,
            episode: RequestEpisode {
                id: play.id.clone(),
                group_id: "row_0".to_owned(),
                prompt_id: "row_0".to_owned(),
                index: self.num_episodes,
                attempt: play.attempt,
                seed: None,
            },
        };
        Question { id, body: request_body(header, &ask), ask, episode: play.id.clone() }
    }

    fn reset_question(&self, play: &Play) -> Question {
        let reset = Reset {
            seed: 2025,
            messages: vec![json!({"role": "user", "content": self.prompt})],
            columns: self.columns.clone(),
            limits: EpisodeLimits { max_turns: MAX_TURNS, max_tokens: MAX_TOKENS },
        };
        self.question(play, Ask::Reset(Box::new(reset)))
    }

    fn step_question(&self, play: &Play, message: Value, is_final: bool) -> Question {
        let text = message["content"].as_str().unwrap_or_default().to_owned();
        let num_tokens = u32::try_from(text.split_whitespace().count()).unwrap_or(u32::MAX).max(1);
        let step = Step {
            turn: play.turn,
            session: play.session.clone(),
            message,
            text,
            finish_reason: if is_final { FinishReason::Length } else { FinishReason::Stop },
            num_tokens,
            turns_left: MAX_TURNS.saturating_sub(play.turn + 1),
            tokens_left: MAX_TOKENS.saturating_sub(num_tokens),
            is_final,
        };
        self.question(play, Ask::Step(Box::new(step)))
    }

    /// Sends a question. The error says why there was no response.
    async fn send(&self, question: &Question, signing: Signing) -> Result<Got, String> {
        let mut headers = HeaderMap::new();
        if let Ok(name) = HeaderValue::from_str(&question.episode) {
            headers.insert(HeaderName::from_static("rlood-episode"), name);
        }
        let got = self.wire.post_with(&question.id, &question.body, signing, headers).await?;
        if got.status == 202 { self.poll_status(question, got).await } else { Ok(got) }
    }

    /// Polls the `status_url` of a 202 until it has the answer, which then counts as the answer to the question. A 202 without a
    /// `status_url` is returned.
    async fn poll_status(&self, question: &Question, got: Got) -> Result<Got, String> {
        let accepted: Value = serde_json::from_slice(&got.body).unwrap_or_default();
        let Some(status_url) = accepted["status_url"].as_str() else { return Ok(got) };
        let url =
            self.wire.url.join(status_url).map_err(|why| format!("the status_url of the 202 is not a URL: {why}"))?;
        let start = Instant::now();
        while start.elapsed() < self.wire.timeout {
            tokio::time::sleep(ASK_STATUS).await;
            let polled = self.wire.get_status(&question.id, url.clone()).await?;
            match polled.status {
                202 | 204 | 408 | 425 | 429 | 500.. => {}
                200 => return Ok(Got { latency: got.latency + start.elapsed(), ..polled }),
                status => {
                    return Err(format!("the server answered 202, and its status_url {status}{}", polled.excerpt()));
                }
            }
        }
        let timeout_ms = self.wire.timeout.as_millis();
        Err(format!("the server answered 202, but its status_url had no answer within {timeout_ms} ms"))
    }

    /// Sends a question and reads the answer as a job does. The error describes how a job would treat the response.
    async fn ask(&mut self, question: &Question) -> Result<Reply, String> {
        let got = self.send(question, Signing::Right).await?;
        let reply = read_reply(&got, question)?;
        self.latencies.push(got.latency.as_secs_f64() * 1e3);
        Ok(reply)
    }

    /// Begins a new episode.
    async fn begin(&mut self) -> Result<(Play, ResetAnswer), String> {
        let mut play = self.new_play();
        let question = self.reset_question(&play);
        match self.ask(&question).await? {
            Reply::Reset(answer) => {
                play.session = answer.session.clone();
                Ok((play, answer))
            }
            other => Err(format!("the reset was answered with {other:?}")),
        }
    }

    /// Takes the next turn of an episode.
    async fn turn(&mut self, play: &mut Play, message: Value, is_final: bool) -> Result<StepAnswer, String> {
        let question = self.step_question(play, message, is_final);
        let reply = self.ask(&question).await?;
        play.turn += 1;
        match reply {
            Reply::Step(answer) => {
                play.session = answer.session.clone().or_else(|| play.session.take());
                Ok(answer)
            }
            other => Err(format!("the turn was answered with {other:?}")),
        }
    }
}

/// The part of an id after its prefix.
fn unique(id: &JobId) -> String {
    id.to_string().trim_start_matches("job_").to_owned()
}

/// A message of the model without calls.
fn plain(content: &str) -> Value {
    json!({"role": "assistant", "content": content})
}

/// Ids of the calls in a step's message.
fn calls_of(ask: &Ask) -> Vec<String> {
    let Ask::Step(step) = ask else { return Vec::new() };
    let calls = step.message["tool_calls"].as_array().into_iter().flatten();
    calls.filter_map(|call| call["id"].as_str().map(str::to_owned)).collect()
}

/// Interprets a response as a job does.
fn read_reply(got: &Got, question: &Question) -> Result<Reply, String> {
    let excerpt = got.excerpt();
    if let Some(encoding) = got.content_encoding.as_deref().filter(|encoding| *encoding != "identity") {
        return Err(format!("the answer is compressed ({encoding}) although the request does not accept it"));
    }
    match got.status {
        200 | 201 | 203 => {}
        202 => {
            return Err(format!(
                "the server answered 202 without a status_url, but this request offers only \"sync\" in reply.modes{excerpt}"
            ));
        }
        status @ 200..=299 => {
            return Err(format!("the server answered with status {status}, which carries no answer"));
        }
        status @ 300..=399 => return Err(format!("the server redirects ({status}); redirects are never followed")),
        404 | 410 => return Err(format!("the server does not know the episode ({}){excerpt}", got.status)),
        status => return Err(format!("the server answered with status {status}{excerpt}")),
    }
    if got.body.len() > MAX_ANSWER_BYTES {
        return Err(format!("the answer has {} bytes: at most {MAX_ANSWER_BYTES} are allowed", got.body.len()));
    }
    let Some(kind) = AnswerKind::of(&question.ask) else { return Ok(Reply::Closed) };
    let reply = read(&got.body, &question.id, kind).map_err(|problem| match problem {
        Problem::Invalid(why) => why,
        Problem::Reported { code, .. } => format!("the server reported the error {code}"),
    })?;
    match &reply {
        Reply::Reset(answer) => {
            answer.check_messages()?;
            rlood_chat::Tools::new(&answer.tools)
                .map_err(|error| format!("tools{}: {}", error.pointer, error.detail))?;
        }
        Reply::Step(answer) => {
            let Ask::Step(step) = &question.ask else { return Ok(reply) };
            if !answer.done && !step.is_final {
                answer.check_messages(&calls_of(&question.ask))?;
            }
        }
        Reply::Closed | Reply::Lost | Reply::Failed { .. } => {}
    }
    Ok(reply)
}

/// The body of a ping, and its id.
fn ping() -> (String, String) {
    let id = format!("env_{}", unique(&JobId::new()));
    let body = ping_body(&id);
    (id, body)
}

/// The reason of the check's close requests.
const CLOSED: EpisodeStop = EpisodeStop::MaxTurns;
