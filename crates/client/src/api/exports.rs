//! Exports: checkpoints in the form that other programs load.

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

/// A checkpoint in another form.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Export {
    /// Its id.
    pub id: ExportId,
    /// The job.
    pub job_id: JobId,
    /// The checkpoint.
    pub checkpoint_id: CheckpointId,
    /// The checkpoint's step.
    pub step: u64,
    /// What it is.
    pub format: ExportFormat,
    /// How the weights are stored; `None` until that is known, where it was not asked for.
    pub dtype: Option<ExportDtype>,
    /// Current state.
    pub state: TaskState,
    /// How far it is, in weights.
    pub progress: TaskProgress,
    /// Bytes of all files.
    pub size_bytes: Option<u64>,
    /// Its files, by name; empty before the end.
    pub files: Vec<FileEntry>,
    /// What of the adapter's update survives the rounding to the dtype.
    pub survived: Option<Survived>,
    /// What to do where too little of it survives.
    pub advice: Option<String>,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When it began.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// When its files are removed.
    pub expires_at: Option<Timestamp>,
    /// Why it failed.
    pub error: Option<ExportError>,
}

impl Client {
    /// Exports a checkpoint; [`Client::get_export`] tells how far it is.
    ///
    /// # Errors
    /// `invalid_body`, `storage_full`, or any other [`Error`].
    pub async fn create_export(&self, id: CheckpointId, request: &ExportRequest) -> Result<Export, Error> {
        self.json(self.post_once(&["checkpoints", &id.to_string(), "exports"]).json(&json!(request))).await
    }

    /// The exports of a checkpoint, newest first.
    pub fn list_exports(&self, id: CheckpointId) -> Pages<Export> {
        Pages::new(self, self.get(&["checkpoints", &id.to_string(), "exports"]))
    }

    /// One export.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_export(&self, id: ExportId) -> Result<Export, Error> {
        self.json(self.get(&["exports", &id.to_string()])).await
    }

    /// Cancels an export; one that has ended stays as it is.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn cancel_export(&self, id: ExportId) -> Result<Export, Error> {
        self.json(self.post_once(&["exports", &id.to_string(), "cancel"])).await
    }

    /// Removes an export and its files.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn delete_export(&self, id: ExportId) -> Result<(), Error> {
        self.delete(&["exports", &id.to_string()]).await
    }

    /// Downloads a file of an export, and compares it with the export's list.
    ///
    /// # Errors
    /// `not_ready` before the end, or any other [`Error`].
    pub async fn download_export_file(&self, id: ExportId, file: &FileEntry, to: &Path) -> Result<Downloaded, Error> {
        let call = self.get(&["exports", &id.to_string(), "files", &file.name]);
        self.download(call, to, Some(file.sha256)).await
    }

    /// Downloads all files of an export in one tar.
    ///
    /// # Errors
    /// `not_ready` before the end, or any other [`Error`].
    pub async fn download_export_archive(&self, id: ExportId, to: &Path) -> Result<Downloaded, Error> {
        self.download(self.get(&["exports", &id.to_string(), "archive.tar"]), to, None).await
    }

    /// Downloads all files of an export into a folder, which is made if it is not there. Files that are there and whole are not
    /// asked for again.
    ///
    /// # Errors
    /// `not_ready` before the end, or any other [`Error`].
    pub async fn download_export(&self, export: &Export, folder: &Path) -> Result<Vec<Downloaded>, Error> {
        let id = export.id.to_string();
        self.download_all(&export.files, folder, |name| self.get(&["exports", &id, "files", name])).await
    }
}
