//! Garbage collection: finds, lists and removes what is no longer needed. Works while a server is running.
//!
//! Files are examined before rows are read, so a file that gets a row in the meantime is not missed. While a server is running, a
//! file without a row must also be old, because files are written before rows. An object with a row is removed as an API call would
//! remove it: the row first, unless something needs the object by then.

mod orphans;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use futures::future::BoxFuture;
use rlood_types::storage::StorageKind;
use sqlx::sqlite::SqliteRow;

use super::storage::StorageError;
use super::{Doing, Store, StoreError, column, count_column, id_column};
use crate::files::DataDir;
use crate::files::copy::remove_tree;
use crate::files::usage::size_below;
use crate::id::{DatasetId, JobId};

/// Minimum age of a file without a row before it is removed while a server is running, in milliseconds. Without a server, such
/// files are removed immediately.
const ORPHAN_AGE_MS: i64 = 3_600_000;
/// Time for which partial downloads of an unregistered model are kept, in milliseconds, because a restarted
/// download continues from them.
const MODEL_PART_AGE_MS: i64 = 86_400_000;

/// Rules about what may be removed.
#[derive(Debug, Clone, Copy)]
pub struct GcRules {
    /// Current time, Unix time in milliseconds.
    pub now: i64,
    /// Whether a server is running on the directory.
    pub is_served: bool,
    /// Datasets that no job has used for this long are removed, in milliseconds; `None` = they are kept.
    pub datasets_ms: Option<i64>,
    /// Downloaded models that no job has used for this long are removed, in milliseconds; `None` = they are kept.
    pub models_ms: Option<i64>,
    /// Checkpoints of jobs that ended this long ago are removed, in milliseconds; `None` = they are kept.
    pub checkpoints_ms: Option<i64>,
}

/// An object that garbage collection found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcItem {
    /// Kind of stored data.
    pub kind: StorageKind,
    /// Display name of the object.
    pub name: String,
    /// Size of the data, in bytes.
    pub size_bytes: u64,
    /// Why garbage collection removes the object, or why it is kept.
    pub reason: String,
    /// How to remove the object; `None` = it is pinned and stays.
    pub removal: Option<Removal>,
}

/// How an object is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removal {
    /// A file or directory without a database row.
    Orphan(PathBuf),
    /// The file and the database row of a dataset.
    Dataset(DatasetId),
    /// A registered model, and its directory, which stays while another model uses it.
    Model(String, PathBuf),
    /// A published checkpoint, by job, step and attempt.
    Checkpoint(JobId, u64, u64),
}

/// A dataset or model, and the jobs that use it.
struct InUse {
    id: String,
    name: String,
    source: String,
    size_bytes: u64,
    /// Number of jobs that are queued, running or paused.
    live: u64,
    /// Number of ended jobs whose adapters need the model.
    adapters: u64,
    /// Time of creation, or of the end of the last job that used it, Unix time in milliseconds.
    used_at: i64,
}

/// Lists what can be removed and what is pinned; removes nothing.
///
/// # Errors
/// Fails if the database or the directory cannot be read.
pub async fn plan(store: &Store, files: &DataDir, rules: GcRules) -> Result<Vec<GcItem>, StorageError> {
    let seen = files.in_background(orphans::list_candidates).await?;
    let mut items = orphans::without_rows(store, files, seen, rules).await?;
    items.extend(unused(store, files, rules).await?);
    if let Some(keep_ms) = rules.checkpoints_ms {
        for (job, step, attempt, size_bytes) in store.checkpoints_finished_before(rules.now - keep_ms).await? {
            items.push(GcItem {
                kind: StorageKind::Checkpoints,
                name: format!("{job} step {step}"),
                size_bytes,
                reason: "its job ended longer ago than --retain-checkpoints".to_owned(),
                removal: Some(Removal::Checkpoint(job, step, attempt)),
            });
        }
    }
    Ok(items)
}

/// Returns datasets and downloaded models that are pinned, or that no job has used for longer than the rules allow.
///
/// # Errors
/// Fails if the database or the directory cannot be read.
pub fn unused<'a>(
    store: &'a Store,
    files: &'a DataDir,
    rules: GcRules,
) -> BoxFuture<'a, Result<Vec<GcItem>, StorageError>> {
    Box::pin(async move {
        let mut items = Vec::new();
        for InUse { id, name, size_bytes, live, used_at, .. } in store.datasets_in_use().await? {
            let removal = id.parse().ok().map(Removal::Dataset);
            let name = if name.is_empty() { id } else { format!("{id} {name}") };
            let found = Found { kind: StorageKind::Datasets, name, size_bytes, live, adapters: 0, used_at };
            items.extend(found.judge(rules.now, rules.datasets_ms, removal));
        }
        // Models in other folders do not belong to the server.
        let folder = files.root().join("models");
        let (mut counted, mut known) = (HashSet::new(), HashSet::new());
        for InUse { id, source, live, adapters, used_at, .. } in store.models_in_use(&folder).await? {
            let (dir, at) = (PathBuf::from(&source), PathBuf::from(&source));
            // A directory of several models counts once, and so does a file that several directories share by hard links.
            let size_bytes = match known.insert(source) {
                true => {
                    let (size_bytes, counted_too) = files
                        .in_background(move |_| size_below(&at, &mut counted).map(|size_bytes| (size_bytes, counted)))
                        .await?;
                    counted = counted_too;
                    size_bytes
                }
                false => 0,
            };
            let removal = Some(Removal::Model(id.clone(), dir));
            let found = Found { kind: StorageKind::Models, name: id, size_bytes, live, adapters, used_at };
            items.extend(found.judge(rules.now, rules.models_ms, removal));
        }
        Ok(items)
    })
}

/// An object with a database row, and the jobs that use it.
struct Found {
    kind: StorageKind,
    name: String,
    size_bytes: u64,
    live: u64,
    adapters: u64,
    used_at: i64,
}

impl Found {
    /// Decides whether garbage collection removes an object or lists it as pinned; `None` = neither, because the object
    /// is not old enough.
    fn judge(self, now: i64, keep_ms: Option<i64>, removal: Option<Removal>) -> Option<GcItem> {
        let Found { kind, name, size_bytes, live, adapters, used_at } = self;
        let jobs = |number: u64| if number == 1 { "1 job".to_owned() } else { format!("{number} jobs") };
        let (reason, removal) = match keep_ms {
            _ if live > 0 => (format!("it is in use by {} (queued, running or paused)", jobs(live)), None),
            _ if adapters > 0 => (format!("the adapters that {} trained need this model", jobs(adapters)), None),
            Some(keep_ms) if used_at < now - keep_ms => {
                (format!("no job has used it for longer than --retain-{kind}"), removal)
            }
            Some(_) | None => return None,
        };
        Some(GcItem { kind, name, size_bytes, reason, removal })
    }
}

/// Removes one object; false = something needs it by now, or it no longer exists.
///
/// # Errors
/// Fails if the database or the directory cannot be changed.
pub fn remove<'a>(
    store: &'a Store,
    files: &'a DataDir,
    removal: &'a Removal,
) -> BoxFuture<'a, Result<bool, StorageError>> {
    Box::pin(async move {
        match removal {
            Removal::Orphan(path) => {
                let path = path.clone();
                files.in_background(move |_| remove_tree(&path)).await?;
                Ok(true)
            }
            Removal::Dataset(id) => {
                let id = *id;
                if !is_done(store.dataset_delete(id).await)? {
                    return Ok(false);
                }
                files.in_background(move |files| files.dataset_remove(id)).await?;
                Ok(true)
            }
            Removal::Model(id, dir) => {
                if !is_done(store.model_delete(id).await)? {
                    return Ok(false);
                }
                let dir = dir.clone();
                if !store.model_source_is_used(&dir.to_string_lossy()).await? {
                    files.in_background(move |_| remove_tree(&dir)).await?;
                }
                Ok(true)
            }
            Removal::Checkpoint(job, step, attempt) => {
                let (job, step, attempt) = (*job, *step, *attempt);
                if !store.finished_checkpoint_remove(job, step, attempt).await? {
                    return Ok(false);
                }
                files.in_background(move |files| files.checkpoint_remove(job, step, attempt)).await?;
                Ok(true)
            }
        }
    })
}

fn is_done(deleted: Result<(), StoreError>) -> Result<bool, StoreError> {
    match deleted {
        Ok(()) => Ok(true),
        Err(StoreError::InUse { .. } | StoreError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

impl InUse {
    fn read(row: &SqliteRow) -> Result<Self, StoreError> {
        Ok(InUse {
            id: column(row, "id")?,
            name: column(row, "name")?,
            source: column(row, "source")?,
            size_bytes: count_column(row, "size_bytes")?,
            live: count_column(row, "live")?,
            adapters: count_column(row, "adapters")?,
            used_at: column(row, "used_at")?,
        })
    }
}

impl Store {
    /// Returns every dataset with the jobs that use it.
    async fn datasets_in_use(&self) -> Result<Vec<InUse>, StoreError> {
        let sql = "SELECT datasets.id, COALESCE(datasets.name, '') AS name, '' AS source, datasets.size_bytes, 0 AS adapters, \
             COUNT(CASE WHEN jobs.state IN ('queued', 'running', 'paused') THEN 1 END) AS live, \
             MAX(datasets.created_at, COALESCE(MAX(jobs.finished_at), 0)) AS used_at \
             FROM datasets LEFT JOIN job_datasets ON job_datasets.dataset_id = datasets.id \
             LEFT JOIN jobs ON jobs.id = job_datasets.job_id GROUP BY datasets.id ORDER BY datasets.created_at";
        let rows = sqlx::query(sql).fetch_all(&self.readers).await.doing("find datasets that jobs use")?;
        rows.iter().map(InUse::read).collect()
    }

    /// Returns every registered model below a folder with what uses it, or another model in the same directory: as a job's model, or
    /// as one of its reward models.
    async fn models_in_use(&self, folder: &Path) -> Result<Vec<InUse>, StoreError> {
        let sql = "SELECT models.id, '' AS name, models.source, 0 AS size_bytes, \
             COUNT(DISTINCT CASE WHEN jobs.state IN ('queued', 'running', 'paused') THEN jobs.id END) AS live, \
             COUNT(DISTINCT CASE WHEN jobs.model = here.id AND EXISTS (SELECT 1 FROM checkpoints WHERE job_id = jobs.id) \
             THEN jobs.id END) AS adapters, MAX(MAX(here.created_at), COALESCE(MAX(jobs.finished_at), 0)) AS used_at \
             FROM models JOIN models AS here ON here.source = models.source LEFT JOIN jobs ON jobs.model = here.id \
             OR EXISTS (SELECT 1 FROM json_each(jobs.plan, '$.reward_models') WHERE key = here.id) \
             WHERE substr(models.source, 1, length(?1)) = ?1 GROUP BY models.id ORDER BY models.created_at";
        let folder = format!("{}/", folder.display());
        let rows = sqlx::query(sql).bind(folder).fetch_all(&self.readers).await;
        rows.doing("find models that jobs use")?.iter().map(InUse::read).collect()
    }

    /// Returns job, step, attempt and size in bytes of each unpinned checkpoint of jobs that finished before this time.
    async fn checkpoints_finished_before(&self, before: i64) -> Result<Vec<(JobId, u64, u64, u64)>, StoreError> {
        let sql = "SELECT job_id, checkpoints.step, checkpoints.attempt, \
                   (SELECT COALESCE(SUM(value ->> '$.size_bytes'), 0) FROM json_each(files)) AS size_bytes \
                   FROM checkpoints JOIN jobs ON jobs.id = job_id WHERE finished_at < ? AND pinned = 0 \
                   ORDER BY job_id, checkpoints.step";
        let rows = sqlx::query(sql).bind(before).fetch_all(&self.readers).await.doing("list old checkpoints")?;
        let read = |row| {
            Ok((
                id_column(row, "job_id")?,
                count_column(row, "step")?,
                count_column(row, "attempt")?,
                count_column(row, "size_bytes")?,
            ))
        };
        rows.iter().map(read).collect()
    }

    /// Deletes the row of a checkpoint of an ended job, unless it has been pinned; returns whether it was deleted.
    async fn finished_checkpoint_remove(&self, job: JobId, step: u64, attempt: u64) -> Result<bool, StoreError> {
        let sql = "DELETE FROM checkpoints WHERE job_id = ? AND step = ? AND attempt = ? AND pinned = 0 \
                   AND EXISTS (SELECT 1 FROM jobs WHERE id = job_id AND finished_at IS NOT NULL)";
        let done = sqlx::query(sql)
            .bind(job.to_string())
            .bind(super::int(step))
            .bind(super::int(attempt))
            .execute(&self.writer)
            .await
            .doing("remove an old checkpoint")?;
        Ok(done.rows_affected() > 0)
    }

    /// Returns jobs for which a worker may be uploading.
    async fn running_jobs(&self) -> Result<Vec<JobId>, StoreError> {
        let rows = sqlx::query("SELECT id FROM jobs WHERE state = 'running'").fetch_all(&self.readers).await;
        rows.doing("list running jobs")?.iter().map(|row| id_column(row, "id")).collect()
    }

    /// Returns the directories of all registered models.
    async fn model_sources(&self) -> Result<Vec<PathBuf>, StoreError> {
        let sources: Vec<String> =
            sqlx::query_scalar("SELECT source FROM models").fetch_all(&self.readers).await.doing("list models")?;
        Ok(sources.into_iter().map(PathBuf::from).collect())
    }
}
