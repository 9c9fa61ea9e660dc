//! Imported PEFT adapters: two files in a folder, staged and then moved to their final path.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::{DataDir, FilesError, create_private_dir, entries, initial, remove_tree};
use crate::id::AdapterId;

/// A directory in `staging/`, removed when dropped unless it was moved to its final path.
#[derive(Debug)]
pub struct StagedDir(PathBuf);

impl StagedDir {
    /// Returns the current path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for StagedDir {
    fn drop(&mut self) {
        // If the directory cannot be removed now, the next server start removes it.
        let _ = remove_tree(&self.0);
    }
}

impl DataDir {
    /// Returns the directory of an adapter's files.
    pub fn adapter_dir(&self, id: AdapterId) -> PathBuf {
        self.adapters().join(id.to_string())
    }

    /// Moves a directory of staged files to the path of an adapter. Blocking.
    pub fn adapter_place(&self, id: AdapterId, staged: &Path) -> Result<(), FilesError> {
        initial::place(staged, &self.adapter_dir(id))
    }

    /// Removes an adapter's files. Blocking.
    pub fn adapter_remove(&self, id: AdapterId) -> Result<(), FilesError> {
        remove_tree(&self.adapter_dir(id))
    }

    /// Removes adapters without a database row. Called at start. Blocking.
    pub fn adapter_sweep(&self, adapters: &[AdapterId]) -> Result<(), FilesError> {
        let kept: HashSet<PathBuf> = adapters.iter().map(|id| self.adapter_dir(*id)).collect();
        if !self.adapters().is_dir() {
            return Ok(());
        }
        entries(&self.adapters())?.iter().filter(|dir| !kept.contains(*dir)).try_for_each(|dir| remove_tree(dir))
    }

    /// Creates a directory in `staging/` for files that belong together. Blocking.
    pub fn stage_dir(&self) -> Result<StagedDir, FilesError> {
        let name = format!("folder-{}", ulid::Ulid::generate().to_string().to_lowercase());
        let path = self.staging().join(name);
        create_private_dir(&path)?;
        Ok(StagedDir(path))
    }

    fn adapters(&self) -> PathBuf {
        self.root.join("adapters")
    }
}
