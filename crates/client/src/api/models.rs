//! Models.

use jiff::Timestamp;
use rlood_types::digest::Sha256Digest;
use serde::Deserialize;
use serde_json::json;

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// A registered model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Model {
    /// What jobs call it.
    pub id: String,
    /// `ready`, `downloading` or `failed`.
    pub state: String,
    /// Its directory on the server.
    pub source: String,
    /// Over config, weights, tokenizer and chat template, lower-case hex.
    pub sha256: Sha256Digest,
    /// What is known of it; `None` when the server's record cannot be read.
    pub card: Option<ModelCard>,
    /// The owner of the key that registered it; empty = it is for everybody.
    #[serde(default)]
    pub owner: String,
    /// When it was registered first.
    pub created_at: Timestamp,
}

/// What is known of a model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ModelCard {
    /// `qwen3`, `llama`, ….
    pub architecture: String,
    /// `causal_lm`, or `sequence_classification` of a reward model.
    #[serde(default)]
    pub task: String,
    /// The names of a reward model's scores.
    #[serde(default)]
    pub labels: Vec<String>,
    /// Weights, each counted once.
    pub num_parameters: u64,
    /// Layers.
    pub num_hidden_layers: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// The longest sequence, in tokens.
    pub max_position_embeddings: u64,
    /// Every id that ends a completion.
    pub eos_token_ids: Vec<u32>,
    /// Whether prompts may be chat messages.
    pub has_chat_template: bool,
    /// Bytes of all files.
    pub size_bytes: u64,
}

impl Client {
    /// Models, newest first.
    pub fn list_models(&self) -> Pages<Model> {
        Pages::new(self, self.get(&["models"]))
    }

    /// Registers the model in a directory of the server's machine, by its absolute path.
    ///
    /// # Errors
    /// `invalid_model` when it cannot be used, `conflict` when the name is another model's, or any other [`Error`].
    pub async fn create_model(&self, id: &str, source: &str) -> Result<Model, Error> {
        self.json(self.post_once(&["models"]).json(&json!({"id": id, "source": source}))).await
    }

    /// Registers a model of the hub, `org/name`, which is then `downloading`; without an id it is called by its name.
    ///
    /// # Errors
    /// `invalid_model` when it cannot be found or used, `hub_unreachable`, `conflict`, or any other [`Error`].
    pub async fn create_hub_model(&self, id: Option<&str>, hub: &str, revision: Option<&str>) -> Result<Model, Error> {
        let mut body = json!({"hub": hub});
        for (key, value) in [("id", id), ("revision", revision)] {
            if let Some(value) = value {
                body[key] = value.into();
            }
        }
        self.json(self.post_once(&["models"]).json(&body)).await
    }

    /// One model.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_model(&self, id: &str) -> Result<Model, Error> {
        self.json(self.get(&["models", id])).await
    }

    /// Forgets a model; its files stay.
    ///
    /// # Errors
    /// `in_use` while jobs need it, or any other [`Error`].
    pub async fn delete_model(&self, id: &str) -> Result<(), Error> {
        self.delete(&["models", id]).await
    }
}
