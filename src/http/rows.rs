//! Receives dataset rows: checks them, converts them to canonical JSON, and writes them to a staged file.

use std::time::{Duration, Instant};

use axum::body::Bytes;
use futures::{Stream, StreamExt};
use serde_json::Value;

use super::AppState;
use super::error::{Code, FieldError, Problem, shortened};
use super::storage::check_limit;
use crate::dataset::{Reader, Rejected, RowError, RowPlace, Summary};
use crate::files::StagedDone;
use crate::id::DatasetId;
use crate::storage::StorageKind;
use crate::store::background::spawn_blocking;
use crate::store::{DatasetRow, NewDataset, clock_ms};

/// Default maximum size of a dataset, in bytes, both as received and in canonical form.
pub const DEFAULT_LIMIT_BYTES: u64 = 1 << 30;
/// Size of the write buffer for canonical rows, in bytes.
pub(super) const WRITE_BYTES: usize = 256 * 1024;
/// Time limit for a whole dataset to arrive. A stalled upload ends much earlier.
pub(super) const UPLOAD_DEADLINE: Duration = Duration::from_secs(3600);

/// Reads rows as they arrive, checks them, and writes them in canonical form to a staged file. Holds one row and one piece in
/// memory. Reading stops while the disk is nearly full. Errors name the `file`, if its name is known.
pub(super) async fn read_rows<E>(
    state: &AppState,
    mut reader: Reader,
    file: Option<&str>,
    mut pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    failed: impl Fn(E) -> Problem,
) -> Result<(Summary, StagedDone), Problem> {
    check_disk(state)?;
    let limit = state.dataset_limit_bytes;
    let mut staged = state.files.stage(limit).await?;
    let mut out = Vec::new();
    let mut received = 0_u64;
    let deadline = Instant::now() + UPLOAD_DEADLINE;
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(&failed)?;
        if Instant::now() > deadline {
            return Err(Problem::new(Code::RequestTimeout, "the upload of the dataset took more than an hour"));
        }
        received += piece.len() as u64;
        if received > limit {
            return Err(too_large(limit));
        }
        reader.push(&piece, &mut out);
        if out.len() >= WRITE_BYTES {
            check_disk(state)?;
            check_limit(state, StorageKind::Datasets, received).await?;
            staged.write(&out).await?;
            out.clear();
        }
    }
    let summary = reader.finish(&mut out).map_err(|rejected| rejected_in(file, rejected))?;
    check_limit(state, StorageKind::Datasets, received).await?;
    staged.write(&out).await?;
    Ok((summary, staged.finish().await?))
}

/// Stores a dataset's file, then its database row with this id and name. The same bytes are stored once per owner. Returns the row,
/// and whether it is new.
pub(super) async fn store_rows(
    state: &AppState,
    owner: &str,
    (id, name): (DatasetId, Option<String>),
    (summary, staged, origin): (Summary, StagedDone, Option<Value>),
) -> Result<(DatasetRow, bool), Problem> {
    if let Some(row) = state.store.dataset_by_sha256(owner, &staged.sha256.to_string()).await? {
        return Ok((row, false));
    }
    let Summary { num_rows, columns } = summary;
    let (sha256, size_bytes, owner) = (staged.sha256.to_string(), staged.size_bytes, owner.to_owned());
    let new = NewDataset { id, name, sha256, num_rows, size_bytes, columns, owner };
    staged.publish(&state.files.dataset(id)).await?;
    let created = state.store.dataset_create(new, clock_ms()).await;
    if !matches!(created, Ok((_, true))) {
        remove_file(state, id).await?; // A concurrent upload of the same rows was first, or the insert failed.
    }
    let (mut row, is_new) = created?;
    if let Some(origin) = origin.filter(|_| is_new) {
        state.store.dataset_note_origin(row.id, &origin).await?;
        row.origin = Some(origin);
    }
    Ok((row, is_new))
}

/// Removes the file of a dataset.
pub(super) async fn remove_file(state: &AppState, id: DatasetId) -> Result<(), Problem> {
    let files = state.files.clone();
    spawn_blocking(move || files.dataset_remove(id)).await.map_err(Problem::internal)?.map_err(Problem::from)
}

pub(super) fn too_large(limit: u64) -> Problem {
    Problem::new(Code::BodyTooLarge, format!("a dataset must be at most {limit} bytes; split it"))
}

/// Refuses uploads while the disk is nearly full, to protect the space that jobs and the database need.
pub(super) fn check_disk(state: &AppState) -> Result<(), Problem> {
    if state.files.free_bytes()? < state.config.edge.disk_reserve_bytes {
        return Err(Problem::new(
            Code::StorageFull,
            "the server's disk is nearly full: free some space, then try again",
        ));
    }
    Ok(())
}

pub(super) fn rejected(rejected: Rejected) -> Problem {
    rejected_in(None, rejected)
}

/// Converts the errors of rows into a problem; `file` is the name of the uploaded file, if it is known.
fn rejected_in(file: Option<&str>, Rejected { errors, num_errors }: Rejected) -> Problem {
    let first = errors.first().map_or_else(String::new, |RowError { place, code: _, detail }| match (place, file) {
        (RowPlace::File, None) => detail.clone(),
        (RowPlace::File, Some(file)) => format!("{}: {detail}", shortened(file)),
        (place, None) => format!("{place}: {detail}"),
        (place, Some(file)) => format!("{place} ({}): {detail}", shortened(file)),
    });
    let detail = match num_errors {
        0 | 1 => first,
        _ if num_errors > errors.len() as u64 => {
            format!(
                "the dataset has {num_errors} invalid rows, of which the first {} are listed; {first}",
                errors.len()
            )
        }
        _ => format!("{num_errors} invalid rows; {first}"),
    };
    Problem::new(Code::InvalidDataset, detail).items(row_errors(errors))
}

pub(super) fn row_errors(errors: Vec<RowError>) -> Vec<FieldError> {
    let one = |error: RowError| FieldError {
        pointer: error.place.to_string(),
        code: error.code.to_owned(),
        detail: error.detail,
    };
    errors.into_iter().map(one).collect()
}
