//! Datasets: immutable rows over NDJSON files.

use super::{Page, Store, StoreError};
use crate::id::DatasetId;

/// A dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetRow {
    /// Its id.
    pub id: DatasetId,
    /// For people.
    pub name: Option<String>,
    /// Of its canonical bytes.
    pub sha256: String,
    /// Rows.
    pub num_rows: u64,
    /// Bytes.
    pub size_bytes: u64,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
    /// Unix ms.
    pub created_at: i64,
}

/// A dataset whose file is in place.
#[derive(Debug, Clone)]
pub struct NewDataset {
    /// Its id.
    pub id: DatasetId,
    /// For people.
    pub name: Option<String>,
    /// Of its canonical bytes.
    pub sha256: String,
    /// Rows.
    pub num_rows: u64,
    /// Bytes.
    pub size_bytes: u64,
    /// Column names.
    pub columns: Vec<String>,
}

impl Store {
    /// The row of a dataset: the new one and `true`, or the one with the same bytes and `false` (the caller then removes its file).
    pub async fn dataset_create(&self, new: NewDataset, now: i64) -> Result<(DatasetRow, bool), StoreError> {
        let _ = (new, now);
        todo!()
    }

    /// One dataset, or `NotFound`.
    pub async fn dataset_get(&self, id: DatasetId) -> Result<DatasetRow, StoreError> {
        let _ = id;
        todo!()
    }

    /// By its bytes.
    pub async fn dataset_by_sha256(&self, sha256: &str) -> Result<Option<DatasetRow>, StoreError> {
        let _ = sha256;
        todo!()
    }

    /// Newest first.
    pub async fn dataset_list(&self, after: Option<&str>, limit: u32) -> Result<Page<DatasetRow>, StoreError> {
        let _ = (after, limit);
        todo!()
    }

    /// Removes the row; the caller then removes the file. `InUse` while a job that is not over needs it.
    pub async fn dataset_delete(&self, id: DatasetId) -> Result<(), StoreError> {
        let _ = id;
        todo!()
    }
}
