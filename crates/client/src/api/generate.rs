//! What the base model and a checkpoint say to a prompt.

use std::time::Duration;

use reqwest::Method;
use rlood_types::generation::{GeneratedText, RenderedPrompt};
use rlood_types::id::{CheckpointId, JobId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;

/// The time limit of one generation on the server.
const WORK: Duration = Duration::from_secs(120);

/// A question to a job's models.
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// As in a dataset: text, or a list of chat messages.
    pub prompt: Value,
    /// `"last"`, `"best"` or a step; by default the job's result.
    pub checkpoint: Option<Value>,
    /// Completions of each model, 1 to 8.
    pub num_generations: Option<u32>,
    /// The seed; by default the job's.
    pub seed: Option<u64>,
    /// Settings of `sampling` that differ from the job's.
    pub sampling: Option<Value>,
}

impl GenerationRequest {
    /// A prompt, with all else as the job has it.
    pub fn new(prompt: impl Into<Value>) -> Self {
        Self { prompt: prompt.into(), checkpoint: None, num_generations: None, seed: None, sampling: None }
    }
}

/// Completions of the base model and of a checkpoint to the same prompts.
#[derive(Debug, Clone, Deserialize)]
pub struct Generation {
    /// The job.
    pub job_id: JobId,
    /// The base model.
    pub model: String,
    /// The checkpoint that was asked.
    pub checkpoint_id: CheckpointId,
    /// Its step.
    pub step: u64,
    /// Kind of the checkpoint's weights: `adapter` or `model`.
    pub weights: String,
    /// The settings of sampling as used.
    pub sampling: Value,
    /// The seed as used.
    pub seed: u64,
    /// The prompt as both saw it.
    pub prompt: RenderedPrompt,
    /// Completions of the base model.
    pub base: Vec<GeneratedText>,
    /// Completions of the checkpoint.
    pub trained: Vec<GeneratedText>,
    /// How long it took, loading included.
    pub seconds: f64,
}

impl Client {
    /// Asks the base model and a checkpoint of a job. The server answers one question at a time.
    ///
    /// # Errors
    /// `no_checkpoint`, `invalid_body`, `generation_timeout`, or any other [`Error`].
    pub async fn generate(&self, id: JobId, request: &GenerationRequest) -> Result<Generation, Error> {
        let GenerationRequest { prompt, checkpoint, num_generations, seed, sampling } = request;
        let mut body = json!({"prompt": prompt});
        for (name, value) in [
            ("checkpoint", checkpoint.clone()),
            ("num_generations", num_generations.map(Value::from)),
            ("seed", seed.map(Value::from)),
            ("sampling", sampling.clone()),
        ] {
            if let Some(value) = value {
                body[name] = value;
            }
        }
        self.json(self.call(Method::POST, &["jobs", &id.to_string(), "generate"]).json(&body).work(WORK)).await
    }
}
