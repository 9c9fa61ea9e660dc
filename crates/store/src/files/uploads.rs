//! Checkpoints on their way in: a file is hashed while it is received, and that hash is what publication compares with the
//! list, so that no byte is read again.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};

use super::{
    DataDir, FilesError, StagedDone, cannot, compare_bytes, compare_sums, create_private_dir, entries, mismatch,
    remove_tree, sync_dir, verify,
};
use crate::digest::Sha256Digest;
use crate::failpoint::fail_point;
use crate::id::JobId;
use crate::protocol::{FileEntry, check_file_name};

/// What this server received itself. Nothing of it outlives the process, and neither do the files: `staging/` is emptied at
/// start, and so is what lies in `checkpoints/` without a row.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    /// Size and SHA-256 of each file under `staging/` that belongs to a checkpoint, by its path.
    received: HashMap<PathBuf, (u64, Sha256Digest)>,
    /// The lists of checkpoints that were moved to their place and have no row yet, by their directories.
    placed: HashMap<PathBuf, Vec<FileEntry>>,
}

#[cfg(test)]
impl Uploads {
    pub(super) fn is_empty(&self) -> bool {
        self.received.is_empty() && self.placed.is_empty()
    }
}

impl DataDir {
    /// Puts an uploaded file where its checkpoint is assembled; one of the same name before it is replaced.
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
        let placed = tokio::task::spawn_blocking(move || {
            create_private_dir(&dir)?;
            {
                // Both under one lock: of two uploads of one name the record is of the file that stays.
                let mut uploads = data.uploads();
                fs::rename(uploaded.path(), &at).map_err(cannot("move a file to", &at))?;
                uploads.received.insert(at, (uploaded.size_bytes, uploaded.sha256));
            }
            uploaded.path.keep();
            sync_dir(&dir)
        });
        placed.await.unwrap_or_else(|error| Err(cannot("move a file to", &to)(io::Error::other(error))))
    }

    /// Compares the uploaded files of a checkpoint with the list, by the hashes computed while they were received, and moves
    /// them to their place, durably. Repeating it is harmless. Blocking; reads no file that this server received.
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
            // Not received by this process: its bytes are all that there is to go by.
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

    /// The checkpoint has its row, which holds the list from now on.
    pub fn checkpoint_published(&self, job: JobId, step: u64, attempt: u64) {
        self.uploads().placed.remove(&self.checkpoint_dir(job, step, attempt));
    }

    /// Removes what attempts up to this one uploaded and did not publish. Blocking.
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

    fn staged_checkpoint(&self, job: JobId, step: u64, attempt: u64) -> PathBuf {
        self.staging().join(job.to_string()).join(attempt.to_string()).join(step.to_string())
    }

    fn uploads(&self) -> MutexGuard<'_, Uploads> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn compare_size(path: &Path, file: &FileEntry) -> Result<(), FilesError> {
    let size_bytes = fs::metadata(path).map_err(cannot("look at", path))?.len();
    if size_bytes == file.size_bytes {
        Ok(())
    } else {
        Err(mismatch(&file.name, &format!("{size_bytes} bytes instead of {}", file.size_bytes)))
    }
}
