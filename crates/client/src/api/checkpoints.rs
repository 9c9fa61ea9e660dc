//! Checkpoints of jobs, and their files.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::event::Metrics;
use rlood_types::id::{CheckpointId, JobId};
use rlood_types::protocol::FileEntry;
use serde::Deserialize;
use serde_json::Value;

use crate::call::Call;
use crate::client::Client;
use crate::download::{Checked, Downloaded, hash_of};
use crate::error::Error;
use crate::page::Pages;

/// Time that a server may take to compute the certificate of a checkpoint from before certificates.
const CERTIFICATE_TIME: Duration = Duration::from_secs(600);

/// A published checkpoint of a job.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Checkpoint {
    /// Id of the checkpoint.
    pub id: CheckpointId,
    /// Id of the checkpoint's job.
    pub job_id: JobId,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Files of the checkpoint.
    pub files: Vec<FileEntry>,
    /// Metrics of the checkpoint's step; a value of `None` = undefined.
    pub metrics: Metrics,
    /// Whether the checkpoint is the best one so far.
    pub best: bool,
    /// Whether the checkpoint is kept when older ones are deleted.
    pub pinned: bool,
    /// Time at which the checkpoint was published.
    pub created_at: Timestamp,
}

/// Selects one of a job's checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The newest checkpoint of the job.
    Last,
    /// The best checkpoint of the job.
    Best,
}

impl Client {
    /// Lists a job's checkpoints, newest first.
    pub fn list_checkpoints(&self, id: JobId) -> Pages<Checkpoint> {
        Pages::new(self, self.get(&["jobs", &id.to_string(), "checkpoints"]))
    }

    /// Returns the checkpoint with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_checkpoint(&self, id: CheckpointId) -> Result<Checkpoint, Error> {
        self.json(self.get(&["checkpoints", &id.to_string()])).await
    }

    /// Returns a checkpoint's manifest as the worker wrote it.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_manifest(&self, id: CheckpointId) -> Result<Value, Error> {
        self.json(self.get(&["checkpoints", &id.to_string(), "manifest.json"])).await
    }

    /// Gets the certificate of a checkpoint: log-probabilities by which a server of the checkpoint can be checked. A server that has to
    /// compute it first may take minutes.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_certificate(&self, id: CheckpointId) -> Result<Value, Error> {
        self.json(self.get(&["checkpoints", &id.to_string(), "certificate"]).work(CERTIFICATE_TIME)).await
    }

    /// Downloads a job's LoRA adapter in PEFT's layout, as a tar; by default of the job's result.
    ///
    /// # Errors
    /// Fails with `no_checkpoint` if there is none yet, `no_adapter` after full fine-tuning, or with any other [`Error`].
    pub async fn download_adapter(&self, id: JobId, which: Option<Which>, to: &Path) -> Result<Downloaded, Error> {
        let which = which.map(|which| match which {
            Which::Last => "last",
            Which::Best => "best",
        });
        self.download(self.get(&["jobs", &id.to_string(), "adapter"]).query_if("which", which), to, None).await
    }

    /// Downloads a file of an adapter that a running job has published for its rollout servers.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn download_rollout_adapter_file(
        &self,
        id: JobId,
        adapter: &str,
        file: &str,
        to: &Path,
    ) -> Result<Downloaded, Error> {
        self.download(self.get(&["jobs", &id.to_string(), "rollout-adapters", adapter, file]), to, None).await
    }

    /// Downloads all files of a checkpoint in one tar.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn download_archive(&self, id: CheckpointId, to: &Path) -> Result<Downloaded, Error> {
        self.download(self.get(&["checkpoints", &id.to_string(), "archive.tar"]), to, None).await
    }

    /// Downloads a file of a checkpoint and verifies its hash.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn download_file(&self, id: CheckpointId, file: &FileEntry, to: &Path) -> Result<Downloaded, Error> {
        let call = self.get(&["checkpoints", &id.to_string(), "files", &file.name]);
        self.download(call, to, Some(file.sha256)).await
    }

    /// Downloads all files of a checkpoint into a folder, which is created if necessary. Files that exist with the right
    /// hash are not downloaded again.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn download_files(&self, checkpoint: &Checkpoint, folder: &Path) -> Result<Vec<Downloaded>, Error> {
        let id = checkpoint.id.to_string();
        self.download_all(&checkpoint.files, folder, |name| self.get(&["checkpoints", &id, "files", name])).await
    }

    /// Downloads files with known hashes into a folder; `call` creates the request for a file name.
    pub(crate) async fn download_all(
        &self,
        files: &[FileEntry],
        folder: &Path,
        call: impl Fn(&str) -> Call,
    ) -> Result<Vec<Downloaded>, Error> {
        let made = tokio::fs::create_dir_all(folder).await;
        made.map_err(Error::disk(format!("create the download folder {}", folder.display())))?;
        let mut downloaded = Vec::with_capacity(files.len());
        for file in files {
            let path = folder.join(&file.name);
            if Path::new(&file.name).file_name() != Some(file.name.as_ref()) {
                return Err(Error::Settings(format!(
                    "the checkpoint lists '{}', which is not a valid file name",
                    file.name
                )));
            }
            let FileEntry { name: _, size_bytes, sha256 } = file;
            downloaded.push(if hash_of(&path, *size_bytes).await.as_ref() == Some(sha256) {
                Downloaded { path, size_bytes: *size_bytes, sha256: *sha256, checked: Checked::Sha256 }
            } else {
                self.download(call(&file.name), &path, Some(*sha256)).await?
            });
        }
        Ok(downloaded)
    }

    /// Keeps a checkpoint when older ones are deleted.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn pin_checkpoint(&self, id: CheckpointId) -> Result<Checkpoint, Error> {
        self.json(self.post_once(&["checkpoints", &id.to_string(), "pin"])).await
    }

    /// Allows a checkpoint to be deleted when it is old.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn unpin_checkpoint(&self, id: CheckpointId) -> Result<Checkpoint, Error> {
        self.json(self.call(Method::DELETE, &["checkpoints", &id.to_string(), "pin"])).await
    }
}
