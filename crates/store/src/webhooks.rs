//! Subscriptions to lifecycle messages.

use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::{Doing, Newest, Page, Store, StoreError, column, id_column, json_column, to_json};
use crate::id::WebhookId;
use crate::lifecycle::MessageType;

/// A subscription.
#[derive(Clone)]
pub struct WebhookRow {
    /// Its id.
    pub id: WebhookId,
    /// Whose it is; empty = the operator's.
    pub owner: String,
    /// Of every owner's jobs.
    pub all_jobs: bool,
    /// Where messages go.
    pub url: String,
    /// For people.
    pub description: Option<String>,
    /// Which messages.
    pub types: Vec<MessageType>,
    /// Signs; never shown.
    pub secret: String,
    /// Those before it, newest first: each signs too until its time (Unix ms) is over.
    pub old_secrets: Vec<(String, i64)>,
    /// Whether anything is sent.
    pub enabled: bool,
    /// Why the server stopped sending.
    pub disabled_reason: Option<String>,
    /// Unix ms.
    pub created_at: i64,
    /// Unix ms.
    pub updated_at: i64,
}

/// A subscription to make.
#[derive(Clone)]
pub struct NewWebhook {
    /// Whose it is.
    pub owner: String,
    /// Of every owner's jobs.
    pub all_jobs: bool,
    /// Where messages go.
    pub url: String,
    /// For people.
    pub description: Option<String>,
    /// Which messages.
    pub types: Vec<MessageType>,
    /// Signs.
    pub secret: String,
    /// Whether anything is sent.
    pub enabled: bool,
}

/// What a patch changes; `None` = leave it.
#[derive(Debug, Clone, Default)]
pub struct WebhookPatch {
    /// Where messages go.
    pub url: Option<String>,
    /// `Some(None)` removes it.
    pub description: Option<Option<String>>,
    /// Which messages.
    pub types: Option<Vec<MessageType>>,
    /// Whether anything is sent.
    pub enabled: Option<bool>,
}

/// How long the secrets before a new one sign beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepOld {
    /// The one before it until then (Unix ms), older ones as long as they were to.
    Until(i64),
    /// None of them longer than until then (Unix ms).
    AtMost(i64),
}

/// Secrets of a webhook that sign beside the present one, at most: the header of a message must stay one.
pub const MOST_OLD_SECRETS: usize = 10;

fn words_of(types: &[MessageType]) -> String {
    types.iter().fold(" ".to_owned(), |text, kind| text + kind.as_str() + " ")
}

impl Store {
    /// Makes a subscription; it is told of what happens from now on.
    pub async fn webhook_create(&self, new: NewWebhook, now: i64) -> Result<WebhookRow, StoreError> {
        let NewWebhook { owner, all_jobs, url, description, types, secret, enabled } = new;
        let row = sqlx::query(
            "INSERT INTO webhooks (id, owner, all_jobs, url, description, types, secret, enabled, created_at, updated_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING *",
        )
        .bind(WebhookId::new().to_string())
        .bind(owner)
        .bind(all_jobs)
        .bind(url)
        .bind(description)
        .bind(words_of(&types))
        .bind(secret)
        .bind(enabled)
        .bind(now)
        .bind(now)
        .fetch_one(&self.writer)
        .await
        .doing("make a webhook")?;
        WebhookRow::read(&row)
    }

    /// One subscription, or `NotFound`.
    pub async fn webhook_get(&self, id: WebhookId) -> Result<WebhookRow, StoreError> {
        let mut reader = self.readers.acquire().await.doing("read a webhook")?;
        webhook_row(&mut reader, id).await
    }

    /// Newest first; of one owner (its own jobs' only: those of all jobs are the admins'), or None = all.
    pub async fn webhook_list(
        &self,
        owner: Option<&str>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<WebhookRow>, StoreError> {
        let sql = "SELECT * FROM webhooks WHERE (created_at, id) < (?1, ?2) AND (?3 IS NULL OR owner = ?3 AND all_jobs = 0) \
                   ORDER BY created_at DESC, id DESC LIMIT ?4";
        self.newest(Newest { list: "webhooks", sql, owner, after, limit }, WebhookRow::read).await
    }

    /// All of one owner, those of all jobs too, newest first. They know no key: whoever had a key of that owner may have made
    /// any of them.
    pub async fn webhooks_of(&self, owner: &str) -> Result<Vec<WebhookRow>, StoreError> {
        sqlx::query("SELECT * FROM webhooks WHERE owner = ? ORDER BY created_at DESC, id DESC")
            .bind(owner)
            .fetch_all(&self.readers)
            .await
            .doing("list an owner's webhooks")?
            .iter()
            .map(WebhookRow::read)
            .collect()
    }

    /// How many an owner has: of its own jobs, or of all jobs, which its keys without the scope admin do not see.
    pub async fn webhook_count(&self, owner: &str, all_jobs: bool) -> Result<u64, StoreError> {
        let count: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM webhooks WHERE owner = ? AND all_jobs = ?")
            .bind(owner)
            .bind(all_jobs)
            .fetch_one(&self.readers)
            .await
            .doing("count webhooks")?;
        Ok(count.unsigned_abs())
    }

    /// Changes a subscription. One that is enabled again goes on with what waits for it.
    pub async fn webhook_patch(&self, id: WebhookId, patch: WebhookPatch, now: i64) -> Result<WebhookRow, StoreError> {
        let doing = "change a webhook";
        let mut tx = self.begin(doing).await?;
        let mut row = webhook_row(&mut tx, id).await?;
        let WebhookPatch { url, description, types, enabled } = patch;
        row.url = url.unwrap_or(row.url);
        row.description = description.unwrap_or(row.description);
        row.types = types.unwrap_or(row.types);
        if let Some(enabled) = enabled {
            (row.enabled, row.disabled_reason) = (enabled, None);
        }
        row.updated_at = now;
        sqlx::query(
            "UPDATE webhooks SET url = ?, description = ?, types = ?, enabled = ?, disabled_reason = ?, updated_at = ? \
             WHERE id = ?",
        )
        .bind(&row.url)
        .bind(&row.description)
        .bind(words_of(&row.types))
        .bind(row.enabled)
        .bind(&row.disabled_reason)
        .bind(now)
        .bind(id.to_string())
        .execute(&mut *tx)
        .await
        .doing(doing)?;
        tx.commit().await.doing(doing)?;
        Ok(row)
    }

    /// Signs with another secret from now on, and with those before it for a while; the present one again changes none but
    /// their times. `None` when there would be more than [`MOST_OLD_SECRETS`]: nothing is changed then.
    pub async fn webhook_rotate(
        &self,
        id: WebhookId,
        secret: &str,
        keep: KeepOld,
        now: i64,
    ) -> Result<Option<WebhookRow>, StoreError> {
        let doing = "rotate a webhook's secret";
        let mut tx = self.begin(doing).await?;
        let mut row = webhook_row(&mut tx, id).await?;
        let (until, longest) = match keep {
            KeepOld::Until(until) => (until, i64::MAX),
            KeepOld::AtMost(until) => (until, until),
        };
        row.old_secrets.iter_mut().for_each(|(_, until)| *until = longest.min(*until));
        row.old_secrets.insert(0, (std::mem::replace(&mut row.secret, secret.to_owned()), until));
        row.old_secrets.retain(|(old, until)| old != secret && *until > now);
        if row.old_secrets.len() > MOST_OLD_SECRETS {
            return Ok(None);
        }
        row.updated_at = now;
        sqlx::query("UPDATE webhooks SET secret = ?, old_secrets = ?, updated_at = ? WHERE id = ?")
            .bind(secret)
            .bind(to_json("old_secrets", &row.old_secrets)?)
            .bind(now)
            .bind(id.to_string())
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        tx.commit().await.doing(doing)?;
        Ok(Some(row))
    }

    /// Stops sending, with the reason; what waits goes on waiting.
    pub async fn webhook_disable(&self, id: WebhookId, reason: &str, now: i64) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE webhooks SET enabled = 0, disabled_reason = ?, updated_at = ? WHERE id = ? AND enabled = 1",
        )
        .bind(reason)
        .bind(now)
        .bind(id.to_string())
        .execute(&self.writer)
        .await
        .doing("disable a webhook")?;
        Ok(())
    }

    /// Removes a subscription with its messages and their log.
    pub async fn webhook_delete(&self, id: WebhookId) -> Result<(), StoreError> {
        let done = sqlx::query("DELETE FROM webhooks WHERE id = ?")
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("delete a webhook")?;
        match done.rows_affected() {
            0 => Err(StoreError::NotFound { kind: "webhook", id: id.to_string() }),
            _ => Ok(()),
        }
    }
}

async fn webhook_row(connection: &mut SqliteConnection, id: WebhookId) -> Result<WebhookRow, StoreError> {
    let row = sqlx::query("SELECT * FROM webhooks WHERE id = ?")
        .bind(id.to_string())
        .fetch_optional(connection)
        .await
        .doing("read a webhook")?
        .ok_or_else(|| StoreError::NotFound { kind: "webhook", id: id.to_string() })?;
    WebhookRow::read(&row)
}

impl WebhookRow {
    pub(super) fn read(row: &SqliteRow) -> Result<WebhookRow, StoreError> {
        let types: &str = column(row, "types")?;
        let kind = |word: &str| MessageType::ALL.iter().copied().find(|kind| kind.as_str() == word);
        Ok(WebhookRow {
            id: id_column(row, "id")?,
            owner: column(row, "owner")?,
            all_jobs: column(row, "all_jobs")?,
            url: column(row, "url")?,
            description: column(row, "description")?,
            types: types.split_whitespace().filter_map(kind).collect(),
            secret: column(row, "secret")?,
            old_secrets: json_column(row, "old_secrets")?,
            enabled: column(row, "enabled")?,
            disabled_reason: column(row, "disabled_reason")?,
            created_at: column(row, "created_at")?,
            updated_at: column(row, "updated_at")?,
        })
    }
}
