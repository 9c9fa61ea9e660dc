//! Comparison of several jobs.

use std::collections::BTreeMap;

use rlood_types::event::Metrics;
use rlood_types::id::{CheckpointId, JobId};
use rlood_types::job::State;
use serde::Deserialize;
use serde_json::Value;

use super::records::MetricsQuery;
use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// Several jobs side by side.
#[derive(Debug, Clone, Deserialize)]
pub struct Comparison {
    /// The jobs, in the requested order.
    pub jobs: Vec<Compared>,
    /// Settings whose values differ.
    pub config: Vec<Difference>,
    /// Metrics of all jobs, by step.
    pub metrics: Vec<ComparedStep>,
    /// Requested metrics that none of the jobs has.
    #[serde(default)]
    pub unknown_keys: Vec<String>,
}

/// One of the compared jobs.
#[derive(Debug, Clone, Deserialize)]
pub struct Compared {
    /// Id of the job.
    pub id: JobId,
    /// Display name of the job.
    pub name: Option<String>,
    /// Base model of the job.
    pub model: String,
    /// Current state of the job.
    pub state: State,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Total number of optimizer steps.
    pub total_steps: u64,
    /// Results of the job's evaluations.
    pub evals: Vec<Evaluation>,
    /// The job's best checkpoint.
    pub best_checkpoint: Option<MarkedMetrics>,
}

/// The results of one evaluation.
#[derive(Debug, Clone, Deserialize)]
pub struct Evaluation {
    /// Step after which the evaluation ran.
    pub step: u64,
    /// Means over the evaluation's rows, by metric name.
    pub metrics: Metrics,
}

/// A checkpoint with its metrics.
#[derive(Debug, Clone, Deserialize)]
pub struct MarkedMetrics {
    /// Id of the checkpoint.
    pub id: CheckpointId,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Metrics of the checkpoint's step.
    pub metrics: Metrics,
}

/// A setting whose values differ between the jobs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Difference {
    /// JSON pointer to the setting.
    pub pointer: String,
    /// Value in each job, in the order of the jobs.
    pub values: Vec<Value>,
}

/// The metrics of all jobs at one step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ComparedStep {
    /// Number of the optimizer step.
    pub step: u64,
    /// Values by metric name: one per job, in the order of the jobs.
    #[serde(flatten)]
    pub metrics: BTreeMap<String, Vec<Option<f64>>>,
}

/// The mean reward of a job's training steps, thinned out to a few points.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RewardSparkline {
    /// Id of the job.
    pub id: JobId,
    /// Mean reward of the first step.
    pub first: Option<f64>,
    /// Mean reward of the latest step.
    pub last: Option<f64>,
    /// Points as (step, reward), in the order of the steps.
    pub points: Vec<(u64, f64)>,
}

impl Client {
    /// Compares the settings and metrics of several jobs.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn compare_jobs(&self, ids: &[JobId], query: &MetricsQuery) -> Result<Comparison, Error> {
        let MetricsQuery { keys, min_step, max_step, max_points } = query;
        let keys = (!keys.is_empty()).then(|| keys.join(","));
        let call = self.get(&["jobs", "compare"]).query("ids", joined(ids)).query_if("keys", keys);
        let call = call.query_if("min_step", *min_step).query_if("max_step", *max_step);
        self.json(call.query_if("max_points", *max_points)).await
    }

    /// Returns the rewards of several jobs over time, each with about `points` points (48 by default).
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn list_courses(&self, ids: &[JobId], points: Option<u32>) -> Result<Vec<RewardSparkline>, Error> {
        let call = self.get(&["jobs", "courses"]).query("ids", joined(ids)).query_if("points", points);
        Pages::new(self, call).collect().await
    }
}

fn joined(ids: &[JobId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
