//! Pushes: checkpoints uploaded to a repository of a model hub.

use jiff::Timestamp;
use rlood_types::export::ExportDtype;
use rlood_types::id::{CheckpointId, ExportId, JobId, PushId};
use rlood_types::push::{PushError, PushFormat, PushRequest, PushStage};
use rlood_types::task::{TaskProgress, TaskState};
use serde::Deserialize;
use serde_json::json;

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// A push of a checkpoint to the model hub.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Push {
    /// Id of the push.
    pub id: PushId,
    /// Id of the job.
    pub job_id: JobId,
    /// Id of the checkpoint.
    pub checkpoint_id: CheckpointId,
    /// Step of the checkpoint.
    pub step: u64,
    /// The repository on the hub, `org/name`.
    pub repo: String,
    /// The branch that gets the commit.
    pub revision: String,
    /// The files that are pushed.
    pub format: PushFormat,
    /// The requested data type of a merged model's weights.
    pub dtype: Option<ExportDtype>,
    /// Whether the repository is created as private.
    pub private: bool,
    /// Whether the model card shows some prompts and completions.
    pub with_samples: bool,
    /// Whether a model card is written.
    pub card: bool,
    /// Current state of the push.
    pub state: TaskState,
    /// The current stage of the push; `None` once it has ended.
    pub stage: Option<PushStage>,
    /// Progress of the stage.
    pub progress: TaskProgress,
    /// The export that makes the merged model.
    pub export_id: Option<ExportId>,
    /// The commit on the hub, once the push has succeeded.
    pub commit: Option<String>,
    /// Page of the repository at the branch, once the push has succeeded.
    pub url: Option<String>,
    /// Whether the push made the commit; false if the branch had the same files already.
    pub is_new: Option<bool>,
    /// Time at which the push was requested.
    pub created_at: Timestamp,
    /// Time at which the push started.
    pub started_at: Option<Timestamp>,
    /// Time at which the push ended.
    pub finished_at: Option<Timestamp>,
    /// Why the push failed.
    pub error: Option<PushError>,
}

impl Client {
    /// Pushes a checkpoint to the model hub, with the client's hub token. [`Client::get_push`] returns the progress.
    ///
    /// # Errors
    /// Fails with `invalid_body`, `no_hub_token`, `storage_full`, or with any other [`Error`].
    pub async fn create_push(&self, id: CheckpointId, request: &PushRequest) -> Result<Push, Error> {
        self.json(self.post_once(&["checkpoints", &id.to_string(), "pushes"]).json(&json!(request))).await
    }

    /// Lists the pushes of a checkpoint, newest first.
    pub fn list_pushes(&self, id: CheckpointId) -> Pages<Push> {
        Pages::new(self, self.get(&["checkpoints", &id.to_string(), "pushes"]))
    }

    /// Returns the push with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_push(&self, id: PushId) -> Result<Push, Error> {
        self.json(self.get(&["pushes", &id.to_string()])).await
    }

    /// Cancels a push. A push that has ended is not changed.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn cancel_push(&self, id: PushId) -> Result<Push, Error> {
        self.json(self.post_once(&["pushes", &id.to_string(), "cancel"])).await
    }
}
