//! Imported PEFT adapters that jobs can start from.

use std::path::Path;

use rlood_types::id::AdapterId;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;
use crate::upload::{Body, Content};

/// A stored PEFT adapter.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct StoredAdapter {
    /// Id of the adapter.
    pub id: AdapterId,
    /// Name given at upload.
    pub name: Option<String>,
    /// Base model named in the adapter's config.
    pub base_model: Option<String>,
    /// Rank of the adapter.
    pub r: Option<u64>,
    /// Number of weights in the adapter.
    pub num_parameters: u64,
    /// Total size of the adapter's files, in bytes.
    pub size_bytes: u64,
    /// SHA-256 over the adapter's files, in lower-case hex.
    pub sha256: String,
    /// Content of the adapter's adapter_config.json.
    pub config: Value,
    /// Hub repository and commit of an adapter from the hub; `None` for an uploaded one.
    #[serde(default)]
    pub origin: Option<Value>,
}

/// Source of an adapter's files.
#[derive(Debug, Clone)]
pub enum AdapterSource {
    /// A local folder with adapter_config.json and adapter_model.safetensors.
    Folder(std::path::PathBuf),
    /// A Hugging Face Hub repository, `org/name` or `org/name@revision`.
    Hub(String),
}

impl Client {
    /// Lists adapters, newest first.
    pub fn list_adapters(&self) -> Pages<StoredAdapter> {
        Pages::new(self, self.get(&["adapters"]))
    }

    /// Uploads an adapter, or has the server fetch one from the hub. If the same files were uploaded before, the
    /// existing adapter is returned.
    ///
    /// # Errors
    /// Fails with `invalid_adapter` if the files are not an adapter, or with any other [`Error`]; also if a file cannot be read.
    pub async fn create_adapter(&self, name: Option<&str>, source: &AdapterSource) -> Result<StoredAdapter, Error> {
        let call = self.post_once(&["adapters"]).query_if("name", name);
        match source {
            AdapterSource::Hub(hub) => self.json(call.json(&json!({ "hub": hub }))).await,
            AdapterSource::Folder(folder) => self.json(call.body(form(folder).await?)).await,
        }
    }

    /// Returns the adapter with this id.
    ///
    /// # Errors
    /// Fails with `not_found`, or with any other [`Error`].
    pub async fn get_stored_adapter(&self, id: AdapterId) -> Result<StoredAdapter, Error> {
        self.json(self.get(&["adapters", &id.to_string()])).await
    }

    /// Deletes an adapter. Jobs that start from it keep its files.
    ///
    /// # Errors
    /// Fails with `not_found`, or with any other [`Error`].
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
