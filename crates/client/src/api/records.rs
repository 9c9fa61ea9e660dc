//! Records of a job: events, logs, metrics, samples and its summary.

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
    /// Number of the attempt.
    pub attempt: u64,
    /// Time of the line.
    pub time: Timestamp,
    /// Text of the line.
    pub line: String,
}

/// The metrics of one step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "Metrics")]
pub struct MetricsRow {
    /// Optimizer step of the metrics. For an evaluation, the step after which it ran.
    pub step: u64,
    /// Metrics with TRL's names, those of an evaluation with the prefix `eval_`; a value of `None` = undefined.
    pub metrics: Metrics,
}

impl MetricsRow {
    /// Returns a metric; `None` if the step does not have it or it is undefined.
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

/// Filter of metrics, by name and step.
#[derive(Debug, Clone, Default)]
pub struct MetricsQuery {
    /// Names of metrics; empty = all.
    pub keys: Vec<String>,
    /// First step to return.
    pub min_step: Option<u64>,
    /// Last step to return.
    pub max_step: Option<u64>,
    /// Maximum number of steps to return, 2 to 10,000. Steps are thinned out without losing peaks.
    pub max_points: Option<u32>,
}

/// The order of returned samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SampleSort {
    /// The latest samples come first.
    #[default]
    Recent,
    /// Samples with the highest reward come first.
    Best,
    /// Samples with the lowest reward come first.
    Worst,
}

/// Filter and order of samples.
#[derive(Debug, Clone, Default)]
pub struct SampleQuery {
    /// Only this step; 0 = before the first step.
    pub step: Option<u64>,
    /// First step to return.
    pub min_step: Option<u64>,
    /// Last step to return.
    pub max_step: Option<u64>,
    /// Only samples of training, or only those of evaluations.
    pub phase: Option<SamplePhase>,
    /// Only samples of this dataset row, `row_N`.
    pub prompt_id: Option<String>,
    /// Only samples of this group.
    pub group_id: Option<String>,
    /// Only completions that ended for this reason.
    pub finish_reason: Option<FinishReason>,
    /// Minimum reward to return.
    pub min_reward: Option<f64>,
    /// Maximum reward to return.
    pub max_reward: Option<f64>,
    /// Order of the samples.
    pub sort: SampleSort,
    /// Only samples whose prompt or completion contains this text.
    pub contains: Option<String>,
    /// Number of items per page, 1 to 100; for an export, the maximum number of rows.
    pub limit: Option<u64>,
}

/// File format of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportForm {
    /// One JSON object per line.
    Ndjson,
    /// CSV with a header line.
    Csv,
}

/// Key figures of a job.
#[derive(Debug, Clone, Deserialize)]
pub struct Summary {
    /// Id of the job.
    pub id: JobId,
    /// Current state of the job.
    pub state: State,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Total number of optimizer steps.
    pub total_steps: u64,
    /// Mean reward of training steps.
    pub reward: Option<MetricTrend>,
    /// Mean reward of evaluations.
    pub eval_reward: Option<MetricTrend>,
    /// Latest mean KL divergence per token.
    pub kl: Option<f64>,
    /// Number of prompt and completion tokens that the job has processed so far.
    pub num_tokens: Option<f64>,
    /// Amounts that follow from the settings; deserialize as [`rlood_types::spec::Totals`].
    pub totals: Value,
    /// Durations of the job, in seconds.
    pub durations: Durations,
    /// Checkpoints that can be downloaded.
    pub checkpoints: SummaryCheckpoints,
    /// Latest training reward minus the latest evaluation reward.
    pub eval_gap: Option<f64>,
    /// Why the job ended before its last step.
    pub ending: Option<JobEnding>,
    /// All alerts, latest first.
    #[serde(default)]
    pub alerts: Vec<JobAlert>,
    /// Training phase: exploration, exploitation or convergence.
    pub training_phase: Option<PhaseChange>,
    /// Short form of the newest verdict; [`Client::get_job_verdict`] returns all of it.
    #[serde(default)]
    pub verdict: Option<Value>,
}

/// Key figures of a metric over time.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct MetricTrend {
    /// First value of the metric.
    pub first: f64,
    /// Latest value of the metric.
    pub last: f64,
    /// Highest value of the metric.
    pub best: f64,
    /// Step of the highest value.
    pub best_step: u64,
    /// Latest value minus first value.
    pub change: f64,
}

/// Durations of a job, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Durations {
    /// Time from submission to the first claim.
    pub queued_s: f64,
    /// Time from the first claim to the end, including pauses.
    pub running_s: Option<f64>,
    /// Mean duration of a step.
    pub mean_step_s: Option<f64>,
}

/// Checkpoints of a job that can be downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct SummaryCheckpoints {
    /// Number of kept checkpoints.
    pub count: usize,
    /// The newest checkpoint of the job.
    pub last: Option<Marked>,
    /// The best checkpoint of the job.
    pub best: Option<Marked>,
}

impl Client {
    /// Lists a job's current events after `after` (0 = all), in order. [`Client::follow_job`] also waits for new ones.
    pub fn list_events(&self, id: JobId, after: i64) -> Pages<JobEvent> {
        Pages::new(self, self.get(&["jobs", &id.to_string(), "events"])).after(after.to_string())
    }

    /// Lists a job's log lines, oldest first.
    pub fn list_logs(&self, id: JobId) -> Pages<LogLine> {
        Pages::new(self, self.get(&["jobs", &id.to_string(), "logs"]))
    }

    /// Lists a job's metrics by step.
    pub fn get_metrics(&self, id: JobId, query: &MetricsQuery) -> Pages<MetricsRow> {
        Pages::new(self, self.metrics_call(id, query))
    }

    /// Writes a job's metrics to a file: one page of 10,000 steps, or the number of steps in `max_points`.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
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

    /// Lists a job's completions, with their rewards and advantages.
    pub fn list_samples(&self, id: JobId, query: &SampleQuery) -> Pages<Sample> {
        Pages::new(self, self.samples_call(id, query))
    }

    /// Writes every sample that matches the query to a file.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
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

    /// Returns the key figures of a job.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
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
