//! Receives dataset rows: checks them, converts them to canonical JSON, and writes them to a staged file.

use std::time::{Duration, Instant};

use axum::body::Bytes;
use futures::{Stream, StreamExt};

use super::AppState;
use super::error::{Code, FieldError, Problem};
use super::storage::check_limit;
use crate::dataset::{Format, Reader, Rejected, RowError, Summary};
use crate::files::StagedDone;
use crate::storage::StorageKind;

/// Default maximum size of a dataset, in bytes, both as received and in canonical form.
pub const DEFAULT_LIMIT_BYTES: u64 = 1 << 30;
/// Size of the write buffer for canonical rows, in bytes.
pub(super) const WRITE_BYTES: usize = 256 * 1024;
/// Time limit for a whole dataset to arrive. A stalled upload ends much earlier.
pub(super) const UPLOAD_DEADLINE: Duration = Duration::from_secs(3600);

/// Reads rows as they arrive, checks them, and writes them in canonical form to a staged file. Holds one row and one piece in
/// memory. Reading stops while the disk is nearly full.
pub(super) async fn read_rows<E>(
    state: &AppState,
    format: Format,
    mut pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    failed: impl Fn(E) -> Problem,
) -> Result<(Summary, StagedDone), Problem> {
    check_disk(state)?;
    let limit = state.dataset_limit_bytes;
    let mut staged = state.files.stage(limit).await?;
    let mut reader = Reader::new(format);
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
    let summary = reader.finish(&mut out).map_err(rejected)?;
    check_limit(state, StorageKind::Datasets, received).await?;
    staged.write(&out).await?;
    Ok((summary, staged.finish().await?))
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

pub(super) fn rejected(Rejected { errors, num_errors }: Rejected) -> Problem {
    let first = errors.first().map_or_else(String::new, |error| match error.line {
        0 => error.detail.clone(),
        line => format!("line {line}: {}", error.detail),
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
        pointer: if error.line == 0 { String::new() } else { format!("line {}", error.line) },
        code: error.code.to_owned(),
        detail: error.detail,
    };
    errors.into_iter().map(one).collect()
}
