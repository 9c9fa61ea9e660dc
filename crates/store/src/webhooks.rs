//! Webhooks, which subscribe to lifecycle messages.

use rlood_types::webhooks::MessageType;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::{Doing, Newest, Page, Store, StoreError, column, id_column, json_column, to_json};
use crate::id::WebhookId;

/// A webhook and its settings.
#[derive(Clone)]
pub struct WebhookRow {
    /// Id of the webhook.
    pub id: WebhookId,
    /// Owner; empty = the operator.
    pub owner: String,
    /// Whether the webhook reports on the jobs of all owners.
    pub all_jobs: bool,
    /// URL that messages are sent to.
    pub url: String,
    /// Human-readable description, set by the user.
    pub description: Option<String>,
    /// Types of messages to send.
    pub types: Vec<MessageType>,
    /// Signing secret; never shown.
    pub secret: String,
    /// Previous signing secrets, newest first. Each also signs messages until its time (Unix time in milliseconds).
    pub old_secrets: Vec<(String, i64)>,
    /// Whether messages are sent.
    pub enabled: bool,
    /// Why the server disabled the webhook.
    pub disabled_reason: Option<String>,
    /// Time of creation, Unix time in milliseconds.
    pub created_at: i64,
    /// Time of the last change, Unix time in milliseconds.
    pub updated_at: i64,
}

/// A webhook to create.
#[derive(Clone)]
pub struct NewWebhook {
    /// Owner; empty = the operator.
    pub owner: String,
    /// Whether the webhook reports on the jobs of all owners.
    pub all_jobs: bool,
    /// URL that messages are sent to.
    pub url: String,
    /// Human-readable description, set by the user.
    pub description: Option<String>,
    /// Types of messages to send.
    pub types: Vec<MessageType>,
    /// Signing secret of the webhook.
    pub secret: String,
    /// Whether messages are sent.
    pub enabled: bool,
}

/// Changes to a webhook; `None` = unchanged.
#[derive(Debug, Clone, Default)]
pub struct WebhookPatch {
    /// New URL that messages are sent to.
    pub url: Option<String>,
    /// New description; `Some(None)` removes it.
    pub description: Option<Option<String>>,
    /// New types of messages to send.
    pub types: Option<Vec<MessageType>>,
    /// Whether messages are sent.
    pub enabled: Option<bool>,
}

/// How long previous secrets also sign messages after a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepOld {
    /// The previous secret signs until this time (Unix time in milliseconds); for older ones the time set before applies.
    Until(i64),
    /// All previous secrets sign at most until this time (Unix time in milliseconds).
    AtMost(i64),
}

/// Maximum number of previous secrets of a webhook, which limits the size of a message's signature header.
pub const MAX_OLD_SECRETS: usize = 10;

fn type_names(types: &[MessageType]) -> String {
    types.iter().fold(" ".to_owned(), |text, kind| text + kind.as_str() + " ")
}

impl Store {
    /// Creates a webhook, which receives messages about later events.
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
        .bind(type_names(&types))
        .bind(secret)
        .bind(enabled)
        .bind(now)
        .bind(now)
        .fetch_one(&self.writer)
        .await
        .doing("create a webhook")?;
        WebhookRow::read(&row)
    }

    /// Returns one webhook, or `NotFound`.
    pub async fn webhook_get(&self, id: WebhookId) -> Result<WebhookRow, StoreError> {
        let mut reader = self.readers.acquire().await.doing("read a webhook")?;
        webhook_row(&mut reader, id).await
    }

    /// Lists webhooks, newest first: of one owner without those for all jobs, which belong to the admins,
    /// or of all owners (`None`).
    pub async fn webhook_list(
        &self,
        owner: Option<&str>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<WebhookRow>, StoreError> {
        let sql = "SELECT * FROM webhooks WHERE (created_at, id) < (?1, ?2) AND (?3 IS NULL OR owner = ?3 AND all_jobs = 0) \
                   ORDER BY created_at DESC, id DESC LIMIT ?4";
        self.newest(Newest { list: "webhooks", sql, owner, after, limit, more: &[] }, WebhookRow::read).await
    }

    /// Lists all webhooks of one owner, including those for all jobs, newest first. The creating key is not stored, so any key of
    /// that owner may have created them.
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

    /// Counts the webhooks of an owner: for its own jobs, or for all jobs, which its keys without the scope admin cannot see.
    pub async fn webhook_count(&self, owner: &str, all_jobs: bool) -> Result<u64, StoreError> {
        let count: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM webhooks WHERE owner = ? AND all_jobs = ?")
            .bind(owner)
            .bind(all_jobs)
            .fetch_one(&self.readers)
            .await
            .doing("count webhooks")?;
        Ok(count.unsigned_abs())
    }

    /// Changes a webhook. When it is enabled again, its pending messages are delivered.
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
        .bind(type_names(&row.types))
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

    /// Replaces the signing secret; previous ones also sign messages for a while. Setting the current secret again only changes
    /// these times. `None`, without a change, if there would be more than [`MAX_OLD_SECRETS`].
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
        if row.old_secrets.len() > MAX_OLD_SECRETS {
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

    /// Disables a webhook with a reason; its pending messages are kept.
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

    /// Deletes a webhook with its messages and their log.
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
