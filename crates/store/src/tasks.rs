//! Tasks: long-running work on a checkpoint that is not a job. Verdicts, exports and pushes each have a state, a progress and a result.
//!
//! ```text
//! queued → running → succeeded | failed | cancelled
//! queued → cancelled
//! running → queued   (the server stopped: the next one starts it again, attempt + 1)
//! ```
//! The runner of a task holds its attempt: reports of a former attempt are rejected.

use futures::future::BoxFuture;
use rlood_types::task::TaskState;
use serde_json::{Map, Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::events::event_insert;
use super::task_rows::{NewTask, TaskKind, TaskRow, task_row_insert};
use super::{
    Doing, Page, Store, StoreError, column, cursor, cursor_key, int, json_column, page, parse_cursor, to_json,
    variant_name,
};
use crate::id::{CheckpointId, JobId, VerdictId};
use crate::verdict::{RowOutcome, VerdictRow};

/// How a task ended.
#[derive(Debug, Clone)]
pub enum TaskEnd {
    /// The task succeeded with this result; its files are removed at the given time, Unix time in milliseconds.
    Succeeded(Value, Option<i64>),
    /// The task failed with this error, `{code, message}`.
    Failed(Value),
}

impl Store {
    /// Creates a task and records the event in its job's history.
    pub async fn task_create(&self, new: NewTask, now: i64) -> Result<TaskRow, StoreError> {
        let doing = "create a task";
        let mut tx = self.begin(doing).await?;
        let row = task_insert(&mut tx, new, now).await?;
        self.commit(tx, doing).await?;
        self.wake_job(row.job);
        self.wake_tasks();
        Ok(row)
    }

    /// Returns one task, or `NotFound`.
    pub async fn task_get(&self, kind: TaskKind, id: &str) -> Result<TaskRow, StoreError> {
        let row = sqlx::query("SELECT * FROM tasks WHERE id = ? AND kind = ?")
            .bind(id)
            .bind(kind.as_str())
            .fetch_optional(&self.readers)
            .await
            .doing("read a task (a verdict or an export)")?
            .ok_or_else(|| StoreError::NotFound { kind: kind.as_str(), id: id.to_owned() })?;
        TaskRow::read(&row)
    }

    /// Returns the newest task of this kind of a job.
    pub async fn task_newest(&self, kind: TaskKind, job: JobId) -> Result<Option<TaskRow>, StoreError> {
        sqlx::query("SELECT * FROM tasks WHERE job_id = ? AND kind = ? ORDER BY created_at DESC, id DESC LIMIT 1")
            .bind(job.to_string())
            .bind(kind.as_str())
            .fetch_optional(&self.readers)
            .await
            .doing("read the newest task (verdict or export) of a job")?
            .map(|row| TaskRow::read(&row))
            .transpose()
    }

    /// Lists the tasks of a job, or of one of its checkpoints, newest first.
    pub async fn task_list(
        &self,
        kind: TaskKind,
        job: JobId,
        checkpoint: Option<CheckpointId>,
    ) -> Result<Vec<TaskRow>, StoreError> {
        sqlx::query(
            "SELECT * FROM tasks WHERE job_id = ?1 AND kind = ?2 AND (?3 IS NULL OR checkpoint_id = ?3) \
             ORDER BY created_at DESC, id DESC",
        )
        .bind(job.to_string())
        .bind(kind.as_str())
        .bind(checkpoint.map(|id| id.to_string()))
        .fetch_all(&self.readers)
        .await
        .doing("list tasks (verdicts or exports)")?
        .iter()
        .map(TaskRow::read)
        .collect()
    }

    /// Starts the task of a kind that has waited for longest; `None` if none waits.
    pub async fn task_claim(&self, kind: TaskKind, now: i64) -> Result<Option<TaskRow>, StoreError> {
        let doing = "begin a task";
        let mut tx = self.begin(doing).await?;
        let begun = sqlx::query(
            "UPDATE tasks SET state = 'running', attempt = attempt + 1, started_at = ?1, done = 0, total = 0 \
             WHERE id = (SELECT id FROM tasks WHERE kind = ?2 AND state = 'queued' ORDER BY created_at, id LIMIT 1) RETURNING *",
        )
        .bind(now)
        .bind(kind.as_str())
        .fetch_optional(&mut *tx)
        .await
        .doing(doing)?;
        let Some(row) = begun else { return Ok(None) };
        let row = TaskRow::read(&row)?;
        // An interrupted attempt may have left judged rows, which this attempt creates again.
        sqlx::query("DELETE FROM verdict_rows WHERE verdict_id = ?")
            .bind(&row.id)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        self.commit(tx, doing).await?;
        Ok(Some(row))
    }

    /// Records the progress of a running task; returns whether it still belongs to this attempt.
    pub async fn task_progress(&self, id: &str, attempt: u64, done: u64, total: u64) -> Result<bool, StoreError> {
        let noted =
            sqlx::query("UPDATE tasks SET done = ?, total = ? WHERE id = ? AND attempt = ? AND state = 'running'")
                .bind(int(done))
                .bind(int(total))
                .bind(id)
                .bind(int(attempt))
                .execute(&self.writer)
                .await
                .doing("store the progress of a task (a verdict or an export)")?;
        Ok(noted.rows_affected() == 1)
    }

    /// Ends a running task; does nothing if it no longer belongs to this attempt.
    pub fn task_finish<'a>(
        &'a self,
        row: &'a TaskRow,
        end: TaskEnd,
        now: i64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let doing = "end a task";
            let (state, result, error, expires) = match end {
                TaskEnd::Succeeded(result, expires) => (TaskState::Succeeded, Some(result), None, expires),
                TaskEnd::Failed(error) => (TaskState::Failed, None, Some(error), None),
            };
            let mut tx = self.begin(doing).await?;
            let json = |value: Option<Value>| value.map(|value| value.to_string());
            let ended = sqlx::query(
                "UPDATE tasks SET state = ?, result = ?, error = ?, expires_at = ?, finished_at = ? \
             WHERE id = ? AND attempt = ? AND state = 'running' RETURNING *",
            )
            .bind(variant_name(&state)?)
            .bind(json(result))
            .bind(json(error))
            .bind(expires)
            .bind(now)
            .bind(&row.id)
            .bind(int(row.attempt))
            .fetch_optional(&mut *tx)
            .await
            .doing(doing)?;
            let Some(ended) = ended else { return Ok(()) };
            task_event(&mut tx, &TaskRow::read(&ended)?, now).await?;
            self.commit(tx, doing).await?;
            self.wake_job(row.job);
            // A push may wait for this export.
            self.wake_tasks();
            Ok(())
        })
    }

    /// Cancels a task. A task that has ended is not changed.
    pub fn task_cancel<'a>(
        &'a self,
        kind: TaskKind,
        id: &'a str,
        now: i64,
    ) -> BoxFuture<'a, Result<TaskRow, StoreError>> {
        Box::pin(async move {
            let doing = "cancel a task";
            let mut tx = self.begin(doing).await?;
            let cancelled = sqlx::query(
            "UPDATE tasks SET state = 'cancelled', finished_at = ? WHERE id = ? AND kind = ? AND state IN ('queued', 'running') \
             RETURNING *",
        )
        .bind(now)
        .bind(id)
        .bind(kind.as_str())
        .fetch_optional(&mut *tx)
        .await
        .doing(doing)?;
            let Some(cancelled) = cancelled else {
                drop(tx);
                return self.task_get(kind, id).await;
            };
            let row = TaskRow::read(&cancelled)?;
            task_event(&mut tx, &row, now).await?;
            self.commit(tx, doing).await?;
            self.wake_job(row.job);
            self.wake_tasks();
            Ok(row)
        })
    }

    /// Queues the running tasks again, because the server that ran them has ended.
    pub async fn tasks_requeue(&self) -> Result<u64, StoreError> {
        let again = sqlx::query("UPDATE tasks SET state = 'queued' WHERE state = 'running'");
        Ok(again.execute(&self.writer).await.doing("queue tasks (verdicts and exports) again")?.rows_affected())
    }

    /// Deletes a task that has ended; the caller then removes its files.
    pub async fn task_delete(&self, kind: TaskKind, id: &str) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM tasks WHERE id = ? AND kind = ?")
            .bind(id)
            .bind(kind.as_str())
            .execute(&self.writer)
            .await
            .doing("remove a task (a verdict or an export)")?;
        Ok(())
    }

    /// Returns all tasks of a kind.
    pub async fn task_list_all(&self, kind: TaskKind) -> Result<Vec<TaskRow>, StoreError> {
        sqlx::query("SELECT * FROM tasks WHERE kind = ? ORDER BY id")
            .bind(kind.as_str())
            .fetch_all(&self.readers)
            .await
            .doing("list all tasks (verdicts and exports)")?
            .iter()
            .map(TaskRow::read)
            .collect()
    }

    /// Returns tasks whose files are due for removal.
    pub async fn tasks_expired(&self, now: i64) -> Result<Vec<TaskRow>, StoreError> {
        sqlx::query("SELECT * FROM tasks WHERE expires_at <= ?")
            .bind(now)
            .fetch_all(&self.readers)
            .await
            .doing("find expired tasks (verdicts and exports)")?
            .iter()
            .map(TaskRow::read)
            .collect()
    }

    /// Stores judged rows of a running verdict; does nothing if it no longer belongs to this attempt.
    pub async fn verdict_rows_append(&self, row: &TaskRow, judged: &[VerdictRow]) -> Result<(), StoreError> {
        let doing = "store judged rows";
        let mut tx = self.begin(doing).await?;
        for one in judged {
            sqlx::query(
                "INSERT INTO verdict_rows (verdict_id, seq, row_set, outcome, row) \
                 SELECT id, (SELECT COALESCE(MAX(seq), 0) + 1 FROM verdict_rows WHERE verdict_id = ?1), ?2, ?3, ?4 FROM tasks \
                 WHERE id = ?1 AND attempt = ?5 AND state = 'running'",
            )
            .bind(&row.id)
            .bind(variant_name(&one.set)?)
            .bind(variant_name(&one.outcome)?)
            .bind(to_json("row", one)?)
            .bind(int(row.attempt))
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        }
        self.commit(tx, doing).await
    }

    /// Returns the judged rows of a verdict in order, with one outcome or all.
    pub async fn verdict_row_page(
        &self,
        id: VerdictId,
        outcome: Option<RowOutcome>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<Value>, StoreError> {
        let after = match after {
            Some(after) => cursor_key::<i64>(&parse_cursor::<1>("verdict rows", after)?[0])?,
            None => 0,
        };
        let limit = limit.clamp(1, 1000);
        let rows = sqlx::query(
            "SELECT seq, row FROM verdict_rows WHERE verdict_id = ?1 AND seq > ?2 AND (?3 IS NULL OR outcome = ?3) \
             ORDER BY seq LIMIT ?4",
        )
        .bind(id.to_string())
        .bind(after)
        .bind(outcome.map(|outcome| variant_name(&outcome)).transpose()?)
        .bind(i64::from(limit) + 1)
        .fetch_all(&self.readers)
        .await
        .doing("list the rows that a verdict compared")?;
        let read = |row: &SqliteRow| Ok((column::<i64>(row, "seq")?, json_column(row, "row")?));
        let data = rows.iter().map(read).collect::<Result<Vec<(i64, Value)>, StoreError>>()?;
        let page = page(data, limit, |(seq, _)| cursor("verdict rows", [&seq.to_string()]));
        Ok(Page { data: page.data.into_iter().map(|(_, row)| row).collect(), next: page.next })
    }
}

/// Inserts a task and records its event.
async fn task_insert(tx: &mut SqliteConnection, new: NewTask, now: i64) -> Result<TaskRow, StoreError> {
    let row = task_row_insert(tx, new, now).await?;
    task_event(tx, &row, now).await?;
    Ok(row)
}

/// Records `verdict.queued`, `verdict.succeeded`, … in the history of the job.
async fn task_event(tx: &mut SqliteConnection, row: &TaskRow, now: i64) -> Result<(), StoreError> {
    let mut data = json!({"id": row.id, "checkpoint_id": row.checkpoint, "step": row.step});
    for (key, value) in [("result", &row.result), ("error", &row.error)] {
        if let Some(value) = value {
            // The event contains only a short form of a verdict's result; the task has all of it.
            data[key] = match row.kind {
                TaskKind::Verdict if key == "result" => {
                    let short = ["verdict", "summary", "difference", "interval", "rows"];
                    short.iter().map(|key| ((*key).to_owned(), value[*key].clone())).collect::<Map<_, _>>().into()
                }
                // Where a push went, and its commit.
                TaskKind::Push => value.clone(),
                TaskKind::Verdict | TaskKind::Export if key == "error" => value.clone(),
                TaskKind::Verdict | TaskKind::Export => continue,
            };
        }
    }
    event_insert(tx, row.job, &row.event(), now, data).await.map(drop)
}
