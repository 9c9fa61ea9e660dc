//! Datasets.

use std::path::Path;

use jiff::Timestamp;
use rlood_types::digest::Sha256Digest;
use rlood_types::id::DatasetId;
use serde::Deserialize;
use serde_json::{Map, Value};

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
    /// `application/x-ndjson`, `text/csv` or `application/json`.
    pub media_type: String,
    /// The rows.
    pub rows: Content,
}

impl DatasetUpload {
    /// Rows of one JSON object a line.
    pub fn ndjson(rows: impl Into<Content>) -> Self {
        Self { name: None, media_type: "application/x-ndjson".to_owned(), rows: rows.into() }
    }

    /// The same with a name.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }
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
        let DatasetUpload { name, media_type, rows } = upload;
        let body = Body::content(media_type, rows.clone()).await?;
        self.json(self.post_once(&["datasets"]).query_if("name", name.as_ref()).body(body)).await
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
