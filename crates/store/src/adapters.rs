//! Imported PEFT adapters, whose files are in the data directory.

use futures::future::BoxFuture;
use serde_json::Value;
use sqlx::sqlite::SqliteRow;

use super::{Doing, Newest, Page, Store, StoreError, column, count_column, id_column, int, json_column, to_json};
use crate::id::AdapterId;
use crate::protocol::FileEntry;

/// A stored PEFT adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterRow {
    /// Id of the adapter.
    pub id: AdapterId,
    /// Display name of the adapter.
    pub name: Option<String>,
    /// SHA-256 over the adapter's files, in the order of their names.
    pub sha256: String,
    /// Total size of the files, in bytes.
    pub size_bytes: u64,
    /// Number of weights in the adapter.
    pub num_parameters: u64,
    /// Content of the adapter's adapter_config.json.
    pub config: Value,
    /// Files of the adapter.
    pub files: Vec<FileEntry>,
    /// Owner; empty = the operator.
    pub owner: String,
    /// Time of creation, Unix time in milliseconds.
    pub created_at: i64,
    /// Origin of the adapter, as JSON; `None` = uploaded.
    pub origin: Option<Value>,
}

impl Store {
    /// Creates the row of an adapter whose files are in place. Returns the new row and `true`, or the owner's existing row with the
    /// same bytes and `false` (the caller then removes the new files).
    pub fn adapter_create(&self, new: AdapterRow) -> BoxFuture<'_, Result<(AdapterRow, bool), StoreError>> {
        Box::pin(async move {
            let doing = "store an uploaded adapter";
            let AdapterRow { id, name, sha256, size_bytes, num_parameters, config, files, owner, created_at, origin } =
                new;
            let mut tx = self.begin(doing).await?;
            let created = sqlx::query(
            "INSERT INTO adapters (id, name, sha256, size_bytes, num_parameters, config, files, owner, created_at, origin) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, sha256) DO NOTHING",
        )
        .bind(id.to_string())
        .bind(name)
        .bind(&sha256)
        .bind(int(size_bytes))
        .bind(int(num_parameters))
        .bind(config.to_string())
        .bind(to_json("files", &files)?)
        .bind(&owner)
        .bind(created_at)
        .bind(origin.map(|origin| origin.to_string()))
        .execute(&mut *tx)
        .await
        .doing(doing)?;
            let row = sqlx::query("SELECT * FROM adapters WHERE sha256 = ? AND owner = ?")
                .bind(sha256)
                .bind(owner)
                .fetch_one(&mut *tx)
                .await
                .doing(doing)?;
            self.commit(tx, doing).await?;
            Ok((AdapterRow::read(&row)?, created.rows_affected() == 1))
        })
    }

    /// Returns one adapter, or `NotFound`.
    pub async fn adapter_get(&self, id: AdapterId) -> Result<AdapterRow, StoreError> {
        let row = sqlx::query("SELECT * FROM adapters WHERE id = ?")
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read an adapter")?
            .ok_or_else(|| StoreError::NotFound { kind: "adapter", id: id.to_string() })?;
        AdapterRow::read(&row)
    }

    /// Lists adapters of one owner (`None` = all), newest first.
    pub async fn adapter_list(
        &self,
        owner: Option<&str>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<AdapterRow>, StoreError> {
        let sql = "SELECT * FROM adapters WHERE (created_at, id) < (?1, ?2) AND (?3 IS NULL OR owner = ?3) \
                   ORDER BY created_at DESC, id DESC LIMIT ?4";
        self.newest(Newest { list: "adapters", sql, owner, after, limit, more: &[] }, AdapterRow::read).await
    }

    /// Returns the ids of all adapters, whose files the cleanup at server start must keep.
    pub async fn adapter_ids(&self) -> Result<Vec<AdapterId>, StoreError> {
        sqlx::query("SELECT id FROM adapters")
            .fetch_all(&self.readers)
            .await
            .doing("list all adapters")?
            .iter()
            .map(|row| id_column(row, "id"))
            .collect()
    }

    /// Removes an adapter's row; the caller then removes its files. Jobs that start from the adapter have their own hard
    /// links to the files.
    pub async fn adapter_delete(&self, id: AdapterId) -> Result<(), StoreError> {
        let deleted = sqlx::query("DELETE FROM adapters WHERE id = ?")
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("delete an adapter")?;
        match deleted.rows_affected() {
            0 => Err(StoreError::NotFound { kind: "adapter", id: id.to_string() }),
            _ => Ok(()),
        }
    }
}

impl AdapterRow {
    fn read(row: &SqliteRow) -> Result<Self, StoreError> {
        let origin: Option<&str> = column(row, "origin")?;
        Ok(Self {
            id: id_column(row, "id")?,
            name: column(row, "name")?,
            sha256: column(row, "sha256")?,
            size_bytes: count_column(row, "size_bytes")?,
            num_parameters: count_column(row, "num_parameters")?,
            config: json_column(row, "config")?,
            files: json_column(row, "files")?,
            owner: column(row, "owner")?,
            created_at: column(row, "created_at")?,
            origin: origin.map(|_| json_column(row, "origin")).transpose()?,
        })
    }
}
