//! Uploads of checkpoints. A file is hashed while it is received, and publication compares that hash with the list, so that
//! no byte is read again.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};

use super::{
    DataDir, FilesError, StagedDone, cannot, compare_bytes, compare_sums, create_private_dir, entries, mismatch,
    remove_tree, sync_dir, verify,
};
use crate::background::spawn_blocking;
use crate::digest::Sha256Digest;
use crate::failpoint::fail_point;
use crate::id::JobId;
use crate::protocol::{FileEntry, check_file_name};

/// The files that this server process received. The record is lost with the process, and so are the files: `staging/` is emptied at
/// start, and directories in `checkpoints/` without a row are removed.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    /// Size and SHA-256 of each checkpoint file in `staging/`, by path.
    received: HashMap<PathBuf, (u64, Sha256Digest)>,
    /// Lists of files of checkpoints that were moved to their final path and have no row yet, by directory.
    placed: HashMap<PathBuf, Vec<FileEntry>>,
}

#[cfg(test)]
impl Uploads {
    pub(super) fn is_empty(&self) -> bool {
        self.received.is_empty() && self.placed.is_empty()
    }
}

impl DataDir {
    /// Moves an uploaded file to the directory where its checkpoint is assembled; an earlier file of the same name is replaced.
    pub async fn checkpoint_place(
        &self,
        uploaded: StagedDone,
        job: JobId,
        step: u64,
        attempt: u64,
        name: &str,
    ) -> Result<(), FilesError> {
        check_file_name(name)?;
        let (data, dir) = (self.clone(), self.staged_checkpoint(job, step, attempt));
        let to = dir.join(name);
        let at = to.clone();
        let placed = spawn_blocking(move || {
            create_private_dir(&dir)?;
            {
                // Both changes are made under one lock, so that of two uploads with one name the record
                // belongs to the remaining file.
                let mut uploads = data.uploads();
                fs::rename(uploaded.path(), &at).map_err(cannot("move a file to", &at))?;
                uploads.received.insert(at, (uploaded.size_bytes, uploaded.sha256));
            }
            uploaded.path.disarm();
            sync_dir(&dir)
        });
        placed.await.unwrap_or_else(|error| Err(cannot("move a file to", &to)(io::Error::other(error))))
    }

    /// Compares the uploaded files of a checkpoint with the list, using the hashes computed while they were received, and moves
    /// them to their final path, durably. Repeating the call is safe. Blocking; does not read files that this server received.
    pub fn checkpoint_commit(
        &self,
        job: JobId,
        step: u64,
        attempt: u64,
        files: &[FileEntry],
    ) -> Result<(), FilesError> {
        let (from, to) = (self.staged_checkpoint(job, step, attempt), self.checkpoint_dir(job, step, attempt));
        let parent = self.checkpoints().join(job.to_string());
        if to.is_dir() {
            let placed = self.uploads().placed.get(&to).is_some_and(|listed| listed == files);
            verify(&to, files, if placed { compare_size } else { compare_bytes })?;
            return sync_dir(&parent);
        }
        let received = |path: &Path| self.uploads().received.get(path).cloned();
        verify(&from, files, |path, file| match received(path) {
            Some((size_bytes, sha256)) => {
                compare_sums(file, size_bytes, sha256)?;
                compare_size(path, file)
            }
            // This process did not receive the file, so its bytes must be read.
            None => compare_bytes(path, file),
        })?;
        sync_dir(&from)?;
        fail_point!("files.verified").map_err(cannot("move a checkpoint to", &to))?;
        create_private_dir(&parent)?;
        sync_dir(&self.checkpoints())?;
        fs::rename(&from, &to).map_err(cannot("move a checkpoint to", &to))?;
        {
            let mut uploads = self.uploads();
            uploads.received.retain(|path, _| !path.starts_with(&from));
            uploads.placed.insert(to.clone(), files.to_vec());
        }
        fail_point!("files.renamed").map_err(cannot("sync", &parent))?;
        sync_dir(&parent)
    }

    /// Forgets a checkpoint's list of files, which its database row now contains.
    pub fn checkpoint_published(&self, job: JobId, step: u64, attempt: u64) {
        self.uploads().placed.remove(&self.checkpoint_dir(job, step, attempt));
    }

    /// Removes unpublished uploads of attempts up to this one. Blocking.
    pub fn staged_remove(&self, job: JobId, up_to_attempt: u64) -> Result<(), FilesError> {
        let dir = self.staging().join(job.to_string());
        if !dir.is_dir() {
            return Ok(());
        }
        for attempt in entries(&dir)? {
            let number = attempt.file_name().and_then(|name| name.to_str()?.parse::<u64>().ok());
            if number.is_some_and(|number| number <= up_to_attempt) {
                self.uploads().received.retain(|path, _| !path.starts_with(&attempt));
                remove_tree(&attempt)?;
            }
        }
        Ok(())
    }

    /// Places a file of an adapter that a worker uploaded for rollout servers. An adapter is removed when four newer ones were
    /// uploaded, or when the attempt ends.
    pub async fn rollout_adapter_place(
        &self,
        uploaded: StagedDone,
        (job, attempt): (JobId, u64),
        adapter: &str,
        name: &str,
    ) -> Result<(), FilesError> {
        let to = self.rollout_adapter_file((job, attempt), adapter, name)?;
        let at = to.clone();
        let placed = spawn_blocking(move || {
            let dir = at.parent().unwrap_or(&at);
            let is_new = !dir.is_dir();
            create_private_dir(dir)?;
            fs::rename(uploaded.path(), &at).map_err(cannot("move a file to", &at))?;
            uploaded.path.disarm();
            if let Some(all) = dir.parent().filter(|_| is_new) {
                remove_oldest(all, dir)?;
            }
            Ok(())
        });
        placed.await.unwrap_or_else(|error| Err(cannot("move a file to", &to)(io::Error::other(error))))
    }

    /// Returns the path of an uploaded adapter's file, which may not exist.
    pub fn rollout_adapter_file(
        &self,
        (job, attempt): (JobId, u64),
        adapter: &str,
        name: &str,
    ) -> Result<PathBuf, FilesError> {
        check_file_name(adapter)?;
        check_file_name(name)?;
        let attempt = self.staging().join(job.to_string()).join(attempt.to_string());
        Ok(attempt.join("rollout-adapters").join(adapter).join(name))
    }

    fn staged_checkpoint(&self, job: JobId, step: u64, attempt: u64) -> PathBuf {
        self.staging().join(job.to_string()).join(attempt.to_string()).join(step.to_string())
    }

    fn uploads(&self) -> MutexGuard<'_, Uploads> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes all but the newest uploaded adapters besides `newest`.
fn remove_oldest(all: &Path, newest: &Path) -> Result<(), FilesError> {
    const KEPT_BESIDES: usize = 3;
    let changed = |dir: &PathBuf| fs::metadata(dir).and_then(|found| found.modified()).ok();
    let mut others = entries(all)?;
    others.retain(|dir| dir != newest);
    others.sort_by_key(|dir| std::cmp::Reverse(changed(dir)));
    others.iter().skip(KEPT_BESIDES).try_for_each(|dir| remove_tree(dir))
}

fn compare_size(path: &Path, file: &FileEntry) -> Result<(), FilesError> {
    let size_bytes = fs::metadata(path).map_err(cannot("inspect", path))?.len();
    if size_bytes == file.size_bytes {
        Ok(())
    } else {
        Err(mismatch(&file.name, &format!("the file has {size_bytes} bytes instead of {}", file.size_bytes)))
    }
}
