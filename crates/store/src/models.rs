//! Registered models: names for directories, with their properties.

use futures::future::BoxFuture;
use serde_json::Value;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::{Doing, Newest, Page, Store, StoreError, column, count_column, id_column, json_column};

/// A model that was registered on the server.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRow {
    /// Id of the model, such as `org/name`.
    pub id: String,
    /// Absolute path of the model's directory.
    pub source: String,
    /// State: `ready`; for a hub model also `downloading` and `failed`.
    pub state: String,
    /// SHA-256 over config, weights and tokenizer.
    pub sha256: String,
    /// Properties of the model, as JSON.
    pub card: Value,
    /// Owner; empty = available to everyone, or of a private model the operator.
    pub owner: String,
    /// Whether the token of a request opened the model, so that its owner alone may use it.
    pub is_private: bool,
    /// Time of registration, Unix time in milliseconds.
    pub created_at: i64,
    /// Repository that the model was downloaded from; `None` = a local directory was registered.
    pub hub: Option<HubOrigin>,
    /// Why the download of the model failed.
    pub problem: Option<String>,
}

impl ModelRow {
    /// Whether every owner may use the model.
    pub fn is_shared(&self) -> bool {
        self.owner.is_empty() && !self.is_private
    }
}

/// The origin of a downloaded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubOrigin {
    /// Repository on the hub: `org/name`.
    pub repo: String,
    /// Requested branch, tag or commit.
    pub revision: String,
    /// Commit that the revision was resolved to: 40 hexadecimal digits.
    pub commit: String,
    /// Total size of all files, in bytes.
    pub bytes_total: u64,
}

impl HubOrigin {
    fn read(row: &SqliteRow) -> Result<Option<HubOrigin>, StoreError> {
        let Some(repo) = column::<Option<String>>(row, "hub")? else { return Ok(None) };
        let (revision, commit) = (column(row, "revision")?, column(row, "commit_sha")?);
        Ok(Some(HubOrigin { repo, revision, commit, bytes_total: count_column(row, "bytes_total")? }))
    }
}

/// A model to register.
#[derive(Debug, Clone)]
pub struct NewModel {
    /// Id of the model, such as `org/name`.
    pub id: String,
    /// Absolute path of the model's directory.
    pub source: String,
    /// SHA-256 over config, weights and tokenizer.
    pub sha256: String,
    /// Properties of the model, as JSON.
    pub card: Value,
    /// Owner; empty = available to everyone.
    pub owner: String,
}

impl Store {
    /// Registers a model. Returns the row, and whether it is new. The same id from the same source is updated to the new hash; from
    /// another source, or of another owner, it is `Exists`.
    pub fn model_create(&self, new: NewModel, now: i64) -> BoxFuture<'_, Result<(ModelRow, bool), StoreError>> {
        Box::pin(async move {
            let doing = "register a model";
            let NewModel { id, source, sha256, card, owner } = new;
            let mut tx = self.begin(doing).await?;
            let known = model_row(&mut tx, &id).await?;
            if known.as_ref().is_some_and(|known| known.source != source || known.owner != owner) {
                return Err(StoreError::Exists { kind: "model", id });
            }
            let row = sqlx::query(
            "INSERT INTO models (id, source, state, sha256, card, owner, created_at) VALUES (?, ?, 'ready', ?, ?, ?, ?) \
             ON CONFLICT (id) DO UPDATE SET sha256 = excluded.sha256, card = excluded.card RETURNING *",
        )
        .bind(id)
        .bind(source)
        .bind(sha256)
        .bind(card.to_string())
        .bind(owner)
        .bind(now)
        .fetch_one(&mut *tx)
        .await
        .doing(doing)?;
            let row = ModelRow::read(&row)?;
            self.commit(tx, doing).await?;
            Ok((row, known.is_none()))
        })
    }

    /// Returns one model, or `NotFound`.
    pub async fn model_get(&self, id: &str) -> Result<ModelRow, StoreError> {
        let mut reader = self.readers.acquire().await.doing("read a model")?;
        model_row(&mut reader, id).await?.ok_or_else(|| StoreError::NotFound { kind: "model", id: id.to_owned() })
    }

    /// Lists models, newest first: those of an owner and those available to everyone (`None` = all).
    pub async fn model_list(
        &self,
        owner: Option<&str>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<ModelRow>, StoreError> {
        let sql = "SELECT * FROM models WHERE (created_at, id) < (?1, ?2) \
                   AND (?3 IS NULL OR owner = ?3 OR (owner = '' AND is_private = 0)) \
                   ORDER BY created_at DESC, id DESC LIMIT ?4";
        self.newest(Newest { list: "models", sql, owner, after, limit, more: &[] }, ModelRow::read).await
    }

    /// Records that a model's directory was moved; does nothing if it was not at the old path.
    pub async fn model_move(&self, id: &str, from: &str, to: &str) -> Result<(), StoreError> {
        sqlx::query("UPDATE models SET source = ? WHERE id = ? AND source = ?")
            .bind(to)
            .bind(id)
            .bind(from)
            .execute(&self.writer)
            .await
            .doing("store the new directory of a model")?;
        Ok(())
    }

    /// Unregisters a model (its files are kept). `InUse` if a job that has not ended needs it.
    pub fn model_delete<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let doing = "delete a model";
            let mut tx = self.begin(doing).await?;
            let jobs = sqlx::query(
                "SELECT id FROM jobs
             WHERE state IN ('queued', 'running', 'paused')
               AND (model = ? OR EXISTS (SELECT 1 FROM json_each(jobs.plan, '$.reward_models') WHERE key = ?))
             ORDER BY id LIMIT 20",
            )
            .bind(id)
            .bind(id)
            .fetch_all(&mut *tx)
            .await
            .doing(doing)?
            .iter()
            .map(|row| id_column(row, "id"))
            .collect::<Result<Vec<_>, _>>()?;
            if !jobs.is_empty() {
                return Err(StoreError::InUse { kind: "model", id: id.to_owned(), jobs });
            }
            let done = sqlx::query("DELETE FROM models WHERE id = ?").bind(id).execute(&mut *tx).await.doing(doing)?;
            if done.rows_affected() == 0 {
                return Err(StoreError::NotFound { kind: "model", id: id.to_owned() });
            }
            self.commit(tx, doing).await?;
            Ok(())
        })
    }
}

pub(super) async fn model_row(connection: &mut SqliteConnection, id: &str) -> Result<Option<ModelRow>, StoreError> {
    sqlx::query("SELECT * FROM models WHERE id = ?")
        .bind(id)
        .fetch_optional(connection)
        .await
        .doing("read a model")?
        .as_ref()
        .map(ModelRow::read)
        .transpose()
}

impl ModelRow {
    pub(super) fn read(row: &SqliteRow) -> Result<ModelRow, StoreError> {
        Ok(ModelRow {
            id: column(row, "id")?,
            source: column(row, "source")?,
            state: column(row, "state")?,
            sha256: column(row, "sha256")?,
            card: json_column(row, "card")?,
            owner: column(row, "owner")?,
            is_private: column(row, "is_private")?,
            created_at: column(row, "created_at")?,
            hub: HubOrigin::read(row)?,
            problem: column(row, "problem")?,
        })
    }
}
