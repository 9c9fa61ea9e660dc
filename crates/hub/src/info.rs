//! Looks up the commit and the files of a Hub repository at a revision.

use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::Value;

use crate::error::HubError;
use crate::hash::FileHash;
use crate::http::Hub;
use crate::id::{Repo, RepoKind, is_safe_path};

/// A Hub repository at one commit, with its list of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoInfo {
    /// Commit of the revision as 40 hexadecimal digits.
    pub commit: String,
    /// Whether the repository is private or gated (its license must be accepted), so that access requires a token.
    pub is_restricted: bool,
    /// Whether the repository is private.
    pub is_private: bool,
    /// All files of the repository.
    pub files: Vec<RepoFile>,
    /// The id under which the Hub has the repository now, if it differs from the requested one; `None` = it is the same.
    pub renamed_to: Option<String>,
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
    #[serde(default)]
    id: Option<String>,
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
    pub fn info<'a>(&'a self, repo: &'a Repo) -> BoxFuture<'a, Result<RepoInfo, HubError>> {
        Box::pin(async move {
            let mut url = self.info_url(repo.kind, repo.id(), repo.revision())?;
            url.set_query(Some("blobs=true"));
            let bytes = match self.read(repo, &url, None).await {
                Err(HubError::NoRepository { .. }) if self.is_other_kind(repo).await => {
                    let (found, wanted) = (repo.kind.other().noun(), repo.kind.noun());
                    return Err(HubError::WrongKind { repo: repo.id().to_owned(), found, wanted });
                }
                read => read?,
            };
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
            let renamed_to = answer.id.filter(|id| id != repo.id());
            Ok(RepoInfo { commit: answer.sha, is_restricted, is_private: answer.private, files, renamed_to })
        })
    }

    fn info_url(&self, kind: RepoKind, id: &str, revision: &str) -> Result<url::Url, HubError> {
        let start = ["api", kind.plural()].into_iter();
        self.url(start.chain(id.split('/')).chain(["revision", revision]))
    }

    /// Asks the Hub once whether a repository of the other kind has this id.
    async fn is_other_kind(&self, repo: &Repo) -> bool {
        let Ok(url) = self.info_url(repo.kind.other(), repo.id(), "main") else { return false };
        self.open(repo, &url, None, 0).await.is_ok()
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
