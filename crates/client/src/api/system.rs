//! The server itself: health, version, workers, who asks.

use jiff::Timestamp;
use rlood_types::access::Scope;
use rlood_types::id::{JobId, KeyId, WorkerId};
use rlood_types::storage::StorageKind;
use serde::Deserialize;
use serde_json::Value;

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// A worker process.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// On its machine.
    pub pid: u32,
    /// What it does.
    pub state: WorkerState,
    /// The job that it runs; `None` also when the job is another owner's.
    pub job_id: Option<JobId>,
    /// Compute threads.
    pub threads: u32,
    /// Its rlood version.
    pub version: String,
    /// When the server heard of it last.
    pub seen_at: Timestamp,
}

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// It waits for a job.
    Idle,
    /// It runs one.
    Running,
    /// The server has not heard of it for too long.
    Lost,
}

/// Who asks, and what they may do.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Session {
    /// Whether the server asks for keys.
    pub keys_required: bool,
    /// The key; `None` for the operator's and without keys.
    pub key_id: Option<KeyId>,
    /// The key's name.
    pub key_name: Option<String>,
    /// Whose jobs, datasets and models are shown; `None` = everybody's.
    pub owner: Option<String>,
    /// What is permitted.
    pub scopes: Vec<Scope>,
}

/// What the server keeps, as far as the client's key sees it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Storage {
    /// The disk of the data directory.
    pub disk: Disk,
    /// Bytes in the data directory: the sum over `kinds`, and over `owners`.
    pub size_bytes: u64,
    /// By kind, all of them.
    pub kinds: Vec<KindStorage>,
    /// By owner, those who have something.
    pub owners: Vec<OwnerStorage>,
    /// Registered models in folders of the operator, which are not in `size_bytes`.
    pub external_models: Amount,
}

/// A disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Disk {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that can be written.
    pub free_bytes: u64,
    /// Bytes that stay free: below this jobs pause.
    pub reserve_bytes: u64,
}

/// How much there is of something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Amount {
    /// Bytes. A file that is linked in several places counts once.
    pub size_bytes: u64,
    /// Models, datasets, checkpoints; of samples and journals the jobs that have some; else files and folders.
    pub count: u64,
}

/// What is kept of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct KindStorage {
    /// The kind.
    pub kind: StorageKind,
    /// What the key sees of it.
    #[serde(flatten)]
    pub amount: Amount,
    /// The most that all owners together may have; `None` = no limit but the disk.
    pub limit_bytes: Option<u64>,
}

/// What is kept for one owner.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct OwnerStorage {
    /// The owner; empty = the operator.
    pub owner: String,
    /// In all.
    #[serde(flatten)]
    pub amount: Amount,
    /// By kind, those of which there is something.
    pub kinds: Vec<KindAmount>,
}

/// What one owner has of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct KindAmount {
    /// The kind.
    pub kind: StorageKind,
    /// How much.
    #[serde(flatten)]
    pub amount: Amount,
}

impl Client {
    /// Returns when the server's process answers.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn livez(&self) -> Result<(), Error> {
        self.text(self.get(&["livez"]).accept("*/*")).await.map(drop)
    }

    /// Returns when the server can do its work.
    ///
    /// # Errors
    /// `not_ready` after several tries, or any other [`Error`].
    pub async fn readyz(&self) -> Result<(), Error> {
        self.text(self.get(&["readyz"]).accept("*/*")).await.map(drop)
    }

    /// The server's measurements, as Prometheus reads them.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn metrics(&self) -> Result<String, Error> {
        self.text(self.get(&["metrics"]).accept("*/*")).await
    }

    /// The API's document (OpenAPI 3.1).
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_openapi(&self) -> Result<Value, Error> {
        self.json(self.get(&["openapi.json"])).await
    }

    /// The server's version.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn version(&self) -> Result<String, Error> {
        let call = self.get(&["openapi.json"]);
        let document: Value = self.json(call.clone()).await?;
        match document["info"]["version"].as_str() {
            Some(version) => Ok(version.to_owned()),
            None => Err(call.not_understood("it has no version")),
        }
    }

    /// The workers, oldest first.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn list_workers(&self) -> Result<Vec<Worker>, Error> {
        Pages::new(self, self.get(&["workers"])).collect().await
    }

    /// What the server keeps, by kind and by owner.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_storage(&self) -> Result<Storage, Error> {
        self.json(self.get(&["system", "storage"])).await
    }

    /// Who asks: by the client's key.
    ///
    /// # Errors
    /// `unauthorized` when the key is not valid, or any other [`Error`].
    pub async fn get_session(&self) -> Result<Session, Error> {
        self.json(self.get(&["session"])).await
    }
}
