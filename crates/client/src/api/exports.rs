//! Exports: checkpoints in formats that other programs can load.

use std::path::Path;

use jiff::Timestamp;
use rlood_types::export::{ExportDtype, ExportError, ExportFormat, ExportRequest, Survived};
use rlood_types::id::{CheckpointId, ExportId, JobId};
use rlood_types::protocol::FileEntry;
use rlood_types::task::{TaskProgress, TaskState};
use serde::Deserialize;
use serde_json::json;

use crate::client::Client;
use crate::download::Downloaded;
use crate::error::Error;
use crate::page::Pages;

/// A checkpoint in another format.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Export {
    /// Id of the export.
    pub id: ExportId,
    /// Id of the job.
    pub job_id: JobId,
    /// Id of the checkpoint.
    pub checkpoint_id: CheckpointId,
    /// Step of the checkpoint.
    pub step: u64,
    /// Format of the export.
    pub format: ExportFormat,
    /// Data type of the exported weights; `None` = none was requested, and the server has not chosen one yet.
    pub dtype: Option<ExportDtype>,
    /// Current state of the export.
    pub state: TaskState,
    /// Progress, counted in weights.
    pub progress: TaskProgress,
    /// Total size of the files, in bytes.
    pub size_bytes: Option<u64>,
    /// Files of the export, sorted by name; empty until it has succeeded.
    pub files: Vec<FileEntry>,
    /// How much of the adapter's update survives rounding to the data type.
    pub survived: Option<Survived>,
    /// Advice if too little of the update survives.
    pub advice: Option<String>,
    /// Time at which the export was requested.
    pub created_at: Timestamp,
    /// Time at which the export started.
    pub started_at: Option<Timestamp>,
    /// Time at which the export ended.
    pub finished_at: Option<Timestamp>,
    /// Time at which the export's files are deleted.
    pub expires_at: Option<Timestamp>,
    /// Why the export failed.
    pub error: Option<ExportError>,
}

impl Client {
    /// Exports a checkpoint. [`Client::get_export`] returns the progress.
    ///
    /// # Errors
    /// Fails with `invalid_body`, `storage_full`, or with any other [`Error`].
    pub async fn create_export(&self, id: CheckpointId, request: &ExportRequest) -> Result<Export, Error> {
        self.json(self.post_once(&["checkpoints", &id.to_string(), "exports"]).json(&json!(request))).await
    }

    /// Lists the exports of a checkpoint, newest first.
    pub fn list_exports(&self, id: CheckpointId) -> Pages<Export> {
        Pages::new(self, self.get(&["checkpoints", &id.to_string(), "exports"]))
    }

    /// Returns the export with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_export(&self, id: ExportId) -> Result<Export, Error> {
        self.json(self.get(&["exports", &id.to_string()])).await
    }

    /// Cancels an export. An export that has ended is not changed.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn cancel_export(&self, id: ExportId) -> Result<Export, Error> {
        self.json(self.post_once(&["exports", &id.to_string(), "cancel"])).await
    }

    /// Deletes an export and its files.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn delete_export(&self, id: ExportId) -> Result<(), Error> {
        self.delete(&["exports", &id.to_string()]).await
    }

    /// Downloads a file of an export and verifies its hash.
    ///
    /// # Errors
    /// Fails with `not_ready` until the export has succeeded, or with any other [`Error`].
    pub async fn download_export_file(&self, id: ExportId, file: &FileEntry, to: &Path) -> Result<Downloaded, Error> {
        let call = self.get(&["exports", &id.to_string(), "files", &file.name]);
        self.download(call, to, Some(file.sha256)).await
    }

    /// Downloads all files of an export in one tar.
    ///
    /// # Errors
    /// Fails with `not_ready` until the export has succeeded, or with any other [`Error`].
    pub async fn download_export_archive(&self, id: ExportId, to: &Path) -> Result<Downloaded, Error> {
        self.download(self.get(&["exports", &id.to_string(), "archive.tar"]), to, None).await
    }

    /// Downloads all files of an export into a folder, which is created if necessary. Files that exist with the right hash
    /// are not downloaded again.
    ///
    /// # Errors
    /// Fails with `not_ready` until the export has succeeded, or with any other [`Error`].
    pub async fn download_export(&self, export: &Export, folder: &Path) -> Result<Vec<Downloaded>, Error> {
        let id = export.id.to_string();
        self.download_all(&export.files, folder, |name| self.get(&["exports", &id, "files", name])).await
    }
}
