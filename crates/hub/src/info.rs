//! Looks up the commit and the files of a repository at a revision.

use serde::Deserialize;
use serde_json::Value;

use crate::error::HubError;
use crate::hash::FileHash;
use crate::http::Hub;
use crate::id::{Repo, is_safe_path};

/// A repository at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoInfo {
    /// Commit as 40 hexadecimal digits.
    pub commit: String,
    /// Whether access requires a token, because the repository is private or its license must be accepted.
    pub is_restricted: bool,
    /// All files of the repository.
    pub files: Vec<RepoFile>,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoFile {
    /// Path in the repository with `/`. The path is safe to join to a folder.
    pub path: String,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// Hash that the Hub announces.
    pub hash: FileHash,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    disabled: bool,
    #[serde(default)]
    private: bool,
    /// License approval: `false`, `"auto"` or `"manual"`.
    #[serde(default)]
    gated: Value,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Hub {
    /// Looks up a revision: its commit, and all files with sizes and hashes.
    ///
    /// # Errors
    /// Fails when the revision does not exist or is not accessible, or the Hub is unreachable.
    pub async fn info(&self, repo: &Repo) -> Result<RepoInfo, HubError> {
        let id = repo.id().split('/');
        let start = ["api", repo.kind.plural()].into_iter();
        let mut url = self.url(start.chain(id).chain(["revision", repo.revision()]))?;
        url.set_query(Some("blobs=true"));
        let bytes = self.read(repo, &url, None).await?;
        let answer: Answer = serde_json::from_slice(&bytes)
            .map_err(|error| HubError::NotUnderstood(format!("the metadata of {repo}: {error}")))?;
        if answer.disabled {
            return Err(HubError::Disabled { repo: repo.to_string() });
        }
        if answer.sha.len() != 40 || !answer.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(HubError::NotUnderstood(format!("the commit of {repo} is not 40 hexadecimal digits")));
        }
        let files = answer.siblings.into_iter().map(|sibling| file(repo, sibling)).collect::<Result<_, _>>()?;
        let is_restricted = answer.private || !matches!(answer.gated, Value::Null | Value::Bool(false));
        Ok(RepoInfo { commit: answer.sha, is_restricted, files })
    }
}

fn file(repo: &Repo, sibling: Sibling) -> Result<RepoFile, HubError> {
    let Sibling { rfilename: path, size, blob_id, lfs } = sibling;
    if !is_safe_path(&path) {
        return Err(HubError::BadPath { repo: repo.to_string(), path: path.chars().take(200).collect() });
    }
    let (size_bytes, hash) = match &lfs {
        Some(lfs) => (Some(lfs.size), FileHash::sha256(&lfs.sha256)),
        None => (size, blob_id.as_deref().and_then(FileHash::git)),
    };
    match size_bytes.zip(hash) {
        Some((size_bytes, hash)) => Ok(RepoFile { path, size_bytes, hash }),
        None => Err(HubError::NotUnderstood(format!("{path} of {repo} has no size and hash"))),
    }
}
