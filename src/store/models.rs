//! Registered models: a name for a directory, with what is known of it.

use serde_json::Value;

use super::{Page, Store, StoreError};

/// A registered model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRow {
    /// `org/name`, say.
    pub id: String,
    /// Its absolute directory.
    pub source: String,
    /// `ready`.
    pub state: String,
    /// Fingerprint over config, weights and tokenizer.
    pub sha256: String,
    /// The model card, as JSON.
    pub card: Value,
    /// Unix ms.
    pub created_at: i64,
}

/// A model to register.
#[derive(Debug, Clone)]
pub struct NewModel {
    /// `org/name`, say.
    pub id: String,
    /// Its absolute directory.
    pub source: String,
    /// Fingerprint.
    pub sha256: String,
    /// The model card, as JSON.
    pub card: Value,
}

impl Store {
    /// Registers a model: the row and whether it is new. The same id from the same source is updated to the new fingerprint;
    /// from another source `Exists`.
    pub async fn model_create(&self, new: NewModel, now: i64) -> Result<(ModelRow, bool), StoreError> {
        let _ = (new, now);
        todo!()
    }

    /// One model, or `NotFound`.
    pub async fn model_get(&self, id: &str) -> Result<ModelRow, StoreError> {
        let _ = id;
        todo!()
    }

    /// Newest first.
    pub async fn model_list(&self, after: Option<&str>, limit: u32) -> Result<Page<ModelRow>, StoreError> {
        let _ = (after, limit);
        todo!()
    }

    /// Forgets a model (its files stay). `InUse` while a job that is not over needs it.
    pub async fn model_delete(&self, id: &str) -> Result<(), StoreError> {
        let _ = id;
        todo!()
    }
}
