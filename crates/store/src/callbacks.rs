//! Late answers of reward services and environments. They are stored durably when they arrive (every commit is `synchronous = FULL`), fetched by the
//! worker that waits for them, and removed together with their request's row in the journal.

use std::collections::HashSet;

use futures::TryStreamExt;
use sqlx::sqlite::SqliteConnection;
use tokio::sync::watch;

use super::claims::owned_row;
use super::{Doing, Store, StoreError, column, int, json_column, to_json};
use crate::callback::{Chunk, Entry, Later};
use crate::id::JobId;
use crate::protocol::{CallbackUpdate, CallbackUpdates};

/// Approximate maximum size of a page, in bytes; a single entry may be larger.
const PAGE_BYTES: usize = 4 << 20;

/// Result of storing some scores that a reward service delivered after its first response, by callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// This part of the answer was stored.
    Counted(Counted),
    /// The request's deadline has passed.
    Late,
    /// The request is already answered, or the service has announced that nothing else comes, and this part differs
    /// from what is stored.
    Over,
}

/// How many results of one late answer were stored, by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Number of results that were stored.
    pub accepted: u64,
    /// Number of results for samples that already have one; the first is kept.
    pub duplicate: u64,
    /// Number of results for samples that are not in the request.
    pub unknown: u64,
}

impl Store {
    /// Returns a secret of this server by its name. The first call stores `fresh`.
    pub async fn server_secret(&self, name: &str, fresh: &str) -> Result<String, StoreError> {
        let doing = "read a secret of the server";
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

    /// Returns a receiver that wakes after every committed change of late answers. Subscribe first, then read, then wait.
    pub fn callbacks_changed(&self) -> watch::Receiver<u64> {
        self.changes.callbacks.subscribe()
    }

    /// Registers a request that belongs to no job's journal, because it tests a reward.
    pub async fn callback_open(&self, id: &str, later: &Later, now: i64) -> Result<(), StoreError> {
        let mut writer = self.writer.acquire().await.doing("reach the database's writer connection")?;
        callback_insert(&mut writer, None, id, later, now).await
    }

    /// Removes the request of a test that has ended.
    pub async fn callback_forget(&self, id: &str) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM reward_callbacks WHERE id = ? AND journal_id IS NULL")
            .bind(id)
            .execute(&self.writer)
            .await
            .doing("remove a reward request")?;
        Ok(())
    }

    /// Removes the requests of tests whose deadline has passed.
    pub async fn callbacks_prune(&self, now: i64) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM reward_callbacks WHERE journal_id IS NULL AND deadline < ?")
            .bind(now)
            .execute(&self.writer)
            .await
            .doing("remove expired reward requests")?;
        Ok(())
    }

    /// Returns the names of the parts of a request's answer (see [`Later::sample_ids`]). `None` if the store does not know the request: it
    /// neither waits for late answers, nor was it answered since the job's newest checkpoint.
    pub async fn callback_parts(&self, id: &str) -> Result<Option<Vec<String>>, StoreError> {
        let row = sqlx::query("SELECT sample_ids FROM reward_callbacks WHERE id = ?")
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .doing("look up a reward request")?;
        row.as_ref().map(|row| json_column(row, "sample_ids")).transpose()
    }

    /// Stores a part of an answer, durably. `NotFound` if the request is unknown.
    pub async fn callback_receive(&self, id: &str, chunk: &Chunk, now: i64) -> Result<Received, StoreError> {
        let doing = "store a part of a late answer of a reward service";
        let mut tx = self.begin(doing).await?;
        let row = sqlx::query("SELECT * FROM reward_callbacks WHERE id = ?")
            .bind(id)
            .fetch_optional(&mut *tx)
            .await
            .doing(doing)?
            .ok_or_else(|| StoreError::NotFound { kind: "reward request", id: id.to_owned() })?;
        if column::<i64>(&row, "deadline")? < now {
            return Ok(Received::Late);
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
            let kept = insert_result(&mut tx, id, Some((sample_id, result))).await?;
            *(if kept { &mut counted.accepted } else { &mut counted.duplicate }) += 1;
        }
        if over && counted.accepted > 0 {
            return Ok(Received::Over);
        }
        if chunk.done && !over {
            insert_result(&mut tx, id, None).await?;
            sqlx::query("UPDATE reward_callbacks SET done = 1 WHERE id = ?")
                .bind(id)
                .execute(&mut *tx)
                .await
                .doing(doing)?;
        }
        self.commit(tx, doing).await?;
        self.changes.callbacks.send_modify(|count| *count += 1);
        Ok(Received::Counted(counted))
    }

    /// Returns the results of one request so far.
    pub async fn callback_arrived(&self, id: &str) -> Result<Chunk, StoreError> {
        let doing = "read the late answers to a reward request";
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

    /// Returns the results that arrived after `after` (0 = all) for the job's requests that are not answered yet. `LeaseLost` if
    /// the attempt does not own the job.
    pub async fn callback_updates(&self, job: JobId, attempt: u64, after: i64) -> Result<CallbackUpdates, StoreError> {
        let doing = "read the late answers to a job's reward requests";
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

/// Inserts a result; returns whether it was stored, which is true for the first one of its sample.
async fn insert_result(
    tx: &mut SqliteConnection,
    id: &str,
    entry: Option<(&String, &String)>,
) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "INSERT INTO reward_callback_results (request_id, sample_id, result) VALUES (?, ?, ?) \
         ON CONFLICT (request_id, sample_id) DO NOTHING",
    )
    .bind(id)
    .bind(entry.map(|(sample_id, _)| sample_id))
    .bind(entry.map(|(_, result)| result))
    .execute(tx)
    .await
    .doing("store a late result of a reward")?;
    Ok(done.rows_affected() > 0)
}

fn entry(row: &sqlx::sqlite::SqliteRow) -> Result<Option<Entry>, StoreError> {
    let sample_id: Option<String> = column(row, "sample_id")?;
    let result: Option<String> = column(row, "result")?;
    Ok(sample_id.zip(result).map(|(sample_id, result)| Entry { sample_id, result }))
}

/// Registers a request that is about to be sent and whose answer may come later. If it is registered already, and was neither
/// accepted nor answered, its deadline counts from now.
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
         ON CONFLICT (id) DO UPDATE SET deadline = MAX(deadline, excluded.deadline) \
         WHERE reward_callbacks.accepted IS NULL AND done = 0 AND closed = 0",
    )
    .bind(id)
    .bind(journal_id)
    .bind(to_json("sample_ids", sample_ids)?)
    .bind(now.saturating_add(int(*left_ms)))
    .bind(accepted.as_ref().map(|accepted| to_json("accepted", accepted)).transpose()?)
    .execute(tx)
    .await
    .doing("register a reward request")?;
    Ok(())
}

/// Updates the row of a reward request whose answer may come later, if there is such a row.
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
    query.bind(id).execute(tx).await.doing("update the row of a reward request")?;
    Ok(())
}

/// A change to the row of a reward request.
pub(super) enum CallbackChange<'a> {
    /// The service accepted the reward request.
    Accepted(&'a crate::callback::Accepted),
    /// The reward request is answered.
    Closed,
}
