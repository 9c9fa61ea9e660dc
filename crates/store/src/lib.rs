//! The database: opening, migrations, pools, errors and notifications. The SQL is in the modules below, with one
//! table family per file.
//!
//! Only the server process opens it. SQLite in WAL mode has one writer connection (every transaction begins IMMEDIATE, `synchronous
//! = FULL`) and a few readers. `now` (Unix time in milliseconds) is an argument of every query that needs the time. A change of
//! state and its event are written in one transaction; [`Store::changed`] wakes tasks that wait for the next event.
//!
//! Long functions return a boxed future. rustc compiles an `async fn` in every crate that polls it, but a boxed future only in this one.
//!
//! This file is longer than others: it also holds the helpers that every query of the crate uses.

pub mod adapters;
pub mod api_keys;
pub mod artifacts;
pub mod attempts;
pub mod audit;
pub mod background;
pub mod callbacks;
pub mod claims;
pub mod dataset_downloads;
pub mod datasets;
pub mod deliveries;
pub mod disk;
pub mod doctor;
pub mod events;
pub mod files;
pub mod fork;
pub mod gc;
pub mod hub_models;
pub mod jobs;
pub mod journal;
pub mod keys;
pub mod leases;
pub mod listing;
pub mod measures;
pub mod model_files;
pub mod models;
pub mod moves;
pub mod owners;
mod pages;
pub mod publish;
pub mod recovery;
pub mod retention;
pub mod retry;
pub mod rewards;
mod rows;
pub mod samples;
pub mod server_errors;
pub mod sessions;
pub mod snapshot;
pub mod sparklines;
pub mod steps;
pub mod storage;
mod task_rows;
pub mod tasks;
mod version;
pub mod webhooks;
pub mod workers;

use rlood_types::{callback, digest, event, failpoint, id, job, protocol, rollout, scopes, spec, verdict};

use std::collections::HashMap;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Connection, Sqlite, Transaction};
use tokio::sync::{broadcast, watch};

use crate::failpoint::{fail_point, without};
use crate::id::JobId;
use crate::job::{Action, State};

pub use adapters::AdapterRow;
pub use api_keys::{Dropped, KeyRow, NewKey};
pub use artifacts::{CheckpointRow, Publication, PublishCheckpoint};
pub use attempts::Cursor;
pub use audit::{AuditRow, NewAudit};
pub use callbacks::{Counted, Received};
pub use claims::{Claimed, Damage, HeartbeatUpdate};
pub use dataset_downloads::{DatasetDownloadRow, NewDatasetDownload};
pub use datasets::{DatasetFilter, DatasetRow, NewDataset};
pub use deliveries::{DeliveryRow, DeliveryState, MessageEvent, Next, TryRow};
pub use doctor::AlertRow;
pub use events::{EventRow, LogRow, StepRow};
pub use fork::Fork;
pub use hub_models::NewHubModel;
pub use jobs::{JobFilter, JobPatch, JobRow, NewJob};
pub use keys::KeyBegin;
pub use listing::JobBeside;
pub use models::{HubOrigin, ModelRow, NewModel};
pub use pages::Page;
use pages::{Newest, cursor, cursor_key, newest_after, page, parse_cursor};
pub use retry::Continuation;
pub use rewards::RewardHealthRow;
use rows::{Doing, column, corrupt, count_column, id_column, int, json_column, to_json, variant_column, variant_name};
pub use samples::{SampleQuery, SampleRow, SampleSort, SamplesRemoved};
pub use sessions::{SessionKey, SessionRow};
pub use sparklines::Sparkline;
pub use steps::{StepLine, StepLines};
pub use task_rows::{NewTask, TaskKind, TaskRow};
pub use tasks::TaskEnd;
pub use workers::WorkerRow;

/// The database of one server. Clones are cheap.
#[derive(Debug, Clone)]
pub struct Store {
    writer: SqlitePool,
    readers: SqlitePool,
    /// Database connections that only searches use.
    searchers: SqlitePool,
    /// Connection that checkpoints the write-ahead log.
    checkpointer: SqlitePool,
    changes: Arc<Changes>,
    /// Whether a job that succeeds with an evaluation automatically gets a verdict.
    judges: bool,
}

/// Errors of the database layer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database file cannot be opened or created.
    #[error("could not open the database {}", .path.display())]
    Open {
        /// Path of the database file.
        path: PathBuf,
        /// The cause of the error.
        #[source]
        source: sqlx::Error,
    },
    /// SQLite versions before 3.51.3 can corrupt a WAL database.
    #[error("SQLite {found} is too old: 3.51.3 or later is needed (earlier ones can corrupt a database in WAL mode)")]
    SqliteTooOld {
        /// Version of the linked SQLite.
        found: String,
    },
    /// The schema cannot be migrated.
    #[error("could not migrate the database")]
    Migrate {
        /// The cause of the error.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
    /// The database has migrations that this rlood does not know.
    #[error(
        "the database was written by a newer rlood (its migration {found}; this one knows {known}): use that rlood or a later one"
    )]
    Newer {
        /// Number of the database's last migration.
        found: i64,
        /// Number of the last migration known to this rlood.
        known: i64,
    },
    /// The database lacks migrations that this rlood requires.
    #[error(
        "the database was written by an older rlood (it lacks migration {missing}): use that one, or migrate it with `rlood serve`"
    )]
    Older {
        /// Number of the first missing migration.
        missing: i64,
    },
    /// SQLite reported an error.
    #[error("could not {doing}")]
    Database {
        /// Purpose of the statement, as in "could not …".
        doing: &'static str,
        /// The cause of the error.
        #[source]
        source: sqlx::Error,
    },
    /// A stored value cannot be parsed.
    #[error("could not read the stored {what}")]
    Corrupt {
        /// Name of the value or its column.
        what: &'static str,
        /// The cause of the error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The object does not exist.
    #[error("there is no {kind} '{id}'")]
    NotFound {
        /// Kind of object: `job`, `dataset`, ….
        kind: &'static str,
        /// Requested id of the object.
        id: String,
    },
    /// Another object has this name.
    #[error("the {kind} '{id}' exists already and is a different one")]
    Exists {
        /// Kind of object: `model`.
        kind: &'static str,
        /// Requested id of the object.
        id: String,
    },
    /// The object cannot be deleted while jobs use it.
    #[error("the {kind} '{id}' is used by {} that have not ended", count_of_jobs(.jobs))]
    InUse {
        /// Kind of object: `dataset` or `model`.
        kind: &'static str,
        /// Requested id of the object.
        id: String,
        /// Jobs that use the object, oldest first (at most 20).
        jobs: Vec<JobId>,
    },
    /// The job's state does not allow the action; [`State::actions`] lists those that it allows.
    #[error("cannot {} a job that is {}", .action.as_str(), .state.as_str())]
    IllegalMove {
        /// Current state of the job.
        state: State,
        /// The action that was requested.
        action: Action,
    },
    /// A job ended before its datasets were downloaded, so it never had a final plan.
    #[error("the job {job} ended before its datasets were downloaded, so it has no final plan: submit it again")]
    NoPlan {
        /// Id of the job.
        job: JobId,
    },
    /// The attempt no longer owns the job.
    #[error("the claim on the job is lost: this attempt of the job no longer owns it")]
    LeaseLost,
    /// The page cursor was not created by this server.
    #[error("the cursor does not belong to this list: start again without 'after'")]
    BadCursor,
}

fn count_of_jobs(jobs: &[JobId]) -> String {
    if jobs.len() == 1 { "1 job".to_owned() } else { format!("{} jobs", jobs.len()) }
}

impl StoreError {
    /// Whether the disk is full (SQLITE_FULL).
    pub fn is_disk_full(&self) -> bool {
        let StoreError::Database { source, .. } = self else { return false };
        match source {
            sqlx::Error::Io(error) => error.kind() == std::io::ErrorKind::StorageFull,
            other => other.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "13"),
        }
    }
}

/// Notifications: a counter per watched job, one for the queue, one for late answers of reward services, and a
/// channel that names changed jobs.
#[derive(Debug)]
struct Changes {
    jobs: Mutex<HashMap<JobId, watch::Sender<u64>>>,
    queue: watch::Sender<u64>,
    callbacks: watch::Sender<u64>,
    tasks: watch::Sender<u64>,
    all: broadcast::Sender<JobChange>,
}

/// A job that is new, changed or deleted.
#[derive(Debug, Clone)]
pub struct JobChange {
    /// Id of the job.
    pub id: JobId,
    /// Owner of a deleted job, which can no longer be looked up; `None` = the job exists.
    pub deleted_owner: Option<String>,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            jobs: Mutex::default(),
            queue: watch::Sender::default(),
            callbacks: watch::Sender::default(),
            tasks: watch::Sender::default(),
            all: broadcast::Sender::new(CHANGE_CAPACITY),
        }
    }
}

/// Maximum number of changed jobs that wait for a subscriber of all changes.
const CHANGE_CAPACITY: usize = 1024;

/// Returns the current Unix time in milliseconds, which handlers pass as `now`.
pub fn clock_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// Number of connections for expensive searches, so that no other query waits for them.
const SEARCH_CONNECTIONS: u32 = 2;

/// Number of pages in the write-ahead log from which the background task checkpoints it: 4 MiB.
const CHECKPOINT_PAGES: i64 = 1000;
/// Number of pages in the write-ahead log at which the writer itself checkpoints it, if the background task has not.
const MAX_LOG_PAGES: &str = "16384";

/// Before this version a WAL database can be corrupted when a checkpoint coincides with a reset of the log.
const MIN_SQLITE: [u32; 3] = [3, 51, 3];

impl Store {
    /// Opens (or creates) the database file, for this user only, and migrates its schema. The caller holds the data directory's
    /// lock ([`crate::files::DataDir`]), so there is one server per file.
    pub fn open<'a>(database: &'a Path) -> BoxFuture<'a, Result<Store, StoreError>> {
        Box::pin(async move {
            sqlite_version().await?;
            let cannot_open = |source| StoreError::Open { path: database.to_owned(), source };
            make_private(database).map_err(|error| cannot_open(sqlx::Error::Io(error)))?;
            let options = SqliteConnectOptions::new()
                .filename(database)
                .foreign_keys(true)
                .busy_timeout(Duration::from_secs(5))
                .pragma("trusted_schema", "OFF");
            // Connections live as long as the server: no maximum lifetime, no idle timeout, no ping before use.
            let pool = SqlitePoolOptions::new().max_lifetime(None).idle_timeout(None).test_before_acquire(false);
            let writer = pool
                .clone()
                .max_connections(1)
                // The previous user of the connection may have lowered `synchronous`, so it is set again.
                .before_acquire(|writer, _| {
                    Box::pin(
                        async move { sqlx::query("PRAGMA synchronous = FULL").execute(writer).await.map(|_| true) },
                    )
                })
                .connect_with(
                    options
                        .clone()
                        .create_if_missing(true)
                        .journal_mode(SqliteJournalMode::Wal)
                        .synchronous(SqliteSynchronous::Full)
                        .pragma("wal_autocheckpoint", MAX_LOG_PAGES)
                        .optimize_on_close(true, 400),
                )
                .await
                .map_err(cannot_open)?;
            version::MIGRATIONS.run(&writer).await.map_err(version::not_migrated)?;
            let checkpointer = pool.clone().max_connections(1).connect_lazy_with(options.clone());
            let searchers =
                pool.clone().max_connections(SEARCH_CONNECTIONS).connect_lazy_with(options.clone().read_only(true));
            let readers = pool.max_connections(4).connect_with(options.read_only(true)).await.map_err(cannot_open)?;
            let changes = Arc::default();
            Ok(Store { writer, readers, searchers, checkpointer, changes, judges: false })
        })
    }

    /// Closes every connection and checkpoints the WAL into the file.
    pub async fn close(&self) {
        self.readers.close().await;
        self.searchers.close().await;
        self.checkpointer.close().await;
        self.writer.close().await;
    }

    /// Checks that both connection pools (writer and readers) work, for `/readyz`.
    pub async fn ping(&self) -> Result<(), StoreError> {
        sqlx::query("SELECT 1 FROM jobs LIMIT 1").execute(&self.readers).await.doing("read the database")?;
        sqlx::query("SELECT 1 FROM jobs LIMIT 1")
            .execute(&self.writer)
            .await
            .doing("reach the database's writer connection")?;
        Ok(())
    }

    /// Returns a receiver that wakes after every committed change of the job (a new event, a new state). Subscribe first, then
    /// read, then wait, so that nothing is missed.
    pub fn changed(&self, job: JobId) -> watch::Receiver<u64> {
        let mut jobs = self.changes.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.entry(job).or_insert_with(|| watch::Sender::new(0)).subscribe()
    }

    /// Returns a receiver that wakes when a job was queued, for long-polling claims.
    pub fn queue_changed(&self) -> watch::Receiver<u64> {
        self.changes.queue.subscribe()
    }

    /// Returns the same store. With `judges`, a job that succeeds and has an evaluation gets a verdict unless its
    /// settings turn that off.
    #[must_use]
    pub fn with_verdicts(mut self, judges: bool) -> Self {
        self.judges = judges;
        self
    }

    /// Returns a receiver that wakes when a task was queued or cancelled.
    pub fn tasks_changed(&self) -> watch::Receiver<u64> {
        self.changes.tasks.subscribe()
    }

    /// Returns a receiver of every job that is new, changed or deleted.
    pub fn changed_jobs(&self) -> broadcast::Receiver<JobChange> {
        self.changes.all.subscribe()
    }

    async fn begin(&self, doing: &'static str) -> Result<Transaction<'static, Sqlite>, StoreError> {
        let begin = if without!(Immediate) { "BEGIN" } else { "BEGIN IMMEDIATE" };
        self.writer.begin_with(begin).await.doing(doing)
    }

    /// Begins a transaction that may be lost in a power failure, but not when the process ends. Its commit does not
    /// wait for the disk.
    async fn begin_relaxed(&self, doing: &'static str) -> Result<Transaction<'static, Sqlite>, StoreError> {
        if without!(Immediate) {
            return self.begin(doing).await;
        }
        self.writer.begin_with("PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE").await.doing(doing)
    }

    /// Checkpoints the write-ahead log when it has grown, in parallel with the writer. Otherwise about one write in a hundred would
    /// have to checkpoint it and take longer.
    pub async fn log_checkpoint(&self) -> Result<(), StoreError> {
        let doing = "copy the write-ahead log into the database";
        let (_, pages, folded): (i64, i64, i64) =
            sqlx::query_as("PRAGMA wal_checkpoint(NOOP)").fetch_one(&self.checkpointer).await.doing(doing)?;
        if pages - folded >= CHECKPOINT_PAGES {
            sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").execute(&self.checkpointer).await.doing(doing)?;
        }
        Ok(())
    }

    async fn commit(&self, tx: Transaction<'static, Sqlite>, doing: &'static str) -> Result<(), StoreError> {
        fail_point!("store.before_commit", doing).map_err(sqlx::Error::Io).doing(doing)?;
        tx.commit().await.doing(doing)?;
        fail_point!("store.after_commit", doing).map_err(sqlx::Error::Io).doing(doing)
    }

    /// Notifies watchers of a job. Call it after the commit, never before.
    fn wake_job(&self, job: JobId) {
        self.notify(JobChange { id: job, deleted_owner: None });
    }

    /// Notifies watchers of a job that was deleted.
    fn wake_gone(&self, job: JobId, owner: String) {
        self.notify(JobChange { id: job, deleted_owner: Some(owner) });
    }

    fn notify(&self, change: JobChange) {
        let job = change.id;
        // Sending fails only if there are no subscribers, and then there is nothing to do.
        let _ = self.changes.all.send(change);
        let mut jobs = self.changes.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sender) = jobs.get(&job) else { return };
        if sender.receiver_count() == 0 {
            jobs.remove(&job);
        } else {
            sender.send_modify(|count| *count += 1);
        }
    }

    fn wake_tasks(&self) {
        self.changes.tasks.send_modify(|count| *count += 1);
    }

    /// Wakes the workers that wait for a job. Call it after the commit, never before.
    pub fn wake_queue(&self) {
        self.changes.queue.send_modify(|count| *count += 1);
    }
}

/// Creates the file if necessary, and makes it and its companion files inaccessible to other users, whatever the directory permits,
/// because they contain secrets. SQLite creates new companion files with the same mode.
fn make_private(database: &Path) -> std::io::Result<()> {
    std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(database)?;
    for end in ["", "-wal", "-shm"] {
        let mut name = database.as_os_str().to_owned();
        name.push(end);
        match std::fs::set_permissions(&name, std::fs::Permissions::from_mode(0o600)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the version of the linked SQLite; fails if it is too old to be safe.
pub async fn sqlite_version() -> Result<String, StoreError> {
    // The version cannot change, because SQLite is linked into this binary.
    static FOUND: OnceLock<String> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    let doing = "read SQLite's version";
    let mut memory = SqliteConnection::connect_with(&SqliteConnectOptions::new().in_memory(true)).await.doing(doing)?;
    let found: String = sqlx::query_scalar("SELECT sqlite_version()").fetch_one(&mut memory).await.doing(doing)?;
    if is_new_enough(&found) {
        Ok(FOUND.get_or_init(|| found).clone())
    } else {
        Err(StoreError::SqliteTooOld { found })
    }
}

fn is_new_enough(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let found: [u32; 3] = std::array::from_fn(|_| parts.next().unwrap_or(0));
    found >= MIN_SQLITE
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn synchronous(store: &Store) -> i64 {
        sqlx::query_scalar("PRAGMA synchronous").fetch_one(&store.writer).await.unwrap()
    }

    #[tokio::test]
    async fn only_relaxed_transactions_skip_waiting_for_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("a.db")).await.unwrap();
        let full = 2;
        assert_eq!(synchronous(&store).await, full);
        for committed in [true, false] {
            let mut soon = store.begin_relaxed("test").await.unwrap();
            let level: i64 = sqlx::query_scalar("PRAGMA synchronous").fetch_one(&mut *soon).await.unwrap();
            assert_eq!(level, 1);
            if committed {
                store.commit(soon, "test").await.unwrap();
            } else {
                drop(soon);
            }
            let mut next = store.begin("test").await.unwrap();
            let level: i64 = sqlx::query_scalar("PRAGMA synchronous").fetch_one(&mut *next).await.unwrap();
            assert_eq!(level, full);
            drop(next);
            assert_eq!(synchronous(&store).await, full);
        }
    }

    #[tokio::test]
    async fn the_log_is_checkpointed_when_it_has_grown() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("a.db")).await.unwrap();
        let pages_in_log = async || {
            let (_, pages, folded): (i64, i64, i64) =
                sqlx::query_as("PRAGMA wal_checkpoint(NOOP)").fetch_one(&store.checkpointer).await.unwrap();
            pages - folded
        };
        let write = async |bytes: u32| {
            sqlx::query("INSERT INTO server_secrets VALUES (hex(randomblob(9)), hex(zeroblob(?)))")
                .bind(bytes)
                .execute(&store.writer)
                .await
                .unwrap();
        };
        write(100).await;
        let before = pages_in_log().await;
        store.log_checkpoint().await.unwrap();
        assert_eq!(pages_in_log().await, before, "a few pages are not worth it");
        write(4 << 20).await;
        assert!(pages_in_log().await > CHECKPOINT_PAGES);
        store.log_checkpoint().await.unwrap();
        assert_eq!(pages_in_log().await, 0);
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert!(is_new_enough("3.51.3") && is_new_enough("3.100.0") && is_new_enough("4.0"));
        assert!(!is_new_enough("3.51.2") && !is_new_enough("3.9.9") && !is_new_enough("nonsense"));
    }
}
