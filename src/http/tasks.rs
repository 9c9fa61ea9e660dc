//! Long work on checkpoints, run one task of a kind after another: what verdicts and exports have in common.

use std::future::Future;
use std::time::Duration;

use super::AppState;
use crate::causes::with_causes;
use crate::store::{StoreError, TaskEnd, TaskKind, TaskRow, clock_ms};
use crate::task::TaskState;

/// How long to wait after the database failed.
const PAUSE: Duration = Duration::from_secs(5);
/// How often a task under way is looked at, though nothing said that it changed.
const LOOK: Duration = Duration::from_secs(10);

/// How the tasks of a kind are done.
pub(super) trait Work: Send + Sync {
    /// The kind.
    const KIND: TaskKind;

    /// Does one to its end; `None` when the server stops. It is dropped when the task is cancelled.
    fn run(&self, state: &AppState, row: &TaskRow) -> impl Future<Output = Result<Option<TaskEnd>, StoreError>> + Send;

    /// Removes what a task left that did not succeed.
    fn clean(&self, _state: &AppState, _row: &TaskRow) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}

/// Does the tasks of a kind that are asked for, until the server stops.
pub(super) async fn run(state: AppState, work: impl Work) {
    let kind = work_kind(&work);
    let mut changed = state.store.tasks_changed();
    loop {
        changed.mark_unchanged();
        match state.store.task_claim(kind, clock_ms()).await {
            Ok(Some(row)) => {
                if let Err(error) = run_one(&state, &work, &row).await {
                    // It stays `running`: the next start of the server begins it again.
                    tracing::error!(task = row.id, error = with_causes(&error), "the end of a task is not noted");
                }
            }
            Ok(None) => {
                // The sender lives as long as the store.
                let _ = changed.changed().await;
            }
            Err(error) => {
                tracing::error!(error = with_causes(&error), "tasks wait");
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

/// Comes back when the task is not this attempt's any more.
async fn taken_away(state: &AppState, row: &TaskRow) {
    let mut changed = state.store.tasks_changed();
    loop {
        match state.store.task_get(row.kind, &row.id).await {
            Ok(now) if now.state == TaskState::Running && now.attempt == row.attempt => {}
            Ok(_) | Err(StoreError::NotFound { .. }) => return,
            Err(error) => tracing::warn!(error = with_causes(&error), "a cancelled task would not be noticed"),
        }
        let _ = tokio::time::timeout(LOOK, changed.changed()).await;
    }
}
