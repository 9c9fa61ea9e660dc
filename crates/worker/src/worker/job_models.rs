//! Where the models of an attempt lie on this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::model_cache::Lease;

/// The directory of a model whose bytes are the plan's.
#[derive(Debug)]
pub(super) enum Place {
    /// Where the server has it.
    InPlace(PathBuf),
    /// In the cache, from which it is not removed while this lives.
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
    /// By id, those whose bytes have been compared.
    rewards: BTreeMap<String, Place>,
}

impl JobModels {
    pub(super) fn new(base: Place, rewards: BTreeMap<String, Place>) -> Self {
        Self { base, rewards }
    }

    /// The directory of the model to train.
    pub(super) fn base(&self) -> &Path {
        self.base.dir()
    }

    /// The directories of reward models.
    pub(super) fn reward_dirs(&self) -> BTreeMap<String, PathBuf> {
        self.rewards.iter().map(|(id, place)| (id.clone(), place.dir().to_owned())).collect()
    }
}
