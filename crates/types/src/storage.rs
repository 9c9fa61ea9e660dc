//! Storage on the server's disk, by kind.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of stored data in the data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StorageKind {
    /// Models that the server downloaded or that come with it. Models in other folders are counted separately.
    Models,
    /// Rows of uploaded and downloaded datasets.
    Datasets,
    /// Published checkpoints, including adapters.
    Checkpoints,
    /// PEFT adapters that were uploaded or fetched from the hub.
    Adapters,
    /// Exported checkpoints, such as merged models; kept for a week.
    Exports,
    /// Starting adapters of jobs with a warm start, unless a checkpoint holds the same file.
    InitialAdapters,
    /// Completions and reward answers since the last checkpoint of a job, in the database.
    Journals,
    /// Stored completions with their rewards, in the database.
    Samples,
    /// The rest of the database.
    Database,
    /// Incomplete uploads, and files that a backup holds.
    Staging,
    /// Files of the server's own workers that are not published yet.
    Scratch,
    /// All other files in the data directory.
    Other,
}

impl StorageKind {
    /// All kinds, in the order of the API.
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

    /// The kinds of data that can have a limit, which are those that users add.
    pub const LIMITED: [StorageKind; 3] = [StorageKind::Models, StorageKind::Datasets, StorageKind::Checkpoints];

    /// Returns the name in the API.
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

/// The error for a kind that cannot have a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the storage of '{0}' has no limit: name models, datasets or checkpoints")]
pub struct NoLimit(String);

impl FromStr for StorageKind {
    type Err = NoLimit;

    /// Parses the name of a kind that can have a limit.
    fn from_str(text: &str) -> Result<Self, NoLimit> {
        let known = Self::LIMITED.into_iter().find(|kind| kind.as_str() == text);
        known.ok_or_else(|| NoLimit(text.chars().take(40).collect()))
    }
}

/// Maximum number of bytes per kind. A kind that is missing has no limit.
pub type StorageLimits = BTreeMap<StorageKind, u64>;

/// An owner's stored data of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StorageUse {
    /// Size in bytes. A file that is linked in several places counts once.
    pub size_bytes: u64,
    /// Number of models, datasets or checkpoints; for samples and journals the number of jobs that have some;
    /// otherwise the number of files.
    pub count: u64,
}

impl std::ops::AddAssign for StorageUse {
    fn add_assign(&mut self, other: Self) {
        self.size_bytes += other.size_bytes;
        self.count += other.count;
    }
}
