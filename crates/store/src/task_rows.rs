//! Database rows of tasks (verdicts, exports and pushes), without the events that report them.

use rlood_types::task::TaskState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::{Doing, StoreError, column, corrupt, count_column, id_column, int, json_column, variant_column};
use crate::id::{CheckpointId, JobId, VerdictId};
use crate::spec::Plan;
use crate::verdict::usual_sampling;

/// The kind of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// Compares a checkpoint with its base model.
    Verdict,
    /// Writes a checkpoint in another format.
    Export,
    /// Uploads a checkpoint to a model hub.
    Push,
}

impl TaskKind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            TaskKind::Verdict => "verdict",
            TaskKind::Export => "export",
            TaskKind::Push => "push",
        }
    }
}

/// A task: a verdict, an export or a push.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskRow {
    /// Id of the task: `vrd_…`, `exp_…` or `psh_…`.
    pub id: String,
    /// Kind of the task.
    pub kind: TaskKind,
    /// Id of the job that wrote the checkpoint.
    pub job: JobId,
    /// Id of the checkpoint.
    pub checkpoint: CheckpointId,
    /// Step of the checkpoint.
    pub step: u64,
    /// Current state of the task.
    pub state: TaskState,
    /// Number of times that the task was started.
    pub attempt: u64,
    /// The request for the verdict, export or push, as JSON. It contains no token.
    pub request: Value,
    /// Number of completed units of work.
    pub done: u64,
    /// Total number of units of work; 0 = not known yet.
    pub total: u64,
    /// The result, once the task has succeeded.
    pub result: Option<Value>,
    /// Why the task failed: `{code, message}`.
    pub error: Option<Value>,
    /// Time of creation, Unix time in milliseconds.
    pub created_at: i64,
    /// Start of the task's latest attempt, Unix time in milliseconds.
    pub started_at: Option<i64>,
    /// Time at which the task ended, Unix time in milliseconds.
    pub finished_at: Option<i64>,
    /// Time at which the task's files are removed, Unix time in milliseconds.
    pub expires_at: Option<i64>,
}

/// A task to create.
#[derive(Debug, Clone)]
pub struct NewTask {
    /// Id of the task: `vrd_…`, `exp_…` or `psh_…`.
    pub id: String,
    /// Kind of the task.
    pub kind: TaskKind,
    /// Id of the job that wrote the checkpoint.
    pub job: JobId,
    /// Id of the checkpoint.
    pub checkpoint: CheckpointId,
    /// Step of the checkpoint.
    pub step: u64,
    /// The request for the verdict or export, as JSON.
    pub request: Value,
}

/// Inserts a task; the caller records its event in the same transaction.
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
    .doing("create a task (a verdict or an export)")?;
    TaskRow::read(&row)
}

/// Creates the verdict of a job that succeeded with an evaluation, on this checkpoint, as (id, step). The caller records the event
/// in the same transaction. `None` if the job asks for no automatic verdict.
pub(super) async fn verdict_begin(
    tx: &mut SqliteConnection,
    job: JobId,
    plan: &Plan,
    (checkpoint, step): (CheckpointId, u64),
    now: i64,
) -> Result<Option<TaskRow>, StoreError> {
    if !plan.eval.as_ref().is_some_and(|eval| eval.auto_verdict) {
        return Ok(None);
    }
    let request = serde_json::to_value(usual_sampling(plan)).map_err(corrupt("request"))?;
    let new = NewTask { id: VerdictId::new().to_string(), kind: TaskKind::Verdict, job, checkpoint, step, request };
    task_row_insert(tx, new, now).await.map(Some)
}

impl TaskRow {
    /// Returns the type of the event that reports the task's state: `verdict.queued`, `verdict.succeeded`, ….
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
            kind: variant_column(row, "kind")?.ok_or_else(|| required("kind"))?,
            job: id_column(row, "job_id")?,
            checkpoint: id_column(row, "checkpoint_id")?,
            step: count_column(row, "step")?,
            state: variant_column(row, "state")?.ok_or_else(|| required("state"))?,
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
