//! The data directory: files are written to a temporary path, hashed, synced and renamed. Only this module builds paths.
//!
//! ```text
//! rlood.lock                              locked by the server that uses the directory
//! rlood.db                                the database (store.rs)
//! datasets/DATASET.ndjson                 canonical rows
//! datasets/DATASET.images/SHA256          the images of the rows, if they have any
//! adapters/ADAPTER/FILE                   imported PEFT adapters
//! checkpoints/JOB/STEP-ATTEMPT/…          published checkpoints; attempt 0 = copied by a fork
//! initial/JOB/…                           starting files of a job with a warm start
//! models/…                                models that the server downloaded
//! staging/…                               incomplete files, links of a backup; emptied at start
//! scratch/…                               unpublished files of the server's own workers; each empties its directory at start
//! ```
//!
//! This file is longer than others because no path of the directory is built anywhere else.

mod adapters;
pub mod copy;
mod exports;
mod initial;
pub mod pinned;
mod uploads;
pub mod usage;

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use crate::background::spawn_blocking;
use crate::digest::Sha256Digest;
use crate::failpoint::{fail_point, pace};
use crate::id::{DatasetId, JobId};
use crate::protocol::{BadFileName, FileEntry, check_file_name};
use uploads::Uploads;

const LOCK: &str = "rlood.lock";

pub use adapters::StagedDir;

/// A failed operation on a file. The paths are for the log and must never be shown to a client.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// Another server uses the directory.
    #[error("the data directory {} is in use by another rlood server{}: stop it, or choose another --data-dir", .root.display(), .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    Locked {
        /// Path of the directory.
        root: PathBuf,
        /// Process id of the other server, if it could be read.
        pid: Option<u32>,
    },
    /// The operating system reported an error.
    #[error("could not {doing} {}", .path.display())]
    Io {
        /// The operation, as in "could not … PATH".
        doing: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// The cause of the error.
        #[source]
        source: io::Error,
    },
    /// The file has more bytes than allowed.
    #[error("the file has more than {limit_bytes} bytes, the maximum")]
    TooLarge {
        /// Maximum size of the file, in bytes.
        limit_bytes: u64,
    },
    /// The name is not a plain file name.
    #[error(transparent)]
    BadName(#[from] BadFileName),
    /// An uploaded file does not match the checkpoint's list of files.
    #[error("{name}: {what}")]
    Mismatch {
        /// Name of the file.
        name: String,
        /// How the file differs from the list.
        what: String,
    },
}

impl FilesError {
    /// Whether this process or the machine has too many open files or too little memory, which is unrelated to the file.
    pub fn is_for_want_of_resources(&self) -> bool {
        let FilesError::Io { source, .. } = self else { return false };
        source.kind() == io::ErrorKind::OutOfMemory
            || matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
    }
}

/// The server's data directory, locked for this process. Clones are cheap.
#[derive(Debug, Clone)]
pub struct DataDir {
    root: Arc<PathBuf>,
    uploads: Arc<Mutex<Uploads>>,
    lock: Arc<File>,
}

/// A file that is being written in `staging/`. It is hashed as it grows, limited in size, and removed when dropped unfinished.
#[derive(Debug)]
pub struct StagedFile {
    file: tokio::fs::File,
    path: Unfinished,
    hasher: Sha256,
    size_bytes: u64,
    limit_bytes: u64,
}

/// A complete file in `staging/`, removed when dropped before [`StagedDone::publish`].
#[derive(Debug)]
pub struct StagedDone {
    path: Unfinished,
    /// Size of the data, in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the file's bytes.
    pub sha256: Sha256Digest,
    /// The images of the rows, if this is a dataset with images.
    images: Option<StagedDir>,
}

/// A file or directory that is removed when this value is dropped.
#[derive(Debug)]
struct Unfinished(Option<PathBuf>);

impl Unfinished {
    fn path(&self) -> &Path {
        self.0.as_deref().unwrap_or(Path::new(""))
    }

    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // If the file cannot be removed now, the next server start removes it.
            let _ = fs::remove_file(path);
        }
    }
}

impl DataDir {
    /// Creates the directory (for this user only) if necessary and locks it. Everything that a former
    /// server left unfinished is removed.
    pub fn open(root: &Path) -> Result<DataDir, FilesError> {
        create_private_dir(root)?;
        let root = fs::canonicalize(root).map_err(cannot("find", root))?;
        let lock = lock(&root)?;
        let files = DataDir { root: Arc::new(root), uploads: Arc::default(), lock: Arc::new(lock) };
        remove_tree(&files.staging())?;
        for dir in [files.staging(), files.datasets(), files.checkpoints()] {
            create_private_dir(&dir)?;
            // Files that root's command creates between two server runs must not block the server's user.
            pinned::give_to_owner_of(&files.root, &dir);
        }
        sync_dir(&files.root)?;
        Ok(files)
    }

    /// Returns the absolute path of the directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the database file.
    pub fn database(&self) -> PathBuf {
        self.root.join("rlood.db")
    }

    /// Returns the directory in which the server's own workers keep unpublished files.
    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }

    /// Returns the path of a dataset's rows.
    pub fn dataset(&self, id: DatasetId) -> PathBuf {
        self.datasets().join(format!("{id}.ndjson"))
    }

    /// Returns the directory of a dataset's images. It exists only if rows have images.
    pub fn dataset_images(&self, id: DatasetId) -> PathBuf {
        images_beside(&self.dataset(id))
    }

    /// Returns the path of an image of a dataset.
    pub fn dataset_image(&self, id: DatasetId, sha256: Sha256Digest) -> PathBuf {
        self.dataset_images(id).join(sha256.to_string())
    }

    /// Returns the directory of a published checkpoint.
    pub fn checkpoint_dir(&self, job: JobId, step: u64, attempt: u64) -> PathBuf {
        self.checkpoints().join(job.to_string()).join(format!("{step}-{attempt}"))
    }

    /// Returns the path of a file of a published checkpoint. The name may come from a client; the path is always
    /// inside the checkpoint's directory.
    pub fn checkpoint_file(&self, job: JobId, step: u64, attempt: u64, name: &str) -> Result<PathBuf, FilesError> {
        check_file_name(name)?;
        Ok(self.checkpoint_dir(job, step, attempt).join(name))
    }

    /// Returns the directory of a job's starting files (warm start).
    pub fn initial_of(&self, job: JobId) -> PathBuf {
        self.initial_dir(job)
    }

    /// Returns how many bytes can still be written to the directory's file system.
    pub fn free_bytes(&self) -> Result<u64, FilesError> {
        free_bytes(&self.root)
    }

    /// Creates a file in `staging/`. Writing more than `limit_bytes` fails with `TooLarge`.
    pub async fn stage(&self, limit_bytes: u64) -> Result<StagedFile, FilesError> {
        let name = format!("upload-{}", ulid::Ulid::generate().to_string().to_lowercase());
        StagedFile::create(self.staging().join(name), limit_bytes).await
    }

    /// Compares a published checkpoint's files with their sizes and hashes. Blocking.
    pub fn checkpoint_verify(
        &self,
        job: JobId,
        step: u64,
        attempt: u64,
        files: &[FileEntry],
    ) -> Result<(), FilesError> {
        verify(&self.checkpoint_dir(job, step, attempt), files, compare_bytes)
    }

    /// Removes a checkpoint's directory. Blocking.
    pub fn checkpoint_remove(&self, job: JobId, step: u64, attempt: u64) -> Result<(), FilesError> {
        self.checkpoint_published(job, step, attempt);
        remove_tree(&self.checkpoint_dir(job, step, attempt))
    }

    /// Removes all files of a job. Blocking.
    pub fn job_remove(&self, job: JobId) -> Result<(), FilesError> {
        self.staged_remove(job, u64::MAX)?;
        remove_tree(&self.staging().join(job.to_string()))?;
        remove_tree(&self.initial_dir(job))?;
        remove_tree(&self.checkpoints().join(job.to_string()))
    }

    /// Removes a dataset's file and its images. Blocking.
    pub fn dataset_remove(&self, id: DatasetId) -> Result<(), FilesError> {
        let path = self.dataset(id);
        remove_tree(&self.dataset_images(id))?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(cannot("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Runs blocking work on the directory outside the async threads.
    ///
    /// # Errors
    /// Returns the error of the work, or an error that the work panicked.
    pub async fn in_background<T: Send + 'static>(
        &self,
        work: impl FnOnce(&DataDir) -> Result<T, FilesError> + Send + 'static,
    ) -> Result<T, FilesError> {
        let files = self.clone();
        spawn_blocking(move || work(&files)).await.unwrap_or_else(|error| {
            Err(FilesError::Io {
                doing: "complete a background task on the files in",
                path: self.root().to_owned(),
                source: io::Error::other(error),
            })
        })
    }

    /// Removes checkpoint directories and dataset files without a database row. Called at start. Blocking.
    pub fn sweep(&self, checkpoints: &[(JobId, u64, u64)], datasets: &[DatasetId]) -> Result<(), FilesError> {
        let datasets: HashSet<PathBuf> =
            datasets.iter().flat_map(|id| [self.dataset(*id), self.dataset_images(*id)]).collect();
        for path in entries(&self.datasets())? {
            if !datasets.contains(&path) {
                remove_tree(&path)?;
            }
        }
        let jobs: HashSet<PathBuf> =
            checkpoints.iter().map(|(job, _, _)| self.checkpoints().join(job.to_string())).collect();
        let kept: HashSet<PathBuf> =
            checkpoints.iter().map(|(job, step, attempt)| self.checkpoint_dir(*job, *step, *attempt)).collect();
        for job in entries(&self.checkpoints())? {
            if !jobs.contains(&job) {
                remove_tree(&job)?;
                continue;
            }
            for checkpoint in entries(&job)? {
                if !kept.contains(&checkpoint) {
                    remove_tree(&checkpoint)?;
                }
            }
        }
        Ok(())
    }

    fn staging(&self) -> PathBuf {
        self.root.join("staging")
    }

    fn datasets(&self) -> PathBuf {
        self.root.join("datasets")
    }

    fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }
}

impl StagedFile {
    async fn create(path: PathBuf, limit_bytes: u64) -> Result<StagedFile, FilesError> {
        let file = tokio::fs::File::create(&path).await.map_err(cannot("create", &path))?;
        Ok(StagedFile { file, path: Unfinished(Some(path)), hasher: Sha256::new(), size_bytes: 0, limit_bytes })
    }

    /// Appends bytes to the file.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), FilesError> {
        self.size_bytes += bytes.len() as u64;
        if self.size_bytes > self.limit_bytes {
            return Err(FilesError::TooLarge { limit_bytes: self.limit_bytes });
        }
        if let Some(wait) = pace!("files.hash").and_then(|bytes_per_s| time_for(bytes.len(), bytes_per_s)) {
            tokio::time::sleep(wait).await;
        }
        self.hasher.update(bytes);
        fail_point!("files.write").map_err(cannot("write to", self.path.path()))?;
        self.file.write_all(bytes).await.map_err(cannot("write to", self.path.path()))
    }

    /// Flushes the file to the disk.
    pub async fn finish(mut self) -> Result<StagedDone, FilesError> {
        self.file.flush().await.map_err(cannot("write to", self.path.path()))?;
        self.file.sync_all().await.map_err(cannot("sync", self.path.path()))?;
        fail_point!("files.synced").map_err(cannot("sync", self.path.path()))?;
        Ok(StagedDone { path: self.path, size_bytes: self.size_bytes, sha256: self.hasher.into(), images: None })
    }
}

impl StagedDone {
    /// Returns the current path of the file.
    pub fn path(&self) -> &Path {
        self.path.path()
    }

    /// Adds the images of the rows, which are published with the file.
    #[must_use]
    pub fn with_images(mut self, images: StagedDir) -> Self {
        self.images = Some(images);
        self
    }

    /// Renames the file to its final path, durably. Images are moved first, so that rows never refer to missing ones.
    pub async fn publish(self, to: &Path) -> Result<(), FilesError> {
        if let Some(images) = self.images {
            let target = images_beside(to);
            let placed = spawn_blocking(move || {
                copy::sync_files(images.path())?;
                fs::rename(images.path(), &target).map_err(cannot("move a directory to", &target))
            });
            placed.await.unwrap_or_else(|error| Err(cannot("move images beside", to)(io::Error::other(error))))?;
        }
        tokio::fs::rename(self.path.path(), to).await.map_err(cannot("move a file to", to))?;
        self.path.disarm();
        let parent = to.parent().unwrap_or(Path::new("/")).to_owned();
        let synced = spawn_blocking(move || sync_dir(&parent)).await;
        synced.unwrap_or_else(|error| Err(cannot("flush the directory of the file", to)(io::Error::other(error))))
    }
}

/// Returns the directory of the images that belong to a file of rows.
fn images_beside(rows: &Path) -> PathBuf {
    rows.with_extension("images")
}

/// Returns the size and SHA-256 of a file. Blocking.
pub fn hash_file(path: &Path) -> Result<(u64, Sha256Digest), FilesError> {
    let mut file = File::open(path).map_err(cannot("open", path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut size_bytes = 0;
    loop {
        let read = match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(cannot("read", path)(error)),
        };
        if let Some(wait) = pace!("files.hash").and_then(|bytes_per_s| time_for(read, bytes_per_s)) {
            std::thread::sleep(wait);
        }
        hasher.update(buffer.get(..read).unwrap_or_default());
        size_bytes += read as u64;
    }
    Ok((size_bytes, hasher.into()))
}

/// Returns how long it takes to read this number of bytes at a given rate.
fn time_for(bytes: usize, bytes_per_s: u64) -> Option<Duration> {
    Duration::try_from_secs_f64(bytes as f64 / bytes_per_s as f64).ok()
}

/// Reads the beginning of a file, to check that it can be read. Blocking.
pub fn read_first_bytes(path: &Path) -> Result<(), FilesError> {
    let mut first = [0; 4096];
    File::open(path).and_then(|mut file| file.read(&mut first)).map(drop).map_err(cannot("read", path))
}

/// Makes the entries of a directory durable. Blocking.
pub fn sync_dir(path: &Path) -> Result<(), FilesError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(cannot("sync", path))
}

/// Returns how many bytes can still be written to the file system of an existing path.
pub fn free_bytes(path: &Path) -> Result<u64, FilesError> {
    let found = rustix::fs::statvfs(path).map_err(|error| cannot("read the free space of", path)(error.into()))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Returns the size in bytes of the file system of an existing path.
pub fn disk_bytes(path: &Path) -> Result<u64, FilesError> {
    let found = rustix::fs::statvfs(path).map_err(|error| cannot("read the size of", path)(error.into()))?;
    Ok(found.f_blocks.saturating_mul(found.f_frsize))
}

fn cannot(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FilesError {
    move |source| FilesError::Io { doing, path: path.to_owned(), source }
}

fn create_private_dir(path: &Path) -> Result<(), FilesError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(cannot("create the directory", path))
}

/// Locks the directory and writes this process's id into the lock file.
fn lock(root: &Path) -> Result<File, FilesError> {
    let path = root.join(LOCK);
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(cannot("open the data directory's lock file", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            let pid = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
            return Err(FilesError::Locked { root: root.to_owned(), pid });
        }
        Err(TryLockError::Error(error)) => return Err(cannot("lock", &path)(error)),
    }
    file.set_len(0)
        .and_then(|()| file.write_all(format!("{}\n", std::process::id()).as_bytes()))
        .map_err(cannot("write to", &path))?;
    Ok(file)
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, FilesError> {
    fs::read_dir(dir)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(cannot("list", dir))
}

/// Removes a directory (or file) and everything below it, if it exists.
fn remove_tree(path: &Path) -> Result<(), FilesError> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(cannot("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Checks that a directory contains exactly the files of the list; `compare` checks the bytes of one file.
fn verify(
    dir: &Path,
    files: &[FileEntry],
    compare: impl Fn(&Path, &FileEntry) -> Result<(), FilesError>,
) -> Result<(), FilesError> {
    let mut expected = HashSet::new();
    for file in files {
        check_file_name(&file.name)?;
        let path = dir.join(&file.name);
        if !expected.insert(path.clone()) {
            return Err(mismatch(&file.name, "listed twice"));
        }
        if !path.is_file() {
            return Err(mismatch(&file.name, "not uploaded"));
        }
        compare(&path, file)?;
    }
    if files.is_empty() {
        return Err(mismatch("manifest.json", "not listed"));
    }
    for path in entries(dir)? {
        if !expected.contains(&path) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Err(mismatch(&name, "the file was uploaded but is not listed"));
        }
    }
    Ok(())
}

/// Compares a file's bytes with its size and hash in a list. Blocking, for as long as it takes to read the file.
pub fn compare_bytes(path: &Path, file: &FileEntry) -> Result<(), FilesError> {
    let (size_bytes, sha256) = hash_file(path)?;
    compare_sums(file, size_bytes, sha256)
}

fn compare_sums(file: &FileEntry, size_bytes: u64, sha256: Sha256Digest) -> Result<(), FilesError> {
    if size_bytes != file.size_bytes {
        return Err(mismatch(&file.name, &format!("the file has {size_bytes} bytes instead of {}", file.size_bytes)));
    }
    if sha256 != file.sha256 {
        return Err(mismatch(&file.name, "the SHA-256 of the file differs from the listed one"));
    }
    Ok(())
}

fn mismatch(name: &str, what: &str) -> FilesError {
    FilesError::Mismatch { name: name.to_owned(), what: what.to_owned() }
}

#[cfg(test)]
mod tests;
