//! Reports of damaged checkpoint files. When a worker cannot fetch a file intact, the server reads the file itself in the
//! background before it discards the checkpoint: the cause may be the network, or that worker.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};

use super::super::AppState;
use super::super::error::{Code, Problem, chain};
use super::super::extract::{Json, Path};
use crate::files::{self, FilesError};
use crate::id::JobId;
use crate::protocol::{DamagedFile, FileEntry, FileList, Inspection, ResumePoint, Verdict};
use crate::store::background::spawn;
use crate::store::{CheckpointRow, Damage, clock_ms};

/// Maximum time that a report of a damaged file is held open while the server reads the file; the worker then asks again.
const HOLD_FOR: Duration = Duration::from_secs(10);
/// Maximum number of inspections to remember. Beyond it, finished ones are dropped even if no worker has asked for the result.
const MAX_INSPECTIONS: usize = 64;

/// The result of reading a file that a worker reported as damaged.
#[derive(Debug, Clone)]
enum Finding {
    Whole,
    Damaged(Damage, String),
    /// The server has too many open files to read the reported file now.
    Busy(String),
}

type Reading = Shared<BoxFuture<'static, Finding>>;

/// Files that are being read because a worker reported them.
#[derive(Default)]
pub(super) struct Inspections(Mutex<HashMap<(JobId, DamagedFile), Reading>>);

impl fmt::Debug for Inspections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inspections")
    }
}

impl Inspections {
    /// Returns the check of this file that is in progress, or starts a new one.
    fn begin(&self, key: (JobId, DamagedFile), read: impl FnOnce() -> Reading) -> Reading {
        let mut readings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if readings.len() >= MAX_INSPECTIONS {
            readings.retain(|_, reading| reading.peek().is_none());
        }
        readings.entry(key).or_insert_with(read).clone()
    }

    fn forget(&self, key: &(JobId, DamagedFile)) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

/// Path of a file that a worker reported as damaged, and its expected size and hash.
struct Reported {
    path: PathBuf,
    entry: FileEntry,
    /// The checkpoint, for a file of the list `resume`.
    checkpoint: Option<CheckpointRow>,
}

/// Handles a report to `POST /worker/jobs/{id}/damaged`.
pub(super) async fn inspect_file(
    State(state): State<AppState>,
    Path(job): Path<JobId>,
    Json(body): Json<DamagedFile>,
) -> Result<Json<Inspection>, Problem> {
    state.store.claim_check(job, body.attempt).await?;
    let reported = match find(&state, job, &body).await? {
        Ok(reported) => reported,
        // The worker repeats a report whose response was lost: the checkpoint was already discarded.
        Err(latest) => return Ok(Json(Inspection { verdict: Verdict::Damaged, resume: latest.map(resume_point) })),
    };
    let key = (job, body);
    let reading = state.workers.inspections.begin(key.clone(), || read(&state, &reported));
    let finding = tokio::select! {
        finding = reading => finding,
        () = tokio::time::sleep(HOLD_FOR) => return Ok(checking()),
        () = state.stopping.cancelled() => return Ok(checking()),
    };
    state.workers.inspections.forget(&key);
    let DamagedFile { attempt, file, .. } = key.1;
    let (damage, cause) = match finding {
        Finding::Whole => return Ok(Json(Inspection { verdict: Verdict::Whole, resume: None })),
        Finding::Busy(cause) => {
            let detail = "the server has too many open files to read this file; try again";
            return Err(Problem::new(Code::Overloaded, detail).retry_after(1).because(cause));
        }
        Finding::Damaged(damage, cause) => (damage, cause),
    };
    let step = reported.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    if damage == Damage::Unreadable && !reads_other_files(&state, job, step).await? {
        tracing::error!(%job, attempt, file, cause, "the server's data directory cannot be read; the worker's claim on a job is released");
        state.store.claim_release(job, attempt, clock_ms()).await?;
        return Err(Problem::new(
            Code::LeaseLost,
            "the server cannot read its disk: it has returned the job to the queue for now",
        ));
    }
    tracing::error!(%job, attempt, step, file, cause, ?damage, "a file of a job's checkpoint is damaged");
    let Some(CheckpointRow { id, step, attempt: writer, .. }) = reported.checkpoint else {
        return Ok(Json(Inspection { verdict: Verdict::Damaged, resume: None }));
    };
    let older = state.store.claim_discard_checkpoint(job, attempt, id, damage, clock_ms()).await?;
    let removed = state.files.in_background(move |files| files.checkpoint_remove(job, step, writer)).await;
    if let Err(error) = removed {
        // An error is only logged: the checkpoint no longer has a database row, so the next start of the server removes its
        // files.
        tracing::warn!(%job, step, error = chain(&error), "a damaged checkpoint could not be removed");
    }
    Ok(Json(Inspection { verdict: Verdict::Damaged, resume: older.map(resume_point) }))
}

fn checking() -> Json<Inspection> {
    Json(Inspection { verdict: Verdict::Checking, resume: None })
}

fn resume_point(checkpoint: CheckpointRow) -> ResumePoint {
    ResumePoint { step: checkpoint.step, files: checkpoint.files }
}

/// Returns the reported file, or `Err` with the newest checkpoint if the reported one no longer exists.
async fn find(
    state: &AppState,
    job: JobId,
    body: &DamagedFile,
) -> Result<Result<Reported, Option<CheckpointRow>>, Problem> {
    let unknown = || Problem::not_found("file in the list of the claim", &body.file);
    let named = |files: &[FileEntry]| files.iter().find(|entry| entry.name == body.file).cloned().ok_or_else(unknown);
    match body.list {
        FileList::Resume => {
            let latest = state.store.checkpoint_latest(job).await?;
            let Some(checkpoint) = latest.as_ref().filter(|latest| latest.step == body.step) else {
                return Ok(Err(latest));
            };
            let entry = named(&checkpoint.files)?;
            let path = state.files.checkpoint_file(job, checkpoint.step, checkpoint.attempt, &entry.name)?;
            Ok(Ok(Reported { path, entry, checkpoint: latest }))
        }
        FileList::Initial => {
            let files = state.files.in_background(move |files| files.initial_files(job)).await?.unwrap_or_default();
            let entry = named(&files)?;
            let path = state.files.initial_file(job, &entry.name)?;
            Ok(Ok(Reported { path, entry, checkpoint: None }))
        }
    }
}

/// Reads the reported file in the background, even if the worker disconnects.
fn read(state: &AppState, reported: &Reported) -> Reading {
    let (path, entry) = (reported.path.clone(), reported.entry.clone());
    let data = state.files.clone();
    let reading = spawn(async move {
        let compared = data.in_background(move |_| files::compare_bytes(&path, &entry)).await;
        match compared {
            Ok(()) => Finding::Whole,
            Err(error) if error.is_for_want_of_resources() => Finding::Busy(chain(&error)),
            Err(error @ FilesError::Io { .. }) => Finding::Damaged(Damage::Unreadable, chain(&error)),
            Err(error) => Finding::Damaged(Damage::Mismatch, chain(&error)),
        }
    });
    reading.map(|read| read.unwrap_or_else(|error| Finding::Busy(chain(&error)))).boxed().shared()
}

/// Whether the disk returns other files correctly: those of the next older checkpoint, or the database. If not, the disk may be
/// at fault instead of the reported file, and no checkpoint is discarded.
async fn reads_other_files(state: &AppState, job: JobId, step: Option<u64>) -> Result<bool, Problem> {
    let rows = state.store.checkpoint_list(job).await?;
    let older = rows.into_iter().find(|row| step.is_none_or(|step| row.step < step));
    let smallest = older.and_then(|row| {
        let file = row.files.iter().min_by_key(|file| file.size_bytes)?;
        state.files.checkpoint_file(job, row.step, row.attempt, &file.name).ok()
    });
    let path = smallest.unwrap_or_else(|| state.files.database());
    Ok(state.files.in_background(move |_| files::read_first_bytes(&path)).await.is_ok())
}
