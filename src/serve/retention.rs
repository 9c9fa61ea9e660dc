//! Removes data whose retention time is over, in small steps.

use std::time::Duration;

use crate::config::retention::Retention;
use crate::files::DataDir;
use crate::http::error::chain;
use crate::store::background::spawn_blocking;
use crate::store::gc::{self, GcItem, GcRules};
use crate::store::retention::Leftover;
use crate::store::storage::StorageError;
use crate::store::{Store, StoreError, clock_ms};

/// Interval between two rounds of removing data.
const ROUND_INTERVAL: Duration = Duration::from_secs(600);
/// Pause between two steps of a round, so that other database transactions can run.
const STEP_PAUSE: Duration = Duration::from_millis(50);

/// Removes outdated data at regular intervals until the future is dropped.
pub(super) async fn run_retention(store: Store, files: DataDir, retention: Retention) {
    loop {
        if let Err(error) = round(&store, &files, retention, clock_ms()).await {
            tracing::error!(error = chain(&error), "could not remove all data past its retention time");
        }
        tokio::time::sleep(ROUND_INTERVAL).await;
    }
}

/// Removes everything whose retention time is over at `now` (Unix ms).
///
/// # Errors
/// Fails when the database does not answer.
pub async fn round(store: &Store, files: &DataDir, retention: Retention, now: i64) -> Result<(), StoreError> {
    let Retention {
        events_ms,
        samples_ms,
        metrics_ms,
        logs_ms,
        journals_ms,
        checkpoints_ms,
        datasets_ms,
        models_ms,
        audit_ms,
        deliveries_ms,
    } = retention;
    // A job's journal is removed with its checkpoints, because it is useless without the checkpoint that precedes it.
    let journals_ms = [journals_ms, checkpoints_ms].into_iter().flatten().min();
    for (what, keep_ms) in [
        (Leftover::Events, events_ms),
        (Leftover::Samples, samples_ms),
        (Leftover::Metrics, metrics_ms),
        (Leftover::Logs, logs_ms),
        (Leftover::Journal, journals_ms),
    ] {
        let Some(keep_ms) = keep_ms else { continue };
        while store.leftovers_remove(what, now - keep_ms).await? > 0 {
            tokio::time::sleep(STEP_PAUSE).await;
        }
    }
    if let Some(keep_ms) = checkpoints_ms {
        loop {
            let removed = store.leftover_checkpoints_remove(now - keep_ms).await?;
            if removed.is_empty() {
                break;
            }
            let files = files.clone();
            let swept = spawn_blocking(move || {
                removed.iter().try_for_each(|row| files.checkpoint_remove(row.job, row.step, row.attempt))
            });
            if let Ok(Err(error)) = swept.await {
                tracing::warn!(
                    error = chain(&error),
                    "could not remove the files of a checkpoint; the server removes them at its next start"
                );
            }
        }
    }
    if datasets_ms.is_some() || models_ms.is_some() {
        // An error is only logged: `rlood gc` removes files without a database row.
        let rules = GcRules { now, is_served: true, datasets_ms, models_ms, checkpoints_ms: None };
        if let Err(error) = remove_unused(store, files, rules).await {
            tracing::error!(error = chain(&error), "could not remove all unused datasets or models");
        }
    }
    if let Some(keep_ms) = audit_ms {
        while store.audit_remove(now - keep_ms).await? > 0 {
            tokio::time::sleep(STEP_PAUSE).await;
        }
    }
    if let Some(keep_ms) = deliveries_ms {
        while store.deliveries_remove(now - keep_ms).await? > 0 {
            tokio::time::sleep(STEP_PAUSE).await;
        }
    }
    Ok(())
}

async fn remove_unused(store: &Store, files: &DataDir, rules: GcRules) -> Result<(), StorageError> {
    for GcItem { kind, name, removal, .. } in gc::unused(store, files, rules).await? {
        let Some(removal) = removal else { continue };
        if gc::remove(store, files, &removal).await? {
            tracing::info!(%kind, name, "a dataset or model was removed: it was unused for longer than its retention time");
        }
    }
    Ok(())
}
