//! The database: open, migrate, pools, errors, wake-ups. The SQL lies in the modules below, one table family a file.
//!
//! The server process alone opens it. SQLite in WAL mode has one writer connection (every transaction begins IMMEDIATE,
//! `synchronous = FULL`) and a few readers. `now` (Unix ms) is an argument of every query that needs the time. A change of state
//! and the event that tells of it are one transaction; [`Store::changed`] wakes whoever waits for the next event.

pub mod adapters;
pub mod api_keys;
pub mod artifacts;
pub mod attempts;
pub mod audit;
pub mod callbacks;
pub mod claims;
pub mod courses;
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
pub mod steps;
pub mod storage;
mod task_rows;
pub mod tasks;
mod version;
pub mod webhooks;
pub mod workers;

use rlood_types::{access, callback, digest, event, failpoint, id, job, lifecycle, protocol, sample, spec, verdict};

use std::collections::HashMap;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

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
pub use callbacks::{Counted, Taken};
pub use claims::{Beat, Claimed, Damage};
pub use courses::Course;
pub use datasets::{DatasetRow, NewDataset};
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
use rows::{Doing, column, corrupt, count_column, id_column, int, json_column, to_json, word, word_column};
pub use samples::{SampleQuery, SampleRow, SampleSort, SamplesRemoved};
pub use sessions::{SessionKey, SessionRow};
pub use steps::{StepLine, StepLines};
pub use task_rows::{NewTask, TaskKind, TaskRow};
pub use tasks::TaskEnd;
pub use workers::WorkerRow;

/// The database of one server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    writer: SqlitePool,
    readers: SqlitePool,
    /// Searches.
    searchers: SqlitePool,
    /// Folds the log.
    folder: SqlitePool,
    changes: Arc<Changes>,
    /// Whether a job that succeeds with an evaluation is judged by itself.
    judges: bool,
}

/// What the store was asked to do and could not.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database file cannot be opened or created.
    #[error("could not open the database {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// Versions before 3.51.3 can corrupt a WAL database.
    #[error("SQLite {found} is too old: 3.51.3 or later is needed (earlier ones can corrupt a database in WAL mode)")]
    SqliteTooOld {
        /// Its version.
        found: String,
    },
    /// The schema cannot be brought up to date.
    #[error("could not migrate the database")]
    Migrate {
        /// Why.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
    /// It has what this rlood knows nothing of.
    #[error(
        "the database was written by a newer rlood (its migration {found}; this one knows {known}): use that rlood or a later one"
    )]
    Newer {
        /// Its last migration.
        found: i64,
        /// The last one known here.
        known: i64,
    },
    /// It lacks what this rlood expects.
    #[error(
        "the database is of an older rlood (without migration {missing}): use that rlood, or let `rlood serve` of this one bring it up to date"
    )]
    Older {
        /// The first migration that it lacks.
        missing: i64,
    },
    /// SQLite refused a statement.
    #[error("could not {doing}")]
    Database {
        /// What the statement was for.
        doing: &'static str,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// A stored value does not read back.
    #[error("could not read the stored {what}")]
    Corrupt {
        /// Which column of what.
        what: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is none.
    #[error("there is no {kind} '{id}'")]
    NotFound {
        /// `job`, `dataset`, ….
        kind: &'static str,
        /// As asked for.
        id: String,
    },
    /// The name is taken by something else.
    #[error("the {kind} '{id}' exists already and is a different one")]
    Exists {
        /// `model`.
        kind: &'static str,
        /// As asked for.
        id: String,
    },
    /// It cannot be deleted yet.
    #[error("the {kind} '{id}' is used by {} that are not over", count_of_jobs(.jobs))]
    InUse {
        /// `dataset` or `model`.
        kind: &'static str,
        /// As asked for.
        id: String,
        /// The jobs, oldest first (at most 20).
        jobs: Vec<JobId>,
    },
    /// The job's state does not allow it; [`State::actions`] are what it does allow.
    #[error("cannot {} a job that is {}", .action.as_str(), .state.as_str())]
    IllegalMove {
        /// Where the job stands.
        state: State,
        /// What was asked for.
        action: Action,
    },
    /// The attempt does not own the job any more.
    #[error("the claim is lost: this attempt does not own the job any more")]
    LeaseLost,
    /// A page cursor that this server did not make.
    #[error("the cursor is not one of this list: start again without 'after'")]
    BadCursor,
}

fn count_of_jobs(jobs: &[JobId]) -> String {
    if jobs.len() == 1 { "1 job".to_owned() } else { format!("{} jobs", jobs.len()) }
}

impl StoreError {
    /// There was no space to write to (SQLITE_FULL).
    pub fn is_disk_full(&self) -> bool {
        let StoreError::Database { source, .. } = self else { return false };
        match source {
            sqlx::Error::Io(error) => error.kind() == std::io::ErrorKind::StorageFull,
            other => other.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "13"),
        }
    }
}

/// Wake-ups: a counter per job that somebody waits for, one for the queue, one for what reward services send, and which
/// jobs changed, for whoever looks at all.
#[derive(Debug)]
struct Changes {
    jobs: Mutex<HashMap<JobId, watch::Sender<u64>>>,
    queue: watch::Sender<u64>,
    callbacks: watch::Sender<u64>,
    tasks: watch::Sender<u64>,
    all: broadcast::Sender<JobNews>,
}

/// A job that is new, changed or gone.
#[derive(Debug, Clone)]
pub struct JobNews {
    /// The job.
    pub id: JobId,
    /// Whose it was, when it is gone: nobody can ask any more.
    pub gone_of: Option<String>,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            jobs: Mutex::default(),
            queue: watch::Sender::default(),
            callbacks: watch::Sender::default(),
            tasks: watch::Sender::default(),
            all: broadcast::Sender::new(CHANGES),
        }
    }
}

/// Changed jobs that may wait for whoever looks at all of them.
const CHANGES: usize = 1024;

/// The time now, Unix ms: what handlers pass as `now`.
pub fn clock_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// Connections for searches that may read much: nothing else waits for them.
const SEARCHERS: u32 = 2;

/// Pages in the log that are worth folding it into the database: 4 MiB.
const FOLDED_PAGES: i64 = 1000;
/// Pages in the log at which the writer itself folds it, should nobody else.
const MOST_PAGES: &str = "16384";

/// Before this version a WAL database can be corrupted when a checkpoint meets a reset of the log.
const OLDEST_SQLITE: [u32; 3] = [3, 51, 3];

impl Store {
    /// Opens (or creates) the database file, for this user only, and brings its schema up to date. The caller holds the data directory's lock
    /// ([`crate::files::DataDir`]): one server a file.
    pub async fn open(database: &Path) -> Result<Store, StoreError> {
        sqlite_version().await?;
        let cannot_open = |source| StoreError::Open { path: database.to_owned(), source };
        make_private(database).map_err(|error| cannot_open(sqlx::Error::Io(error)))?;
        let options = SqliteConnectOptions::new()
            .filename(database)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(5))
            .pragma("trusted_schema", "OFF");
        // Connections live as long as the server: no lifetime, no idle time, no ping before use.
        let pool = SqlitePoolOptions::new().max_lifetime(None).idle_timeout(None).test_before_acquire(false);
        let writer = pool
            .clone()
            .max_connections(1)
            // Whatever the one before wanted.
            .before_acquire(|writer, _| {
                Box::pin(async move { sqlx::query("PRAGMA synchronous = FULL").execute(writer).await.map(|_| true) })
            })
            .connect_with(
                options
                    .clone()
                    .create_if_missing(true)
                    .journal_mode(SqliteJournalMode::Wal)
                    .synchronous(SqliteSynchronous::Full)
                    .pragma("wal_autocheckpoint", MOST_PAGES)
                    .optimize_on_close(true, 400),
            )
            .await
            .map_err(cannot_open)?;
        version::MIGRATIONS.run(&writer).await.map_err(version::not_migrated)?;
        let folder = pool.clone().max_connections(1).connect_lazy_with(options.clone());
        let searchers = pool.clone().max_connections(SEARCHERS).connect_lazy_with(options.clone().read_only(true));
        let readers = pool.max_connections(4).connect_with(options.read_only(true)).await.map_err(cannot_open)?;
        let changes = Arc::default();
        Ok(Store { writer, readers, searchers, folder, changes, judges: false })
    }

    /// Closes every connection; the WAL is folded into the file.
    pub async fn close(&self) {
        self.readers.close().await;
        self.searchers.close().await;
        self.folder.close().await;
        self.writer.close().await;
    }

    /// Both pools answer: for `/readyz`.
    pub async fn ping(&self) -> Result<(), StoreError> {
        sqlx::query("SELECT 1 FROM jobs LIMIT 1").execute(&self.readers).await.doing("read the database")?;
        sqlx::query("SELECT 1 FROM jobs LIMIT 1").execute(&self.writer).await.doing("reach the writer")?;
        Ok(())
    }

    /// Wakes after every committed change of the job (a new event, a new state). Subscribe first, then read, then wait:
    /// nothing is missed.
    pub fn changed(&self, job: JobId) -> watch::Receiver<u64> {
        let mut jobs = self.changes.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.entry(job).or_insert_with(|| watch::Sender::new(0)).subscribe()
    }

    /// Wakes when a job was queued: for long-polling claims.
    pub fn queue_changed(&self) -> watch::Receiver<u64> {
        self.changes.queue.subscribe()
    }

    /// The same store; with `judges`, a job that succeeds and has an evaluation gets a verdict, unless it asks for none.
    #[must_use]
    pub fn with_verdicts(mut self, judges: bool) -> Self {
        self.judges = judges;
        self
    }

    /// Wakes when a task was queued or cancelled.
    pub fn tasks_changed(&self) -> watch::Receiver<u64> {
        self.changes.tasks.subscribe()
    }

    /// Names every job that is new, changed or gone.
    pub fn changed_jobs(&self) -> broadcast::Receiver<JobNews> {
        self.changes.all.subscribe()
    }

    async fn begin(&self, doing: &'static str) -> Result<Transaction<'static, Sqlite>, StoreError> {
        let begin = if without!(Immediate) { "BEGIN" } else { "BEGIN IMMEDIATE" };
        self.writer.begin_with(begin).await.doing(doing)
    }

    /// For what may be lost with the machine, never with the process: nobody waits for the disk.
    async fn begin_soon(&self, doing: &'static str) -> Result<Transaction<'static, Sqlite>, StoreError> {
        if without!(Immediate) {
            return self.begin(doing).await;
        }
        self.writer.begin_with("PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE").await.doing(doing)
    }

    /// Copies the log into the database when it has grown, beside the writer: otherwise one request in a hundred would have to.
    pub async fn log_fold(&self) -> Result<(), StoreError> {
        let doing = "fold the database's log";
        let (_, pages, folded): (i64, i64, i64) =
            sqlx::query_as("PRAGMA wal_checkpoint(NOOP)").fetch_one(&self.folder).await.doing(doing)?;
        if pages - folded >= FOLDED_PAGES {
            sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").execute(&self.folder).await.doing(doing)?;
        }
        Ok(())
    }

    async fn commit(&self, tx: Transaction<'static, Sqlite>, doing: &'static str) -> Result<(), StoreError> {
        fail_point!("store.before_commit", doing).map_err(sqlx::Error::Io).doing(doing)?;
        tx.commit().await.doing(doing)?;
        fail_point!("store.after_commit", doing).map_err(sqlx::Error::Io).doing(doing)
    }

    /// Call after the commit, never before.
    fn wake_job(&self, job: JobId) {
        self.tell(JobNews { id: job, gone_of: None });
    }

    /// The same, of a job that was deleted.
    fn wake_gone(&self, job: JobId, owner: String) {
        self.tell(JobNews { id: job, gone_of: Some(owner) });
    }

    fn tell(&self, news: JobNews) {
        let job = news.id;
        // An error says that nobody looks.
        let _ = self.changes.all.send(news);
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

    /// Wakes the workers that wait for a job. Call after the commit, never before.
    pub fn wake_queue(&self) {
        self.changes.queue.send_modify(|count| *count += 1);
    }
}

/// Creates the file if need be, and takes it and the files beside it from other users, whatever the directory permits: secrets
/// stand in them. SQLite gives new files beside it the same mode.
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

/// The version of the SQLite inside; an error when it is too old to be trusted.
pub async fn sqlite_version() -> Result<String, StoreError> {
    // It is linked into this binary.
    static FOUND: OnceLock<String> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    let doing = "ask SQLite for its version";
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
    found >= OLDEST_SQLITE
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn synchronous(store: &Store) -> i64 {
        sqlx::query_scalar("PRAGMA synchronous").fetch_one(&store.writer).await.unwrap()
    }

    #[tokio::test]
    async fn only_what_may_be_lost_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("a.db")).await.unwrap();
        let full = 2;
        assert_eq!(synchronous(&store).await, full);
        for committed in [true, false] {
            let mut soon = store.begin_soon("test").await.unwrap();
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
    async fn the_log_is_folded_when_it_has_grown() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("a.db")).await.unwrap();
        let unfolded = async || {
            let (_, pages, folded): (i64, i64, i64) =
                sqlx::query_as("PRAGMA wal_checkpoint(NOOP)").fetch_one(&store.folder).await.unwrap();
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
        let before = unfolded().await;
        store.log_fold().await.unwrap();
        assert_eq!(unfolded().await, before, "a few pages are not worth it");
        write(4 << 20).await;
        assert!(unfolded().await > FOLDED_PAGES);
        store.log_fold().await.unwrap();
        assert_eq!(unfolded().await, 0);
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert!(is_new_enough("3.51.3") && is_new_enough("3.100.0") && is_new_enough("4.0"));
        assert!(!is_new_enough("3.51.2") && !is_new_enough("3.9.9") && !is_new_enough("nonsense"));
    }
}
