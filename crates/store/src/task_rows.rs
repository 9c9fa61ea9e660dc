//! The rows of tasks, without the events that tell of them.

use rlood_types::task::TaskState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::{Doing, StoreError, column, corrupt, count_column, id_column, int, json_column, word_column};
use crate::id::{CheckpointId, JobId, VerdictId};
use crate::spec::Plan;
use crate::verdict::usual_sampling;

/// What a task does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// Compares a checkpoint with its base model.
    Verdict,
    /// Writes a checkpoint in another form.
    Export,
}

impl TaskKind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            TaskKind::Verdict => "verdict",
            TaskKind::Export => "export",
        }
    }
}

/// A task.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskRow {
    /// `vrd_…` or `exp_…`.
    pub id: String,
    /// What it does.
    pub kind: TaskKind,
    /// The job whose checkpoint it works on.
    pub job: JobId,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// The checkpoint's step.
    pub step: u64,
    /// Its state.
    pub state: TaskState,
    /// The number of times that it was begun.
    pub attempt: u64,
    /// What was asked for.
    pub request: Value,
    /// Parts done.
    pub done: u64,
    /// Parts in all; 0 = not known yet.
    pub total: u64,
    /// What came of it.
    pub result: Option<Value>,
    /// Why it failed: `{code, message}`.
    pub error: Option<Value>,
    /// Unix ms.
    pub created_at: i64,
    /// Unix ms; of the latest attempt.
    pub started_at: Option<i64>,
    /// Unix ms.
    pub finished_at: Option<i64>,
    /// Unix ms; when what it left on the disk is removed.
    pub expires_at: Option<i64>,
}

/// A task to create.
#[derive(Debug, Clone)]
pub struct NewTask {
    /// `vrd_…` or `exp_…`.
    pub id: String,
    /// What it does.
    pub kind: TaskKind,
    /// The job whose checkpoint it works on.
    pub job: JobId,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// The checkpoint's step.
    pub step: u64,
    /// What was asked for.
    pub request: Value,
}

/// Inserts a task; the caller tells of it in the same transaction.
pub(super) async fn task_row_insert(tx: &mut SqliteConnection, new: NewTask, now: i64) -> Result<TaskRow, StoreError> {
    let NewTask { id, kind, job, checkpoint, step, request } = new;
    let row = sqlx::query(
        "INSERT INTO tasks (id, kind, job_id, checkpoint_id, step, state, request, created_at) \
         VALUES (?, ?, ?, ?, ?, 'queued', ?, ?) RETURNING *",
    )
    .bind(id)
    .bind(kind.as_str())
    .bind(job.to_string())
    .bind(checkpoint.to_string())
    .bind(int(step))
    .bind(request.to_string())
    .bind(now)
    .fetch_one(&mut *tx)
    .await
    .doing("create a task")?;
    TaskRow::read(&row)
}

/// A job that succeeded with an evaluation is judged: its best checkpoint, else its newest. The caller tells of it in the same
/// transaction. `None` where there is nothing to judge.
pub(super) async fn verdict_begin(
    tx: &mut SqliteConnection,
    job: JobId,
    plan: &Plan,
    now: i64,
) -> Result<Option<TaskRow>, StoreError> {
    if !plan.eval.as_ref().is_some_and(|eval| eval.auto_verdict) {
        return Ok(None);
    }
    let best = sqlx::query("SELECT id, step FROM checkpoints WHERE job_id = ? ORDER BY best DESC, step DESC LIMIT 1")
        .bind(job.to_string())
        .fetch_optional(&mut *tx)
        .await
        .doing("read the best checkpoint")?;
    let Some(best) = best else { return Ok(None) };
    let sampling = serde_json::to_value(usual_sampling(plan)).map_err(corrupt("request"))?;
    let new = NewTask {
        id: VerdictId::new().to_string(),
        kind: TaskKind::Verdict,
        job,
        checkpoint: id_column(&best, "id")?,
        step: count_column(&best, "step")?,
        request: sampling,
    };
    task_row_insert(tx, new, now).await.map(Some)
}

impl TaskRow {
    /// `verdict.queued`, `verdict.succeeded`, …: the event that tells of its state.
    pub(super) fn event(&self) -> String {
        format!("{}.{}", self.kind.as_str(), self.state.as_str())
    }

    pub(super) fn read(row: &SqliteRow) -> Result<Self, StoreError> {
        let optional = |name: &'static str| -> Result<Option<Value>, StoreError> {
            column::<Option<&str>>(row, name)?.map(|_| json_column(row, name)).transpose()
        };
        let required = |name: &'static str| corrupt(name)("it is empty");
        Ok(Self {
            id: column(row, "id")?,
            kind: word_column(row, "kind")?.ok_or_else(|| required("kind"))?,
            job: id_column(row, "job_id")?,
            checkpoint: id_column(row, "checkpoint_id")?,
            step: count_column(row, "step")?,
            state: word_column(row, "state")?.ok_or_else(|| required("state"))?,
            attempt: count_column(row, "attempt")?,
            request: json_column(row, "request")?,
            done: count_column(row, "done")?,
            total: count_column(row, "total")?,
            result: optional("result")?,
            error: optional("error")?,
            created_at: column(row, "created_at")?,
            started_at: column(row, "started_at")?,
            finished_at: column(row, "finished_at")?,
            expires_at: column(row, "expires_at")?,
        })
    }
}
