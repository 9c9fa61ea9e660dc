//! A checkpoint becomes public: its bytes first, then the row that names them.

use rlood_types::causes::with_causes;

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
    /// The files are not those of the list, or the data directory cannot be used.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A test let it fail here.
    #[error(transparent)]
    Stopped(std::io::Error),
}

/// The uploaded bytes to their place first, then the row that names them; what that replaces goes last. A call whose answer was
/// lost can be made again.
///
/// # Errors
/// When the attempt does not own the job, the files are not those of the list, or the database or the data directory cannot be
/// used.
pub async fn publish_checkpoint(
    store: &Store,
    data: &DataDir,
    checkpoint: PublishCheckpoint<'_>,
    now: i64,
) -> Result<CheckpointId, PublishError> {
    let PublishCheckpoint { job, attempt, step, files, .. } = checkpoint;
    store.claim_check(job, attempt).await?;
    // The answer to the first call was lost.
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
    // The new one is published: a directory that cannot be removed now is swept at the next start.
    let swept = data.in_background(move |data| {
        removed.iter().try_for_each(|old| data.checkpoint_remove(old.job, old.step, old.attempt))
    });
    if let Err(error) = swept.await {
        tracing::warn!(target: "rlood::http::worker", %job, error = with_causes(&error), "a rotated checkpoint could not be removed");
    }
    Ok(publication.id)
}
