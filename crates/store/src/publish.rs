//! Publication of a checkpoint: its files first, then the database row that names them.

use futures::future::BoxFuture;
use rlood_types::error_text::with_causes;

use crate::failpoint::{fail_point, without};
use crate::files::{DataDir, FilesError};
use crate::id::CheckpointId;
use crate::{PublishCheckpoint, Store, StoreError};

/// Why a checkpoint was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The attempt does not own the job, or the database cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The files do not match the list, or the data directory cannot be used.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A test injected a failure here.
    #[error(transparent)]
    Stopped(std::io::Error),
}

/// Publishes a checkpoint: moves the uploaded files to their final path, then inserts the row that names them, and finally removes
/// the directories of rotated checkpoints. A call whose response was lost can be repeated.
///
/// # Errors
/// Fails if the attempt does not own the job, the files do not match the list, or the database or the data
/// directory cannot be used.
pub fn publish_checkpoint<'a>(
    store: &'a Store,
    data: &'a DataDir,
    checkpoint: PublishCheckpoint<'a>,
    now: i64,
) -> BoxFuture<'a, Result<CheckpointId, PublishError>> {
    Box::pin(async move {
        let PublishCheckpoint { job, attempt, step, files, .. } = checkpoint;
        store.claim_check(job, attempt).await?;
        // The worker repeats this call if the response to the first one was lost.
        let rows = store.checkpoint_list(job).await?;
        if let Some(row) = rows.iter().find(|row| (row.step, row.attempt) == (step, attempt) && row.files == files) {
            return Ok(row.id);
        }
        let listed = files.to_vec();
        let place = data.in_background(move |data| data.checkpoint_commit(job, step, attempt, &listed));
        let publication = if without!(ManifestLast) {
            let publication = store.checkpoint_publish(checkpoint, now).await?;
            place.await?;
            publication
        } else {
            place.await?;
            fail_point!("publish.placed").map_err(PublishError::Stopped)?;
            store.checkpoint_publish(checkpoint, now).await?
        };
        data.checkpoint_published(job, step, attempt);
        fail_point!("publish.published").map_err(PublishError::Stopped)?;
        let removed = publication.removed;
        // The new checkpoint is published by now. A rotated directory that cannot be removed is removed at the next start.
        let swept = data.in_background(move |data| {
            removed.iter().try_for_each(|old| data.checkpoint_remove(old.job, old.step, old.attempt))
        });
        if let Err(error) = swept.await {
            tracing::warn!(target: "rlood::http::worker", %job, error = with_causes(&error), "the files of an old checkpoint could not be removed");
        }
        Ok(publication.id)
    })
}
