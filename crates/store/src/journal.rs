//! The journal: the actions of a run since its last published checkpoint. An entry is written before its action is carried out
//! (every commit is `synchronous = FULL`), only by the attempt that owns the job, and is removed when a newer checkpoint covers it.
//! A retry of the job copies the remaining entries.

use futures::TryStreamExt;
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteQueryResult, SqliteRow};

use super::callbacks::{CallbackChange, callback_change, callback_insert};
use super::claims::owned_row;
use super::{Doing, Store, StoreError, column, int, json_column, to_json, variant_name};
use crate::callback::{Accepted, Later};
use crate::event::SamplePhase;
use crate::id::JobId;
use crate::job::State;
use crate::protocol::{JournalEntry, JournalPage};
use crate::rollout::{RolloutId, SampledGroup};

/// Approximate maximum size of a page, in bytes; a single entry may be larger.
const PAGE_BYTES: usize = 4 << 20;

impl Store {
    /// Appends entries in one transaction. Existing entries with the same id are not changed, so a call may be repeated; a request that no
    /// service has accepted yet gets the whole time for a late answer again.
    /// `LeaseLost` if the attempt does not own the job, `Exists` if a request exists under another id.
    pub async fn journal_append(
        &self,
        job: JobId,
        attempt: u64,
        entries: &[JournalEntry],
        now: i64,
    ) -> Result<(), StoreError> {
        let doing = "append to the journal";
        let mut tx = self.begin(doing).await?;
        owned_row(&mut tx, job, attempt).await?;
        for entry in entries {
            append(&mut tx, job, attempt, entry, now).await?;
        }
        self.commit(tx, doing).await
    }

    /// Returns the entries after `after` (0 = all), in the order in which they were appended. `LeaseLost` if the attempt
    /// does not own the job.
    pub async fn journal_page(
        &self,
        job: JobId,
        attempt: u64,
        after: i64,
        now: i64,
    ) -> Result<JournalPage, StoreError> {
        let doing = "read the journal of a job's actions";
        let mut reader = self.readers.acquire().await.doing(doing)?;
        owned_row(&mut reader, job, attempt).await?;
        let mut page = JournalPage { entries: Vec::new(), next: None };
        let mut bytes = 0;
        let mut last = after;
        let mut rows = sqlx::query(
            "SELECT journal.*, sample_ids, deadline, accepted, \
             EXISTS (SELECT 1 FROM reward_callback_results AS came WHERE came.request_id = journal.request_id) AS arrived \
             FROM journal LEFT JOIN reward_callbacks ON journal_id = journal.id \
             WHERE job_id = ? AND journal.id > ? ORDER BY journal.id",
        )
            .bind(job.to_string())
            .bind(after)
            .fetch(&mut *reader);
        while let Some(row) = rows.try_next().await.doing(doing)? {
            if bytes >= PAGE_BYTES {
                page.next = Some(last);
                break;
            }
            last = column(&row, "id")?;
            for part in ["body", "answer"] {
                bytes += column::<Option<&str>>(&row, part)?.map_or(0, str::len);
            }
            page.entries.push(read(&row, now)?);
        }
        Ok(page)
    }
}

const DOING: &str = "append to the journal";

async fn append(
    tx: &mut SqliteConnection,
    job: JobId,
    attempt: u64,
    entry: &JournalEntry,
    now: i64,
) -> Result<(), StoreError> {
    match entry {
        JournalEntry::Rollout { rollout, groups, samplers } => {
            let groups = match samplers.is_empty() {
                true => to_json("groups", groups)?,
                false => to_json("groups", &json!({ "groups": groups, "samplers": samplers }))?,
            };
            let row = NewRow { key: None, rollout, attempt, reward: None, request_id: None, body: &groups };
            insert(tx, job, &row, now).await?;
        }
        JournalEntry::Request { rollout, reward, key, id, body, later } => {
            let row = NewRow { key: Some(key), rollout, attempt, reward: Some(reward), request_id: Some(id), body };
            let done = insert(tx, job, &row, now).await?;
            let open = match done.rows_affected() {
                0 => open_request(tx, job, key, id).await?,
                _ => Some(done.last_insert_rowid()),
            };
            if let (Some(row), Some(later)) = (open, later) {
                callback_insert(tx, Some(row), id, later, now).await?;
            }
        }
        JournalEntry::Accepted { key, id, accepted, .. } => {
            if request_id(tx, job, key).await?.as_ref() != Some(id) {
                return Err(StoreError::NotFound { kind: "reward request", id: id.clone() });
            }
            callback_change(tx, id, CallbackChange::Accepted(accepted)).await?;
        }
        JournalEntry::Answer { key, id, answer, .. } => {
            // The first recorded answer is kept, because the run has already used it.
            let done = sqlx::query(
                "UPDATE journal SET answer = COALESCE(answer, ?), body = NULL \
                 WHERE job_id = ? AND key = ? AND request_id = ?",
            )
            .bind(to_json("answer", answer)?)
            .bind(job.to_string())
            .bind(key)
            .bind(id)
            .execute(&mut *tx)
            .await
            .doing(DOING)?;
            if done.rows_affected() == 0 {
                return Err(StoreError::NotFound { kind: "reward request", id: id.clone() });
            }
            callback_change(tx, id, CallbackChange::Closed).await?;
        }
        JournalEntry::Forget { rollout, reward } => {
            sqlx::query("DELETE FROM journal WHERE job_id = ? AND rollout = ? AND reward = ?")
                .bind(job.to_string())
                .bind(to_json("rollout", rollout)?)
                .bind(reward)
                .execute(&mut *tx)
                .await
                .doing(DOING)?;
        }
    }
    Ok(())
}

/// A new row of the journal, which is not answered yet.
struct NewRow<'a> {
    /// Digest of the request; `None` = the row of the rollout itself, whose key is its id.
    key: Option<&'a str>,
    rollout: &'a RolloutId,
    attempt: u64,
    reward: Option<&'a str>,
    request_id: Option<&'a str>,
    body: &'a str,
}

/// Inserts a row; an existing row with the same key is not changed.
async fn insert(
    tx: &mut SqliteConnection,
    job: JobId,
    row: &NewRow<'_>,
    now: i64,
) -> Result<SqliteQueryResult, StoreError> {
    let rollout = to_json("rollout", row.rollout)?;
    sqlx::query(
        "INSERT INTO journal (job_id, key, phase, step, rollout, attempt, time, reward, request_id, body) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job_id, key) DO NOTHING",
    )
    .bind(job.to_string())
    .bind(row.key.unwrap_or(&rollout))
    .bind(variant_name(&row.rollout.phase)?)
    .bind(int(row.rollout.step))
    .bind(&rollout)
    .bind(int(row.attempt))
    .bind(now)
    .bind(row.reward)
    .bind(row.request_id)
    .bind(row.body)
    .execute(&mut *tx)
    .await
    .doing(DOING)
}

/// Returns the row of a request that was recorded before; `None` if it is answered. `Exists` if it has another id.
async fn open_request(tx: &mut SqliteConnection, job: JobId, key: &str, id: &str) -> Result<Option<i64>, StoreError> {
    let row = sqlx::query("SELECT id, request_id, answer IS NULL AS open FROM journal WHERE job_id = ? AND key = ?")
        .bind(job.to_string())
        .bind(key)
        .fetch_one(tx)
        .await
        .doing(DOING)?;
    if column::<Option<&str>>(&row, "request_id")? != Some(id) {
        return Err(StoreError::Exists { kind: "reward request", id: id.to_owned() });
    }
    Ok(if column(&row, "open")? { Some(column(&row, "id")?) } else { None })
}

async fn request_id(tx: &mut SqliteConnection, job: JobId, key: &str) -> Result<Option<String>, StoreError> {
    sqlx::query_scalar("SELECT request_id FROM journal WHERE job_id = ? AND key = ?")
        .bind(job.to_string())
        .bind(key)
        .fetch_optional(tx)
        .await
        .doing("append to the journal")
        .map(Option::flatten)
}

/// Removes the entries that a published checkpoint of `step` covers. An evaluation that follows the step may not be finished yet,
/// so its entries are kept.
pub(super) async fn journal_trim(tx: &mut SqliteConnection, job: JobId, step: u64) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM journal WHERE job_id = ?1 AND (step < ?2 OR (step = ?2 AND phase = ?3))")
        .bind(job.to_string())
        .bind(int(step))
        .bind(variant_name(&SamplePhase::Train)?)
        .execute(tx)
        .await
        .doing("trim the journal of a job's actions")?;
    Ok(())
}

/// Closes the journal of a job that has ended. A failed or cancelled job keeps its completions and answers for a retry from its
/// newest checkpoint. Its open requests are removed, so services can no longer answer them.
pub(super) async fn journal_close(tx: &mut SqliteConnection, job: JobId, end: State) -> Result<(), StoreError> {
    let statements: &[&'static str] = match end {
        State::Failed | State::Cancelled => &[
            "DELETE FROM journal WHERE job_id = ? AND reward IS NOT NULL AND answer IS NULL",
            "DELETE FROM reward_callbacks WHERE journal_id IN (SELECT id FROM journal WHERE job_id = ?)",
        ],
        State::Succeeded => &["DELETE FROM journal WHERE job_id = ?"],
        State::Queued | State::Running | State::Paused => &[],
    };
    for statement in statements {
        sqlx::query(*statement)
            .bind(job.to_string())
            .execute(&mut *tx)
            .await
            .doing("close the journal of a job's actions")?;
    }
    Ok(())
}

/// Copies the answers of a job's journal to a new job, and with `completions` the sampled completions too, as if the new job's
/// attempt 0 had written them. Open requests are not copied, because the new job sends them under its own ids.
pub(super) async fn journal_copy(
    tx: &mut SqliteConnection,
    from: JobId,
    to: JobId,
    completions: bool,
    now: i64,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO journal (job_id, key, phase, step, rollout, attempt, time, reward, request_id, body, answer) \
         SELECT ?1, key, phase, step, rollout, 0, ?2, reward, request_id, body, answer FROM journal \
         WHERE job_id = ?3 AND (answer IS NOT NULL OR (?4 AND reward IS NULL)) ORDER BY id",
    )
    .bind(to.to_string())
    .bind(now)
    .bind(from.to_string())
    .bind(completions)
    .execute(tx)
    .await
    .doing("copy the journal of a job's actions")?;
    Ok(())
}

/// The body of a rollout's row: a list of groups, or an object if the samplers have states.
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredRollout {
    Groups(Vec<SampledGroup>),
    WithSamplers { groups: Vec<SampledGroup>, samplers: Vec<Value> },
}

fn read(row: &SqliteRow, now: i64) -> Result<JournalEntry, StoreError> {
    let rollout: RolloutId = json_column(row, "rollout")?;
    let Some(reward) = column::<Option<String>>(row, "reward")? else {
        return Ok(match json_column(row, "body")? {
            StoredRollout::Groups(groups) => JournalEntry::Rollout { rollout, groups, samplers: Vec::new() },
            StoredRollout::WithSamplers { groups, samplers } => JournalEntry::Rollout { rollout, groups, samplers },
        });
    };
    let (key, id) = (column(row, "key")?, column(row, "request_id")?);
    let answered = row.try_get::<Option<&str>, _>("answer").is_ok_and(|answer| answer.is_some());
    Ok(if answered {
        JournalEntry::Answer { rollout, key, id, answer: json_column(row, "answer")? }
    } else {
        JournalEntry::Request { rollout, reward, key, id, body: column(row, "body")?, later: later(row, now)? }
    })
}

/// Reads the late-answer data of a request.
fn later(row: &SqliteRow, now: i64) -> Result<Option<Later>, StoreError> {
    let Some(deadline) = column::<Option<i64>>(row, "deadline")? else { return Ok(None) };
    let accepted = match column::<Option<&str>>(row, "accepted")? {
        Some(_) => Some(json_column(row, "accepted")?),
        // A service that has sent results has accepted the request, even if its 202 was not recorded.
        None => column::<bool>(row, "arrived")?.then(Accepted::default),
    };
    let left_ms = u64::try_from(deadline.saturating_sub(now)).unwrap_or(0);
    Ok(Some(Later { left_ms, sample_ids: json_column(row, "sample_ids")?, accepted }))
}
