//! Downloads to files. An interrupted download resumes where it stopped, in this call or in a later one. A file appears under its
//! name only when it is complete and its hash is correct.
//!
//! Incomplete data is stored next to the target as `.NAME.ETAG.part`; the entity tag in the name identifies the version.

use std::fs::TryLockError;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use futures::FutureExt;
use futures::future::BoxFuture;
use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_RANGE, RANGE};
use reqwest::{Response, StatusCode};
use rlood_types::digest::Sha256Digest;
use sha2::{Digest, Sha256};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};

use crate::call::Call;
use crate::client::Client;
use crate::error::Error;
use crate::retry::{Repeat, Tries};

const REPR_DIGEST: HeaderName = HeaderName::from_static("repr-digest");
/// Maximum number of tries of a download that arrives complete with a wrong hash.
const MAX_DAMAGED_TRIES: u32 = 3;
/// Number of bytes that are read from a file at a time.
const READ_BYTES: usize = 256 * 1024;
/// Maximum length of an entity tag in a file name.
const MAX_TAG_BYTES: usize = 100;

/// How a download was verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checked {
    /// Verified by the file's SHA-256.
    Sha256,
    /// Verified by its size only, because the server does not send the hash of an archive above 64 MiB.
    Size,
    /// Verified only by the end of the transfer, because an export has neither a hash nor a size.
    End,
}

/// A file that was downloaded completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Downloaded {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the data, in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the file's bytes.
    pub sha256: Sha256Digest,
    /// How the file was verified.
    pub checked: Checked,
}

/// The expected size and hash of a download.
#[derive(Debug, Default)]
struct Expected {
    sha256: Option<Sha256Digest>,
    size_bytes: Option<u64>,
}

impl Client {
    /// Downloads the response of a call to `to`, whose folder must exist. `sha256` is the expected hash, if known.
    pub(crate) fn download<'a>(
        &'a self,
        call: Call,
        to: &'a Path,
        sha256: Option<Sha256Digest>,
    ) -> BoxFuture<'a, Result<Downloaded, Error>> {
        async move {
            let call = call.accept("*/*");
            let mut part = Part::find(to).await?;
            let mut tries = Tries::new(self.inner.retry);
            let (mut damaged, mut furthest) = (0, part.size_bytes);
            loop {
                let fetched = self.fetch(&call, &mut part).await;
                if part.size_bytes > furthest {
                    furthest = part.size_bytes;
                    tries.progressed();
                }
                match fetched {
                    Ok(announced) => {
                        let sha256 = sha256.or(announced.sha256);
                        match part.check(&Expected { sha256, ..announced }) {
                            Ok(checked) => return part.finish(to, checked).await,
                            Err(detail) => {
                                part.discard().await?;
                                damaged += 1;
                                if damaged >= MAX_DAMAGED_TRIES {
                                    return Err(call.damaged(detail));
                                }
                            }
                        }
                    }
                    Err(error) => match tries.pause_after(&error, &Repeat::Harmless) {
                        Some(pause) => sleep(pause).await,
                        None => {
                            part.leave().await?;
                            return Err(error);
                        }
                    },
                }
            }
        }
        .boxed()
    }

    /// Requests the missing part and appends it. Returns the size and hash that the server announces for the whole.
    async fn fetch(&self, call: &Call, part: &mut Part) -> Result<Expected, Error> {
        let mut headers = HeaderMap::new();
        if let Some(tag) = part.tag.as_ref().filter(|_| part.size_bytes > 0) {
            headers.insert(RANGE, header(format!("bytes={}-", part.size_bytes)));
            headers.insert(IF_RANGE, header(format!("\"{tag}\"")));
        }
        let mut response = match self.open(call, &headers, self.inner.timeout).await {
            // The partial file is not the beginning of the file that the server has now.
            Err(error) if error.status() == Some(416) && part.size_bytes > 0 => {
                part.discard().await?;
                return Err(call.interrupted(None));
            }
            opened => opened?,
        };
        let tag = tag_of(&response);
        let size_bytes = match response.status() {
            StatusCode::PARTIAL_CONTENT => match content_range(&response) {
                Some((first, size_bytes)) if first == part.size_bytes && tag == part.tag => Some(size_bytes),
                _ => {
                    part.discard().await?;
                    return Err(call.interrupted(None));
                }
            },
            _ => {
                part.begin(tag).await?;
                response.content_length()
            }
        };
        let sha256 = digest_of(&response);
        let stall = self.inner.stall_timeout;
        while let Some(piece) = timeout(stall, response.chunk())
            .await
            .map_err(|_| call.stalled(stall))?
            .map_err(|source| call.interrupted(Some(source)))?
        {
            part.append(&piece).await?;
        }
        if size_bytes.is_some_and(|size_bytes| part.size_bytes < size_bytes) {
            return Err(call.interrupted(None));
        }
        Ok(Expected { sha256, size_bytes })
    }
}

/// A partially downloaded file.
#[derive(Debug)]
struct Part {
    folder: PathBuf,
    name: String,
    /// Entity tag of the file's version on the server; `None` = the download cannot be resumed.
    tag: Option<String>,
    opened: Option<(File, PathBuf)>,
    size_bytes: u64,
    hash: Sha256,
}

impl Part {
    /// Finds the partial file of an earlier download to this target, if any.
    async fn find(target: &Path) -> Result<Self, Error> {
        let Some(name) = target.file_name().and_then(|name| name.to_str()) else {
            return Err(Error::Settings(format!("the path '{}' has no file name in UTF-8", target.display())));
        };
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (folder, name) = (folder.to_owned(), name.to_owned());
        let mut part = Self { folder, name, tag: None, opened: None, size_bytes: 0, hash: Sha256::new() };
        let doing = format!("read the download folder {}", part.folder.display());
        let unreadable = || Error::disk(doing.clone());
        let mut entries = tokio::fs::read_dir(&part.folder).await.map_err(unreadable())?;
        let prefix = format!(".{}.", part.name);
        while let Some(entry) = entries.next_entry().await.map_err(unreadable())? {
            let entry = entry.file_name();
            let tag = entry.to_str().and_then(|entry| entry.strip_prefix(&prefix)?.strip_suffix(".part"));
            if let Some(tag) = tag.filter(|tag| is_plain(tag)) {
                part.tag = Some(tag.to_owned());
                part.open(false).await?;
                break;
            }
        }
        Ok(part)
    }

    /// Opens the partial file for this entity tag, either emptied or with its content.
    async fn open(&mut self, empty: bool) -> Result<(), Error> {
        let tag = self.tag.as_deref().unwrap_or("_");
        let path = self.folder.join(format!(".{}.{tag}.part", self.name));
        let failed = || Error::disk(format!("write {}", path.display()));
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).await;
        let file = file.map_err(failed())?.into_std().await;
        let another =
            |source| Error::disk(format!("write the file {}: another download is writing it", path.display()))(source);
        file.try_lock().map_err(|error| match error {
            TryLockError::Error(source) => failed()(source),
            TryLockError::WouldBlock => another(error.into()),
        })?;
        let mut file = File::from_std(file);
        // The previous holder of the lock may have completed the download and renamed the file.
        let here = tokio::fs::metadata(&path).await.map(|here| here.ino());
        if here.ok() != Some(file.metadata().await.map_err(failed())?.ino()) {
            return Err(another(std::io::ErrorKind::WouldBlock.into()));
        }
        if empty {
            file.set_len(0).await.map_err(failed())?;
        }
        (self.size_bytes, self.hash) = (0, Sha256::new());
        let mut piece = vec![0; READ_BYTES];
        loop {
            match file.read(&mut piece).await.map_err(failed())? {
                0 => break,
                count => {
                    self.hash.update(&piece[..count]);
                    self.size_bytes += count as u64;
                }
            }
        }
        self.opened = Some((file, path));
        Ok(())
    }

    /// Starts over with an empty partial file for this entity tag.
    async fn begin(&mut self, tag: Option<String>) -> Result<(), Error> {
        self.discard().await?;
        self.tag = tag;
        self.open(true).await
    }

    async fn append(&mut self, piece: &[u8]) -> Result<(), Error> {
        let Some((file, path)) = &mut self.opened else { return Ok(()) };
        file.write_all(piece).await.map_err(Error::disk(format!("write {}", path.display())))?;
        self.hash.update(piece);
        self.size_bytes += piece.len() as u64;
        Ok(())
    }

    fn sha256(&self) -> Sha256Digest {
        self.hash.clone().into()
    }

    /// Verifies the complete file. Returns how it was verified, or how it differs from what the server announced.
    fn check(&self, expected: &Expected) -> Result<Checked, String> {
        if let Some(size_bytes) = expected.size_bytes.filter(|size_bytes| *size_bytes != self.size_bytes) {
            return Err(format!("the downloaded file has {} bytes, not {size_bytes}", self.size_bytes));
        }
        match &expected.sha256 {
            Some(sha256) if *sha256 != self.sha256() => {
                Err(format!("the sha256 of the downloaded file is {}, not {sha256}", self.sha256()))
            }
            Some(_) => Ok(Checked::Sha256),
            None if expected.size_bytes.is_some() => Ok(Checked::Size),
            None => Ok(Checked::End),
        }
    }

    /// Renames the file to its final name.
    async fn finish(mut self, target: &Path, checked: Checked) -> Result<Downloaded, Error> {
        let failed = || Error::disk(format!("write {}", target.display()));
        if let Some((mut file, path)) = self.opened.take() {
            file.flush().await.map_err(failed())?;
            file.sync_all().await.map_err(failed())?;
            tokio::fs::rename(&path, target).await.map_err(failed())?;
        }
        let (size_bytes, sha256) = (self.size_bytes, self.sha256());
        Ok(Downloaded { path: target.to_owned(), size_bytes, sha256, checked })
    }

    /// Deletes the partial file.
    async fn discard(&mut self) -> Result<(), Error> {
        (self.tag, self.size_bytes, self.hash) = (None, 0, Sha256::new());
        if let Some((_file, path)) = self.opened.take() {
            tokio::fs::remove_file(&path).await.map_err(Error::disk(format!("remove {}", path.display())))?;
        }
        Ok(())
    }

    /// Keeps the partial file if a later call can resume from it.
    async fn leave(&mut self) -> Result<(), Error> {
        if self.tag.is_none() || self.size_bytes == 0 {
            return self.discard().await;
        }
        match &mut self.opened {
            Some((file, path)) => file.flush().await.map_err(Error::disk(format!("write {}", path.display()))),
            None => Ok(()),
        }
    }
}

/// Returns the SHA-256 of a file; `None` if there is no file of this size.
pub(crate) async fn hash_of(path: &Path, size_bytes: u64) -> Option<Sha256Digest> {
    let mut file = File::open(path).await.ok()?;
    if file.metadata().await.ok()?.len() != size_bytes {
        return None;
    }
    let (mut hash, mut piece) = (Sha256::new(), vec![0; READ_BYTES]);
    loop {
        match file.read(&mut piece).await.ok()? {
            0 => return Some(hash.into()),
            count => hash.update(&piece[..count]),
        }
    }
}

fn header(text: String) -> HeaderValue {
    // The header's text contains only digits and checked entity tags, so it is always valid.
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

/// Whether an entity tag may be part of a file name.
fn is_plain(tag: &str) -> bool {
    (1..=MAX_TAG_BYTES).contains(&tag.len()) && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Returns a strong entity tag without its quotes. Weak tags do not identify bytes.
fn tag_of(response: &Response) -> Option<String> {
    let tag = response.headers().get(ETAG)?.to_str().ok()?.strip_prefix('"')?.strip_suffix('"')?;
    is_plain(tag).then(|| tag.to_owned())
}

/// Returns the hash of the whole file: from `Repr-Digest` (RFC 9530), otherwise from the entity tag, which is the
/// hash of a stored file.
fn digest_of(response: &Response) -> Option<Sha256Digest> {
    let fields = response.headers().get_all(REPR_DIGEST).iter().filter_map(|value| value.to_str().ok());
    let given = fields.flat_map(|value| value.split(',')).find_map(|field| {
        let encoded = field.trim().strip_prefix("sha-256=:")?.strip_suffix(':')?;
        let bytes = base64::engine::general_purpose::STANDARD.decode(encoded).ok()?;
        <[u8; 32]>::try_from(bytes).ok().map(Sha256Digest::from)
    });
    given.or_else(|| tag_of(response)?.parse().ok())
}

/// Parses `bytes 5-9/10` to the first byte and the total size.
fn content_range(response: &Response) -> Option<(u64, u64)> {
    let text = response.headers().get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, size_bytes) = text.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, size_bytes.parse().ok()?))
}
