//! Reads the cache that huggingface_hub maintains, in place and without writing: `models--org--name/` with `refs/<revision>` (a
//! commit) and `snapshots/<commit>/<path>`, links to `blobs/<hash>`. A snapshot may lack files: after an interruption, or because
//! nothing has read them. So every file that a model or a dataset needs is located and compared with its hash.

use std::fs::File;
use std::path::{Path, PathBuf};

use futures::future::BoxFuture;
use serde_json::Value;

use crate::error::HubError;
use crate::hash::FileHash;
use crate::id::{Repo, RepoKind, is_safe_path};
use crate::info::RepoFile;
use crate::part::{hash, is_complete};

/// A model or dataset in the cache of huggingface_hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// Commit of the repository as 40 hexadecimal digits.
    pub commit: String,
    /// Folder with the repository's files at this commit.
    pub path: PathBuf,
}

impl Cached {
    /// Lists the files of the snapshot by path. Their hashes are the names of their blobs, so the content is not read, except for a
    /// file that is not a link to a blob. [`Cached::verified`] checks the content.
    ///
    /// # Errors
    /// Fails when a file cannot be read.
    pub fn files(&self) -> BoxFuture<'_, Result<Vec<RepoFile>, HubError>> {
        Box::pin(async move {
            let mut names = Vec::new();
            list_files(&self.path, "", &mut names).map_err(HubError::disk("list the files of", &self.path))?;
            names.sort_unstable();
            let mut files = Vec::with_capacity(names.len());
            for name in names {
                let path = self.path.join(&name);
                let blob = std::fs::canonicalize(&path).map_err(HubError::disk("open", &path))?;
                let opened = File::open(&blob).map_err(HubError::disk("open", &blob))?;
                let size_bytes = opened.metadata().map_err(HubError::disk("read", &blob))?.len();
                let hash = match blob_hash(&blob) {
                    Some(hash) => hash,
                    None => hash(opened, blob, FileHash::Git([0; 20]), size_bytes).await?,
                };
                files.push(RepoFile { path: name, size_bytes, hash });
            }
            Ok(files)
        })
    }

    /// Returns the path of a file in the snapshot if its content is the one that the Hub announces; `None` if it is missing or
    /// differs.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn verified<'a>(&'a self, file: &'a RepoFile) -> BoxFuture<'a, Result<Option<PathBuf>, HubError>> {
        Box::pin(async move {
            let path = self.path.join(&file.path);
            Ok(is_complete(&path, file).await?.then_some(path))
        })
    }
}

/// Lists the paths of the files below a folder, without those whose links are broken or whose names are not safe.
fn list_files(folder: &Path, above: &str, names: &mut Vec<String>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{above}{name}");
        // Links to files are followed, links to folders are not: huggingface_hub makes none.
        if entry.file_type()?.is_dir() {
            list_files(&entry.path(), &format!("{name}/"), names)?;
        } else if entry.path().is_file() && is_safe_path(&name) {
            names.push(name);
        }
    }
    Ok(())
}

/// Returns the hash in the name of a blob.
fn blob_hash(blob: &Path) -> Option<FileHash> {
    let name = blob.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    FileHash::sha256(name).or_else(|| FileHash::git(name))
}

/// Finds the cached snapshot of a repository. It may lack files of the repository.
pub fn find_snapshot(cache: &Path, repo: &Repo) -> Option<Cached> {
    let kind = repo.kind.plural();
    let folder = cache.join(format!("{kind}--{}", repo.id().replace('/', "--")));
    let named = std::fs::read_to_string(folder.join("refs").join(repo.revision())).ok();
    let commit = named.map_or_else(|| repo.revision().to_owned(), |commit| commit.trim().to_owned());
    if commit.len() != 40 || !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let path = folder.join("snapshots").join(&commit);
    path.is_dir().then_some(Cached { commit, path })
}

/// Finds the cached files of a model if config, tokenizer and weights are all there. Reads only the config and the weights' index;
/// [`verify_cached`] checks the content.
pub fn find_cached(cache: &Path, repo: &Repo) -> Option<Cached> {
    let is_model = repo.kind == RepoKind::Model;
    find_snapshot(cache, repo).filter(|cached| is_model && required_files(&cached.path).is_some())
}

/// Reads all files that a cached model needs and compares them with the hashes in their blobs' names. Returns the name of the
/// first file that differs. A file that is not a link to a blob (some systems have no links) is not compared.
///
/// # Errors
/// Fails when a file cannot be read.
pub fn verify_cached<'a>(cached: &'a Cached) -> BoxFuture<'a, Result<Option<String>, HubError>> {
    Box::pin(async move {
        for name in required_files(&cached.path).unwrap_or_default() {
            let path = cached.path.join(&name);
            let Ok(blob) = std::fs::canonicalize(&path) else { return Ok(Some(name)) };
            let Some(expected) = blob_hash(&blob) else { continue };
            let file = File::open(&blob).map_err(HubError::disk("open", &blob))?;
            let size_bytes = file.metadata().map_err(HubError::disk("read", &blob))?.len();
            if hash(file, blob, expected, size_bytes).await? != expected {
                return Ok(Some(name));
            }
        }
        Ok(None)
    })
}

/// Returns the file names of a cached model's config, tokenizer and weights; `None` if one of these files is missing.
fn required_files(folder: &Path) -> Option<Vec<String>> {
    let mut names = vec!["config.json".to_owned(), "tokenizer.json".to_owned()];
    if let Ok(index) = std::fs::read(folder.join("model.safetensors.index.json")) {
        let index: Value = serde_json::from_slice(&index).ok()?;
        names.push("model.safetensors.index.json".to_owned());
        let mut shards: Vec<&str> = index["weight_map"].as_object()?.values().filter_map(Value::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        if shards.is_empty() || !shards.iter().all(|shard| is_safe_path(shard)) {
            return None;
        }
        names.extend(shards.into_iter().map(str::to_owned));
    } else {
        names.push("model.safetensors".to_owned());
    }
    // A link to a blob that is missing has no metadata, so `is_file` returns false for it.
    names.iter().all(|name| folder.join(name).is_file()).then_some(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Hasher;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// Creates a cache folder in the layout of huggingface_hub 2.4.0.
    fn cache(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("models--org--name");
        for folder in ["refs", "blobs"] {
            std::fs::create_dir_all(model.join(folder)).unwrap();
        }
        std::fs::create_dir_all(model.join("snapshots").join(COMMIT)).unwrap();
        std::fs::write(model.join("refs/main"), COMMIT).unwrap();
        for (name, bytes) in files {
            let mut hasher = Hasher::new(&FileHash::Git([0; 20]), bytes.len() as u64);
            hasher.update(bytes);
            let blob = hasher.finish().to_string();
            std::fs::write(model.join("blobs").join(&blob), bytes).unwrap();
            let link = model.join("snapshots").join(COMMIT).join(name);
            std::os::unix::fs::symlink(format!("../../blobs/{blob}"), link).unwrap();
        }
        dir
    }

    const WHOLE: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("tokenizer.json", b"{}{}"), ("model.safetensors", b"weights")];

    #[tokio::test]
    async fn a_whole_snapshot_is_found_and_verified() {
        let dir = cache(&WHOLE);
        for revision in ["main", COMMIT] {
            let repo = Repo::new(RepoKind::Model, "org/name", revision).unwrap();
            let cached = find_cached(dir.path(), &repo).unwrap();
            assert_eq!(cached.commit, COMMIT);
            assert_eq!(verify_cached(&cached).await.unwrap(), None);
        }
        let other = Repo::new(RepoKind::Model, "org/name", "v2").unwrap();
        assert_eq!(find_cached(dir.path(), &other), None);
    }

    #[tokio::test]
    async fn the_files_of_a_dataset_are_listed_with_their_hashes_and_a_damaged_one_is_not_taken() {
        let dir = cache(&[("README.md", b"# Rows"), ("train.jsonl", b"{}\n"), ("gone.jsonl", b"1\n")]);
        std::fs::rename(dir.path().join("models--org--name"), dir.path().join("datasets--org--name")).unwrap();
        let repo = Repo::parse(RepoKind::Dataset, "org/name").unwrap();
        let cached = find_snapshot(dir.path(), &repo).unwrap();
        std::fs::remove_file(std::fs::canonicalize(cached.path.join("gone.jsonl")).unwrap()).unwrap();
        std::fs::create_dir(cached.path.join("data")).unwrap();
        std::fs::write(cached.path.join("data/copied.csv"), b"prompt\n").unwrap();
        let files = cached.files().await.unwrap();
        let paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["README.md", "data/copied.csv", "train.jsonl"]);
        assert_eq!(cached.verified(&files[2]).await.unwrap(), Some(cached.path.join("train.jsonl")));
        assert_eq!(find_cached(dir.path(), &repo), None, "only models are found whole");

        let blob = std::fs::canonicalize(cached.path.join("train.jsonl")).unwrap();
        std::fs::write(blob, b"[]\n").unwrap();
        assert_eq!(cached.verified(&files[2]).await.unwrap(), None);
        assert_eq!(cached.files().await.unwrap(), files, "the names of the blobs say the hashes");
    }

    #[tokio::test]
    async fn a_snapshot_that_lacks_a_file_or_holds_other_bytes_is_not_taken() {
        let repo = Repo::parse(RepoKind::Model, "org/name").unwrap();
        assert_eq!(find_cached(cache(&WHOLE[..2]).path(), &repo), None);
        let dir = cache(&[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{}{}"),
            ("model.safetensors.index.json", br#"{"weight_map": {"a": "model-1.safetensors"}}"#),
        ]);
        assert_eq!(find_cached(dir.path(), &repo), None);

        let dir = cache(&WHOLE);
        let cached = find_cached(dir.path(), &repo).unwrap();
        let blob = std::fs::canonicalize(cached.path.join("model.safetensors")).unwrap();
        std::fs::write(blob, b"weighty").unwrap();
        assert_eq!(verify_cached(&cached).await.unwrap(), Some("model.safetensors".to_owned()));
    }
}
