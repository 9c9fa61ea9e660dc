//! Datasets: immutable rows that refer to NDJSON files.

use futures::future::BoxFuture;
use serde_json::Value;
use sqlx::sqlite::SqliteRow;

use super::{Doing, Newest, Page, Store, StoreError, column, count_column, id_column, int, json_column, to_json};
use crate::id::DatasetId;

/// A dataset that the server stores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetRow {
    /// Id of the dataset.
    pub id: DatasetId,
    /// Display name of the dataset.
    pub name: Option<String>,
    /// SHA-256 of the dataset's canonical rows.
    pub sha256: String,
    /// Number of rows in the dataset.
    pub num_rows: u64,
    /// Size of the canonical rows, in bytes.
    pub size_bytes: u64,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
    /// Owner; empty = the operator.
    pub owner: String,
    /// Time of creation, Unix time in milliseconds.
    pub created_at: i64,
    /// Origin of the rows and how they were mapped, as JSON; `None` = uploaded without a mapping.
    pub origin: Option<Value>,
}

/// A new dataset whose file is in place.
#[derive(Debug, Clone)]
pub struct NewDataset {
    /// Id of the dataset.
    pub id: DatasetId,
    /// Display name of the dataset.
    pub name: Option<String>,
    /// SHA-256 of the dataset's canonical rows.
    pub sha256: String,
    /// Number of rows in the dataset.
    pub num_rows: u64,
    /// Size of the canonical rows, in bytes.
    pub size_bytes: u64,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
    /// Owner; empty = the operator.
    pub owner: String,
}

/// Filter of a list of datasets.
#[derive(Debug, Clone, Copy, Default)]
pub struct DatasetFilter<'f> {
    /// Only datasets of this owner; `None` = all owners.
    pub owner: Option<&'f str>,
    /// Only datasets with exactly this name.
    pub name: Option<&'f str>,
    /// Only datasets whose canonical rows have this hash.
    pub sha256: Option<&'f str>,
}

impl Store {
    /// Creates the row of a dataset. Returns the new row and `true`, or the owner's existing row with the same bytes and `false`
    /// (the caller then removes the new file).
    pub fn dataset_create(&self, new: NewDataset, now: i64) -> BoxFuture<'_, Result<(DatasetRow, bool), StoreError>> {
        Box::pin(async move {
            let doing = "create a dataset";
            let NewDataset { id, name, sha256, num_rows, size_bytes, columns, owner } = new;
            let mut tx = self.begin(doing).await?;
            let created = sqlx::query(
                "INSERT INTO datasets (id, name, sha256, num_rows, size_bytes, columns, owner, created_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, sha256) DO NOTHING",
            )
            .bind(id.to_string())
            .bind(name)
            .bind(&sha256)
            .bind(int(num_rows))
            .bind(int(size_bytes))
            .bind(to_json("columns", &columns)?)
            .bind(&owner)
            .bind(now)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
            let row = sqlx::query("SELECT * FROM datasets WHERE sha256 = ? AND owner = ?")
                .bind(sha256)
                .bind(owner)
                .fetch_one(&mut *tx)
                .await
                .doing(doing)?;
            self.commit(tx, doing).await?;
            Ok((DatasetRow::read(&row)?, created.rows_affected() == 1))
        })
    }

    /// Records the origin of a dataset, unless one is recorded already.
    pub async fn dataset_note_origin(&self, id: DatasetId, origin: &Value) -> Result<(), StoreError> {
        sqlx::query("UPDATE datasets SET origin = ? WHERE id = ? AND origin IS NULL")
            .bind(origin.to_string())
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("store the origin of a dataset")?;
        Ok(())
    }

    /// Returns one stored dataset, or `NotFound`. The id may also be the one of a download with the same rows.
    pub async fn dataset_get(&self, id: DatasetId) -> Result<DatasetRow, StoreError> {
        let query =
            "SELECT * FROM datasets WHERE id = ?1 OR id = (SELECT dataset_id FROM dataset_downloads WHERE id = ?1)";
        let row = sqlx::query(query)
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read a dataset")?
            .ok_or_else(|| StoreError::NotFound { kind: "dataset", id: id.to_string() })?;
        DatasetRow::read(&row)
    }

    /// Returns an owner's dataset with these bytes.
    pub async fn dataset_by_sha256(&self, owner: &str, sha256: &str) -> Result<Option<DatasetRow>, StoreError> {
        sqlx::query("SELECT * FROM datasets WHERE sha256 = ? AND owner = ?")
            .bind(sha256)
            .bind(owner)
            .fetch_optional(&self.readers)
            .await
            .doing("look up a dataset")?
            .as_ref()
            .map(DatasetRow::read)
            .transpose()
    }

    /// Lists datasets, newest first, including those that are being downloaded.
    pub async fn dataset_list(
        &self,
        filter: DatasetFilter<'_>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<DatasetRow>, StoreError> {
        let DatasetFilter { owner, name, sha256 } = filter;
        let sql = "SELECT * FROM (SELECT id, name, sha256, num_rows, size_bytes, columns, owner, created_at, origin FROM datasets \
                   UNION ALL SELECT id, name, '', 0, 0, '[]', owner, created_at, origin FROM dataset_downloads \
                   WHERE state <> 'ready') WHERE (created_at, id) < (?1, ?2) AND (?3 IS NULL OR owner = ?3) \
                   AND (?5 IS NULL OR name = ?5) AND (?6 IS NULL OR sha256 = ?6) \
                   ORDER BY created_at DESC, id DESC LIMIT ?4";
        let more = &[name, sha256];
        self.newest(Newest { list: "datasets", sql, owner, after, limit, more }, DatasetRow::read).await
    }

    /// Returns the ids of all datasets, whose files the cleanup at server start must keep.
    pub async fn dataset_ids(&self) -> Result<Vec<DatasetId>, StoreError> {
        sqlx::query("SELECT id FROM datasets")
            .fetch_all(&self.readers)
            .await
            .doing("list all datasets")?
            .iter()
            .map(|row| id_column(row, "id"))
            .collect()
    }

    /// Removes the row; the caller then removes the file. `InUse` if a job that has not ended needs it.
    pub fn dataset_delete(&self, id: DatasetId) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let doing = "delete a dataset";
            let mut tx = self.begin(doing).await?;
            let jobs = sqlx::query(
            "SELECT jobs.id FROM job_datasets JOIN jobs ON jobs.id = job_datasets.job_id \
             WHERE job_datasets.dataset_id = ? AND jobs.state IN ('queued', 'running', 'paused') ORDER BY jobs.id LIMIT 20",
        )
        .bind(id.to_string())
        .fetch_all(&mut *tx)
        .await
        .doing(doing)?
        .iter()
        .map(|row| id_column(row, "id"))
        .collect::<Result<Vec<_>, _>>()?;
            if !jobs.is_empty() {
                return Err(StoreError::InUse { kind: "dataset", id: id.to_string(), jobs });
            }
            let done = sqlx::query("DELETE FROM datasets WHERE id = ?")
                .bind(id.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            let unfinished = sqlx::query("DELETE FROM dataset_downloads WHERE id = ?1 OR dataset_id = ?1")
                .bind(id.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            if done.rows_affected() + unfinished.rows_affected() == 0 {
                return Err(StoreError::NotFound { kind: "dataset", id: id.to_string() });
            }
            self.commit(tx, doing).await?;
            Ok(())
        })
    }
}

impl DatasetRow {
    fn read(row: &SqliteRow) -> Result<DatasetRow, StoreError> {
        Ok(DatasetRow {
            id: id_column(row, "id")?,
            name: column(row, "name")?,
            sha256: column(row, "sha256")?,
            num_rows: count_column(row, "num_rows")?,
            size_bytes: count_column(row, "size_bytes")?,
            columns: json_column(row, "columns")?,
            owner: column(row, "owner")?,
            created_at: column(row, "created_at")?,
            origin: column::<Option<String>>(row, "origin")?.and_then(|text| serde_json::from_str(&text).ok()),
        })
    }
}
