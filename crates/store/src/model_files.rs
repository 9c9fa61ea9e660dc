//! Hashes of models' files, stored so that each file is hashed once rather than for every worker that fetches it.

use super::{Doing, Store, StoreError, column, json_column, to_json};
use crate::protocol::FileEntry;

/// The files of a model's directory, as they were when they were hashed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFilesRow {
    /// Digest of the files' names, sizes and modification times when they were hashed.
    pub stamp: String,
    /// The files of the model with their hashes.
    pub files: Vec<FileEntry>,
}

impl Store {
    /// Returns the stored file list of a model's directory, if there is one.
    pub async fn model_files_get(&self, source: &str) -> Result<Option<ModelFilesRow>, StoreError> {
        let row = sqlx::query("SELECT stamp, files FROM model_files WHERE source = ?")
            .bind(source)
            .fetch_optional(&self.readers)
            .await
            .doing("read the files of a model")?;
        row.map(|row| Ok(ModelFilesRow { stamp: column(&row, "stamp")?, files: json_column(&row, "files")? }))
            .transpose()
    }

    /// Stores the file list of a model's directory, and removes the lists of directories without a registered model.
    pub async fn model_files_put(&self, source: &str, stamp: &str, files: &[FileEntry]) -> Result<(), StoreError> {
        let doing = "store the files of a model";
        let mut tx = self.begin(doing).await?;
        sqlx::query("DELETE FROM model_files WHERE source NOT IN (SELECT source FROM models)")
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        sqlx::query("INSERT OR REPLACE INTO model_files (source, stamp, files) VALUES (?, ?, ?)")
            .bind(source)
            .bind(stamp)
            .bind(to_json("files", &files)?)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        self.commit(tx, doing).await
    }
}
