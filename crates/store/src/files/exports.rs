//! Exports: a directory each, written by a process of its own beside its place and then renamed.

use std::collections::HashSet;
use std::path::PathBuf;

use super::{DataDir, FilesError, check_file_name, create_private_dir, entries, initial, remove_tree};

impl DataDir {
    /// Where the files of an export lie.
    pub fn export_dir(&self, id: &str) -> PathBuf {
        self.exports().join(id)
    }

    /// A file of an export; the name may come from a client, the result never leaves the export's directory.
    ///
    /// # Errors
    /// A name that is no plain file name.
    pub fn export_file(&self, id: &str, name: &str) -> Result<PathBuf, FilesError> {
        check_file_name(name)?;
        Ok(self.export_dir(id).join(name))
    }

    /// An empty directory in which an export is written. Blocking.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn export_begin(&self, id: &str) -> Result<PathBuf, FilesError> {
        let unfinished = self.export_unfinished_dir(id);
        remove_tree(&unfinished)?;
        create_private_dir(&self.exports())?;
        create_private_dir(&unfinished)?;
        Ok(unfinished)
    }

    /// Puts a directory that was written where the files of its export lie. Blocking.
    ///
    /// # Errors
    /// When it cannot be moved.
    pub fn export_place(&self, id: &str) -> Result<(), FilesError> {
        remove_tree(&self.export_dir(id))?;
        initial::place(&self.export_unfinished_dir(id), &self.export_dir(id))
    }

    /// Removes an export's files, whole or not. Blocking.
    ///
    /// # Errors
    /// When they cannot be removed.
    pub fn export_remove(&self, id: &str) -> Result<(), FilesError> {
        remove_tree(&self.export_unfinished_dir(id))?;
        remove_tree(&self.export_dir(id))
    }

    /// At start: removes what no row names, and what was not finished. Blocking.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn export_sweep(&self, ids: &[String]) -> Result<(), FilesError> {
        let kept: HashSet<PathBuf> = ids.iter().map(|id| self.export_dir(id)).collect();
        if !self.exports().is_dir() {
            return Ok(());
        }
        entries(&self.exports())?.iter().filter(|dir| !kept.contains(*dir)).try_for_each(|dir| remove_tree(dir))
    }

    fn exports(&self) -> PathBuf {
        self.root.join("exports")
    }

    /// The directory in which an export is written.
    pub(crate) fn export_unfinished_dir(&self, id: &str) -> PathBuf {
        self.exports().join(format!("{id}.unfinished"))
    }
}
