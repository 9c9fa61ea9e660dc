//! The database: open, migrate, pools, errors, wake-ups. The SQL lies in the modules below, one table family a file.
//!
//! The server process alone opens it. SQLite in WAL mode has one writer connection (every transaction begins IMMEDIATE,
//! `synchronous = FULL`) and a few readers. `now` (Unix ms) is an argument of every query that needs the time. A change of state
//! and the event that tells of it are one transaction; [`Store::changed`] wakes whoever waits for the next event.

pub mod artifacts;
pub mod claims;
pub mod datasets;
pub mod events;
pub mod jobs;
pub mod keys;
pub mod models;
pub mod moves;
pub mod workers;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sqlx::sqlite::SqlitePool;
use tokio::sync::watch;

use crate::id::JobId;
use crate::job::{Action, State};

pub use artifacts::{CheckpointRow, Publication, PublishCheckpoint};
pub use claims::{Beat, Claimed};
pub use datasets::{DatasetRow, NewDataset};
pub use events::{EventRow, LogRow, SampleQuery, SampleRow, SampleSort, StepRow};
pub use jobs::{JobFilter, JobPatch, JobRow, NewJob};
pub use keys::KeyBegin;
pub use models::{ModelRow, NewModel};
pub use workers::WorkerRow;

/// The database of one server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    writer: SqlitePool,
    readers: SqlitePool,
    changes: Arc<Changes>,
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

/// One page of a list.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// The rows.
    pub data: Vec<T>,
    /// Cursor of the next page; `None` = this is the last one.
    pub next: Option<String>,
}

#[derive(Debug, Default)]
struct Changes {}

/// The time now, Unix ms: what handlers pass as `now`.
pub fn clock_ms() -> i64 {
    todo!()
}

impl Store {
    /// Opens (or creates) the database file and brings its schema up to date. The caller holds the data directory's lock
    /// ([`crate::files::DataDir`]): one server a file.
    pub async fn open(database: &Path) -> Result<Store, StoreError> {
        let _ = (database, SqlitePool::connect(""));
        todo!()
    }

    /// Closes every connection; the WAL is folded into the file.
    pub async fn close(&self) {
        let _ = (&self.writer, &self.readers, &self.changes);
        todo!()
    }

    /// Both pools answer: for `/readyz`.
    pub async fn ping(&self) -> Result<(), StoreError> {
        todo!()
    }

    /// Wakes after every committed change of the job (a new event, a new state). Subscribe first, then read, then wait:
    /// nothing is missed.
    pub fn changed(&self, job: JobId) -> watch::Receiver<u64> {
        let _ = job;
        todo!()
    }

    /// Wakes when a job was queued: for long-polling claims.
    pub fn queue_changed(&self) -> watch::Receiver<u64> {
        todo!()
    }
}
