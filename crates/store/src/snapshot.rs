//! A copy of the database as it is at one moment, made while the server writes.

use std::collections::HashSet;
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use sqlx::{Sqlite, Transaction};

use super::artifacts::CheckpointRow;
use super::{Doing, Store, StoreError, corrupt, id_column};
use crate::id::{CheckpointId, DatasetId};

/// A server's own statements wait for 5 s before they fail.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// For a break of somebody who writes all the time.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

impl Store {
    /// Writes a consistent copy to a file that does not exist yet. `keep` gets every checkpoint that the copy will name, before
    /// the server can remove one: nobody else writes until the copy has begun, some ms.
    pub async fn snapshot_to(&self, path: &Path, keep: &mut impl FnMut(&[CheckpointRow])) -> Result<(), StoreError> {
        let doing = "copy the database";
        // Secrets are in it from the first byte on; an empty file is as good as none.
        super::make_private(path).map_err(|error| StoreError::Open { path: path.to_owned(), source: error.into() })?;
        let name = path.to_str().ok_or("the path is not UTF-8").map_err(corrupt("path of a snapshot"))?;
        let mut pause = self.pause().await;
        let end = Instant::now() + LONGEST_PAUSE;
        keep(&self.checkpoint_all().await?);
        let mut copy = pin!(sqlx::query("VACUUM INTO ?").bind(name).execute(&self.readers));
        loop {
            tokio::select! {
                copied = &mut copy => {
                    copied.doing(doing)?;
                    break;
                }
                () = tokio::time::sleep(Duration::from_millis(1)), if pause.is_some() => {
                    // Bytes of it are of one moment, and all the others will be.
                    let has_begun = std::fs::metadata(path).is_ok_and(|file| file.len() > 0);
                    if has_begun || Instant::now() > end {
                        rollback(pause.take()).await?;
                    }
                }
            }
        }
        rollback(pause).await
    }

    /// While this is open nobody else writes. Not to be had where the data directory is mounted read only, or where a disk
    /// is too slow for the server's writes; the caller then sees what is gone.
    async fn pause(&self) -> Option<Transaction<'static, Sqlite>> {
        // SQLite's own waiting looks ten times a second, and so misses the breaks of a server that writes all the time.
        const BEGIN: &str = "PRAGMA busy_timeout = 0; BEGIN IMMEDIATE; PRAGMA busy_timeout = 10000";
        let end = Instant::now() + LONGEST_WAIT;
        loop {
            match self.writer.begin_with(BEGIN).await {
                Err(error) if is_busy(&error) && Instant::now() < end => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                begun => return begun.ok(),
            }
        }
    }

    /// Every published checkpoint: of jobs that are not over first, newest first of each.
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

    /// The newest checkpoint of each job that is not over: what it goes on from.
    pub async fn checkpoints_needed(&self) -> Result<HashSet<CheckpointId>, StoreError> {
        sqlx::query(
            "SELECT id FROM checkpoints AS one \
             WHERE (SELECT finished_at FROM jobs WHERE id = one.job_id) IS NULL \
               AND step = (SELECT MAX(step) FROM checkpoints WHERE job_id = one.job_id)",
        )
        .fetch_all(&self.readers)
        .await
        .doing("list the checkpoints that jobs go on from")?
        .iter()
        .map(|row| id_column(row, "id"))
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

/// Somebody else writes (SQLITE_BUSY, without the bits that say more).
fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()).and_then(|code| code.parse::<i32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

async fn rollback(pause: Option<Transaction<'static, Sqlite>>) -> Result<(), StoreError> {
    match pause {
        Some(pause) => pause.rollback().await.doing("let others write again"),
        None => Ok(()),
    }
}
