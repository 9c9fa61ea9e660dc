//! Downloads models from a hub: one task per model, two at a time. Progress is reported to the jobs that wait for them.
//!
//! Only the model's row survives a restart, and that is enough: partial files are on disk, named by hash, and a starting server
//! resumes every model in the state `downloading`.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::error_text::with_causes;
use crate::hub::{Hub, HubError, Progress, Repo, RepoKind, RepoPlan, clean_parts};
use crate::store::{HubOrigin, ModelRow, Store, StoreError, clock_ms};

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

/// Bytes that unfinished downloads of models will still store, for the check of one more download.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pending {
    /// Bytes that are not in the models' folders yet; partial files are not in them.
    pub missing_in_folders: u64,
    /// Bytes that are not on the disk yet.
    pub missing_on_disk: u64,
    /// Bytes that are already in the directory of the one more download.
    pub stored: u64,
}

/// All model downloads of a server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Downloads(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    root: PathBuf,
    places: Semaphore,
    running: Mutex<HashMap<String, Running>>,
    /// Held from the check whether a model fits until its row is stored, so that of two models each is checked against the other.
    admission: tokio::sync::Mutex<()>,
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
        Self(Arc::new(Inner { store, root, places, running, admission }))
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

    /// Returns the progress of a model's download; None if none is running.
    pub fn advance(&self, model: &str) -> Option<Advance> {
        self.running().get(model).map(Running::advance)
    }

    /// Starts the download of a model in the state `downloading`; does nothing if it is already running.
    pub fn start(&self, hub: Hub, row: &ModelRow, describe: Describe) {
        let Some(origin) = row.hub.clone() else { return };
        let mut running = self.running();
        if running.get(&row.id).is_some_and(|known| known.commit == origin.commit && !known.task.is_finished()) {
            return;
        }
        let progress = Arc::<Progress>::default();
        let download = Download {
            downloads: self.clone(),
            hub,
            id: row.id.clone(),
            source: PathBuf::from(&row.source),
            sha256: row.sha256.clone(),
            origin: origin.clone(),
            progress: progress.clone(),
            describe,
        };
        let task = tokio::spawn(download.run());
        let (commit, total) = (origin.commit, origin.bytes_total);
        running.insert(row.id.clone(), Running { commit, total, progress, polls: VecDeque::new(), task });
    }

    /// Cancels a model's download, and waits until it no longer writes. Its partial files, and its complete ones under their names
    /// among the partial files, are kept for a day.
    pub async fn cancel(&self, model: &str) {
        let running = self.running().remove(model);
        if let Some(Running { task, .. }) = running {
            task.abort();
            // The result only says that the task was aborted, or that it had ended before.
            drop(task.await);
        }
    }

    /// Waits until no other model is being checked against the free space; hold the result until the model's row is stored.
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
        let source = PathBuf::from(source);
        let summed = tokio::task::spawn_blocking(move || {
            let mut pending = Pending { stored: bytes_below(&source), ..Pending::default() };
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
        let removed = tokio::task::spawn_blocking(move || remove_folder(&folder));
        removed.await.map_err(std::io::Error::other)?
    }

    /// Removes partial files, model outlines and dataset source files that were unused for a day.
    pub async fn clean(&self) {
        let (parts, outlines, sources) = (self.parts(), self.outlines(), self.all_sources());
        let kept = match self.0.store.hub_models_downloading().await {
            Ok(rows) => {
                let outline = |hub: HubOrigin| folder_name(&hub.repo, &hub.commit);
                rows.into_iter().filter_map(|row| Some(outline(row.hub?))).collect::<Vec<_>>()
            }
            Err(error) => {
                return tracing::warn!(error = with_causes(&error), "could not remove files of old model downloads");
            }
        };
        let cleaned = tokio::task::spawn_blocking(move || {
            let Some(before) = SystemTime::now().checked_sub(KEEP_PARTS_FOR) else { return Ok(0) };
            clean_folders(&outlines, &kept, before)?;
            clean_folders(&sources, &[], before)?;
            clean_parts(&parts, before)
        });
        if let Ok(Err(error)) = cleaned.await {
            tracing::warn!(%error, "could not remove files of old model downloads");
        }
    }

    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<String, Running>> {
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

/// The download of one model.
struct Download {
    downloads: Downloads,
    hub: Hub,
    id: String,
    source: PathBuf,
    sha256: String,
    origin: HubOrigin,
    progress: Arc<Progress>,
    describe: Describe,
}

impl Download {
    async fn run(self) {
        let store = self.downloads.0.store.clone();
        let ended = {
            let Ok(_place) = self.downloads.0.places.acquire().await else { return };
            tokio::select! {
                ended = self.fetch() => ended,
                () = self.watch() => return,
            }
        };
        let noted = match ended {
            Ok(card) => store.hub_model_ready(&self.id, &self.origin.commit, &card, clock_ms()).await.map(|_| ()),
            Err(problem) => {
                tracing::warn!(model = self.id, problem, "the download of a model failed");
                store.hub_model_failed(&self.id, &self.origin.commit, &problem, clock_ms()).await
            }
        };
        match noted {
            // The outline (small files and headers of weights) is removed only after a day, because another request may be
            // reading it.
            Ok(()) => drop(self.downloads.running().remove(&self.id)),
            // The model stays in the state `downloading`: at its next start the server finds all files and completes the
            // download.
            Err(error) => tracing::error!(
                error = with_causes(&error),
                "could not store the end of a model download in the database"
            ),
        }
    }

    /// Downloads the model. Returns its properties once all files are complete, or the reason of a permanent failure.
    async fn fetch(&self) -> Result<Value, String> {
        let begun = Instant::now();
        let mut pause = FIRST_RETRY_DELAY;
        loop {
            match self.try_once().await {
                Ok(()) => break,
                Err(error) if error.is_transient() && begun.elapsed() < GIVE_UP_AFTER => {
                    tracing::warn!(
                        model = self.id,
                        error = with_causes(&error),
                        "the download of a model failed temporarily; the server will retry it"
                    );
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MAX_RETRY_DELAY);
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        let (describe, source) = (self.describe, self.source.clone());
        let described = tokio::task::spawn_blocking(move || describe(&source)).await;
        let (card, sha256) =
            described.map_err(|error| format!("the downloaded files of the model could not be read: {error}"))??;
        match sha256 == self.sha256 {
            true => Ok(card),
            false => Err("the downloaded files of the model differ from those that the hub announced".to_owned()),
        }
    }

    async fn try_once(&self) -> Result<(), HubError> {
        let repo = Repo::new(RepoKind::Model, &self.origin.repo, &self.origin.commit)
            .map_err(|error| HubError::NotUnderstood(error.to_string()))?;
        let plan: RepoPlan = self.hub.plan_model(&repo).await?;
        self.progress.reset();
        self.hub.download(&plan, &self.downloads.parts(), &self.source, &self.progress).await
    }

    /// Reports the progress of a download in a loop that never ends; the caller drops it.
    async fn watch(&self) {
        for count in 1_u32.. {
            tokio::time::sleep(POLL_INTERVAL).await;
            let advance = {
                let mut running = self.downloads.running();
                let Some(running) = running.get_mut(&self.id) else { continue };
                running.polls.push_back((Instant::now(), self.progress.done_bytes()));
                if running.polls.len() > POLLS_PER_RATE {
                    running.polls.pop_front();
                }
                running.advance()
            };
            if count % POLLS_PER_EVENT == 0 {
                let progress = json!({"model": self.id, "bytes_done": advance.bytes_done, "bytes_total": self.origin.bytes_total,
                                  "bytes_per_second": advance.bytes_per_second, "eta_s": advance.eta_s});
                if let Err(error) = self.downloads.0.store.hub_model_progress(&self.id, &progress, clock_ms()).await {
                    tracing::warn!(error = with_causes(&error), "could not store the progress of a model download");
                }
            }
        }
    }
}
