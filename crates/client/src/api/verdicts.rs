//! Verdicts: comparisons of the base model and a checkpoint on the same rows.

use jiff::Timestamp;
use rlood_types::id::{CheckpointId, JobId, VerdictId};
use rlood_types::task::{TaskProgress, TaskState};
use rlood_types::verdict::{RowOutcome, VerdictError, VerdictResult, VerdictRow, VerdictSampling};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// A request for a verdict. A setting that is `None` is taken from the job's evaluation.
#[derive(Debug, Clone, Default)]
pub struct VerdictRequest {
    /// The checkpoint: `"best"`, `"last"`, `"result"`, a step or the id of a checkpoint; default: the best.
    pub checkpoint: Option<Value>,
    /// Completions per model and row.
    pub num_generations: Option<u32>,
    /// Sampling temperature; 0 = greedy.
    pub temperature: Option<f64>,
    /// Minimum reward of a completion that passes, for pass@k.
    pub pass_threshold: Option<f64>,
}

/// A comparison of a checkpoint with its base model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Verdict {
    /// Id of the verdict.
    pub id: VerdictId,
    /// Id of the job.
    pub job_id: JobId,
    /// Id of the judged checkpoint.
    pub checkpoint_id: CheckpointId,
    /// Step of the checkpoint.
    pub step: u64,
    /// Current state of the verdict.
    pub state: TaskState,
    /// Progress of the verdict.
    pub progress: TaskProgress,
    /// How both models are sampled.
    pub sampling: VerdictSampling,
    /// Time at which the verdict was requested.
    pub created_at: Timestamp,
    /// Time at which the verdict started.
    pub started_at: Option<Timestamp>,
    /// Time at which the verdict ended.
    pub finished_at: Option<Timestamp>,
    /// Why the verdict failed.
    pub error: Option<VerdictError>,
    /// The result, once the verdict has succeeded.
    pub result: Option<VerdictResult>,
}

impl Client {
    /// Compares a checkpoint of a job with its base model. [`Client::get_verdict`] returns the progress.
    ///
    /// # Errors
    /// Fails with `no_evaluation`, `no_checkpoint`, `invalid_body`, or with any other [`Error`].
    pub async fn create_verdict(&self, id: JobId, request: &VerdictRequest) -> Result<Verdict, Error> {
        let VerdictRequest { checkpoint, num_generations, temperature, pass_threshold } = request;
        let mut body = json!({});
        for (name, value) in [
            ("checkpoint", checkpoint.clone()),
            ("num_generations", num_generations.map(Value::from)),
            ("temperature", temperature.map(Value::from)),
            ("pass_threshold", pass_threshold.map(Value::from)),
        ] {
            if let Some(value) = value {
                body[name] = value;
            }
        }
        self.json(self.post_once(&["jobs", &id.to_string(), "verdict"]).json(&body)).await
    }

    /// Returns the newest verdict of a job.
    ///
    /// # Errors
    /// Fails with `no_verdict`, or with any other [`Error`].
    pub async fn get_job_verdict(&self, id: JobId) -> Result<Verdict, Error> {
        self.json(self.get(&["jobs", &id.to_string(), "verdict"])).await
    }

    /// Returns the verdict with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_verdict(&self, id: VerdictId) -> Result<Verdict, Error> {
        self.json(self.get(&["verdicts", &id.to_string()])).await
    }

    /// Lists the rows that a verdict judged: those with one outcome, or all.
    pub fn list_verdict_rows(&self, id: VerdictId, outcome: Option<RowOutcome>) -> Pages<VerdictRow> {
        let outcome = outcome.map(|outcome| serde_json::to_value(outcome).unwrap_or_default());
        let outcome = outcome.as_ref().and_then(Value::as_str);
        Pages::new(self, self.get(&["verdicts", &id.to_string(), "rows"]).query_if("outcome", outcome))
    }

    /// Cancels a verdict. A verdict that has ended is not changed.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn cancel_verdict(&self, id: VerdictId) -> Result<Verdict, Error> {
        self.json(self.post_once(&["verdicts", &id.to_string(), "cancel"])).await
    }
}
