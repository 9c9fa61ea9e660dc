//! Owners of objects. A request is checked against the owner before anything else.

use super::{Doing, Store, StoreError};
use crate::id::{AdapterId, CheckpointId, DatasetId, JobId, WebhookId};

impl Store {
    /// Returns the owner of a job; `None` = there is no such job. The methods below do the same for other objects.
    pub async fn job_owner(&self, id: JobId) -> Result<Option<String>, StoreError> {
        self.owner_of("SELECT owner FROM jobs WHERE id = ?", &id.to_string()).await
    }

    /// Returns the owner of a dataset.
    pub async fn dataset_owner(&self, id: DatasetId) -> Result<Option<String>, StoreError> {
        let query =
            "SELECT owner FROM datasets WHERE id = ?1 UNION ALL SELECT owner FROM dataset_downloads WHERE id = ?1";
        self.owner_of(query, &id.to_string()).await
    }

    /// Returns the owner of an adapter.
    pub async fn adapter_owner(&self, id: AdapterId) -> Result<Option<String>, StoreError> {
        self.owner_of("SELECT owner FROM adapters WHERE id = ?", &id.to_string()).await
    }

    /// Returns the owner of a checkpoint, which is its job's owner.
    pub async fn checkpoint_owner(&self, id: CheckpointId) -> Result<Option<String>, StoreError> {
        let query =
            "SELECT jobs.owner FROM checkpoints JOIN jobs ON jobs.id = checkpoints.job_id WHERE checkpoints.id = ?";
        self.owner_of(query, &id.to_string()).await
    }

    /// Returns the owner of a verdict or an export, which is its job's owner.
    pub async fn task_owner(&self, id: &str) -> Result<Option<String>, StoreError> {
        self.owner_of("SELECT jobs.owner FROM tasks JOIN jobs ON jobs.id = tasks.job_id WHERE tasks.id = ?", id).await
    }

    /// Returns the owner of a webhook. A webhook for all jobs belongs to the admins only, whichever key created it: empty.
    pub async fn webhook_owner(&self, id: WebhookId) -> Result<Option<String>, StoreError> {
        self.owner_of("SELECT CASE all_jobs WHEN 1 THEN '' ELSE owner END FROM webhooks WHERE id = ?", &id.to_string())
            .await
    }

    async fn owner_of(&self, query: &'static str, id: &str) -> Result<Option<String>, StoreError> {
        sqlx::query_scalar(query)
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .doing("look up who owns a job, dataset or other object")
    }
}
