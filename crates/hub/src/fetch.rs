//! Downloads the selected files of a Hub repository: resumable, verified, four at a time.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::{self, TryStreamExt};
use reqwest::StatusCode;
use reqwest::header::CONTENT_RANGE;
use tokio::io::AsyncWriteExt;

use crate::choose::RepoPlan;
use crate::error::HubError;
use crate::hash::{FileHash, Hasher};
use crate::http::{Attempts, Failed, Hub, next_piece, text};
use crate::info::RepoFile;

/// Number of concurrent downloads.
pub(crate) const MAX_CONCURRENT: usize = 4;
/// Disk space in bytes that a download must leave free.
const RESERVED_BYTES: u64 = 64 << 20;

/// Progress of a download, shared with the code that displays it.
#[derive(Debug, Default)]
pub struct Progress {
    done_bytes: AtomicU64,
}

impl Progress {
    /// Returns the number of bytes downloaded so far, including partial files. The number decreases when the download of a
    /// file must start again.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Resets the number of downloaded bytes before a retry, which counts the bytes on disk again.
    pub fn reset(&self) {
        self.done_bytes.store(0, Ordering::Relaxed);
    }

    fn moved(&self, from: u64, to: u64) {
        // `to - from` may be negative and then wraps around; the wrapping sum is still correct in any order of updates.
        self.done_bytes.fetch_add(to.wrapping_sub(from), Ordering::Relaxed);
    }
}

impl Hub {
    /// Downloads the files of a planned download into the folder `to`, which is created if needed. Partial files are stored in the
    /// folder `parts`, which must be on the same file system. Files that exist in `to` are verified and kept. Dropping the future
    /// stops the download; partial files are kept for the next time.
    ///
    /// # Errors
    /// Fails with `NoSpace` before the first byte, with `Damaged` when a file's hash is wrong twice, and on errors of
    /// the Hub and the disk.
    pub async fn download(
        &self,
        plan: &RepoPlan,
        parts: &Path,
        to: &Path,
        progress: &Arc<Progress>,
    ) -> Result<(), HubError> {
        for folder in [parts, to] {
            std::fs::create_dir_all(folder).map_err(HubError::disk("create the folder", folder))?;
        }
        check_space(plan, parts, to)?;
        stream::iter(plan.files.iter().map(Ok))
            .try_for_each_concurrent(
                MAX_CONCURRENT,
                |file| async move { self.fetch(plan, file, parts, to, progress).await },
            )
            .await?;
        sync_folder(to)
    }

    async fn fetch(
        &self,
        plan: &RepoPlan,
        file: &RepoFile,
        parts: &Path,
        to: &Path,
        progress: &Arc<Progress>,
    ) -> Result<(), HubError> {
        let target = to.join(&file.path);
        if is_complete(&target, file).await? {
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
            part.file.flush().await.map_err(HubError::disk("write to", &part.path))?;
            return Err(Failed::transient(
                &url,
                format!("the response ended after {} of {} bytes", part.size_bytes, file.size_bytes),
            ));
        }
        Ok(())
    }
}

/// The downloaded part of a file. It is named after the file's hash, so that every later download of the same content finds it,
/// and locked during a download.
struct Part {
    path: PathBuf,
    file: tokio::fs::File,
    size_bytes: u64,
    expected: FileHash,
    whole_bytes: u64,
    progress: Arc<Progress>,
}

impl Part {
    async fn open(parts: &Path, file: &RepoFile, progress: Arc<Progress>) -> Result<Part, HubError> {
        let path = parts.join(file.hash.to_string());
        loop {
            let opened = File::options().read(true).append(true).create(true).open(&path);
            let opened = opened.map_err(HubError::disk("open", &path))?;
            match opened.try_lock() {
                Ok(()) => {}
                Err(std::fs::TryLockError::WouldBlock) => {
                    // Another process downloads the same file.
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    continue;
                }
                Err(std::fs::TryLockError::Error(source)) => return Err(HubError::disk("lock", &path)(source)),
            }
            // The process that held the lock before may have completed and renamed the partial file.
            if !is_same_file(&opened, &path) {
                continue;
            }
            let size_bytes = opened.metadata().map_err(HubError::disk("read", &path))?.len();
            progress.moved(0, size_bytes);
            let (expected, whole_bytes) = (file.hash, file.size_bytes);
            let opened = tokio::fs::File::from_std(opened);
            let mut part = Part { path, file: opened, size_bytes, expected, whole_bytes, progress };
            if size_bytes > whole_bytes {
                part.restart().await?;
            }
            return Ok(part);
        }
    }

    async fn append(&mut self, piece: &[u8]) -> Result<(), HubError> {
        self.file.write_all(piece).await.map_err(HubError::disk("write to", &self.path))?;
        self.progress.moved(0, piece.len() as u64);
        self.size_bytes += piece.len() as u64;
        Ok(())
    }

    async fn restart(&mut self) -> Result<(), HubError> {
        self.file.set_len(0).await.map_err(HubError::disk("empty", &self.path))?;
        self.progress.moved(self.size_bytes, 0);
        self.size_bytes = 0;
        Ok(())
    }

    async fn hash(&mut self) -> Result<FileHash, HubError> {
        self.file.flush().await.map_err(HubError::disk("write to", &self.path))?;
        let file = self.file.try_clone().await.map_err(HubError::disk("open", &self.path))?;
        hash(file.into_std().await, self.path.clone(), self.expected, self.whole_bytes).await
    }

    /// Removes the partial file, because the complete file exists already.
    fn remove(self) -> Result<(), HubError> {
        self.progress.moved(self.size_bytes, self.whole_bytes);
        std::fs::remove_file(&self.path).map_err(HubError::disk("remove", &self.path))
    }

    /// Renames the completed partial file to its final path, and syncs the folder.
    async fn publish(self, target: &Path) -> Result<(), HubError> {
        if let Some(folder) = target.parent() {
            std::fs::create_dir_all(folder).map_err(HubError::disk("create the folder", folder))?;
        }
        self.file.sync_all().await.map_err(HubError::disk("sync", &self.path))?;
        std::fs::rename(&self.path, target).map_err(HubError::disk("rename", &self.path))?;
        target.parent().map_or(Ok(()), sync_folder)
    }
}

/// Computes the hash of a whole file on a blocking thread.
pub(crate) async fn hash(
    mut file: File,
    path: PathBuf,
    expected: FileHash,
    size_bytes: u64,
) -> Result<FileHash, HubError> {
    let shown = path.clone();
    let hashed = tokio::task::spawn_blocking(move || -> io::Result<FileHash> {
        let (mut hasher, mut buffer) = (Hasher::new(&expected, size_bytes), vec![0; 1 << 20]);
        file.seek(SeekFrom::Start(0))?;
        loop {
            let read = match file.read(&mut buffer) {
                Ok(0) => return Ok(hasher.finish()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            hasher.update(buffer.get(..read).unwrap_or_default());
        }
    })
    .await;
    hashed.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(HubError::disk("read", shown))
}

/// Returns whether an earlier download has left the complete file, with the right hash.
async fn is_complete(target: &Path, file: &RepoFile) -> Result<bool, HubError> {
    let Ok(opened) = File::open(target) else { return Ok(false) };
    if opened.metadata().map_err(HubError::disk("read", target))?.len() != file.size_bytes {
        return Ok(false);
    }
    Ok(hash(opened, target.to_owned(), file.hash, file.size_bytes).await? == file.hash)
}

/// Parses the first byte and the total size from a `Content-Range` header such as `bytes 5-9/10`.
pub(crate) fn content_range(field: &str) -> Option<(u64, u64)> {
    let (range, whole) = field.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, whole.parse().ok()?))
}

pub(crate) fn check_space(plan: &RepoPlan, parts: &Path, to: &Path) -> Result<(), HubError> {
    let size = |path: PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    let missing = |file: &RepoFile| {
        let here = size(parts.join(file.hash.to_string())).max(size(to.join(&file.path)));
        file.size_bytes.saturating_sub(here)
    };
    let needed_bytes: u64 = plan.files.iter().map(missing).sum();
    let disk = rustix::fs::statvfs(parts)
        .map_err(|error| HubError::disk("get the free disk space of", parts)(error.into()))?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed_bytes > 0 && needed_bytes.saturating_add(RESERVED_BYTES) > free_bytes {
        let (repo, path) = (plan.repo.to_string(), parts.to_owned());
        return Err(HubError::NoSpace { repo, needed_bytes, free_bytes, path });
    }
    Ok(())
}

fn is_same_file(opened: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let key = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    opened.metadata().ok().map(key) == std::fs::metadata(path).ok().map(key)
}

fn sync_folder(folder: &Path) -> Result<(), HubError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(HubError::disk("sync the folder", folder))
}
