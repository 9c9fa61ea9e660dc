//! Finds a job's models on this machine: at the server's paths if the files there are identical, else in the worker's model cache,
//! into which missing models are downloaded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::attempt::Attempt;
use super::client::{ClientError, FIRST_DELAY, MAX_DAMAGED_ATTEMPTS, MAX_DELAY, MAX_OUTAGE, with_retries};
use super::job_models::{JobModels, ModelLocation};
use super::transfer::Download;
use super::{Worker, clock, failure};
use crate::digest::Sha256Digest;
use crate::error_text::with_causes;
use crate::job::Failure;
use crate::model_cache::{CacheFull, Fetching, Found, Lease, ModelCache};
use crate::modelcard::{self, ModelCardError};
use crate::protocol::{Claim, FileEntry, ModelFiles, check_file_name};
use crate::size::format_size;

/// Interval between two log lines about the progress of a model's download.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which a worker checks whether another worker has finished downloading the model.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// A model that a job requires.
#[derive(Clone, Copy)]
struct ModelRef<'a> {
    id: &'a str,
    sha256: &'a str,
    /// Path of the model on the server's machine.
    path: &'a Path,
}

impl Attempt {
    /// Finds all models of a job, and downloads those that are not on this machine.
    pub(super) async fn find_models(&self, worker: &Worker, claim: &Claim) -> Result<JobModels, Failure> {
        let plan = &claim.plan;
        let base = ModelRef { id: &plan.model.id, sha256: &plan.model.sha256, path: Path::new(&claim.model_path) };
        let base = match is_in_place(base).await {
            Ok(true) => ModelLocation::InPlace(base.path.to_owned()),
            Ok(false) if worker.cache.is_none() => return Err(failure::model_changed(self.progress.get())),
            Err(error) if worker.cache.is_none() => {
                return Err(failure::model_unreadable(&error, self.progress.get()));
            }
            elsewhere => match self.fetch_model(worker, base).await? {
                Some(lease) => ModelLocation::Cached(lease),
                // An older server cannot send models to workers.
                None => {
                    return Err(match elsewhere {
                        Ok(_) => failure::model_changed(self.progress.get()),
                        Err(error) => failure::model_unreadable(&error, self.progress.get()),
                    });
                }
            },
        };
        let mut rewards = BTreeMap::new();
        for (id, path) in &claim.reward_models {
            let Some(sha256) = plan.reward_models.get(id) else { continue };
            let model = ModelRef { id, sha256, path: Path::new(path) };
            // A missing reward model is no error here: it is reported with the name of its reward when the reward is prepared.
            let location = match is_in_place(model).await {
                Ok(true) => Some(ModelLocation::InPlace(model.path.to_owned())),
                _ if worker.cache.is_none() => None,
                _ => self.fetch_model(worker, model).await?.map(ModelLocation::Cached),
            };
            rewards.extend(location.map(|location| (id.clone(), location)));
        }
        Ok(JobModels::new(base, rewards))
    }

    /// Downloads a model into the cache of this machine, or waits for another worker that downloads it. Returns `None` if the
    /// server is too old to send models.
    async fn fetch_model(&self, worker: &Worker, model: ModelRef<'_>) -> Result<Option<Lease>, Failure> {
        let Some(cache) = worker.cache.clone() else { return Ok(None) };
        self.progress.set_fetching_model(true);
        let lease = self.lease_model(cache, model).await;
        self.progress.set_fetching_model(false);
        lease
    }

    async fn lease_model(
        &self,
        (dir, limit_bytes): (PathBuf, Option<u64>),
        model: ModelRef<'_>,
    ) -> Result<Option<Lease>, Failure> {
        let cache_full = |error: CacheFull| failure::model_cache_full(model.id, &error, self.progress.get());
        let cache =
            blocking(move || ModelCache::open(&dir, limit_bytes)).await.map_err(|error| cache_full(error.into()))?;
        let mut is_waiting = false;
        loop {
            let (at, key) = (cache.clone(), model.sha256.to_owned());
            match blocking(move || at.find(&key)).await.map_err(|error| cache_full(error.into()))? {
                Found::Ready(lease) => {
                    let cached = ModelRef { path: lease.dir(), ..model };
                    if matches!(is_in_place(cached).await, Ok(true)) {
                        return Ok(Some(lease));
                    }
                    drop(lease);
                    tracing::warn!(model = model.id, "a model in the cache is damaged; downloading it again");
                    let (at, key) = (cache.clone(), model.sha256.to_owned());
                    let removed = blocking(move || at.remove(&key)).await.map_err(|error| cache_full(error.into()))?;
                    if !removed {
                        // Another worker uses the damaged copy of the model, so it cannot be removed yet.
                        tokio::time::sleep(MAX_DELAY).await;
                    }
                }
                Found::Missing(fetching) => match self.fetch_into(fetching, model).await? {
                    Some(Found::Ready(lease)) => return Ok(Some(lease)),
                    Some(_) => {}
                    None => return Ok(None),
                },
                Found::Busy => {
                    if !std::mem::replace(&mut is_waiting, true) {
                        self.events
                            .log(format!("waiting for the model '{}', which another worker is downloading", model.id));
                    }
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    /// Downloads the missing files of a model and marks it as complete.
    async fn fetch_into(&self, fetching: Fetching, model: ModelRef<'_>) -> Result<Option<Found>, Failure> {
        let position = || self.progress.get();
        let Some(files) = self.list_files(model).await? else { return Ok(None) };
        let size_bytes: u64 = files.iter().map(|file| file.size_bytes).sum();
        let name = model.id.to_owned();
        let prepared = blocking(move || Ok((fetching.prepare(&name, size_bytes), fetching))).await;
        let (part, fetching) =
            prepared.map_err(|error| failure::model_cache_full(model.id, &error.into(), position()))?;
        let part = part.map_err(|error| failure::model_cache_full(model.id, &error, position()))?;
        let received = AtomicU64::new(existing_bytes(&files, &part).await);
        let begun = std::time::Instant::now();
        tokio::select! {
            fetched = self.fetch_files_of_model(model, &files, &part, &received) => fetched?,
            () = self.report_progress(model.id, size_bytes, &received) => {}
        }
        let seconds = begun.elapsed().as_secs_f64();
        self.events.log(format!("downloaded the model '{}': {} in {seconds:.1} s", model.id, format_size(size_bytes)));
        let published = blocking(move || {
            let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
            fetching.publish(&names)
        });
        published.await.map(Some).map_err(|error| failure::model_cache_full(model.id, &error.into(), position()))
    }

    /// Gets the list of a model's files from the server, and checks that their fingerprint is the one in the job's plan.
    async fn list_files(&self, model: ModelRef<'_>) -> Result<Option<Vec<FileEntry>>, Failure> {
        let position = || self.progress.get();
        let files = loop {
            match with_retries(|| self.client.model_files(self.claim_ref, model.id), ClientError::is_transient).await {
                Ok(ModelFiles { files: Some(files) }) => break files,
                // The server is still hashing the model's files.
                Ok(ModelFiles { files: None }) => {}
                // Status 404 means that an older server cannot send models, or that a current server does not have this one.
                Err(ClientError::Refused { status: 404 | 405, .. }) => return Ok(None),
                Err(ClientError::Refused { status: 422, detail, .. }) => {
                    return Err(failure::model_not_sent(model.id, &detail, position()));
                }
                Err(error) => return self.check_transfer(Err(error)),
            }
        };
        if modelcard::fingerprint_entries(&files) != model.sha256 {
            return Err(failure::model_changed(position()));
        }
        for file in &files {
            self.check_transfer(check_file_name(&file.name).map_err(|error| ClientError::Refused {
                status: 0,
                code: "file_name".to_owned(),
                detail: error.to_string(),
            }))?;
        }
        Ok(Some(files))
    }

    async fn fetch_files_of_model(
        &self,
        model: ModelRef<'_>,
        files: &[FileEntry],
        part: &Path,
        received: &AtomicU64,
    ) -> Result<(), Failure> {
        for file in files {
            let to = part.join(&file.name);
            match self.fetch_file_of_model(model.id, file, &to, received).await {
                Err(ClientError::Disk { source, .. }) if source.kind() == std::io::ErrorKind::StorageFull => {
                    let error = CacheFull::Disk { missing_bytes: file.size_bytes, free_bytes: 0 };
                    return Err(failure::model_cache_full(model.id, &error, self.progress.get()));
                }
                Err(ClientError::Refused { status: 404 | 410 | 422, detail, .. }) => {
                    return Err(failure::model_not_sent(model.id, &detail, self.progress.get()));
                }
                fetched => self.check_transfer(fetched)?,
            }
        }
        Ok(())
    }

    /// Downloads one file of a model with retries: for up to [`MAX_OUTAGE`] without a new byte, and a few times if
    /// the hash is wrong.
    async fn fetch_file_of_model(
        &self,
        model: &str,
        file: &FileEntry,
        to: &Path,
        received: &AtomicU64,
    ) -> Result<(), ClientError> {
        if is_complete(file, to).await {
            return Ok(());
        }
        let sha256 = file.sha256.to_string();
        let download = Download { name: &file.name, sha256: &sha256, to, received: Some(received) };
        let (mut damaged, mut failing_since, mut delay) = (0, None, FIRST_DELAY);
        loop {
            let before = received.load(Ordering::Relaxed);
            let Err(error) = self.client.model_file(self.claim_ref, model, download).await else { return Ok(()) };
            tracing::warn!(file = file.name, error = with_causes(&error), "downloading a file of a model failed");
            if matches!(error, ClientError::Damaged { .. }) {
                damaged += 1;
                if damaged >= MAX_DAMAGED_ATTEMPTS {
                    return Err(error);
                }
            } else if !error.is_transient() {
                return Err(error);
            }
            // A transfer that makes progress does not count as an outage of the server, even if it is interrupted often.
            if received.load(Ordering::Relaxed) > before {
                (failing_since, delay) = (None, FIRST_DELAY);
            }
            let since = *failing_since.get_or_insert_with(clock::now);
            if clock::now() - since >= MAX_OUTAGE {
                return Err(error);
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_DELAY);
        }
    }

    /// Writes the progress of a model's download to the job's log until the future is dropped.
    async fn report_progress(&self, model: &str, size_bytes: u64, received: &AtomicU64) {
        let size = format_size(size_bytes);
        let mut before = None;
        loop {
            let now = received.load(Ordering::Relaxed).min(size_bytes);
            if before != Some(now) {
                let percent = now as f64 / size_bytes.max(1) as f64 * 100.0;
                self.events
                    .log(format!("downloading the model '{model}': {} of {size} ({percent:.0} %)", format_size(now)));
            }
            before = Some(now);
            tokio::time::sleep(PROGRESS_INTERVAL).await;
        }
    }
}

/// Returns whether the directory at the server's path contains the same model, byte for byte.
async fn is_in_place(model: ModelRef<'_>) -> Result<bool, ModelCardError> {
    let (dir, sha256) = (model.path.to_owned(), model.sha256.to_owned());
    let read = tokio::task::spawn_blocking(move || {
        Ok(modelcard::fingerprint_files(&dir, &modelcard::files_of(&dir)?)? == sha256)
    });
    let panicked = |error: tokio::task::JoinError| {
        Err(ModelCardError { file: model.id.to_owned(), detail: format!("the model's files cannot be read: {error}") })
    };
    read.await.unwrap_or_else(panicked)
}

/// Returns how many bytes of a model's files an earlier download has left in the cache.
async fn existing_bytes(files: &[FileEntry], part: &Path) -> u64 {
    let mut cached = 0;
    for file in files {
        let found = tokio::fs::metadata(part.join(&file.name)).await;
        cached += found.map_or(0, |metadata| metadata.len().min(file.size_bytes));
    }
    cached
}

/// Returns whether an earlier download has left a complete and correct copy of a model's file.
async fn is_complete(file: &FileEntry, to: &Path) -> bool {
    let size_bytes = tokio::fs::metadata(to).await.map_or(0, |metadata| metadata.len());
    if size_bytes < file.size_bytes {
        return false;
    }
    let path = to.to_owned();
    let hashed = blocking(move || Sha256Digest::of_reader(&mut std::fs::File::open(path)?)).await;
    if hashed.is_ok_and(|(_, sha256)| sha256 == file.sha256) {
        return true;
    }
    // The wrong file is removed; if that fails, the transfer overwrites it.
    let _ = tokio::fs::remove_file(to).await;
    false
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(std::io::Error::other(error)))
}
