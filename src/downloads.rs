//! Downloads models and datasets from a hub: one task each, two at a time. Progress is reported to the jobs that wait for them.
//!
//! Only the row of a model or dataset survives a restart, and that is enough: partial files are on disk, named by hash, and a starting
//! server resumes every download in the state `downloading`.

mod models;

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;

use crate::error_text::with_causes;
use crate::hub::{Hub, HubError, Progress, clean_parts};
use crate::id::DatasetId;
use crate::store::background::{spawn, spawn_blocking};
use crate::store::{HubOrigin, ModelRow, Store, StoreError};
use models::ModelTarget;

/// Maximum number of concurrent downloads; others wait.
const MAX_CONCURRENT: usize = 2;
/// Interval between two checks of a download's progress.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of progress checks over which the transfer rate is averaged.
const POLLS_PER_RATE: usize = 10;
/// Number of progress checks between two progress events.
const POLLS_PER_EVENT: u32 = 5;
/// Retries while the hub is unreachable: initial delay, maximum delay, and the time after which the download fails.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(5);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(300);
const GIVE_UP_AFTER: Duration = Duration::from_secs(24 * 3600);
/// How long unused partial files are kept.
const KEEP_PARTS_FOR: Duration = Duration::from_secs(24 * 3600);

/// Function that reads a model's folder and returns the model's properties for the database and its fingerprint, or why the
/// model cannot be used. Blocking.
pub type Describe = fn(&Path) -> Result<(Value, String), String>;

/// Progress of a download.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Advance {
    /// Number of bytes downloaded.
    pub bytes_done: u64,
    /// Transfer rate over the last seconds, in bytes per second; None before the second check.
    pub bytes_per_second: Option<f64>,
    /// Estimated seconds remaining at that rate.
    pub eta_s: Option<f64>,
}

/// The part of a download that differs between models and datasets: how the files are fetched, and where progress and end are
/// recorded.
pub trait Target: Send + Sync + 'static {
    /// Returns the key of the download in the list of running ones, which is also its name in the log.
    fn key(&self) -> String;

    /// Returns the commit to download, and the total size of its files in bytes.
    fn size(&self) -> (String, u64);

    /// Downloads the files that are missing.
    fn fetch(&self, progress: &Arc<Progress>) -> impl Future<Output = Result<(), HubError>> + Send;

    /// Reads the complete files, and records that they can be used.
    fn complete(&self) -> impl Future<Output = Result<(), Incomplete>> + Send;

    /// Reports the progress to the jobs that wait.
    fn report(&self, advance: Advance) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Records why the download failed. A retry would not help.
    fn fail(&self, problem: &str) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// Why the end of a download could not be recorded.
#[derive(Debug)]
pub enum Incomplete {
    /// The files cannot be used.
    Unusable(String),
    /// The database could not be written.
    Store(StoreError),
}

/// Bytes that unfinished downloads will still store, for the check of one more download.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pending {
    /// Bytes that are not in the models' folders yet; partial files are not in them.
    pub missing_in_folders: u64,
    /// Bytes that are not on the disk yet.
    pub missing_on_disk: u64,
    /// Bytes that are already in the directory of the one more download.
    pub stored: u64,
}

/// All downloads of a server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Downloads(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    root: PathBuf,
    places: Semaphore,
    running: Mutex<HashMap<String, Running>>,
    /// Held from the check whether a download fits until its row is stored, so that of two downloads each is checked against the
    /// other.
    admission: tokio::sync::Mutex<()>,
    /// Signals that a download of a dataset is stored, so that jobs that wait for it can be planned.
    dataset_stored: Notify,
}

#[derive(Debug)]
struct Running {
    commit: String,
    total: u64,
    progress: Arc<Progress>,
    polls: VecDeque<(Instant, u64)>,
    task: JoinHandle<()>,
}

impl Running {
    fn advance(&self) -> Advance {
        let bytes_done = self.progress.done_bytes().min(self.total);
        let rate = || {
            let ((first, from), (last, to)) = (self.polls.front()?, self.polls.back()?);
            let seconds = last.duration_since(*first).as_secs_f64();
            (seconds > 0.0).then(|| to.saturating_sub(*from) as f64 / seconds)
        };
        let bytes_per_second = rate();
        let eta_s = bytes_per_second.filter(|rate| *rate > 0.0).map(|rate| (self.total - bytes_done) as f64 / rate);
        Advance { bytes_done, bytes_per_second, eta_s }
    }
}

impl Downloads {
    /// Creates the download manager of a data directory.
    pub fn new(store: Store, root: &Path) -> Self {
        let (root, places) = (root.to_owned(), Semaphore::new(MAX_CONCURRENT));
        let (running, admission) = (Mutex::default(), tokio::sync::Mutex::default());
        let dataset_stored = Notify::new();
        Self(Arc::new(Inner { store, root, places, running, admission, dataset_stored }))
    }

    /// Returns the directory of partial files, named by hash.
    pub fn parts(&self) -> PathBuf {
        self.0.root.join("hub").join("parts")
    }

    /// Returns the directory that holds a model's outline during the download: its small files and the headers of its weights.
    pub fn outline(&self, repo: &str, commit: &str) -> PathBuf {
        self.outlines().join(folder_name(repo, commit))
    }

    fn outlines(&self) -> PathBuf {
        self.0.root.join("hub").join("outlines")
    }

    /// Returns the directory of a dataset's files while they are read, and for a day afterwards.
    pub fn sources(&self, repo: &str, commit: &str) -> PathBuf {
        self.all_sources().join(folder_name(repo, commit))
    }

    fn all_sources(&self) -> PathBuf {
        self.0.root.join("hub").join("sources")
    }

    /// Returns the final directory of the files of a hub repository at a commit.
    pub fn folder(&self, repo: &str, commit: &str) -> PathBuf {
        self.0.root.join("models").join(repo.replace('/', "--")).join(commit)
    }

    /// Returns the directory from which a model can be read, except for the bytes of its tensors: its final folder, or its
    /// outline during the download.
    pub fn readable(&self, row: &ModelRow) -> PathBuf {
        match &row.hub {
            Some(hub) if row.state == "downloading" => self.outline(&hub.repo, &hub.commit),
            Some(_) | None => PathBuf::from(&row.source),
        }
    }

    /// Returns the progress of a running download; None if it is not running. The key of a model is its id.
    pub fn advance(&self, key: &str) -> Option<Advance> {
        self.running().get(key).map(Running::advance)
    }

    /// Starts the download of a model in the state `downloading`; does nothing if it is already running.
    pub fn start_model(&self, hub: Hub, row: &ModelRow, describe: Describe) {
        if let Some(origin) = row.hub.clone() {
            let (id, source, sha256) = (row.id.clone(), PathBuf::from(&row.source), row.sha256.clone());
            self.start(ModelTarget { downloads: self.clone(), hub, id, source, sha256, origin, describe });
        }
    }

    /// Starts a download; does nothing if it is already running.
    pub fn start(&self, target: impl Target) {
        let (key, (commit, total)) = (target.key(), target.size());
        let mut running = self.running();
        if running.get(&key).is_some_and(|known| known.commit == commit && !known.task.is_finished()) {
            return;
        }
        let progress = Arc::<Progress>::default();
        let download = Download { downloads: self.clone(), key: key.clone(), target, progress: progress.clone() };
        let task = spawn(download.run());
        running.insert(key, Running { commit, total, progress, polls: VecDeque::new(), task });
    }

    /// Cancels a download, and waits until it no longer writes. Its partial files, and its complete ones under their names among the
    /// partial files, are kept for a day.
    pub async fn cancel(&self, key: &str) {
        let running = self.running().remove(key);
        if let Some(Running { task, .. }) = running {
            task.abort();
            // The result only says that the task was aborted, or that it had ended before.
            drop(task.await);
        }
    }

    /// Returns the signal that a download of a dataset is stored.
    pub fn dataset_stored(&self) -> &Notify {
        &self.0.dataset_stored
    }

    /// Waits until no other download is being checked against the free space; hold the result until the download's row is stored.
    pub async fn admission(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.admission.lock().await
    }

    /// Adds up what the unfinished downloads will still store beside one into the directory `source`. Models that share a directory
    /// count once.
    ///
    /// # Errors
    /// Fails when the database cannot be read.
    pub async fn pending(&self, source: &str) -> Result<Pending, StoreError> {
        let mut rows = self.0.store.hub_models_downloading().await?;
        rows.retain(|row| row.source != source);
        // Of the models that share a directory, only one may be running, and its progress is the one that counts.
        let done = |row: &ModelRow| self.advance(&row.id).map_or(0, |advance| advance.bytes_done);
        let mut downloads: HashMap<PathBuf, (u64, u64)> = HashMap::new();
        for row in rows {
            let (done, total) = (done(&row), row.hub.map_or(0, |hub| hub.bytes_total));
            let known = downloads.entry(PathBuf::from(row.source)).or_default();
            *known = (known.0.max(done), known.1.max(total));
        }
        let mut of_datasets = 0;
        for row in self.0.store.dataset_downloads_running().await? {
            let done = self.advance(&dataset_key(row.id)).map_or(0, |advance| advance.bytes_done);
            of_datasets += row.bytes_total.saturating_sub(done);
        }
        let source = PathBuf::from(source);
        let summed = spawn_blocking(move || {
            let mut pending =
                Pending { stored: bytes_below(&source), missing_on_disk: of_datasets, ..Pending::default() };
            for (folder, (done, total)) in downloads {
                pending.missing_in_folders += total.saturating_sub(bytes_below(&folder));
                pending.missing_on_disk += total.saturating_sub(done);
            }
            pending
        });
        // The task cannot fail but by a panic; the downloads are not counted then.
        Ok(summed.await.unwrap_or_default())
    }

    /// Removes a downloaded model's files, unless another model uses the same folder. Folders outside the data
    /// directory are not touched.
    ///
    /// # Errors
    /// Fails when the files cannot be removed.
    pub async fn remove_files(&self, row: &ModelRow) -> std::io::Result<()> {
        let Some(hub) = &row.hub else { return Ok(()) };
        let folder = self.folder(&hub.repo, &hub.commit);
        if folder != Path::new(&row.source) {
            return Ok(()); // The folder belongs to another program's cache.
        }
        let used = self.0.store.model_source_is_used(&row.source).await;
        if used.map_err(std::io::Error::other)? {
            return Ok(());
        }
        let removed = spawn_blocking(move || remove_folder(&folder));
        removed.await.map_err(std::io::Error::other)?
    }

    /// Removes partial files, model outlines and dataset source files that were unused for a day.
    pub async fn clean(&self) {
        let (parts, outlines, sources) = (self.parts(), self.outlines(), self.all_sources());
        let kept = match self.folders_in_use().await {
            Ok(kept) => kept,
            Err(error) => {
                return tracing::warn!(error = with_causes(&error), "could not remove files of old downloads");
            }
        };
        let cleaned = spawn_blocking(move || {
            let Some(before) = SystemTime::now().checked_sub(KEEP_PARTS_FOR) else { return Ok(0) };
            clean_folders(&outlines, &kept, before)?;
            clean_folders(&sources, &kept, before)?;
            clean_parts(&parts, before)
        });
        if let Ok(Err(error)) = cleaned.await {
            tracing::warn!(%error, "could not remove files of old downloads");
        }
    }

    /// Returns the names of the folders that unfinished downloads use.
    async fn folders_in_use(&self) -> Result<Vec<String>, StoreError> {
        let outline = |hub: HubOrigin| folder_name(&hub.repo, &hub.commit);
        let models = self.0.store.hub_models_downloading().await?;
        let mut kept: Vec<String> = models.into_iter().filter_map(|row| Some(outline(row.hub?))).collect();
        for row in self.0.store.dataset_downloads_running().await? {
            let text = |name: &str| row.origin[name].as_str().unwrap_or_default();
            kept.push(folder_name(text("hub"), text("commit")));
        }
        Ok(kept)
    }

    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<String, Running>> {
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the key of a dataset's download. No id of a model contains a colon.
pub fn dataset_key(id: DatasetId) -> String {
    format!("dataset:{id}")
}

/// Returns the name of a folder with files of a repository at a commit. No name of a repository contains `--`.
fn folder_name(repo: &str, commit: &str) -> String {
    format!("{}--{commit}", repo.replace('/', "--"))
}

/// Returns the size of the files below a folder in bytes; 0 for what cannot be read.
fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let size = |path: PathBuf| match std::fs::symlink_metadata(&path) {
        Ok(found) if found.is_dir() => bytes_below(&path),
        found => found.map_or(0, |found| found.len()),
    };
    entries.filter_map(|entry| Some(size(entry.ok()?.path()))).sum()
}

fn remove_folder(folder: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn clean_folders(above: &Path, kept: &[String], before: SystemTime) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(above) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let is_kept = entry.file_name().to_str().is_some_and(|name| kept.iter().any(|known| known == name));
        if !is_kept && entry.metadata()?.modified()? < before {
            remove_folder(&entry.path())?;
        }
    }
    Ok(())
}

/// A running download.
struct Download<T> {
    downloads: Downloads,
    key: String,
    target: T,
    progress: Arc<Progress>,
}

impl<T: Target> Download<T> {
    async fn run(self) {
        let ended = {
            let Ok(_place) = self.downloads.0.places.acquire().await else { return };
            tokio::select! {
                ended = self.fetch_and_complete() => ended,
                () = self.watch() => return,
            }
        };
        let noted = match ended {
            Ok(()) => Ok(()),
            Err(Incomplete::Store(error)) => Err(error),
            Err(Incomplete::Unusable(problem)) => {
                tracing::warn!(download = self.key, problem, "a download from the hub failed");
                self.target.fail(&problem).await
            }
        };
        match noted {
            // The outline of a model (small files and headers of weights) is removed only after a day, because another request may
            // be reading it.
            Ok(()) => drop(self.downloads.running().remove(&self.key)),
            // The row stays in the state `downloading`: at its next start the server finds all files and completes the download.
            Err(error) => {
                tracing::error!(error = with_causes(&error), "could not store the end of a download in the database");
            }
        }
    }

    /// Downloads and reads the files. Fails once a retry would not help.
    async fn fetch_and_complete(&self) -> Result<(), Incomplete> {
        let begun = Instant::now();
        let mut pause = FIRST_RETRY_DELAY;
        loop {
            self.progress.reset();
            match self.target.fetch(&self.progress).await {
                Ok(()) => return self.target.complete().await,
                Err(error) if error.is_transient() && begun.elapsed() < GIVE_UP_AFTER => {
                    tracing::warn!(
                        download = self.key,
                        error = with_causes(&error),
                        "a download from the hub failed temporarily; the server will retry it"
                    );
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MAX_RETRY_DELAY);
                }
                Err(error) => return Err(Incomplete::Unusable(error.to_string())),
            }
        }
    }

    /// Reports the progress of a download in a loop that never ends; the caller drops it.
    async fn watch(&self) {
        for count in 1_u32.. {
            tokio::time::sleep(POLL_INTERVAL).await;
            let advance = {
                let mut running = self.downloads.running();
                let Some(running) = running.get_mut(&self.key) else { continue };
                running.polls.push_back((Instant::now(), self.progress.done_bytes()));
                if running.polls.len() > POLLS_PER_RATE {
                    running.polls.pop_front();
                }
                running.advance()
            };
            if count % POLLS_PER_EVENT == 0
                && let Err(error) = self.target.report(advance).await
            {
                tracing::warn!(error = with_causes(&error), "could not store the progress of a download");
            }
        }
    }
}
