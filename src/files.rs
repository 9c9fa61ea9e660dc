//! The data directory: write to temp, hash, fsync, rename. The one place that builds paths.
//!
//! ```text
//! rlood.lock                              held by the one server that uses the directory
//! rlood.db                                the database (store.rs)
//! datasets/DATASET.ndjson                 canonical rows
//! checkpoints/JOB/STEP-ATTEMPT/…          published checkpoints
//! staging/…                               whatever is not complete yet; emptied at start
//! ```

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::id::{DatasetId, JobId};
use crate::protocol::FileEntry;

/// What could not be done with a file. Paths are for the log: never show one to a client.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// Another server holds the directory.
    #[error("the data directory {} is in use by another rlood server{}: stop it, or choose another --data-dir", .root.display(), .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    Locked {
        /// The directory.
        root: PathBuf,
        /// The other server, if it could be read.
        pid: Option<u32>,
    },
    /// The operating system refused.
    #[error("could not {doing} {}", .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// More bytes than allowed.
    #[error("more than {limit_bytes} bytes")]
    TooLarge {
        /// The limit.
        limit_bytes: u64,
    },
    /// A name that is not a plain file name.
    #[error("'{name}' is not a file name: 1 to 100 letters, digits, '.', '_' or '-', not beginning with '.'")]
    BadName {
        /// As given.
        name: String,
    },
    /// Uploaded bytes are not what the list of files says.
    #[error("{name}: {what}")]
    Mismatch {
        /// The file.
        name: String,
        /// What differs.
        what: String,
    },
}

/// The server's directory, locked for this process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct DataDir {
    root: Arc<PathBuf>,
    _lock: Arc<File>,
}

/// A file being written under `staging/`: hashed as it grows, bounded, removed when dropped unfinished.
#[derive(Debug)]
pub struct StagedFile {
    path: PathBuf,
}

/// A complete file under `staging/`, removed when dropped before [`StagedDone::publish`].
#[derive(Debug)]
pub struct StagedDone {
    /// Where it lies.
    pub path: PathBuf,
    /// Bytes.
    pub size_bytes: u64,
    /// Lower-case hex.
    pub sha256: String,
}

impl DataDir {
    /// Creates the directory if need be and locks it. Everything that a former server left unfinished is removed.
    pub fn open(root: &Path) -> Result<DataDir, FilesError> {
        let _ = root;
        todo!()
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The database file.
    pub fn database(&self) -> PathBuf {
        todo!()
    }

    /// A dataset's rows.
    pub fn dataset(&self, id: DatasetId) -> PathBuf {
        let _ = id;
        todo!()
    }

    /// Where a published checkpoint lies.
    pub fn checkpoint_dir(&self, job: JobId, step: u64, attempt: u64) -> PathBuf {
        let _ = (job, step, attempt);
        todo!()
    }

    /// Bytes that can still be written to the directory's file system.
    pub fn free_bytes(&self) -> Result<u64, FilesError> {
        todo!()
    }

    /// A new file under `staging/`; writing more than `limit_bytes` is `TooLarge`.
    pub async fn stage(&self, limit_bytes: u64) -> Result<StagedFile, FilesError> {
        let _ = limit_bytes;
        todo!()
    }

    /// A new file of a checkpoint that is being uploaded.
    pub async fn stage_checkpoint_file(
        &self,
        job: JobId,
        step: u64,
        attempt: u64,
        name: &str,
        limit_bytes: u64,
    ) -> Result<StagedFile, FilesError> {
        let _ = (job, step, attempt, name, limit_bytes);
        todo!()
    }

    /// Verifies the uploaded files of a checkpoint against the list and moves them to their place, durably. Repeating it is
    /// harmless. Blocking.
    pub fn checkpoint_commit(
        &self,
        job: JobId,
        step: u64,
        attempt: u64,
        files: &[FileEntry],
    ) -> Result<(), FilesError> {
        let _ = (job, step, attempt, files);
        todo!()
    }

    /// Compares a published checkpoint's files with their sizes and hashes. Blocking.
    pub fn checkpoint_verify(
        &self,
        job: JobId,
        step: u64,
        attempt: u64,
        files: &[FileEntry],
    ) -> Result<(), FilesError> {
        let _ = (job, step, attempt, files);
        todo!()
    }

    /// Removes a checkpoint's directory. Blocking.
    pub fn checkpoint_remove(&self, job: JobId, step: u64, attempt: u64) -> Result<(), FilesError> {
        let _ = (job, step, attempt);
        todo!()
    }

    /// Removes everything of a job. Blocking.
    pub fn job_remove(&self, job: JobId) -> Result<(), FilesError> {
        let _ = job;
        todo!()
    }

    /// Removes a dataset's file. Blocking.
    pub fn dataset_remove(&self, id: DatasetId) -> Result<(), FilesError> {
        let _ = id;
        todo!()
    }

    /// At start: removes checkpoint directories and dataset files that no row names. Blocking.
    pub fn sweep(&self, checkpoints: &[(JobId, u64, u64)], datasets: &[DatasetId]) -> Result<(), FilesError> {
        let _ = (checkpoints, datasets);
        todo!()
    }
}

impl StagedFile {
    /// Appends.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), FilesError> {
        let _ = (bytes, &self.path);
        todo!()
    }

    /// Flushes to the disk.
    pub async fn finish(self) -> Result<StagedDone, FilesError> {
        todo!()
    }
}

impl StagedDone {
    /// Renames it to its place, durably.
    pub async fn publish(self, to: &Path) -> Result<(), FilesError> {
        let _ = to;
        todo!()
    }
}

/// Accepts a plain file name: `[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}`.
pub fn check_name(name: &str) -> Result<(), FilesError> {
    let _ = name;
    todo!()
}

/// Size and SHA-256 (lower-case hex) of a file. Blocking.
pub fn hash_file(path: &Path) -> Result<(u64, String), FilesError> {
    let _ = path;
    todo!()
}

/// Makes the entries of a directory durable. Blocking.
pub fn sync_dir(path: &Path) -> Result<(), FilesError> {
    let _ = path;
    todo!()
}
