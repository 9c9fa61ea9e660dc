//! Uploaded datasets, and previews of uploads.

use std::path::Path;

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::dataset::Recipe;
use rlood_types::digest::Sha256Digest;
use rlood_types::id::DatasetId;
use rlood_types::spec::{FieldError, HubDataset};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::client::Client;
use crate::download::Downloaded;
use crate::error::Error;
use crate::page::Pages;
use crate::upload::{Body, Content};

/// A dataset that the server stores.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Dataset {
    /// Id of the dataset.
    pub id: DatasetId,
    /// Name given at upload.
    pub name: Option<String>,
    /// Number of rows in the dataset.
    pub num_rows: u64,
    /// Size of the canonical rows, in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the canonical rows, in lower-case hex.
    pub sha256: Sha256Digest,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
    /// Owner of the key that uploaded the dataset; empty = the operator.
    #[serde(default)]
    pub owner: String,
    /// Time at which the dataset was first uploaded.
    pub created_at: Timestamp,
    /// State of the dataset: `ready`, `downloading` or `failed`. Until it is ready, it has no rows.
    #[serde(default = "ready")]
    pub state: String,
    /// Number of bytes that the server has downloaded; `None` unless it downloads the dataset from the hub.
    #[serde(default)]
    pub bytes_done: Option<u64>,
    /// Total number of bytes to download; `None` unless the server downloads the dataset from the hub.
    #[serde(default)]
    pub bytes_total: Option<u64>,
    /// Why the download failed.
    #[serde(default)]
    pub problem: Option<String>,
}

/// The state of a dataset of a server that does not report it.
fn ready() -> String {
    "ready".to_owned()
}

/// Rows to upload as a dataset.
#[derive(Debug, Clone)]
pub struct DatasetUpload {
    /// Display name of the dataset.
    pub name: Option<String>,
    /// Media type: `application/x-ndjson`, `text/csv`, `application/json`, …. The server also inspects the content.
    pub media_type: String,
    /// The rows to upload.
    pub rows: Content,
    /// Mapping of each row; `None` = rows are stored unchanged and need a column `prompt`.
    pub mapping: Option<Recipe>,
}

impl DatasetUpload {
    pub(crate) async fn body(&self) -> Result<Body, Error> {
        let Self { name: _, media_type, rows, mapping } = self;
        let Some(mapping) = mapping else { return Body::content(media_type, rows.clone()).await };
        let mapping = Content::from(serde_json::to_vec(mapping).unwrap_or_default());
        Body::form(vec![("file", media_type, rows.clone()), ("mapping", "application/json", mapping)]).await
    }

    /// Creates an upload of rows with one JSON object per line.
    pub fn ndjson(rows: impl Into<Content>) -> Self {
        Self { name: None, media_type: "application/x-ndjson".to_owned(), rows: rows.into(), mapping: None }
    }

    /// Sets how each row is mapped before it is stored.
    #[must_use]
    pub fn mapped(self, mapping: Recipe) -> Self {
        Self { mapping: Some(mapping), ..self }
    }

    /// Sets the display name.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }
}

/// A preview of rows, which are not stored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct DatasetPreview {
    /// Columns of the first rows.
    pub columns: Vec<PreviewColumn>,
    /// The first rows, unmapped.
    pub source_rows: Vec<Value>,
    /// The first rows after mapping and filtering.
    pub rows: Vec<PreviewRow>,
    /// A suggested `map`, which has not been applied.
    pub suggested_map: Option<Value>,
    /// Errors in the previewed rows.
    pub errors: Vec<FieldError>,
}

/// A column of the previewed rows.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PreviewColumn {
    /// Name of the column.
    pub name: String,
    /// Type of the values: `text`, `number`, `boolean`, `list`, `object` or `null`.
    pub kind: String,
}

/// A row as the server would store it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PreviewRow {
    /// Values of the row, by column name.
    pub record: Value,
    /// The prompt as the model would see it.
    #[serde(default)]
    pub text: Option<String>,
    /// Length of the prompt, in tokens.
    #[serde(default)]
    pub num_tokens: Option<u64>,
    /// Why the model cannot read the prompt.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A row of a dataset.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Row {
    /// Number of the row, from 0.
    pub row: u64,
    /// Values of the row, by column name.
    pub record: Map<String, Value>,
}

impl Client {
    /// Lists datasets, newest first.
    pub fn list_datasets(&self) -> Pages<Dataset> {
        Pages::new(self, self.get(&["datasets"]))
    }

    /// Uploads rows. If the same rows were uploaded before, the existing dataset is returned.
    ///
    /// # Errors
    /// Fails with `invalid_dataset`, which lists the invalid rows, or with any other [`Error`]; also if a file cannot be read.
    pub async fn create_dataset(&self, upload: &DatasetUpload) -> Result<Dataset, Error> {
        let call = self.post_once(&["datasets"]).query_if("name", upload.name.as_ref());
        self.json(call.body(upload.body().await?)).await
    }

    /// Creates a dataset from one on the Hugging Face Hub. If its download takes longer than the request, its state is `downloading`.
    ///
    /// # Errors
    /// Fails with `invalid_dataset` if the dataset cannot be found or mapped, `hub_unreachable`, or with any other [`Error`].
    pub async fn create_hub_dataset(&self, name: Option<&str>, dataset: &HubDataset) -> Result<Dataset, Error> {
        self.json(self.post_once(&["datasets"]).query_if("name", name).json(&json!(dataset))).await
    }

    /// Previews how the first rows of an upload would be mapped, and how a registered model would read them. Nothing is stored.
    ///
    /// # Errors
    /// Fails if no row can be read. Errors in single rows are part of the preview.
    pub async fn preview_dataset(&self, upload: &DatasetUpload, model: Option<&str>) -> Result<DatasetPreview, Error> {
        let call = self.call(Method::POST, &["datasets", "preview"]).query_if("model", model);
        self.json(call.body(upload.body().await?)).await
    }

    /// Returns the dataset with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_dataset(&self, id: DatasetId) -> Result<Dataset, Error> {
        self.json(self.get(&["datasets", &id.to_string()])).await
    }

    /// Deletes a dataset and its rows.
    ///
    /// # Errors
    /// Fails with `in_use` if jobs need the dataset, or with any other [`Error`].
    pub async fn delete_dataset(&self, id: DatasetId) -> Result<(), Error> {
        self.delete(&["datasets", &id.to_string()]).await
    }

    /// Lists the rows of a dataset, in order.
    pub fn list_rows(&self, id: DatasetId) -> Pages<Row> {
        Pages::new(self, self.get(&["datasets", &id.to_string(), "rows"]))
    }

    /// Downloads all rows as ndjson, the bytes whose hash is [`Dataset::sha256`].
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn download_dataset(&self, id: DatasetId, to: &Path) -> Result<Downloaded, Error> {
        self.download(self.get(&["datasets", &id.to_string(), "content"]), to, None).await
    }

    /// Downloads an image of a dataset, which rows name by its SHA-256 in hex.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn download_image(&self, id: DatasetId, sha256: &str, to: &Path) -> Result<Downloaded, Error> {
        self.download(self.get(&["datasets", &id.to_string(), "images", sha256]), to, None).await
    }
}
