//! Storage use of the data directory by kind and owner. Reads the metadata of every file, but not the content.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rlood_types::storage::{StorageKind, StorageUse};

use super::{DataDir, FilesError, cannot};
use crate::id::{AdapterId, DatasetId, ExportId, JobId};

/// Owners of the objects that files belong to.
#[derive(Debug, Default)]
pub struct Owners {
    /// Owner of each job.
    pub jobs: HashMap<JobId, String>,
    /// Owner of each dataset.
    pub datasets: HashMap<DatasetId, String>,
    /// Owner of each adapter.
    pub adapters: HashMap<AdapterId, String>,
    /// Owner of the job of each export.
    pub exports: HashMap<ExportId, String>,
    /// Owners by the directory of a model.
    pub models: Vec<(PathBuf, String)>,
}

/// Storage use by kind and owner; an empty owner is the operator.
pub type Usage = BTreeMap<(StorageKind, String), StorageUse>;

/// Files with several hard links that have been counted, as (device, inode).
type Counted = HashSet<(u64, u64)>;

impl DataDir {
    /// Computes the storage use of the directory. A file with several hard links counts once, preferably as
    /// part of a checkpoint or of a model. Blocking.
    pub fn usage(&self, owners: &Owners) -> Result<Usage, FilesError> {
        let mut walk = Walk { owners, usage: Usage::new(), counted: Counted::new() };
        let mut names = entries(self.root())?;
        // Checkpoints are counted before the hard links to their files, which then count nothing. So are the files of models before
        // their names among the partial downloads.
        let rank = |path: &PathBuf| match name_of(path).as_str() {
            "checkpoints" => 0,
            "initial" => 1,
            "models" => 2,
            _ => 3,
        };
        names.sort_by_key(|path| (rank(path), path.clone()));
        for path in names {
            walk.top(&path)?;
        }
        Ok(walk.usage)
    }
}

struct Walk<'a> {
    owners: &'a Owners,
    usage: Usage,
    counted: Counted,
}

impl Walk<'_> {
    fn top(&mut self, path: &Path) -> Result<(), FilesError> {
        let name = name_of(path);
        match name.as_str() {
            "checkpoints" => {
                for job in entries(path)? {
                    for checkpoint in entries(&job)? {
                        self.one(StorageKind::Checkpoints, self.owner_of_job(&job), &checkpoint)?;
                    }
                }
            }
            "initial" => self.each(path, |walk, job| (StorageKind::InitialAdapters, walk.owner_of_job(job)))?,
            "datasets" => self.each(path, |walk, file| {
                let id = file.file_stem().and_then(|stem| stem.to_str()?.parse::<DatasetId>().ok());
                let owner = id.and_then(|id| walk.owners.datasets.get(&id).cloned());
                (StorageKind::Datasets, owner.unwrap_or_default())
            })?,
            "adapters" => self.each(path, |walk, dir| {
                let id = name_of(dir).parse::<AdapterId>().ok();
                let owner = id.and_then(|id| walk.owners.adapters.get(&id).cloned());
                (StorageKind::Adapters, owner.unwrap_or_default())
            })?,
            "exports" => self.each(path, |walk, dir| {
                // The directory of an unfinished export has a suffix after the export's id.
                let id = dir.file_stem().and_then(|stem| stem.to_str()?.parse::<ExportId>().ok());
                let owner = id.and_then(|id| walk.owners.exports.get(&id).cloned());
                (StorageKind::Exports, owner.unwrap_or_default())
            })?,
            "staging" => self.each(path, |walk, entry| (StorageKind::Staging, walk.owner_of_job(entry)))?,
            // Partial downloads from a hub, which are kept for a day.
            "hub" => {
                for folder in entries(path)? {
                    let has_holes = name_of(&folder) == "outlines";
                    for entry in entries(&folder)? {
                        let size_bytes =
                            if has_holes { allocated_below(&entry)? } else { size_below(&entry, &mut self.counted)? };
                        self.add(StorageKind::Staging, String::new(), size_bytes);
                    }
                }
            }
            "scratch" => self.each(path, |_, _| (StorageKind::Scratch, String::new()))?,
            "models" => {
                for model in entries(path)? {
                    let versions = entries(&model)?;
                    match versions.is_empty() {
                        // `model` is a file, or a model without a directory per version.
                        true => self.one(StorageKind::Models, self.owner_of_model(&model), &model)?,
                        false => {
                            for version in versions {
                                self.one(StorageKind::Models, self.owner_of_model(&version), &version)?;
                            }
                        }
                    }
                }
            }
            _ if name.starts_with("rlood.db") => self.one(StorageKind::Database, String::new(), path)?,
            _ if self.owners.models.iter().any(|(dir, _)| dir.starts_with(path)) => {
                self.one(StorageKind::Models, self.owner_of_model(path), path)?;
            }
            _ => self.one(StorageKind::Other, String::new(), path)?,
        }
        Ok(())
    }

    fn each(&mut self, dir: &Path, of: impl Fn(&Self, &Path) -> (StorageKind, String)) -> Result<(), FilesError> {
        for path in entries(dir)? {
            let (kind, owner) = of(self, &path);
            self.one(kind, owner, &path)?;
        }
        Ok(())
    }

    /// Adds the size of one path and of everything below it to the usage of its owner.
    fn one(&mut self, kind: StorageKind, owner: String, path: &Path) -> Result<(), FilesError> {
        let size_bytes = size_below(path, &mut self.counted)?;
        self.add(kind, owner, size_bytes);
        Ok(())
    }

    fn add(&mut self, kind: StorageKind, owner: String, size_bytes: u64) {
        *self.usage.entry((kind, owner)).or_default() += StorageUse { size_bytes, count: 1 };
    }

    fn owner_of_job(&self, path: &Path) -> String {
        let job = name_of(path).parse::<JobId>().ok();
        job.and_then(|job| self.owners.jobs.get(&job).cloned()).unwrap_or_default()
    }

    /// Returns the owner of a model at or below this path.
    fn owner_of_model(&self, path: &Path) -> String {
        let found = self.owners.models.iter().find(|(dir, _)| dir.starts_with(path) || path.starts_with(dir));
        found.map(|(_, owner)| owner.clone()).unwrap_or_default()
    }
}

/// Returns the size in bytes of a file, or of all files below a directory; links are not followed. Files that disappear in the
/// meantime are not counted.
pub(crate) fn size_below(path: &Path, counted: &mut HashSet<(u64, u64)>) -> Result<u64, FilesError> {
    let Some(found) = metadata(path)? else { return Ok(0) };
    if !found.is_dir() {
        let is_new = found.nlink() < 2 || counted.insert((found.dev(), found.ino()));
        return Ok(if is_new { found.len() } else { 0 });
    }
    entries(path)?.iter().map(|entry| size_below(entry, counted)).sum()
}

/// Returns the allocated size of files with holes, at most their size in bytes.
fn allocated_below(path: &Path) -> Result<u64, FilesError> {
    match metadata(path)? {
        None => Ok(0),
        Some(found) if found.is_dir() => entries(path)?.iter().map(|entry| allocated_below(entry)).sum(),
        // Blocks are 512 bytes, whatever the file system's block size (stat(2)).
        Some(found) => Ok(found.len().min(found.blocks() * 512)),
    }
}

/// Returns the metadata of a path; `None` = it no longer exists.
pub(crate) fn metadata(path: &Path) -> Result<Option<Metadata>, FilesError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some).map_err(cannot("inspect", path)),
    }
}

/// Returns the entries of a directory; none if it does not exist.
pub(crate) fn entries(dir: &Path) -> Result<Vec<PathBuf>, FilesError> {
    match metadata(dir)? {
        Some(found) if found.is_dir() => {}
        _ => return Ok(Vec::new()),
    }
    match super::entries(dir) {
        Err(FilesError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        found => found,
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
