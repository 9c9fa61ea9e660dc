//! Verdicts: base model and checkpoint on the same rows.

use jiff::Timestamp;
use rlood_types::id::{CheckpointId, JobId, VerdictId};
use rlood_types::task::{TaskProgress, TaskState};
use rlood_types::verdict::{RowOutcome, VerdictError, VerdictResult, VerdictRow, VerdictSampling};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// A verdict to ask for; what is `None` is as in the job's evaluation.
#[derive(Debug, Clone, Default)]
pub struct VerdictRequest {
    /// `"best"`, `"last"`, `"result"`, a step or the id of a checkpoint; default: the best.
    pub checkpoint: Option<Value>,
    /// Completions of each model a row.
    pub num_generations: Option<u32>,
    /// 0 = greedy.
    pub temperature: Option<f64>,
    /// The reward from which a completion passes, for pass@k.
    pub pass_threshold: Option<f64>,
}

/// A comparison of a checkpoint with its base model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Verdict {
    /// Its id.
    pub id: VerdictId,
    /// The job.
    pub job_id: JobId,
    /// The checkpoint that was judged.
    pub checkpoint_id: CheckpointId,
    /// The checkpoint's step.
    pub step: u64,
    /// Current state.
    pub state: TaskState,
    /// How far it is.
    pub progress: TaskProgress,
    /// How both models are sampled.
    pub sampling: VerdictSampling,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When it began.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// Why it failed.
    pub error: Option<VerdictError>,
    /// What came of it.
    pub result: Option<VerdictResult>,
}

impl Client {
    /// Compares a checkpoint of a job with its base model; [`Client::get_verdict`] tells how far it is.
    ///
    /// # Errors
    /// `no_evaluation`, `no_checkpoint`, `invalid_body`, or any other [`Error`].
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

    /// The newest verdict of a job.
    ///
    /// # Errors
    /// `no_verdict`, or any other [`Error`].
    pub async fn get_job_verdict(&self, id: JobId) -> Result<Verdict, Error> {
        self.json(self.get(&["jobs", &id.to_string(), "verdict"])).await
    }

    /// One verdict.
    ///
    /// # Errors
    /// Any [`Error`].
    pub async fn get_verdict(&self, id: VerdictId) -> Result<Verdict, Error> {
        self.json(self.get(&["verdicts", &id.to_string()])).await
    }

    /// The rows that a verdict judged, those of one outcome or all.
    pub fn list_verdict_rows(&self, id: VerdictId, outcome: Option<RowOutcome>) -> Pages<VerdictRow> {
        let outcome = outcome.map(|outcome| serde_json::to_value(outcome).unwrap_or_default());
        let outcome = outcome.as_ref().and_then(Value::as_str);
        Pages::new(self, self.get(&["verdicts", &id.to_string(), "rows"]).query_if("outcome", outcome))
    }

    /// Cancels a verdict; one that has ended stays as it is.
    ///
    /// # Errors
    /// Any [`Error`].
    pub async fn cancel_verdict(&self, id: VerdictId) -> Result<Verdict, Error> {
        self.json(self.post_once(&["verdicts", &id.to_string(), "cancel"])).await
    }
}
