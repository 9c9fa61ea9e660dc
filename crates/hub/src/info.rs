//! Looks up the commit and the files of a Hub repository at a revision.

use serde::Deserialize;
use serde_json::Value;

use crate::error::HubError;
use crate::hash::FileHash;
use crate::http::Hub;
use crate::id::{Repo, is_safe_path};

/// A Hub repository at one commit, with its list of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoInfo {
    /// Commit of the revision as 40 hexadecimal digits.
    pub commit: String,
    /// Whether the repository is private or gated (its license must be accepted), so that access requires a token.
    pub is_restricted: bool,
    /// All files of the repository.
    pub files: Vec<RepoFile>,
}

/// A file of a Hub repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoFile {
    /// Path in the repository, with `/` between its parts. The path was checked and cannot lead outside of a folder that
    /// it is joined to.
    pub path: String,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// Hash of the content that the Hub announces.
    pub hash: FileHash,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    disabled: bool,
    #[serde(default)]
    private: bool,
    /// The field `gated`, whether and how access is approved: `false`, `"auto"` or `"manual"`.
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
    /// Looks up a revision of a repository: its commit, and all files with sizes and hashes.
    ///
    /// # Errors
    /// Fails when the revision does not exist or is not accessible, or the Hub is unreachable.
    pub async fn info(&self, repo: &Repo) -> Result<RepoInfo, HubError> {
        let id = repo.id().split('/');
        let start = ["api", repo.kind.plural()].into_iter();
        let mut url = self.url(start.chain(id).chain(["revision", repo.revision()]))?;
        url.set_query(Some("blobs=true"));
        let bytes = self.read(repo, &url, None).await?;
        let answer: Answer = serde_json::from_slice(&bytes).map_err(|error| {
            HubError::NotUnderstood(format!("the hub's metadata of {repo} cannot be parsed: {error}"))
        })?;
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
