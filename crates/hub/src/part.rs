//! Files of a download on the disk: partial ones, complete ones, and links between them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;

use crate::error::HubError;
use crate::hash::{FileHash, Hasher};
use crate::info::RepoFile;
use crate::progress::Progress;

/// The downloaded part of a file. It is named after the file's hash, so that every later download of the same content finds it,
/// and locked during a download.
///
/// Once it is complete, it is linked to the path of the file, and keeps its own name until the whole download is complete. A part
/// with a second name is therefore a file that something may be reading, and is never written to.
pub(crate) struct Part {
    path: PathBuf,
    file: tokio::fs::File,
    pub(crate) size_bytes: u64,
    expected: FileHash,
    whole_bytes: u64,
    progress: Arc<Progress>,
}

impl Part {
    pub(crate) async fn open(parts: &Path, file: &RepoFile, progress: Arc<Progress>) -> Result<Part, HubError> {
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
            // The process that held the lock before may have removed the partial file, or replaced it.
            if !is_same_file(&opened, &path) {
                continue;
            }
            let size_bytes = opened.metadata().map_err(HubError::disk("read", &path))?.len();
            progress.moved(0, size_bytes);
            let (expected, whole_bytes) = (file.hash, file.size_bytes);
            let opened = tokio::fs::File::from_std(opened);
            let mut part = Part { path, file: opened, size_bytes, expected, whole_bytes, progress };
            if size_bytes > whole_bytes || (size_bytes < whole_bytes && part.has_other_names()?) {
                part.restart().await?;
            }
            return Ok(part);
        }
    }

    pub(crate) async fn append(&mut self, piece: &[u8]) -> Result<(), HubError> {
        self.file.write_all(piece).await.map_err(HubError::disk("write to", &self.path))?;
        self.progress.moved(0, piece.len() as u64);
        self.size_bytes += piece.len() as u64;
        Ok(())
    }

    /// Starts again with an empty partial file.
    pub(crate) async fn restart(&mut self) -> Result<(), HubError> {
        match self.has_other_names()? {
            true => self.file = tokio::fs::File::from_std(self.replaced()?),
            false => self.file.set_len(0).await.map_err(HubError::disk("empty", &self.path))?,
        }
        self.progress.moved(self.size_bytes, 0);
        self.size_bytes = 0;
        Ok(())
    }

    fn has_other_names(&self) -> Result<bool, HubError> {
        let links = std::fs::metadata(&self.path).map(|metadata| metadata.nlink());
        Ok(links.map_err(HubError::disk("read", &self.path))? > 1)
    }

    /// Replaces the partial file by an empty one, which is locked too. The file under its other names stays as it is.
    fn replaced(&self) -> Result<File, HubError> {
        // Only the process that holds the lock uses this name; a file that is there was left by a crash.
        let empty = self.path.with_extension("new");
        let replace = || {
            match std::fs::remove_file(&empty) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let file = File::options().read(true).append(true).create_new(true).open(&empty)?;
            file.lock()?;
            std::fs::rename(&empty, &self.path)?;
            Ok(file)
        };
        replace().map_err(HubError::disk("replace", &self.path))
    }

    pub(crate) async fn flush(&mut self) -> Result<(), HubError> {
        self.file.flush().await.map_err(HubError::disk("write to", &self.path))
    }

    pub(crate) async fn hash(&mut self) -> Result<FileHash, HubError> {
        self.flush().await?;
        let file = self.file.try_clone().await.map_err(HubError::disk("open", &self.path))?;
        hash(file.into_std().await, self.path.clone(), self.expected, self.whole_bytes).await
    }

    /// Removes the partial file, because the complete file exists already.
    pub(crate) fn remove(self) -> Result<(), HubError> {
        self.progress.moved(self.size_bytes, self.whole_bytes);
        std::fs::remove_file(&self.path).map_err(HubError::disk("remove", &self.path))
    }

    /// Links the completed partial file to its final path, and syncs the folder.
    pub(crate) async fn publish(self, target: &Path) -> Result<(), HubError> {
        self.file.sync_all().await.map_err(HubError::disk("sync", &self.path))?;
        create_folder_of(target)?;
        // A file system without hard links has only the one name.
        if link(&self.path, target).is_err() {
            std::fs::rename(&self.path, target).map_err(HubError::disk("rename", &self.path))?;
        }
        target.parent().map_or(Ok(()), sync_folder)
    }
}

/// Removes the name that a complete file still has among the partial files. Another process that is about to use the partial file
/// has locked it, and it is kept; what stays behind is removed by [`crate::clean_parts`].
pub(crate) fn release(parts: &Path, file: &RepoFile, target: &Path) {
    let path = parts.join(file.hash.to_string());
    if let Ok(opened) = File::open(&path)
        && is_same_file(&opened, target)
        && opened.try_lock().is_ok()
    {
        drop(std::fs::remove_file(&path));
    }
}

/// Takes a file from a folder of an earlier download if one has the same path and content, and no complete partial file exists.
/// Returns whether the file is at its final path now. The two share their bytes on the disk if the file system can do that.
pub(crate) async fn link_from(
    folders: &[PathBuf],
    file: &RepoFile,
    parts: &Path,
    target: &Path,
) -> Result<bool, HubError> {
    let part_bytes = std::fs::metadata(parts.join(file.hash.to_string())).map_or(0, |metadata| metadata.len());
    if part_bytes == file.size_bytes {
        return Ok(false);
    }
    for folder in folders {
        // A path that leads over a symbolic link is resolved, because the link itself must not be linked.
        let Ok(there) = folder.join(&file.path).canonicalize() else { continue };
        // An error in a folder of another download is no error of this one.
        if !is_complete(&there, file).await.unwrap_or(false) {
            continue;
        }
        create_folder_of(target)?;
        if link(&there, target).is_err() {
            copy(there, parts.to_owned(), target.to_owned()).await?;
        }
        target.parent().map_or(Ok(()), sync_folder)?;
        return Ok(true);
    }
    Ok(false)
}

/// Gives a file a second name. A file that has this name already is replaced.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    match std::fs::hard_link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            std::fs::remove_file(to)?;
            std::fs::hard_link(from, to)
        }
        linked => linked,
    }
}

/// Copies a file to its final path, under which it appears when it is complete.
async fn copy(from: PathBuf, parts: PathBuf, target: PathBuf) -> Result<(), HubError> {
    let shown = from.clone();
    let copied = tokio::task::spawn_blocking(move || -> io::Result<()> {
        let copy = tempfile::NamedTempFile::new_in(parts)?;
        std::fs::copy(from, copy.path())?;
        copy.as_file().sync_all()?;
        copy.persist(target).map(drop).map_err(|error| error.error)
    });
    copied.await.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(HubError::disk("copy", shown))
}

fn create_folder_of(target: &Path) -> Result<(), HubError> {
    let Some(folder) = target.parent() else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(HubError::disk("create the folder", folder))
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
pub(crate) async fn is_complete(target: &Path, file: &RepoFile) -> Result<bool, HubError> {
    let Ok(opened) = File::open(target) else { return Ok(false) };
    if opened.metadata().map_err(HubError::disk("read", target))?.len() != file.size_bytes {
        return Ok(false);
    }
    Ok(hash(opened, target.to_owned(), file.hash, file.size_bytes).await? == file.hash)
}

fn is_same_file(opened: &File, path: &Path) -> bool {
    let key = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    opened.metadata().ok().map(key) == std::fs::metadata(path).ok().map(key)
}

pub(crate) fn sync_folder(folder: &Path) -> Result<(), HubError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(HubError::disk("sync the folder", folder))
}
