//! The files of a job's models, for a worker that cannot read them at the server's path.

use serde::{Deserialize, Serialize};

use super::FileEntry;

/// The files of one of a job's models, as they lie on the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFiles {
    /// The files that make the model, by name; null = the server is still hashing them: ask again.
    pub files: Option<Vec<FileEntry>>,
}
