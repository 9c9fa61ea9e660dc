//! Removes what was kept long enough, in small steps.

use std::time::Duration;

use crate::config::retention::Retention;
use crate::files::DataDir;
use crate::http::error::chain;
use crate::store::retention::Leftover;
use crate::store::{Store, StoreError, clock_ms};

/// Between two rounds.
const ROUND: Duration = Duration::from_secs(600);
/// Between two steps of a round, so that others come in.
const STEP: Duration = Duration::from_millis(50);

/// Rounds, until it is dropped.
pub(super) async fn keep_house(store: Store, files: DataDir, retention: Retention) {
    loop {
        if let Err(error) = round(&store, &files, retention, clock_ms()).await {
            tracing::error!(error = chain(&error), "what was kept long enough is not all removed");
        }
        tokio::time::sleep(ROUND).await;
    }
}

/// Removes everything that is older than it may be at `now` (Unix ms).
///
/// # Errors
/// When the database does not answer.
pub async fn round(store: &Store, files: &DataDir, retention: Retention, now: i64) -> Result<(), StoreError> {
    let Retention { events_ms, samples_ms, metrics_ms, logs_ms, journals_ms, checkpoints_ms, audit_ms, deliveries_ms } =
        retention;
    // What came after a checkpoint is of no use without it.
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
            tokio::time::sleep(STEP).await;
        }
    }
    if let Some(keep_ms) = checkpoints_ms {
        loop {
            let removed = store.leftover_checkpoints_remove(now - keep_ms).await?;
            if removed.is_empty() {
                break;
            }
            let files = files.clone();
            let swept = tokio::task::spawn_blocking(move || {
                removed.iter().try_for_each(|row| files.checkpoint_remove(row.job, row.step, row.attempt))
            });
            if let Ok(Err(error)) = swept.await {
                tracing::warn!(error = chain(&error), "a checkpoint's files are left; the next start removes them");
            }
        }
    }
    if let Some(keep_ms) = audit_ms {
        while store.audit_remove(now - keep_ms).await? > 0 {
            tokio::time::sleep(STEP).await;
        }
    }
    if let Some(keep_ms) = deliveries_ms {
        while store.deliveries_remove(now - keep_ms).await? > 0 {
            tokio::time::sleep(STEP).await;
        }
    }
    Ok(())
}
