//! Deliveries of lifecycle messages to webhooks: an outbox that a trigger fills in the transaction of each event, and the log of
//! delivery attempts.

use rlood_types::webhooks::TEST_TYPE;
use sqlx::sqlite::SqliteRow;

use super::webhooks::WebhookRow;
use super::{
    Doing, Page, Store, StoreError, column, corrupt, count_column, cursor, id_column, int, json_column, newest_after,
    page,
};
use crate::id::WebhookId;

/// State of a message to a webhook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryState {
    /// The message is to be delivered, or retried.
    Pending,
    /// The endpoint accepted the message.
    Delivered,
    /// The last of the message's delivery attempts failed.
    Failed,
}

impl DeliveryState {
    /// Returns the name in the API and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            DeliveryState::Pending => "pending",
            DeliveryState::Delivered => "delivered",
            DeliveryState::Failed => "failed",
        }
    }

    fn parse(text: &str) -> Result<Self, StoreError> {
        let all = [DeliveryState::Pending, DeliveryState::Delivered, DeliveryState::Failed];
        let known = all.into_iter().find(|state| state.as_str() == text);
        known.ok_or_else(|| corrupt("state")(format!("'{text}' is not the state of a webhook delivery")))
    }
}

/// A message to a webhook.
#[derive(Debug, Clone)]
pub struct DeliveryRow {
    /// Id of the message, which every delivery attempt sends as `webhook-id`.
    pub id: String,
    /// Id of the webhook.
    pub webhook: WebhookId,
    /// Type of the message: `job.queued`, …, or `webhook.test`.
    pub kind: String,
    /// Time of the reported event, Unix time in milliseconds.
    pub time: i64,
    /// The event, and the job at that time; `None` for a test.
    pub event: Option<MessageEvent>,
    /// Current state of the message.
    pub state: DeliveryState,
    /// Number of delivery attempts since the message was queued (again).
    pub tries: u64,
    /// Time of the next attempt, Unix time in milliseconds; only used while the message is pending.
    pub next_at: i64,
    /// Time at which the message was delivered or abandoned, Unix time in milliseconds.
    pub finished_at: Option<i64>,
}

/// The event that a message reports.
#[derive(Debug, Clone)]
pub struct MessageEvent {
    /// Id of the job.
    pub job: String,
    /// Sequence number of the event.
    pub seq: i64,
    /// Attempt that the event belongs to.
    pub attempt: u64,
    /// Type of the event.
    pub event: String,
    /// Data of the event.
    pub detail: serde_json::Value,
    /// Display name of the job.
    pub job_name: Option<String>,
    /// State of the job at the time of the event.
    pub job_state: String,
    /// Base model of the job.
    pub model: String,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Total number of optimizer steps.
    pub total_steps: u64,
    /// The client's own labels of the job.
    pub metadata: serde_json::Value,
}

/// One attempt to deliver a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TryRow {
    /// Time at which the delivery attempt started, Unix time in milliseconds.
    pub time: i64,
    /// Duration of the delivery attempt, in milliseconds.
    pub duration_ms: u64,
    /// HTTP status of the response; `None` = no response.
    pub status: Option<u16>,
    /// Why the delivery attempt failed; `None` = it succeeded.
    pub error: Option<String>,
}

/// The state of a message after a delivery attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The message was delivered.
    Delivered,
    /// The next attempt is at this time, Unix time in milliseconds.
    Retry(i64),
    /// The message is abandoned.
    GiveUp,
}

impl Store {
    /// Queues a test message, which reports no event.
    pub async fn delivery_test(&self, webhook: WebhookId, now: i64) -> Result<DeliveryRow, StoreError> {
        let row = sqlx::query(
            "INSERT INTO deliveries (id, webhook_id, type, time, state, next_at) \
             SELECT 'msg_' || lower(hex(randomblob(16))), id, ?2, ?3, 'pending', ?3 FROM webhooks WHERE id = ?1 RETURNING *",
        )
        .bind(webhook.to_string())
        .bind(TEST_TYPE)
        .bind(now)
        .fetch_optional(&self.writer)
        .await
        .doing("queue a test message of a webhook")?
        // The webhook may have been deleted since the request was checked.
        .ok_or_else(|| StoreError::NotFound { kind: "webhook", id: webhook.to_string() })?;
        DeliveryRow::read(&row)
    }

    /// Queues a message for delivery again, with as many attempts as a new message.
    pub async fn delivery_again(&self, webhook: WebhookId, id: &str, now: i64) -> Result<DeliveryRow, StoreError> {
        let row = sqlx::query(
            "UPDATE deliveries SET state = 'pending', tries = 0, next_at = ?, finished_at = NULL \
             WHERE id = ? AND webhook_id = ? RETURNING *",
        )
        .bind(now)
        .bind(id)
        .bind(webhook.to_string())
        .fetch_optional(&self.writer)
        .await
        .doing("queue a webhook message again")?
        .ok_or_else(|| StoreError::NotFound { kind: "delivery", id: id.to_owned() })?;
        DeliveryRow::read(&row)
    }

    /// Returns one message, or `NotFound`.
    pub async fn delivery_get(&self, webhook: WebhookId, id: &str) -> Result<DeliveryRow, StoreError> {
        let row = sqlx::query("SELECT * FROM deliveries WHERE id = ? AND webhook_id = ?")
            .bind(id)
            .bind(webhook.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read a webhook message")?
            .ok_or_else(|| StoreError::NotFound { kind: "delivery", id: id.to_owned() })?;
        DeliveryRow::read(&row)
    }

    /// Lists a webhook's messages, newest first.
    pub async fn delivery_list(
        &self,
        webhook: WebhookId,
        state: Option<DeliveryState>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<DeliveryRow>, StoreError> {
        let (before, id) = newest_after("deliveries", after)?;
        let limit = limit.clamp(1, 1000);
        let rows = sqlx::query(
            "SELECT * FROM deliveries WHERE webhook_id = ?1 AND (time, id) < (?2, ?3) AND (?4 IS NULL OR state = ?4) \
             ORDER BY time DESC, id DESC LIMIT ?5",
        )
        .bind(webhook.to_string())
        .bind(before)
        .bind(id)
        .bind(state.map(DeliveryState::as_str))
        .bind(i64::from(limit) + 1)
        .fetch_all(&self.readers)
        .await
        .doing("list webhook messages")?;
        let data = rows.iter().map(DeliveryRow::read).collect::<Result<Vec<_>, _>>()?;
        Ok(page(data, limit, |row| cursor("deliveries", [&row.time.to_string(), &row.id])))
    }

    /// Lists a message's delivery attempts, oldest first.
    pub async fn delivery_tries(&self, id: &str) -> Result<Vec<TryRow>, StoreError> {
        sqlx::query("SELECT * FROM delivery_tries WHERE delivery_id = ? ORDER BY id")
            .bind(id)
            .fetch_all(&self.readers)
            .await
            .doing("read the delivery attempts of a webhook message")?
            .iter()
            .map(|row| {
                Ok(TryRow {
                    time: column(row, "time")?,
                    duration_ms: count_column(row, "duration_ms")?,
                    status: column(row, "status")?,
                    error: column(row, "error")?,
                })
            })
            .collect()
    }

    /// Returns the webhooks with messages to deliver now; for each, the message that has been due for longest.
    pub async fn deliveries_due(&self, now: i64) -> Result<Vec<(WebhookRow, DeliveryRow)>, StoreError> {
        let doing = "find messages to deliver";
        let hooks = sqlx::query(
            "SELECT * FROM webhooks WHERE enabled = 1 AND EXISTS (SELECT 1 FROM deliveries INDEXED BY deliveries_due \
             WHERE webhook_id = webhooks.id AND state = 'pending' AND next_at <= ?)",
        )
        .bind(now)
        .fetch_all(&self.readers)
        .await
        .doing(doing)?;
        let mut due = Vec::with_capacity(hooks.len());
        for hook in &hooks {
            let hook = WebhookRow::read(hook)?;
            let row = sqlx::query(
                "SELECT * FROM deliveries INDEXED BY deliveries_due WHERE webhook_id = ? AND state = 'pending' \
                 AND next_at <= ? ORDER BY next_at, rowid LIMIT 1",
            )
            .bind(hook.id.to_string())
            .bind(now)
            .fetch_optional(&self.readers)
            .await
            .doing(doing)?;
            if let Some(row) = row {
                due.push((hook, DeliveryRow::read(&row)?));
            }
        }
        Ok(due)
    }

    /// Records a delivery attempt and the new state of the message, in one transaction.
    pub async fn delivery_tried(&self, id: &str, attempt: TryRow, next: Next, now: i64) -> Result<(), StoreError> {
        let doing = "record a delivery attempt";
        let TryRow { time, duration_ms, status, error } = attempt;
        let mut tx = self.begin(doing).await?;
        let (state, next_at) = match next {
            Next::Delivered => (DeliveryState::Delivered, None),
            Next::Retry(at) => (DeliveryState::Pending, Some(at)),
            Next::GiveUp => (DeliveryState::Failed, None),
        };
        let known = sqlx::query(
            "UPDATE deliveries SET state = ?1, tries = tries + 1, next_at = COALESCE(?2, next_at), \
             finished_at = CASE WHEN ?1 = 'pending' THEN NULL ELSE ?3 END WHERE id = ?4",
        )
        .bind(state.as_str())
        .bind(next_at)
        .bind(now)
        .bind(id)
        .execute(&mut *tx)
        .await
        .doing(doing)?;
        // The webhook may have been deleted in the meantime.
        if known.rows_affected() > 0 {
            sqlx::query(
                "INSERT INTO delivery_tries (delivery_id, time, duration_ms, status, error) VALUES (?, ?, ?, ?, ?)",
            )
            .bind(id)
            .bind(time)
            .bind(int(duration_ms))
            .bind(status)
            .bind(error)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        }
        tx.commit().await.doing(doing)
    }

    /// Counts messages by state, for the server's metrics.
    pub async fn delivery_counts(&self) -> Result<Vec<(DeliveryState, u64)>, StoreError> {
        sqlx::query("SELECT state, COUNT(*) AS messages FROM deliveries GROUP BY state")
            .fetch_all(&self.readers)
            .await
            .doing("count webhook messages")?
            .iter()
            .map(|row| Ok((DeliveryState::parse(column(row, "state")?)?, count_column(row, "messages")?)))
            .collect()
    }
}

impl DeliveryRow {
    fn read(row: &SqliteRow) -> Result<DeliveryRow, StoreError> {
        let event = match column::<Option<String>>(row, "job_id")? {
            None => None,
            Some(job) => Some(MessageEvent {
                job,
                seq: column(row, "seq")?,
                attempt: count_column(row, "attempt")?,
                event: column(row, "event")?,
                detail: json_column(row, "detail")?,
                job_name: column(row, "job_name")?,
                job_state: column(row, "job_state")?,
                model: column(row, "model")?,
                step: count_column(row, "step")?,
                total_steps: count_column(row, "total_steps")?,
                metadata: json_column(row, "metadata")?,
            }),
        };
        Ok(DeliveryRow {
            id: column(row, "id")?,
            webhook: id_column(row, "webhook_id")?,
            kind: column(row, "type")?,
            time: column(row, "time")?,
            event,
            state: DeliveryState::parse(column(row, "state")?)?,
            tries: count_column(row, "tries")?,
            next_at: column(row, "next_at")?,
            finished_at: column(row, "finished_at")?,
        })
    }
}
