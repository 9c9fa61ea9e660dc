//! Served models: the routes of `/v1` that take and return JSON. Requests and answers have OpenAI's form. For streams, and
//! for everything else, the clients of that API work too.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;

/// Time limit for one answer, which may have to wait for others and for its model to be loaded.
const ANSWER_TIME_LIMIT: Duration = Duration::from_secs(600);

impl Client {
    /// Lists the served models; with `job` the checkpoints of that job.
    ///
    /// # Errors
    /// Fails with any [`Error`].
    pub async fn list_served_models(&self, job: Option<&str>) -> Result<Value, Error> {
        self.json(self.call(Method::GET, &["v1", "models"]).query_if("job", job)).await
    }

    /// Returns a served model by its name: a base model's id, a checkpoint's id, or `job_…[@last|@best|@STEP]`.
    ///
    /// # Errors
    /// Fails with `model_not_found`, or with any other [`Error`].
    pub async fn get_served_model(&self, name: &str) -> Result<Value, Error> {
        self.json(self.call(Method::GET, &["v1", "models", name])).await
    }

    /// Answers a chat; the body is that of `POST /v1/chat/completions`, without `stream`.
    ///
    /// # Errors
    /// Fails with `model_not_found`, `context_length_exceeded`, `rate_limit_exceeded`, or with any other [`Error`].
    pub async fn create_chat_completion(&self, body: &Value) -> Result<Value, Error> {
        self.json(self.call(Method::POST, &["v1", "chat", "completions"]).json(body).work(ANSWER_TIME_LIMIT)).await
    }

    /// Completes prompts; the body is that of `POST /v1/completions`, without `stream`.
    ///
    /// # Errors
    /// Fails with `model_not_found`, `context_length_exceeded`, `rate_limit_exceeded`, or with any other [`Error`].
    pub async fn create_completion(&self, body: &Value) -> Result<Value, Error> {
        self.json(self.call(Method::POST, &["v1", "completions"]).json(body).work(ANSWER_TIME_LIMIT)).await
    }

    /// Converts a text to token ids with the tokenizer of a served model.
    ///
    /// # Errors
    /// Fails with `model_not_found`, or with any other [`Error`].
    pub async fn tokenize(&self, model: &str, text: &str) -> Result<Value, Error> {
        self.json(self.call(Method::POST, &["tokenize"]).json(&json!({"model": model, "prompt": text}))).await
    }

    /// Converts token ids to text with the tokenizer of a served model.
    ///
    /// # Errors
    /// Fails with `model_not_found`, or with any other [`Error`].
    pub async fn detokenize(&self, model: &str, ids: &[u32]) -> Result<Value, Error> {
        self.json(self.call(Method::POST, &["detokenize"]).json(&json!({"model": model, "tokens": ids}))).await
    }

    /// Returns facts of the tokenizer of a server with a single base model.
    ///
    /// # Errors
    /// Fails with any [`Error`].
    pub async fn tokenizer_info(&self) -> Result<Value, Error> {
        self.json(self.call(Method::GET, &["tokenizer_info"])).await
    }
}
