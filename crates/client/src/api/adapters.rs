//! PEFT adapters from elsewhere that jobs begin with.

use std::path::Path;

use rlood_types::id::AdapterId;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;
use crate::upload::{Body, Content};

/// A PEFT adapter.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct StoredAdapter {
    /// Its id.
    pub id: AdapterId,
    /// As given at upload.
    pub name: Option<String>,
    /// The base model that its config names.
    pub base_model: Option<String>,
    /// Rank.
    pub r: Option<u64>,
    /// Weights.
    pub num_parameters: u64,
    /// Bytes of its files.
    pub size_bytes: u64,
    /// Over its files.
    pub sha256: String,
    /// Its adapter_config.json.
    pub config: Value,
    /// Where it comes from: of the hub.
    #[serde(default)]
    pub origin: Option<Value>,
}

/// Where an adapter's files are.
#[derive(Debug, Clone)]
pub enum AdapterSource {
    /// A folder with adapter_config.json and adapter_model.safetensors.
    Folder(std::path::PathBuf),
    /// A repository of the hub, `org/name` or `org/name@revision`.
    Hub(String),
}

impl Client {
    /// Adapters, newest first.
    pub fn list_adapters(&self) -> Pages<StoredAdapter> {
        Pages::new(self, self.get(&["adapters"]))
    }

    /// Uploads an adapter, or has the server fetch one of the hub. The same files again give the old adapter.
    ///
    /// # Errors
    /// `invalid_adapter` when the files are no adapter, or any other [`Error`]; also when a file cannot be read.
    pub async fn create_adapter(&self, name: Option<&str>, source: &AdapterSource) -> Result<StoredAdapter, Error> {
        let call = self.post_once(&["adapters"]).query_if("name", name);
        match source {
            AdapterSource::Hub(hub) => self.json(call.json(&json!({ "hub": hub }))).await,
            AdapterSource::Folder(folder) => self.json(call.body(form(folder).await?)).await,
        }
    }

    /// One adapter.
    ///
    /// # Errors
    /// `not_found`, or any other [`Error`].
    pub async fn get_stored_adapter(&self, id: AdapterId) -> Result<StoredAdapter, Error> {
        self.json(self.get(&["adapters", &id.to_string()])).await
    }

    /// Deletes an adapter. Jobs that begin with it keep its files.
    ///
    /// # Errors
    /// `not_found`, or any other [`Error`].
    pub async fn delete_adapter(&self, id: AdapterId) -> Result<(), Error> {
        self.delete(&["adapters", &id.to_string()]).await
    }
}

async fn form(folder: &Path) -> Result<Body, Error> {
    let part =
        |name: &'static str, media_type: &'static str| (name, media_type, Content::from(folder.join(name).as_path()));
    let parts = vec![
        part("adapter_config.json", "application/json"),
        part("adapter_model.safetensors", "application/octet-stream"),
    ];
    Body::form(parts).await
}
