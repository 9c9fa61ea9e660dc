//! Files without a database row.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rlood_types::storage::StorageKind;

use super::{GcItem, GcRules, MODEL_PART_AGE_MS, ORPHAN_AGE_MS, Removal};
use crate::files::usage::{entries, metadata, size_below};
use crate::files::{DataDir, FilesError};
use crate::id::JobId;
use crate::storage::StorageError;
use crate::{Store, TaskKind};

/// A file or directory, as garbage collection found it before it read the database rows.
#[derive(Debug)]
pub(super) struct Candidate {
    kind: StorageKind,
    path: PathBuf,
    size_bytes: u64,
    /// Time of the last change to the path or to anything below it, Unix time in milliseconds.
    changed_at: i64,
}

/// Lists everything in the data directory that may have a row. Blocking.
pub(super) fn list_candidates(files: &DataDir) -> Result<Vec<Candidate>, FilesError> {
    let root = files.root();
    let mut found: Vec<(StorageKind, PathBuf)> = Vec::new();
    let mut add = |kind, paths: Vec<PathBuf>| found.extend(paths.into_iter().map(|path| (kind, path)));
    add(StorageKind::Datasets, entries(&root.join("datasets"))?);
    add(StorageKind::Adapters, entries(&root.join("adapters"))?);
    add(StorageKind::Exports, entries(&root.join("exports"))?);
    add(StorageKind::InitialAdapters, entries(&root.join("initial"))?);
    add(StorageKind::Staging, entries(&root.join("staging"))?);
    add(StorageKind::Scratch, entries(&root.join("scratch"))?);
    for job in entries(&root.join("checkpoints"))? {
        add(StorageKind::Checkpoints, entries(&job)?);
    }
    for model in entries(&root.join("models"))? {
        let below = entries(&model)?;
        // The layout is ORG--NAME/COMMIT/…, or a model or a file is directly in this directory.
        let has_files = below.iter().any(|path| !path.is_dir());
        add(StorageKind::Models, if below.is_empty() || has_files { vec![model] } else { below });
    }
    let mut seen = Vec::with_capacity(found.len());
    for (kind, path) in found {
        let changed_at = last_change(&path)?;
        let size_bytes = size_below(&path, &mut HashSet::new())?;
        seen.extend(changed_at.map(|changed_at| Candidate { kind, path, size_bytes, changed_at }));
    }
    Ok(seen)
}

/// Returns the files and directories that no database row names, except those for which a running upload, download or backup is
/// about to create a row.
pub(super) async fn without_rows(
    store: &Store,
    files: &DataDir,
    seen: Vec<Candidate>,
    rules: GcRules,
) -> Result<Vec<GcItem>, StorageError> {
    let mut named: HashSet<PathBuf> = HashSet::new();
    let datasets = store.dataset_ids().await?.into_iter();
    named.extend(datasets.flat_map(|id| [files.dataset(id), files.dataset_images(id)]));
    let checkpoints = store.checkpoint_keys().await?.into_iter();
    named.extend(checkpoints.map(|(job, step, attempt)| files.checkpoint_dir(job, step, attempt)));
    named.extend(store.adapter_ids().await?.into_iter().map(|id| files.adapter_dir(id)));
    for export in store.task_list_all(TaskKind::Export).await? {
        named.extend([files.export_dir(&export.id), files.export_unfinished_dir(&export.id)]);
    }
    named.extend(store.warm_start_jobs().await?.into_iter().map(|job| files.initial_of(job)));
    let running: HashSet<JobId> = store.running_jobs().await?.into_iter().collect();
    let models = store.model_sources().await?;
    let kept = linked_from(&models, files.root());
    let mut items = Vec::new();
    for Candidate { kind, path, size_bytes, changed_at } in seen {
        let name = path.strip_prefix(files.root()).unwrap_or(&path).to_string_lossy().into_owned();
        let job = path.file_name().and_then(|name| name.to_str()?.parse::<JobId>().ok());
        let is_needed = match kind {
            StorageKind::Models => {
                let related = |other: &PathBuf| other.starts_with(&path) || path.starts_with(other);
                models.iter().any(related) || kept.iter().any(related)
            }
            // Age alone does not show that an upload was abandoned, because a slow one may change nothing in this directory for a
            // long time.
            StorageKind::Staging => {
                is_locked_backup(&path) || (rules.is_served && job.is_some_and(|job| running.contains(&job)))
            }
            // While a server runs, each of its workers empties its own directory when it starts.
            StorageKind::Scratch => rules.is_served,
            _ => named.contains(&path),
        };
        let age_ms = match kind {
            StorageKind::Models => MODEL_PART_AGE_MS,
            _ if rules.is_served => ORPHAN_AGE_MS,
            _ => 0,
        };
        if is_needed || changed_at > rules.now - age_ms {
            continue;
        }
        let reason = match kind {
            StorageKind::Staging => "these files were left by an upload or a backup that was interrupted",
            StorageKind::Scratch => "these are unpublished files of a worker that has ended",
            StorageKind::Models => "these are downloaded files without a registered model",
            _ => "no row of the database refers to these files",
        };
        items.push(GcItem { kind, name, size_bytes, reason: reason.to_owned(), removal: Some(Removal::Orphan(path)) });
    }
    Ok(items)
}

/// Returns the targets of links in the models' directories that are inside the data directory, because models may share files.
fn linked_from(models: &[PathBuf], root: &Path) -> Vec<PathBuf> {
    let links = models.iter().filter(|dir| dir.starts_with(root)).flat_map(|dir| entries(dir).unwrap_or_default());
    links.filter(|path| path.is_symlink()).filter_map(|path| fs::canonicalize(path).ok()).collect()
}

/// Whether the path belongs to a running backup, which holds its lock.
fn is_locked_backup(path: &Path) -> bool {
    let is_backup = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("backup-"));
    is_backup && File::open(path).is_ok_and(|dir| dir.try_lock().is_err())
}

/// Returns the last time that anything was written, renamed or linked here; `None` = it no longer exists.
fn last_change(path: &Path) -> Result<Option<i64>, FilesError> {
    let Some(found) = metadata(path)? else { return Ok(None) };
    let mut last = found.ctime().saturating_mul(1000) + found.ctime_nsec() / 1_000_000;
    if found.is_dir() {
        for entry in entries(path)? {
            last = last.max(last_change(&entry)?.unwrap_or(0));
        }
    }
    Ok(Some(last))
}
