//! The directories of an attempt's models on this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::model_cache::Lease;

/// The directory of a verified model.
#[derive(Debug)]
pub(super) enum ModelLocation {
    /// The server's own path, valid on this machine.
    InPlace(PathBuf),
    /// A copy in the cache. The lease prevents its removal.
    Cached(Lease),
}

impl ModelLocation {
    fn dir(&self) -> &Path {
        match self {
            ModelLocation::InPlace(dir) => dir,
            ModelLocation::Cached(lease) => lease.dir(),
        }
    }
}

/// The models of one attempt.
#[derive(Debug)]
pub(super) struct JobModels {
    base: ModelLocation,
    /// Verified reward models, by id.
    rewards: BTreeMap<String, ModelLocation>,
}

impl JobModels {
    pub(super) fn new(base: ModelLocation, rewards: BTreeMap<String, ModelLocation>) -> Self {
        Self { base, rewards }
    }

    /// Returns the directory of the model to train.
    pub(super) fn base(&self) -> &Path {
        self.base.dir()
    }

    /// Returns the directories of the reward models.
    pub(super) fn reward_dirs(&self) -> BTreeMap<String, PathBuf> {
        self.rewards.iter().map(|(id, location)| (id.clone(), location.dir().to_owned())).collect()
    }
}
