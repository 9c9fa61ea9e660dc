//! Runs queued exports of checkpoints, one after another.

use serde_json::json;
use tokio::sync::mpsc;

use super::super::AppState;
use super::super::job_models::unchanged;
use super::super::tasks::{self, Work};
use crate::error_text::with_causes;
use crate::export::{ExportError, ExportLine, ExportReport, ExportRequest, ExportTask};
use crate::one_shot::{ChildLine, OneShotError};
use crate::store::background::spawn_blocking;
use crate::store::{StoreError, TaskEnd, TaskKind, TaskRow, clock_ms};
use crate::supervisor::one_shot::Exports;

/// How long the files of an export are kept, in ms.
const RETENTION_MS: i64 = 7 * 24 * 3600 * 1000;

/// Runs queued exports of checkpoints until the server stops.
pub(crate) async fn run(state: AppState, exports: Exports) {
    tasks::run(state, Exporting(exports)).await;
}

struct Exporting(Exports);

impl Work for Exporting {
    const KIND: TaskKind = TaskKind::Export;

    async fn run(&self, state: &AppState, row: &TaskRow) -> Result<Option<TaskEnd>, StoreError> {
        let task = match prepare(state, row).await {
            Ok(task) => task,
            Err(error) => return Ok(Some(TaskEnd::Failed(json!(error)))),
        };
        let (tell, lines) = mpsc::channel(16);
        let (report, kept) = tokio::join!(self.0.follow(&task, tell), store_progress(state, row, lines));
        kept?;
        let failed = |error: ExportError| Ok(Some(TaskEnd::Failed(json!(error))));
        match report {
            Ok(ExportReport::Exported(result)) => {
                let (files, id) = (state.files.clone(), row.id.clone());
                match spawn_blocking(move || files.export_place(&id)).await {
                    Ok(Ok(())) => Ok(Some(TaskEnd::Succeeded(json!(result), Some(clock_ms() + RETENTION_MS)))),
                    Ok(Err(error)) => failed(internal(&with_causes(&error))),
                    Err(error) => failed(internal(&error.to_string())),
                }
            }
            Ok(ExportReport::Failed(error)) => failed(error),
            Err(OneShotError::Stopping) => Ok(None),
            Err(OneShotError::Killed(_)) => failed(export_error(
                "killed",
                "the process that wrote the exported model was killed, most likely because it ran out of memory; try again when no job runs",
            )),
            Err(error) => failed(export_error("process_failed", error.to_string())),
        }
    }

    async fn clean(&self, state: &AppState, row: &TaskRow) {
        let (files, id) = (state.files.clone(), row.id.clone());
        // An error is ignored: files of a failed export that cannot be removed now are removed at the next start of the server.
        let _ = spawn_blocking(move || files.export_remove(&id)).await;
    }
}

fn export_error(code: &str, message: impl Into<String>) -> ExportError {
    ExportError { code: code.to_owned(), message: message.into() }
}

fn internal(cause: &str) -> ExportError {
    tracing::error!(cause, "an export of a checkpoint failed");
    export_error("internal", "the server could not store the export: try again, and see the server's log")
}

async fn store_progress(
    state: &AppState,
    row: &TaskRow,
    mut lines: mpsc::Receiver<ExportLine>,
) -> Result<(), StoreError> {
    while let Some(line) = lines.recv().await {
        if let ChildLine::Progress { done, total } = line {
            state.store.task_progress(&row.id, row.attempt, done, total).await?;
        }
    }
    Ok(())
}

async fn prepare(state: &AppState, row: &TaskRow) -> Result<ExportTask, ExportError> {
    let store = &state.store;
    let of_store = |error: StoreError| internal(&with_causes(&error));
    let plan = store.job_get(row.job).await.and_then(|job| job.plan()).map_err(of_store)?;
    let checkpoint = store.checkpoint_get(row.checkpoint).await.map_err(|error| match error {
        StoreError::NotFound { .. } => export_error("no_such_checkpoint", "the checkpoint was removed in the meantime"),
        error => of_store(error),
    })?;
    let model = store.model_get(&plan.model.id).await.map_err(|error| match error {
        StoreError::NotFound { .. } => export_error(
            "invalid_model",
            format!("the job's model '{}' is no longer registered: register it again with POST /models", plan.model.id),
        ),
        error => of_store(error),
    })?;
    let model = unchanged(model, plan.model.sha256.clone()).await;
    let model = model.map_err(|problem| export_error("invalid_model", problem.detail()))?;
    let request: ExportRequest =
        serde_json::from_value(row.request.clone()).map_err(|error| internal(&error.to_string()))?;
    let (files, id) = (state.files.clone(), row.id.clone());
    let begun = spawn_blocking(move || files.export_begin(&id)).await;
    let out_dir =
        begun.map_err(|error| internal(&error.to_string()))?.map_err(|error| internal(&with_causes(&error)))?;
    Ok(ExportTask {
        model_dir: model.source.into(),
        checkpoint_dir: state.files.checkpoint_dir(checkpoint.job, checkpoint.step, checkpoint.attempt),
        is_adapter: plan.lora.is_some(),
        four_bit: plan.training.four_bit(),
        request,
        out_dir,
    })
}
