//! The files of a job's models, for a worker that cannot read them at the server's path.

use serde::{Deserialize, Serialize};

use super::FileEntry;

/// The files of one of the job's models on the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFiles {
    /// Files of the model, sorted by name; null = the server is still hashing them, ask again.
    pub files: Option<Vec<FileEntry>>,
}
