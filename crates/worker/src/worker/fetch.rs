//! Downloads the files of the checkpoint that a job resumes from. The server is asked to verify a file that arrives with a wrong
//! hash. If the file is damaged on the server's disk, the job resumes from an older checkpoint within the same attempt.

use std::path::{Path, PathBuf};

use super::attempt::Attempt;
use super::client::{
    ClientError, FIRST_DELAY, MAX_DAMAGED_ATTEMPTS, MAX_DELAY, MAX_OUTAGE, unless_disk_full, with_retries,
};
use super::{clock, failure};
use crate::error_text::with_causes;
use crate::job::Failure;
use crate::protocol::{DamagedFile, FileEntry, FileList, Inspection, ResumePoint, Verdict};

/// Result of downloading files of a checkpoint.
enum Fetched<T> {
    Whole(T),
    /// A file is damaged on the server's disk.
    Damaged {
        file: String,
        older: Option<ResumePoint>,
    },
}

impl Attempt {
    /// Downloads the checkpoint to resume from. If it is damaged, `resume` is set to the older checkpoint
    /// that was downloaded instead.
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
                    // The files of the damaged checkpoint are removed to free space. An error is ignored, because the whole scratch
                    // directory is removed after the attempt.
                    let _ = tokio::fs::remove_dir_all(&dir).await;
                    *resume = older.filter(|older| older.step < step);
                    self.progress.reset_to(resume.as_ref().map_or(0, |older| older.step));
                }
            }
        }
        Ok(None)
    }

    /// Downloads the checkpoint of a warm start.
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

    /// Downloads files of a checkpoint into a new directory.
    async fn fetch_files(
        &self,
        list: FileList,
        point: &ResumePoint,
        dir: PathBuf,
    ) -> Result<Fetched<PathBuf>, Failure> {
        std::fs::create_dir(&dir)
            .map_err(|source| ClientError::Disk { doing: "create a scratch directory for the job's files", source })
            .map_err(|error| failure::of_client(&error, self.progress.get()))?;
        for file in &point.files {
            let named = crate::protocol::check_file_name(&file.name).map_err(|error| ClientError::Refused {
                status: 0,
                code: "file_name".to_owned(),
                detail: error.to_string(),
            });
            self.check_transfer(named)?;
            match self.check_transfer(self.fetch_file(list, point.step, file, &dir.join(&file.name)).await)? {
                Fetched::Whole(()) => {}
                Fetched::Damaged { file, older } => return Ok(Fetched::Damaged { file, older }),
            }
        }
        Ok(Fetched::Whole(dir))
    }

    /// Downloads one file of a checkpoint with retries: for up to [`MAX_OUTAGE`] without an answer from the server, and a few times
    /// if the hash is wrong although the server finds the file intact.
    async fn fetch_file(
        &self,
        list: FileList,
        step: u64,
        file: &FileEntry,
        to: &Path,
    ) -> Result<Fetched<()>, ClientError> {
        let report = DamagedFile { attempt: self.claim_ref.attempt, list, step, file: file.name.clone() };
        let (mut damaged, mut interrupted) = (0, 0_u32);
        let (mut failing_since, mut delay) = (None, FIRST_DELAY);
        loop {
            let Err(error) = self.client.checkpoint_file(self.claim_ref, list, file, to).await else {
                return Ok(Fetched::Whole(()));
            };
            let since = *failing_since.get_or_insert_with(clock::now);
            tracing::warn!(file = file.name, error = with_causes(&error), "downloading a file of a checkpoint failed");
            let is_suspect = match &error {
                ClientError::Damaged { .. } => {
                    damaged += 1;
                    true
                }
                // A bad disk of the server or the network may have interrupted the transfer. The server is asked to verify the file
                // only after 2, 4, 8 … interruptions, because reading a large file is expensive.
                error if is_interrupted(error) => {
                    interrupted += 1;
                    interrupted >= 2 && interrupted.is_power_of_two()
                }
                transient if transient.is_transient() => false,
                _ => return Err(error),
            };
            if clock::now() - since >= MAX_OUTAGE {
                return Err(error);
            }
            if is_suspect && let Some(older) = self.verify_on_server(&report).await? {
                return Ok(Fetched::Damaged { file: report.file, older });
            }
            if damaged >= MAX_DAMAGED_ATTEMPTS {
                return Err(error);
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_DELAY);
        }
    }

    /// Asks the server to verify a file of a checkpoint. Returns `None` if the file is intact, else the older
    /// checkpoint to resume from.
    async fn verify_on_server(&self, report: &DamagedFile) -> Result<Option<Option<ResumePoint>>, ClientError> {
        loop {
            match with_retries(|| self.client.inspect(self.claim_ref, report), unless_disk_full).await {
                Ok(Inspection { verdict: Verdict::Checking, .. }) => {}
                Ok(Inspection { verdict: Verdict::Whole, .. }) => return Ok(None),
                Ok(Inspection { verdict: Verdict::Damaged, resume }) => return Ok(Some(resume)),
                // An older server does not have this call; it verified the checkpoint's files before it assigned the job.
                Err(ClientError::Refused { status: 404 | 405, .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns whether a download failed although the server is reachable, so that the server's disk may be the cause.
fn is_interrupted(error: &ClientError) -> bool {
    match error {
        ClientError::Interrupted(_) | ClientError::Unavailable(500) => true,
        ClientError::Unreachable(cause) => !cause.is_connect(),
        _ => false,
    }
}
