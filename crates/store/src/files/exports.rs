//! Files of exports. A child process writes each export to a temporary directory, which is then renamed.

use std::collections::HashSet;
use std::path::PathBuf;

use super::{DataDir, FilesError, check_file_name, create_private_dir, entries, initial, remove_tree};

impl DataDir {
    /// Returns the directory of an export's files.
    pub fn export_dir(&self, id: &str) -> PathBuf {
        self.exports().join(id)
    }

    /// Returns the path of a file of an export. The name may come from a client; the path is always inside the export's directory.
    ///
    /// # Errors
    /// Fails for a name that is not a plain file name.
    pub fn export_file(&self, id: &str, name: &str) -> Result<PathBuf, FilesError> {
        check_file_name(name)?;
        Ok(self.export_dir(id).join(name))
    }

    /// Creates an empty directory in which an export is written. Blocking.
    ///
    /// # Errors
    /// Fails if the directory cannot be created.
    pub fn export_begin(&self, id: &str) -> Result<PathBuf, FilesError> {
        let unfinished = self.export_unfinished_dir(id);
        remove_tree(&unfinished)?;
        create_private_dir(&self.exports())?;
        create_private_dir(&unfinished)?;
        Ok(unfinished)
    }

    /// Moves a completely written directory to the path of its export. Blocking.
    ///
    /// # Errors
    /// Fails if the directory cannot be moved.
    pub fn export_place(&self, id: &str) -> Result<(), FilesError> {
        remove_tree(&self.export_dir(id))?;
        initial::place(&self.export_unfinished_dir(id), &self.export_dir(id))
    }

    /// Removes an export's files, complete or not. Blocking.
    ///
    /// # Errors
    /// Fails if the files cannot be removed.
    pub fn export_remove(&self, id: &str) -> Result<(), FilesError> {
        remove_tree(&self.export_unfinished_dir(id))?;
        remove_tree(&self.export_dir(id))
    }

    /// Removes exports without a database row, and incomplete ones. Called at start. Blocking.
    ///
    /// # Errors
    /// Fails if the files cannot be removed.
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
