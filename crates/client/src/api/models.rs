//! Registered models.

use jiff::Timestamp;
use rlood_types::digest::Sha256Digest;
use serde::Deserialize;
use serde_json::json;

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// A model that was registered on the server.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Model {
    /// Name by which jobs refer to the model.
    pub id: String,
    /// State of the model: `ready`, `downloading` or `failed`.
    pub state: String,
    /// Directory of the model on the server.
    pub source: String,
    /// SHA-256 over config, weights, tokenizer and chat template, in lower-case hex.
    pub sha256: Sha256Digest,
    /// Properties of the model; `None` = the server's record cannot be read.
    pub card: Option<ModelCard>,
    /// Owner of the key that registered the model; empty = available to everyone.
    #[serde(default)]
    pub owner: String,
    /// Time of the first registration.
    pub created_at: Timestamp,
    /// The name under which the hub has the repository now, if it was renamed.
    #[serde(default)]
    pub renamed_to: Option<String>,
}

/// Properties of a model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ModelCard {
    /// Architecture: `qwen3`, `llama`, ….
    pub architecture: String,
    /// Task: `causal_lm`, or `sequence_classification` for a reward model.
    #[serde(default)]
    pub task: String,
    /// Names of a reward model's scores.
    #[serde(default)]
    pub labels: Vec<String>,
    /// Number of weights, each counted once.
    pub num_parameters: u64,
    /// Number format in which most weights are stored: `f32`, `f16`, `bf16` or `fp8`; `None` = an earlier version registered the model.
    #[serde(default)]
    pub precision: Option<String>,
    /// Number of layers of the model.
    pub num_hidden_layers: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Number of rows in the embedding.
    pub vocab_size: u64,
    /// Maximum sequence length, in tokens.
    pub max_position_embeddings: u64,
    /// Token ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Whether prompts may be chat messages.
    pub has_chat_template: bool,
    /// Total size of the files, in bytes.
    pub size_bytes: u64,
}

impl Client {
    /// Lists models, newest first.
    pub fn list_models(&self) -> Pages<Model> {
        Pages::new(self, self.get(&["models"]))
    }

    /// Registers the model in a directory on the server's machine, given as an absolute path.
    ///
    /// # Errors
    /// Fails with `invalid_model` if the model cannot be used, `conflict` if another model has this name, or
    /// with any other [`Error`].
    pub async fn create_model(&self, id: &str, source: &str) -> Result<Model, Error> {
        self.json(self.post_once(&["models"]).json(&json!({"id": id, "source": source}))).await
    }

    /// Registers a Hugging Face Hub model, `org/name`, which the server then downloads. The id defaults to the model's name.
    ///
    /// # Errors
    /// Fails with `invalid_model` if the model cannot be found or used, `hub_unreachable`, `conflict`, or with any other [`Error`].
    pub async fn create_hub_model(&self, id: Option<&str>, hub: &str, revision: Option<&str>) -> Result<Model, Error> {
        let mut body = json!({"hub": hub});
        for (key, value) in [("id", id), ("revision", revision)] {
            if let Some(value) = value {
                body[key] = value.into();
            }
        }
        self.json(self.post_once(&["models"]).json(&body)).await
    }

    /// Returns the model with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_model(&self, id: &str) -> Result<Model, Error> {
        self.json(self.get(&["models", id])).await
    }

    /// Unregisters a model. Its files are kept.
    ///
    /// # Errors
    /// Fails with `in_use` if jobs need the model, or with any other [`Error`].
    pub async fn delete_model(&self, id: &str) -> Result<(), Error> {
        self.delete(&["models", id]).await
    }
}
