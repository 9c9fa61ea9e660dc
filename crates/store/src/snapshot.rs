//! A consistent copy of the database, made while the server writes.

use std::collections::HashSet;
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use sqlx::{Sqlite, Transaction};

use super::artifacts::CheckpointRow;
use super::{Doing, Store, StoreError, corrupt, id_column};
use crate::id::{CheckpointId, DatasetId};

/// Maximum time that writes are paused. The server's own statements wait for 5 s before they fail.
const MAX_WRITE_PAUSE: Duration = Duration::from_secs(2);
/// Maximum time to wait for a moment without another writer.
const MAX_WAIT: Duration = Duration::from_secs(30);

impl Store {
    /// Writes a consistent copy to a file that does not exist yet. `keep` receives every checkpoint that the copy will name before
    /// the server can remove one. Other writes are paused for some milliseconds until the copy has begun.
    pub async fn snapshot_to(&self, path: &Path, keep: &mut impl FnMut(&[CheckpointRow])) -> Result<(), StoreError> {
        let doing = "copy the database into a backup";
        // The file contains secrets from the first byte on. SQLite treats an empty file like a missing one.
        super::make_private(path).map_err(|error| StoreError::Open { path: path.to_owned(), source: error.into() })?;
        let name = path
            .to_str()
            .ok_or("the path of the database's copy is not UTF-8")
            .map_err(corrupt("path of a snapshot"))?;
        let mut pause = self.pause_writes().await;
        let end = Instant::now() + MAX_WRITE_PAUSE;
        keep(&self.checkpoint_all().await?);
        let mut copy = pin!(sqlx::query("VACUUM INTO ?").bind(name).execute(&self.readers));
        loop {
            tokio::select! {
                copied = &mut copy => {
                    copied.doing(doing)?;
                    break;
                }
                () = tokio::time::sleep(Duration::from_millis(1)), if pause.is_some() => {
                    // Once the copy's first bytes are written, SQLite has fixed the state of the database that it copies.
                    let has_begun = std::fs::metadata(path).is_ok_and(|file| file.len() > 0);
                    if has_begun || Instant::now() > end {
                        rollback(pause.take()).await?;
                    }
                }
            }
        }
        rollback(pause).await
    }

    /// Blocks other writers while the returned transaction is open. `None` if the data directory is mounted read-only, or the disk
    /// is too slow for the server's writes; the caller then checks which checkpoints lost their files during the copy.
    async fn pause_writes(&self) -> Option<Transaction<'static, Sqlite>> {
        // SQLite's own waiting polls ten times a second, and so misses the gaps of a server that writes continuously.
        const BEGIN: &str = "PRAGMA busy_timeout = 0; BEGIN IMMEDIATE; PRAGMA busy_timeout = 10000";
        let end = Instant::now() + MAX_WAIT;
        loop {
            match self.writer.begin_with(BEGIN).await {
                Err(error) if is_busy(&error) && Instant::now() < end => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                begun => return begun.ok(),
            }
        }
    }

    /// Lists every published checkpoint: of jobs that have not ended first, newest first within each job.
    pub async fn checkpoint_all(&self) -> Result<Vec<CheckpointRow>, StoreError> {
        sqlx::query(
            "SELECT * FROM checkpoints \
             ORDER BY (SELECT finished_at FROM jobs WHERE id = job_id) IS NOT NULL, job_id, step DESC",
        )
        .fetch_all(&self.readers)
        .await
        .doing("list all checkpoints")?
        .iter()
        .map(CheckpointRow::read)
        .collect()
    }

    /// Returns the newest checkpoint of each job that has not ended, from which the job resumes.
    pub async fn checkpoints_needed(&self) -> Result<HashSet<CheckpointId>, StoreError> {
        sqlx::query(
            "SELECT id FROM checkpoints AS one \
             WHERE (SELECT finished_at FROM jobs WHERE id = one.job_id) IS NULL \
               AND step = (SELECT MAX(step) FROM checkpoints WHERE job_id = one.job_id)",
        )
        .fetch_all(&self.readers)
        .await
        .doing("list the checkpoints that jobs resume from")?
        .iter()
        .map(|row| id_column(row, "id"))
        .collect()
    }

    /// Deletes the row of a checkpoint whose files are gone.
    pub async fn checkpoint_forget(&self, id: CheckpointId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM checkpoints WHERE id = ?")
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("delete the row of a checkpoint")?;
        Ok(())
    }

    /// Deletes the row of a dataset whose file is gone.
    pub async fn dataset_forget(&self, id: DatasetId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM datasets WHERE id = ?")
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("delete the row of a dataset")?;
        Ok(())
    }

    /// Checks the database's pages, indexes and references; the error describes what is inconsistent.
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

/// Whether another connection writes (SQLITE_BUSY, ignoring the extended bits).
fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()).and_then(|code| code.parse::<i32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

async fn rollback(pause: Option<Transaction<'static, Sqlite>>) -> Result<(), StoreError> {
    match pause {
        Some(pause) => pause.rollback().await.doing("let other writers use the database again"),
        None => Ok(()),
    }
}
