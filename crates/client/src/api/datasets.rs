//! Datasets.

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

/// A dataset.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Dataset {
    /// Its id.
    pub id: DatasetId,
    /// As given at upload.
    pub name: Option<String>,
    /// Rows.
    pub num_rows: u64,
    /// Bytes of the canonical rows.
    pub size_bytes: u64,
    /// Of the canonical rows, lower-case hex.
    pub sha256: Sha256Digest,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
    /// The owner of the key that uploaded it; empty = the operator.
    #[serde(default)]
    pub owner: String,
    /// When it was uploaded first.
    pub created_at: Timestamp,
}

/// Rows to upload.
#[derive(Debug, Clone)]
pub struct DatasetUpload {
    /// For people.
    pub name: Option<String>,
    /// `application/x-ndjson`, `text/csv`, `application/json`, …; the content says more than this.
    pub media_type: String,
    /// The rows.
    pub rows: Content,
    /// What each row becomes; `None` = it stays as it is, with its column `prompt`.
    pub mapping: Option<Recipe>,
}

impl DatasetUpload {
    pub(crate) async fn body(&self) -> Result<Body, Error> {
        let Self { name: _, media_type, rows, mapping } = self;
        let Some(mapping) = mapping else { return Body::content(media_type, rows.clone()).await };
        let mapping = Content::from(serde_json::to_vec(mapping).unwrap_or_default());
        Body::form(vec![("file", media_type, rows.clone()), ("mapping", "application/json", mapping)]).await
    }

    /// Rows of one JSON object a line.
    pub fn ndjson(rows: impl Into<Content>) -> Self {
        Self { name: None, media_type: "application/x-ndjson".to_owned(), rows: rows.into(), mapping: None }
    }

    /// The same, mapped.
    #[must_use]
    pub fn mapped(self, mapping: Recipe) -> Self {
        Self { mapping: Some(mapping), ..self }
    }

    /// The same with a name.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }
}

/// A look at rows that are not stored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct DatasetPreview {
    /// The columns of the first rows.
    pub columns: Vec<PreviewColumn>,
    /// The first rows as they are.
    pub source_rows: Vec<Value>,
    /// What the first rows that stay become.
    pub rows: Vec<PreviewRow>,
    /// A `map` that would fit; it is not applied.
    pub suggested_map: Option<Value>,
    /// What is wrong with the first rows.
    pub errors: Vec<FieldError>,
}

/// A column of rows that are looked at.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PreviewColumn {
    /// Its name.
    pub name: String,
    /// `text`, `number`, `boolean`, `list`, `object` or `null`.
    pub kind: String,
}

/// A row as it would be stored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PreviewRow {
    /// The row.
    pub record: Value,
    /// The prompt as the model reads it.
    #[serde(default)]
    pub text: Option<String>,
    /// Its tokens.
    #[serde(default)]
    pub num_tokens: Option<u64>,
    /// Why the model cannot read it.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A row of a dataset.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Row {
    /// Its number, from 0.
    pub row: u64,
    /// Its columns.
    pub record: Map<String, Value>,
}

impl Client {
    /// Datasets, newest first.
    pub fn list_datasets(&self) -> Pages<Dataset> {
        Pages::new(self, self.get(&["datasets"]))
    }

    /// Uploads rows. The same rows again give the old dataset.
    ///
    /// # Errors
    /// `invalid_dataset` with the rows that are wrong, or any other [`Error`]; also when a file cannot be read.
    pub async fn create_dataset(&self, upload: &DatasetUpload) -> Result<Dataset, Error> {
        let call = self.post_once(&["datasets"]).query_if("name", upload.name.as_ref());
        self.json(call.body(upload.body().await?)).await
    }

    /// Makes a dataset of a data set of the hub.
    ///
    /// # Errors
    /// `invalid_dataset` when it cannot be found or mapped, `hub_unreachable`, or any other [`Error`].
    pub async fn create_hub_dataset(&self, name: Option<&str>, dataset: &HubDataset) -> Result<Dataset, Error> {
        self.json(self.post_once(&["datasets"]).query_if("name", name).json(&json!(dataset))).await
    }

    /// Looks at what the first rows of an upload become, and how a registered model reads them. Nothing is stored.
    ///
    /// # Errors
    /// When nothing of the rows can be read; what is wrong with single rows is a part of the answer.
    pub async fn preview_dataset(&self, upload: &DatasetUpload, model: Option<&str>) -> Result<DatasetPreview, Error> {
        let call = self.call(Method::POST, &["datasets", "preview"]).query_if("model", model);
        self.json(call.body(upload.body().await?)).await
    }

    /// One dataset.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_dataset(&self, id: DatasetId) -> Result<Dataset, Error> {
        self.json(self.get(&["datasets", &id.to_string()])).await
    }

    /// Deletes a dataset.
    ///
    /// # Errors
    /// `in_use` while jobs need it, or any other [`Error`].
    pub async fn delete_dataset(&self, id: DatasetId) -> Result<(), Error> {
        self.delete(&["datasets", &id.to_string()]).await
    }

    /// Rows of a dataset, in order.
    pub fn list_rows(&self, id: DatasetId) -> Pages<Row> {
        Pages::new(self, self.get(&["datasets", &id.to_string(), "rows"]))
    }

    /// Downloads all rows as ndjson: the bytes whose hash is [`Dataset::sha256`].
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn download_dataset(&self, id: DatasetId, to: &Path) -> Result<Downloaded, Error> {
        self.download(self.get(&["datasets", &id.to_string(), "content"]), to, None).await
    }
}
