//! The server itself: health, version, workers, session and storage.

use jiff::Timestamp;
use rlood_types::id::{JobId, KeyId, WorkerId};
use rlood_types::scopes::Scope;
use rlood_types::storage::StorageKind;
use serde::Deserialize;
use serde_json::Value;

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// A worker process and its state.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Worker {
    /// Id of the worker.
    pub id: WorkerId,
    /// Device of the worker: `cpu`, `cuda:0`.
    pub device: String,
    /// Process id on the worker's machine.
    pub pid: u32,
    /// Current state of the worker.
    pub state: WorkerState,
    /// Id of the job that it runs; also `None` if the job belongs to another owner.
    pub job_id: Option<JobId>,
    /// Number of compute threads.
    pub threads: u32,
    /// Version of the worker's rlood.
    pub version: String,
    /// Time of the last message from the worker.
    pub seen_at: Timestamp,
}

/// State of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// The worker waits for a job.
    Idle,
    /// The worker runs a job.
    Running,
    /// The server has not received a message from the worker for too long.
    Lost,
}

/// The caller's identity and permissions.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Session {
    /// Whether the server requires keys.
    pub keys_required: bool,
    /// Id of the key; `None` for the operator's key and without keys.
    pub key_id: Option<KeyId>,
    /// Name of the key.
    pub key_name: Option<String>,
    /// Owner whose jobs, datasets and models are visible; `None` = all owners.
    pub owner: Option<String>,
    /// Scopes of the caller.
    pub scopes: Vec<Scope>,
}

/// Storage use of the server, as visible to the client's key.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Storage {
    /// The disk of the data directory.
    pub disk: Disk,
    /// Bytes in the data directory: the sum over `kinds`, and over `owners`.
    pub size_bytes: u64,
    /// Storage use by kind, for all kinds.
    pub kinds: Vec<KindStorage>,
    /// Storage use by owner, for owners that use any.
    pub owners: Vec<OwnerStorage>,
    /// Registered models in folders of the operator, which `size_bytes` does not include.
    pub external_models: Amount,
}

/// Size and free space of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Disk {
    /// Total size of the disk, in bytes.
    pub total_bytes: u64,
    /// Space that can be written, in bytes.
    pub free_bytes: u64,
    /// Free space that is reserved, in bytes: if less is free, jobs pause.
    pub reserve_bytes: u64,
}

/// Size and number of stored objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Amount {
    /// Size in bytes. A file that is linked in several places counts once.
    pub size_bytes: u64,
    /// Number of models, datasets or checkpoints; for samples and journals the number of jobs that have some; otherwise the number
    /// of files and folders.
    pub count: u64,
}

/// Storage use of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct KindStorage {
    /// Kind of stored data.
    pub kind: StorageKind,
    /// Size and number that the key can see.
    #[serde(flatten)]
    pub amount: Amount,
    /// Limit for all owners together, in bytes; `None` = limited only by the disk.
    pub limit_bytes: Option<u64>,
}

/// Storage use of one owner.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct OwnerStorage {
    /// Name of the owner; empty = the operator.
    pub owner: String,
    /// Size and number of all objects of the owner.
    #[serde(flatten)]
    pub amount: Amount,
    /// Storage use by kind, for kinds that the owner uses.
    pub kinds: Vec<KindAmount>,
}

/// Storage use of one owner and kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct KindAmount {
    /// Kind of stored data.
    pub kind: StorageKind,
    /// Size and number of objects.
    #[serde(flatten)]
    pub amount: Amount,
}

impl Client {
    /// Checks that the server's process is alive.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn livez(&self) -> Result<(), Error> {
        self.text(self.get(&["livez"]).accept("*/*")).await.map(drop)
    }

    /// Checks that the server is ready.
    ///
    /// # Errors
    /// Fails with `not_ready` after several tries, or with any other [`Error`].
    pub async fn readyz(&self) -> Result<(), Error> {
        self.text(self.get(&["readyz"]).accept("*/*")).await.map(drop)
    }

    /// Returns the server's metrics in Prometheus text format.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn metrics(&self) -> Result<String, Error> {
        self.text(self.get(&["metrics"]).accept("*/*")).await
    }

    /// Returns the OpenAPI 3.1 document.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_openapi(&self) -> Result<Value, Error> {
        self.json(self.get(&["openapi.json"])).await
    }

    /// Returns the server's version.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn version(&self) -> Result<String, Error> {
        let call = self.get(&["openapi.json"]);
        let document: Value = self.json(call.clone()).await?;
        match document["info"]["version"].as_str() {
            Some(version) => Ok(version.to_owned()),
            None => Err(call.not_understood("the server's OpenAPI document has no version")),
        }
    }

    /// Lists the workers, oldest first.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn list_workers(&self) -> Result<Vec<Worker>, Error> {
        Pages::new(self, self.get(&["workers"])).collect().await
    }

    /// Returns the server's storage use, by kind and by owner.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_storage(&self) -> Result<Storage, Error> {
        self.json(self.get(&["system", "storage"])).await
    }

    /// Returns the caller's identity and permissions, according to the client's key.
    ///
    /// # Errors
    /// Fails with `unauthorized` if the key is not valid, or with any other [`Error`].
    pub async fn get_session(&self) -> Result<Session, Error> {
        self.json(self.get(&["session"])).await
    }
}
