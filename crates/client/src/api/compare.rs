//! Several jobs side by side.

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
    /// The jobs, in the order asked for.
    pub jobs: Vec<Compared>,
    /// Settings that differ.
    pub config: Vec<Difference>,
    /// Metrics by step.
    pub metrics: Vec<ComparedStep>,
    /// Names of metrics that none of the jobs has.
    #[serde(default)]
    pub unknown_keys: Vec<String>,
}

/// One of the jobs.
#[derive(Debug, Clone, Deserialize)]
pub struct Compared {
    /// Its id.
    pub id: JobId,
    /// For people.
    pub name: Option<String>,
    /// Its model.
    pub model: String,
    /// Its state.
    pub state: State,
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps in all.
    pub total_steps: u64,
    /// Its evaluations.
    pub evals: Vec<Evaluation>,
    /// Its best checkpoint.
    pub best_checkpoint: Option<MarkedMetrics>,
}

/// An evaluation.
#[derive(Debug, Clone, Deserialize)]
pub struct Evaluation {
    /// The step it follows.
    pub step: u64,
    /// The means over its rows, by name.
    pub metrics: Metrics,
}

/// A checkpoint with its metrics.
#[derive(Debug, Clone, Deserialize)]
pub struct MarkedMetrics {
    /// Its id.
    pub id: CheckpointId,
    /// Optimizer steps done.
    pub step: u64,
    /// Its metrics.
    pub metrics: Metrics,
}

/// A setting that differs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Difference {
    /// A JSON pointer into the settings.
    pub pointer: String,
    /// The value of each job, in the order of the jobs.
    pub values: Vec<Value>,
}

/// A step of the jobs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ComparedStep {
    /// The step.
    pub step: u64,
    /// By metric, the value of each job, in the order of the jobs.
    #[serde(flatten)]
    pub metrics: BTreeMap<String, Vec<Option<f64>>>,
}

/// How the mean reward of a job's training steps went.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RewardCourse {
    /// The job.
    pub id: JobId,
    /// At its first step.
    pub first: Option<f64>,
    /// At its latest step.
    pub last: Option<f64>,
    /// Step and reward, by step.
    pub points: Vec<(u64, f64)>,
}

impl Client {
    /// Several jobs side by side.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn compare_jobs(&self, ids: &[JobId], query: &MetricsQuery) -> Result<Comparison, Error> {
        let MetricsQuery { keys, min_step, max_step, max_points } = query;
        let keys = (!keys.is_empty()).then(|| keys.join(","));
        let call = self.get(&["jobs", "compare"]).query("ids", joined(ids)).query_if("keys", keys);
        let call = call.query_if("min_step", *min_step).query_if("max_step", *max_step);
        self.json(call.query_if("max_points", *max_points)).await
    }

    /// How the rewards of several jobs went, each in about `points` points (48 if that is not said).
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn list_courses(&self, ids: &[JobId], points: Option<u32>) -> Result<Vec<RewardCourse>, Error> {
        let call = self.get(&["jobs", "courses"]).query("ids", joined(ids)).query_if("points", points);
        Pages::new(self, call).collect().await
    }
}

fn joined(ids: &[JobId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
