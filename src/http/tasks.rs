//! Runs long tasks on checkpoints, one of each kind at a time. Shared by verdicts, exports and pushes.

use std::future::Future;
use std::time::Duration;

use super::AppState;
use crate::error_text::with_causes;
use crate::store::{StoreError, TaskEnd, TaskKind, TaskRow, clock_ms};
use crate::task::TaskState;

/// Delay before queued tasks are read again after a database error.
const PAUSE: Duration = Duration::from_secs(5);
/// Interval at which a running task is checked even without a notification.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Runs the tasks of one kind: verdicts, exports or pushes.
pub(super) trait Work: Send + Sync {
    const KIND: TaskKind;

    /// Runs one task to its end; `None` when the server stops. The future is dropped when a user cancels the task.
    fn run(&self, state: &AppState, row: &TaskRow) -> impl Future<Output = Result<Option<TaskEnd>, StoreError>> + Send;

    /// Removes the files that a failed or cancelled task left.
    fn clean(&self, _state: &AppState, _row: &TaskRow) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}

/// Runs the queued tasks of one kind (verdicts, exports or pushes) until the server stops.
pub(super) async fn run(state: AppState, work: impl Work) {
    let kind = work_kind(&work);
    let mut changed = state.store.tasks_changed();
    loop {
        changed.mark_unchanged();
        match state.store.task_claim(kind, clock_ms()).await {
            Ok(Some(row)) => {
                if let Err(error) = run_one(&state, &work, &row).await {
                    // A task whose end could not be stored stays in the state `running`, and the next start of the server runs
                    // it again.
                    tracing::error!(
                        task = row.id,
                        error = with_causes(&error),
                        "could not store the end of a task (a verdict, an export or a push)"
                    );
                }
            }
            Ok(None) => {
                // Waits for a change. It cannot fail, because the sender of the notifications lives as long as the store.
                let _ = changed.changed().await;
            }
            Err(error) => {
                tracing::error!(
                    error = with_causes(&error),
                    "could not read the queued tasks (verdicts and exports); the server will retry"
                );
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

fn work_kind<W: Work>(_: &W) -> TaskKind {
    W::KIND
}

async fn run_one(state: &AppState, work: &impl Work, row: &TaskRow) -> Result<(), StoreError> {
    let end = tokio::select! {
        end = work.run(state, row) => end?,
        () = taken_away(state, row) => {
            work.clean(state, row).await;
            return Ok(());
        }
    };
    let Some(end) = end else { return Ok(()) };
    if let TaskEnd::Failed(error) = &end {
        tracing::warn!(task = row.id, job = %row.job, %error, "a task failed");
        work.clean(state, row).await;
    }
    state.store.task_finish(row, end, clock_ms()).await
}

/// Returns when the task was cancelled or deleted, or another attempt runs it.
async fn taken_away(state: &AppState, row: &TaskRow) {
    let mut changed = state.store.tasks_changed();
    loop {
        match state.store.task_get(row.kind, &row.id).await {
            Ok(now) if now.state == TaskState::Running && now.attempt == row.attempt => {}
            Ok(_) | Err(StoreError::NotFound { .. }) => return,
            Err(error) => tracing::warn!(
                error = with_causes(&error),
                "could not check whether a task (verdict or export) was cancelled"
            ),
        }
        let _ = tokio::time::timeout(POLL_INTERVAL, changed.changed()).await;
    }
}
