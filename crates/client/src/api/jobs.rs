//! Jobs: submit, look at, wait for, steer, remove.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::doctor::{Observation, OnAlert, PhaseChange, Rule, Severity};
use rlood_types::event::Phase;
use rlood_types::id::{CheckpointId, JobId};
use rlood_types::job::{EndingCode, Failure, Requested, RetryFrom, State};
use rlood_types::probe::ProbeReport;
use rlood_types::spec::format::Format;
use rlood_types::spec::trl::Remark;
use rlood_types::spec::{Estimate, FieldError, Warning};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::follow::{JobChanges, JobUpdates};
use crate::page::Pages;
use crate::upload::{Body, Content, Document};

/// How long a waiting call is held: shorter than what proxies cut.
const WAIT: Duration = Duration::from_secs(30);
/// The time limit of a preflight without `timeout_s`, in seconds.
const PREFLIGHT_S: u32 = 60;

/// A job.
#[derive(Debug, Clone, Deserialize)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// For people.
    pub name: Option<String>,
    /// Its state.
    pub state: State,
    /// A cancel or pause that the job's worker has not carried out yet.
    pub requested: Option<Requested>,
    /// Which part of the loop it is in, or was when it stopped.
    pub phase: Option<Phase>,
    /// Why it waits or paused.
    pub status_reason: Option<String>,
    /// Claims so far.
    pub attempt: u64,
    /// Times in a row that the server could not hand it to a worker because of an error of its own.
    #[serde(default)]
    pub server_errors: u32,
    /// The device that runs it: `cpu`, `cuda:0`.
    pub device: Option<String>,
    /// The `seq` of its latest event.
    pub last_seq: i64,
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps in all.
    pub total_steps: u64,
    /// Estimated seconds remaining.
    pub eta_s: Option<f64>,
    /// Its place in the queue, from 1; `None` when it is not queued.
    pub queue_position: Option<u64>,
    /// Why it failed.
    pub failure: Option<Failure>,
    /// Why it ended before its last step.
    pub ending: Option<JobEnding>,
    /// The doctor's alerts that are on, latest first.
    #[serde(default)]
    pub alerts: Vec<JobAlert>,
    /// Exploration, exploitation or convergence.
    pub training_phase: Option<PhaseChange>,
    /// The resolved settings; [`rlood_types::spec::Plan`] reads them.
    pub plan: Value,
    /// The job it was made from.
    pub parent: Option<JobId>,
    /// When it was submitted.
    pub created_at: Timestamp,
    /// When it was claimed first.
    pub started_at: Option<Timestamp>,
    /// When it was over.
    pub finished_at: Option<Timestamp>,
    /// The client's own labels.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The owner of the key that made it; empty = the operator.
    #[serde(default)]
    pub owner: String,
}

impl Job {
    /// Whether it is over or paused: it changes only when its user acts.
    pub fn is_settled(&self) -> bool {
        self.state.is_terminal() || self.state == State::Paused
    }
}

/// An alert of the doctor about a job, one episode.
#[derive(Debug, Clone, Deserialize)]
pub struct JobAlert {
    /// The rule that raised it.
    pub rule: Rule,
    /// How bad it is.
    pub severity: Severity,
    /// The step it was raised at.
    pub step: u64,
    /// The first step of its evidence.
    pub since_step: u64,
    /// For people.
    pub message: String,
    /// The numbers.
    pub evidence: Vec<Observation>,
    /// How to fix it.
    pub fix: String,
    /// Whether it only stands in the record, pauses the job or ends it.
    pub on_alert: OnAlert,
    /// When it was stored.
    pub time: Timestamp,
    /// The step it was over at; `None` while it is on.
    pub cleared_step: Option<u64>,
}

/// Why a job ended before its last step.
#[derive(Debug, Clone, Deserialize)]
pub struct JobEnding {
    /// The cause.
    pub code: EndingCode,
    /// For people.
    pub message: String,
    /// Optimizer steps done.
    pub step: u64,
    /// The doctor's rule.
    pub rule: Option<Rule>,
    /// Early stopping's metric.
    pub metric: Option<String>,
    /// The metric's best value.
    pub best: Option<f64>,
    /// The step of the best value.
    pub best_step: Option<u64>,
    /// Checkpoints of earlier steps are not touched by the alert.
    pub good_before_step: Option<u64>,
    /// The checkpoint that is the job's result.
    pub checkpoint: Option<Marked>,
}

/// A checkpoint and its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Marked {
    /// Its id.
    pub id: CheckpointId,
    /// Optimizer steps done.
    pub step: u64,
}

/// Which jobs to list.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// In this state.
    pub state: Option<State>,
    /// Of this model.
    pub model: Option<String>,
    /// With these labels.
    pub metadata: BTreeMap<String, String>,
    /// Items of a page, 1 to 100.
    pub limit: Option<u32>,
}

/// How thoroughly a job is checked before it is submitted: the base model is sampled, the rewards are called, a step is timed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Preflight {
    /// Prompts to sample, 1 to 64.
    pub prompts: Option<u32>,
    /// Time limit, s, 1 to 600.
    pub timeout_s: Option<u32>,
}

/// The result of a dry run: whether a job would be accepted, and its plan.
#[derive(Debug, Clone, Deserialize)]
pub struct Validation {
    /// It would be accepted.
    pub valid: bool,
    /// The resolved settings.
    pub plan: Option<Value>,
    /// Everything that is wrong.
    pub errors: Vec<FieldError>,
    /// Legal, but probably not meant.
    pub warnings: Vec<Warning>,
    /// Memory and tokens.
    pub estimate: Option<Estimate>,
    /// What the preflight found.
    pub probe: Option<ProbeReport>,
    /// Of a configuration of TRL: the job that it is here.
    pub spec: Option<Value>,
    /// Of a configuration of TRL: keys that ask for something that is not done.
    pub unsupported: Option<Vec<Remark>>,
    /// Of a configuration of TRL: keys that make no difference here.
    pub ignored: Option<Vec<Remark>>,
}

/// A new job from a step of another one.
#[derive(Debug, Clone, Default)]
pub struct Fork {
    /// Optimizer steps done; the job must have a checkpoint of it.
    pub from_step: u64,
    /// A partial job, merged over the old one's settings.
    pub overrides: Option<Value>,
}

impl Client {
    /// Jobs, newest first.
    pub fn list_jobs(&self, filter: &JobFilter) -> Pages<Job> {
        let JobFilter { state, model, metadata, limit } = filter;
        let mut call =
            self.get(&["jobs"]).query_if("state", state.map(State::as_str)).query_if("model", model.as_ref());
        for (label, value) in metadata {
            call = call.query(&format!("metadata.{label}"), value);
        }
        Pages::new(self, call.query_if("limit", *limit))
    }

    /// Submits a job whose rows stand in its document, or in a dataset that it names.
    ///
    /// # Errors
    /// `invalid_spec` with every field that is wrong, or any other [`Error`].
    pub async fn create_job(&self, document: &Document) -> Result<Job, Error> {
        let body = Body::bytes(document.media_type, document.bytes.clone());
        self.json(self.post_once(&["jobs"]).body(body)).await
    }

    /// Submits a job together with its rows, as a multipart form. `media_type` is that of the rows: `application/x-ndjson`,
    /// `text/csv` or `application/json`.
    ///
    /// # Errors
    /// As [`Client::create_job`]; also when a file of rows cannot be read.
    pub async fn create_job_with_rows(
        &self,
        document: &Document,
        media_type: &str,
        rows: Content,
    ) -> Result<Job, Error> {
        let spec = ("spec", document.media_type, Content::Bytes(document.bytes.clone()));
        let form = Body::form(vec![spec, ("dataset", media_type, rows)]).await?;
        self.json(self.post_once(&["jobs"]).body(form)).await
    }

    /// Submits the demonstration job.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn create_demo(&self) -> Result<Job, Error> {
        self.json(self.post_once(&["demo"])).await
    }

    /// Checks a job without submitting it: all errors at once, the resolved settings, warnings, an estimate; with a preflight also
    /// what the base model and the rewards do.
    ///
    /// # Errors
    /// When the document cannot be read. A job that is not valid is an answer.
    pub async fn validate_job(&self, document: &Document, preflight: Option<Preflight>) -> Result<Validation, Error> {
        self.validate(document, preflight, None).await
    }

    /// Checks a configuration of TRL; [`Validation::spec`] is the job that it is here.
    ///
    /// # Errors
    /// As [`Client::validate_job`].
    pub async fn validate_trl(&self, document: &Document, preflight: Option<Preflight>) -> Result<Validation, Error> {
        self.validate(document, preflight, Some("trl")).await
    }

    async fn validate(
        &self,
        document: &Document,
        preflight: Option<Preflight>,
        from: Option<&str>,
    ) -> Result<Validation, Error> {
        let mut call = self.call(Method::POST, &["jobs", "validate"]).query_if("from", from);
        if let Some(Preflight { prompts, timeout_s }) = preflight {
            call = call.query("probe", true).query_if("probe_prompts", prompts).query_if("probe_timeout_s", timeout_s);
            call = call.work(Duration::from_secs(timeout_s.unwrap_or(PREFLIGHT_S).into()));
        }
        self.json(call.body(Body::bytes(document.media_type, document.bytes.clone()))).await
    }

    /// One job.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_job(&self, id: JobId) -> Result<Job, Error> {
        self.get_job_within(id, Duration::ZERO).await
    }

    /// One job as soon as it is over or paused, or the server stops, at the latest after `wait` (to the second, at most an hour).
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_job_within(&self, id: JobId, wait: Duration) -> Result<Job, Error> {
        let seconds = Some(wait.as_secs()).filter(|seconds| *seconds > 0);
        self.json(self.get(&["jobs", &id.to_string()]).query_if("wait", seconds).work(wait)).await
    }

    /// The job once it is over or paused, however long that takes.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn wait_for_job(&self, id: JobId) -> Result<Job, Error> {
        loop {
            let begun = tokio::time::Instant::now();
            let job = self.get_job_within(id, WAIT).await?;
            if job.is_settled() {
                return Ok(job);
            }
            // A server that stops answers at once.
            if begun.elapsed() < Duration::from_secs(1) {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }

    /// Changes a job's name, labels, priority, or secrets of its rewards: a `JobPatch` of the API's document.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn patch_job(&self, id: JobId, patch: &Value) -> Result<Job, Error> {
        self.json(self.call(Method::PATCH, &["jobs", &id.to_string()]).json(patch)).await
    }

    /// Removes a job that is over, with all that belongs to it.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn delete_job(&self, id: JobId) -> Result<(), Error> {
        self.delete(&["jobs", &id.to_string()]).await
    }

    /// Ends a job. Its checkpoints stay.
    ///
    /// # Errors
    /// `illegal_move` when it is over, or any other [`Error`].
    pub async fn cancel_job(&self, id: JobId) -> Result<Job, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "cancel"])).await
    }

    /// Stops a job at a checkpoint. A running one is paused a little later.
    ///
    /// # Errors
    /// `illegal_move` when it is over, or any other [`Error`].
    pub async fn pause_job(&self, id: JobId) -> Result<Job, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "pause"])).await
    }

    /// Queues a paused job again.
    ///
    /// # Errors
    /// `illegal_move` when it is not paused, or any other [`Error`].
    pub async fn resume_job(&self, id: JobId) -> Result<Job, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "resume"])).await
    }

    /// Makes a new job of the same settings and secrets from one that is over. Where it begins, if that is not said, depends on
    /// how the old one ended.
    ///
    /// # Errors
    /// `illegal_move` when it is not over, or any other [`Error`].
    pub async fn retry_job(&self, id: JobId, from: Option<RetryFrom>) -> Result<Job, Error> {
        let call = self.post_once(&["jobs", &id.to_string(), "retry"]);
        self.json(match from {
            Some(from) => call.json(&json!({"from": from})),
            None => call,
        })
        .await
    }

    /// Makes a new job that goes on from a step of this one.
    ///
    /// # Errors
    /// `no_checkpoint` or `no_such_checkpoint`, `invalid_spec`, or any other [`Error`].
    pub async fn fork_job(&self, id: JobId, fork: &Fork) -> Result<Job, Error> {
        let Fork { from_step, overrides } = fork;
        let mut body = json!({"from_step": from_step});
        if let Some(overrides) = overrides {
            body["overrides"] = overrides.clone();
        }
        self.json(self.post_once(&["jobs", &id.to_string(), "fork"]).json(&body)).await
    }

    /// A job's resolved settings, in the form in which they can be submitted again. Secrets are left out.
    ///
    /// # Errors
    /// As [`Error`] says; also when TOML cannot hold them.
    pub async fn get_config(&self, id: JobId, format: Format) -> Result<Document, Error> {
        let call = self.get(&["jobs", &id.to_string(), "config"]).query("format", format.as_str()).accept("*/*");
        Ok(Document::text(format, self.text(call).await?))
    }

    /// What the doctor said of a job, latest first.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn list_alerts(&self, id: JobId, active: bool) -> Result<Vec<JobAlert>, Error> {
        let call = self.get(&["jobs", &id.to_string(), "alerts"]).query("active", active);
        Pages::new(self, call).collect().await
    }

    /// A job's events after `after` (0 = all), each once and in order, until it is over; over several connections if need be.
    pub fn follow_job(&self, id: JobId, after: i64) -> JobUpdates {
        JobUpdates::new(self, self.get(&["jobs", &id.to_string(), "events"]), after)
    }

    /// The changes of all jobs.
    pub fn follow_jobs(&self) -> JobChanges {
        JobChanges::new(self, self.get(&["jobs", "changes"]))
    }
}
