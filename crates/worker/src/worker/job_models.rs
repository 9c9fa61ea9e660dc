//! Where the models of a job are on this machine during an attempt.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::model_cache::Lease;

/// The directory of a model whose files were verified.
#[derive(Debug)]
pub(super) enum ModelLocation {
    /// The model is at the server's path, which exists on this machine too.
    InPlace(PathBuf),
    /// A copy in the worker's model cache. The lease prevents its removal.
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

/// The models of one attempt at a job.
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
