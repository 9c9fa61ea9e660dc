//! What a server keeps on its disk, by kind.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What bytes of the data directory are kept for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StorageKind {
    /// Models that the server downloaded or brought along. Those of other folders are counted apart.
    Models,
    /// Rows of datasets.
    Datasets,
    /// Published checkpoints, adapters among them.
    Checkpoints,
    /// PEFT adapters that were uploaded, or come from the hub.
    Adapters,
    /// Checkpoints written in another form, for a week.
    Exports,
    /// Adapters that jobs with a warm start begin with, where no checkpoint holds the same file.
    InitialAdapters,
    /// Completions and reward answers since the last checkpoint of a job, in the database.
    Journals,
    /// Stored completions with their rewards, in the database.
    Samples,
    /// The rest of the database.
    Database,
    /// Uploads that are not complete yet, and files that a backup holds.
    Staging,
    /// What the server's own workers have not published yet.
    Scratch,
    /// Anything else.
    Other,
}

impl StorageKind {
    /// All of them.
    pub const ALL: [StorageKind; 12] = [
        StorageKind::Models,
        StorageKind::Datasets,
        StorageKind::Checkpoints,
        StorageKind::Adapters,
        StorageKind::Exports,
        StorageKind::InitialAdapters,
        StorageKind::Journals,
        StorageKind::Samples,
        StorageKind::Database,
        StorageKind::Staging,
        StorageKind::Scratch,
        StorageKind::Other,
    ];

    /// The kinds that a limit can be set for: what users add.
    pub const LIMITED: [StorageKind; 3] = [StorageKind::Models, StorageKind::Datasets, StorageKind::Checkpoints];

    /// The name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            StorageKind::Models => "models",
            StorageKind::Datasets => "datasets",
            StorageKind::Checkpoints => "checkpoints",
            StorageKind::Adapters => "adapters",
            StorageKind::Exports => "exports",
            StorageKind::InitialAdapters => "initial_adapters",
            StorageKind::Journals => "journals",
            StorageKind::Samples => "samples",
            StorageKind::Database => "database",
            StorageKind::Staging => "staging",
            StorageKind::Scratch => "scratch",
            StorageKind::Other => "other",
        }
    }
}

impl fmt::Display for StorageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// No limit can be set for this.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' has no limit: name models, datasets or checkpoints")]
pub struct NoLimit(String);

impl FromStr for StorageKind {
    type Err = NoLimit;

    /// Reads the name of a kind that can be limited.
    fn from_str(text: &str) -> Result<Self, NoLimit> {
        let known = Self::LIMITED.into_iter().find(|kind| kind.as_str() == text);
        known.ok_or_else(|| NoLimit(text.chars().take(40).collect()))
    }
}

/// The most bytes of each kind; a kind that is not here has no limit.
pub type StorageLimits = BTreeMap<StorageKind, u64>;

/// What one owner has of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StorageUse {
    /// Bytes, a file that is linked in several places counted once.
    pub size_bytes: u64,
    /// Models, datasets, checkpoints; jobs that have samples or a journal; else files.
    pub count: u64,
}

impl std::ops::AddAssign for StorageUse {
    fn add_assign(&mut self, other: Self) {
        self.size_bytes += other.size_bytes;
        self.count += other.count;
    }
}
