//! Pushes files to a Hub repository in one commit. What the Hub has already is not uploaded again, so a push that was interrupted
//! continues when it is repeated.
//!
//! Protocol details are taken from huggingface_hub 1.0.1 (hf_api.py, _commit_api.py): `repos/create`, `branch`, `preupload`, the Git
//! LFS batch (`upload.rs`), and `commit` with one JSON object per line.

use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use rlood_types::digest::Sha256Digest;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::HubError;
use crate::fetch::MAX_CONCURRENT;
use crate::hash::{FileHash, Hasher};
use crate::http::{Attempts, Failed, Hub};
use crate::id::Repo;
use crate::info::{RepoFile, RepoInfo};
use crate::progress::Progress;
use crate::write::{JSON, of_write};

/// Number of bytes of a file from which the Hub decides whether it is text.
const SAMPLE_BYTES: usize = 512;
/// Maximum size in bytes of a file that becomes a part of the commit request instead of an LFS object.
const MAX_REGULAR_BYTES: u64 = 64 << 20;

/// The content of a file to push.
#[derive(Debug, Clone)]
pub enum PushContent {
    /// Bytes that are in memory.
    Bytes(Vec<u8>),
    /// A file on this machine, whose hash is known.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file in bytes.
        size_bytes: u64,
        /// SHA-256 of the bytes.
        sha256: Sha256Digest,
    },
}

/// A file to push.
#[derive(Debug, Clone)]
pub struct PushFile {
    /// Path in the repository, with `/` between its parts.
    pub path: String,
    /// The bytes of the file.
    pub content: PushContent,
}

impl PushFile {
    /// Returns the size of the file in bytes.
    pub fn size_bytes(&self) -> u64 {
        match &self.content {
            PushContent::Bytes(bytes) => bytes.len() as u64,
            PushContent::File { size_bytes, .. } => *size_bytes,
        }
    }

    pub(crate) fn sha256(&self) -> Sha256Digest {
        match &self.content {
            PushContent::Bytes(bytes) => Sha256Digest::of(bytes),
            PushContent::File { sha256, .. } => *sha256,
        }
    }

    /// Reads the first bytes of the file into memory, at most `limit`.
    async fn start(&self, limit: u64) -> Result<Vec<u8>, HubError> {
        use tokio::io::AsyncReadExt;
        match &self.content {
            PushContent::Bytes(bytes) => {
                let end = bytes.len().min(usize::try_from(limit).unwrap_or(usize::MAX));
                Ok(bytes.iter().take(end).copied().collect())
            }
            PushContent::File { path, .. } => {
                let file = tokio::fs::File::open(path).await.map_err(HubError::disk("open", path))?;
                let mut read = Vec::new();
                file.take(limit).read_to_end(&mut read).await.map_err(HubError::disk("read", path))?;
                match read.len() as u64 == limit.min(self.size_bytes()) {
                    true => Ok(read),
                    false => Err(HubError::Changed { path: self.path.clone() }),
                }
            }
        }
    }

    /// Returns whether the Hub's file has the same bytes.
    async fn is_same_as(&self, there: &RepoFile) -> Result<bool, HubError> {
        if there.size_bytes != self.size_bytes() {
            return Ok(false);
        }
        match there.hash {
            FileHash::Sha256(sha256) => Ok(sha256 == self.sha256()),
            // Such a file was a part of a commit request, so it is small.
            FileHash::Git(_) => {
                let mut hasher = Hasher::new(&there.hash, there.size_bytes);
                hasher.update(&self.start(MAX_REGULAR_BYTES).await?);
                Ok(hasher.finish() == there.hash)
            }
        }
    }
}

/// Files to push to a repository in one commit.
#[derive(Debug, Clone)]
pub struct Push {
    /// The repository, and the branch that the commit is added to.
    pub repo: Repo,
    /// Whether the repository is created as private. An existing one must then be private.
    pub is_private: bool,
    /// First line of the commit message.
    pub message: String,
    /// The files; other files of the repository stay as they are.
    pub files: Vec<PushFile>,
    /// Returns whether a file of the repository belongs to an earlier push of this kind: it is deleted unless `files` has it.
    pub is_stale: fn(&str) -> bool,
    /// Returns whether a file shows that the repository holds something else, so that the push is refused.
    pub is_foreign: fn(&str) -> bool,
}

impl Push {
    /// Returns the total size of the files in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(PushFile::size_bytes).sum()
    }
}

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The commit, 40 hexadecimal digits.
    pub commit: String,
    /// Page of the repository at the branch.
    pub url: String,
    /// Whether this push made the commit. If not, the branch had the same files already.
    pub is_new: bool,
}

/// How the Hub stores a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Lfs,
    Regular,
}

#[derive(Deserialize)]
struct Preupload {
    files: Vec<PreuploadFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PreuploadFile {
    path: String,
    upload_mode: Mode,
    #[serde(default)]
    should_ignore: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Committed {
    commit_oid: String,
}

impl Hub {
    /// Pushes files in one commit. A missing repository or branch is created. Files that the branch has already, and objects that
    /// the Hub has already, are not uploaded again; if nothing differs, no commit is made.
    ///
    /// `progress` counts the bytes that the Hub has, from 0 to [`Push::total_bytes`]. Dropping the future stops the push; complete
    /// files stay on the Hub, where the next push of them finds them.
    ///
    /// # Errors
    /// Fails when no token is set or the token may not write, when the repository holds something else or is public although a
    /// private one was requested, and on errors of the Hub and the disk.
    pub fn push<'a>(&'a self, push: &'a Push, progress: &'a Progress) -> BoxFuture<'a, Result<Pushed, HubError>> {
        Box::pin(async move {
            let repo = &push.repo;
            if self.settings.offline {
                return Err(HubError::OfflinePush { repo: repo.to_string() });
            }
            if self.settings.token.is_none() {
                return Err(HubError::NoToken { repo: repo.to_string() });
            }
            self.ensure_repo(push).await?;
            let mut attempts = Attempts::new(self.settings.first_delay);
            loop {
                let info = self.branch(repo).await?;
                if let Some(found) = info.files.iter().find(|file| (push.is_foreign)(&file.path)) {
                    return Err(HubError::OtherContent { repo: repo.to_string(), path: found.path.clone() });
                }
                progress.reset();
                let changed = changed_files(push, &info, progress).await?;
                let is_pushed = |path: &str| push.files.iter().any(|file| file.path == path);
                let stale = info.files.iter().map(|file| file.path.as_str());
                let stale: Vec<&str> = stale.filter(|path| (push.is_stale)(path) && !is_pushed(path)).collect();
                if changed.is_empty() && stale.is_empty() {
                    return Ok(Pushed { commit: info.commit, url: self.page(repo)?, is_new: false });
                }
                let modes = self.preupload(repo, &changed).await?;
                let large = changed.iter().zip(&modes).filter(|(_, mode)| **mode == Mode::Lfs).map(|(file, _)| *file);
                stream::iter(large)
                    .map(Ok)
                    .try_for_each_concurrent(MAX_CONCURRENT, |file| self.upload(repo, file, progress))
                    .await?;
                let lines = commit_lines(push, &changed, &modes, &stale).await?;
                match self.commit(repo, lines).await {
                    Ok(commit) => {
                        for (file, _) in changed.iter().zip(&modes).filter(|(_, mode)| **mode == Mode::Regular) {
                            progress.moved(0, file.size_bytes());
                        }
                        return Ok(Pushed { commit, url: self.page(repo)?, is_new: true });
                    }
                    // The commit may have been made although its answer was lost; the next round then finds nothing to do.
                    Err(failed) => attempts.pause_after(failed).await.map_err(|error| of_write(error, repo, true))?,
                }
            }
        })
    }

    /// Creates the repository unless it exists.
    async fn ensure_repo(&self, push: &Push) -> Result<(), HubError> {
        let repo = &push.repo;
        let main =
            Repo::new(repo.kind, repo.id(), "main").map_err(|error| HubError::NotUnderstood(error.to_string()))?;
        match self.info(&main).await {
            Ok(info) if push.is_private && !info.is_private => {
                return Err(HubError::Public { repo: repo.id().to_owned() });
            }
            Ok(_) | Err(HubError::NoRevision { .. }) => return Ok(()),
            // A dataset of this name does not stand in the way: models have names of their own.
            Err(HubError::NoRepository { .. } | HubError::WrongKind { .. }) => {}
            Err(error) => return Err(error),
        }
        let (organization, name) = match repo.id().split_once('/') {
            Some((organization, name)) => (Some(organization), name),
            None => (None, repo.id()),
        };
        let body = json!({"name": name, "organization": organization, "private": push.is_private});
        let url = self.url(["api", "repos", "create"])?;
        // 409: another request created it in the meantime.
        self.post_until_answered(repo, &url, JSON, body.to_string().into_bytes())
            .await
            .map(drop)
            .map_err(|error| of_write(error, repo, false))
    }

    /// Returns the branch with its files; creates it unless it exists.
    async fn branch(&self, repo: &Repo) -> Result<RepoInfo, HubError> {
        match self.info(repo).await {
            Err(HubError::NoRevision { .. }) if !repo.revision().starts_with("refs/") => {}
            found => return found.map_err(|error| of_write(error, repo, true)),
        }
        let url = self.repo_url(repo, "branch")?;
        let made = self.post_until_answered(repo, &url, JSON, b"{}".to_vec()).await;
        made.map_err(|error| of_write(error, repo, true))?;
        self.info(repo).await
    }

    /// Asks the Hub how it stores each file.
    async fn preupload(&self, repo: &Repo, files: &[&PushFile]) -> Result<Vec<Mode>, HubError> {
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let mut described = Vec::with_capacity(files.len());
        for file in files {
            let sample = STANDARD.encode(file.start(SAMPLE_BYTES as u64).await?);
            described.push(json!({"path": file.path, "sample": sample, "size": file.size_bytes()}));
        }
        let url = self.repo_url(repo, "preupload")?;
        let body = json!({"files": described}).to_string().into_bytes();
        let answer =
            self.post_until_answered(repo, &url, JSON, body).await.map_err(|error| of_write(error, repo, true))?;
        let answer: Preupload = understood("the hub's list of upload modes", &answer.body)?;
        let mode = |file: &&PushFile| {
            let told = answer.files.iter().find(|told| told.path == file.path);
            let told =
                told.ok_or_else(|| HubError::NotUnderstood(format!("it has no upload mode of {}", file.path)))?;
            if told.should_ignore {
                let why =
                    format!("its .gitignore excludes {}: remove that line, or push to another repository", file.path);
                return Err(HubError::Unusable { repo: repo.to_string(), why });
            }
            // An empty file cannot be an LFS object.
            Ok(if file.size_bytes() == 0 { Mode::Regular } else { told.upload_mode })
        };
        files.iter().map(mode).collect()
    }

    async fn commit(&self, repo: &Repo, lines: Vec<u8>) -> Result<String, Failed> {
        let url = self.repo_url(repo, "commit")?;
        let answer = self.post(repo, &url, "application/x-ndjson", lines).await?;
        if answer.is_conflict {
            let detail = "the branch changed during the push: push again".to_owned();
            return Err(HubError::Refused { status: 409, detail }.into());
        }
        let committed: Committed = understood("the hub's answer to the commit", &answer.body)?;
        Ok(committed.commit_oid)
    }

    /// Returns the address of an operation of the Hub's API on a branch.
    fn repo_url(&self, repo: &Repo, operation: &str) -> Result<url::Url, HubError> {
        let start = ["api", repo.kind.plural()].into_iter();
        self.url(start.chain(repo.id().split('/')).chain([operation, repo.revision()]))
    }

    /// Returns the page of the repository at the branch.
    fn page(&self, repo: &Repo) -> Result<String, HubError> {
        let branch = match repo.revision() {
            "main" => Vec::new(),
            revision => vec!["tree", revision],
        };
        self.url(repo.id().split('/').chain(branch)).map(String::from)
    }
}

/// Returns the files that the branch does not have yet; the others count as done.
async fn changed_files<'p>(
    push: &'p Push,
    info: &RepoInfo,
    progress: &Progress,
) -> Result<Vec<&'p PushFile>, HubError> {
    let mut changed = Vec::new();
    for file in &push.files {
        match info.files.iter().find(|there| there.path == file.path) {
            Some(there) if file.is_same_as(there).await? => progress.moved(0, file.size_bytes()),
            _ => changed.push(file),
        }
    }
    Ok(changed)
}

/// Returns the body of the commit request, one JSON object per line.
async fn commit_lines(push: &Push, files: &[&PushFile], modes: &[Mode], stale: &[&str]) -> Result<Vec<u8>, HubError> {
    let mut lines = vec![json!({"key": "header", "value": {"summary": push.message, "description": ""}})];
    for (file, mode) in files.iter().zip(modes) {
        lines.push(commit_line(&push.repo, file, *mode).await?);
    }
    lines.extend(stale.iter().map(|path| json!({"key": "deletedFile", "value": {"path": path}})));
    let mut body = Vec::new();
    for line in lines {
        body.extend_from_slice(line.to_string().as_bytes());
        body.push(b'\n');
    }
    Ok(body)
}

async fn commit_line(repo: &Repo, file: &PushFile, mode: Mode) -> Result<Value, HubError> {
    let (path, size) = (&file.path, file.size_bytes());
    if mode == Mode::Lfs {
        let value = json!({"path": path, "algo": "sha256", "oid": file.sha256(), "size": size});
        return Ok(json!({"key": "lfsFile", "value": value}));
    }
    if size > MAX_REGULAR_BYTES {
        let why =
            format!("the hub wants {path} ({size} bytes) as a part of the commit: remove its rule from .gitattributes");
        return Err(HubError::Unusable { repo: repo.to_string(), why });
    }
    let content = STANDARD.encode(file.start(MAX_REGULAR_BYTES).await?);
    let value = json!({"content": content, "path": path, "encoding": "base64"});
    Ok(json!({"key": "file", "value": value}))
}

/// Parses an answer of the Hub.
pub(crate) fn understood<'b, T: Deserialize<'b>>(name: &str, body: &'b [u8]) -> Result<T, HubError> {
    serde_json::from_slice(body).map_err(|error| HubError::NotUnderstood(format!("{name}: {error}")))
}
