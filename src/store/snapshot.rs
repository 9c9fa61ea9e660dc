//! A copy of the database as it is at one moment, made while the server writes.

use std::path::Path;

use super::artifacts::CheckpointRow;
use super::{Doing, Store, StoreError, corrupt};
use crate::id::{CheckpointId, DatasetId};

impl Store {
    /// Writes a consistent copy to a file that does not exist yet. Nobody waits for it.
    pub async fn snapshot_to(&self, path: &Path) -> Result<(), StoreError> {
        let path = path.to_str().ok_or("the path is not UTF-8").map_err(corrupt("path of a snapshot"))?;
        sqlx::query("VACUUM INTO ?").bind(path).execute(&self.readers).await.doing("copy the database")?;
        Ok(())
    }

    /// Every published checkpoint.
    pub async fn checkpoint_all(&self) -> Result<Vec<CheckpointRow>, StoreError> {
        sqlx::query("SELECT * FROM checkpoints ORDER BY job_id, step DESC")
            .fetch_all(&self.readers)
            .await
            .doing("list all checkpoints")?
            .iter()
            .map(CheckpointRow::read)
            .collect()
    }

    /// Forgets a checkpoint whose files are gone.
    pub async fn checkpoint_forget(&self, id: CheckpointId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM checkpoints WHERE id = ?")
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("forget a checkpoint")?;
        Ok(())
    }

    /// Forgets a dataset whose file is gone.
    pub async fn dataset_forget(&self, id: DatasetId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM datasets WHERE id = ?")
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("forget a dataset")?;
        Ok(())
    }

    /// Whether the database's pages, indexes and references hold together; what does not is the error's text.
    pub async fn check_integrity(&self) -> Result<(), StoreError> {
        let doing = "check the database";
        let found: Vec<String> =
            sqlx::query_scalar("PRAGMA integrity_check(5)").fetch_all(&self.readers).await.doing(doing)?;
        if found != ["ok"] {
            return Err(corrupt("database")(found.join("; ")));
        }
        let dangling = sqlx::query("PRAGMA foreign_key_check").fetch_all(&self.readers).await.doing(doing)?;
        if !dangling.is_empty() {
            return Err(corrupt("database")(format!("{} rows refer to rows that are not there", dangling.len())));
        }
        Ok(())
    }
}
