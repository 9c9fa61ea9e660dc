//! Jobs: submit, watch, control and delete.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::doctor::{Observation, OnAlert, PhaseChange, Rule, Severity};
use rlood_types::event::Phase;
use rlood_types::id::{CheckpointId, JobId};
use rlood_types::job::{EndingCode, Failure, Requested, RetryFrom, State};
use rlood_types::preflight::PreflightReport;
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

/// Duration of a long-poll request, shorter than the usual timeout of proxies.
const LONG_POLL: Duration = Duration::from_secs(30);
/// Time limit of a preflight without `timeout_s`, in seconds.
const PREFLIGHT_S: u32 = 60;

/// A training job and its state.
#[derive(Debug, Clone, Deserialize)]
pub struct Job {
    /// Id of the job.
    pub id: JobId,
    /// Display name of the job.
    pub name: Option<String>,
    /// Current state of the job.
    pub state: State,
    /// A cancel or pause request that the job's worker has not carried out yet.
    pub requested: Option<Requested>,
    /// Phase of the training loop, or the last one if the job has stopped.
    pub phase: Option<Phase>,
    /// Why the job waits or has paused.
    pub status_reason: Option<String>,
    /// Number of times that a worker claimed the job.
    pub attempt: u64,
    /// Number of consecutive times that the server could not hand the job to a worker because of an internal error.
    #[serde(default)]
    pub server_errors: u32,
    /// Device that runs the job: `cpu`, `cuda:0`.
    pub device: Option<String>,
    /// Sequence number (`seq`) of the job's latest event.
    pub last_seq: i64,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Total number of optimizer steps.
    pub total_steps: u64,
    /// Estimated seconds remaining; `None` = unknown.
    pub eta_s: Option<f64>,
    /// Position in the queue, from 1; `None` = not queued.
    pub queue_position: Option<u64>,
    /// Why the job failed.
    pub failure: Option<Failure>,
    /// Why the job ended before its last step.
    pub ending: Option<JobEnding>,
    /// Active alerts, latest first.
    #[serde(default)]
    pub alerts: Vec<JobAlert>,
    /// Training phase: exploration, exploitation or convergence.
    pub training_phase: Option<PhaseChange>,
    /// The resolved settings; deserialize as [`rlood_types::spec::Plan`].
    pub plan: Value,
    /// Id of the job that this job was created from.
    pub parent: Option<JobId>,
    /// Time at which the job was submitted.
    pub created_at: Timestamp,
    /// Time at which a worker first claimed the job.
    pub started_at: Option<Timestamp>,
    /// Time at which the job ended.
    pub finished_at: Option<Timestamp>,
    /// The client's own labels, as key-value pairs.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Owner of the key that created the job; empty = the operator.
    #[serde(default)]
    pub owner: String,
}

impl Job {
    /// Whether the job has ended or is paused, so that it changes only when a user acts.
    pub fn is_settled(&self) -> bool {
        self.state.is_terminal() || self.state == State::Paused
    }
}

/// One episode of an alert about a job.
#[derive(Debug, Clone, Deserialize)]
pub struct JobAlert {
    /// The rule that raised the alert.
    pub rule: Rule,
    /// Severity of the alert.
    pub severity: Severity,
    /// Step at which the alert was raised.
    pub step: u64,
    /// First step of the evidence.
    pub since_step: u64,
    /// Human-readable message in English.
    pub message: String,
    /// The measured values that support the alert.
    pub evidence: Vec<Observation>,
    /// How to fix the problem.
    pub fix: String,
    /// Whether the alert is only recorded, pauses the job or ends it.
    pub on_alert: OnAlert,
    /// Time at which the alert was stored.
    pub time: Timestamp,
    /// Step at which the alert ended; `None` = it is active.
    pub cleared_step: Option<u64>,
}

/// Why a job ended before its last step.
#[derive(Debug, Clone, Deserialize)]
pub struct JobEnding {
    /// Why the job ended.
    pub code: EndingCode,
    /// Human-readable message in English.
    pub message: String,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// The alert rule that ended the job.
    pub rule: Option<Rule>,
    /// The metric that early stopping checked.
    pub metric: Option<String>,
    /// Best value of the metric of early stopping.
    pub best: Option<f64>,
    /// Step of the best value of the metric of early stopping.
    pub best_step: Option<u64>,
    /// First step of the alert's evidence. Checkpoints of earlier steps are not affected.
    pub good_before_step: Option<u64>,
    /// The checkpoint that is the job's result.
    pub checkpoint: Option<Marked>,
}

/// A checkpoint and its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Marked {
    /// Id of the checkpoint.
    pub id: CheckpointId,
    /// Number of completed optimizer steps.
    pub step: u64,
}

/// Filter of a list of jobs.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// Only jobs in this state.
    pub state: Option<State>,
    /// Only jobs with this base model.
    pub model: Option<String>,
    /// Only jobs with exactly this name.
    pub name: Option<String>,
    /// Only jobs whose name contains this text.
    pub name_contains: Option<String>,
    /// Only jobs whose id begins with this text.
    pub id_prefix: Option<String>,
    /// Only jobs with these labels.
    pub metadata: BTreeMap<String, String>,
    /// Number of items per page, 1 to 100.
    pub limit: Option<u32>,
}

/// Settings of a preflight: before a job is submitted, the base model is sampled, the rewards are called and a step is timed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Preflight {
    /// Number of prompts to sample, 1 to 64.
    pub prompts: Option<u32>,
    /// Time limit in seconds, 1 to 600.
    pub timeout_s: Option<u32>,
}

/// The result of a dry run: whether a job would be accepted, and its plan.
#[derive(Debug, Clone, Deserialize)]
pub struct Validation {
    /// Whether the job would be accepted.
    pub valid: bool,
    /// The settings with all defaults filled in.
    pub plan: Option<Value>,
    /// All errors in the job.
    pub errors: Vec<FieldError>,
    /// Warnings about settings that are legal but probably not intended.
    pub warnings: Vec<Warning>,
    /// Estimated memory and tokens of the run.
    pub estimate: Option<Estimate>,
    /// The result of the preflight.
    pub probe: Option<PreflightReport>,
    /// The job that a TRL configuration was translated to.
    pub spec: Option<Value>,
    /// Keys of a TRL configuration that request something unsupported.
    pub unsupported: Option<Vec<Remark>>,
    /// Keys of a TRL configuration that make no difference.
    pub ignored: Option<Vec<Remark>>,
}

/// A request for a new job that continues from a step of another job.
#[derive(Debug, Clone, Default)]
pub struct Fork {
    /// Number of completed optimizer steps, for which the job must have a checkpoint.
    pub from_step: u64,
    /// A partial job document that is merged into the other job's settings.
    pub overrides: Option<Value>,
}

impl Client {
    /// Lists jobs, newest first.
    pub fn list_jobs(&self, filter: &JobFilter) -> Pages<Job> {
        let JobFilter { state, model, name, name_contains, id_prefix, metadata, limit } = filter;
        let mut call = self.get(&["jobs"]).query_if("state", state.map(State::as_str));
        for (parameter, value) in
            [("model", model), ("name", name), ("name_contains", name_contains), ("id_prefix", id_prefix)]
        {
            call = call.query_if(parameter, value.as_ref());
        }
        for (label, value) in metadata {
            call = call.query(&format!("metadata.{label}"), value);
        }
        Pages::new(self, call.query_if("limit", *limit))
    }

    /// Submits a job whose rows are in its document, or in a dataset that it names.
    ///
    /// # Errors
    /// Fails with `invalid_spec`, which lists every invalid field, or with any other [`Error`].
    pub async fn create_job(&self, document: &Document) -> Result<Job, Error> {
        let body = Body::bytes(document.media_type, document.bytes.clone());
        self.json(self.post_once(&["jobs"]).body(body)).await
    }

    /// Submits a job together with its rows, as a multipart form. `media_type` is that of the rows:
    /// `application/x-ndjson`, `text/csv` or `application/json`.
    ///
    /// # Errors
    /// Fails as [`Client::create_job`] does; also if a file of rows cannot be read.
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

    /// Submits the demo job.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn create_demo(&self) -> Result<Job, Error> {
        self.json(self.post_once(&["demo"])).await
    }

    /// Validates a job without submitting it. Returns all errors, the resolved settings, warnings and an estimate; with a
    /// preflight, also measurements of the base model and the rewards.
    ///
    /// # Errors
    /// Fails if the document cannot be read. An invalid job is not an error.
    pub async fn validate_job(&self, document: &Document, preflight: Option<Preflight>) -> Result<Validation, Error> {
        self.validate(document, preflight, None).await
    }

    /// Validates a TRL configuration. [`Validation::spec`] is the job that it was translated to.
    ///
    /// # Errors
    /// Fails as [`Client::validate_job`] does.
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

    /// Returns the job with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_job(&self, id: JobId) -> Result<Job, Error> {
        self.get_job_within(id, Duration::ZERO).await
    }

    /// Returns a job as soon as it has ended or paused or the server stops, at the latest after `wait` (in whole seconds,
    /// at most an hour).
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_job_within(&self, id: JobId, wait: Duration) -> Result<Job, Error> {
        let seconds = Some(wait.as_secs()).filter(|seconds| *seconds > 0);
        self.json(self.get(&["jobs", &id.to_string()]).query_if("wait", seconds).work(wait)).await
    }

    /// Waits, without a time limit, until a job has ended or paused, and returns it.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn wait_for_job(&self, id: JobId) -> Result<Job, Error> {
        loop {
            let begun = tokio::time::Instant::now();
            let job = self.get_job_within(id, LONG_POLL).await?;
            if job.is_settled() {
                return Ok(job);
            }
            // A server that is shutting down answers a long poll immediately, so pause before the next request.
            if begun.elapsed() < Duration::from_secs(1) {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }

    /// Changes a job's name, labels, priority, or secrets of its rewards. `patch` is a `JobPatch` of the OpenAPI document.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn patch_job(&self, id: JobId, patch: &Value) -> Result<Job, Error> {
        self.json(self.call(Method::PATCH, &["jobs", &id.to_string()]).json(patch)).await
    }

    /// Deletes a job that has ended, and everything that belongs to it.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn delete_job(&self, id: JobId) -> Result<(), Error> {
        self.delete(&["jobs", &id.to_string()]).await
    }

    /// Cancels a job. Its checkpoints are kept.
    ///
    /// # Errors
    /// Fails with `illegal_move` if the job has ended, or with any other [`Error`].
    pub async fn cancel_job(&self, id: JobId) -> Result<Job, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "cancel"])).await
    }

    /// Stops a job at a checkpoint. A running job pauses a little later.
    ///
    /// # Errors
    /// Fails with `illegal_move` if the job has ended, or with any other [`Error`].
    pub async fn pause_job(&self, id: JobId) -> Result<Job, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "pause"])).await
    }

    /// Queues a paused job again.
    ///
    /// # Errors
    /// Fails with `illegal_move` if the job is not paused, or with any other [`Error`].
    pub async fn resume_job(&self, id: JobId) -> Result<Job, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "resume"])).await
    }

    /// Creates a new job with the settings and secrets of one that has ended. Without `from`, its starting point depends on
    /// how the old job ended.
    ///
    /// # Errors
    /// Fails with `illegal_move` if the old job has not ended, or with any other [`Error`].
    pub async fn retry_job(&self, id: JobId, from: Option<RetryFrom>) -> Result<Job, Error> {
        let call = self.post_once(&["jobs", &id.to_string(), "retry"]);
        self.json(match from {
            Some(from) => call.json(&json!({"from": from})),
            None => call,
        })
        .await
    }

    /// Creates a new job that continues from a step of the given job.
    ///
    /// # Errors
    /// Fails with `no_checkpoint`, `no_such_checkpoint`, `invalid_spec`, or with any other [`Error`].
    pub async fn fork_job(&self, id: JobId, fork: &Fork) -> Result<Job, Error> {
        let Fork { from_step, overrides } = fork;
        let mut body = json!({"from_step": from_step});
        if let Some(overrides) = overrides {
            body["overrides"] = overrides.clone();
        }
        self.json(self.post_once(&["jobs", &id.to_string(), "fork"]).json(&body)).await
    }

    /// Returns a job's resolved settings in a form that can be submitted again. Secrets are left out.
    ///
    /// # Errors
    /// Fails with an [`Error`] of the call; also if TOML cannot represent the settings.
    pub async fn get_config(&self, id: JobId, format: Format) -> Result<Document, Error> {
        let call = self.get(&["jobs", &id.to_string(), "config"]).query("format", format.as_str()).accept("*/*");
        Ok(Document::text(format, self.text(call).await?))
    }

    /// Lists the alerts of a job, latest first.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn list_alerts(&self, id: JobId, active: bool) -> Result<Vec<JobAlert>, Error> {
        let call = self.get(&["jobs", &id.to_string(), "alerts"]).query("active", active);
        Pages::new(self, call).collect().await
    }

    /// Follows a job's events after `after` (0 = all), each once and in order, until the job ends. Reconnects if necessary.
    pub fn follow_job(&self, id: JobId, after: i64) -> JobUpdates {
        JobUpdates::new(self, self.get(&["jobs", &id.to_string(), "events"]), after)
    }

    /// Follows the changes of all jobs.
    pub fn follow_jobs(&self) -> JobChanges {
        JobChanges::new(self, self.get(&["jobs", "changes"]))
    }
}
