//! Models that are downloaded from a hub: started, ready or failed. Jobs that wait for them get events.

use futures::future::BoxFuture;
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnection;

use super::claims::job_fail;
use super::events::event_insert;
use super::jobs::MODEL_DOWNLOADING;
use super::models::model_row;
use super::{Doing, HubOrigin, JobRow, ModelRow, Store, StoreError, int};
use crate::job::{Failure, FailureClass};

/// State of a model whose files are being downloaded.
pub const DOWNLOADING: &str = "downloading";
/// State of a model that jobs can use.
pub const READY: &str = "ready";

/// A hub model to register.
#[derive(Debug, Clone)]
pub struct NewHubModel {
    /// Name by which jobs refer to the model.
    pub id: String,
    /// Directory of the model's files, also before they are downloaded.
    pub source: String,
    /// SHA-256 over the model's files, known before they are downloaded.
    pub sha256: String,
    /// Properties of the model, as JSON.
    pub card: Value,
    /// Owner; empty = available to everyone, or of a private model the operator.
    pub owner: String,
    /// Whether the token of a request opened the model.
    pub is_private: bool,
    /// Repository and commit of the model.
    pub origin: HubOrigin,
    /// Whether the model's files are already downloaded.
    pub is_ready: bool,
}

impl Store {
    /// Registers a hub model. Returns the row, and whether it is new. A model with the same id, owner and commit is not changed,
    /// except from `failed` to `downloading`, and to one that is not private; another model with this id is `Exists`.
    pub fn hub_model_create(&self, new: NewHubModel, now: i64) -> BoxFuture<'_, Result<(ModelRow, bool), StoreError>> {
        Box::pin(async move {
            let doing = "register a model of a hub";
            let NewHubModel { id, source, sha256, card, owner, is_private, origin, is_ready } = new;
            let mut tx = self.begin(doing).await?;
            let state = if is_ready { READY } else { DOWNLOADING };
            let known = model_row(&mut tx, &id).await?;
            if let Some(known) = &known {
                let same = known.owner == owner && known.hub.as_ref().is_some_and(|hub| hub.commit == origin.commit);
                if !same {
                    return Err(StoreError::Exists { kind: "model", id });
                }
                sqlx::query(
                "UPDATE models SET is_private = MIN(is_private, ?1), problem = CASE state WHEN 'failed' THEN NULL ELSE problem END, \
                 state = CASE state WHEN 'failed' THEN ?2 ELSE state END WHERE id = ?3",
            )
            .bind(is_private)
            .bind(state)
            .bind(&id)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
            } else {
                sqlx::query(
                "INSERT INTO models (id, source, state, sha256, card, owner, is_private, created_at, hub, revision, commit_sha, \
                 bytes_total) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )
            .bind(&id)
            .bind(source)
            .bind(state)
            .bind(sha256)
            .bind(card.to_string())
            .bind(owner)
            .bind(is_private)
            .bind(now)
            .bind(origin.repo)
            .bind(origin.revision)
            .bind(origin.commit)
            .bind(int(origin.bytes_total))
            .execute(&mut *tx)
            .await
            .doing(doing)?;
            }
            let row = model_row(&mut tx, &id).await?;
            self.commit(tx, doing).await?;
            row.map(|row| (row, known.is_none())).ok_or(StoreError::NotFound { kind: "model", id })
        })
    }

    /// Returns the models whose files are being downloaded.
    pub async fn hub_models_downloading(&self) -> Result<Vec<ModelRow>, StoreError> {
        sqlx::query("SELECT * FROM models WHERE state = 'downloading' ORDER BY created_at, id")
            .fetch_all(&self.readers)
            .await
            .doing("find downloads of models")?
            .iter()
            .map(ModelRow::read)
            .collect()
    }

    /// Whether another model uses the same directory.
    pub async fn model_source_is_used(&self, source: &str) -> Result<bool, StoreError> {
        let found: Option<i64> = sqlx::query_scalar("SELECT 1 FROM models WHERE source = ? LIMIT 1")
            .bind(source)
            .fetch_optional(&self.readers)
            .await
            .doing("find models")?;
        Ok(found.is_some())
    }

    /// Reports a download's progress to the jobs that wait for the model, by an event `model.downloading`.
    pub async fn hub_model_progress(&self, id: &str, progress: &Value, now: i64) -> Result<(), StoreError> {
        let doing = "report a download's progress";
        let mut tx = self.begin(doing).await?;
        let waiting = waiting_jobs(&mut tx, id).await?;
        for job in &waiting {
            event_insert(&mut tx, job.id, "model.downloading", now, progress).await?;
        }
        self.commit(tx, doing).await?;
        waiting.iter().for_each(|job| self.wake_job(job.id));
        Ok(())
    }

    /// Marks a model as ready, after all files were verified; waiting jobs can start. False if the model was deleted in the
    /// meantime, or is a different one now.
    pub fn hub_model_ready<'a>(
        &'a self,
        id: &'a str,
        commit: &'a str,
        card: &'a Value,
        now: i64,
    ) -> BoxFuture<'a, Result<bool, StoreError>> {
        Box::pin(async move {
            let doing = "mark a model as ready";
            let mut tx = self.begin(doing).await?;
            let card = &with_notes(card.clone(), model_row(&mut tx, id).await?.map(|row| row.card));
            let done = sqlx::query(
            "UPDATE models SET state = 'ready', problem = NULL, card = ? WHERE id = ? AND commit_sha = ? AND state = 'downloading'",
        )
        .bind(card.to_string())
        .bind(id)
        .bind(commit)
        .execute(&mut *tx)
        .await
        .doing(doing)?;
            if done.rows_affected() == 0 {
                return Ok(false);
            }
            let waiting = waiting_jobs(&mut tx, id).await?;
            for job in &waiting {
                // The job may also wait for another model: its base model, or the model of a reward.
                sqlx::query(
                "UPDATE jobs SET status_reason = (SELECT ?2 FROM models WHERE models.state = 'downloading' AND (models.id = \
                 jobs.model OR models.id IN (SELECT key FROM json_each(jobs.plan, '$.reward_models')))) \
                 WHERE id = ?1 AND status_reason = ?2",
            )
            .bind(job.id.to_string())
            .bind(MODEL_DOWNLOADING)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
                event_insert(&mut tx, job.id, "model.ready", now, json!({"model": id, "commit": commit})).await?;
            }
            self.commit(tx, doing).await?;
            waiting.iter().for_each(|job| self.wake_job(job.id));
            self.wake_queue();
            Ok(true)
        })
    }

    /// Marks a download as failed; jobs that wait for the model fail with this problem.
    pub fn hub_model_failed<'a>(
        &'a self,
        id: &'a str,
        commit: &'a str,
        problem: &'a str,
        now: i64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let doing = "mark a download as failed";
            let mut tx = self.begin(doing).await?;
            let done = sqlx::query(
            "UPDATE models SET state = 'failed', problem = ? WHERE id = ? AND commit_sha = ? AND state = 'downloading'",
        )
        .bind(problem)
        .bind(id)
        .bind(commit)
        .execute(&mut *tx)
        .await
        .doing(doing)?;
            if done.rows_affected() == 0 {
                return Ok(());
            }
            let waiting = waiting_jobs(&mut tx, id).await?;
            for job in &waiting {
                let failure = Failure {
                    class: FailureClass::User,
                    code: "model_download_failed".to_owned(),
                    message: format!("the model '{id}' could not be downloaded: {problem}"),
                    phase: None,
                    step: None,
                    suggestion: Some(
                        "fix this problem, download the model again with POST /models, then retry the job".to_owned(),
                    ),
                };
                job_fail(&mut tx, job, failure, now).await?;
            }
            self.commit(tx, doing).await?;
            waiting.iter().for_each(|job| self.wake_job(job.id));
            Ok(())
        })
    }
}

/// Adds what only the earlier record of a model has, such as the new name of its repository, to the record of its complete files.
fn with_notes(mut card: Value, earlier: Option<Value>) -> Value {
    if let (Value::Object(card), Some(Value::Object(earlier))) = (&mut card, earlier) {
        for (name, value) in earlier {
            card.entry(name).or_insert(value);
        }
    }
    card
}

async fn waiting_jobs(tx: &mut SqliteConnection, id: &str) -> Result<Vec<JobRow>, StoreError> {
    let query = "SELECT * FROM jobs INDEXED BY jobs_queue WHERE state = 'queued' \
                 AND (model = ?1 OR ?1 IN (SELECT key FROM json_each(plan, '$.reward_models')))";
    sqlx::query(query)
        .bind(id)
        .fetch_all(tx)
        .await
        .doing("find jobs that wait for a model")?
        .iter()
        .map(JobRow::read)
        .collect()
}
