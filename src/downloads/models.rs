//! The download of a model: its files are verified, read, and compared with the fingerprint that the hub announced.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;

use super::{Advance, Describe, Downloads, Incomplete, Target};
use crate::hub::{Hub, HubError, Progress, Repo, RepoKind, RepoPlan};
use crate::store::background::spawn_blocking;
use crate::store::{HubOrigin, StoreError, clock_ms};

pub(super) struct ModelTarget {
    pub(super) downloads: Downloads,
    pub(super) hub: Hub,
    pub(super) id: String,
    /// The final directory of the files.
    pub(super) source: PathBuf,
    /// The fingerprint that the complete files must have.
    pub(super) sha256: String,
    pub(super) origin: HubOrigin,
    pub(super) describe: Describe,
}

impl Target for ModelTarget {
    fn key(&self) -> String {
        self.id.clone()
    }

    fn size(&self) -> (String, u64) {
        (self.origin.commit.clone(), self.origin.bytes_total)
    }

    async fn fetch(&self, progress: &Arc<Progress>) -> Result<(), HubError> {
        let repo = Repo::new(RepoKind::Model, &self.origin.repo, &self.origin.commit)
            .map_err(|error| HubError::NotUnderstood(error.to_string()))?;
        let plan: RepoPlan = self.hub.plan_model(&repo).await?;
        self.hub.download(&plan, &self.downloads.parts(), &self.source, progress).await
    }

    async fn complete(&self) -> Result<(), Incomplete> {
        let (describe, source) = (self.describe, self.source.clone());
        let unreadable = |error| format!("the downloaded files of the model could not be read: {error}");
        let described = spawn_blocking(move || describe(&source)).await;
        let (card, sha256) =
            described.map_err(unreadable).and_then(|described| described).map_err(Incomplete::Unusable)?;
        if sha256 != self.sha256 {
            let detail = "the downloaded files of the model differ from those that the hub announced";
            return Err(Incomplete::Unusable(detail.to_owned()));
        }
        let store = &self.downloads.0.store;
        store.hub_model_ready(&self.id, &self.origin.commit, &card, clock_ms()).await.map_err(Incomplete::Store)?;
        Ok(())
    }

    async fn report(&self, advance: Advance) -> Result<(), StoreError> {
        let Advance { bytes_done, bytes_per_second, eta_s } = advance;
        let progress = json!({"model": self.id, "bytes_done": bytes_done, "bytes_total": self.origin.bytes_total,
                              "bytes_per_second": bytes_per_second, "eta_s": eta_s});
        self.downloads.0.store.hub_model_progress(&self.id, &progress, clock_ms()).await
    }

    async fn fail(&self, problem: &str) -> Result<(), StoreError> {
        self.downloads.0.store.hub_model_failed(&self.id, &self.origin.commit, problem, clock_ms()).await
    }
}
