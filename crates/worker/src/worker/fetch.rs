//! The files of a checkpoint, from the server to this machine. A file that does not arrive whole is reported; where the server
//! finds it damaged on its own disk, the run goes on from an older checkpoint, within the same attempt.

use std::path::{Path, PathBuf};

use super::attempt::Attempt;
use super::client::{ClientError, DAMAGED_TRIES, FIRST_DELAY, LONGEST_DELAY, OUTAGE, full_at_once, persist};
use super::{clock, failure};
use crate::causes::with_causes;
use crate::job::Failure;
use crate::protocol::{DamagedFile, FileEntry, FileList, Inspection, ResumePoint, Verdict};

/// What became of a file, or of a list of them.
enum Fetched<T> {
    Whole(T),
    /// Damaged at its source.
    Damaged {
        file: String,
        older: Option<ResumePoint>,
    },
}

impl Attempt {
    /// The checkpoint to go on from; `resume` becomes the one that was fetched.
    pub(super) async fn fetch_checkpoint(
        &self,
        resume: &mut Option<ResumePoint>,
        scratch: &Path,
    ) -> Result<Option<PathBuf>, Failure> {
        while let Some(point) = resume.take() {
            let dir = scratch.join(format!("resume-{}", point.step));
            match self.fetch_files(FileList::Resume, &point, dir.clone()).await? {
                Fetched::Whole(dir) => {
                    *resume = Some(point);
                    return Ok(Some(dir));
                }
                Fetched::Damaged { file, older } => {
                    let step = point.step;
                    self.events.log(format!("{file} of the checkpoint of step {step} is damaged on the server's disk"));
                    // What was fetched of it only takes room; the whole directory goes with the attempt.
                    let _ = tokio::fs::remove_dir_all(&dir).await;
                    *resume = older.filter(|older| older.step < step);
                    self.progress.go_back_to(resume.as_ref().map_or(0, |older| older.step));
                }
            }
        }
        Ok(None)
    }

    /// What a warm start begins with.
    pub(super) async fn fetch_initial(&self, files: &[FileEntry], scratch: &Path) -> Result<Option<PathBuf>, Failure> {
        if files.is_empty() {
            return Ok(None);
        }
        let point = ResumePoint { step: 0, files: files.to_vec() };
        match self.fetch_files(FileList::Initial, &point, scratch.join("initial")).await? {
            Fetched::Whole(dir) => Ok(Some(dir)),
            Fetched::Damaged { file, .. } => Err(failure::initial_damaged(&file, self.progress.get())),
        }
    }

    /// Files of a checkpoint into a new directory.
    async fn fetch_files(
        &self,
        list: FileList,
        point: &ResumePoint,
        dir: PathBuf,
    ) -> Result<Fetched<PathBuf>, Failure> {
        std::fs::create_dir(&dir)
            .map_err(|source| ClientError::Disk { doing: "make a scratch directory", source })
            .map_err(|error| failure::of_client(&error, self.progress.get()))?;
        for file in &point.files {
            let named = crate::protocol::check_file_name(&file.name).map_err(|error| ClientError::Refused {
                status: 0,
                code: "file_name".to_owned(),
                detail: error.to_string(),
            });
            self.fetched(named)?;
            match self.fetched(self.fetch_file(list, point.step, file, &dir.join(&file.name)).await)? {
                Fetched::Whole(()) => {}
                Fetched::Damaged { file, older } => return Ok(Fetched::Damaged { file, older }),
            }
        }
        Ok(Fetched::Whole(dir))
    }

    /// One file, as often as it takes: for [`OUTAGE`] where no answer comes, a few times where it arrives damaged although the
    /// server finds it whole.
    async fn fetch_file(
        &self,
        list: FileList,
        step: u64,
        file: &FileEntry,
        to: &Path,
    ) -> Result<Fetched<()>, ClientError> {
        let report = DamagedFile { attempt: self.held.attempt, list, step, file: file.name.clone() };
        let (mut damaged, mut broken_off) = (0, 0_u32);
        let (mut failing_since, mut delay) = (None, FIRST_DELAY);
        loop {
            let Err(error) = self.client.checkpoint_file(self.held, list, file, to).await else {
                return Ok(Fetched::Whole(()));
            };
            let since = *failing_since.get_or_insert_with(clock::now);
            tracing::warn!(file = file.name, error = with_causes(&error), "a file of a checkpoint was not fetched");
            let is_suspect = match &error {
                ClientError::Damaged { .. } => {
                    damaged += 1;
                    true
                }
                // The server's disk may not give the file, and the network may have broken the transfer. Reading a large file
                // costs the server something: it is asked seldom.
                error if is_broken_off(error) => {
                    broken_off += 1;
                    broken_off >= 2 && broken_off.is_power_of_two()
                }
                transient if transient.is_transient() => false,
                _ => return Err(error),
            };
            if clock::now() - since >= OUTAGE {
                return Err(error);
            }
            if is_suspect && let Some(older) = self.inspected(&report).await? {
                return Ok(Fetched::Damaged { file: report.file, older });
            }
            if damaged >= DAMAGED_TRIES {
                return Err(error);
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(LONGEST_DELAY);
        }
    }

    /// Has the server read a file: what to go on from where the file is damaged, `None` where it is whole.
    async fn inspected(&self, report: &DamagedFile) -> Result<Option<Option<ResumePoint>>, ClientError> {
        loop {
            match persist(|| self.client.inspect(self.held, report), full_at_once).await {
                Ok(Inspection { verdict: Verdict::Checking, .. }) => {}
                Ok(Inspection { verdict: Verdict::Whole, .. }) => return Ok(None),
                Ok(Inspection { verdict: Verdict::Damaged, resume }) => return Ok(Some(resume)),
                // A server from before this call: it has compared the files before it handed out the claim.
                Err(ClientError::Refused { status: 404 | 405, .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether a server that was reached did not give the file to its end. An answer that breaks off at its first byte is no answer.
fn is_broken_off(error: &ClientError) -> bool {
    match error {
        ClientError::Interrupted(_) | ClientError::Unavailable(500) => true,
        ClientError::Unreachable(cause) => !cause.is_connect(),
        _ => false,
    }
}
