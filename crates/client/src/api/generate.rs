//! Side-by-side generation with the base model and a checkpoint.

use std::time::Duration;

use reqwest::Method;
use rlood_types::generate::{GeneratedText, RenderedPrompt};
use rlood_types::id::{CheckpointId, JobId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;

/// The server's time limit for one generation.
const SERVER_TIME_LIMIT: Duration = Duration::from_secs(120);

/// A request to generate completions with a job's models.
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// The prompt, as in a dataset: text, or a list of chat messages.
    pub prompt: Value,
    /// Checkpoint to generate with: `"last"`, `"best"` or a step; default: the job's result.
    pub checkpoint: Option<Value>,
    /// Completions per model, 1 to 8.
    pub num_generations: Option<u32>,
    /// Random seed; default: the job's seed.
    pub seed: Option<u64>,
    /// Settings of `sampling` that differ from the job's.
    pub sampling: Option<Value>,
}

impl GenerationRequest {
    /// Creates a request for a prompt, with the job's settings.
    pub fn new(prompt: impl Into<Value>) -> Self {
        Self { prompt: prompt.into(), checkpoint: None, num_generations: None, seed: None, sampling: None }
    }
}

/// Completions of the base model and of a checkpoint for the same prompt.
#[derive(Debug, Clone, Deserialize)]
pub struct Generation {
    /// Id of the job.
    pub job_id: JobId,
    /// Id of the base model.
    pub model: String,
    /// Id of the checkpoint that generated.
    pub checkpoint_id: CheckpointId,
    /// Step of the checkpoint.
    pub step: u64,
    /// Whether the checkpoint contains an adapter or the whole model: `adapter` or `model`.
    pub weights: String,
    /// Sampling settings that were used.
    pub sampling: Value,
    /// Random seed that was used.
    pub seed: u64,
    /// The prompt as both models saw it.
    pub prompt: RenderedPrompt,
    /// Completions of the base model.
    pub base: Vec<GeneratedText>,
    /// Completions of the checkpoint.
    pub trained: Vec<GeneratedText>,
    /// Duration in seconds, including the time to load the models.
    pub seconds: f64,
}

impl Client {
    /// Generates completions with the base model and a checkpoint of a job.
    ///
    /// # Errors
    /// Fails with `no_checkpoint`, `invalid_body`, `generation_timeout`, or with any other [`Error`].
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
        self.json(self.call(Method::POST, &["jobs", &id.to_string(), "generate"]).json(&body).work(SERVER_TIME_LIMIT))
            .await
    }
}
