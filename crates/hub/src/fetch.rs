//! Downloads the selected files of a Hub repository: resumable, verified, four at a time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{self, TryStreamExt};
use reqwest::StatusCode;
use reqwest::header::CONTENT_RANGE;

use crate::choose::RepoPlan;
use crate::error::HubError;
use crate::http::{Attempts, Failed, Hub, next_piece, text};
use crate::info::RepoFile;
use crate::part::{Part, is_complete, link_from, release, sync_folder};
use crate::progress::Progress;

/// Number of concurrent downloads.
pub(crate) const MAX_CONCURRENT: usize = 4;
/// Disk space in bytes that a download must leave free.
pub const RESERVED_BYTES: u64 = 64 << 20;

/// The folders of one download.
struct Folders<'a> {
    /// Folder of partial files.
    parts: &'a Path,
    /// Folder of the complete files.
    to: &'a Path,
    /// Folders beside `to`, such as those of other revisions, which may have files of the same content.
    beside: Vec<PathBuf>,
}

impl Hub {
    /// Downloads the files of a planned download into the folder `to`, which is created if needed. Partial files are stored in the
    /// folder `parts`, which must be on the same file system. Files that exist in `to` are verified and kept. A file with the same
    /// path and content in a folder beside `to` is linked instead of downloaded.
    ///
    /// Dropping the future stops the download. Partial files are kept for the next time, and so are the files that are complete:
    /// until the last one is, each also has its name in `parts`, so that `to` may be removed.
    ///
    /// # Errors
    /// Fails with `NoSpace` before the first byte, with `Damaged` when a file's hash is wrong twice, and on errors of
    /// the Hub and the disk.
    pub fn download<'a>(
        &'a self,
        plan: &'a RepoPlan,
        parts: &'a Path,
        to: &'a Path,
        progress: &'a Arc<Progress>,
    ) -> BoxFuture<'a, Result<(), HubError>> {
        Box::pin(async move {
            for folder in [parts, to] {
                std::fs::create_dir_all(folder).map_err(HubError::disk("create the folder", folder))?;
            }
            check_space(plan, parts, to)?;
            let folders = &Folders { parts, to, beside: folders_beside(to) };
            stream::iter(plan.files.iter().map(Ok))
                .try_for_each_concurrent(MAX_CONCURRENT, |file| async move {
                    self.fetch(plan, file, folders, progress).await
                })
                .await?;
            plan.files.iter().for_each(|file| release(parts, file, &to.join(&file.path)));
            sync_folder(to)
        })
    }

    async fn fetch(
        &self,
        plan: &RepoPlan,
        file: &RepoFile,
        folders: &Folders<'_>,
        progress: &Arc<Progress>,
    ) -> Result<(), HubError> {
        let Folders { parts, to, beside } = folders;
        let target = to.join(&file.path);
        if is_complete(&target, file).await? || link_from(beside, file, parts, &target).await? {
            progress.moved(0, file.size_bytes);
            return Ok(());
        }
        let mut part = Part::open(parts, file, progress.clone()).await?;
        if is_complete(&target, file).await? {
            // Another download completed the file while this one waited for the partial file's lock.
            return part.remove();
        }
        let mut attempts = Attempts::new(self.settings.first_delay);
        let mut damaged = 0;
        loop {
            let before = part.size_bytes;
            let fetched = match part.size_bytes == file.size_bytes {
                true => Ok(()),
                false => self.fill(plan, file, &mut part).await,
            };
            if part.size_bytes > before {
                attempts.progressed();
            }
            match fetched {
                Ok(()) => {
                    let found = part.hash().await?;
                    if found == file.hash {
                        return part.publish(&target).await;
                    }
                    damaged += 1;
                    part.restart().await?;
                    if damaged > 1 {
                        let (expected, found) = (file.hash.to_string(), found.to_string());
                        return Err(HubError::Damaged { path: file.path.clone(), expected, found });
                    }
                }
                Err(failed) => attempts.pause_after(failed).await?,
            }
        }
    }

    /// Downloads the missing bytes of a file. Each request starts at the Hub's own URL, because the URLs that it redirects to
    /// expire after an hour.
    async fn fill(&self, plan: &RepoPlan, file: &RepoFile, part: &mut Part) -> Result<(), Failed> {
        let url = self.file_url(&plan.repo, &plan.commit, &file.path)?;
        let opened = self.open(&plan.repo, &url, Some(&plan.commit), part.size_bytes).await;
        let mut opened = match opened {
            Err(failed) if part.size_bytes > 0 && failed.is_forbidden_by_cdn() => {
                // The CDN rejects the range request, so the file is downloaded from its beginning.
                part.restart().await?;
                return Err(failed);
            }
            opened => opened?,
        };
        match opened.response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range = text(opened.response.headers(), CONTENT_RANGE.as_str()).and_then(content_range);
                if range != Some((part.size_bytes, file.size_bytes)) {
                    part.restart().await?;
                    return Err(Failed::transient(
                        &url,
                        "the hub sent a different range of bytes than requested".to_owned(),
                    ));
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                part.restart().await?;
                return Err(Failed::transient(&url, "the file is shorter than announced".to_owned()));
            }
            // The server ignored the range request and sends the whole file.
            _ if part.size_bytes > 0 => part.restart().await?,
            _ => {}
        }
        let is_from_cdn = opened.is_from_cdn;
        while let Some(piece) =
            next_piece(&mut opened.response).await.map_err(|detail| Failed::transient(&url, detail))?
        {
            if part.size_bytes + piece.len() as u64 > file.size_bytes {
                part.restart().await?;
                let whose = if is_from_cdn { "its CDN" } else { "it" };
                return Err(Failed::transient(
                    &url,
                    format!("{whose} sent more than the {} bytes announced", file.size_bytes),
                ));
            }
            part.append(&piece).await?;
        }
        if part.size_bytes < file.size_bytes {
            part.flush().await?;
            return Err(Failed::transient(
                &url,
                format!("the response ended after {} of {} bytes", part.size_bytes, file.size_bytes),
            ));
        }
        Ok(())
    }
}

/// Parses the first byte and the total size from a `Content-Range` header such as `bytes 5-9/10`.
pub(crate) fn content_range(field: &str) -> Option<(u64, u64)> {
    let (range, whole) = field.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, whole.parse().ok()?))
}

impl RepoPlan {
    /// Returns the number of bytes that a download into the folder `to` still needs: files in it and the partial files in `parts`
    /// are not downloaded again.
    pub fn missing_bytes(&self, parts: &Path, to: &Path) -> u64 {
        let size = |path: PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let missing = |file: &RepoFile| {
            let here = size(parts.join(file.hash.to_string())).max(size(to.join(&file.path)));
            file.size_bytes.saturating_sub(here)
        };
        self.files.iter().map(missing).sum()
    }
}

pub(crate) fn check_space(plan: &RepoPlan, parts: &Path, to: &Path) -> Result<(), HubError> {
    let needed_bytes = plan.missing_bytes(parts, to);
    let disk = rustix::fs::statvfs(parts)
        .map_err(|error| HubError::disk("get the free disk space of", parts)(error.into()))?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed_bytes > 0 && needed_bytes.saturating_add(RESERVED_BYTES) > free_bytes {
        let (repo, path) = (plan.repo.to_string(), parts.to_owned());
        return Err(HubError::NoSpace { repo, needed_bytes, free_bytes, path });
    }
    Ok(())
}

/// Returns the folders beside a folder; none if they cannot be listed, because they only save downloads.
fn folders_beside(folder: &Path) -> Vec<PathBuf> {
    let Some(entries) = folder.parent().and_then(|above| std::fs::read_dir(above).ok()) else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| path != folder && path.is_dir()).collect()
}
