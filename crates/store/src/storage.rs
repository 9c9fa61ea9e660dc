//! Storage use by kind and owner: files of the data directory, and rows of the database.

use std::path::PathBuf;

use futures::future::BoxFuture;
use rlood_types::storage::{StorageKind, StorageUse};
use sqlx::sqlite::SqliteRow;

use super::{Doing, Store, StoreError, column, count_column, id_column};
use crate::files::usage::{Owners, Usage};
use crate::files::{DataDir, FilesError, disk_bytes};

/// Reads the owner of the job of each export.
const EXPORT_OWNERS: &str =
    "SELECT tasks.id, jobs.owner FROM tasks JOIN jobs ON jobs.id = tasks.job_id WHERE tasks.kind = 'export'";

/// Why the storage use cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The data directory cannot be read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The database cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The storage use of a server.
#[derive(Debug, Clone, Default)]
pub struct StorageReport {
    /// Storage use of the data directory, by kind and owner.
    pub usage: Usage,
    /// Registered models in other folders, which do not belong to the server, by owner.
    pub elsewhere: Vec<(String, StorageUse)>,
    /// Free space on the disk that can be written, in bytes.
    pub free_bytes: u64,
    /// Total size of the disk, in bytes.
    pub disk_bytes: u64,
}

/// Location and owner of a registered model.
struct ModelPlace {
    source: PathBuf,
    owner: String,
    size_bytes: u64,
}

/// Computes the storage use from all files and the database.
///
/// # Errors
/// Fails if the database or the directory cannot be read.
pub fn report<'a>(store: &'a Store, files: &'a DataDir) -> BoxFuture<'a, Result<StorageReport, StorageError>> {
    Box::pin(async move {
        let models = store.model_places().await?;
        let (inside, outside): (Vec<_>, Vec<_>) =
            models.into_iter().partition(|model| model.source.starts_with(files.root()));
        let owners = Owners {
            jobs: store.owners_by_id("SELECT id, owner FROM jobs").await?.into_iter().collect(),
            datasets: store.owners_by_id("SELECT id, owner FROM datasets").await?.into_iter().collect(),
            adapters: store.owners_by_id("SELECT id, owner FROM adapters").await?.into_iter().collect(),
            exports: store.owners_by_id(EXPORT_OWNERS).await?.into_iter().collect(),
            models: inside.into_iter().map(|model| (model.source, model.owner)).collect(),
        };
        let rows = store.row_usage().await?;
        let mut usage = files.in_background(move |files| files.usage(&owners)).await?;
        // The rows are part of the database file, so their size is subtracted from it.
        let in_rows: u64 = rows.iter().map(|(_, _, used)| used.size_bytes).sum();
        if let Some(database) = usage.get_mut(&(StorageKind::Database, String::new())) {
            database.size_bytes = database.size_bytes.saturating_sub(in_rows);
        }
        for (kind, owner, used) in rows {
            *usage.entry((kind, owner)).or_default() += used;
        }
        let mut elsewhere: Vec<(String, StorageUse)> = Vec::new();
        for ModelPlace { owner, size_bytes, .. } in outside {
            let used = StorageUse { size_bytes, count: 1 };
            match elsewhere.iter_mut().find(|(known, _)| *known == owner) {
                Some((_, sum)) => *sum += used,
                None => elsewhere.push((owner, used)),
            }
        }
        let (disk_bytes, free_bytes) = (disk_bytes(files.root())?, files.free_bytes()?);
        Ok(StorageReport { usage, elsewhere, free_bytes, disk_bytes })
    })
}

impl Store {
    async fn model_places(&self) -> Result<Vec<ModelPlace>, StoreError> {
        let sql = "SELECT source, owner, COALESCE(json_extract(card, '$.size_bytes'), 0) AS size_bytes FROM models";
        let rows = sqlx::query(sql).fetch_all(&self.readers).await.doing("list the directories of models")?;
        let place = |row: &SqliteRow| {
            let source: String = column(row, "source")?;
            Ok(ModelPlace {
                source: PathBuf::from(source),
                owner: column(row, "owner")?,
                size_bytes: count_column(row, "size_bytes")?,
            })
        };
        rows.iter().map(place).collect()
    }

    async fn owners_by_id<T: std::str::FromStr<Err = crate::id::IdError>>(
        &self,
        sql: &'static str,
    ) -> Result<Vec<(T, String)>, StoreError> {
        let rows = sqlx::query(sql).fetch_all(&self.readers).await.doing("list the owners of stored data")?;
        rows.iter().map(|row| Ok((id_column(row, "id")?, column(row, "owner")?))).collect()
    }

    /// Returns samples and journals by owner; `count` is the number of jobs that have some.
    async fn row_usage(&self) -> Result<Vec<(StorageKind, String, StorageUse)>, StoreError> {
        let samples = "SELECT owner, SUM(size_bytes) AS size_bytes, COUNT(*) AS jobs FROM sample_usage \
                       JOIN jobs ON jobs.id = job_id WHERE size_bytes > 0 GROUP BY owner";
        let journals = "SELECT owner, SUM(COALESCE(octet_length(body), 0) + COALESCE(octet_length(answer), 0)) AS size_bytes, \
                        COUNT(DISTINCT job_id) AS jobs FROM journal JOIN jobs ON jobs.id = job_id GROUP BY owner";
        let mut found = Vec::new();
        for (kind, sql) in [(StorageKind::Samples, samples), (StorageKind::Journals, journals)] {
            let rows = sqlx::query(sql).fetch_all(&self.readers).await.doing("compute the storage use of jobs")?;
            for row in &rows {
                let used =
                    StorageUse { size_bytes: count_column(row, "size_bytes")?, count: count_column(row, "jobs")? };
                found.push((kind, column(row, "owner")?, used));
            }
        }
        Ok(found)
    }
}
