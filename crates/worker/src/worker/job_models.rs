//! The directories of an attempt's models on this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::model_cache::Lease;

/// The directory of a verified model.
#[derive(Debug)]
pub(super) enum Place {
    /// At the server's path.
    InPlace(PathBuf),
    /// In the cache. The lease prevents its removal.
    Cached(Lease),
}

impl Place {
    fn dir(&self) -> &Path {
        match self {
            Place::InPlace(dir) => dir,
            Place::Cached(lease) => lease.dir(),
        }
    }
}

/// The models of one attempt.
#[derive(Debug)]
pub(super) struct JobModels {
    base: Place,
    /// Verified reward models, by id.
    rewards: BTreeMap<String, Place>,
}

impl JobModels {
    pub(super) fn new(base: Place, rewards: BTreeMap<String, Place>) -> Self {
        Self { base, rewards }
    }

    /// Returns the directory of the model to train.
    pub(super) fn base(&self) -> &Path {
        self.base.dir()
    }

    /// Returns the directories of the reward models.
    pub(super) fn reward_dirs(&self) -> BTreeMap<String, PathBuf> {
        self.rewards.iter().map(|(id, place)| (id.clone(), place.dir().to_owned())).collect()
    }
}
