//! Answers of reward services that come later: kept when they come (every commit is `synchronous = FULL`), fetched by the
//! worker that waits for them, gone with their request's row in the journal.

use std::collections::HashSet;

use futures::TryStreamExt;
use sqlx::sqlite::SqliteConnection;
use tokio::sync::watch;

use super::claims::owned_row;
use super::{Doing, Store, StoreError, column, int, json_column, to_json};
use crate::callback::{Chunk, Entry, Later};
use crate::id::JobId;
use crate::protocol::{CallbackUpdate, CallbackUpdates};

/// About the most bytes of a page; a single entry may be larger.
const PAGE_BYTES: usize = 4 << 20;

/// What became of a part of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// It is kept.
    Counted(Counted),
    /// Its deadline is over.
    Late,
    /// The request is answered already, or the service has said that nothing else comes; this is something else.
    Over,
}

/// Results of one call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Kept.
    pub accepted: u64,
    /// For samples that have one: the first stays.
    pub duplicate: u64,
    /// For samples that were not asked for.
    pub unknown: u64,
}

impl Store {
    /// A secret of this server's by its name; the first call keeps `fresh`.
    pub async fn server_secret(&self, name: &str, fresh: &str) -> Result<String, StoreError> {
        let doing = "read a secret of the server's";
        let read = "SELECT value FROM server_secrets WHERE name = ?";
        if let Some(value) = sqlx::query_scalar(read).bind(name).fetch_optional(&self.readers).await.doing(doing)? {
            return Ok(value);
        }
        sqlx::query("INSERT INTO server_secrets (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING")
            .bind(name)
            .bind(fresh)
            .execute(&self.writer)
            .await
            .doing(doing)?;
        sqlx::query_scalar(read).bind(name).fetch_one(&self.writer).await.doing(doing)
    }

    /// Wakes after every committed change of what services sent. Subscribe first, then read, then wait.
    pub fn callbacks_changed(&self) -> watch::Receiver<u64> {
        self.changes.callbacks.subscribe()
    }

    /// Makes a request known that no job's journal holds: a test of a reward.
    pub async fn callback_open(&self, id: &str, later: &Later, now: i64) -> Result<(), StoreError> {
        let mut writer = self.writer.acquire().await.doing("reach the writer")?;
        callback_insert(&mut writer, None, id, later, now).await
    }

    /// Such a test is over.
    pub async fn callback_forget(&self, id: &str) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM reward_callbacks WHERE id = ? AND journal_id IS NULL")
            .bind(id)
            .execute(&self.writer)
            .await
            .doing("forget a request")?;
        Ok(())
    }

    /// Forgets the tests whose deadline is over.
    pub async fn callbacks_prune(&self, now: i64) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM reward_callbacks WHERE journal_id IS NULL AND deadline < ?")
            .bind(now)
            .execute(&self.writer)
            .await
            .doing("forget old requests")?;
        Ok(())
    }

    /// Whether answers to this request are waited for, or were until the next checkpoint.
    pub async fn callback_is_known(&self, id: &str) -> Result<bool, StoreError> {
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM reward_callbacks WHERE id = ?)")
            .bind(id)
            .fetch_one(&self.readers)
            .await
            .doing("look for a request")
    }

    /// Keeps a part of an answer; durable when it returns. `NotFound` when nobody waits for it.
    pub async fn callback_take(&self, id: &str, chunk: &Chunk, now: i64) -> Result<Taken, StoreError> {
        let doing = "keep a part of an answer";
        let mut tx = self.begin(doing).await?;
        let row = sqlx::query("SELECT * FROM reward_callbacks WHERE id = ?")
            .bind(id)
            .fetch_optional(&mut *tx)
            .await
            .doing(doing)?
            .ok_or_else(|| StoreError::NotFound { kind: "reward request", id: id.to_owned() })?;
        if column::<i64>(&row, "deadline")? < now {
            return Ok(Taken::Late);
        }
        let done: bool = column(&row, "done")?;
        let over = done || column(&row, "closed")?;
        let sample_ids: HashSet<String> = json_column(&row, "sample_ids")?;
        let mut counted = Counted::default();
        for Entry { sample_id, result } in &chunk.entries {
            if !sample_ids.contains(sample_id) {
                counted.unknown += 1;
                continue;
            }
            let kept = put(&mut tx, id, Some((sample_id, result))).await?;
            *(if kept { &mut counted.accepted } else { &mut counted.duplicate }) += 1;
        }
        if over && counted.accepted > 0 {
            return Ok(Taken::Over);
        }
        if chunk.done && !over {
            put(&mut tx, id, None).await?;
            sqlx::query("UPDATE reward_callbacks SET done = 1 WHERE id = ?")
                .bind(id)
                .execute(&mut *tx)
                .await
                .doing(doing)?;
        }
        self.commit(tx, doing).await?;
        self.changes.callbacks.send_modify(|count| *count += 1);
        Ok(Taken::Counted(counted))
    }

    /// What came for one request so far.
    pub async fn callback_arrived(&self, id: &str) -> Result<Chunk, StoreError> {
        let doing = "read what came for a request";
        let rows =
            sqlx::query("SELECT sample_id, result FROM reward_callback_results WHERE request_id = ? ORDER BY seq")
                .bind(id)
                .fetch_all(&self.readers)
                .await
                .doing(doing)?;
        let mut chunk = Chunk::default();
        for row in &rows {
            match entry(row)? {
                Some(entry) => chunk.entries.push(entry),
                None => chunk.done = true,
            }
        }
        Ok(chunk)
    }

    /// What came after `after` (0 = from the start) for the job's requests that are not answered yet. `LeaseLost` when the
    /// attempt does not own the job.
    pub async fn callback_updates(&self, job: JobId, attempt: u64, after: i64) -> Result<CallbackUpdates, StoreError> {
        let doing = "read what came for a job";
        let mut reader = self.readers.acquire().await.doing(doing)?;
        owned_row(&mut reader, job, attempt).await?;
        let mut page = CallbackUpdates { updates: Vec::new(), next: after };
        let mut bytes = 0;
        let mut rows = sqlx::query(
            "SELECT came.* FROM reward_callback_results AS came \
             JOIN reward_callbacks ON reward_callbacks.id = came.request_id AND closed = 0 \
             JOIN journal ON journal.id = journal_id AND job_id = ? WHERE seq > ? ORDER BY seq",
        )
        .bind(job.to_string())
        .bind(after)
        .fetch(&mut *reader);
        while bytes < PAGE_BYTES
            && let Some(row) = rows.try_next().await.doing(doing)?
        {
            page.next = column(&row, "seq")?;
            let entry = entry(&row)?;
            bytes += entry.as_ref().map_or(0, |entry| entry.result.len());
            page.updates.push(CallbackUpdate { request: column(&row, "request_id")?, entry });
        }
        Ok(page)
    }
}

/// True when it is kept: the first of its sample.
async fn put(tx: &mut SqliteConnection, id: &str, entry: Option<(&String, &String)>) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "INSERT INTO reward_callback_results (request_id, sample_id, result) VALUES (?, ?, ?) \
         ON CONFLICT (request_id, sample_id) DO NOTHING",
    )
    .bind(id)
    .bind(entry.map(|(sample_id, _)| sample_id))
    .bind(entry.map(|(_, result)| result))
    .execute(tx)
    .await
    .doing("keep a result")?;
    Ok(done.rows_affected() > 0)
}

fn entry(row: &sqlx::sqlite::SqliteRow) -> Result<Option<Entry>, StoreError> {
    let sample_id: Option<String> = column(row, "sample_id")?;
    let result: Option<String> = column(row, "result")?;
    Ok(sample_id.zip(result).map(|(sample_id, result)| Entry { sample_id, result }))
}

/// A request is about to be sent; its answer may come later.
pub(super) async fn callback_insert(
    tx: &mut SqliteConnection,
    journal_id: Option<i64>,
    id: &str,
    later: &Later,
    now: i64,
) -> Result<(), StoreError> {
    let Later { left_ms, sample_ids, accepted } = later;
    sqlx::query(
        "INSERT INTO reward_callbacks (id, journal_id, sample_ids, deadline, accepted) VALUES (?, ?, ?, ?, ?) \
         ON CONFLICT (id) DO NOTHING",
    )
    .bind(id)
    .bind(journal_id)
    .bind(to_json("sample_ids", sample_ids)?)
    .bind(now.saturating_add(int(*left_ms)))
    .bind(accepted.as_ref().map(|accepted| to_json("accepted", accepted)).transpose()?)
    .execute(tx)
    .await
    .doing("note a request")?;
    Ok(())
}

/// A change of a request's row, if it has one.
pub(super) async fn callback_change(
    tx: &mut SqliteConnection,
    id: &str,
    change: CallbackChange<'_>,
) -> Result<(), StoreError> {
    let query = match change {
        CallbackChange::Accepted(accepted) => {
            sqlx::query("UPDATE reward_callbacks SET accepted = ? WHERE id = ?").bind(to_json("accepted", accepted)?)
        }
        CallbackChange::Closed => sqlx::query("UPDATE reward_callbacks SET closed = 1 WHERE id = ?"),
    };
    query.bind(id).execute(tx).await.doing("note what became of a request")?;
    Ok(())
}

/// What became of a request.
pub(super) enum CallbackChange<'a> {
    /// The service took it.
    Accepted(&'a crate::callback::Accepted),
    /// It is answered.
    Closed,
}
