//! What a repository holds at a revision, and which commit that is.

use serde::Deserialize;
use serde_json::Value;

use crate::error::HubError;
use crate::hash::FileHash;
use crate::http::Hub;
use crate::id::{Repo, is_safe_path};

/// A repository at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoInfo {
    /// 40 hexadecimal digits.
    pub commit: String,
    /// A licence has to be accepted first, or the repository is not public: who may read it is decided by the token.
    pub is_restricted: bool,
    /// All files.
    pub files: Vec<RepoFile>,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoFile {
    /// In the repository, with `/`; safe to be joined to a folder.
    pub path: String,
    /// Bytes.
    pub size_bytes: u64,
    /// Of its bytes, as announced.
    pub hash: FileHash,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    disabled: bool,
    #[serde(default)]
    private: bool,
    /// `false`, `"auto"` or `"manual"`.
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
    /// Looks a revision up: its commit, and all its files with sizes and hashes.
    ///
    /// # Errors
    /// When there is none, it may not be read, or the hub cannot be reached.
    pub async fn info(&self, repo: &Repo) -> Result<RepoInfo, HubError> {
        let id = repo.id().split('/');
        let start = ["api", repo.kind.plural()].into_iter();
        let mut url = self.url(start.chain(id).chain(["revision", repo.revision()]))?;
        url.set_query(Some("blobs=true"));
        let bytes = self.read(repo, &url, None).await?;
        let answer: Answer = serde_json::from_slice(&bytes)
            .map_err(|error| HubError::NotUnderstood(format!("the description of {repo}: {error}")))?;
        if answer.disabled {
            return Err(HubError::Disabled { repo: repo.to_string() });
        }
        if answer.sha.len() != 40 || !answer.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(HubError::NotUnderstood(format!("the commit of {repo} has not 40 hexadecimal digits")));
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
