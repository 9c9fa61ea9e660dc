//! What a job leaves behind: events, logs, metrics, samples, its summary.

use std::path::Path;

use jiff::Timestamp;
use rlood_types::doctor::PhaseChange;
use rlood_types::event::{FinishReason, Metrics, Sample, SamplePhase};
use rlood_types::id::JobId;
use rlood_types::job::State;
use serde::Deserialize;
use serde_json::Value;

use super::jobs::{JobAlert, JobEnding, Marked};
use crate::call::Call;
use crate::client::Client;
use crate::download::Downloaded;
use crate::error::Error;
use crate::follow::JobEvent;
use crate::page::Pages;

/// A line that a worker logged about a job.
#[derive(Debug, Clone, Deserialize)]
pub struct LogLine {
    /// The attempt.
    pub attempt: u64,
    /// When.
    pub time: Timestamp,
    /// The text.
    pub line: String,
}

/// The metrics of one step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "Metrics")]
pub struct MetricsRow {
    /// Optimizer step; an evaluation stands at the step it follows.
    pub step: u64,
    /// By TRL's names, those of an evaluation with the prefix `eval_`; `None` = undefined.
    pub metrics: Metrics,
}

impl MetricsRow {
    /// A metric that the step has, and that is defined.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.metrics.get(key).copied().flatten()
    }
}

impl From<Metrics> for MetricsRow {
    fn from(mut metrics: Metrics) -> Self {
        let step = metrics.remove("step").flatten().unwrap_or_default();
        Self { step: step as u64, metrics }
    }
}

/// Which metrics, of which steps, how many.
#[derive(Debug, Clone, Default)]
pub struct MetricsQuery {
    /// Names; none = all.
    pub keys: Vec<String>,
    /// From this step.
    pub min_step: Option<u64>,
    /// To this step.
    pub max_step: Option<u64>,
    /// Thinned out to at most so many steps, 2 to 10,000, so that no peak is lost.
    pub max_points: Option<u32>,
}

/// The order of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SampleSort {
    /// Latest first.
    #[default]
    Recent,
    /// Highest reward first.
    Best,
    /// Lowest reward first.
    Worst,
}

/// Which samples, in which order.
#[derive(Debug, Clone, Default)]
pub struct SampleQuery {
    /// Of this step; 0 = before the start.
    pub step: Option<u64>,
    /// From this step.
    pub min_step: Option<u64>,
    /// To this step.
    pub max_step: Option<u64>,
    /// Training or evaluation.
    pub phase: Option<SamplePhase>,
    /// Of this dataset row, `row_N`.
    pub prompt_id: Option<String>,
    /// Of this group.
    pub group_id: Option<String>,
    /// Why the completion ended.
    pub finish_reason: Option<FinishReason>,
    /// At least this reward.
    pub min_reward: Option<f64>,
    /// At most this reward.
    pub max_reward: Option<f64>,
    /// The order.
    pub sort: SampleSort,
    /// Prompt or completion contains this text.
    pub contains: Option<String>,
    /// Items of a page, 1 to 100; of an export: its most rows.
    pub limit: Option<u64>,
}

/// The form of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportForm {
    /// One JSON object a line.
    Ndjson,
    /// A header line, then a line each.
    Csv,
}

/// A job in a few numbers.
#[derive(Debug, Clone, Deserialize)]
pub struct Summary {
    /// The job.
    pub id: JobId,
    /// Its state.
    pub state: State,
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps in all.
    pub total_steps: u64,
    /// The mean reward of training steps.
    pub reward: Option<Course>,
    /// The mean reward of evaluations.
    pub eval_reward: Option<Course>,
    /// The latest token mean of the KL divergence.
    pub kl: Option<f64>,
    /// Prompt and completion tokens so far.
    pub num_tokens: Option<f64>,
    /// What the settings amount to; [`rlood_types::spec::Totals`] reads it.
    pub totals: Value,
    /// How long it took.
    pub durations: Durations,
    /// What can be downloaded.
    pub checkpoints: SummaryCheckpoints,
    /// The latest training reward less the evaluation's.
    pub eval_gap: Option<f64>,
    /// Why it ended before its last step.
    pub ending: Option<JobEnding>,
    /// Every alert of the doctor, latest first.
    #[serde(default)]
    pub alerts: Vec<JobAlert>,
    /// Exploration, exploitation or convergence.
    pub training_phase: Option<PhaseChange>,
    /// The newest comparison of a checkpoint with the base model, in short; [`Client::get_job_verdict`] has the whole.
    #[serde(default)]
    pub verdict: Option<Value>,
}

/// How a metric went.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Course {
    /// The first value.
    pub first: f64,
    /// The latest value.
    pub last: f64,
    /// The highest value.
    pub best: f64,
    /// The step of the highest value.
    pub best_step: u64,
    /// Latest less first.
    pub change: f64,
}

/// How long a job took, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Durations {
    /// From submission to the first claim.
    pub queued_s: f64,
    /// From the first claim to the end, pauses included.
    pub running_s: Option<f64>,
    /// The mean of the steps.
    pub mean_step_s: Option<f64>,
}

/// Which checkpoints of a job can be downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct SummaryCheckpoints {
    /// How many are kept.
    pub count: usize,
    /// The newest.
    pub last: Option<Marked>,
    /// The best.
    pub best: Option<Marked>,
}

impl Client {
    /// A job's events after `after` (0 = all) as they are now, in order. [`Client::follow_job`] waits for more.
    pub fn list_events(&self, id: JobId, after: i64) -> Pages<JobEvent> {
        Pages::new(self, self.get(&["jobs", &id.to_string(), "events"])).after(after.to_string())
    }

    /// What the workers logged about a job, oldest first.
    pub fn list_logs(&self, id: JobId) -> Pages<LogLine> {
        Pages::new(self, self.get(&["jobs", &id.to_string(), "logs"]))
    }

    /// A job's metrics by step.
    pub fn get_metrics(&self, id: JobId, query: &MetricsQuery) -> Pages<MetricsRow> {
        Pages::new(self, self.metrics_call(id, query))
    }

    /// Writes a job's metrics to a file: of a page of 10,000 steps, or of as many as `max_points` says.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn export_metrics(
        &self,
        id: JobId,
        query: &MetricsQuery,
        form: ExportForm,
        to: &Path,
    ) -> Result<Downloaded, Error> {
        self.download(self.metrics_call(id, query).query("format", form.as_str()), to, None).await
    }

    fn metrics_call(&self, id: JobId, query: &MetricsQuery) -> Call {
        let MetricsQuery { keys, min_step, max_step, max_points } = query;
        let keys = (!keys.is_empty()).then(|| keys.join(","));
        let call = self.get(&["jobs", &id.to_string(), "metrics"]).query_if("keys", keys);
        call.query_if("min_step", *min_step).query_if("max_step", *max_step).query_if("max_points", *max_points)
    }

    /// A job's completions, with their rewards and advantages.
    pub fn list_samples(&self, id: JobId, query: &SampleQuery) -> Pages<Sample> {
        Pages::new(self, self.samples_call(id, query))
    }

    /// Writes every sample that matches the query to a file.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn export_samples(
        &self,
        id: JobId,
        query: &SampleQuery,
        form: ExportForm,
        to: &Path,
    ) -> Result<Downloaded, Error> {
        self.download(self.samples_call(id, query).query("format", form.as_str()), to, None).await
    }

    fn samples_call(&self, id: JobId, query: &SampleQuery) -> Call {
        let phase = query.phase.map(|phase| match phase {
            SamplePhase::Train => "train",
            SamplePhase::Eval => "eval",
        });
        let finish_reason = query.finish_reason.map(|reason| match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        let sort = match query.sort {
            SampleSort::Recent => None,
            SampleSort::Best => Some("best"),
            SampleSort::Worst => Some("worst"),
        };
        self.get(&["jobs", &id.to_string(), "samples"])
            .query_if("step", query.step)
            .query_if("min_step", query.min_step)
            .query_if("max_step", query.max_step)
            .query_if("phase", phase)
            .query_if("prompt_id", query.prompt_id.as_ref())
            .query_if("group_id", query.group_id.as_ref())
            .query_if("finish_reason", finish_reason)
            .query_if("min_reward", query.min_reward)
            .query_if("max_reward", query.max_reward)
            .query_if("sort", sort)
            .query_if("q", query.contains.as_ref())
            .query_if("limit", query.limit)
    }

    /// A job in a few numbers.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_summary(&self, id: JobId) -> Result<Summary, Error> {
        self.json(self.get(&["jobs", &id.to_string(), "summary"])).await
    }
}

impl ExportForm {
    fn as_str(self) -> &'static str {
        match self {
            ExportForm::Ndjson => "ndjson",
            ExportForm::Csv => "csv",
        }
    }
}
