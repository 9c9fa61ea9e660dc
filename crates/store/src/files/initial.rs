//! Starting files of jobs: hard links to another job's checkpoint, so that neither its rotation nor the deletion of the other job
//! removes them. Bytes are copied only if the file system does not support hard links.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::copy::copy_hashed;
use super::{DataDir, FilesError, cannot, create_private_dir, entries, remove_tree, sync_dir};
use crate::failpoint::fail_point;
use crate::id::JobId;
use crate::protocol::{FileEntry, check_file_name};

/// Name of the file that lists a job's starting files, in the same directory.
const LIST: &str = "files.json";

impl DataDir {
    /// Links these files of a directory (a checkpoint, or another job's starting files) for a job. Blocking.
    pub fn initial_keep(&self, job: JobId, from: &Path, files: &[FileEntry]) -> Result<(), FilesError> {
        let to = self.initial_dir(job);
        let staged = self.staging().join(format!("initial-{job}"));
        link_files(from, &staged, files)?;
        let list = staged.join(LIST);
        let text = serde_json::to_vec(files).map_err(|error| cannot("write", &list)(error.into()))?;
        fs::write(&list, text).map_err(cannot("write", &list))?;
        fail_point!("files.list_sync")
            .and_then(|()| fs::File::open(&list)?.sync_all())
            .map_err(cannot("sync", &list))?;
        place(&staged, &to)
    }

    /// Links the starting files of another job, if it has any. Blocking.
    pub fn initial_copy(&self, from: JobId, job: JobId) -> Result<(), FilesError> {
        match self.initial_files(from)? {
            Some(files) => self.initial_keep(job, &self.initial_dir(from), &files),
            None => Ok(()),
        }
    }

    /// Returns the starting files of a job; `None` if it starts from the base model. Blocking.
    pub fn initial_files(&self, job: JobId) -> Result<Option<Vec<FileEntry>>, FilesError> {
        let list = self.initial_dir(job).join(LIST);
        let text = match fs::read(&list) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(cannot("read", &list))?,
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| cannot("read", &list)(error.into()))
    }

    /// Returns the path of a starting file; the name may come from a client.
    pub fn initial_file(&self, job: JobId, name: &str) -> Result<PathBuf, FilesError> {
        check_file_name(name)?;
        Ok(self.initial_dir(job).join(name))
    }

    /// Links a published checkpoint as the first one of another job, as if its attempt 0 had written it. Blocking.
    pub fn checkpoint_adopt(&self, from: (JobId, u64, u64), job: JobId, files: &[FileEntry]) -> Result<(), FilesError> {
        let (parent, step, attempt) = from;
        let staged = self.staging().join(format!("adopted-{job}"));
        link_files(&self.checkpoint_dir(parent, step, attempt), &staged, files)?;
        place(&staged, &self.checkpoint_dir(job, step, 0))
    }

    /// Removes the starting files of jobs that no longer exist. Called at start. Blocking.
    pub fn initial_sweep(&self, jobs: &[JobId]) -> Result<(), FilesError> {
        let kept: HashSet<PathBuf> = jobs.iter().map(|job| self.initial_dir(*job)).collect();
        let root = self.root().join("initial");
        if !root.is_dir() {
            return Ok(());
        }
        entries(&root)?.iter().filter(|dir| !kept.contains(*dir)).try_for_each(|dir| remove_tree(dir))
    }

    pub(super) fn initial_dir(&self, job: JobId) -> PathBuf {
        self.root().join("initial").join(job.to_string())
    }
}

/// Links the files into a new directory, or copies them if the file system does not support hard links. Linked files are durable
/// already, because they were published; a copy is synced before this returns.
fn link_files(from: &Path, to: &Path, files: &[FileEntry]) -> Result<(), FilesError> {
    remove_tree(to)?;
    create_private_dir(to)?;
    for file in files {
        check_file_name(&file.name)?;
        let (from, to) = (from.join(&file.name), to.join(&file.name));
        let linked = fail_point!("files.link", &file.name).and_then(|()| fs::hard_link(&from, &to));
        if linked.is_err() {
            copy_hashed(&from, &to)?;
        }
    }
    Ok(())
}

/// Moves a directory to its final path, durably: when this returns, a power failure loses neither the directory nor a name in it.
pub(super) fn place(staged: &Path, to: &Path) -> Result<(), FilesError> {
    sync_dir(staged)?;
    let parent = to.parent().unwrap_or(Path::new("/"));
    create_private_dir(parent)?;
    // The parent directory may be new, so its name must be made durable too.
    sync_dir(parent.parent().unwrap_or(Path::new("/")))?;
    remove_tree(to)?;
    fail_point!("files.place")
        .and_then(|()| fs::rename(staged, to))
        .map_err(cannot("move the initial files of a job to", to))?;
    sync_dir(parent)
}
