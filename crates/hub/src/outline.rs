//! Downloads the outline of a model: its small files completely, and only the headers of its weights.

use std::fs::{File, Metadata};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use futures::stream::{self, TryStreamExt};

use crate::choose::RepoPlan;
use crate::error::HubError;
use crate::fetch::{MAX_CONCURRENT, check_space};
use crate::hash::FileHash;
use crate::http::{Attempts, Failed, Hub, next_piece};
use crate::id::Repo;
use crate::info::RepoFile;

/// Maximum length in bytes of a file header in the safetensors format.
const MAX_HEADER_BYTES: u64 = 100_000_000;

impl Hub {
    /// Downloads all files of a planned download except the weights into the folder `to`. Of each weights file it downloads only
    /// the header, followed by a hole up to the full size. After a few megabytes the folder can be read like the whole model,
    /// except for the tensors' bytes. `parts` is as in [`Hub::download`]. The folder appears when it is complete; an existing
    /// folder is used as it is.
    ///
    /// # Errors
    /// Fails with `NoSpace` when the complete model would not fit on the disk, and on errors of the Hub and the disk.
    pub fn outline<'a>(
        &'a self,
        plan: &'a RepoPlan,
        parts: &'a Path,
        to: &'a Path,
    ) -> BoxFuture<'a, Result<(), HubError>> {
        Box::pin(async move {
            std::fs::create_dir_all(parts).map_err(HubError::disk("create the folder", parts))?;
            check_space(plan, parts, to)?;
            if let Ok(there) = File::open(to) {
                // The modification time of an outline's folder records its last use.
                return there.set_modified(SystemTime::now()).map_err(HubError::disk("mark the use of the folder", to));
            }
            let outlines = to.parent().unwrap_or(to);
            std::fs::create_dir_all(outlines).map_err(HubError::disk("create the folder", outlines))?;
            let building = tempfile::Builder::new().prefix("building-").tempdir_in(outlines);
            // The temporary folder is removed when this future is dropped, or when another process has created `to` first.
            let building = building.map_err(HubError::disk("create a folder in", outlines))?;
            self.build_outline(plan, parts, building.path()).await?;
            match std::fs::rename(building.path(), to) {
                Err(_) if to.is_dir() => Ok(()),
                named => named.map_err(HubError::disk("rename", building.path())),
            }
        })
    }

    async fn build_outline(&self, plan: &RepoPlan, parts: &Path, to: &Path) -> Result<(), HubError> {
        // Weights in git itself are small (at most 10 MB), and their SHA-256 is not announced: they are downloaded whole.
        let is_header_enough =
            |file: &RepoFile| file.path.ends_with(".safetensors") && matches!(file.hash, FileHash::Sha256(_));
        let (weights, small): (Vec<RepoFile>, Vec<RepoFile>) = plan.files.iter().cloned().partition(is_header_enough);
        let small = RepoPlan { files: small, ..plan.clone() };
        self.download(&small, parts, to, &Arc::default()).await?;
        stream::iter(weights.iter().map(Ok))
            .try_for_each_concurrent(MAX_CONCURRENT, |file| async move { self.outline_weights(plan, file, to).await })
            .await
    }

    /// Reads up to `most_bytes` from the beginning of a repository's file, without verification.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Hub::info`].
    pub fn read_start<'a>(
        &'a self,
        repo: &'a Repo,
        commit: &'a str,
        file: &'a RepoFile,
        most_bytes: usize,
    ) -> BoxFuture<'a, Result<Vec<u8>, HubError>> {
        Box::pin(async move {
            let mut attempts = Attempts::new(self.settings.first_delay);
            loop {
                match self.start_of(repo, commit, file, most_bytes).await {
                    Ok(bytes) => return Ok(bytes),
                    Err(failed) => attempts.pause_after(failed).await?,
                }
            }
        })
    }

    async fn start_of(&self, repo: &Repo, commit: &str, file: &RepoFile, most_bytes: usize) -> Result<Vec<u8>, Failed> {
        let url = self.file_url(repo, commit, &file.path)?;
        let mut response = self.open(repo, &url, Some(commit), 0).await?.response;
        let mut bytes = Vec::new();
        while bytes.len() < most_bytes {
            match next_piece(&mut response).await.map_err(|detail| Failed::transient(&url, detail))? {
                Some(piece) => bytes.extend_from_slice(&piece),
                None if bytes.len() as u64 >= file.size_bytes => break,
                None => {
                    return Err(Failed::transient(
                        &url,
                        "the response ended before the end of the requested bytes".to_owned(),
                    ));
                }
            }
        }
        bytes.truncate(most_bytes);
        Ok(bytes)
    }

    async fn outline_weights(&self, plan: &RepoPlan, file: &RepoFile, to: &Path) -> Result<(), HubError> {
        let mut attempts = Attempts::new(self.settings.first_delay);
        let header = loop {
            match self.header(plan, file).await {
                Ok(header) => break header,
                Err(failed) => attempts.pause_after(failed).await?,
            }
        };
        let target = to.join(&file.path);
        if let Some(folder) = target.parent() {
            std::fs::create_dir_all(folder).map_err(HubError::disk("create the folder", folder))?;
        }
        let write = || {
            let mut opened = File::create(&target)?;
            opened.write_all(&header)?;
            opened.set_len(file.size_bytes)
        };
        write().map_err(HubError::disk("write to", &target))
    }

    /// Downloads the header of a safetensors file and the length before it, but not the tensors.
    async fn header(&self, plan: &RepoPlan, file: &RepoFile) -> Result<Vec<u8>, Failed> {
        let unusable = |why: &str| {
            let why = format!("its {} {why}", file.path);
            Failed::from(HubError::Unusable { repo: plan.repo.to_string(), why })
        };
        let url = self.file_url(&plan.repo, &plan.commit, &file.path)?;
        let mut response = self.open(&plan.repo, &url, Some(&plan.commit), 0).await?.response;
        let mut bytes = Vec::new();
        loop {
            if let Some(length) = bytes.first_chunk::<8>() {
                let whole = u64::from_le_bytes(*length).saturating_add(8);
                if whole > file.size_bytes.min(MAX_HEADER_BYTES + 8) {
                    return Err(unusable(
                        "is not a safetensors file: its header is longer than the file or than 100 MB",
                    ));
                }
                if bytes.len() as u64 >= whole {
                    bytes.truncate(usize::try_from(whole).unwrap_or(usize::MAX));
                    return Ok(bytes);
                }
            }
            match next_piece(&mut response).await.map_err(|detail| Failed::transient(&url, detail))? {
                Some(piece) => bytes.extend_from_slice(&piece),
                None if bytes.len() as u64 >= file.size_bytes => {
                    return Err(unusable("is not a safetensors file: it ends within its header"));
                }
                None => {
                    return Err(Failed::transient(
                        &url,
                        "the response ended within the header of the weights".to_owned(),
                    ));
                }
            }
        }
    }
}

/// Removes partial downloads that were not continued since `before`, and returns their number. A complete file keeps its name among
/// them while a model has it, and from then on for as long as a partial one.
///
/// # Errors
/// Fails when the folder cannot be read.
pub fn clean_parts(parts: &Path, before: SystemTime) -> std::io::Result<usize> {
    let entries = match std::fs::read_dir(parts) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut removed = 0;
    for entry in entries {
        let path = entry?.path();
        let Ok(file) = File::open(&path) else { continue };
        // The removal of another name of a file changes its ctime, not its modification time.
        let changed = |metadata: &Metadata| {
            let since_epoch = u64::try_from(metadata.ctime()).unwrap_or(0).saturating_mul(1000);
            SystemTime::UNIX_EPOCH
                + Duration::from_millis(since_epoch + metadata.ctime_nsec().unsigned_abs() / 1_000_000)
        };
        let is_old = file.metadata().is_ok_and(|metadata| metadata.nlink() < 2 && changed(&metadata) < before);
        // A partial file that another process is downloading is locked, so it is kept.
        if is_old && file.try_lock().is_ok() && std::fs::remove_file(&path).is_ok() {
            removed += 1;
        }
    }
    Ok(removed)
}
