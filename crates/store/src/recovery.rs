//! Recovery: cleans up after a server that was killed.

use futures::future::BoxFuture;
use rlood_types::task::TaskState;

use crate::files::{DataDir, FilesError};
use crate::{DatasetFilter, Store, StoreError, TaskKind};

/// Why a server cannot recover the data directory and therefore cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The database cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Requeues the jobs of the former server's own workers, renews the lease of every other claim, and removes files
/// without a database row.
///
/// # Errors
/// Fails if the database or the data directory cannot be used; it can be called again.
pub fn recover<'a>(
    store: &'a Store,
    files: &'a DataDir,
    lease_ms: i64,
    now: i64,
) -> BoxFuture<'a, Result<(), RecoveryError>> {
    Box::pin(async move {
        store.keys_free_in_flight().await?;
        for job in store.workers_forget_children(now).await? {
            tracing::warn!(target: "rlood::serve", %job, "the job's worker ended with the former server; the job is queued again");
        }
        store.tasks_requeue().await?;
        // Manually started workers may still be running, so they get time to reconnect.
        store.leases_renew(now, lease_ms).await?;
        let mut datasets = Vec::new();
        let mut after = None;
        loop {
            let page = store.dataset_list(DatasetFilter::default(), after.as_deref(), 100).await?;
            datasets.extend(page.data.into_iter().map(|dataset| dataset.id));
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        files.sweep(&store.checkpoint_keys().await?, &datasets)?;
        files.initial_sweep(&store.warm_start_jobs().await?)?;
        recover_exports(store, files).await?;
        files.adapter_sweep(&store.adapter_ids().await?)?;
        Ok(())
    })
}

/// Removes files of exports that no row names, and rows of exports whose files are gone: a backup does not contain these files.
async fn recover_exports(store: &Store, files: &DataDir) -> Result<(), RecoveryError> {
    let exports = store.task_list_all(TaskKind::Export).await?;
    let ids: Vec<String> = exports.iter().map(|export| export.id.clone()).collect();
    files.export_sweep(&ids)?;
    for export in exports {
        if export.state == TaskState::Succeeded && !files.export_dir(&export.id).is_dir() {
            tracing::warn!(target: "rlood::serve", export = export.id, "the files of an export are missing; its row in the database is removed");
            store.task_delete(TaskKind::Export, &export.id).await?;
        }
    }
    Ok(())
}
