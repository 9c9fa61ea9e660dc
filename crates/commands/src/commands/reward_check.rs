//! `rlood reward check URL`: checks a service against the reward contract v1. It sends the requests of a job and invalid ones, and
//! prints each problem with a fix.

mod answers;
mod callback;
mod load;
mod ping;
mod reject_tests;

use std::process::ExitCode;

use futures::future::LocalBoxFuture;
use serde_json::{Map, Value, json};

use super::contract_check::wire::{Got, Signing, Wire};
pub use super::contract_check::{CheckError, Finding, Latency, Outcome, Report};
use super::contract_check::{Findings, columns, hidden, read_headers, refused, report, wire};
use crate::config::RewardCheckArgs;
use crate::event::FinishReason;
use crate::id::{JobId, RewardRequestId};
use crate::reward::JobContext;
use crate::reward::trial::read_samples;
use crate::reward::webhook::answer::{self, Answer, Found};
use crate::reward::webhook::{PingReply, sample_json};
use crate::rollout::{RewardSample, RolloutId};
use crate::spec::read_single_reward;

/// `rlood reward check`: returns 0 if there are no failures, otherwise 1.
///
/// # Errors
/// Fails when a flag is invalid.
pub fn run(args: RewardCheckArgs) -> LocalBoxFuture<'static, Result<ExitCode, CheckError>> {
    Box::pin(async move { examine(&args, !args.json).await?.finish(args.json, args.strict) })
}

/// Runs all checks against a service. Findings are printed as they occur if `show` is set.
///
/// # Errors
/// Fails when a flag is invalid.
pub async fn examine(args: &RewardCheckArgs, show: bool) -> Result<Report, CheckError> {
    let mut check = Check::new(args)?;
    check.findings.show = show;
    Ok(check.all().await)
}

/// The state of a running check.
struct Check {
    wire: Wire,
    /// The `params` of the reward, as sent in every request.
    params: Map<String, Value>,
    samples: Vec<RewardSample>,
    /// Maximum number of samples in one request of a job.
    max_batch_samples: u32,
    callbacks: callback::Listen,
    job: JobContext,
    ping: Option<PingReply>,
    /// Latencies of valid answers, in ms.
    latencies: Vec<f64>,
    findings: Findings,
}

impl Check {
    fn new(args: &RewardCheckArgs) -> Result<Self, CheckError> {
        let headers = read_headers(&args.headers)?;
        let mut reward = json!({"type": "webhook", "url": args.url, "timeout_ms": args.timeout_ms,
            "deadline_ms": args.timeout_ms, "max_batch_samples": args.max_batch_samples, "headers": headers});
        if let Some(secret) = &args.secret {
            reward["secret"] = json!(secret);
        }
        if let Some(params) = &args.params {
            let params = serde_json::from_str(params).map_err(|error| CheckError(format!("--params: {error}")))?;
            reward["params"] = params;
        }
        let (plan, secrets) =
            read_single_reward(&json!({ "reward": reward })).map_err(|errors| refused(&errors, "/reward/"))?;
        let crate::spec::RewardKind::Webhook(plan) = plan.kind else {
            return Err(CheckError("only version 1 of the reward contract can be checked".to_owned()));
        };
        let samples = match &args.samples {
            Some(path) => samples_of_file(path)?,
            None => default_samples(&columns(&args.columns)?),
        };
        Ok(Self {
            wire: wire(&plan.service.url, &secrets, args.timeout_ms)?,
            params: plan.params,
            samples,
            max_batch_samples: plan.service.max_batch_samples,
            callbacks: callback::Listen { on: args.callback_listen.clone(), url: args.callback_url.clone() },
            job: JobContext { job: JobId::new(), rollout: RolloutId::train(0), probe: true },
            ping: None,
            latencies: Vec::new(),
            findings: Findings { secrets: hidden(&secrets), ..Findings::default() },
        })
    }

    /// Runs all checks of a reward service in order. The later ones are skipped if the service does not answer at all.
    async fn all(mut self) -> Report {
        if self.wire.key.is_none() {
            let detail = "no --secret was given: the requests are unsigned, so this check cannot tell whether the service verifies signatures";
            self.find("secret", Outcome::Skipped, detail, "give --secret whsec_… (the same as in the job's reward)");
        }
        if self.ping().await {
            let answers = self.single().await;
            if answers {
                self.envelope().await;
                self.groups().await;
                self.edges().await;
                self.batch().await;
                self.repeat().await;
                self.concurrency().await;
                self.tolerance().await;
            }
            self.signatures(answers).await;
            self.malformed().await;
            if answers {
                self.asynchronous().await;
                self.latency().await;
            }
        }
        Report::new("reward", self.wire.shown_url(), self.findings.list, self.ping, &self.latencies)
    }

    /// Records one finding of the check.
    fn find(&mut self, check: &'static str, outcome: Outcome, detail: impl Into<String>, fix: &str) {
        self.findings.add(check, outcome, detail.into(), fix);
    }

    /// Builds a `reward.score.request` of contract v1.
    fn request(&self, id: &str, samples: &[RewardSample]) -> Value {
        json!({
            "type": "reward.score.request", "version": "1", "id": id,
            "timestamp": jiff::Timestamp::from_second(jiff::Timestamp::now().as_second()).unwrap_or_default().to_string(),
            "job": {"id": self.job.job, "step": 0, "phase": "probe"},
            "reward": {"name": "check", "params": self.params},
            "deadline_ms": self.wire.timeout.as_millis() as u64,
            "reply": {"modes": ["sync"]},
            "samples": samples.iter().map(sample_json).collect::<Vec<_>>(),
        })
    }

    /// Sends one request, as a job does. The error describes how a job would treat the response.
    async fn ask(&mut self, samples: &[RewardSample]) -> Result<Answer, String> {
        let id = new_id();
        let body = self.request(&id, samples).to_string();
        self.ask_with(&id, &body, samples).await
    }

    async fn ask_with(&mut self, id: &str, body: &str, samples: &[RewardSample]) -> Result<Answer, String> {
        let got = self.wire.post(id, body, Signing::Right).await?;
        let answer = read(&got, id, samples)?;
        self.latencies.push(got.latency.as_secs_f64() * 1e3);
        Ok(answer)
    }
}

/// Interprets a response to a synchronous request as a job does.
fn read(got: &Got, id: &str, samples: &[RewardSample]) -> Result<Answer, String> {
    let excerpt = got.excerpt();
    if let Some(encoding) = got.content_encoding.as_deref().filter(|encoding| *encoding != "identity") {
        return Err(format!("the answer is compressed ({encoding}) although the request does not accept it"));
    }
    match got.status {
        200 | 201 | 203 => {
            let ids: Vec<&str> = samples.iter().map(|sample| sample.sample_id.as_str()).collect();
            answer::read(&got.body, id, &ids)
        }
        202 => {
            Err("the reward service answered 202 (results follow later), but this request offers only \"sync\" in reply.modes"
                .to_owned())
        }
        status @ 200..=299 => Err(format!("the reward service answered with status {status}, which carries no rewards")),
        status @ 300..=399 => {
            let to = got.location.as_deref().map(|to| format!(" to {to}")).unwrap_or_default();
            Err(format!("the reward service redirects ({status}){to}; redirects are never followed"))
        }
        status @ (401 | 403) => Err(format!("the reward service refuses the credentials ({status}){excerpt}")),
        413 => Err("the reward service answered 413 (the request is too large)".to_owned()),
        status => Err(format!("the reward service answered with status {status}{excerpt}")),
    }
}

/// Returns each sample's reward in an answer; `None` for a sample without one.
fn numbers(answer: &Answer) -> Vec<Option<f64>> {
    let number = |found: &Found| match found {
        Found::Judged(judgement) => judgement.value.number(),
        Found::Retryable(_) | Found::Invalid(_) | Found::Absent => None,
    };
    answer.found.iter().map(number).collect()
}

fn new_id() -> String {
    RewardRequestId::new().to_string()
}

fn samples_of_file(path: &std::path::Path) -> Result<Vec<RewardSample>, CheckError> {
    let at = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| CheckError(format!("--samples {at}: {error}")))?;
    let value = match serde_json::from_str::<Value>(&text) {
        Ok(Value::Object(object)) if object.contains_key("samples") => object["samples"].clone(),
        Ok(list @ Value::Array(_)) => list,
        // Otherwise the file has one JSON object per line; a single object is a file of one line.
        Ok(_) | Err(_) => {
            let lines = text.lines().filter(|line| !line.trim().is_empty()).map(serde_json::from_str);
            let lines: Result<Vec<Value>, _> = lines.collect();
            let form = "a JSON list of {prompt, completion, columns}, or one such object per line";
            Value::Array(lines.map_err(|error| CheckError(format!("--samples {at}: {error}; give {form}")))?)
        }
    };
    read_samples(Some(&value)).map_err(|errors| {
        let lines: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.pointer, error.detail)).collect();
        CheckError(format!("--samples {at}: {}", lines.join("; ")))
    })
}

/// Returns the default samples: sums with right, wrong, verbose and evasive answers. Each row has the columns `answer` and
/// `reference`, and those in `columns`.
fn default_samples(columns: &Map<String, Value>) -> Vec<RewardSample> {
    let mut samples = Vec::new();
    for (group, (left, right)) in [(2, 2), (3, 4), (10, 5)].into_iter().enumerate() {
        let sum = left + right;
        let texts = [
            sum.to_string(),
            (sum + 1).to_string(),
            format!("The answer is {sum}. I added {left} and {right}, one after the other."),
            "I would rather talk about the weather".to_owned(),
        ];
        for completion in texts {
            let mut all = Map::from_iter([
                ("answer".to_owned(), json!(sum.to_string())),
                ("reference".to_owned(), json!(sum.to_string())),
            ]);
            all.extend(columns.clone());
            let prompt = format!("What is {left} + {right}?");
            samples.push(RewardSample {
                sample_id: format!("s_{}", samples.len()),
                group_id: format!("g_{group}"),
                prompt_id: format!("row_{group}"),
                source: None,
                messages: Some(json!([{"role": "user", "content": prompt}])),
                num_tokens: u32::try_from(completion.split_whitespace().count()).unwrap_or(u32::MAX),
                completion_ids: None,
                prompt,
                completion,
                finish_reason: FinishReason::Stop,
                columns: all,
                episode: None,
            });
        }
    }
    samples
}
